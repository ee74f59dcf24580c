"""Outputs of a network under many weight samples, computed batch by batch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from bayesify.estimators.module_attributes import ModuleAttributes
from bayesify.estimators.network_state import snapshot
from bayesify.estimators.out_of_memory import is_out_of_memory
from bayesify.module.batching import MIN_GROUP, Batching, kind_of_pass, shared_group
from bayesify.module.edited_inputs import Repeated
from bayesify.module.inputs import (
    WHOLE,
    Inputs,
    arguments_of,
    batches_of,
    check_output_rows,
    count_examples,
    num_batches,
)
from bayesify.module.pass_memory import MemoryTracker
from bayesify.module.random_network import RandomNetwork
from bayesify.module.shared_pass import in_one_pass
from bayesify.module.trunk import Trunk, may_have_trunk

__all__ = ["SampledOutputs", "run_in_batches"]

_REFRESH_S = 0.2
# Fewer samples do not pay for the first pass of a trunk.
_LEAST_SAMPLES = 5
# Bytes of the weight samples that one prediction keeps for its next batch.
_LARGEST_KEPT = 10**9
# Bytes of the outputs of all batches and samples; they take twice as much while they are joined.
_LARGEST_HELD = 5 * 10**8
# Bytes of outputs that are averaged at once, which takes some eight times as many.
_BLOCK = 10**6


class SampledOutputs:
    """A network's outputs (N, ...) under each of S weight samples, computed on iteration.

    Args:
        network: the network, in evaluation mode.
        inputs: as for ``BayesianModule.predict``.
        draw: draws weight samples by index, shape (S, D).
        num_samples: S, the number of weight samples.
        batching: the number of examples and of weight samples in one pass.
        checked: which kinds of passes have been found right with a :class:`Trunk`, and which wrong,
            to be kept for later predictions; None if no pass may have one.

    Example:
        >>> from torch import nn
        >>> from bayesify.distributions.posteriors import MeanFieldGaussian
        >>> from bayesify.module.kept_samples import sampler_of
        >>> from bayesify.noise.keys import NoiseKey, Stream
        >>> network = RandomNetwork(nn.Linear(3, 2), posterior=MeanFieldGaussian)
        >>> draw = sampler_of(network.posterior, NoiseKey(0, Stream.PREDICTION, 0))
        >>> with torch.no_grad():
        ...     batching = Batching(batch_size=5, group=1)
        ...     outputs = list(SampledOutputs(network, torch.zeros(5, 3), draw, 2, batching))
        >>> [part.shape for part in outputs]
        [torch.Size([5, 2]), torch.Size([5, 2])]
    """

    def __init__(
        self,
        network: RandomNetwork,
        inputs: Inputs,
        draw: Callable[[range], Tensor],
        num_samples: int,
        batching: Batching,
        *,
        checked: dict[object, bool] | None = None,
    ) -> None:
        self._network = network
        self._inputs = inputs
        self._draw = draw
        self._num_samples = num_samples
        self._batching = batching
        self._checked = checked

    def __len__(self) -> int:
        return self._num_samples

    def __iter__(self) -> Iterator[Tensor]:
        for block in self.blocks():
            yield from block.unbind()

    def blocks(self) -> Iterator[Tensor]:
        """Yield the outputs of the samples that shared a pass, shape (S_i, N, ...)."""
        # Samples that share a pass compute once what depends on none of them.
        has_trunk = (
            self._checked is not None
            and self._batching.group == 1
            and not self._batching.caches_weights
            and self._num_samples >= _LEAST_SAMPLES
            and may_have_trunk(self._network.net)
        )
        outputs = self._outputs_by_batch() if has_trunk else self._outputs()
        for block in _with_progress(outputs, self._num_samples):
            _check_has_rows(block[0])
            yield block

    def _outputs(self, first: int = 0) -> Iterator[Tensor]:
        """Yield the outputs from sample ``first`` on."""
        batch_size, group = self._batching.batch_size, self._batching.group
        passes = Repeated(num_batches(self._inputs, batch_size))
        before = ModuleAttributes(self._network.net) if self._batching.caches_weights else None
        while first < self._num_samples:
            if before is not None:
                before.restore()
            samples = range(first, min(first + group, self._num_samples))
            weights = self._draw(samples)
            if len(samples) == 1:
                outputs = run_in_batches(
                    self._network, weights[0], self._inputs, batch_size, passes
                )
                yield outputs.unsqueeze(0)
            else:
                block = self._run_group(weights, *passes.take(arguments_of(self._inputs)))
                if block is None:
                    group = 1  # the weights are drawn again, as the network may have edited them
                    continue
                yield block
            first = samples.stop

    def _outputs_by_batch(self) -> Iterator[Tensor]:
        """Yield the outputs of all samples, where each batch has its trunk.

        Several batches are held until all have seen all samples. Where a network has no trunk, or
        they would take too much memory, the samples that are left run as without.
        """
        batch_size = self._batching.batch_size
        num_examples = WHOLE if batch_size == WHOLE else count_examples(self._inputs)
        if batch_size >= num_examples:
            first = 0
            for block in self._outputs_of(self._draw, *arguments_of(self._inputs), is_part=False):
                yield block
                first += len(block)
            yield from self._outputs(first)
            return
        draw, at_once = self._drawn_once(), 1
        batches: list[Tensor] = []
        for args, kwargs in batches_of(self._inputs, batch_size):
            blocks = []
            for block in self._outputs_of(draw, args, kwargs, is_part=True):
                earlier = batches[0][0] if batches else None
                check_output_rows(block[0], count_examples(kwargs or args), earlier)
                blocks.append(block)
                if block[0].nbytes / batch_size * num_examples > _LARGEST_HELD / self._num_samples:
                    break
            if sum(map(len, blocks)) < self._num_samples:
                yield from self._outputs()
                return
            if len(blocks) < self._num_samples:  # else averaged one by one too, as without a trunk
                at_once = self._num_samples
            batches.append(torch.cat(blocks))
        outputs = torch.cat(batches, dim=1)
        yield from outputs.split(max(1, min(at_once, _BLOCK // max(1, outputs[0].nbytes))))

    def _drawn_once(self) -> Callable[[range], Tensor]:
        """Return a function that draws like ``_draw``, of which each batch gets the same tensors.

        Drawing a sample anew for each batch could cost more than a pass.
        """
        vector = self._network.posterior.mean.nbytes
        kept = min(self._num_samples, _LARGEST_KEPT // max(1, vector))
        rows: Tensor | None = None

        def draw(samples: range) -> Tensor:
            nonlocal rows
            if samples.stop > kept:
                return self._draw(samples)
            if rows is None and samples.start:  # a network without a trunk needs the first only
                rows = self._draw(range(kept))
            if rows is None:
                return self._draw(samples)
            # The network may edit its weights in place.
            return rows[samples.start : samples.stop].clone()

        return draw

    def _outputs_of(
        self,
        draw: Callable[[range], Tensor],
        args: tuple[Tensor, ...],
        kwargs: Mapping[str, Tensor],
        *,
        is_part: bool,
    ) -> Iterator[Tensor]:
        """Yield the outputs of a batch under each sample, shape (S_i, B, ...), by its trunk.

        If it has none, or loses it, the samples that are left are not yielded.

        What is left of a pass is measured with the second sample, and shared by the samples that
        follow where that is faster. The second sample of the first batch of its kind runs whole,
        too: where the outputs differ, no batch of that kind has a trunk from then on.
        """
        trunk, passes, checked = Trunk(self._network), Repeated(), self._checked
        assert checked is not None
        kind = kind_of_pass(self._network, self._inputs)

        def inputs() -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
            # Other objects, which a network may mark or reshape.
            taken = passes.take((args, dict(kwargs)))
            detached: tuple[tuple[Tensor, ...], dict[str, Tensor]]
            detached = tree_map_only(Tensor, torch.Tensor.detach, taken)
            return detached

        if checked.get(kind) is False:
            return
        undo = snapshot(self._network.net) if kind not in checked else None
        try:
            outputs = trunk.first(draw(range(1))[0], *inputs())
        except Exception as error:  # the user's network may raise any kind of error
            if is_out_of_memory(error):
                raise
            checked[kind] = False
            return  # a whole pass raises it again, if it is the network's
        if not trunk.is_sound:  # else it may pay for a larger batch
            checked[kind] = False
        if trunk.is_used or not is_part:
            yield outputs.clone().unsqueeze(0)
        elif undo is not None:
            undo()  # all samples begin again
        del outputs
        first, group = 1, 1
        while trunk.is_used and first < self._num_samples:
            samples = range(first, min(first + group, self._num_samples))
            weights, left = draw(samples), self._num_samples - samples.stop
            is_measured = first == 1 and left >= MIN_GROUP and not self._batching.may_edit_weights
            tracker, taken = MemoryTracker(), inputs()
            # The network may edit its weights in place.
            again = None if kind in checked else weights[0].clone()
            try:
                if len(samples) > 1:
                    block = self._run_group(weights, *taken, run=trunk.again)
                else:
                    with tracker if is_measured else nullcontext():
                        outputs = trunk.again(weights[0], *taken)
                    block = outputs.clone().unsqueeze(0)
                    del outputs
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                trunk.is_used = False
            if not trunk.is_used:
                checked[kind] = False
                return
            if block is None:
                group = 1
                continue
            if again is not None:
                checked[kind] = _are_close(self._run(again, *inputs()), block[0])
                if not checked[kind]:
                    return
            if is_measured and tracker.vectorises:
                group = shared_group(tracker.peak, weights[0], left)
            yield block
            first = samples.stop

    def _run_group(
        self,
        weights: Tensor,
        args: tuple[Tensor, ...],
        kwargs: Mapping[str, Tensor],
        *,
        run: Callable[..., Tensor] | None = None,
    ) -> Tensor | None:
        """Return the outputs of several weight vectors in one pass, or None if vmap fails."""
        run = self._run if run is None else run
        return in_one_pass(self._network.net, lambda row: run(row, args, kwargs), weights)

    def _run(
        self, weights: Tensor, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]
    ) -> Tensor:
        return self._network.tensor_of(self._network.run_with(weights, *args, **kwargs))


def _are_close(some: Tensor, others: Tensor) -> bool:
    """Return whether outputs are the same but for rounding."""
    tolerance = 1e-3 if others.dtype in (torch.float32, torch.float64) else 3e-2
    some, others = some.double(), others.double()
    scale = float(some.abs().nan_to_num(posinf=0.0).max()) if some.numel() else 0.0
    return torch.allclose(some, others, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _with_progress(blocks: Iterator[Tensor], total: int) -> Iterator[Tensor]:
    """Yield the blocks; where they take over a second, count their samples on a terminal."""
    terminal = sys.stderr
    # Not where another program's display, such as a progress bar, has put itself in between.
    is_direct = terminal is sys.__stderr__
    is_shown = is_direct and terminal is not None and terminal.isatty()
    begun = last = time.monotonic()
    line, done = "", 0
    try:
        for block in blocks:
            now = time.monotonic()
            if is_shown and now - begun > 1.0 and now - last > _REFRESH_S:
                line, last = f"predict: {done} of {total} weight samples", now
                print(f"\r{line}", end="", file=terminal, flush=True)
            done += len(block)
            yield block
    finally:
        if line:
            print(f"\r{' ' * len(line)}\r", end="", file=terminal, flush=True)


def run_in_batches(
    network: RandomNetwork,
    weights: Tensor,
    inputs: Inputs,
    batch_size: int,
    passes: Repeated | None = None,
) -> Tensor:
    """Return the outputs (N, ...) under one weight vector, ``batch_size`` examples at a time.

    Args:
        network: the network, in evaluation mode.
        weights: shape (D,).
        inputs: as for ``BayesianModule.predict``.
        batch_size: the number of examples in one pass.
        passes: of all weight vectors with these inputs, if there are several.

    Raises:
        ValueError: the outputs of a batch are not rows of examples, or have another shape than
            those of the batch before.

    Example:
        >>> from torch import nn
        >>> from bayesify.distributions.posteriors import MeanFieldGaussian
        >>> network = RandomNetwork(nn.Linear(3, 2), posterior=MeanFieldGaussian)
        >>> run_in_batches(network, torch.zeros(8), torch.ones(5, 3), batch_size=2).shape
        torch.Size([5, 2])
    """
    num_examples, start = WHOLE if batch_size == WHOLE else count_examples(inputs), 0
    outputs: Tensor | None = None
    for args, kwargs in batches_of(inputs, batch_size):
        if passes is not None:
            args, kwargs = passes.take((args, kwargs))
        is_last = start + batch_size >= num_examples
        own = weights if is_last else weights.clone()  # the network may edit its weights in place
        part = network.tensor_of(network.run_with(own, *args, **kwargs))
        if batch_size >= num_examples:
            _check_has_rows(part)
            return part.clone()  # neither a view of a larger tensor, nor one that the network holds
        stop = min(start + batch_size, num_examples)
        check_output_rows(part, stop - start, outputs)
        if outputs is None:
            outputs = part.new_empty((num_examples, *part.shape[1:]))
        outputs[start:stop] = part
        start = stop
    assert outputs is not None
    return outputs


def _check_has_rows(outputs: Tensor) -> None:
    """Check the outputs of a single batch, whose axes may be others than N examples first."""
    if outputs.dim() == 0:
        raise ValueError(
            "the network must return a row for each example, got a single number; where squeeze() "
            "removes the axis of one example, use squeeze(-1)"
        )
