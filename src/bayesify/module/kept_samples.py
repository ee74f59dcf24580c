"""Weight samples that repeated predictions have in common, kept while the posterior stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from bayesify.distributions.posteriors import MeanFieldGaussian, Posterior
from bayesify.noise.keys import NoiseKey

__all__ = ["KeptSamples", "sampler_of"]

# Bytes of all vectors that one network keeps, and the least number of samples worth keeping.
_LARGEST = 256 * 10**6
_FEWEST = 10


class _Samples(NamedTuple):
    """Room for weight samples, shape (S, D), and the indices of those that are there."""

    rows: Tensor
    indices: set[int]


@dataclass
class _Kept:
    """The posterior's tensors at the last prediction, and weight samples drawn from them."""

    key: NoiseKey
    state: dict[str, Tensor]
    capacity: int
    samples: _Samples

    def room_for(self, num_samples: int) -> _Samples:
        """Return room for as many samples as are needed and fit, with what is there already."""
        count, (rows, indices) = min(num_samples, self.capacity), self.samples
        if len(rows) < count:
            there = set(indices)  # before the rows: another thread may add samples meanwhile
            more = rows.new_empty((count, rows.shape[1]))
            more[: len(rows)] = rows
            self.samples = _Samples(more, there)
        return self.samples


class KeptSamples:
    """Weight samples of a mean-field Gaussian, drawn once for predictions in a row.

    The second prediction with the same seed and posterior keeps its samples, as far as 256 MB a
    network suffice, and later ones use them. Whether the posterior has changed is found by
    comparing its values, so that any way of changing them counts. Copies and pickles are empty.

    Example:
        >>> from bayesify.noise.keys import Stream
        >>> posterior, kept = MeanFieldGaussian(torch.zeros(3), std=0.1), KeptSamples()
        >>> key = NoiseKey(0, Stream.PREDICTION, 0)
        >>> with torch.no_grad():
        ...     for _ in range(2):
        ...         weights = kept.sampler(posterior, key, num_samples=5)(range(5))
        ...     torch.equal(weights, posterior.draw(posterior.noise(key, range(5))).weights)
        True
        >>> len(kept)
        5
    """

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def __len__(self) -> int:
        """The number of weight samples that are kept."""
        return 0 if self._kept is None else len(self._kept.samples.indices)

    def __reduce__(self) -> tuple[type[KeptSamples], tuple[()]]:
        return KeptSamples, ()

    def clear(self) -> None:
        """Free the memory."""
        self._kept = None

    def sampler(
        self, posterior: Posterior, key: NoiseKey, num_samples: int, *, may_edit: bool = False
    ) -> Callable[[range], Tensor]:
        """Begin a prediction: return a function that draws samples by index, shape (S, D).

        Args:
            posterior: the distribution of the weights.
            key: the key of the noise; the sample index completes it.
            num_samples: the number of samples that the prediction needs, of which those that fit
                are kept.
            may_edit: whether the caller may write to what it draws, which is then a copy.
        """
        draw = sampler_of(posterior, key)
        if type(posterior) is not MeanFieldGaussian:
            return draw
        # The rows belong to an object of their own: another thread may begin a new one meanwhile.
        kept, is_new = self._find(posterior, key)
        if kept is None or is_new:
            return draw
        rows, indices = kept.room_for(num_samples)

        def take(samples: range) -> Tensor:
            there = range(samples.start, min(samples.stop, len(rows)))
            if not there:
                return draw(samples)
            own = rows[there.start : there.stop]
            if not indices.issuperset(there):
                own.copy_(draw(there))
                indices.update(there)
            if len(there) < len(samples):
                return torch.cat([own, draw(range(there.stop, samples.stop))])
            return own.clone() if may_edit else own

        return take

    def _find(self, posterior: Posterior, key: NoiseKey) -> tuple[_Kept | None, bool]:
        """Return what is kept for this key and posterior, and whether it was begun just now."""
        kept = self._kept
        state = {name: each.detach() for name, each in posterior.state_dict().items()}
        if kept is not None and kept.key == key and _are_equal(kept.state, state):
            return kept, False
        vector = posterior.mean.nbytes
        capacity = (_LARGEST - sum(each.nbytes for each in state.values())) // max(1, vector)
        self._kept = None
        if capacity >= _FEWEST:
            copies = {name: each.clone() for name, each in state.items()}
            room = _Samples(posterior.mean.detach().new_empty((0, len(posterior.mean))), set())
            self._kept = _Kept(key, copies, capacity, room)
        return self._kept, True


def sampler_of(posterior: Posterior, key: NoiseKey) -> Callable[[range], Tensor]:
    """Return a function that draws weight samples by index, shape (S, D)."""
    if type(posterior) is not MeanFieldGaussian:
        return lambda samples: posterior.draw(posterior.noise(key, samples)).weights

    @cache
    def moments() -> tuple[Tensor, Tensor]:
        return posterior.masked_mean.detach(), posterior.std.detach()

    def draw(samples: range) -> Tensor:
        # The same numbers as posterior.draw, with std computed only once, and in place.
        mean, std = moments()
        noise = posterior.noise(key, samples)
        return torch.addcmul(mean, std, noise, out=noise)

    return draw


def _are_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        each.dtype == second[name].dtype
        and each.device == second[name].device
        and torch.equal(each, second[name])
        for name, each in first.items()
    )
