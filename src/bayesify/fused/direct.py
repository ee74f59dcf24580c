"""The step without a compiler: gradients in closed form, block by block, for any optimiser."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from bayesify.elbo import ELBO
from bayesify.fused.formulas import gradients, of_sample, prior_form
from bayesify.fused.leaves import Leaves
from bayesify.fused.samples import SamplePasses, sources
from bayesify.fused.support import leaf_kind, refuse, signature, why_no_closed_forms
from bayesify.fused.values import StepValues
from bayesify.inputs import Inputs
from bayesify.noise import NoiseKey, Stream
from bayesify.posteriors import MeanFieldGaussian, WeightDraw
from bayesify.softplus import softplus

__all__ = ["DirectStep"]

#: Weights at a time: enough to occupy all threads, few enough that scratch memory stays small.
_BLOCK = 240_000


class DirectStep:
    """A step of training whose gradients in mean and rho need no autograd.

    Its noise is that of the objective itself, and its gradients are the objective's to rounding.
    Nothing of the size of the network is allocated in a step but by the network.

    Args:
        elbo: an objective that ``why_no_closed_forms`` has nothing against.
        optimizer: what moves the parameters.
    """

    noise = "generator"

    def __init__(self, elbo: ELBO, optimizer: Optimizer) -> None:
        self._elbo, self._optimizer = elbo, optimizer
        self._make()

    def _make(self) -> None:
        elbo = self._elbo
        refuse(why_no_closed_forms(elbo))
        posterior, form = elbo.bnn.posterior, prior_form(elbo.bnn.weight_prior, elbo.kl)
        assert isinstance(posterior, MeanFieldGaussian)
        assert form is not None
        self.description = f"plain, gradients in closed form ({form.kind} prior)"
        self._posterior, self._prior = posterior, form
        kind = leaf_kind(elbo)
        self._moments = kind != "weights"
        mean = posterior.mean.detach()
        self._std = torch.empty_like(mean)
        self._weights = None if self._moments else torch.empty_like(mean)
        # The noise becomes the weights in place, or is that of the KL alone.
        own = torch.empty_like(mean) if self._moments and not form.exact else None
        self._noise = self._weights if own is None else own
        self._in_mean = torch.empty_like(mean)
        self._in_rho = torch.empty_like(mean)
        self._variances = torch.empty_like(mean) if kind == "variances" else None
        leaf = next(v for v in (self._weights, self._variances, self._std) if v is not None)
        self._leaves = Leaves(elbo, leaf, kind)
        self._sources = sources(elbo)
        # Over the samples of a step but the last: of the derivatives in mean and in log std.
        several = len(self._sources) > 1
        self._sums = tuple(torch.empty_like(mean) for _ in range(2)) if several else ()
        self._passes = SamplePasses(elbo, self._leaves, self, self._optimizer)
        self._size = mean.numel()
        # Of a block, for what lies between the gradients of the network and those of mean and rho.
        self._scratch = mean.new_empty(4, min(_BLOCK, self._size))
        self._factor = 0.0
        self._made_for = signature(elbo)  # last, for what was said against it to be said again

    def evaluate(
        self, inputs: Inputs, targets: Tensor, *, batch_index: int, kl_scale: float, values: bool
    ) -> StepValues:
        """See ``TrainingStep.evaluate``."""
        if self._made_for != signature(self._elbo):
            self._make()
        self._step = self._elbo.step
        self._refresh()
        said = self._passes.forward(
            inputs, targets, batch_index=batch_index, kl_scale=kl_scale, values=values
        )
        self._factor = said.factor
        return said

    @torch.no_grad()
    def update(self, *, residual: bool) -> float | None:
        """See ``TrainingStep.update``."""
        with torch.enable_grad():
            in_mean, in_spread = self._passes.backward()
        starts = self._elbo.bnn.layout.starts
        _gather(self._in_mean, starts, in_mean)
        if self._moments:
            _gather(self._in_rho, starts, in_spread)
        total = 0.0
        for part in self._blocks():
            in_log_std = self._fill(part)
            total += float(in_log_std.sum()) if residual else 0.0
        self._posterior.mean.grad, self._posterior.rho.grad = self._in_mean, self._in_rho
        self._optimizer.step()
        kept = self._posterior.kept
        count = self._size if kept is None else int(kept.sum())
        return total / count if residual and count else None

    def forget_gradients(self) -> None:
        """See ``SampledStep.forget_gradients``."""
        self._optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def accumulate(self, in_mean: Sequence[Tensor | None], sample: int, factor: float) -> None:
        """See ``SampledStep.accumulate``."""
        assert self._weights is not None
        bnn = self._elbo.bnn
        prior_mean = bnn.prior_mean
        _gather(self._in_mean, bnn.layout.starts, in_mean)
        if sample == 0:
            for each in self._sums:
                each.zero_()
        share = factor / len(self._sources)
        for part in self._blocks():
            in_sample, weights = self._in_mean[part], self._weights[part]
            score, deviation, place, spare = self._scratch[:, : len(weights)]
            torch.sub(weights, self._posterior.mean[part], out=deviation)
            if prior_mean is not None:
                weights = torch.sub(weights, prior_mean[part], out=place)
            made = of_sample(self._prior, in_sample, weights, share, (in_sample, score, spare))
            self._sums[0][part].add_(made)
            self._sums[1][part].addcmul_(made, deviation)
        self._sample(sample + 1)

    def draw(self, sample: int) -> WeightDraw | None:
        """See ``SampledStep.draw``."""
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
        """Draw the noise of one weight sample, and make its weights of it."""
        posterior, weights = self._posterior, self._weights
        if self._noise is not None:
            self._fill_noise(self._noise, sample)
        if weights is not None:
            torch.addcmul(posterior.mean, self._std, weights, out=weights)
            if posterior.kept is not None:
                weights.mul_(posterior.kept)

    def _fill_noise(self, vector: Tensor, sample: int) -> None:
        source = self._sources[sample]
        stream = Stream.DIVERGENCE if self._moments else Stream.TRAINING
        key = NoiseKey(self._elbo.bnn.seed, stream, self._step)
        key.fill_normals(vector, source.sample)
        if source.opposite:
            vector.neg_()

    def _fill(self, part: slice) -> Tensor:
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
        centred = mean if self._prior.exact else weights
        if prior_mean is not None:
            centred = torch.sub(centred, prior_mean[part], out=place)
        made = gradients(
            self._prior,
            in_mean=in_mean,
            in_log_std=in_log_std,
            centred=centred,
            std=std,
            deviation=deviation,
            kl_factor=self._factor,
            num_samples=len(self._sources),
            sums=tuple(each[part] for each in self._sums),
            out=(in_mean, in_rho, total, spare),
        )
        if posterior.kept is None:
            return made.in_log_std
        kept = posterior.kept[part]
        in_mean.mul_(kept)
        in_rho.mul_(kept)
        return made.in_log_std.mul_(kept)

    def _blocks(self) -> list[slice]:
        return [slice(i, min(i + _BLOCK, self._size)) for i in range(0, self._size, _BLOCK)]


def _gather(flat: Tensor, starts: Sequence[int], parts: Sequence[Tensor | None]) -> None:
    """Write the gradients of the parameters into one vector."""
    for start, stop, part in zip(starts[:-1], starts[1:], parts, strict=True):
        if part is None:
            flat[start:stop].zero_()
        else:
            flat[start:stop].copy_(part.reshape(-1))
