"""fit_replicas(): several networks of one architecture, trained at once."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map

from bayesify.elbo import ELBO
from bayesify.fused.replicas import ReplicaStep
from bayesify.inputs import Inputs
from bayesify.training.callbacks import Callback, LineProgress
from bayesify.training.checkpoint import (
    CHECKPOINT_NAME,
    Position,
    read_checkpoint,
    write_checkpoint,
)
from bayesify.training.checks import check_arguments, check_finite, check_parameters
from bayesify.training.convergence import warn_of_convergence
from bayesify.training.history import EpochMeter, History, validation_row
from bayesify.training.interrupt import deferred_interrupt
from bayesify.training.minibatches import Loader, kept_generators, minibatches
from bayesify.training.optimizers import OptimizerFactory, make_optimizer
from bayesify.training.schedules import KLWarmup, ScheduleFactory, constant

__all__ = ["fit_replicas"]


def fit_replicas(
    elbos: Sequence[ELBO],
    train_loader: Loader | Sequence[Loader],
    validation_loader: Loader | None = None,
    *,
    epochs: int = 10,
    optimizer: OptimizerFactory | Sequence[OptimizerFactory] | None = None,
    scheduler: ScheduleFactory | None = None,
    rho_lr_scale: float = 1.0,
    kl_warmup_epochs: float = 0,
    kl_warmup_power: float = 1.0,
    checkpoint_dir: str | Path | None = None,
    resume: bool = False,
    callback: Callback | None = None,
) -> list[History]:
    """Train K networks of one architecture at once, as error bars, ensembles and grids need.

    Each becomes what ``fit`` would make of it alone with the same minibatches, to rounding: they
    share nothing but the work. Seeds, the numbers of their priors, initial values, temperatures
    and learning rates may differ. Where one network is too small for the machine, as on a GPU, K
    of them take little more time than one.

    Args:
        elbos: one objective for each network; weight sampling, one sample a step.
        train_loader: minibatches for all, or a sequence of K loaders with minibatches of equal
            shapes, one for each.
        validation_loader: data to measure the error of the mean weights on, each epoch.
        epochs: passes over the training data in all, those before a resume included.
        optimizer: a function that makes one from parameter groups, or one for each network; SGD
            or Adam; None is Adam with rate 1e-3.
        scheduler: a function of optimiser and total number of steps.
        rho_lr_scale: learning rate of rho as a multiple of the others'.
        kl_warmup_epochs: the KL's weight rises from 0 to 1 over so many epochs.
        kl_warmup_power: as this power of a straight line.
        checkpoint_dir: where ``replica-K/checkpoint.safetensors`` are written after every epoch.
        resume: go on from these if they are there.
        callback: told of every step, and of the first network's epochs; None prints a line each.

    Returns:
        A history for each network, as ``fit`` returns.

    Raises:
        ValueError: the networks or the loaders do not go together; see also ``fit``.
        CompilerError: the fused step needs a C++ compiler, and there is none.
        NonFiniteLossError: a loss or a parameter is NaN or infinite.
        StorageError, FileExistsError: as of ``fit``.

    Warns:
        ConvergenceWarning: as ``fit``, for each network.

    Example:
        >>> import bayesify as bf
        >>> x, y = torch.randn(64, 3), torch.randint(2, (64,))
        >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 32)
        >>> elbos = [bf.ELBO(bf.BayesianModule(torch.nn.Linear(3, 2), seed=k), num_data=64)
        ...          for k in range(3)]
        >>> import warnings
        >>> with warnings.catch_warnings(action="ignore"):
        ...     histories = fit_replicas(elbos, loader, epochs=2)
        >>> [len(history) for history in histories]
        [2, 2, 2]
    """
    loaders = list(train_loader) if isinstance(train_loader, Sequence) else [train_loader]
    separate = isinstance(train_loader, Sequence)
    _check(elbos, loaders, optimizer, separate=separate)
    warmup = KLWarmup(kl_warmup_epochs, kl_warmup_power)
    for elbo, loader in zip(elbos, loaders if separate else loaders * len(elbos), strict=True):
        check_arguments(elbo, loader, validation_loader, epochs)
    batches = len(loaders[0])
    factories = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer] * len(elbos)
    members = [
        _Member.prepared(
            elbo,
            make_optimizer(elbo, factory, rho_lr_scale),
            constant if scheduler is None else scheduler,
            max(1, epochs * batches),
            warmup.settings,
            None if checkpoint_dir is None else Path(checkpoint_dir) / f"replica-{number}",
            resume=resume,
        )
        for number, (elbo, factory) in enumerate(zip(elbos, factories, strict=True))
    ]
    place = members[0].position
    if any((m.position.epoch, m.position.batch) != (place.epoch, place.batch) for m in members):
        raise ValueError(
            "the checkpoints of the networks must be of one step, but they differ; remove the "
            "folders of all to begin anew"
        )
    step = ReplicaStep(elbos, [member.optimizer for member in members])
    watcher = LineProgress() if callback is None else callback
    if (tell := getattr(watcher, "on_note", None)) is not None:
        tell(f"step: {step.description}")
    watcher.on_start(epochs=epochs, batches=batches, history=list(place.history))
    for elbo in elbos:
        elbo.train()
    with deferred_interrupt() as interrupt:
        for epoch in range(place.epoch, epochs):
            started = time.perf_counter() - place.epoch_seconds
            meters = [EpochMeter(m.elbo, batches, m.position.sums) for m in members]
            for member in members:
                rate = member.optimizer.param_groups[0]["lr"]
                member.position.sums.setdefault("learning_rate", rate)
            with closing(
                _joint_minibatches(loaders, elbos, epoch, place.batch, separate=separate)
            ) as data:
                for batch, inputs, targets in data:
                    torch.clear_autocast_cache()
                    said = step.evaluate(
                        inputs,
                        targets,
                        separate=separate,
                        batch_index=batch,
                        kl_scale=warmup.scale(epoch * batches + batch, batches),
                        values=batch + 1 == batches,
                    )
                    for member, values in zip(members, said, strict=True):
                        check_finite(member.elbo, values, epoch, batch, member.path)
                    for k, meter in enumerate(meters):
                        meter.add(said[k], targets[k] if separate else targets)
                    for k, residual in enumerate(step.update()):
                        meters[k].add_residual(said[k], residual, batch=batch)
                        members[k].schedule.step()
                    watcher.on_step(epoch=epoch, batch=batch)
                    if interrupt.requested and batch + 1 < batches:
                        for member in members:
                            member.position.batch = batch + 1
                            member.position.epoch_seconds = time.perf_counter() - started
                        _write_checkpoints(members, epoch)
                        raise KeyboardInterrupt
            seconds = time.perf_counter() - started
            for member, meter in zip(members, meters, strict=True):
                member.end_epoch(meter, epoch, seconds, validation_loader)
            _write_checkpoints(members, epoch)
            watcher.on_epoch(place.history[-1])
            if interrupt.requested:
                raise KeyboardInterrupt
    step.release()
    for member in members:
        history = member.position.history
        warn_of_convergence(history, epochs, kl_warmup_epochs, stacklevel=3)
    return [member.position.history for member in members]


@dataclass
class _Member:
    """One network's part of a joint run."""

    elbo: ELBO
    optimizer: Optimizer
    schedule: LRScheduler
    settings: dict[str, Any]
    path: Path | None
    position: Position

    @classmethod
    def prepared(
        cls,
        elbo: ELBO,
        optimizer: Optimizer,
        scheduler: ScheduleFactory,
        total_steps: int,
        settings: dict[str, Any],
        folder: Path | None,
        *,
        resume: bool,
    ) -> _Member:
        """A network as it begins, or goes on from its checkpoint."""
        schedule = scheduler(optimizer, total_steps)
        rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        settings = {**settings, "lr": rates}
        path = None if folder is None else folder / CHECKPOINT_NAME
        position = Position()
        if path is not None and path.exists():
            if not resume:
                raise FileExistsError(
                    f"{path} exists already; pass resume=True to go on from it, or another folder"
                )
            position = read_checkpoint(path, elbo, optimizer, schedule, settings)
        elif path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        if position.noise == "generator":
            raise ValueError(f"{path} was written by a run of another kind of noise; begin anew")
        position.noise = "counter"
        return cls(elbo, optimizer, schedule, settings, path, position)

    def checkpoint(self) -> None:
        if self.path is not None:
            write_checkpoint(
                self.path, self.elbo, self.optimizer, self.schedule, self.settings, self.position
            )

    def end_epoch(
        self, meter: EpochMeter, epoch: int, seconds: float, validation_loader: Loader | None
    ) -> None:
        position = self.position
        position.seconds += seconds
        row = meter.row(
            epoch=epoch,
            learning_rate=position.sums["learning_rate"],
            seconds=seconds,
            total_seconds=position.seconds,
        )
        with kept_generators():
            position.history.append(row | validation_row(self.elbo, validation_loader))
        position.begin_epoch(epoch + 1)


def _write_checkpoints(members: Sequence[_Member], epoch: int) -> None:
    # All are looked at before any is written, so that they stay of one step.
    for member in members:
        check_parameters(member.elbo, epoch, member.path)
    for member in members:
        member.checkpoint()


def _joint_minibatches(
    loaders: Sequence[Loader],
    elbos: Sequence[ELBO],
    epoch: int,
    skip: int,
    *,
    separate: bool,
) -> Generator[tuple[int, Inputs, Tensor], None, None]:
    """The minibatches of one loader for all, or those of K loaders with a leading axis."""
    with ExitStack() as stack:
        epochs = [
            stack.enter_context(
                closing(minibatches(loader, seed=elbo.bnn.seed, epoch=epoch, skip=skip))
            )
            for loader, elbo in zip(loaders, elbos, strict=False)
        ]
        for several in zip(*epochs, strict=True):
            batch, (inputs, targets) = several[0]
            if separate:
                pairs = [pair for _, pair in several]
                inputs, targets = tree_map(lambda *parts: torch.stack(parts), pairs[0], *pairs[1:])
            yield batch, inputs, targets


def _check(
    elbos: Sequence[ELBO], loaders: Sequence[Loader], optimizer: object, *, separate: bool
) -> None:
    if not elbos:
        raise ValueError("there must be at least one objective, got none")
    if separate and len(loaders) != len(elbos):
        raise ValueError(
            f"there must be one loader for all networks or one for each of {len(elbos)}, got "
            f"{len(loaders)}"
        )
    if len({len(loader) for loader in loaders}) > 1:
        raise ValueError("the loaders must bring equal numbers of minibatches")
    if isinstance(optimizer, Optimizer):
        raise TypeError(
            "optimizer must be a function of parameter groups, such as "
            "functools.partial(torch.optim.Adam, lr=1e-3), since each network needs its own"
        )
    if isinstance(optimizer, Sequence) and len(optimizer) != len(elbos):
        raise ValueError(
            f"there must be one optimizer for each of {len(elbos)} networks, got {len(optimizer)}"
        )
