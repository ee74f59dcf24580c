"""A run that was stopped and resumed is the run that was not, bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.cases import Case, mlp
from tests.training.test_fit import CASE, N
from tests.training.test_fit_random import torchs_loader, with_dropout
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import (
    ExponentialLR,
    LambdaLR,
    MultiStepLR,
    SequentialLR,
)
from torch.utils.data import DataLoader, TensorDataset

from bayesify import ELBO, PruningSchedule, StreamingELBO, fit, fit_replicas, prune
from bayesify.datasets import TensorLoader
from bayesify.io import StorageError, read_tensors, write_tensors
from bayesify.training import member
from bayesify.training.history import History
from bayesify.training.progress import Callback
from bayesify.training.schedules import cosine

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
NAME, EPOCHS, BATCHES = "checkpoint.safetensors", 3, 3
TIMES = ("seconds", "data_per_second", "images_per_second", "epoch_seconds", "seconds_train")


class CrashError(Exception):
    """The process dies."""


@dataclass
class Stop:
    """A callback that does something after one step, or after one epoch."""

    action: Callable[[], None]
    epoch: int
    batch: int | None = None

    def on_start(self, **_: Any) -> None: ...

    def on_step(self, *, epoch: int, batch: int) -> None:
        if (epoch, batch) == (self.epoch, self.batch):
            self.action()

    def on_epoch(self, row: Any) -> None:
        if (row["epoch"] - 1, None) == (self.epoch, self.batch):
            self.action()


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def crash() -> None:
    raise CrashError


@dataclass(frozen=True)
class Setup:
    """A training that can be begun again and again."""

    net: Callable[[], nn.Module] = mlp
    case: Case = CASE
    data: Callable[[], Any] | None = None
    pruned: float | None = None
    elbo: tuple[tuple[str, Any], ...] = ()
    fit: tuple[tuple[str, Any], ...] = ()

    def objective(self) -> ELBO:
        bnn = self.case.bnn(self.net(), exclude=("3.*",) if self.net is normalised else ())
        bnn = bnn if self.pruned is None else prune(bnn, self.pruned)
        return ELBO(bnn, num_data=N, **dict(self.elbo))

    def run(self, folder: Path, elbo: ELBO | None = None, **options: Any) -> History:
        """Train in ``folder``, from its checkpoint if it holds one."""
        torch.seed()
        inputs = {"epochs": EPOCHS, "resume": True, "checkpoint_dir": folder, **dict(self.fit)}
        elbo = self.objective() if elbo is None else elbo
        inputs_and_targets = self.case.data(N)
        test = TensorLoader(*inputs_and_targets, 5, shuffle=False)
        data = TensorLoader(*inputs_and_targets, 8, seed=1) if self.data is None else self.data()
        return fit(elbo, data, test, **{**inputs, **options})


def normalised() -> nn.Module:
    return nn.Sequential(*mlp()[:2], mlp()[2], nn.BatchNorm1d(4, dtype=torch.float64))


def augmented() -> Any:
    return torchs_loader("augmented")


SETUPS = {
    "adam, dropout, cosine, warm-up": Setup(
        with_dropout, fit=(("scheduler", cosine), ("kl_warmup_epochs", 1.5), ("rho_lr_scale", 3.0))
    ),
    "momentum, torch's loader, dropout": Setup(
        with_dropout,
        data=partial(torchs_loader, "global generator"),
        fit=(("optimizer", partial(SGD, lr=0.05, momentum=0.9, nesterov=True)),),
    ),
    "pruned": Setup(pruned=0.6, fit=(("scheduler", cosine),)),
    "pruned, momentum, decay": Setup(
        pruned=0.6, fit=(("optimizer", partial(SGD, lr=0.1, momentum=0.5, weight_decay=0.1)),)
    ),
    "pruned as it is trained": Setup(
        fit=(("pruning", PruningSchedule(0.6, 0.4, 1.7)), ("scheduler", cosine)),
    ),
    "batch normalisation, decay": Setup(
        normalised,
        fit=(
            ("optimizer", partial(Adam, lr=0.01, amsgrad=True)),
            ("scheduler", lambda optimizer, _: ExponentialLR(optimizer, 0.8)),
        ),
    ),
    "a rate that is a tensor": Setup(
        fit=(
            ("optimizer", lambda groups: Adam(groups, lr=torch.tensor(0.01), foreach=False)),
            ("scheduler", cosine),
            ("rho_lr_scale", 3.0),
        ),
    ),
    "learned noise, mixture, geometric": Setup(
        case=Case("scale-mixture", "mean-field", "gaussian-learned"),
        elbo=(("kl_weighting", "geometric"), ("num_batches", 3), ("num_samples", 2)),
        fit=(),
    ),
    "point, random data": Setup(with_dropout, Case("laplace", "delta", "categorical"), augmented),
}
each_setup = pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
STOPS = [
    *((crash, epoch, None) for epoch in range(EPOCHS)),
    *((crash, epoch, 1) for epoch in range(EPOCHS)),
    *((ctrl_c, epoch, batch) for epoch in range(EPOCHS) for batch in range(BATCHES)),
]
#: One of each kind: before any checkpoint, at an epoch's end and within it, by a crash and Ctrl-C.
#: The slow tests stop at the others.
FEW = [(crash, 0, 1), (crash, 1, None), (ctrl_c, 0, 0), (ctrl_c, 1, 1), (ctrl_c, 2, BATCHES - 1)]


def timeless(value: Any) -> Any:
    """JSON without what a clock says."""
    if isinstance(value, dict):
        return {name: timeless(part) for name, part in value.items() if name not in TIMES}
    return [timeless(part) for part in value] if isinstance(value, list) else value


def check_same_checkpoint(one: Path, two: Path) -> None:
    (tensors, meta), (expected, expected_meta) = (read_tensors(each / NAME) for each in (one, two))
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name
    assert timeless(meta) == timeless(expected_meta)


def check_resumed(setup: Setup, tmp_path: Path, stops: Sequence[Any]) -> None:
    """A run that is stopped at any of these places and resumed ends like one that was not."""
    whole = setup.objective()
    rows = timeless(setup.run(tmp_path / "whole", whole))
    assert len(rows) == EPOCHS
    start = setup.objective().bnn.posterior.mean
    assert (whole.bnn.posterior.mean != start).any(), "nothing was trained"
    for index, (action, epoch, batch) in enumerate(stops):
        folder = tmp_path / str(index)
        wanted = CrashError if action is crash else KeyboardInterrupt
        with pytest.raises(wanted):
            setup.run(folder, callback=Stop(action, epoch, batch))
        position = None
        if (folder / NAME).exists():
            position = read_tensors(folder / NAME)[1]["position"]
        if action is ctrl_c:
            done = (epoch, batch + 1) if batch + 1 < BATCHES else (epoch + 1, 0)
            assert (position["epoch"], position["batch"]) == done
        elbo = setup.objective()
        assert timeless(setup.run(folder, elbo)) == rows
        check_same_checkpoint(folder, tmp_path / "whole")
        for name, value in whole.bnn.state_dict().items():
            if setup.pruned is None or name != "posterior.rho":
                assert torch.equal(elbo.bnn.state_dict()[name], value), name


@each_setup
def test_resumed_is_uninterrupted(setup: Setup, tmp_path: Path) -> None:
    check_resumed(setup, tmp_path, FEW)


@pytest.mark.parametrize("older", [False, True])
@each_setup
def test_a_run_killed_after_its_last_epoch_is_completed(
    setup: Setup, older: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = setup.run(tmp_path / "whole")
    with monkeypatch.context() as patch:

        def killed(*_: object) -> None:
            raise SystemExit

        patch.setattr("bayesify.training.member.untrained_free_energy", killed)
        with pytest.raises(SystemExit):
            setup.run(tmp_path / "killed")
    if older:  # which kept it among the sums of an epoch
        path = tmp_path / "killed" / NAME
        tensors, meta = read_tensors(path)
        assert meta["position"].pop("lacks_comparison")
        meta["position"]["sums"]["lacks_comparison"] = 1.0
        write_tensors(path, tensors, {k: v for k, v in meta.items() if k != "format"})
    with pytest.raises(CrashError):  # the callback is told of the last epoch
        setup.run(tmp_path / "killed", callback=Stop(crash, EPOCHS - 1))
    assert timeless(setup.run(tmp_path / "killed")) == timeless(whole)
    check_same_checkpoint(tmp_path / "killed", tmp_path / "whole")
    # What could not be compared is not tried again.
    times = []
    for _ in range(2):
        setup.run(tmp_path / "killed")
        times.append((tmp_path / "killed" / NAME).stat().st_mtime_ns)
    assert times[0] == times[1]


def test_each_replica_killed_after_its_last_epoch_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(folder: Path) -> Any:
        data = TensorLoader(*CASE.data(N), 8, seed=1)
        elbos = [Setup().objective() for _ in range(3)]
        return fit_replicas(elbos, data, epochs=2, checkpoint_dir=folder, resume=True)

    whole = train(tmp_path / "whole")
    measured = [history[-1]["free_energy_untrained"] for history in whole]
    assert None not in measured
    compared = member.untrained_free_energy
    calls = []

    def killed_at_second(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise SystemExit
        return compared(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("bayesify.training.member.untrained_free_energy", killed_at_second)
        with pytest.raises(SystemExit):
            train(tmp_path / "killed")
    assert timeless(train(tmp_path / "killed")) == timeless(whole)


@pytest.mark.slow
@each_setup
def test_resumed_after_any_step_is_uninterrupted(setup: Setup, tmp_path: Path) -> None:
    check_resumed(setup, tmp_path, [stop for stop in STOPS if stop not in FEW])


@pytest.mark.slow
@each_setup
def test_stopping_after_every_single_step_changes_nothing(setup: Setup, tmp_path: Path) -> None:
    rows = setup.run(tmp_path / "whole")
    for _, epoch, batch in STOPS[-EPOCHS * BATCHES :]:
        with pytest.raises(KeyboardInterrupt):
            setup.run(tmp_path / "steps", callback=Stop(ctrl_c, epoch, batch))
    content = (tmp_path / "steps" / NAME).read_bytes()
    assert timeless(setup.run(tmp_path / "steps")) == timeless(rows)
    check_same_checkpoint(tmp_path / "steps", tmp_path / "whole")
    assert (tmp_path / "steps" / NAME).read_bytes() == content, "a finished run is left alone"


def test_more_epochs_continue_a_finished_run(tmp_path: Path) -> None:
    setup = Setup()
    setup.run(tmp_path / "a", epochs=2)
    rows = setup.run(tmp_path / "a", epochs=4)
    assert timeless(rows) == timeless(setup.run(tmp_path / "b", epochs=4))
    check_same_checkpoint(tmp_path / "a", tmp_path / "b")
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(set(seconds)), "seconds count on from the first part"


def test_fewer_epochs_than_the_checkpoint_has_are_an_error(tmp_path: Path) -> None:
    setup = Setup()
    setup.run(tmp_path, epochs=3)
    before = (tmp_path / NAME).read_bytes()
    with pytest.raises(ValueError, match="epochs must be at least 3, which the checkpoint"):
        setup.run(tmp_path, epochs=2)
    assert (tmp_path / NAME).read_bytes() == before


class LosingWorkers:
    """A loader whose workers end while it fetches a minibatch of the second epoch."""

    def __init__(self, lost: int) -> None:
        self._loader, self._lost = TensorLoader(*CASE.data(N), 8, seed=1), lost
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number, minibatch in enumerate(self._loader):
            if self._epoch == 1 and number == self._lost:
                ctrl_c()  # a terminal sends it to the workers too
                raise RuntimeError("DataLoader worker (pid(s) 1, 2) exited unexpectedly")
            yield minibatch


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_ctrl_c_that_ends_workers_keeps_the_steps_so_far(lost: int, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Setup(data=lambda: LosingWorkers(lost)).run(tmp_path / "a")
    position = read_tensors(tmp_path / "a" / NAME)[1]["position"]
    assert (position["epoch"], position["batch"]) == (1, lost)
    assert timeless(Setup().run(tmp_path / "a")) == timeless(Setup().run(tmp_path / "b"))
    check_same_checkpoint(tmp_path / "a", tmp_path / "b")


def test_workers_that_fail_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ctrl_c", lambda: None)
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        Setup(data=lambda: LosingWorkers(1)).run(tmp_path)


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    mine = tmp_path / f".other.{NAME}.99999999-1.tmp"
    for path in (mine, tmp_path / f".{NAME}.99999999-1.tmp"):
        path.write_text("half")
    being_written = tmp_path / f".{NAME}.{os.getpid()}-1.tmp"
    being_written.write_text("half")
    Setup().run(tmp_path, epochs=1)
    assert {path.name for path in tmp_path.iterdir()} == {NAME, mine.name, being_written.name}


def test_the_second_ctrl_c_is_immediate(tmp_path: Path) -> None:
    def twice() -> None:
        ctrl_c()
        ctrl_c()
        raise AssertionError("still running")

    with pytest.raises(KeyboardInterrupt):
        Setup().run(tmp_path, callback=Stop(twice, 1, 0))
    assert read_tensors(tmp_path / NAME)[1]["position"]["batch"] == 0


def milestones(optimizer: Optimizer, _: int) -> MultiStepLR:
    return MultiStepLR(optimizer, [6, 10])


def in_turn(optimizer: Optimizer, _: int) -> SequentialLR:
    parts = [MultiStepLR(optimizer, [2]), MultiStepLR(optimizer, [2, 3])]
    return SequentialLR(optimizer, parts, milestones=[5])


@pytest.mark.parametrize("scheduler", [milestones, in_turn])
def test_milestones_are_kept(scheduler: Any, tmp_path: Path) -> None:
    setup = Setup(fit=(("scheduler", scheduler), ("epochs", 5)))
    expected = setup.run(tmp_path / "whole")
    for epochs in (1, 2, 3, 5):
        found = setup.run(tmp_path / "parts", epochs=epochs)
    rates = [row["learning_rate"] for row in expected]
    assert [row["learning_rate"] for row in found] == rates
    assert len(set(rates)) == 3


def test_an_epoch_is_resumed_with_as_many_minibatches(tmp_path: Path) -> None:
    setup = Setup()
    with pytest.raises(KeyboardInterrupt):
        setup.run(tmp_path, callback=Stop(ctrl_c, 1, 1))
    others = TensorLoader(*CASE.data(N), 4, seed=1)
    elbo = setup.objective()
    before = {name: each.clone() for name, each in elbo.state_dict().items()}
    with pytest.raises(StorageError, match="epoch of 3 minibatches; resume it with as many, got 6"):
        fit(elbo, others, epochs=EPOCHS, checkpoint_dir=tmp_path, resume=True)
    assert all(torch.equal(each, before[name]) for name, each in elbo.state_dict().items())
    setup.run(tmp_path)


def test_a_schedule_is_resumed_with_as_many_minibatches(tmp_path: Path) -> None:
    setup, schedules = Setup(), {"cosine": cosine, "constant": None}

    def run(name: str) -> History:
        data = TensorLoader(*CASE.data(N), 4, seed=1)
        options = {"scheduler": schedules[name], "checkpoint_dir": tmp_path / name}
        return fit(setup.objective(), data, epochs=2, resume=True, **options)  # type: ignore[arg-type]

    for name, scheduler in schedules.items():
        setup.run(tmp_path / name, epochs=1, scheduler=scheduler)
    with pytest.raises(StorageError, match="by steps, and epochs of 3 minibatches; resume it with"):
        run("cosine")
    assert len(run("constant")) == 2


def test_a_schedule_of_more_epochs_begins_at_its_own_rate(tmp_path: Path) -> None:
    rates: list[float] = []

    def run(name: str, epochs: int, action: Any = None) -> None:
        made: list[SGD] = []

        def sgd(groups: Any) -> SGD:
            made.append(SGD(groups, lr=0.1))
            made[0].register_step_pre_hook(lambda *_: rates.append(made[0].param_groups[0]["lr"]))
            return made[0]

        class Editing(Callback):
            def on_epoch(self, *_: Any) -> None:
                if action is not None:
                    action(made[0].param_groups[0])

        options: Any = {"epochs": epochs, "scheduler": cosine, "optimizer": sgd}
        data = TensorLoader(*CASE.data(N), 8, seed=1)
        folder = {"checkpoint_dir": tmp_path / name, "resume": True, "progress": False}
        fit(Setup().objective(), data, callback=Editing(), **options, **folder)

    run("whole", 4)
    whole = rates.copy()
    for epochs in (2, 4):
        rates.clear()
        run("parts", epochs)
    assert rates == whole[6:]
    # A rate that a callback has set is not the schedule's.
    run("edited", 2, lambda group: group.update(lr=0.25))
    rates.clear()
    run("edited", 4)
    assert rates[0] == 0.25


class Counting:
    """A rate that counts how often it was asked for, which LambdaLR stores."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, step: int) -> float:  # noqa: ARG002  # as LambdaLR passes it
        self.count += 1
        return 0.9**self.count


def test_a_function_with_a_state_is_asked_as_often_as_without_a_stop(tmp_path: Path) -> None:
    rates = []
    for name, parts in {"whole": [4], "parts": [2, 4]}.items():
        for epochs in parts:
            made = Setup().run(
                tmp_path / name, epochs=epochs, scheduler=lambda o, _: LambdaLR(o, Counting())
            )
        rates.append([row["learning_rate"] for row in made])
    assert rates[0] == rates[1]


def test_fewer_epochs_than_were_trained_are_named_before_the_schedule(tmp_path: Path) -> None:
    def listed(optimizer: Optimizer, steps: int) -> LambdaLR:
        rates = [1.0 - step / steps for step in range(steps + 1)]
        return LambdaLR(optimizer, lambda step: rates[step])

    Setup().run(tmp_path, epochs=4, scheduler=listed)
    with pytest.raises(ValueError, match="epochs must be at least 4, which the checkpoint"):
        Setup().run(tmp_path, epochs=2, scheduler=listed)


class Weighted(ELBO):
    """An objective with a parameter of its own."""

    def __init__(self, bnn: Any, **options: Any) -> None:
        super().__init__(bnn, **options)
        self.own = nn.Parameter(torch.zeros(()))

    def nll(self, outputs: Any, targets: Any) -> Any:
        return super().nll(outputs, targets) + (self.own - 1.0).square()


def streaming(setup: Setup, *, moved: float = 0.0) -> StreamingELBO:
    bnn = setup.objective().bnn
    with torch.no_grad():
        bnn.posterior.mean.add_(moved)
    return StreamingELBO(bnn, num_data=N)


def weighted(setup: Setup, *, moved: float = 0.0) -> Weighted:
    made = Weighted(setup.objective().bnn, num_data=N)
    with torch.no_grad():
        made.own.add_(moved)
    return made


@pytest.mark.parametrize("make", [streaming, weighted])
def test_what_an_objective_holds_besides_its_network_is_resumed(make: Any, tmp_path: Path) -> None:
    """A cell that is run again makes its objective of what the first run left."""
    setup = Setup()
    whole = make(setup)
    setup.run(tmp_path / "whole", whole)
    with pytest.raises(KeyboardInterrupt):
        setup.run(tmp_path / "parts", make(setup), callback=Stop(ctrl_c, 1, 1))
    again = make(setup, moved=0.5)
    setup.run(tmp_path / "parts", again)
    found, expected = again.state_dict(), whole.state_dict()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    plain = ELBO(setup.objective().bnn, num_data=N)
    with pytest.raises(StorageError, match="another objective"):
        setup.run(tmp_path / "parts", plain, epochs=EPOCHS + 1)


# Other tests may have loaded JAX, which warns of its threads; the workers do not use it.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_workers_that_persist_have_the_same_order_after_a_resume(tmp_path: Path) -> None:
    def weights(folder: Path, epochs: Sequence[int]) -> Tensor:
        for last in epochs:
            data = DataLoader(
                TensorDataset(*CASE.data(N)),
                8,
                shuffle=True,
                num_workers=1,
                persistent_workers=True,
            )
            elbo = ELBO(CASE.bnn(), num_data=N)
            fit(elbo, data, epochs=last, checkpoint_dir=folder, resume=True, progress=False)
            assert data.sampler.generator is None, "the loader is left as it was"  # type: ignore[attr-defined]
        return elbo.bnn.posterior.mean.detach()

    assert torch.equal(weights(tmp_path / "whole", [2]), weights(tmp_path / "parts", [1, 2]))


def test_numbers_of_numpy_are_stored(tmp_path: Path) -> None:
    def schedule(optimizer: Optimizer, steps: int) -> Any:
        return MultiStepLR(optimizer, list(np.arange(1, steps)), gamma=np.float32(0.9))

    rates = {"lr": np.float32(0.05), "momentum": np.float32(0.5)}
    options = {"optimizer": partial(SGD, **rates), "scheduler": schedule}
    SETUPS["pruned"].run(tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        SETUPS["pruned"].run(tmp_path / "resumed", **options, callback=Stop(ctrl_c, 0))
    SETUPS["pruned"].run(tmp_path / "resumed", **options)
    whole, resumed = (read_tensors(tmp_path / part / NAME)[0] for part in ("whole", "resumed"))
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
