"""The training loop, shared by fit, fit_replicas and bandit agents."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from copy import deepcopy
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from bayesify.estimators.network_state import frozen_in_evaluation
from bayesify.module.inputs import Inputs
from bayesify.module.random_network import RandomNetwork
from bayesify.module.recorded_pass import version_of
from bayesify.module.threads import one_thread_if_small, rows_of
from bayesify.training.backends import Noise, NonFiniteLossError
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
from bayesify.training.fit_warnings import warn_of_softmax_outputs, warn_of_target_scale
from bayesify.training.free_energy import FirstExamples, free_energy_note
from bayesify.training.history import EpochMeter, History
from bayesify.training.interrupt import deferred_interrupt
from bayesify.training.member import Member
from bayesify.training.minibatches import Loader
from bayesify.training.progress import Callback
from bayesify.training.pruning_schedule import PruningSchedule
from bayesify.training.schedules import KLWarmup

__all__ = ["Minibatch", "StepOptions", "TrainStep", "run_epochs", "run_steps"]


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


class StepOptions(NamedTuple):
    """The arguments of ``Backend.step`` that change from step to step."""

    kl_scale: float = 1.0
    with_kl: bool = False
    with_residual: bool = False


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


def run_epochs(
    members: Sequence[Member],
    step: TrainStep,
    minibatches: Callable[[int, int], Generator[Minibatch, None, None]],
    *,
    epochs: int,
    batches: int,
    warmup: KLWarmup,
    noise: Callable[[], Noise],
    callback: Callback,
    description: Callable[[], str],
    separate: bool = False,
    pruning: PruningSchedule | None = None,
    validation_loader: Loader | None = None,
) -> list[History]:
    """Train from where the members stand to the last epoch.

    Args:
        members: K networks at the same position.
        step: one step of all of them.
        minibatches: those of an epoch, from an index on.
        epochs: in all.
        batches: minibatches an epoch.
        warmup: of the KL.
        noise: the noise of the steps, for the checkpoint.
        callback: see ``fit``.
        separate: whether inputs and targets have a leading axis of size K.
        pruning: see ``fit``.
        validation_loader: see ``fit``.
        description: of the backend, for the callback; told again if the first epoch changes it.
    """
    told, tell = "", getattr(callback, "on_note", None)
    if tell is not None:
        tell(f"backend: {(told := description())}")
    start, processes = members[0].position, members[0].processes
    validation = None if validation_loader is None else Division(validation_loader, processes)
    callback.on_start(epochs=epochs, batches=batches, history=list(start.history))
    for member in members:
        if member.path is not None:
            member.path.parent.mkdir(parents=True, exist_ok=True)
        if start.epoch < epochs:  # the last epoch is another now
            member.lacks_comparison = False
    # Those that a user has frozen and set to evaluation mode stay there.
    kept = [frozen_in_evaluation(each.elbo.bnn.net, each.elbo.bnn.layout) for each in members]
    passes = 1 if separate else sum(member.elbo.num_samples for member in members)
    with deferred_interrupt() as interrupt:
        processes.asked_to_stop = lambda: interrupt.requested
        if start.epoch == epochs and any(each.lacks_comparison for each in members):
            # The process was killed between the two checkpoints after the last epoch.
            examples = [FirstExamples() for _ in members]
            _add_first(examples, minibatches(epochs - 1, 0), separate=separate)
            _compare_with_untrained(members, examples, noise, tell)
            _call_on_epoch(callback, members, noise)
            processes.agree_to_stop()
            if processes.stops:
                raise KeyboardInterrupt
        for epoch in range(start.epoch, epochs):
            started = time.perf_counter() - start.epoch_seconds
            last = epoch + 1 == epochs
            examples = [FirstExamples() for _ in members]
            is_resumed = start.batch > 0  # within the epoch
            if last and is_resumed:
                _add_first(examples, minibatches(epoch, 0), separate=separate)
            if not processes.is_first:  # the first has what all measured before a resume
                for name in ("error", "error_count"):
                    start.sums.pop(name, None)
            meters = [EpochMeter(each.elbo, batches, each.position.sums) for each in members]
            _set_modes(members, kept)
            for member in members:
                rate = float(member.optimizer.param_groups[0]["lr"])  # it may be a tensor
                member.position.sums.setdefault("learning_rate", rate)

            def options_of(
                minibatch: Minibatch, epoch: int = epoch, meter: EpochMeter = meters[0]
            ) -> StepOptions:
                index = minibatch.batch
                return StepOptions(
                    kl_scale=warmup.scale(epoch * batches + index, batches),
                    with_kl=index + 1 == batches,
                    with_residual=meter.wants_residual(index),
                )

            def pruned_step(
                minibatch: Minibatch, options: StepOptions, epoch: int = epoch
            ) -> Sequence[ELBOTerms]:
                if pruning is not None:
                    index = epoch * batches + minibatch.batch
                    for each in members:
                        pruning.prune(each.elbo.bnn, each.optimizer, index, batches)
                try:
                    return step(minibatch, options)
                except NonFiniteLossError as error:
                    k = error.network
                    own = minibatch.targets[k] if separate else minibatch.targets
                    error.has_wrong_targets = are_wrong(members[k].elbo.bnn.likelihood, own)
                    raise

            with closing(minibatches(epoch, start.batch)) as data:
                wanted = examples if last and not is_resumed else []
                copied = _copying_first(wanted, data, separate=separate)
                steps = run_steps(pruned_step, copied, options_of, members[0].elbo.bnn, passes)
                for minibatch, terms in _located(steps, members, epoch, start.batch):
                    index, targets = minibatch.batch, minibatch.targets
                    updated = members[0].accumulation.ends(index)
                    if epoch == index == 0 and processes.is_first:
                        likelihood = members[0].elbo.bnn.likelihood
                        warn_of_target_scale(likelihood, targets, stacklevel=3)
                        warn_of_softmax_outputs(likelihood, terms[0].outputs, stacklevel=3)
                    for k, (member, meter) in enumerate(zip(members, meters, strict=True)):
                        own = targets[k] if separate else targets
                        meter.add(terms[k], own, batch=index, share=minibatch.share)
                        if updated:
                            member.schedule.step()
                    callback.on_step(epoch=epoch, batch=index)
                    if not all(_is_training(each.elbo) for each in members):
                        _set_modes(members, kept)  # it measured in evaluation mode
                    if processes.stops and updated and index + 1 < batches:
                        for member in members:
                            check_parameters(member.elbo, epoch, member.path)
                        # All were checked before any is written, so that they are of one step.
                        for member, meter in zip(members, meters, strict=True):
                            meter.add_up(processes)
                            processes.equalise_buffers(member.elbo.bnn.net)
                            member.position.batch = index + 1
                            member.position.epoch_seconds = time.perf_counter() - started
                            member.checkpoint(noise())
                        raise KeyboardInterrupt
            if tell is not None and description() != told:
                tell(f"backend: {(told := description())}")
            seconds = time.perf_counter() - started
            for member, meter in zip(members, meters, strict=True):
                member.end_epoch(meter, epoch, seconds, validation)
                if last:
                    member.lacks_comparison = True
            for member in members:
                member.checkpoint(noise())
            if last:  # after the checkpoint: nothing of the training can be lost
                _compare_with_untrained(members, examples, noise, tell)
            _call_on_epoch(callback, members, noise)
            processes.agree_to_stop()
            if processes.stops:
                raise KeyboardInterrupt
    for k, member in enumerate(members):
        note = free_energy_note(member.position.history[-1]) if member.position.history else None
        if tell is not None and note is not None:
            tell(_of_network(k, members, note))
    processes.wait()  # until the last checkpoint is written
    for member in members if processes.is_first else []:
        warn_of_convergence(
            member.position.history,
            epochs,
            warmup.epochs,
            stacklevel=4,
            tell=getattr(callback, "on_warning", None),
        )
    return [member.position.history for member in members]


def _call_on_epoch(
    callback: Callback, members: Sequence[Member], noise: Callable[[], Noise]
) -> None:
    """Call ``on_epoch``, and write the checkpoints again of the networks that it changes.

    They were written before, so that an error in the callback does not lose the epoch.
    """
    stored = [member for member in members if member.path is not None]
    before = [_state_of(member) for member in stored]
    callback.on_epoch(members[0].position.history[-1])
    for member, state in zip(stored, before, strict=True):
        if _state_of(member) != state:
            member.checkpoint(noise())


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
        *(elbo.step, elbo.running, settings, numbers, scheduler_meta(member.schedule)),
        *((id(t), t.requires_grad, version_of(t)) for t in tensors),
    ]


def _set_modes(members: Sequence[Member], kept: Sequence[Sequence[nn.Module]]) -> None:
    """Set the networks to training mode, and the parts of each that keep it to evaluation mode."""
    for member, parts in zip(members, kept, strict=True):
        member.elbo.train()
        for part in parts:
            part.eval()


def _is_training(elbo: ELBO) -> bool:
    return elbo.training and elbo.bnn.training and elbo.bnn.net.training


def _compare_with_untrained(
    members: Sequence[Member],
    examples: Sequence[FirstExamples],
    noise: Callable[[], Noise],
    tell: Callable[[str], None] | None,
) -> None:
    """Complete the last rows that lack the comparison, and write their checkpoints again."""
    for k, (member, first) in enumerate(zip(members, examples, strict=True)):
        if not member.lacks_comparison:
            continue
        member.lacks_comparison = False
        failure = member.compare_with_untrained(first)
        if tell is not None and failure is not None:
            tell(_of_network(k, members, failure))
        member.checkpoint(noise())


def _of_network(k: int, members: Sequence[Member], note: str) -> str:
    """A note about network ``k``, with its number where there are several."""
    return note if len(members) == 1 else f"network {k}: {note}"


def _add_first(
    examples: Sequence[FirstExamples],
    minibatches: Generator[Minibatch, None, None],
    *,
    separate: bool,
) -> None:
    """Add the first minibatches of an epoch to the examples of each network."""
    with closing(minibatches) as data:
        for _ in _copying_first(examples, data, separate=separate):
            if examples[0].are_enough:
                return


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
