"""Each law of the zoo catches the faults that it is there for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.estimators import test_zoo as laws
from tests.estimators.test_zoo_passes import check_modes, check_other_way
from tests.estimators.test_zoo_summary import check_one_weight, check_size, check_summary
from tests.faults import Fault, flipout_fresh_signs, std_outside_the_graph
from tests.loops import loop_over
from tests.zoo import ESTIMATORS, ZOO, Specimen
from torch import Tensor
from torch.func import functional_call

from bayesify import BayesianModule, Estimator, LocalReparameterization, ParameterLayout
from bayesify.distributions.posteriors import MeanFieldGaussian
from bayesify.estimators import Treatment
from bayesify.estimators import local_reparameterization as local
from bayesify.estimators.per_example import _NoiseInjector
from bayesify.module.summary import ModuleSummary
from bayesify.noise.keys import NoiseKey


def ties_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Each name of a shared parameter is a random parameter of its own."""
    right = ParameterLayout.of

    def wrong(*args: Any, **kwargs: Any) -> ParameterLayout:
        layout = right(*args, **kwargs)
        names = tuple(name for names in layout.ties for name in names)
        shapes = tuple(s for s, t in zip(layout.shapes, layout.ties, strict=True) for _ in t)
        ties = tuple((name,) for name in names)
        return dataclasses.replace(layout, names=names, shapes=shapes, ties=ties)

    patch.setattr(ParameterLayout, "of", wrong)


def means_for_one(patch: pytest.MonkeyPatch) -> None:
    """The last parameter is never perturbed."""
    right = BayesianModule.run_with_named

    def wrong(self: BayesianModule, tensors: dict[str, Tensor], *a: Any, **k: Any) -> Any:
        name = self.layout.names[-1]
        mean = self.layout.unflatten(self.posterior.mean)[name]
        return right(self, {**tensors, name: mean}, *a, **k)

    patch.setattr(BayesianModule, "run_with_named", wrong)


def means_in_evaluation(patch: pytest.MonkeyPatch) -> None:
    """No weight is perturbed in evaluation mode without gradients."""
    right = BayesianModule.run_with_named

    def wrong(self: BayesianModule, tensors: dict[str, Tensor], *a: Any, **k: Any) -> Any:
        if not self.training and not torch.is_grad_enabled():
            tensors = self.layout.unflatten(self.posterior.mean)
        return right(self, tensors, *a, **k)

    patch.setattr(BayesianModule, "run_with_named", wrong)


def zeros_for_one(patch: pytest.MonkeyPatch) -> None:
    """The last parameter is taken for zero."""
    right = BayesianModule.run_with_named

    def wrong(self: BayesianModule, tensors: dict[str, Tensor], *a: Any, **k: Any) -> Any:
        name = self.layout.names[-1]
        return right(self, {**tensors, name: torch.zeros_like(tensors[name])}, *a, **k)

    patch.setattr(BayesianModule, "run_with_named", wrong)


def biases_escape_the_watch(patch: pytest.MonkeyPatch) -> None:
    """The placeholder of a bias gets into an operation."""
    right = _NoiseInjector._name_of

    def wrong(self: _NoiseInjector, value: object) -> str | None:
        name = right(self, value)
        return None if name is not None and name.endswith("bias") else name

    patch.setattr(_NoiseInjector, "_name_of", wrong)


def noise_without_step(patch: pytest.MonkeyPatch) -> None:
    """Every call has the noise of the first."""
    normals, numbers = NoiseKey.normals, NoiseKey.numbers

    def first(key: NoiseKey) -> NoiseKey:
        return dataclasses.replace(key, step=0)

    patch.setattr(NoiseKey, "normals", lambda key, *a, **k: normals(first(key), *a, **k))
    patch.setattr(NoiseKey, "numbers", lambda key, *a, **k: numbers(first(key), *a, **k))


def noise_from_elsewhere(patch: pytest.MonkeyPatch) -> None:
    """Noise is no function of the key."""
    generator = torch.Generator()

    def wrong(self: MeanFieldGaussian, key: NoiseKey, samples: range) -> Tensor:
        shape = len(samples), self.num_weights
        return torch.randn(shape, dtype=self.mean.dtype, generator=generator)

    patch.setattr(MeanFieldGaussian, "noise", wrong)


def variance_outside_the_graph(patch: pytest.MonkeyPatch) -> None:
    """The gradient of a local pass does not reach rho."""
    right = local.output_moments

    def wrong(*args: Any) -> tuple[Tensor, Tensor]:
        mean, variance = right(*args)
        return mean, variance.detach()

    patch.setattr(local, "output_moments", wrong)


def variance_doubled(patch: pytest.MonkeyPatch) -> None:
    """A local pass has twice the variance."""
    right = local.output_moments

    def wrong(*args: Any) -> tuple[Tensor, Tensor]:
        mean, variance = right(*args)
        return mean, 2.0 * variance

    patch.setattr(local, "output_moments", wrong)


def network_not_copied(patch: pytest.MonkeyPatch) -> None:
    """The user's own module loses its parameters."""
    patch.setattr("bayesify.module.random_network.copy_network", lambda net: net)


def rho_read_wrong(patch: pytest.MonkeyPatch) -> None:
    """A loaded network has other standard deviations."""
    right = BayesianModule.load_state_dict

    def wrong(self: BayesianModule, *args: Any, **kwargs: Any) -> Any:
        result = right(self, *args, **kwargs)
        with torch.no_grad():
            self.posterior.rho.add_(1e-3)
        return result

    patch.setattr(BayesianModule, "load_state_dict", wrong)


def tensors_left_behind(patch: pytest.MonkeyPatch) -> None:
    """Weights stay in the network after a pass."""
    patch.setattr(
        "bayesify.estimators.stateless.run_with",
        lambda net, tensors, args, kwargs: functional_call(
            net, dict(tensors), args, dict(kwargs), tie_weights=False
        ),
    )


def trace_not_undone(patch: pytest.MonkeyPatch) -> None:
    """Traced passes move buffers and generators on."""
    patch.setattr("bayesify.estimators.tracing.snapshot", lambda _: lambda: None)
    patch.setattr("bayesify.estimators.tracing.kept_generators", nullcontext)


def pass_not_undone(patch: pytest.MonkeyPatch) -> None:
    """So do passes that are run again."""
    patch.setattr("bayesify.module.random_network.snapshot", lambda _: lambda: None)


def all_called(patch: pytest.MonkeyPatch, kind: str) -> None:
    right = BayesianModule.summary

    def wrong(self: BayesianModule, *args: Any, **kwargs: Any) -> ModuleSummary:
        rows = right(self, *args, **kwargs)
        return ModuleSummary(row._replace(treatment=kind) for row in rows)

    patch.setattr(BayesianModule, "summary", wrong)


def all_called_exact(patch: pytest.MonkeyPatch) -> None:
    """The summary calls every parameter exact."""
    all_called(patch, "exact")


def all_called_sampled(patch: pytest.MonkeyPatch) -> None:
    """The summary calls every parameter sampled."""
    all_called(patch, "sampled")


def positions_taken_for_one(patch: pytest.MonkeyPatch) -> None:
    """Weights that meet an example in several positions are called exact, and drawn for each."""
    right = LocalReparameterization.treatment

    def wrong(self: LocalReparameterization, uses: Any) -> Treatment:
        return right(self, [use._replace(positions=use.positions and 1) for use in uses])

    patch.setattr(LocalReparameterization, "treatment", wrong)


def uses_not_counted(patch: pytest.MonkeyPatch) -> None:
    """A weight that is used twice is drawn for each use, and called exact."""
    right = LocalReparameterization.treatment

    def wrong(self: LocalReparameterization, uses: Any) -> Treatment:
        return right(self, uses[:1])

    patch.setattr(LocalReparameterization, "treatment", wrong)


def time_taken_for_data(patch: pytest.MonkeyPatch) -> None:
    """Rows count as data wherever they are as many."""
    patch.setattr("bayesify.estimators.tracing._not_by_row", lambda uses, *_: uses)


def modes_not_told_apart(patch: pytest.MonkeyPatch) -> None:
    """What was seen in one mode is taken to hold in the other."""
    patch.setattr("bayesify.estimators.tracing._trace_key", lambda *_: "any")


Law = Callable[[Specimen, Estimator], None]
BOTH, ALL_KINDS = ("sampling", "local"), ("sampling", "local", "flipout")
FAULTS: list[tuple[Fault, Law, str, tuple[str, ...]]] = [
    (biases_escape_the_watch, laws.check_without_noise, "mlp", ("local", "flipout")),
    (trace_not_undone, laws.check_without_noise, "dropout", ("local", "flipout")),
    (trace_not_undone, laws.check_without_noise, "batch-norm-training", ("local", "flipout")),
    (zeros_for_one, laws.check_without_noise, "lstm", ALL_KINDS),
    (noise_without_step, laws.check_samples, "attention", ALL_KINDS),
    (noise_from_elsewhere, laws.check_samples, "mlp", ("sampling", "sampling-antithetic")),
    (means_in_evaluation, laws.check_samples, "transformer-evaluation", ALL_KINDS),
    (means_for_one, laws.check_each_parameter_counts, "conv1d-replicate", ALL_KINDS),
    (zeros_for_one, laws.check_each_parameter_counts, "lstm", ALL_KINDS),
    (means_for_one, laws.check_gradients_reach, "transformer", ALL_KINDS),
    (std_outside_the_graph, laws.check_gradients_reach, "einsum", ("sampling",)),
    (variance_outside_the_graph, laws.check_gradients_reach, "mlp", ("local",)),
    (ties_forgotten, laws.check_kl, "tied-embedding", ALL_KINDS),
    (network_not_copied, laws.check_users_module, "mlp", ALL_KINDS),
    (tensors_left_behind, laws.check_copies, "lstm", ALL_KINDS),
    (trace_not_undone, check_summary, "batch-norm-training", ("local", "flipout")),
    (all_called_exact, check_summary, "used-twice", BOTH),
    (all_called_exact, check_summary, "embedding", ALL_KINDS),
    (all_called_sampled, check_summary, "used-twice", ("local", "flipout")),
    (time_taken_for_data, check_summary, "shared-over-time", ("flipout",)),
]


@pytest.mark.filterwarnings("ignore::bayesify.module.shared_noise.SharedNoiseWarning")
@loop_over(
    ("fault", "law", "specimen", "estimator"),
    [(*fault[:3], name) for fault in FAULTS for name in fault[3]],
)
def test_a_fault_is_caught(
    fault: Fault, law: Law, specimen: str, estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    law(ZOO[specimen], ESTIMATORS[estimator])
    fault(monkeypatch)
    # An LSTM that is copied with weights left behind in it lacks them: an AttributeError.
    with pytest.raises((AssertionError, AttributeError, RuntimeError)):
        law(ZOO[specimen], ESTIMATORS[estimator])


@loop_over("estimator", ALL_KINDS)
def test_a_wrong_file_is_caught(
    estimator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rho_read_wrong(monkeypatch)
    with pytest.raises(AssertionError):
        laws.check_saving(ZOO["mlp"], ESTIMATORS[estimator], tmp_path / "model.safetensors")


@pytest.mark.filterwarnings("ignore::bayesify.module.shared_noise.SharedNoiseWarning")
@loop_over("estimator", ["local", "flipout"])
def test_a_pass_that_is_not_undone_is_caught(
    estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pass_not_undone(monkeypatch)
    with pytest.raises(AssertionError):
        check_other_way(ESTIMATORS[estimator])


def test_modes_that_are_not_told_apart_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    modes_not_told_apart(monkeypatch)
    with pytest.raises(AssertionError):
        check_modes()


@loop_over(
    ("fault", "name", "estimator"),
    [
        (positions_taken_for_one, "sequence", "local"),
        (positions_taken_for_one, "conv1d", "local"),
        (positions_taken_for_one, "transposed1d-from-one", "local"),
        (uses_not_counted, "several-inputs", "local"),
        (flipout_fresh_signs, "several-inputs", "flipout"),
        (all_called_exact, "sequence", "local-per-position"),
    ],
)
def test_two_weights_for_a_datum_are_caught(
    fault: Fault, name: str, estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_one_weight(name, ESTIMATORS[estimator])


def test_a_wrong_variance_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    variance_doubled(monkeypatch)
    with pytest.raises(AssertionError):
        check_size("linear", ESTIMATORS["local"], monkeypatch)
