"""Sampled weights and their KL as one autograd function, for the objective's own pass.

The kernel samples in one pass over the weights, and takes the gradients back to mean and rho in
another, in memory that is used again from step to step.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bayesify.distributions.kl import KLMethod, kl_divergence
from bayesify.distributions.layout import ParameterLayout
from bayesify.distributions.posteriors import MeanFieldGaussian
from bayesify.distributions.priors import Prior
from bayesify.estimators.transforms import is_transformed
from bayesify.estimators.weight_sampling import WeightSampling
from bayesify.module.bayesian import BayesianModule
from bayesify.module.edited_inputs import Repeated
from bayesify.module.inputs import Inputs, arguments_of
from bayesify.module.random_network import refuse_in_backward
from bayesify.noise.keys import NoiseKey, Stream
from bayesify.noise.threefry import counter_key, normals
from bayesify.training.kernel.compiler import CompilerError
from bayesify.training.kernel.formulas import PriorBlocks, prior_blocks
from bayesify.training.kernel.interface import SampledPosterior, SampleNoise
from bayesify.training.kernel.native import Checksums, NativeSample, is_readable

__all__ = ["DrawnWeights"]


class DrawnWeights:
    """Weight samples of one network by the kernel, where there is one for it.

    Its noise is that of the compiled backend. Copies and pickles are empty.

    Example:
        >>> bnn, drawn = BayesianModule(torch.nn.Linear(3, 2)), DrawnWeights()
        >>> drawn.prepare(bnn, "auto")
        True
        >>> outputs, kl = drawn.sample_outputs(bnn, torch.zeros(5, 3), step=0, samples=range(4))
        >>> outputs.shape, bool(kl > 0.0)
        (torch.Size([4, 5, 2]), True)
    """

    def __init__(self) -> None:
        self._prepared_for: tuple[object, ...] | None = None
        self._kernel: NativeSample | None = None
        self._kl: KLMethod = "auto"
        self._memory = _Memory()

    def __reduce__(self) -> tuple[type[DrawnWeights], tuple[()]]:
        return DrawnWeights, ()

    def prepare(self, bnn: BayesianModule, kl: KLMethod) -> bool:
        """Return whether a kernel samples this network's weights under this kind of KL.

        If none does, the memory of earlier samples is freed.
        """
        is_supported = _is_plain(bnn) and not _is_transformed()
        kernel = self._kernel_of(bnn, kl) if is_supported else None
        if kernel is None:
            self.free()
        return kernel is not None

    def free(self) -> None:
        """Free the memory of earlier samples."""
        self._memory.clear()

    def _kernel_of(self, bnn: BayesianModule, kl: KLMethod) -> NativeSample | None:
        dtype = bnn.posterior.mean.dtype
        wanted = (bnn.weight_prior, kl, dtype, bnn.layout.starts)
        before = self._prepared_for
        if before is None or before[0] is not wanted[0] or before[1:] != wanted[1:]:
            self._prepared_for, self._kernel, self._kl = wanted, None, kl
            prior = prior_blocks(bnn.weight_prior, kl)
            if prior is not None:
                self._kernel = _kernel_or_none(prior, bnn.layout.starts, dtype)
        return self._kernel

    def sample_outputs(
        self, bnn: BayesianModule, inputs: Inputs, *, step: int, samples: range
    ) -> tuple[Tensor, Tensor]:
        """Return outputs under the weight samples, shape (S, N, ...), and the KL in nats.

        Of a KL that is estimated it is the average over the samples.
        """
        refuse_in_backward()
        given = arguments_of(inputs)
        passes = Repeated() if len(samples) > 1 else None
        outputs, kls = [], []
        for sample in samples:
            kl, *weights = self._draw(bnn, step, sample)
            named = dict(zip(bnn.layout.names, weights, strict=True))
            args, kwargs = given if passes is None else passes.take(given)
            outputs.append(bnn.tensor_of(bnn.run_with_named(named, *args, **kwargs)))
            kls.append(kl)
        if len(outputs) == 1:
            return outputs[0].unsqueeze(0), kls[0]
        return torch.stack(outputs), torch.stack(kls).mean()

    def _draw(self, bnn: BayesianModule, step: int, sample: int) -> tuple[Tensor, ...]:
        opposite = bnn.estimator.antithetic and sample % 2 == 1
        key = counter_key(NoiseKey(bnn.seed, Stream.TRAINING, 0), sample - opposite)
        q = bnn.posterior
        assert isinstance(q, MeanFieldGaussian)
        assert self._kernel is not None
        drawing = _Drawing(
            kernel=self._kernel,
            memory=self._memory,
            prior=bnn.weight_prior,
            kl=self._kl,
            layout=bnn.layout,
            prior_mean=bnn.prior_mean,
            mask=q.mask,
            step=step,
            noise=SampleNoise(key, opposite),
        )
        drawn: tuple[Tensor, ...] = _Draw.apply(q.mean, q.rho, drawing)  # type: ignore[no-untyped-call]
        return drawn


def _is_plain(bnn: BayesianModule) -> bool:
    """Return whether the classes are the library's own, and the kernel can read the tensors."""
    q = bnn.posterior
    return (
        type(bnn) is BayesianModule
        and type(q) is MeanFieldGaussian
        and type(bnn.estimator) is WeightSampling
        and _METHODS.isdisjoint(vars(bnn))
        and _METHODS.isdisjoint(vars(q))
        and type(q.mean) is type(q.rho) is torch.nn.Parameter
        and q.mean.dtype in (torch.float32, torch.float64)
        and all(is_readable(each, q.mean.dtype) for each in (q.mean, q.rho))
        and (bnn.prior_mean is None or is_readable(bnn.prior_mean, q.mean.dtype))
        and (q.mask is None or is_readable(q.mask, torch.bool))
    )


#: What the kernel stands for, and does not call; an object may have its own.
_METHODS = frozenset(("draw", "noise", "run_with_named", "sample_outputs"))


def _is_transformed() -> bool:
    """Whether code is compiled, or a transform of ``torch.func`` or forward mode is active."""
    return torch.compiler.is_compiling() or is_transformed()


def _is_batched(gradient: Tensor | None) -> bool:
    """Return whether it is one of several gradients, of ``is_grads_batched=True``."""
    return gradient is not None and torch._C._functorch.is_legacy_batchedtensor(gradient)


def _kernel_or_none(
    prior: PriorBlocks, starts: Sequence[int], dtype: torch.dtype
) -> NativeSample | None:
    try:
        return NativeSample(prior, starts, dtype)
    except CompilerError:
        return None


@dataclass(frozen=True)
class _Drawing:
    """One weight sample: its distribution and its noise, as they were in the forward pass.

    It holds no module, because the graph holds it: of a module that keeps an activation, and so
    the graph, Python's garbage collector would not find the cycle.
    """

    kernel: NativeSample
    memory: _Memory
    prior: Prior
    kl: KLMethod
    layout: ParameterLayout
    prior_mean: Tensor | None
    mask: Tensor | None
    step: int
    noise: SampleNoise

    def of(self, mean: Tensor, rho: Tensor) -> SampledPosterior:
        return SampledPosterior(mean, rho, self.prior_mean, self.mask)

    def sample(self, mean: Tensor, rho: Tensor) -> tuple[Tensor, float, Checksums]:
        """Return the weights, their KL and the checksums."""
        weights = self.memory.take(mean)
        return weights, *self.kernel.sample(self.of(mean, rho), self.step, self.noise, weights)

    def parts_of(self, weights: Tensor) -> list[Tensor]:
        """Return the weights of each parameter, in the same memory.

        They are no views of one tensor, of which a network could not edit one in place.
        """
        vector = weights.numpy()
        bounds = zip(pairwise(self.layout.starts), self.layout.shapes, strict=True)
        return [torch.from_numpy(vector[a:b].reshape(shape)) for (a, b), shape in bounds]

    @torch.enable_grad()
    def differentiate(
        self,
        posterior: tuple[Tensor, Tensor],
        incoming: Sequence[Tensor | None],
        *,
        create_graph: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients in mean and rho by autograd; None if frozen.

        Args:
            posterior: mean and rho.
            incoming: the gradients in the KL and in the weights of each parameter, not all None.
            create_graph: whether the result has a graph, for second derivatives.
        """
        # Aliases, because hooks of the parameters themselves would run here too.
        mean, rho = (each.view_as(each) for each in posterior)
        q = MeanFieldGaussian(mean.new_empty(0), std=1.0)
        vars(q).update(mean=mean, rho=rho, mask=self.mask)
        key, opposite = self.noise
        noise = normals(*key, self.step, mean.numel(), dtype=mean.dtype, device="cpu")
        draw = q.draw((-noise if opposite else noise).unsqueeze(0))
        kl = kl_divergence(q, self.prior, draw, method=self.kl, prior_mean=self.prior_mean)
        weights = self.layout.unflatten(draw.weights[0]).values()
        pairs = zip((kl, *weights), incoming, strict=True)
        known = [(value, gradient) for value, gradient in pairs if gradient is not None]
        values, gradients = zip(*known, strict=True)
        trained = [each for each in (mean, rho) if each.requires_grad]
        found = torch.autograd.grad(values, trained, gradients, create_graph=create_graph)
        by_id = dict(zip(map(id, trained), found, strict=True))
        return by_id.get(id(mean)), by_id.get(id(rho))


class _Draw(torch.autograd.Function):
    """From mean and rho to the KL of a weight sample and the weights of each parameter."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, rho: Tensor, drawing: _Drawing) -> tuple[Tensor, ...]:
        weights, kl, checksums = drawing.sample(mean, rho)
        ctx.set_materialize_grads(False)
        ctx.drawing, ctx.weights, ctx.checksums = drawing, weights, checksums
        ctx.posterior, ctx.versions = (mean, rho), (mean._version, rho._version)
        return mean.new_tensor(kl), *drawing.parts_of(weights)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> Any:
        drawing: _Drawing = ctx.drawing
        mean, rho = ctx.posterior
        if ctx.versions != (mean._version, rho._version):
            raise RuntimeError(_CHANGED)
        if all(each is None for each in incoming):
            return None, None, None
        create_graph = torch.is_grad_enabled()
        if create_graph or _is_transformed() or any(map(_is_batched, incoming)):
            return *drawing.differentiate((mean, rho), incoming, create_graph=create_graph), None
        gradients = drawing.memory.take(mean), drawing.memory.take(mean)
        of, (in_kl, *in_weights) = drawing.of(mean, rho), incoming
        factor = 0.0 if in_kl is None else float(in_kl)
        # The memory is free for the next sample, also where the loss is still held by then.
        weights, ctx.weights = ctx.weights, None
        found: Checksums | None = None
        if weights is not None:
            found = drawing.kernel.gradients(of, weights, in_weights, factor, gradients)
        # A second backward pass, or the network has edited its weights.
        if found is None or found.weights != ctx.checksums.weights:
            weights, *_ = drawing.sample(mean, rho)
            found = drawing.kernel.gradients(of, weights, in_weights, factor, gradients)
        if found.posterior != ctx.checksums.posterior:  # an edit of .data has no version
            raise RuntimeError(_CHANGED)
        needed = ctx.needs_input_grad
        return gradients[0] if needed[0] else None, gradients[1] if needed[1] else None, None


_CHANGED = (
    "mean and rho must not change between the objective and its backward pass; call "
    "loss.backward() before optimizer.step()"
)


class _Memory:
    """Vectors that are used again once no tensor lies in them.

    Memory fresh from the system costs as much as the kernel, for its pages are filled with zeros.
    """

    _MOST_FREE = 4

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: list[npt.NDArray[np.uint8]] = []

    def clear(self) -> None:
        """Free what no tensor lies in, and use nothing of the rest again."""
        with self._lock:
            self._buffers = []

    def take(self, like: Tensor) -> Tensor:
        """Return an uninitialised vector of this length and dtype."""
        size = like.nbytes + _ALIGNMENT
        with self._lock:
            buffers = self._buffers
            # The list and the argument refer to a free one, and no tensor.
            free = [n for n in range(len(buffers)) if sys.getrefcount(buffers[n]) <= 2]
            fitting = [n for n in free if buffers[n].nbytes == size][: self._MOST_FREE]
            buffer = buffers[fitting[0]] if fitting else np.empty(size, dtype=np.uint8)
            dropped = set(free) - set(fitting)
            self._buffers = [each for n, each in enumerate(buffers) if n not in dropped]
            if not fitting:
                self._buffers.append(buffer)
            start = -buffer.ctypes.data % _ALIGNMENT
            vector = buffer[start : start + like.nbytes]
        return torch.from_numpy(vector).view(like.dtype)


_ALIGNMENT = 64
