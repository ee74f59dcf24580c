"""kill -9, full disks, NaN and foreign checkpoints: what was good stays good."""

from __future__ import annotations

import csv
import errno
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases import Case, mlp
from tests.loops import loop_over
from tests.training.test_fit import CASE, N, flat_sgd
from tests.training.test_fit_random import with_dropout
from tests.training.test_resume import (
    NAME,
    Setup,
    Stop,
    check_same_checkpoint,
    ctrl_c,
    normalised,
    timeless,
)
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

from bayesify import ELBO, BayesianModule, Gaussian, Prior, StreamingELBO, fit, load, save
from bayesify.app.cli import main
from bayesify.datasets import TensorLoader
from bayesify.io import StorageError
from bayesify.training import NonFiniteLossError
from bayesify.training.history import History
from bayesify.training.optimizers import OptimizerFactory
from bayesify.training.schedules import cosine

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
TRAIN = ["train", "mnist", "--hidden", "8", "--limit", "300", "--batch-size", "32"]
TRAIN += ["--threads", "1", "--epochs", "12", "--test-samples", "2", "--out"]


# --------------------------------------------------------------------------------------- kill -9


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without figures and pruning tables, which are tested elsewhere and take seconds."""
    module = importlib.import_module("bayesify.app.runs.finish")
    monkeypatch.setattr(module, "build_figures", lambda *_, **__: {})
    monkeypatch.setattr(module, "prune_table", lambda *_, **__: [])


def train_here(*arguments: str) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([*TRAIN, *arguments])
    assert leaving.value.code == 0


def kill_after_a_checkpoint(*arguments: str, checkpoint: Path, wait: float) -> None:
    """Train in another process and kill it ``wait`` seconds after it wrote a checkpoint."""
    old = checkpoint.read_bytes() if checkpoint.exists() else None
    process = subprocess.Popen(
        [sys.executable, "-c", "from bayesify.app.cli import main; main()", *TRAIN, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while not checkpoint.exists() or checkpoint.read_bytes() == old:
            assert process.poll() is None, "training ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(wait)
        assert process.poll() is None, "training ended before it could be killed"
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_a_run_killed_twice_ends_as_the_one_that_was_not(tmp_path: Path, no_figures: None) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    kill_after_a_checkpoint(str(killed), checkpoint=killed / NAME, wait=0.03)
    assert not (killed / "metrics.json").exists()
    (killed / f".{NAME}.1.tmp").write_bytes(b"what a write leaves that was killed")
    kill_after_a_checkpoint(str(killed), "--resume", checkpoint=killed / NAME, wait=0.0)
    assert not (killed / "metrics.json").exists()
    train_here(str(killed), "--resume")
    train_here(str(whole))
    check_same_checkpoint(killed, whole)
    one, two = (json.loads((each / "metrics.json").read_text()) for each in (killed, whole))
    assert timeless(one) == timeless(two)
    assert one["seconds_train"] > 0
    assert timeless(rows_of(killed)) == timeless(rows_of(whole))
    assert len(rows_of(killed)) == 12


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "history.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# ------------------------------------------------------------------------------------ full disks


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@loop_over("call", ["os.fsync", "pathlib.Path.replace"])
@loop_over("stop", [(1, None), (1, 0)])
def test_a_full_disk_keeps_the_last_checkpoint_whole(
    call: str, stop: tuple[int, int | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(with_dropout)
    path = tmp_path / "a" / NAME
    setup.run(path.parent, epochs=1)
    good = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(call, full)
        with pytest.raises((OSError, KeyboardInterrupt), match="No space left on device"):
            setup.run(path.parent, callback=Stop(ctrl_c, *stop))
    assert path.read_bytes() == good
    assert list(path.parent.iterdir()) == [path]
    assert load(path, with_dropout()).seed == CASE.bnn().seed
    rows = setup.run(path.parent)
    assert timeless(rows) == timeless(setup.run(tmp_path / "b"))
    check_same_checkpoint(tmp_path / "a", tmp_path / "b")


# -------------------------------------------------------------------------------------------- NaN


class Bad(Prior):
    """Of a density 0 everywhere."""

    def log_prob(self, weights: Tensor) -> Tensor:
        return torch.full_like(weights, -math.inf)


class Batches(list[Any]):
    """Minibatches, one of which is bad in the second epoch."""

    def __init__(self, what: str) -> None:
        x, y = Case("gaussian", "mean-field", "gaussian").data(N)
        super().__init__(zip(x.split(8), y.split(8), strict=True))
        self.what, self.epoch = what, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for index, (x, y) in enumerate(list.__iter__(self)):
            bad = (self.epoch, index) == (1, 1)
            yield (
                (x * math.nan if bad and self.what == "inputs" else x),
                (y * math.inf if bad and self.what == "targets" else y),
            )


@loop_over(
    ("what", "message"),
    [
        (
            "inputs",
            r"the network's output at step 5 \(epoch 2, minibatch 2\) is NaN or infinite: most "
            "likely the learning rate is too high, or the inputs are not scaled or hold NaN",
        ),
        (
            "targets",
            r"the nll at step 5 \(epoch 2, minibatch 2\) is NaN or infinite: targets of this "
            "minibatch are NaN or infinite; mend them, or use CensoredGaussianLikelihood",
        ),
    ],
)
def test_a_bad_loss_names_step_and_cause_and_keeps_the_checkpoint(
    what: str, message: str, tmp_path: Path
) -> None:
    good = ELBO(Case("gaussian", "mean-field", "gaussian").bnn(), num_data=N)
    fit(good, Batches(""), epochs=1, checkpoint_dir=tmp_path / "good")
    elbo = ELBO(Case("gaussian", "mean-field", "gaussian").bnn(), num_data=N)
    with pytest.raises(NonFiniteLossError, match=message) as caught:
        fit(elbo, Batches(what), epochs=3, checkpoint_dir=tmp_path / "bad")
    path = tmp_path / "bad" / NAME
    assert str(caught.value).endswith(f"the last good checkpoint is {path}")
    assert torch.equal(load(path, mlp()).posterior.mean, good.bnn.posterior.mean)
    # Not even the network in memory has taken the bad step.
    assert all(bool(p.isfinite().all()) for p in elbo.parameters())


def test_a_bad_kl_in_the_first_step_says_that_there_is_no_checkpoint(tmp_path: Path) -> None:
    elbo = ELBO(BayesianModule(mlp(), prior=Bad()), num_data=N)
    data = Batches("")
    classes = [(x, torch.arange(len(x)) % 4) for x, _ in list.__iter__(data)]
    for folder in (None, tmp_path):
        with pytest.raises(NonFiniteLossError, match=r"the KL or penalty at step .*no checkpoint"):
            fit(elbo, classes, checkpoint_dir=folder)
    assert list(tmp_path.iterdir()) == []


@loop_over("batch", [0, 2])
@loop_over("name", ["mean", "rho"])
def test_a_bad_parameter_after_a_step_is_not_written(batch: int, name: str, tmp_path: Path) -> None:
    """Neither at the end of an epoch nor when Ctrl-C asks for a checkpoint within one."""
    setup = Setup()
    setup.run(tmp_path, epochs=1)
    good = (tmp_path / NAME).read_bytes()
    elbo = setup.objective()

    def spoil() -> None:
        with torch.no_grad():
            getattr(elbo.bnn.posterior, name)[3] = math.nan
        if batch == 0:
            ctrl_c()

    message = f"a parameter after step {4 + batch} .epoch 2. is NaN or infinite.*last good check"
    with pytest.raises((NonFiniteLossError, KeyboardInterrupt), match=message):
        setup.run(tmp_path, elbo, callback=Stop(spoil, 1, batch))
    assert (tmp_path / NAME).read_bytes() == good
    assert len(setup.run(tmp_path)) == 3


# ------------------------------------------------------------------------- checkpoints of others


def other_case(**options: Any) -> Any:
    return lambda: ELBO(CASE.bnn(**options), num_data=N)


OTHERS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "seed": (other_case(seed=12), {}, "another network.*seed is 12 here and 11 there"),
    "prior": (
        lambda: ELBO(BayesianModule(mlp(), prior=Gaussian(0.1), seed=11), num_data=N),
        {}, r"another network.*prior is \{'type': 'Gaussian', 'std': 0.1\} here and",
    ),
    "layers": (other_case(net=nn.Linear(3, 4, dtype=torch.float64)), {}, "another network.*names"),
    "tensors": (
        lambda: ELBO(CASE.bnn(normalised(), exclude=("3.*",)), num_data=N),
        {}, r"another set of tensors.*net.3.weight is \[4\] here and None there",
    ),
    "temperature": (
        lambda: ELBO(CASE.bnn(), num_data=N, temperature=0.5),
        {}, "another objective.*temperature is 0.5 here and 1.0 there",
    ),
    "samples": (lambda: ELBO(CASE.bnn(), num_data=N, num_samples=2), {}, "another objective"),
    "optimiser": (other_case(), {"optimizer": SGD}, "another optimizer.*this run has SGD, the"),
    "groups": (
        other_case(), {"optimizer": lambda groups: Adam([p for g in groups for p in g["params"]])},
        r"another schedule.*lr is \[0.001\] here and \[0.001, 0.001\] there",
    ),
    "rate": (other_case(), {"rho_lr_scale": 2.0}, r"another schedule.*lr is \[0.001, 0.002\] here"),
    "warm-up": (other_case(), {"kl_warmup_epochs": 1}, "another schedule.*kl_warmup_epochs is 1 "),
    "power": (other_case(), {"kl_warmup_power": 2.0}, "another schedule.*kl_warmup_power is 2.0 "),
}  # fmt: skip


@loop_over("kind", OTHERS)
def test_the_checkpoint_of_another_run_is_refused_and_nothing_changed(
    kind: str, tmp_path: Path
) -> None:
    make, options, message = OTHERS[kind]
    setup = Setup()
    setup.run(tmp_path, epochs=1)
    good = (tmp_path / NAME).read_bytes()
    elbo, untouched = make(), make()
    with pytest.raises(StorageError, match=message) as caught:
        setup.run(tmp_path, elbo, **options)
    assert "\n" not in str(caught.value)
    for name, value in untouched.state_dict().items():
        assert torch.equal(elbo.state_dict()[name], value), name
    assert (tmp_path / NAME).read_bytes() == good


def test_an_existing_checkpoint_is_neither_ignored_nor_replaced(tmp_path: Path) -> None:
    setup, path = Setup(), tmp_path / NAME
    setup.run(tmp_path, epochs=1)
    good = path.read_bytes()
    with pytest.raises(FileExistsError, match="pass resume=True to resume it, or another"):
        setup.run(tmp_path, resume=False)
    assert path.read_bytes() == good
    path.write_bytes(good[:-7])
    with pytest.raises(StorageError, match="cut off or altered"):
        setup.run(tmp_path)
    save(CASE.bnn(), path)
    with pytest.raises(StorageError, match="holds a network but not the state of a run"):
        setup.run(tmp_path)


def test_a_scheduler_that_needs_pickle_is_refused_by_name(tmp_path: Path) -> None:
    class Odd(LambdaLR):
        def __init__(self, optimizer: Optimizer, _: int) -> None:
            super().__init__(optimizer, lambda _: 1.0)
            self.marker = object()

    with pytest.raises(TypeError, match="the state of Odd cannot be stored without pickle"):
        Setup().run(tmp_path, scheduler=Odd, optimizer=flat_sgd)
    assert list(tmp_path.iterdir()) == []
    assert len(Setup().run(tmp_path, checkpoint_dir=None, scheduler=Odd)) == 3


def test_a_resumed_run_has_the_schedule_and_optimizer_of_its_checkpoint(tmp_path: Path) -> None:
    def run(name: str, epochs: int, **options: Any) -> History:
        loader = TensorLoader(torch.ones(6, 3), torch.arange(6) % 2, 3)
        made = {"checkpoint_dir": tmp_path / name, "resume": True, "progress": False}
        elbo = ELBO(BayesianModule(nn.Linear(3, 2)), num_data=6)
        return fit(elbo, loader, epochs=epochs, **made | options)

    def adam(**options: Any) -> OptimizerFactory:
        return lambda parameters: Adam(parameters, lr=1e-3, **options)

    run("cosine", 2, scheduler=cosine)
    run("plain", 2, optimizer=adam())
    with pytest.raises(StorageError, match="scheduler is Constant here and LambdaLR there"):
        run("cosine", 4)
    with pytest.raises(StorageError, match="scheduler is LambdaLR here and Constant there"):
        run("plain", 4, optimizer=adam(), scheduler=cosine)
    with pytest.raises(StorageError, match=r"betas is \[0\.5, 0\.6\] here and \[0\.9, 0\.999\]"):
        run("plain", 4, optimizer=adam(betas=(0.5, 0.6)))
    with pytest.raises(StorageError, match=r"weight_decay is 0\.1 here and 0 there"):
        run("plain", 4, optimizer=adam(weight_decay=0.1))
    assert len(run("plain", 4, optimizer=adam(foreach=False))) == 4


class Falling:
    """A function with a state, which LambdaLR stores."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return max(0.0, 1.0 - step / self.steps)


LENGTHS: dict[str, Callable[[Optimizer, int], LRScheduler]] = {
    "T_max = 4, got 8": lambda o, n: CosineAnnealingLR(o, T_max=n),
    "T_0 = 4, got 8": lambda o, n: CosineAnnealingWarmRestarts(o, T_0=n),
    "total_iters = 4, got 8": lambda o, n: PolynomialLR(o, total_iters=n),
    "step_size = 2, got 4": lambda o, n: StepLR(o, n // 2),
    r"milestones = \[2\], got \[4\]": lambda o, n: MultiStepLR(o, [n // 2]),
    "total_iters = 2, got 4": lambda o, n: SequentialLR(
        o, [LinearLR(o, total_iters=n // 2), StepLR(o, 100)], milestones=[3]
    ),
    r"lr_lambdas = \[{'steps': 4}": lambda o, n: LambdaLR(o, Falling(n)),
    "total_size = 4": lambda o, n: CyclicLR(
        o, 0.01, 0.1, step_size_up=n // 4, step_size_down=3, cycle_momentum=False
    ),
}


@pytest.mark.parametrize("told", LENGTHS)
def test_a_schedule_with_a_length_of_its_own_is_not_resumed_with_another(
    told: str, tmp_path: Path
) -> None:
    """The stored length would replace it: two more epochs at a rate of 0, or a rising one."""

    def run(epochs: int) -> History:
        loader = TensorLoader(torch.ones(6, 3), torch.arange(6) % 2, 3)
        made = {"checkpoint_dir": tmp_path, "resume": True, "progress": False}
        elbo = ELBO(BayesianModule(nn.Linear(3, 2)), num_data=6)
        return fit(elbo, loader, epochs=epochs, scheduler=LENGTHS[told], **made)

    run(2)
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    with pytest.raises(StorageError, match=told):
        run(4)
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before
    assert len(run(2)) == 2


@pytest.mark.parametrize("cycle", [OneCycleLR, CyclicLR])
def test_schedules_that_change_momentum_resume_with_the_same_objects(
    cycle: Any, tmp_path: Path
) -> None:
    bnn = BayesianModule(nn.Linear(3, 2))
    sgd = SGD(bnn.parameters(), lr=0.01, momentum=0.9)
    options = {"total_steps": 8} if cycle is OneCycleLR else {"base_lr": 0.01}
    schedule = cycle(sgd, max_lr=0.1, **options)
    loader = TensorLoader(torch.ones(6, 3), torch.arange(6) % 2, 3)
    made = {"optimizer": sgd, "scheduler": schedule, "checkpoint_dir": tmp_path, "progress": False}
    elbo = ELBO(bnn, num_data=6)
    with pytest.raises(KeyboardInterrupt):
        fit(elbo, loader, epochs=4, **(made | {"callback": Stop(ctrl_c, 1, 1)}))
    assert len(fit(elbo, loader, epochs=4, resume=True, **made)) == 4


def test_a_resumed_part_has_as_many_examples_before_it(tmp_path: Path) -> None:
    loader = TensorLoader(torch.ones(6, 3), torch.arange(6) % 2, 3)

    def run(num_before: int, epochs: int) -> None:
        bnn = BayesianModule(nn.Linear(3, 2), exclude=("bias",))
        elbo = StreamingELBO(bnn, num_data=6, num_before=num_before)
        fit(elbo, loader, epochs=epochs, checkpoint_dir=tmp_path, resume=True, progress=False)

    run(1000, 1)
    with pytest.raises(StorageError, match=r"num_before is 10\.0 here and 1000\.0 there"):
        run(10, 2)
    run(1000, 2)
