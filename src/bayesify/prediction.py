"""The network's outputs under many weight samples, for many data: made in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bayesify import stateless
from bayesify.footprint import SlowPath
from bayesify.inputs import Inputs, arguments_of, batches_of, check_rows, count_data
from bayesify.noise import NoiseKey
from bayesify.pieces import Pieces
from bayesify.posteriors import MeanFieldGaussian, Posterior
from bayesify.random_network import RandomNetwork, as_tensor

__all__ = ["SampledOutputs", "run_in_batches"]


class SampledOutputs:
    """A network's outputs (N, ...) under each of S weight samples, made as they are asked for.

    Args:
        network: in evaluation mode.
        inputs: as for ``BayesianModule.predict``.
        key: the noise of the weights.
        num_samples: S.
        pieces: how many at once.

    Example:
        >>> from torch import nn
        >>> from bayesify.noise import Stream
        >>> network = RandomNetwork(nn.Linear(3, 2), posterior=MeanFieldGaussian)
        >>> key, x = NoiseKey(0, Stream.PREDICTION, 0), torch.zeros(5, 3)
        >>> with torch.no_grad():
        ...     outputs = list(SampledOutputs(network, x, key, 2, Pieces(batch_size=5, group=1)))
        >>> [part.shape for part in outputs]
        [torch.Size([5, 2]), torch.Size([5, 2])]
    """

    def __init__(
        self,
        network: RandomNetwork,
        inputs: Inputs,
        key: NoiseKey,
        num_samples: int,
        pieces: Pieces,
    ) -> None:
        self._network = network
        self._inputs = inputs
        self._key = key
        self._num_samples = num_samples
        self._pieces = pieces

    def __len__(self) -> int:
        return self._num_samples

    def __iter__(self) -> Iterator[Tensor]:
        draw = _draws(self._network.posterior)
        (batch_size, group), first = self._pieces, 0
        while first < self._num_samples:
            samples = range(first, min(first + group, self._num_samples))
            weights = draw(self._key, samples)
            if len(samples) == 1:
                yield run_in_batches(self._network, weights[0], self._inputs, batch_size)
            else:
                shared = self._shared(weights)
                if shared is None:
                    group = 1  # and weights anew: the network may have edited these
                    continue
                yield from shared.unbind()
            first = samples.stop

    def _shared(self, weights: Tensor) -> Tensor | None:
        """Outputs under several weight vectors in one pass, or None if that is not possible."""
        args, kwargs = arguments_of(self._inputs)
        network = self._network
        undo = stateless.snapshot(network.net)
        try:
            with SlowPath():
                outputs: Tensor = torch.vmap(
                    lambda row: as_tensor(network.run_with(row, *args, **kwargs))
                )(weights)
        except Exception:
            undo()
            return None
        return outputs


def _draws(posterior: Posterior) -> Callable[[NoiseKey, range], Tensor]:
    if type(posterior) is not MeanFieldGaussian:
        return lambda key, samples: posterior.draw(posterior.noise(key, samples)).weights
    mean, std = posterior.masked_mean.detach(), posterior.std.detach()

    def draw(key: NoiseKey, samples: range) -> Tensor:
        # The very numbers of posterior.draw, with std computed once and in place.
        noise = posterior.noise(key, samples)
        return torch.addcmul(mean, std, noise, out=noise)

    return draw


def run_in_batches(
    network: RandomNetwork, weights: Tensor, inputs: Inputs, batch_size: int
) -> Tensor:
    """The outputs (N, ...) under one weight vector, of ``batch_size`` data at a time.

    Raises:
        ValueError: the outputs of a batch are no rows of data.

    Example:
        >>> from torch import nn
        >>> network = RandomNetwork(nn.Linear(3, 2), posterior=MeanFieldGaussian)
        >>> run_in_batches(network, torch.zeros(8), torch.ones(5, 3), batch_size=2).shape
        torch.Size([5, 2])
    """
    num_data, start = count_data(inputs), 0
    outputs: Tensor | None = None
    for args, kwargs in batches_of(inputs, batch_size):
        part = as_tensor(network.run_with(weights, *args, **kwargs))
        if batch_size >= num_data:
            return part.clone()  # no view of more, nor what the network keeps
        stop = min(start + batch_size, num_data)
        check_rows(part, stop - start)
        if outputs is None:
            outputs = part.new_empty((num_data, *part.shape[1:]))
        outputs[start:stop] = part
        start = stop
    assert outputs is not None
    return outputs
