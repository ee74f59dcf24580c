"""Convergence of the posterior's standard deviations: a measure and a warning."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bayesify.distributions.posteriors import MeanFieldGaussian

__all__ = [
    "SNR_BORDERS",
    "STD_RESIDUAL_LIMIT",
    "ConvergenceWarning",
    "ResidualMeter",
    "StdResidual",
    "grouped",
    "residual_advice",
    "std_residual",
    "warn_of_convergence",
]

#: Above this magnitude, in nats per weight, the stds are visibly away from their optimum.
STD_RESIDUAL_LIMIT = 0.5
#: Borders between four groups of weights by signal-to-noise ratio |mean| / std. The weights of a
#: large network that carry no signal outnumber the others, whose stds an average would hide.
SNR_BORDERS = (0.1, 1.0, 3.0)
#: The columns of the history for the groups.
_GROUPS = ("snr_below_0.1", "snr_0.1_to_1", "snr_1_to_3", "snr_above_3")
_WORDS = dict(zip(_GROUPS, ("below 0.1", "of 0.1 to 1", "of 1 to 3", "above 3"), strict=True))
#: A group is judged by at least so many minibatches and so large a share of the weights; its
#: residual counts by what exceeds so many standard errors.
_FEWEST_MINIBATCHES, _SMALLEST_SHARE, _ERRORS = 5, 0.001, 3.0


class ConvergenceWarning(UserWarning):
    """Training stopped before the posterior's standard deviations had converged.

    Example:
        >>> import warnings, torch, bayesify as bf
        >>> from bayesify.datasets import TensorLoader
        >>> from bayesify.training import ConvergenceWarning
        >>> elbo = bf.ELBO(bf.BayesianModule(torch.nn.Linear(4, 3)), num_data=40)
        >>> loader = TensorLoader(torch.zeros(40, 4), torch.arange(40) % 3, batch_size=20)
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", ConvergenceWarning)  # a first try of one epoch
        ...     history = bf.fit(elbo, loader, epochs=1, progress=False)
    """


class StdResidual(NamedTuple):
    """The loss's derivative in log std, in nats per example, by group of weights.

    The four groups are those of ``SNR_BORDERS``; pruned weights are in none.

    Example:
        >>> residual = StdResidual((-3.0, 0.0, 1.0, 0.0), (6, 0, 2, 0))
        >>> residual.mean, residual.mean_of(2), residual.mean_of(1)
        (-0.25, 0.5, None)
    """

    #: Of each group, summed over its weights.
    sums: tuple[float, ...]
    #: The number of weights in each group.
    counts: tuple[int, ...]

    @classmethod
    def of(cls, rows: Tensor) -> StdResidual:
        """Read the sums and counts that :func:`grouped` returns."""
        sums, counts = rows.tolist()
        return cls(tuple(sums), tuple(map(round, counts)))

    @property
    def mean(self) -> float | None:
        """The average over all weights, or None if there is none."""
        return sum(self.sums) / sum(self.counts) if sum(self.counts) else None

    def mean_of(self, group: int) -> float | None:
        """The average over a group, or None if it is empty."""
        return self.sums[group] / self.counts[group] if self.counts[group] else None


@torch.no_grad()
def grouped(in_log_std: Tensor, mean: Tensor, std: Tensor, mask: Tensor | None) -> Tensor:
    """Sum derivatives in log std over groups of weights by signal-to-noise ratio.

    Args:
        in_log_std: the derivatives, shape (n,).
        mean: of the posterior, shape (n,).
        std: of the posterior, shape (n,).
        mask: False for pruned weights, shape (n,); None if no weight is pruned.

    Returns:
        The sums and the numbers of weights, shape (2, 4), float64.

    Example:
        >>> mean, std = torch.tensor([0.0, 2.0, 9.0]), torch.ones(3)
        >>> grouped(torch.tensor([-1.0, 0.5, 0.25]), mean, std, None).tolist()
        [[-1.0, 0.0, 0.5, 0.25], [1.0, 0.0, 1.0, 1.0]]
    """
    signal = mean.abs()
    sums, counts = [], []  # of the weights above each border; then differences, as sums are float64
    for border in (None, *SNR_BORDERS):
        above = mask
        if border is not None:
            above = signal > border * std
            above = above if mask is None else above & mask
        inside = in_log_std if above is None else torch.where(above, in_log_std, 0.0)
        sums.append(inside.sum(dtype=torch.float64))
        counts.append(sums[0].new_full((), mean.numel()) if above is None else above.sum())
    above_each = torch.stack([torch.stack(sums), torch.stack(counts).double()])
    return above_each - torch.nn.functional.pad(above_each[:, 1:], (0, 1))


@torch.no_grad()
def std_residual(posterior: MeanFieldGaussian) -> StdResidual | None:
    """Read the derivative of the loss in log std from the gradient of rho.

    At the optimum each weight's derivative is 0 in expectation: what the data say against noise
    balances the entropy, which alone contributes -1 nat a weight of the free energy. So a residual
    near -1 means stds that are still far too small, as when rho starts low and its learning rate
    does not carry it; a positive one means stds that are still too large.

    Args:
        posterior: whose ``rho.grad`` is read.

    Returns:
        Sums over groups of weights, in units of the loss, or None if there is no gradient or no
        weight.

    Example:
        >>> q = MeanFieldGaussian(torch.zeros(4), std=0.5)
        >>> (-q.log_std.sum()).backward()          # the entropy term alone, in nats
        >>> residual = std_residual(q)
        >>> residual.counts, round(residual.mean, 4)
        ((4, 0, 0, 0), -1.0)
    """
    gradient = posterior.rho.grad
    if gradient is None:
        return None
    in_log_std = gradient / posterior.log_std_slope
    found = grouped(in_log_std, posterior.mean, posterior.full_std, posterior.mask)
    return StdResidual.of(found) if found[1].any() else None


class ResidualMeter:
    """Average residuals over minibatches, in nats per weight, and find the worst group.

    Args:
        sums: what was added before; updated in place.

    Example:
        >>> meter = ResidualMeter({})
        >>> for noise in (-1.0, 1.0, 0.0, -1.0, 1.0):
        ...     meter.add(StdResidual((18.0, 0, 0, noise - 10), (90, 0, 0, 10)), kl_factor=1.0)
        >>> row = meter.row()
        >>> round(row["std_residual"], 2), round(row["std_residual_worst"], 2)
        (0.08, -1.0)
    """

    def __init__(self, sums: dict[str, float]) -> None:
        self._sums = sums

    def add(self, residual: StdResidual, kl_factor: float) -> None:
        """Add the residual of a minibatch in which the KL had this factor.

        One whose square is too large for a number is left out.
        """
        total = sum(residual.counts)
        if not total:
            return
        for name, mean, count in (
            ("all", residual.mean, total),
            *((name, residual.mean_of(i), residual.counts[i]) for i, name in enumerate(_GROUPS)),
        ):
            if mean is None:
                continue
            value = mean / kl_factor
            squared = value * value
            if not math.isinf(squared):  # as where the KL has hardly any weight yet
                added = {"": value, "_squared": squared, "_count": 1.0, "_share": count / total}
                for part, each in added.items():
                    key = f"residual_{name}{part}"
                    self._sums[key] = self._sums.get(key, 0.0) + each

    def row(self) -> dict[str, float | None]:
        """The columns of the history.

        ``std_residual`` is the average over all weights and minibatches, ``std_residual_snr_...``
        that over a group, ``std_residual_worst`` that of the group, or of all weights, whose
        magnitude exceeds three of its standard errors by most, and ``std_residual_worst_error``
        that standard error. A value that was not measured is None.
        """
        means = {name: self._mean(name) for name in ("all", *_GROUPS)}
        judged = [name for name in ("all", *_GROUPS) if self._is_judged(name)]
        worst = max(judged, key=self._excess, default="all")
        return {
            "std_residual": means["all"],
            **{f"std_residual_{name}": means[name] for name in _GROUPS},
            "std_residual_worst": means[worst],
            "std_residual_worst_error": self._error(worst) if judged else None,
        }

    def _get(self, name: str, part: str = "") -> float:
        return self._sums.get(f"residual_{name}{part}", 0.0)

    def _mean(self, name: str) -> float | None:
        count = self._get(name, "_count")
        return self._get(name) / count if count else None

    def _is_judged(self, name: str) -> bool:
        count = self._get(name, "_count")
        return count >= _FEWEST_MINIBATCHES and self._get(name, "_share") / count >= _SMALLEST_SHARE

    def _error(self, name: str) -> float:
        count, mean = self._get(name, "_count"), self._mean(name) or 0.0
        variance = max(0.0, self._get(name, "_squared") / count - mean**2)
        return math.sqrt(variance / (count - 1.0))

    def _excess(self, name: str) -> float:
        return abs(self._mean(name) or 0.0) - _ERRORS * self._error(name)


def residual_advice(row: Mapping[str, float | None]) -> str | None:
    """Explain a row of the history whose residual is beyond the limit, or return None.

    Example:
        >>> residual_advice({"std_residual": -0.1}) is None
        True
        >>> residual_advice({"std_residual": -0.9})[:72]
        "the posterior's standard deviations have not converged: they are still g"
    """
    judged = (
        (row.get("std_residual_worst"), row.get("std_residual_worst_error")),
        (row.get("std_residual"), 0.0),
    )
    beyond = [
        residual
        for residual, error in judged
        if residual is not None
        and error is not None
        and not abs(residual) - _ERRORS * error <= STD_RESIDUAL_LIMIT  # true of NaN
    ]
    if not beyond:
        return None
    residual = min(beyond, key=math.isnan)  # the first that is a number
    group = "all"
    if residual == row.get("std_residual_worst"):
        group = next((g for g in _GROUPS if row.get(f"std_residual_{g}") == residual), "all")
    weights = "" if group == "all" else f" of the weights with |mean| / std {_WORDS[group]}"
    direction, mend = (
        ("growing", " or choose a narrower prior")
        if residual < 0
        else ("shrinking", " or start from a smaller init_std")
    )
    if math.isnan(residual):
        direction, mend = "undefined", ""
    return (
        f"the posterior's standard deviations have not converged: they are still {direction}, so "
        "that uncertainty and pruning reflect where they started; first train longer with the KL "
        f"at its full weight, then raise rho_lr_scale (with IVON, lower beta2){mend}, and watch "
        "the held-out nll, since the bound of a wide network can under-fit; "
        f"d free energy / d log std{weights} is {residual:+.2f} nats a weight, 0 at the optimum"
    )


def warn_of_convergence(
    history: Sequence[Mapping[str, float | None]],
    epochs: float,
    kl_warmup_epochs: float,
    *,
    stacklevel: int,
    tell: Callable[[str], None] | None = None,
) -> None:
    """Warn if the KL never reached its full weight, or if the stds have not converged.

    ``tell`` receives the texts where they are not to be warnings.
    """
    texts = [residual_advice(history[-1]) if history else None]
    if kl_warmup_epochs >= epochs > 0:
        texts.insert(
            0,
            f"the KL's warm-up takes {kl_warmup_epochs:g} epochs and training only {epochs:g}: the "
            "objective never was the ELBO; shorten the warm-up",
        )
    for text in filter(None, texts):
        if tell is None:
            warnings.warn(text, ConvergenceWarning, stacklevel=stacklevel)
        else:
            tell(text)
