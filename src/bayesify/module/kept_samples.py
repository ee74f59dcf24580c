"""Weight samples that repeated predictions have in common, kept while the posterior stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bayesify.distributions.posteriors import MeanFieldGaussian, Posterior
from bayesify.noise.keys import NoiseKey

__all__ = ["KeptSamples"]

# Bytes of all vectors that one network keeps, and the least number of samples worth keeping.
_LARGEST = 256 * 10**6
_FEWEST = 10


@dataclass
class _Kept:
    """The posterior's tensors at the last prediction, and weight samples drawn from them."""

    key: NoiseKey
    state: dict[str, Tensor]
    capacity: int
    rows: dict[int, Tensor] = field(default_factory=dict)


class KeptSamples:
    """Weight samples of a mean-field Gaussian, drawn once for predictions in a row.

    The second prediction with the same seed and posterior keeps its samples, as far as 256 MB a
    network suffice, and later ones copy them. Whether the posterior has changed is found by
    comparing its values, so that any way of changing them counts. Copies and pickles are empty.

    Example:
        >>> from bayesify.noise.keys import Stream
        >>> posterior, kept = MeanFieldGaussian(torch.zeros(3), std=0.1), KeptSamples()
        >>> key = NoiseKey(0, Stream.PREDICTION, 0)
        >>> with torch.no_grad():
        ...     for _ in range(2):
        ...         weights = kept.sampler(posterior, key)(range(5))
        ...     torch.equal(weights, posterior.draw(posterior.noise(key, range(5))).weights)
        True
        >>> len(kept)
        5
    """

    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def __len__(self) -> int:
        """The number of weight samples that are kept."""
        return 0 if self._kept is None else len(self._kept.rows)

    def __reduce__(self) -> tuple[type[KeptSamples], tuple[()]]:
        return KeptSamples, ()

    def clear(self) -> None:
        """Free the memory."""
        self._kept = None

    def sampler(self, posterior: Posterior, key: NoiseKey) -> Callable[[range], Tensor]:
        """Begin a prediction: return a function that draws samples by index, shape (S, D).

        The caller may edit what it draws.
        """
        draw = sampler_of(posterior, key)
        if type(posterior) is not MeanFieldGaussian:
            return draw
        # The rows belong to an object of their own: another thread may begin a new one meanwhile.
        kept, is_new = self._find(posterior, key)
        if kept is None or is_new:
            return draw
        rows, capacity = kept.rows, kept.capacity

        def take(samples: range) -> Tensor:
            if all(sample in rows for sample in samples):
                return torch.stack([rows[sample] for sample in samples])
            weights = draw(samples)
            for sample, row in zip(samples, weights, strict=True):
                if len(rows) < capacity:
                    rows.setdefault(sample, row.clone())
            return weights

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
            self._kept = _Kept(key, copies, capacity)
        return self._kept, True


def sampler_of(posterior: Posterior, key: NoiseKey) -> Callable[[range], Tensor]:
    """Return a function that draws weight samples by index, shape (S, D)."""
    if type(posterior) is not MeanFieldGaussian:
        return lambda samples: posterior.draw(posterior.noise(key, samples)).weights
    mean, std = posterior.masked_mean.detach(), posterior.std.detach()

    def draw(samples: range) -> Tensor:
        # The same numbers as posterior.draw, with std computed only once, and in place.
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
