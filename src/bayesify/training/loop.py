"""The training loop, shared by fit, fit_replicas and bandit agents."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from bayesify.estimators.network_state import frozen_in_evaluation
from bayesify.io.files import remove_leftovers
from bayesify.module.inputs import Inputs
from bayesify.module.random_network import RandomNetwork
from bayesify.module.recorded_pass import version_of
from bayesify.module.threads import one_thread_if_small, rows_of
from bayesify.training.backends import Noise, NonFiniteLossError, StepOptions
from bayesify.training.checkpoint import scheduler_meta
from bayesify.training.checks import (
    are_wrong,
    check_gradients_are_on,
    check_parameters,
    diverged,
)
from bayesify.training.convergence import warn_of_convergence
from bayesify.training.division import Division, Share
from bayesify.training.elbo import ELBO, ELBOTerms
from bayesify.training.fit_warnings import (
    warn_of_sigmoid_outputs,
    warn_of_softmax_outputs,
    warn_of_target_scale,
)
from bayesify.training.free_energy import FirstExamples, free_energy_note
from bayesify.training.history import EpochMeter, History
from bayesify.training.interrupt import deferred_interrupt
from bayesify.training.member import Member
from bayesify.training.minibatches import Loader
from bayesify.training.progress import Callback
from bayesify.training.pruning_schedule import PruningSchedule
from bayesify.training.schedules import KLWarmup

__all__ = ["Minibatch", "TrainStep", "Training", "run_steps"]


class Minibatch(NamedTuple):
    """A minibatch and its index ``batch`` within the epoch; of several processes one's part."""

    batch: int
    inputs: Inputs
    targets: Tensor
    share: Share | None = None

    def of_network(self, k: int) -> Minibatch:
        """The part of network ``k``, where inputs and targets have a leading axis of size K."""
        inputs: Inputs = tree_map_only(Tensor, lambda each: each[k], self.inputs)
        return Minibatch(self.batch, inputs, self.targets[k])


class TrainStep(Protocol):
    """One step of K networks, such as ``ReplicaBackend.step`` or that of a single network."""

    def __call__(self, minibatch: Minibatch, options: StepOptions) -> Sequence[ELBOTerms]:
        """Update all networks; returns the terms of each."""


def run_steps(
    step: TrainStep,
    minibatches: Iterable[Minibatch],
    options_of: Callable[[Minibatch], StepOptions],
    network: RandomNetwork,
    passes: int = 1,
) -> Iterator[tuple[Minibatch, Sequence[ELBOTerms]]]:
    """Make one training step for each minibatch and yield its terms.

    Args:
        step: one step of one or more networks.
        minibatches: of an epoch.
        options_of: the step's options.
        network: what is trained, or the first of several networks.
        passes: number of passes of a step.

    Raises:
        NonFiniteLossError: a term is NaN or infinite.
        RuntimeError: gradients are switched off.
    """
    for minibatch in minibatches:
        check_gradients_are_on()  # a loader or a callback may have switched them off
        # Drop autocast's cached casts: they are of the parameters before the last update.
        torch.clear_autocast_cache()
        with one_thread_if_small(network, passes * rows_of(minibatch.inputs)):
            terms = step(minibatch, options_of(minibatch))
        yield minibatch, terms


@dataclass(eq=False, repr=False)
class Training:
    """A training of K networks, from where they stand to the last epoch.

    Args:
        members: K networks at the same position.
        step: one step of all of them.
        minibatches: those of an epoch, from an index on.
        epochs: in all.
        batches: minibatches an epoch.
        warmup: of the KL.
        noise: the noise of the steps, for the checkpoint.
        callback: see ``fit``.
        description: of the backend, for the callback; told again if the first epoch changes it.
        separate: whether inputs and targets have a leading axis of size K.
        pruning: see ``fit``.
        validation_loader: see ``fit``.
    """

    members: Sequence[Member]
    step: TrainStep
    minibatches: Callable[[int, int], Generator[Minibatch, None, None]]
    epochs: int
    batches: int
    warmup: KLWarmup
    noise: Callable[[], Noise]
    callback: Callback
    description: Callable[[], str]
    separate: bool = False
    pruning: PruningSchedule | None = None
    validation_loader: Loader | None = None

    def __post_init__(self) -> None:
        first = self.members[0]
        self._start, self._processes = first.position, first.processes
        self._network = first.elbo.bnn
        self._tell: Callable[[str], None] | None = getattr(self.callback, "on_note", None)
        self._told = ""
        self._kept: list[list[nn.Module]] = []

    def run(self) -> list[History]:
        """Train, and return the history of each network."""
        start, processes, loader = self._start, self._processes, self.validation_loader
        self._tell_backend()
        validation = None if loader is None else Division(loader, processes)
        history = list(start.history)
        self.callback.on_start(epochs=self.epochs, batches=self.batches, history=history)
        for member in self.members:
            if member.path is not None:
                member.path.parent.mkdir(parents=True, exist_ok=True)
                if processes.is_first:
                    remove_leftovers(member.path.parent, member.path.name)
            if start.epoch < self.epochs:  # the last epoch is another now
                member.position.lacks_comparison = False
            # Those that a user has frozen and set to evaluation mode stay there.
            bnn = member.elbo.bnn
            self._kept.append(frozen_in_evaluation(bnn.net, bnn.layout))
        with deferred_interrupt() as interrupt:
            processes.asked_to_stop = lambda: interrupt.requested
            if start.epoch == self.epochs and any(
                each.position.lacks_comparison for each in self.members
            ):
                # The process was killed between the two checkpoints after the last epoch.
                self._end_last_epoch(self._first_examples(self.epochs - 1))
            for epoch in range(start.epoch, self.epochs):
                self._run_epoch(epoch, validation)
        self._conclude()
        return [member.position.history for member in self.members]

    def _run_epoch(self, epoch: int, validation: Division | None) -> None:
        """Run an epoch, or what is left of it, and write the checkpoints."""
        first, last = self._start.batch, epoch + 1 == self.epochs
        started = time.perf_counter() - self._start.epoch_seconds
        examples = self._examples(epoch)
        meters = self._begin_epoch()
        with closing(self.minibatches(epoch, first)) as data:
            # Those of an epoch that is resumed were read again from its beginning.
            wanted = examples if last and not first else []
            copied = _copying_first(wanted, data, separate=self.separate)
            steps = run_steps(
                partial(self._step, epoch),
                copied,
                partial(self._options, epoch, meters[0]),
                self._network,
                1 if self.separate else sum(member.elbo.num_samples for member in self.members),
            )
            ended: int | None = None  # the minibatch of the optimiser's last step
            try:
                for minibatch, terms in _located(steps, self.members, epoch, first):
                    index = minibatch.batch
                    if epoch == index == 0 and self._processes.is_first:
                        likelihood = self._network.likelihood
                        warn_of_target_scale(likelihood, minibatch.targets)
                        outputs = terms[0].outputs
                        warn_of_softmax_outputs(likelihood, outputs)
                        warn_of_sigmoid_outputs(likelihood, self._network.net, outputs)
                    updated = self._end_step(meters, minibatch, terms)
                    ended = index if updated else None
                    self.callback.on_step(epoch=epoch, batch=index)
                    if not all(_is_training(each.elbo) for each in self.members):
                        self._set_modes()  # the callback measured in evaluation mode
                    if self._processes.stops and updated and index + 1 < self.batches:
                        self._stop_within(epoch, index, meters, started)
            except RuntimeError as error:
                if not self._has_lost_workers(error):
                    raise
                if ended is not None:
                    self._stop_within(epoch, ended, meters, started)
                raise KeyboardInterrupt from error
        self._tell_backend()
        seconds = time.perf_counter() - started
        for member, meter in zip(self.members, meters, strict=True):
            member.end_epoch(meter, epoch, seconds, validation)
            if last:
                member.position.lacks_comparison = True
        for member in self.members:
            member.checkpoint(self.noise())
        if last:  # after the checkpoint: nothing of the training can be lost
            self._end_last_epoch(examples)
        else:
            self._end_epoch()

    def _begin_epoch(self) -> list[EpochMeter]:
        """Set the networks to training mode, and return what measures the epoch of each."""
        if not self._processes.is_first:  # the first has what all measured before a resume
            for name in ("error", "error_count"):
                self._start.sums.pop(name, None)
        meters = [EpochMeter(each.elbo, self.batches, each.position.sums) for each in self.members]
        self._set_modes()
        for member in self.members:
            rate = float(member.optimizer.param_groups[0]["lr"])  # it may be a tensor
            member.position.sums.setdefault("learning_rate", rate)
        return meters

    def _options(self, epoch: int, meter: EpochMeter, minibatch: Minibatch) -> StepOptions:
        index = minibatch.batch
        return StepOptions(
            index,
            kl_scale=self.warmup.scale(epoch * self.batches + index, self.batches),
            with_kl=index + 1 == self.batches,
            with_residual=meter.wants_residual(index),
            share=minibatch.share,
        )

    def _step(self, epoch: int, minibatch: Minibatch, options: StepOptions) -> Sequence[ELBOTerms]:
        """Prune, if it is time, and make a step; an error tells whether the targets are wrong."""
        if self.pruning is not None:
            index = epoch * self.batches + minibatch.batch
            for each in self.members:
                self.pruning.prune(each.elbo.bnn, each.optimizer, index, self.batches)
        try:
            return self.step(minibatch, options)
        except NonFiniteLossError as error:
            k = error.network
            own = minibatch.targets[k] if self.separate else minibatch.targets
            error.has_wrong_targets = are_wrong(self.members[k].elbo.bnn.likelihood, own)
            raise

    def _end_step(
        self, meters: Sequence[EpochMeter], minibatch: Minibatch, terms: Sequence[ELBOTerms]
    ) -> bool:
        """Measure a step; returns whether the optimiser's step ended with it."""
        index, targets = minibatch.batch, minibatch.targets
        updated = self.members[0].accumulation.ends(index)
        for k, (member, meter) in enumerate(zip(self.members, meters, strict=True)):
            own = targets[k] if self.separate else targets
            meter.add(terms[k], own, batch=index, share=minibatch.share)
            if updated:
                member.schedule.step()
        return updated

    def _has_lost_workers(self, error: RuntimeError) -> bool:
        """Return whether Ctrl-C ended the worker processes of the loader.

        A terminal sends it to them too, and those that are spawned do not wait.
        """
        is_lost = self._processes.is_alone and "DataLoader worker" in str(error)
        return is_lost and self._processes.asked_to_stop()

    def _stop_within(
        self, epoch: int, index: int, meters: Sequence[EpochMeter], started: float
    ) -> NoReturn:
        """Write the checkpoints after a minibatch within an epoch, and stop.

        Raises:
            KeyboardInterrupt: always.
            NonFiniteLossError: a parameter is NaN or infinite.
        """
        for member in self.members:
            check_parameters(member.elbo, epoch, member.path)
        # All were checked before any is written, so that they are of one step.
        for member, meter in zip(self.members, meters, strict=True):
            meter.add_up(self._processes)
            self._processes.equalise_buffers(member.elbo.bnn.net)
            member.position.batch = index + 1
            member.position.epoch_seconds = time.perf_counter() - started
            member.checkpoint(self.noise())
        raise KeyboardInterrupt

    def _end_last_epoch(self, examples: Sequence[FirstExamples]) -> None:
        """Complete the last rows that lack the comparison, write their checkpoints again, and end.

        Args:
            examples: the first of the epoch for each network.
        """
        for k, (member, first) in enumerate(zip(self.members, examples, strict=True)):
            if not member.position.lacks_comparison:
                continue
            member.position.lacks_comparison = False
            failure = member.compare_with_untrained(first)
            if self._tell is not None and failure is not None:
                self._tell(self._of_network(k, failure))
            member.checkpoint(self.noise())
        self._end_epoch()

    def _end_epoch(self) -> None:
        """Call ``on_epoch``, and write the checkpoints again of the networks that it changes.

        They were written before, so that an error in the callback does not lose the epoch.

        Raises:
            KeyboardInterrupt: a process was asked to stop.
        """
        stored = [member for member in self.members if member.path is not None]
        before = [_state_of(member) for member in stored]
        self.callback.on_epoch(self.members[0].position.history[-1])
        for member, state in zip(stored, before, strict=True):
            if _state_of(member) != state:
                member.checkpoint(self.noise())
        self._processes.agree_to_stop()
        if self._processes.stops:
            raise KeyboardInterrupt

    def _conclude(self) -> None:
        """Report the free energy, and warn of standard deviations that have not converged."""
        for k, member in enumerate(self.members):
            history = member.position.history
            note = free_energy_note(history[-1]) if history else None
            if self._tell is not None and note is not None:
                self._tell(self._of_network(k, note))
        self._processes.wait()  # until the last checkpoint is written
        for member in self.members if self._processes.is_first else []:
            warn_of_convergence(
                member.position.history,
                self.epochs,
                self.warmup.epochs,
                stacklevel=5,
                tell=getattr(self.callback, "on_warning", None),
            )

    def _examples(self, epoch: int) -> list[FirstExamples]:
        """Return places for the first examples of the last epoch; of a resumed one, with them."""
        if epoch + 1 == self.epochs and self._start.batch:
            return self._first_examples(epoch)
        return [FirstExamples() for _ in self.members]

    def _first_examples(self, epoch: int) -> list[FirstExamples]:
        """Return the first examples of an epoch for each network."""
        examples = [FirstExamples() for _ in self.members]
        with closing(self.minibatches(epoch, 0)) as data:
            for _ in _copying_first(examples, data, separate=self.separate):
                if examples[0].are_enough:
                    break
        return examples

    def _set_modes(self) -> None:
        """Set the networks to training mode, and the parts that keep it to evaluation mode."""
        for member, parts in zip(self.members, self._kept, strict=True):
            member.elbo.train()
            for part in parts:
                part.eval()

    def _tell_backend(self) -> None:
        """Report the backend if it is another than was reported."""
        if self._tell is not None and self.description() != self._told:
            self._told = self.description()
            self._tell(f"backend: {self._told}")

    def _of_network(self, k: int, note: str) -> str:
        """Return a note about network ``k``, with its number where there are several."""
        return note if len(self.members) == 1 else f"network {k}: {note}"


def _state_of(member: Member) -> list[object]:
    """Return what shows a change of what a checkpoint holds, other than edits of ``.data``."""
    elbo, optimizer = member.elbo, member.optimizer
    states = [list(state.items()) for state in optimizer.state.values()]
    averages = [v for state in states for _, v in state if isinstance(v, Tensor)]
    numbers = [(n, deepcopy(v)) for state in states for n, v in state if not isinstance(v, Tensor)]
    tensors = [*elbo.parameters(), *elbo.buffers(), *averages]
    settings = [
        {n: v.item() if isinstance(v, Tensor) else v for n, v in group.items() if n != "params"}
        for group in optimizer.param_groups
    ]
    return [
        elbo.step,
        elbo.running,
        settings,
        numbers,
        scheduler_meta(member.schedule),
        *((id(t), t.requires_grad, version_of(t)) for t in tensors),
    ]


def _is_training(elbo: ELBO) -> bool:
    return elbo.training and elbo.bnn.training and elbo.bnn.net.training


def _copying_first(
    examples: Sequence[FirstExamples], minibatches: Iterable[Minibatch], *, separate: bool
) -> Iterator[Minibatch]:
    """Yield minibatches, after the examples of each network have copied what they lack."""
    for minibatch in minibatches:
        for k, each in enumerate(examples):
            if not each.are_enough:
                own = minibatch.of_network(k) if separate else minibatch
                each.add(own.inputs, own.targets)
        yield minibatch  # a step may edit the inputs


def _located(
    steps: Iterator[tuple[Minibatch, Sequence[ELBOTerms]]],
    members: Sequence[Member],
    epoch: int,
    first: int,
) -> Iterator[tuple[Minibatch, Sequence[ELBOTerms]]]:
    """The steps, where a NonFiniteLossError names epoch, minibatch and the last checkpoint."""
    index = first
    try:
        for minibatch, terms in steps:
            yield minibatch, terms
            index = minibatch.batch + 1
    except NonFiniteLossError as error:
        what = str(error).removesuffix(" is NaN or infinite")
        if len(members) > 1:
            what = f"network {error.network}: {what}"
        where = f"{what} (epoch {epoch + 1}, minibatch {index + 1})"
        path = members[error.network].path
        message = diverged(where, path, has_wrong_targets=error.has_wrong_targets)
        raise NonFiniteLossError(message) from None
