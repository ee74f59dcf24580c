"""What an epoch came to: one row of the history."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesify.elbo import ELBO
from bayesify.fused import StepValues
from bayesify.posteriors import MeanFieldGaussian, Posterior
from bayesify.training.minibatches import Loader

__all__ = ["EpochMeter", "History", "Row", "is_finite", "validation_row"]

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

    def wants_residual(self, batch: int) -> bool:
        """Whether this minibatch's gradients are to be looked at."""
        return batch >= self._batches - _RESIDUAL_STEPS

    def add(self, values: StepValues, targets: Tensor) -> None:
        """Take in what a step says of its minibatch, before it moves the weights."""
        size = len(targets)
        samples = len(values.outputs)
        error = self._elbo.bnn.likelihood.error(
            values.outputs.flatten(0, 1), targets.repeat(samples, *[1] * (targets.dim() - 1))
        )
        nll = float(values.nll)
        self._add("count", size)
        self._add("nll", nll * size)
        self._add("loss", nll * size)
        self._add("error", float(error) * size)
        if values.complexity is None:
            self._add("owed", values.factor * size)
        else:
            self._add_complexity(values.complexity, values.factor * size)

    def add_residual(self, values: StepValues, residual: float | None, *, batch: int) -> None:
        """Take in the loss's mean derivative in log std, where it is asked for."""
        if residual is not None and values.factor > 0.0 and self.wants_residual(batch):
            self._add("residual", residual / values.factor)
            self._add("residual_count", 1)

    def row(self, *, epoch: int, learning_rate: float, seconds: float, total_seconds: float) -> Row:
        """The epoch's row; ``seconds`` are those of this epoch's training."""
        sums, count = self._sums, self._sums["count"]
        if "owed" in sums:  # the loader brought fewer minibatches than it said
            self._add_complexity(self._now(), 0.0)
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

    def _add_complexity(self, complexity: tuple[Tensor, Tensor], factor: float) -> None:
        kl, penalty = map(float, complexity)
        self._sums["kl"], self._sums["penalty"] = kl, penalty
        # Of the minibatches before it too, whose own was not computed.
        self._add("loss", (factor + self._sums.pop("owed", 0.0)) * (kl + penalty))

    @torch.no_grad()
    def _now(self) -> tuple[Tensor, Tensor]:
        elbo = self._elbo
        return elbo.complexity(None, elbo.step, range(elbo.num_samples))

    def _add(self, name: str, value: float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + value


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


@torch.no_grad()
def validation_row(elbo: ELBO, loader: Loader | None) -> Row:
    """Error and nll of the mean weights on a loader's data, or None without one."""
    if loader is None:
        return {"validation_error": None, "validation_nll": None}
    torch.clear_autocast_cache()
    bnn, count, error, nll = elbo.bnn, 0, 0.0, 0.0
    for inputs, targets in loader:
        outputs = bnn.mean_outputs(inputs)
        error += float(bnn.likelihood.error(outputs, targets)) * len(targets)
        nll -= float(bnn.likelihood.log_prob(outputs.unsqueeze(0), targets).sum())
        count += len(targets)
    return {"validation_error": error / count, "validation_nll": nll / count}
