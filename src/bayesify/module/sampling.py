"""Outputs of a network under many weight samples, computed batch by batch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from bayesify.estimators import stateless
from bayesify.estimators.stateless import is_out_of_memory
from bayesify.module.batching import Batching
from bayesify.module.inputs import (
    WHOLE,
    Inputs,
    arguments_of,
    batches_of,
    check_rows,
    count_examples,
)
from bayesify.module.pass_memory import UnfusedAttention
from bayesify.module.random_network import RandomNetwork
from bayesify.module.run_once import run_once

__all__ = ["SampledOutputs", "run_in_batches"]

_REFRESH_S = 0.2
# Bytes of the weight samples that one prediction keeps for its next batch.
_LARGEST_KEPT = 10**9


class SampledOutputs:
    """A network's outputs (N, ...) under each of S weight samples, computed on iteration.

    Args:
        network: the network, in evaluation mode.
        inputs: as for ``BayesianModule.predict``.
        draw: draws weight samples by index, shape (S, D).
        num_samples: S, the number of weight samples.
        batching: the number of examples and of weight samples in one pass.
        once: parts of the network that are run once for all samples, see :func:`run_once`; the
            outputs of all samples are then held at once.

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
        once: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self._network = network
        self._inputs = inputs
        self._draw = draw
        self._num_samples = num_samples
        self._batching = batching
        self._once = once

    def __len__(self) -> int:
        return self._num_samples

    def __iter__(self) -> Iterator[Tensor]:
        for block in self.blocks():
            yield from block.unbind()

    def blocks(self) -> Iterator[Tensor]:
        """Yield the outputs of the samples that shared a pass, shape (S_i, N, ...)."""
        outputs = self._outputs_by_batch() if self._once else self._outputs()
        return _with_progress(outputs, self._num_samples)

    def _outputs(self) -> Iterator[Tensor]:
        batch_size, group, first = self._batching.batch_size, self._batching.group, 0
        while first < self._num_samples:
            samples = range(first, min(first + group, self._num_samples))
            weights = self._draw(samples)
            if len(samples) == 1:
                outputs = run_in_batches(self._network, weights[0], self._inputs, batch_size)
                yield outputs.unsqueeze(0)
            else:
                block = self._run_group(weights)
                if block is None:
                    group = 1  # the weights are drawn again, as the network may have edited them
                    continue
                yield block
            first = samples.stop

    def _outputs_by_batch(self) -> Iterator[Tensor]:
        """Yield the outputs of each sample, after all batches have seen all samples."""
        parts: list[list[Tensor]] = [[] for _ in range(self._num_samples)]
        kept: dict[int, Tensor] = {}  # drawing them anew for each batch could cost more than a pass
        batch_size = self._batching.batch_size
        num_examples = WHOLE if batch_size == WHOLE else count_examples(self._inputs)
        for args, kwargs in batches_of(self._inputs, batch_size):
            with run_once(self._once or {}) as begin:
                for sample, own in enumerate(parts):
                    begin()
                    if sample in kept:
                        weights = kept[sample].clone()  # the network may edit its weights in place
                    else:
                        weights = self._draw(range(sample, sample + 1))[0]
                        fits = (len(kept) + 1) * weights.nbytes <= _LARGEST_KEPT
                        if fits and batch_size < num_examples:
                            kept[sample] = weights.clone()
                    part = self._network.tensor_of(self._network.run_with(weights, *args, **kwargs))
                    if batch_size < num_examples:
                        check_rows(part, len([*args, *kwargs.values()][0]))
                    own.append(part.clone())
        for own in parts:
            yield (own[0] if len(own) == 1 else torch.cat(own)).unsqueeze(0)

    def _run_group(self, weights: Tensor) -> Tensor | None:
        """Return the outputs of several weight vectors in one pass, or None if vmap fails."""
        args, kwargs = arguments_of(self._inputs)
        network = self._network
        undo = stateless.snapshot(network.net)
        try:
            with UnfusedAttention():
                outputs: Tensor = torch.vmap(
                    lambda row: network.tensor_of(network.run_with(row, *args, **kwargs))
                )(weights)
        except Exception as error:
            # The user's network may fail under vmap with any error; a loop then runs it without
            # vmap, and raises errors that are not due to vmap again.
            undo()
            if is_out_of_memory(error):
                raise
            return None
        return outputs


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
    network: RandomNetwork, weights: Tensor, inputs: Inputs, batch_size: int
) -> Tensor:
    """Return the outputs (N, ...) under one weight vector, ``batch_size`` examples at a time.

    Raises:
        ValueError: the outputs of a batch are not rows of examples.

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
        is_last = start + batch_size >= num_examples
        own = weights if is_last else weights.clone()  # the network may edit its weights in place
        part = network.tensor_of(network.run_with(own, *args, **kwargs))
        if batch_size >= num_examples:
            return part.clone()  # neither a view of a larger tensor, nor one that the network holds
        stop = min(start + batch_size, num_examples)
        check_rows(part, stop - start)
        if outputs is None:
            outputs = part.new_empty((num_examples, *part.shape[1:]))
        outputs[start:stop] = part
        start = stop
    assert outputs is not None
    return outputs
