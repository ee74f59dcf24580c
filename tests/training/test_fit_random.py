"""fit(): randomness as a function of (seed, epoch), point estimates, the final warning."""

from __future__ import annotations

import itertools
import math
import random
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.cases import Case, mlp
from tests.loops import loop_over
from tests.training.test_exact_posterior import correlated_regression
from tests.training.test_fit import CASE, N, Recorder, loader
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
)

from bayesify import ELBO, BayesianModule, Delta, Gaussian, GaussianLikelihood, fit, fit_replicas
from bayesify.datasets import TensorLoader
from bayesify.distributions.posteriors import MeanFieldGaussian
from bayesify.module.pruning import prune
from bayesify.noise.keys import Stream, derived_seed
from bayesify.reproduce import read_results
from bayesify.training import ConvergenceWarning
from bayesify.training.convergence import STD_RESIDUAL_LIMIT, residual_advice, std_residual
from bayesify.training.minibatches import minibatches

RESULTS = Path(__file__).resolve().parents[2] / "results"
ignored = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
quick: Any = {"epochs": 2, "optimizer": partial(SGD, lr=0.1)}


# ------------------------------------------------------------------------------------ randomness


class Augmented(Dataset[Any]):
    """Data that are changed at random, by each global generator, when they are fetched."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = CASE.data(N)
        drawn = random.random() + np.random.random()  # noqa: NPY002
        return x[index] + 0.1 * drawn + 0.1 * torch.randn(3, dtype=x.dtype), y[index]


class Eager(list[Any]):
    """Minibatches whose order is drawn as soon as they are asked for, and not with the first."""

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self))
        return iter([self[index] for index in order])


def torchs_loader(kind: str, **workers: Any) -> Any:
    """torch's own loaders, each with another owner of the randomness."""
    data = TensorDataset(*CASE.data(N))
    own = torch.Generator()
    own.seed()  # of the moment: nothing may depend on it
    if kind == "global generator":
        return DataLoader(data, 8, shuffle=True, **workers)
    if kind == "loader's generator":
        return DataLoader(data, 8, shuffle=True, generator=own, **workers)
    if kind == "sampler's generator":
        return DataLoader(data, 8, sampler=RandomSampler(data, generator=own), **workers)
    if kind == "subset":
        return DataLoader(data, 8, sampler=SubsetRandomSampler(range(N)), **workers)
    if kind == "batch sampler's generator":
        sampler = RandomSampler(data, generator=own)
        batches = BatchSampler(sampler, 8, drop_last=False)
        return DataLoader(data, batch_sampler=batches, **workers)
    if kind == "eager":
        return Eager(zip(*(part.split(2) for part in CASE.data(N)), strict=True))
    assert kind == "augmented"
    return DataLoader(Augmented(), 8, shuffle=True)


OF_TORCH = [
    "global generator", "loader's generator", "sampler's generator", "subset",
    "batch sampler's generator",
]  # fmt: skip
KINDS = [*OF_TORCH, "augmented", "eager"]


def trained_on(data: Any, *, seed: int = 4, net: nn.Module | None = None) -> Recorder:
    """A network after training that began at a random place of every generator."""
    torch.seed()
    elbo = Recorder(CASE.bnn(net, seed=seed))
    fit(elbo, data, **quick)
    return elbo


@ignored
@loop_over("kind", [*KINDS, "ours"])
def test_the_order_of_the_data_is_a_function_of_seed_and_epoch(kind: str) -> None:
    def make() -> Any:
        return loader(shuffle=True) if kind == "ours" else torchs_loader(kind)

    one, two = trained_on(make()), trained_on(make())
    assert torch.equal(torch.cat(one.inputs), torch.cat(two.inputs))
    assert torch.equal(one.bnn.posterior.mean, two.bnn.posterior.mean)
    half = len(one.inputs) // 2
    first, second = torch.cat(one.inputs[:half]), torch.cat(one.inputs[half:])
    assert not torch.equal(first, second)
    assert not torch.equal(first, CASE.data(N)[0])
    if kind == "augmented":
        return
    assert torch.equal(first.sum(1).sort().values, second.sum(1).sort().values)
    if kind != "ours":  # whose order is of its own seed
        assert not torch.equal(torch.cat(trained_on(make(), seed=5).inputs[:half]), first)
        # The same loader once more: nothing is left in it from the first training.
        again = make()
        assert torch.equal(torch.cat(trained_on(again).inputs), torch.cat(one.inputs))
        assert torch.equal(torch.cat(trained_on(again).inputs), torch.cat(one.inputs))


# Other tests may have loaded JAX, which warns of its threads; the workers do not use it.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@ignored
@loop_over("kind", OF_TORCH)
@pytest.mark.parametrize("persist", [False, True])
def test_workers_bring_the_order_of_no_workers(kind: str, *, persist: bool) -> None:
    inputs = torch.cat(trained_on(torchs_loader(kind)).inputs)
    data = torchs_loader(kind, num_workers=1, persistent_workers=persist)
    own = data.generator
    assert torch.equal(torch.cat(trained_on(data).inputs), inputs)
    assert data.generator is own, "the loader is left as it was"


class Drawing(Sampler[int]):
    """Draws the examples one by one, from the global generator."""

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(N, ())) for _ in range(len(self)))

    def __len__(self) -> int:
        return 5 * 8


class Wrapped:
    """A loader within another, as Lightning's Fabric has it."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.__dict__.update(vars(loader))
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


def epochs_of(loader: Any, epochs: Sequence[int], skip: int = 0) -> list[Tensor]:
    """The inputs of minibatches in some epochs."""
    drawn = [minibatches(loader, seed=4, epoch=epoch, skip=skip) for epoch in epochs]
    return [pair[0] for epoch in drawn for _, pair in epoch]


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_workers_and_the_first_minibatch_draw_from_streams_of_their_own() -> None:
    data = TensorDataset(*CASE.data(N))
    found = epochs_of(DataLoader(data, 8, sampler=Drawing(), num_workers=1), [0])
    assert len(found) == 5
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(found, 2))


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_an_epoch_of_workers_is_the_same_in_a_new_process(*, is_wrapped: bool) -> None:
    """As in a run that is resumed, also within an epoch and with another number of workers."""

    def make(**workers: Any) -> Any:
        loader = torchs_loader("global generator", **workers)
        return Wrapped(loader) if is_wrapped else loader

    persistent: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
    whole = epochs_of(make(**persistent), [0, 1])
    again = epochs_of(make(**persistent), [1])
    assert torch.equal(torch.cat(again), torch.cat(whole[3:]))
    if not is_wrapped:
        for workers in (0, 2):
            rest = epochs_of(make(num_workers=workers), [1], skip=2)
            assert torch.equal(torch.cat(rest), torch.cat(whole[5:]))


def with_dropout() -> nn.Module:
    return nn.Sequential(*mlp()[:2], nn.Dropout(0.5), mlp()[2])


@ignored
def masks_of(steps: tuple[int, ...], seed: int) -> list[Tensor]:
    """The dropout masks of some steps of a long epoch."""
    loader = [None] * (max(steps) + 1)
    drawn = minibatches(loader, seed=seed, epoch=0, skip=0)
    return [F.dropout(torch.ones(100)) for step, _ in drawn if step in steps]


def test_steps_of_a_long_run_share_no_dropout_masks() -> None:
    """PyTorch keeps 32 bits of a seed on the CPU, in which the seeds of these steps agree."""
    steps = (57374, 61466)
    seeds = [derived_seed(1, Stream.DROPOUT, step) for step in steps]
    assert len({seed % 2**32 for seed in seeds}) == 1
    as_before = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]
    assert torch.equal(as_before[0][24:], as_before[1][24:]), "what was wrong"
    one, other = masks_of(steps, seed=1)
    assert not torch.equal(one, other)
    assert torch.equal(masks_of(steps[:1], seed=1)[0], one)


def test_dropout_is_a_function_of_seed_and_epoch_and_off_in_validation() -> None:
    point = Case("gaussian", "delta", "categorical")  # no other noise than dropout's
    means = []
    for seed in (4, 4, 5):
        torch.seed()
        elbo = Recorder(point.bnn(with_dropout(), seed=seed))
        rows = fit(elbo, loader(), loader(5), **quick)
        means.append(elbo.bnn.posterior.mean.detach())
        said = elbo.bnn.to_module().eval()(CASE.data(N)[0]).detach()
        expected = float(nn.functional.cross_entropy(said, CASE.data(N)[1]))
        assert rows[-1]["validation_nll"] == pytest.approx(expected, rel=1e-12)
    assert torch.equal(means[0], means[1])
    assert not torch.equal(means[0], means[2])
    # Masks differ between epochs and between minibatches of one epoch.
    frozen = Recorder(point.bnn(with_dropout()))
    same = TensorLoader(*(torch.cat([part[:8]] * 3)[:N] for part in CASE.data(N)), 8, shuffle=False)
    fit(frozen, same, epochs=2, optimizer=partial(SGD, lr=0.0))
    outputs = [each for each in frozen.outputs if each.shape[1] == 8]
    assert len(outputs) == 4
    assert len({float(each.sum()) for each in outputs}) == 4


@ignored
@loop_over("kind", [*KINDS, "augmented validation", "replicas", "replicas with a loader each"])
def test_global_generators_are_left_as_they_were(kind: str) -> None:
    def drawn() -> list[Any]:
        return [*torch.rand(5), *(random.random() for _ in range(5)), *np.random.randn(5)]  # noqa: NPY002

    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    expected = drawn()
    random.setstate(before[0])
    np.random.set_state(before[1])  # noqa: NPY002
    torch.set_rng_state(before[2])
    elbos = [ELBO(CASE.bnn(with_dropout(), seed=seed), num_data=N) for seed in (1, 2)]
    augmented = torchs_loader("augmented")
    if kind == "augmented validation":
        fit(elbos[0], loader(), augmented, **quick)
    elif kind == "replicas":
        fit_replicas(elbos, augmented, **quick)
    elif kind == "replicas with a loader each":
        fit_replicas(elbos, [augmented, torchs_loader("augmented")], **quick)
    else:
        fit(elbos[0], torchs_loader(kind), loader(), **quick)
    assert drawn() == expected


@ignored
def test_draws_of_validation_are_a_function_of_seed_and_epoch() -> None:
    def measured(seed: int) -> list[Any]:
        random.seed()
        np.random.seed()  # noqa: NPY002
        torch.seed()
        elbo, data = Recorder(CASE.bnn(seed=seed)), torchs_loader("augmented")
        options = {**quick, "optimizer": partial(SGD, lr=0.0)}
        return [row["validation_nll"] for row in fit(elbo, loader(), data, **options)]

    first = measured(4)
    assert first[0] != first[1]
    assert measured(4) == first
    assert measured(5) != first


@pytest.mark.parametrize("kind", ["random", "numpy"])
def test_python_and_numpy_are_seeded_at_each_step_whatever_was_skipped(kind: str) -> None:
    draw = random.random if kind == "random" else np.random.random
    data: Any = [None] * 4

    def drawn(**changed: Any) -> list[float]:
        draw()  # what else the program draws
        settings = {"seed": 1, "epoch": 0, "skip": 0, **changed}
        return [draw() for _ in minibatches(data, **settings)]

    whole = drawn()
    assert len(set(whole)) == 4
    assert drawn(skip=2) == whole[2:]
    for other in ({"seed": 2}, {"epoch": 1}, {"rank": 1}):
        assert not set(drawn(**other)) & set(whole)


@ignored
def test_ctrl_c_is_handled_as_before_afterwards_and_threads_may_train() -> None:
    before = signal.getsignal(signal.SIGINT)
    trained = trained_on(loader())
    assert signal.getsignal(signal.SIGINT) is before
    results: list[Recorder] = []
    thread = threading.Thread(target=lambda: results.append(trained_on(loader())))
    thread.start()
    thread.join()
    assert torch.equal(results[0].bnn.posterior.rho, trained.bnn.posterior.rho)


# -------------------------------------------------------------------------------- point estimates


def test_plain_sgd_is_a_loop_written_by_hand_bit_for_bit() -> None:
    x, y = CASE.data(N)
    for dtype, momentum in ((torch.float32, 0.9), (torch.float64, 0.0)):
        net = mlp(dtype, seed=3)
        elbo = ELBO(BayesianModule(net, posterior=Delta), num_data=N, temperature=0.0)
        data = TensorLoader(x.to(dtype), y, 8, seed=5)
        rows = fit(elbo, data, epochs=3, optimizer=partial(SGD, lr=0.2, momentum=momentum))
        optimizer = SGD(net.parameters(), lr=0.2, momentum=momentum)
        for epoch in range(3):
            data.set_epoch(epoch)
            for inputs, targets in data:
                log_probs = net(inputs).log_softmax(-1)
                optimizer.zero_grad()
                (-log_probs.gather(-1, targets.unsqueeze(-1)).mean()).backward()
                optimizer.step()
        trained = elbo.bnn.to_module().state_dict()
        assert all(torch.equal(trained[name], value) for name, value in net.state_dict().items())
        assert {row["kl"] for row in rows} == {0.0}
        assert rows[-1]["loss"] == rows[-1]["nll"]
        assert rows[-1]["std_residual"] is rows[-1]["std_median"] is None


def test_a_point_estimate_with_a_prior_is_map() -> None:
    model = correlated_regression()
    net = nn.Linear(4, 1, bias=False, dtype=torch.float64)
    bnn = BayesianModule(
        net, posterior=Delta, prior=Gaussian(model.prior_std),
        likelihood=GaussianLikelihood(model.noise_std),
    )  # fmt: skip
    elbo = ELBO(bnn, num_data=len(model.x))
    data = TensorLoader(model.x, model.y, len(model.x))
    row = fit(elbo, data, epochs=400, optimizer=partial(SGD, lr=0.2, momentum=0.9))[-1]
    torch.testing.assert_close(bnn.posterior.mean.detach(), model.mean, rtol=1e-6, atol=1e-9)
    penalty = -torch.distributions.Normal(0, model.prior_std).log_prob(model.mean).sum()
    assert row["penalty"] == pytest.approx(float(penalty))
    assert row["kl"] == 0.0
    assert row["loss"] == pytest.approx(row["nll"] + row["penalty"] / len(model.x), rel=1e-12)
    assert row["train_error"] == pytest.approx(
        float((model.x @ model.mean - model.y[:, 0]).square().mean())
    )


# ----------------------------------------------------------------------------------- convergence


def test_the_residual_is_minus_one_for_entropy_alone_and_zero_at_the_optimum() -> None:
    stds = torch.logspace(-30, 4, 50, dtype=torch.float64)
    q = MeanFieldGaussian(torch.zeros(50, dtype=torch.float64), stds)
    assert std_residual(q) is None
    (-q.log_std.sum() / 7).backward()
    residual = std_residual(q)
    assert residual is not None
    assert residual.mean == pytest.approx(-1 / 7, abs=1e-9)
    # d/dlog std of (std^2 / (2 prior^2) - log std) is 0 at the prior's std, and r^2 - 1 elsewhere.
    for ratio in (1.0, 0.5, 2.0):
        bnn = BayesianModule(mlp(), prior=Gaussian(0.3), init_std=0.3 * ratio)
        small = prune(bnn, 0.5)
        for each in (bnn, small):
            elbo = ELBO(each, num_data=5)
            terms = elbo(*CASE.data(5))
            terms.kl.backward()
            residual = std_residual(each.posterior)
            assert residual is not None
            kept = torch.ones(each.posterior.mean.shape) if each is bnn else each.posterior.mask
            assert kept is not None
            assert sum(residual.counts) == kept.sum()
            assert residual.mean == pytest.approx(ratio**2 - 1, abs=1e-9)
    assert std_residual(prune(bnn, 1.0).posterior) is None


def conjugate(init_std: float) -> tuple[ELBO, TensorLoader]:
    """A linear model with many independent outputs, whose optimum is known."""
    model, copies = correlated_regression(), 48
    net = nn.Linear(4, copies, bias=False, dtype=torch.float64)
    bnn = BayesianModule(
        net, prior=Gaussian(model.prior_std), likelihood=GaussianLikelihood(model.noise_std),
        init_std=init_std,
    )  # fmt: skip
    data = TensorLoader(model.x, model.y.expand(-1, copies), 2)
    return ELBO(bnn, num_data=len(model.x), num_samples=2), data


def test_the_warning_is_silent_after_long_training_and_sounds_where_rho_stood_still() -> None:
    elbo, data = conjugate(0.1)
    with warnings.catch_warnings(action="error"):
        rows = fit(elbo, data, epochs=40, optimizer=partial(Adam, lr=0.02))
    assert abs(rows[-1]["std_residual"]) < 0.1
    exact = correlated_regression().precision.diagonal().rsqrt()
    stds = elbo.bnn.posterior.std.detach().view(-1, 4).mean(0)
    torch.testing.assert_close(stds, exact, rtol=0.1, atol=0.0)
    for init_std, sign, words in ((1e-4, -1, "still growing"), (3.0, 1, "still shrinking")):
        elbo, data = conjugate(init_std)
        with pytest.warns(ConvergenceWarning, match=words):
            rows = fit(elbo, data, epochs=20, optimizer=partial(Adam, lr=0.02), rho_lr_scale=1e-9)
        residual = rows[-1]["std_residual"]
        assert residual * sign > STD_RESIDUAL_LIMIT
        if sign < 0:
            assert residual == pytest.approx(-1.0, abs=0.02)


def test_the_stored_networks_of_the_recipe_have_the_warning() -> None:
    """Unlike the conjugate model above: the weights that carry the signal have not converged."""
    results = read_results(RESULTS / "blundell-comparison")
    bayesian = [r for r in results if r["job"].startswith(("gaussian", "mixture"))]
    assert len(bayesian) >= 20
    for result in bayesian:
        assert any("standard deviations have not converged" in note for note in result["notes"])
        rows = rows_with_residual(result["metrics"])
        assert rows
        for row in rows:
            # The error over the minibatches is not stored: the worst group is taken as exact.
            advice = residual_advice({**row, "std_residual_worst_error": 0.0})
            assert advice is not None
            assert "still growing" in advice


def rows_with_residual(metrics: Any) -> list[dict[str, float]]:
    """The parts of a result that have the residual of the worst group."""
    if isinstance(metrics, dict):
        if "std_residual_worst" in metrics:
            return [metrics]
        metrics = list(metrics.values())
    if not isinstance(metrics, list):
        return []
    return [row for part in metrics for row in rows_with_residual(part)]


@pytest.mark.filterwarnings("ignore::bayesify.training.TargetScaleWarning")
@loop_over("options", [{}, {"temperature": 0.3}])
def test_the_residual_is_in_nats_whatever_weighs_the_kl(options: dict[str, Any]) -> None:
    model = correlated_regression()
    net = nn.Linear(4, 8, bias=False, dtype=torch.float64)
    likelihood = GaussianLikelihood(1e4)  # the data say nothing
    bnn = BayesianModule(net, prior=Gaussian(1.0), likelihood=likelihood, init_std=0.5)
    elbo = ELBO(bnn, num_data=24, **options)
    data = TensorLoader(model.x, model.y.expand(-1, 8), 2)
    with pytest.warns(ConvergenceWarning):
        rows = fit(elbo, data, epochs=2, kl_warmup_epochs=9, optimizer=partial(SGD, lr=0.0))
    assert rows[-1]["std_residual"] == pytest.approx(0.5**2 - 1, abs=1e-3)


def test_a_warm_up_as_long_as_training_is_warned_of() -> None:
    elbo = ELBO(CASE.bnn(), num_data=N)
    with pytest.warns(ConvergenceWarning) as warned:
        fit(elbo, loader(), epochs=2, kl_warmup_epochs=2)
    assert "objective never was the ELBO; shorten the warm-up" in str(warned[0].message)


def test_no_kl_has_no_residual() -> None:
    elbo = Recorder(Case("laplace", "mean-field", "categorical").bnn(), temperature=0.0)
    rows = fit(elbo, loader(), epochs=1)
    assert rows[0]["std_residual"] is None
    assert math.isfinite(rows[0]["kl"])
