"""Arguments and minibatches that fit takes, and those that it refuses before the first step."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.cases import mlp
from tests.loops import loop_over
from tests.training.test_fit import CASE, N, Recorder, flat_sgd, loader
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer, SparseAdam
from torch.optim.lr_scheduler import (
    CyclicLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from bayesify import (
    ELBO,
    IVON,
    BayesianModule,
    Delta,
    Flipout,
    Gaussian,
    PACBayesObjective,
    PruningSchedule,
    ScaleMixture,
    SpikeAndSlab,
    fit,
    fit_replicas,
    load,
    make_step,
    save,
)
from bayesify.datasets import Passes, TensorLoader
from bayesify.distributions.posteriors import MeanFieldGaussian
from bayesify.training import ConvergenceWarning

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
X = torch.zeros(2, 4)


@loop_over(
    ("batch", "message"),
    [
        ((X.numpy(), X), r"must hold tensors, got an ndarray as inputs; use torch\.as_tensor"),
        ((X, np.zeros(2)), r"must hold tensors, got an ndarray as targets; use"),
        ((X, [0, 1]), r"must hold the targets as a tensor, got a list; use torch\.as_tensor"),
        ((X[:0], X[:0]), r"at least one example, got inputs of shape \(0, 4\); let the loader"),
    ],
)
def test_a_minibatch_holds_tensors_of_some_examples(batch: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        fit(Recorder(CASE.bnn()), [batch], progress=False)


@loop_over(
    ("arguments", "message"),
    [
        ({"lr": "1e-3"}, "lr must be a number, got '1e-3'"),
        (
            {"scheduler": "cosine"},
            "scheduler must be a scheduler of torch, or a.*'cosine'",
        ),
        ({"scheduler": lambda *_: None}, "scheduler must return a scheduler of torch, got None"),
        (
            {"scheduler": lambda optimizer, _: ReduceLROnPlateau(optimizer)},
            "without a metric, got a ReduceLROnPlateau",
        ),
        ({"optimizer": lambda _: None}, "or a function that returns one, got None"),
        ({"train_loader": {"x": X}}, r"minibatches \(inputs, targets\), got a dict; use"),
        ({"train_loader": X.numpy()}, r"minibatches \(inputs, targets\), got a ndarray; use"),
    ],
)
def test_arguments_of_another_type(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        fit(Recorder(CASE.bnn()), **({"train_loader": loader()} | arguments))


def test_a_schedule_lasts_as_long_as_the_training(tmp_path: Path) -> None:
    """It is told before the first step, and not after the last one that the schedule has."""
    made: dict[str, Any] = {
        "scheduler": lambda optimizer, steps: OneCycleLR(optimizer, max_lr=0.1, total_steps=steps),
        "progress": False,
    }
    short = made | {"scheduler": lambda optimizer, _: OneCycleLR(optimizer, 0.1, total_steps=2)}
    elbo = Recorder(CASE.bnn())
    with pytest.raises(
        ValueError, match=r"for the .* steps of the training, got a OneCycleLR of 2"
    ):
        fit(elbo, loader(), epochs=4, **short)
    assert elbo.step == 0
    saved: dict[str, Any] = {"checkpoint_dir": tmp_path, "resume": True}
    fit(Recorder(CASE.bnn()), loader(), epochs=2, **made, **saved)
    with pytest.raises(ValueError, match="resume it with the epochs that it was made for"):
        fit(Recorder(CASE.bnn()), loader(), epochs=4, **made, **saved)
    assert len(fit(Recorder(CASE.bnn()), loader(), epochs=2, **made, **saved)) == 2


def test_a_loader_is_no_generator() -> None:
    def once() -> Any:
        return (pair for pair in loader())

    for arguments in ((once(),), (loader(), once())):
        with pytest.raises(TypeError, match=r"got a generator, which ends.*list.*IterableDataset"):
            fit(Recorder(CASE.bnn()), *arguments)
    assert len(fit(Recorder(CASE.bnn()), list(loader()), epochs=2, progress=False)) == 2


@loop_over(
    ("dataset", "message"),
    [
        (
            [{"image": 1.0, "label": 0}],
            r'targets under "labels", got the names image, label; rename',
        ),
        (
            [(torch.zeros(4), 0, 0)],
            r"got 3 \(Tensor, Tensor, Tensor\); let the loader's collate_fn",
        ),
        ([torch.zeros(4)], r"got 1 \(Tensor\)"),
    ],
)
def test_a_minibatch_that_is_no_pair(dataset: Any, message: str) -> None:
    elbo = Recorder(CASE.bnn(), num_data=1)
    with pytest.raises(ValueError, match=message):
        fit(elbo, DataLoader(dataset), epochs=1)
    assert not elbo.inputs


class Groups(BatchSampler):
    """Minibatches of two neighbours each; its sampler draws the groups."""

    def __iter__(self) -> Iterator[list[int]]:
        return ([2 * group, 2 * group + 1] for group in self.sampler)


def test_a_batch_sampler_may_draw_a_part_of_the_data() -> None:
    data = TensorDataset(*CASE.data(N))

    def run(batches: Any, num_data: int, **options: Any) -> None:
        loader = DataLoader(data, batch_sampler=batches)
        fit(ELBO(CASE.bnn(), num_data=num_data, **options), loader, epochs=1, progress=False)

    part = BatchSampler(SubsetRandomSampler(range(8)), 4, drop_last=False)
    run(part, 8)
    with pytest.raises(ValueError, match="training examples, 8 or 22, got 9"):
        run(part, 9)
    twice = RandomSampler(data, replacement=True, num_samples=2 * N)
    geometric: Any = {"num_batches": 4, "kl_weighting": "geometric"}
    with pytest.raises(ValueError, match="got a loader of 44 examples an epoch"):
        run(BatchSampler(twice, 11, drop_last=False), N, **geometric)
    # Neither shows which examples it was made of: minibatches of groups, and a list of them.
    run(Groups(RandomSampler(range(3)), 1, drop_last=False), 6)
    run([[0, 1], [2, 3]], 4)
    run([[0, 1], [2, 3]], 4, num_batches=2, kl_weighting="geometric")


@pytest.mark.parametrize("name", ["rho_lr_scale", "kl_warmup_epochs", "kl_warmup_power", "lr"])
def test_text_for_a_number_is_an_error(name: str) -> None:
    options: dict[str, Any] = {name: "2"}
    elbo = ELBO(BayesianModule(torch.nn.Linear(3, 2)), num_data=4)
    examples = TensorLoader(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long), 2)
    with pytest.raises(TypeError, match=f"{name} must be a number, got '2'"):
        fit(elbo, examples, epochs=1, **options)


def test_text_for_a_temperature_is_an_error() -> None:
    wrong: Any = "1"
    with pytest.raises(TypeError, match="temperature must be a number, got '1'"):
        ELBO(BayesianModule(torch.nn.Linear(3, 2)), num_data=4, temperature=wrong)


@loop_over(
    ("options", "message"),
    [
        ({"epochs": -1}, "epochs must be at least 0, got -1"),
        ({"epochs": 1.5}, "epochs must be a whole number, got 1.5"),
        ({"kl_warmup_epochs": -0.5}, "kl_warmup_epochs must be at least 0 and finite, got -0.5"),
        ({"kl_warmup_epochs": math.nan}, "kl_warmup_epochs must be at least 0 and finite, got nan"),
        ({"kl_warmup_power": 0.0}, "kl_warmup_power must be positive and finite, got 0.0"),
        ({"rho_lr_scale": 0.0}, "rho_lr_scale must be positive and finite, got 0.0"),
        ({"rho_lr_scale": math.inf}, "rho_lr_scale must be positive and finite, got inf"),
        ({"optimizer": "instance", "rho_lr_scale": 2.0}, "rho_lr_scale needs fit to make the opti"),
        ({"optimizer": "flat", "rho_lr_scale": 2.0}, "parameter group of its own"),
        ({"lr": 0.0}, "lr must be positive and finite, got 0.0"),
        ({"lr": math.nan}, "lr must be positive and finite, got nan"),
        ({"optimizer": "flat", "lr": 0.1}, "lr is the rate of the default optimiser; leave it out"),
        ({"posterior": Delta, "rho_lr_scale": 2.0}, "needs a posterior with a rho"),
        ({"num_data": 23}, "num_data must be the number of training examples, 22, got 23; the KL"),
        (
            {"num_batches": 4, "kl_weighting": "geometric"},
            "num_batches must be the loader's 3, got",
        ),
        (
            {"num_batches": 6, "kl_weighting": "geometric", "loader": Passes(loader(), 2)},
            "must bring each of the 22 examples once, got a loader of 44 examples an epoch",
        ),
        ({"loader": []}, "training loader must bring at least one minibatch, got none"),
        ({"validation_loader": []}, "validation loader must bring at least one minibatch, got"),
    ],
)
@loop_over("torchs", [False, True])
def test_errors_come_before_the_first_step(
    options: dict[str, Any], message: str, torchs: bool, tmp_path: Path
) -> None:
    options = dict(options)
    posterior = options.pop("posterior", MeanFieldGaussian)
    bnn = BayesianModule(mlp(), posterior=posterior)
    own = ("num_data", "num_batches", "kl_weighting")
    elbo = Recorder(bnn, **{name: options.pop(name) for name in own if name in options})
    data: Any = DataLoader(TensorDataset(*CASE.data(N)), 8) if torchs else loader()
    named = {"instance": SGD(bnn.parameters()), "flat": flat_sgd}
    if "optimizer" in options:
        options["optimizer"] = named[options["optimizer"]]
    kind = TypeError if options.get("epochs") == 1.5 else ValueError
    with pytest.raises(kind, match=message):
        fit(elbo, options.pop("loader", data), checkpoint_dir=tmp_path / "run", **options)
    assert not elbo.inputs
    assert not (tmp_path / "run").exists()


@loop_over("num_data", [N, 10, 11])
def test_a_sampler_may_take_a_part_of_the_data(num_data: int) -> None:
    data = TensorDataset(*CASE.data(N))
    part = DataLoader(data, 5, sampler=SubsetRandomSampler(range(10)))
    elbo = Recorder(CASE.bnn(), num_data=num_data)
    if num_data == 11:
        with pytest.raises(
            ValueError, match="must be the number of training examples, 10 or 22, got 1"
        ):
            fit(elbo, part, epochs=1)
    else:
        assert fit(elbo, part, epochs=1)[0]["kl"] > 0


def test_no_epochs_change_nothing(tmp_path: Path) -> None:
    elbo = Recorder(CASE.bnn())
    assert fit(elbo, loader(), epochs=0, checkpoint_dir=tmp_path) == []
    assert torch.equal(elbo.bnn.posterior.mean, CASE.bnn().posterior.mean)
    assert list(tmp_path.iterdir()) == []


def test_no_epochs_have_no_warm_up(recwarn: pytest.WarningsRecorder) -> None:
    assert fit(Recorder(CASE.bnn()), loader(), epochs=0, kl_warmup_epochs=1) == []
    assert not recwarn.list


def test_schedulers_and_optimisers_that_cannot_train_are_refused() -> None:
    elbo = Recorder(CASE.bnn())
    schedule = StepLR(SGD(elbo.parameters(), lr=0.1), 1)
    for options in ({}, {"optimizer": SGD(elbo.parameters(), lr=0.1)}):
        with pytest.raises(ValueError, match="of the optimizer that trains, got that of another"):
            fit(elbo, loader(), scheduler=schedule, **options)
    with pytest.raises(TypeError, match="of one pass, got LBFGS, whose step needs a closure"):
        fit(elbo, loader(), optimizer=LBFGS(elbo.parameters()))
    with pytest.raises(TypeError, match="of one pass, got LBFGS, whose step needs a closure"):
        make_step(elbo, LBFGS(elbo.parameters()))
    for factory in (LBFGS, partial(LBFGS, lr=0.1)):
        with pytest.raises(TypeError, match="of one pass, got LBFGS, whose step needs a closure"):
            fit(elbo, loader(), optimizer=factory)
    differentiable = partial(SGD, lr=0.1, differentiable=True)
    with pytest.raises(ValueError, match="must not be differentiable, got differentiable=True"):
        fit(elbo, loader(), optimizer=differentiable)
    with pytest.raises(ValueError, match="must not be differentiable, got differentiable=True"):
        make_step(elbo, differentiable(elbo.parameters()))
    for name in ("Muon", "SparseAdam"):
        kind = getattr(torch.optim, name, torch.optim.SparseAdam)
        with pytest.raises(TypeError, match=f"mean and rho, got {kind.__name__}, which"):
            fit(elbo, loader(), optimizer=partial(kind, lr=0.1))
    with pytest.raises(TypeError, match="got SparseAdam, which needs sparse gradients"):
        make_step(elbo, SparseAdam(elbo.parameters()))
    assert not elbo.inputs


class FallingRate(LRScheduler):
    """A schedule of one's own that has one rate for all groups."""

    def get_lr(self) -> list[float]:
        return [0.05 * 0.9**self.last_epoch] * len(self.optimizer.param_groups)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer, _: FallingRate(optimizer),
        lambda optimizer, steps: OneCycleLR(optimizer, max_lr=0.05, total_steps=steps),
        lambda optimizer, _: CyclicLR(optimizer, 0.0, 0.05, cycle_momentum=False),
    ],
)
def test_a_schedule_of_one_rate_for_all_undoes_no_scale(schedule: Any) -> None:
    elbo = Recorder(CASE.bnn())
    options: dict[str, Any] = {"epochs": 1, "scheduler": schedule, "rho_lr_scale": 10.0}
    message = "rho_lr_scale must be 1 under a (FallingRate|OneCycleLR|CyclicLR) that sets one"
    with pytest.raises(ValueError, match=message):
        fit(elbo, loader(), **options)
    with pytest.raises(ValueError, match=message):
        fit_replicas([elbo], loader(), **options)
    assert not elbo.inputs
    fit(elbo, loader(), **{**options, "rho_lr_scale": 1.0})


def test_a_warm_up_from_zero_keeps_the_scale_of_rho() -> None:
    elbo = Recorder(CASE.bnn())

    def schedule(optimizer: Optimizer, _: int) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: step / 10)

    fit(elbo, loader(), epochs=1, scheduler=schedule, rho_lr_scale=10.0)


def test_such_a_schedule_takes_a_rate_for_rho() -> None:
    def schedule(optimizer: Optimizer, steps: int) -> OneCycleLR:
        return OneCycleLR(optimizer, max_lr=[0.05, 0.5], total_steps=steps)

    elbo, other = Recorder(CASE.bnn()), Recorder(CASE.bnn())
    fit(elbo, loader(), epochs=1, scheduler=schedule)
    fit(other, loader(), epochs=1, scheduler=schedule, rho_lr_scale=10.0)
    assert torch.equal(elbo.bnn.posterior.rho, other.bnn.posterior.rho)


def test_geometric_weights_have_no_derivative_in_log_std() -> None:
    elbo = ELBO(CASE.bnn(), num_data=N, kl_weighting="geometric", num_batches=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        history = fit(elbo, loader(), epochs=1, progress=False)
    assert history[-1]["std_residual"] is None
    assert history[-1]["std_residual_worst"] is None


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    elbo = ELBO(
        CASE.bnn(),
        num_data=np.int64(N),
        num_samples=np.int64(1),
        kl_weighting="geometric",
        num_batches=np.int64(3),
    )
    elbo.num_data, elbo.num_samples = np.int64(N), np.int64(1)
    elbo.temperature, elbo.bnn.seed = np.float32(0.5), np.int64(3)
    fit(
        elbo,
        loader(),
        epochs=np.int64(1),
        lr=np.float32(0.01),
        rho_lr_scale=np.float32(2.0),
        kl_warmup_epochs=np.int64(1),
        kl_warmup_power=np.float32(2.0),
        checkpoint_dir=tmp_path,
    )
    assert (tmp_path / "checkpoint.safetensors").exists()
    fit_replicas(
        [ELBO(CASE.bnn(), num_data=N)],
        loader(),
        epochs=torch.tensor(1),  # type: ignore[arg-type]
        checkpoint_dir=tmp_path / "replicas",
    )
    assert (tmp_path / "replicas" / "replica-0" / "checkpoint.safetensors").exists()


PRIORS = (
    ScaleMixture(np.float32(0.5), np.float32(1.0), np.float32(0.1)),
    SpikeAndSlab(np.float32(0.5), np.float32(1.0), np.float32(0.1)),
)
PRUNING = PruningSchedule(
    np.float32(0.5), np.int64(1), np.float64(2.0), np.float32(2.0), np.int64(2)
)


def with_ivon(elbo: ELBO) -> IVON:
    betas = (np.float32(0.9), np.float32(0.99))
    return IVON(elbo, np.float32(0.1), betas, deterministic_lr=np.float32(0.1))


def with_certificate(bnn: BayesianModule) -> PACBayesObjective:
    numbers: dict[str, Any] = {"delta": np.float32(0.1), "p_min": np.float32(1e-4)}
    return PACBayesObjective(bnn, num_data=N, num_bound=np.int64(N - 1), **numbers)


@pytest.mark.parametrize("part", ["scale mixture", "spike and slab", "pruning", "ivon", "bound"])
def test_what_fit_is_given_may_have_numbers_of_numpy(part: str, tmp_path: Path) -> None:
    prior = {"scale mixture": PRIORS[0], "spike and slab": PRIORS[1]}.get(part, Gaussian(0.5))
    bnn = BayesianModule(CASE.net(), prior=prior, seed=0)
    elbo = with_certificate(bnn) if part == "bound" else ELBO(bnn, num_data=N)
    fit(
        elbo,
        loader(),
        epochs=3,
        optimizer=with_ivon(elbo) if part == "ivon" else None,
        pruning=PRUNING if part == "pruning" else None,
        checkpoint_dir=tmp_path,
    )
    assert (tmp_path / "checkpoint.safetensors").exists()
    save(bnn, tmp_path / "network.safetensors")
    load(tmp_path / "network.safetensors", CASE.net())


def test_a_loader_of_ready_minibatches_does_not_tell_the_number_of_data() -> None:
    class Ready(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> Any:
            return torch.ones(20, 3) * index, torch.arange(20) % 2

    loader = torch.utils.data.DataLoader(Ready(), batch_size=None)
    elbo = ELBO(BayesianModule(torch.nn.Linear(3, 2)), num_data=100)
    [row] = fit(elbo, loader, epochs=1, progress=False)
    assert row["data_per_second"] is not None
    assert elbo.step == 5


def test_the_default_optimizer_takes_complex_parameters() -> None:
    class Complex(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 2)
            self.factor = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * self.factor).real

    elbo = ELBO(BayesianModule(Complex(), exclude=("factor",)), num_data=20)
    before = elbo.bnn.net.factor.detach().clone()  # type: ignore[union-attr,operator]
    fit(elbo, [(torch.ones(20, 3), torch.arange(20) % 2)], epochs=1, progress=False)
    assert not torch.equal(elbo.bnn.net.factor.detach(), before)  # type: ignore[union-attr,operator]


@loop_over("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_that_are_switched_off_are_an_error(mode: Any) -> None:
    class Leaving(list[Any]):
        """A loader within whose block the minibatches are used, too."""

        def __iter__(self) -> Iterator[Any]:
            with torch.no_grad():
                yield from super().__iter__()

    elbo = Recorder(CASE.bnn())
    before = elbo.bnn.posterior.mean.detach().clone()
    step = make_step(elbo, SGD(elbo.parameters(), lr=0.1))
    with mode():
        for train in (
            lambda: fit(elbo, loader(), progress=False),
            lambda: fit_replicas([elbo], loader(), progress=False),
            lambda: step(*CASE.data(N)),
        ):
            with pytest.raises(RuntimeError, match=r"needs gradients, but.*switched off; leave"):
                train()
    with pytest.raises(RuntimeError, match="where a loader or a callback begins them"):
        fit(elbo, Leaving(loader()), progress=False)
    assert torch.equal(elbo.bnn.posterior.mean, before)
    assert not elbo.inputs


def test_what_is_frozen_as_a_whole_cannot_be_trained() -> None:
    for posterior in (MeanFieldGaussian, Delta):
        elbo = ELBO(BayesianModule(CASE.net(), posterior=posterior), num_data=N)
        elbo.requires_grad_(False)
        with pytest.raises(ValueError, match="must be parameters to train, but all"):
            fit(elbo, loader(), progress=False)


@loop_over("wrong", [{"rho_lr_scale": 2.0, "optimizer": flat_sgd}, {}])
def test_a_refused_run_leaves_the_network_as_it_was(wrong: Any, tmp_path: Path) -> None:
    """Its mask and its estimator too."""
    fit(Recorder(CASE.bnn()), loader(), epochs=1, checkpoint_dir=tmp_path, progress=False)
    bnn = CASE.bnn()
    before = bnn.estimator
    with pytest.raises((ValueError, FileExistsError)):
        fit(
            Recorder(bnn),
            loader(),
            epochs=2,
            checkpoint_dir=tmp_path,
            pruning=PruningSchedule(0.5, from_epoch=0, until_epoch=1),
            estimator=Flipout(),
            progress=False,
            **wrong,
        )
    assert bnn.posterior.mask is None
    assert bnn.estimator is before
