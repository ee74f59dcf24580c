"""What an epoch came to: one row of the history."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesify.divergence import minibatch_weight
from bayesify.elbo import ELBO, ELBOTerms
from bayesify.posteriors import MeanFieldGaussian, Posterior
from bayesify.training.convergence import std_residual

__all__ = ["EpochMeter", "History", "Row"]

#: One epoch; see ``fit`` for the columns.
Row = dict[str, float | None]
History = list[Row]

# The residual is measured over an epoch's last minibatches only: it costs a pass over theta.
_RESIDUAL_STEPS = 20


class EpochMeter:
    """Sums over the minibatches of one epoch.

    Args:
        elbo: the objective.
        batches: minibatches an epoch.
        sums: those of an epoch that was interrupted, to go on from; changed in place.
    """

    def __init__(self, elbo: ELBO, batches: int, sums: dict[str, float]) -> None:
        self._elbo = elbo
        self._batches = batches
        self._sums = sums

    def add(self, terms: ELBOTerms, targets: Tensor, *, batch: int, kl_scale: float) -> None:
        """Take in one minibatch, after its backward pass."""
        size = len(targets)
        samples = len(terms.outputs)
        error = self._elbo.bnn.likelihood.error(
            terms.outputs.flatten(0, 1), targets.repeat(samples, *[1] * (targets.dim() - 1))
        )
        self._add("count", size)
        self._add("loss", float(terms.loss.detach()) * size)
        self._add("nll", float(terms.nll.detach()) * size)
        self._add("error", float(error) * size)
        self._sums["kl"] = float(terms.kl.detach())
        self._sums["penalty"] = float(terms.penalty.detach())
        if batch >= self._batches - _RESIDUAL_STEPS:
            self._add_residual(batch, size, kl_scale)

    def row(self, *, epoch: int, learning_rate: float, seconds: float, total_seconds: float) -> Row:
        """The epoch's row; ``seconds`` are those of this epoch's training."""
        sums, count = self._sums, self._sums["count"]
        residual_count = sums.get("residual_count", 0)
        posterior = self._elbo.bnn.posterior
        return {
            "epoch": epoch + 1,
            "loss": sums["loss"] / count,
            "nll": sums["nll"] / count,
            "kl": sums["kl"],
            "penalty": sums["penalty"],
            "train_error": sums["error"] / count,
            "std_median": _std_median(posterior),
            "std_residual": sums["residual"] / residual_count if residual_count else None,
            "learning_rate": learning_rate,
            "data_per_second": count / seconds,
            "seconds": total_seconds,
        }

    def _add(self, name: str, value: float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + value

    def _add_residual(self, batch: int, size: int, kl_scale: float) -> None:
        elbo = self._elbo
        if not isinstance(elbo.bnn.posterior, MeanFieldGaussian):
            return
        weight = minibatch_weight(
            elbo.kl_weighting,
            batch_index=batch,
            num_batches=elbo.num_batches,
            batch_size=size,
            num_data=elbo.num_data,
        )
        strength = weight * elbo.temperature * kl_scale
        residual = (
            std_residual(elbo.bnn.posterior, elbo.num_data / strength) if strength > 0.0 else None
        )
        if residual is not None:
            self._add("residual", residual)
            self._add("residual_count", 1)


@torch.no_grad()
def _std_median(posterior: Posterior) -> float | None:
    """Over the weights that were not pruned."""
    if not isinstance(posterior, MeanFieldGaussian):
        return None
    stds = posterior.full_std if posterior.kept is None else posterior.full_std[posterior.kept]
    return float(stds.median()) if stds.numel() else None


@torch.no_grad()
def is_finite(elbo: ELBO) -> bool:
    """Whether every trained parameter is finite."""
    return all(bool(parameter.isfinite().all()) for parameter in elbo.parameters())
