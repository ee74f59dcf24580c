"""A warning where the parts of a model draw the same noise, because they have one seed."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from typing import NamedTuple

from torch import nn

__all__ = ["SharedNoiseWarning", "warn_of_shared_noise"]


class SharedNoiseWarning(UserWarning):
    """Two networks draw the same noise, because they have one seed.

    Example:
        >>> import torch, warnings
        >>> from bayesify import BayesianModule
        >>> model = nn.Sequential(*[BayesianModule(nn.Linear(2, 2), seed=70) for _ in range(2)])
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     for _ in range(2):
        ...         _ = model(torch.zeros(1, 2))
        >>> str(caught[0].message)[:40]
        'two Bayesian modules with seed=70 run in'
    """


class _ForwardPass(NamedTuple):
    """A forward pass with noise: the seed, its counter, and the network."""

    seed: int
    counter: int
    network: weakref.ref[nn.Module]


#: The last forward passes with noise.
_recent: deque[_ForwardPass] = deque(maxlen=32)


def warn_of_shared_noise(network: nn.Module, seed: int, counter: int) -> None:
    """Warn where networks of one seed run in turn, as the parts of one model do.

    The parts of such a model would be correlated, which a mean field is not. A network is run in
    turn with another one that ran since this network's own last pass.
    """
    since: list[_ForwardPass] = []
    for earlier in list(_recent)[::-1]:  # a copy, since other threads append
        if earlier.seed == seed and earlier.network() is network:
            break
        since.append(earlier)
    else:
        since = []
    _recent.append(_ForwardPass(seed, counter, weakref.ref(network)))
    if any(e.seed == seed and e.counter <= counter and e.network() for e in since):
        warnings.warn(
            f"two Bayesian modules with seed={seed} run in turn and draw the same noise; "
            "if they are parts of one model, give each its own, such as "
            f"BayesianModule(net, seed={seed + 1}); it is harmless if they are two models",
            SharedNoiseWarning,
            stacklevel=5,
        )
