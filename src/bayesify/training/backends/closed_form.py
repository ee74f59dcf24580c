"""The backend without a compiler: gradients in closed form, block by block, any optimiser."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesify.distributions.posteriors import MeanFieldGaussian, WeightDraw
from bayesify.distributions.softplus import softplus
from bayesify.noise.keys import NoiseKey, Stream
from bayesify.training.backends.backend import Noise
from bayesify.training.backends.leaf import LeafBackend
from bayesify.training.backends.leaves import Leaves, ParameterGradients, gather
from bayesify.training.backends.requirements import (
    require,
    signature,
    why_no_closed_forms,
)
from bayesify.training.convergence import StdResidual, grouped
from bayesify.training.elbo import fused_as
from bayesify.training.kernel.formulas import (
    PriorBlocks,
    PriorForm,
    gradients,
    leaf_kind,
    of_sample,
    prior_blocks,
)

__all__ = ["ClosedFormBackend"]

#: Weights per block: enough to occupy all threads, few enough that scratch memory stays small.
_BLOCK = 240_000


class ClosedFormBackend(LeafBackend):
    """Compute the gradients of mean and rho in closed form (Blundell et al. 2015, eqs 3 and 4).

    Its noise is that of the objective with ``fused=False``, and so are its gradients to rounding.
    A step allocates nothing of the size of the network, apart from the network's own gradients.

    Args:
        elbo: an objective for which ``why_no_closed_forms`` returns None.
        optimizer: any optimiser of its parameters.

    Raises:
        ValueError: no closed forms are known for this objective.

    Example:
        >>> from bayesify.training.backends import StepOptions
        >>> from bayesify.module.bayesian import BayesianModule
        >>> from bayesify.training.elbo import ELBO
        >>> elbo = ELBO(BayesianModule(torch.nn.Linear(3, 2)), num_data=10)
        >>> backend = ClosedFormBackend(elbo, torch.optim.SGD(elbo.parameters(), lr=0.1))
        >>> backend.description
        'closed-form (gaussian prior)'
        >>> x, y = torch.zeros(5, 3), torch.zeros(5, dtype=torch.long)
        >>> terms = backend.step(x, y, StepOptions(batch_index=0))
        >>> terms.has_kl, elbo.step
        (False, 1)
    """

    noise: Noise = "generator"

    def _prepare(self) -> None:
        elbo = self._elbo
        require("closed-form", why_no_closed_forms(elbo))
        posterior, prior = elbo.bnn.posterior, prior_blocks(elbo.bnn.weight_prior, elbo.kl)
        assert isinstance(posterior, MeanFieldGaussian)
        assert prior is not None
        self.description = f"closed-form ({prior.kind} prior)"
        self._posterior = posterior
        kind = leaf_kind(elbo.bnn.estimator)
        self._moments = kind != "weights"
        # Where gradients in mean and rho are added up, each process adds its part of the KL.
        self._adds_own = not self._processes.is_alone and not self._adds_leaf_gradients
        self._kl_part = 1.0 / self._processes.count if self._adds_own else 1.0
        mean = posterior.mean.detach()
        self._std = torch.empty_like(mean)
        self._weights = None if self._moments else torch.empty_like(mean)
        # The noise becomes the weights in place, or is that of the KL alone.
        own = torch.empty_like(mean) if self._moments and not prior.exact else None
        self._noise = self._weights if own is None else own
        self._in_mean = torch.empty_like(mean)
        self._in_rho = torch.empty_like(mean)
        self._variances = torch.empty_like(mean) if kind == "variances" else None
        leaf = next(v for v in (self._weights, self._variances, self._std) if v is not None)
        first = self._processes.first_sample(elbo.num_samples)
        self._prepare_passes(Leaves(elbo, leaf, kind, first_sample=first))
        # Sums over the samples but the last, of the derivatives in mean and in log std.
        several = len(self._sources) > 1
        self._sums = tuple(torch.empty_like(mean) for _ in range(2)) if several else ()
        self._size = mean.numel()
        self._blocks = _divided(prior, mean)
        # For one block: between the gradients of the network and those of mean and rho.
        self._scratch = mean.new_empty(4, min(_BLOCK, self._size))
        self._prepared_for = signature(elbo)  # last, so that an error is raised again

    def _keep_up(self) -> None:
        if self._prepared_for != signature(self._elbo):
            self._prepare()

    def _begin(self) -> None:
        self._step = self._elbo.step
        self._refresh()

    @torch.no_grad()
    def _update(
        self,
        in_mean: ParameterGradients,
        in_spread: ParameterGradients,
        factor: float,
        *,
        with_residual: bool,
    ) -> StdResidual | None:
        starts = self._elbo.bnn.layout.starts
        gather(self._in_mean, starts, in_mean)
        if self._moments:
            gather(self._in_rho, starts, in_spread)
        mean, mask, sums = self._posterior.mean, self._posterior.mask, []
        for part, prior in self._blocks:
            in_log_std = self._fill(part, prior, factor * self._kl_part)
            if with_residual:
                own = None if mask is None else mask[part]
                sums.append(grouped(in_log_std, mean[part], self._std[part], own))
        residual = torch.stack(sums).sum(0) if with_residual else None
        if self._adds_own:
            self._processes.add_up([self._in_mean, self._in_rho])
            if residual is not None:
                self._processes.add_up([residual[0]])  # row 1 holds the counts, equal in all
        self._posterior.mean.grad = self._in_mean.detach()
        self._posterior.rho.grad = self._in_rho.detach()
        with fused_as(self._elbo, False):
            self._optimizer.step()
        return None if residual is None else StdResidual.of(residual)

    def _forget_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._posterior.mean.grad = self._posterior.rho.grad = None
        self._in_mean, self._in_rho = _unshared(self._in_mean), _unshared(self._in_rho)

    @torch.no_grad()
    def _accumulate(self, in_mean: ParameterGradients, sample: int, factor: float) -> None:
        assert self._weights is not None
        bnn = self._elbo.bnn
        prior_mean = bnn.prior_mean
        gather(self._in_mean, bnn.layout.starts, in_mean)
        if sample == 0:
            for each in self._sums:
                each.zero_()
        share = factor * self._kl_part / len(self._sources)
        for part, prior in self._blocks:
            in_sample, weights = self._in_mean[part], self._weights[part]
            score, deviation, place, spare = self._scratch[:, : len(weights)]
            torch.sub(weights, self._posterior.mean[part], out=deviation)
            if prior_mean is not None:
                weights = torch.sub(weights, prior_mean[part], out=place)
            made = of_sample(prior, in_sample, weights, share, (in_sample, score, spare))
            self._sums[0][part].add_(made)
            self._sums[1][part].addcmul_(made, deviation)
        self._sample(sample + 1)

    def _draw(self, sample: int) -> WeightDraw | None:
        if self._weights is None:
            return None
        noise = torch.empty_like(self._weights)
        self._fill_noise(noise, sample)
        return WeightDraw(self._weights.unsqueeze(0), noise.unsqueeze(0))

    @torch.no_grad()
    def _refresh(self) -> None:
        softplus(self._posterior.rho, out=self._std)
        if self._variances is not None:
            torch.square(self._std, out=self._variances)
        self._sample(0)

    def _sample(self, sample: int) -> None:
        """Draw the noise of one weight sample and compute its weights."""
        posterior, weights = self._posterior, self._weights
        if self._noise is not None:
            self._fill_noise(self._noise, sample)
        if weights is not None:
            torch.addcmul(posterior.mean, self._std, weights, out=weights)
            if posterior.mask is not None:
                weights.mul_(posterior.mask)

    def _fill_noise(self, vector: Tensor, sample: int) -> None:
        source = self._sources[sample]
        stream = Stream.DIVERGENCE if self._moments else Stream.TRAINING
        key = NoiseKey(self._elbo.bnn.seed, stream, self._step)
        key.fill_normals(vector, source.sample)
        if source.opposite:
            vector.neg_()

    def _fill(self, part: slice, prior: PriorForm, factor: float) -> Tensor:
        """Turn the gradients of one block into those of mean and rho, in place."""
        posterior, prior_mean = self._posterior, self._elbo.bnn.prior_mean
        mean, std = posterior.mean[part], self._std[part]
        in_mean, in_rho = self._in_mean[part], self._in_rho[part]
        total, deviation, place, spare = self._scratch[:, : len(mean)]
        in_log_std, weights = None, mean
        if self._weights is not None:
            weights = self._weights[part]
            torch.sub(weights, mean, out=deviation)
        else:
            # In log std: a variance's derivative times twice the variance.
            spread = std if self._variances is None else self._variances[part]
            in_log_std = torch.mul(in_rho, spread, out=total)
            if self._variances is not None:
                in_log_std.mul_(2.0)
            if self._noise is not None:
                torch.mul(std, self._noise[part], out=deviation)
                weights = torch.add(mean, deviation, out=place)
        centred = mean if prior.exact else weights
        if prior_mean is not None:
            centred = torch.sub(centred, prior_mean[part], out=place)
        made = gradients(
            prior,
            in_mean=in_mean,
            in_log_std=in_log_std,
            centred=centred,
            std=std,
            deviation=deviation,
            kl_factor=factor,
            num_samples=len(self._sources),
            sums=tuple(each[part] for each in self._sums),
            out=(in_mean, in_rho, total, spare),
        )
        if posterior.mask is None:
            return made.in_log_std
        mask = posterior.mask[part]
        in_mean.mul_(mask)
        in_rho.mul_(mask)
        return made.in_log_std.mul_(mask)


def _unshared(vector: Tensor) -> Tensor:
    """Return a vector whose memory nobody else holds, as an optimiser that keeps gradients does."""
    holders = torch._C._storage_Use_Count(vector.untyped_storage()._cdata)
    return vector if holders <= 2 else torch.empty_like(vector)  # the vector and its storage here


def _divided(prior: PriorBlocks, vector: Tensor) -> list[tuple[slice, PriorForm]]:
    """Return the blocks of a vector, each with its prior; a small vector has one."""
    size, forms = vector.numel(), prior.forms
    stops = *prior.starts[1:], size
    # The formulas of a scale mixture work in place with numbers only, not with vectors of them.
    if len(forms) > 1 and size <= _BLOCK and prior.kind != "scale-mixture":
        number = torch.empty_like(vector)
        for form, start, stop in zip(forms, prior.starts, stops, strict=True):
            number[start:stop] = form.numbers[0]
        return [(slice(0, size), forms[0]._replace(numbers=(number, 0.0, 0.0)))]
    return [
        (slice(i, min(i + _BLOCK, stop)), form)
        for form, start, stop in zip(forms, prior.starts, stops, strict=True)
        for i in range(start, stop, _BLOCK)
    ]
