"""The history of a run: one row per epoch, from sums over its minibatches."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayesify.distributions.likelihoods.likelihood import log_probs_of
from bayesify.distributions.posteriors import Delta, GaussianPosterior, Posterior
from bayesify.distributions.precision import at_least_float32
from bayesify.module.inputs import batch_size_of
from bayesify.noise.keys import Stream, seed_global_generators
from bayesify.training.convergence import ResidualMeter
from bayesify.training.division import Division, Share
from bayesify.training.elbo import ELBO, ELBOTerms
from bayesify.training.minibatches import pair_of
from bayesify.training.processes import Processes

__all__ = ["EpochMeter", "EpochRow", "History", "validation_row"]

#: One epoch; see ``fit`` for the columns.
EpochRow = dict[str, float | None]
History = list[EpochRow]

# Measured in the last minibatches of an epoch only, because it costs a pass over the weights.
_RESIDUAL_STEPS = 20


class EpochMeter:
    """Sums over the minibatches of one epoch.

    Args:
        elbo: the objective.
        batches: minibatches an epoch.
        sums: those of an interrupted epoch that is resumed; updated in place.
    """

    def __init__(self, elbo: ELBO, batches: int, sums: dict[str, float]) -> None:
        self._elbo = elbo
        self._batches = batches
        self._sums = sums
        if "error" in sums:  # of a run that counted examples, not positions
            sums.setdefault("error_count", sums["count"])
        self._residual = ResidualMeter(sums)

    def wants_residual(self, batch: int) -> bool:
        """Whether ``std_residual`` is to be measured in this minibatch."""
        # With geometric weights only the sum over all minibatches of an epoch is 0 at the optimum.
        is_measured = self._elbo.kl_weighting == "uniform"
        return is_measured and batch >= self._batches - _RESIDUAL_STEPS

    def add(
        self, terms: ELBOTerms, targets: Tensor, *, batch: int, share: Share | None = None
    ) -> None:
        """Add the terms of one minibatch, the ``batch``-th of the epoch.

        Of several processes each adds the error of its own part only, see :meth:`add_up`.
        """
        size = len(targets) if share is None else share.batch_size
        factor = terms.kl_factor
        likelihood, samples = self._elbo.bnn.likelihood, len(terms.outputs)
        counted = likelihood.error_count(targets) if share is None or share.weight else 0
        if samples > 1:
            targets = targets.repeat(samples, *[1] * (targets.dim() - 1))
        outputs = at_least_float32(terms.outputs.flatten(0, 1))
        nll = float(terms.nll)
        self._add("count", size)
        self._add("nll", nll * size)
        self._add("loss", nll * size)
        if counted:
            self._add("error", float(likelihood.error(outputs, targets)) * counted)
            self._add("error_count", counted)
        if terms.has_kl:
            self._add_complexity(terms.kl, terms.penalty, factor * size)
        else:
            self._add("owed", factor * size)
        if terms.std_residual is not None and factor > 0.0 and self.wants_residual(batch):
            self._residual.add(terms.std_residual, factor)

    def add_up(self, processes: Processes) -> None:
        """Add up over the processes what each has measured alone."""
        device = self._elbo.bnn.posterior.mean.device
        for name in ("error", "error_count"):
            self._sums[name] = processes.total(self._sums.get(name, 0.0), device)

    def row(
        self, *, epoch: int, learning_rate: float, seconds: float, total_seconds: float
    ) -> EpochRow:
        """The epoch's row; ``seconds`` are those of this epoch's training.

        Raises:
            ValueError: the loader brought no minibatch.
        """
        sums, count = self._sums, self._sums.get("count", 0.0)
        if not count:
            raise ValueError("the training loader must bring at least one minibatch, got none")
        if "owed" in sums:  # the loader brought fewer minibatches than its length
            self._add_complexity(*self._complexity_now(), 0.0)
        posterior = self._elbo.bnn.posterior
        return {
            "epoch": epoch + 1,
            "loss": sums["loss"] / count,
            "nll": sums["nll"] / count,
            "kl": sums["kl"],
            "penalty": sums["penalty"],
            "free_energy": self._free_energy(sums["nll"] / count),
            "train_error": sums["error"] / (sums["error_count"] or math.nan),
            "fraction_pruned": _fraction_pruned(posterior),
            "std_median": _std_median(posterior),
            **self._residual.row(),
            "learning_rate": learning_rate,
            "data_per_second": count / seconds,
            "seconds": total_seconds,
        }

    def _free_energy(self, nll: float) -> float | None:
        """That of the ELBO itself, whatever the temperature and the KL's warm-up."""
        bnn = self._elbo.bnn
        if isinstance(bnn.posterior, Delta) or not bnn.weight_prior.is_proper:
            return None
        if not self._elbo.has_free_energy:
            return None
        return nll + self._sums["kl"] / self._elbo.num_data

    def _add_complexity(self, kl: Tensor, penalty: Tensor, factor: float) -> None:
        self._sums["kl"], self._sums["penalty"] = float(kl), float(penalty)
        # It also stands for the minibatches before it whose own value was not computed.
        total = float(kl) + float(penalty)
        self._add("loss", (factor + self._sums.pop("owed", 0.0)) * total)

    @torch.no_grad()
    def _complexity_now(self) -> tuple[Tensor, Tensor]:
        elbo = self._elbo
        return elbo.complexity(None, elbo.step, range(elbo.num_samples))

    def _add(self, name: str, value: float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + value


def _fraction_pruned(posterior: Posterior) -> float:
    """The fraction of the weights that are pruned."""
    mask = posterior.mask
    return 0.0 if mask is None else 1.0 - int(mask.sum()) / mask.numel()


@torch.no_grad()
def _std_median(posterior: Posterior) -> float | None:
    """The median std of the weights that are not pruned."""
    if not isinstance(posterior, GaussianPosterior):
        return None
    stds = posterior.full_std if posterior.mask is None else posterior.full_std[posterior.mask]
    return float(stds.median()) if stds.numel() else None


@torch.no_grad()
def validation_row(elbo: ELBO, division: Division | None, processes: Processes) -> EpochRow:
    """Error and nll of the mean weights on a loader's data; None for each without a loader.

    Of several processes each measures its part of every minibatch. The global generators of torch,
    Python and NumPy are seeded, so that what the loader draws is a function of seed and step.

    Raises:
        ValueError: the loader brings no minibatch.
    """
    if division is None:
        return {"validation_error": None, "validation_nll": None}
    torch.clear_autocast_cache()
    bnn, count, counted, error, nll = elbo.bnn, 0, 0, 0.0, 0.0
    device = bnn.posterior.mean.device
    # A loader that shuffles has the same order in all processes.
    seed_global_generators(elbo.bnn.seed, Stream.SHUFFLE, elbo.step)
    for index, minibatch in enumerate(division.loader):
        inputs, targets = pair_of(minibatch)
        if not processes.is_alone:
            inputs, targets, share = division.share(index, inputs, targets)
            if not share.weight:
                continue
        inputs, targets = pair_of((inputs, targets), device)
        outputs = at_least_float32(bnn.mean_outputs(inputs, batch_size=batch_size_of(inputs)))
        own = bnn.likelihood.error_count(targets)
        if own:
            error += float(bnn.likelihood.error(outputs, targets)) * own
        counted += own
        nll -= float(log_probs_of(bnn.likelihood, outputs.unsqueeze(0), targets).sum())
        count += len(targets)
    own_sums = error, float(counted), nll, float(count)
    error, known, nll, whole = (processes.total(each, device) for each in own_sums)
    if not whole:
        raise ValueError("the validation loader must bring at least one minibatch, got none")
    return {"validation_error": error / (known or math.nan), "validation_nll": nll / whole}
