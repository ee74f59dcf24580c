"""One network of a run: its optimiser, its place in the run and its checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bayesify.io import check_can_be_stored
from bayesify.io.frozen_parameters import check_patterns
from bayesify.module.threads import one_thread_if_small, rows_of
from bayesify.noise.keys import kept_generators
from bayesify.training.accumulation import Accumulation
from bayesify.training.backends import Noise
from bayesify.training.checkpoint import (
    CHECKPOINT_NAME,
    Position,
    read_checkpoint,
    update_settings,
    write_checkpoint,
)
from bayesify.training.checks import check_parameters
from bayesify.training.division import Division
from bayesify.training.elbo import ELBO
from bayesify.training.free_energy import (
    FirstExamples,
    untrained_columns,
    untrained_free_energy,
)
from bayesify.training.history import EpochMeter, EpochRow, validation_row
from bayesify.training.processes import Processes
from bayesify.training.pruning_schedule import PruningSchedule
from bayesify.training.schedules import (
    KLWarmup,
    ScheduleFactory,
    check_length,
    check_scaled_rate,
    check_schedule,
    recompute_rates,
)

__all__ = ["Member"]


@dataclass
class Member:
    """One network of a run, with its optimiser, checkpoint and position.

    Args:
        elbo: the objective.
        optimizer: of its parameters.
        schedule: of the learning rate, stepped after each step of the optimiser.
        settings: what a resumed run must share with the checkpoint.
        path: the checkpoint, or None.
        position: the epoch and minibatch that come next, and the history so far.
        frozen: which frozen parameters the checkpoint holds, as for ``bayesify.save``.
        processes: those that train together; the first writes the checkpoint.
        accumulation: which minibatches share a step of the optimiser.
    """

    elbo: ELBO
    optimizer: Optimizer
    schedule: LRScheduler
    settings: dict[str, Any]
    path: Path | None
    position: Position
    frozen: bool | Sequence[str] = True
    processes: Processes = field(default_factory=Processes.alone)
    accumulation: Accumulation = field(default_factory=Accumulation)

    @classmethod
    def prepared(
        cls,
        elbo: ELBO,
        optimizer: Optimizer,
        scheduler: LRScheduler | ScheduleFactory,
        epochs: int,
        batches: int,
        warmup: KLWarmup,
        folder: Path | None,
        *,
        resume: bool,
        rho_lr_scale: float = 1.0,
        pruning: PruningSchedule | None = None,
        frozen: bool | Sequence[str] = True,
        processes: Processes | None = None,
        accumulation: Accumulation | None = None,
    ) -> Member:
        """A network at its start, or where its checkpoint in ``folder`` left it.

        Raises:
            TypeError: ``scheduler`` is no scheduler and no function of one, or steps by a metric.
            ValueError: it is the scheduler of another optimiser, ends before the training, or sets
                one rate for all groups where that of rho was scaled by ``rho_lr_scale``; a
                checkpoint cannot hold the network; or it has more epochs.
            FileExistsError: there is a checkpoint and ``resume`` is False.
            StorageError: the checkpoint is damaged or of another run.
        """
        accumulation = Accumulation(1, batches) if accumulation is None else accumulation
        schedule = scheduler
        if not isinstance(schedule, LRScheduler):
            if not callable(schedule):
                raise TypeError(
                    "scheduler must be a scheduler of torch, or a function of optimiser and total "
                    f"number of steps as in bayesify.training.schedules, got {schedule!r}"
                )
            schedule = schedule(optimizer, max(1, epochs * accumulation.steps))
        check_schedule(schedule, optimizer)
        check_scaled_rate(schedule, optimizer, rho_lr_scale)
        if folder is not None:
            check_can_be_stored(elbo.bnn)
        path = None if folder is None else folder / CHECKPOINT_NAME
        updates = update_settings(optimizer, schedule, is_stored=path is not None)
        settings = {**warmup.settings, **updates}
        if pruning is not None:
            settings |= pruning.settings
        if accumulation.every > 1:
            settings["accumulate_batches"] = accumulation.every
        position, last_step = Position(), epochs * accumulation.steps
        if path is not None and path.exists():
            if not resume:
                raise FileExistsError(
                    f"{path} exists already; pass resume=True to resume it, or another folder"
                )
            position = read_checkpoint(path, elbo, optimizer, schedule, settings, batches)
            begun = position.epoch + (position.batch > 0)
            if begun > epochs:
                raise ValueError(
                    f"epochs must be at least {begun}, which the checkpoint {path} has begun, got "
                    f"{epochs}; epochs counts those before the resume too"
                )
            if position.epochs not in (0, epochs):
                recompute_rates(schedule, optimizer)
        else:
            position.first_epoch = -(-elbo.step // batches)
            if path is not None:
                check_patterns(frozen, elbo.bnn.net)
            last_step += getattr(schedule, "last_epoch", 0)
        check_length(schedule, last_step)
        position.batches, position.epochs = batches, epochs
        processes = Processes.alone() if processes is None else processes
        return cls(
            elbo, optimizer, schedule, settings, path, position, frozen, processes, accumulation
        )

    def checkpoint(self, noise: Noise) -> None:
        """Write the checkpoint, if there is to be one."""
        self.position.noise, self.position.processes = noise, self.processes.count
        self.position.shared_noise = self.processes.shared_noise
        if self.path is not None and self.processes.is_first:
            write_checkpoint(
                self.path,
                self.elbo,
                self.optimizer,
                self.schedule,
                self.settings,
                self.position,
                self.frozen,
            )

    def end_epoch(
        self, meter: EpochMeter, epoch: int, seconds: float, validation: Division | None
    ) -> None:
        """Add the epoch's row to the history."""
        position = self.position
        position.seconds += seconds
        meter.add_up(self.processes)
        row = meter.row(
            epoch=epoch,
            learning_rate=position.sums["learning_rate"],
            seconds=seconds,
            total_seconds=position.seconds,
        )
        check_parameters(self.elbo, epoch, self.path)
        with kept_generators():
            self.processes.equalise_buffers(self.elbo.bnn.net)
            row |= validation_row(self.elbo, validation, self.processes)
        if position.history:  # of a finished run that is continued
            position.history[-1] |= untrained_columns(None)
        position.history.append(row | untrained_columns(None))
        position.begin_epoch(epoch + 1)

    def compare_with_untrained(self, examples: FirstExamples) -> str | None:
        """Add the free energy of untrained means to the last row; describe why it is missing.

        Of several processes the first measures it, on its own examples.
        """
        found: tuple[EpochRow, str | None] = {}, None
        if self.processes.is_first:
            found = self._compare(examples)
        found = self.processes.from_first(found)
        self.position.history[-1] |= found[0]
        return found[1]

    def _compare(self, examples: FirstExamples) -> tuple[EpochRow, str | None]:
        try:
            rows = max((rows_of(inputs) for inputs, _ in examples.minibatches), default=0)
            with kept_generators(), one_thread_if_small(self.elbo.bnn, rows):
                found = untrained_free_energy(self.elbo, examples.minibatches)
        except Exception as error:
            # The network may fail with any error on a minibatch that was cut, or in evaluation
            # mode, or memory may run out. The training is done and must not be lost.
            return {}, (
                "the free energy with untrained means could not be measured on the first examples: "
                f"{type(error).__name__}: {error}"
            )
        return untrained_columns(found), None
