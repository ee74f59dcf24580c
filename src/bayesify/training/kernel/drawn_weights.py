"""Sampled weights and their KL as one autograd function, for training loops of one's own.

The kernel samples in one pass over the weights, and takes the gradients back to mean and rho in
another, in memory that is used again from step to step.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bayesify.distributions.kl import KLMethod, kl_divergence
from bayesify.distributions.posteriors import MeanFieldGaussian
from bayesify.estimators.weight_sampling import WeightSampling
from bayesify.module.bayesian import BayesianModule
from bayesify.module.inputs import Inputs, arguments_of
from bayesify.module.random_network import refuse_in_backward
from bayesify.noise.keys import NoiseKey, Stream
from bayesify.noise.threefry import counter_key, normals
from bayesify.training.kernel.compiler import CompilerError
from bayesify.training.kernel.formulas import PriorBlocks, prior_blocks
from bayesify.training.kernel.interface import SampledPosterior, SampleNoise
from bayesify.training.kernel.native import NativeSample

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
        """Return whether a kernel samples this network's weights under this kind of KL."""
        if not _is_plain(bnn) or _is_transformed():
            return False
        dtype = bnn.posterior.mean.dtype
        wanted = (bnn.weight_prior, kl, dtype, bnn.layout.starts)
        before = self._prepared_for
        if before is None or before[0] is not wanted[0] or before[1:] != wanted[1:]:
            self._prepared_for, self._kernel, self._kl = wanted, None, kl
            prior = prior_blocks(bnn.weight_prior, kl)
            if prior is not None:
                self._kernel = _kernel_or_none(prior, bnn.layout.starts, dtype)
        return self._kernel is not None

    def sample_outputs(
        self, bnn: BayesianModule, inputs: Inputs, *, step: int, samples: range
    ) -> tuple[Tensor, Tensor]:
        """Return outputs under the weight samples, shape (S, N, ...), and the KL in nats.

        Of a KL that is estimated it is the average over the samples.
        """
        refuse_in_backward()
        args, kwargs = arguments_of(inputs)
        outputs, kls = [], []
        for sample in samples:
            kl, *weights = self._draw(bnn, step, sample)
            named = dict(zip(bnn.layout.names, weights, strict=True))
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
        noise = SampleNoise(key, opposite)
        drawing = _Drawing(bnn, self._kl, self._kernel, self._memory, step, noise)
        drawn: tuple[Tensor, ...] = _Draw.apply(q.mean, q.rho, drawing)  # type: ignore[no-untyped-call]
        return drawn


def _is_plain(bnn: BayesianModule) -> bool:
    """Whether nothing of the network is of a class of its own, nor anywhere but on the CPU."""
    q = bnn.posterior
    return (
        type(bnn) is BayesianModule
        and type(q) is MeanFieldGaussian
        and type(bnn.estimator) is WeightSampling
        and _METHODS.isdisjoint(vars(bnn))
        and _METHODS.isdisjoint(vars(q))
        and all(
            type(each) is torch.nn.Parameter
            and each.device.type == "cpu"
            and each.dtype in (torch.float32, torch.float64)
            for each in (q.mean, q.rho)
        )
    )


#: What the kernel stands for, and does not call; an object may have its own.
_METHODS = frozenset(("draw", "noise", "run_with_named", "sample_outputs"))


def _is_transformed() -> bool:
    """Whether code is compiled, or a transform of ``torch.func`` or forward mode is active."""
    return (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def _kernel_or_none(
    prior: PriorBlocks, starts: Sequence[int], dtype: torch.dtype
) -> NativeSample | None:
    try:
        return NativeSample(prior, starts, dtype)
    except CompilerError:
        return None


class _Drawing:
    """One weight sample: whose, and its noise."""

    def __init__(
        self,
        bnn: BayesianModule,
        kl: KLMethod,
        kernel: NativeSample,
        memory: _Memory,
        step: int,
        noise: SampleNoise,
    ) -> None:
        self.bnn, self.kl, self.kernel, self.memory = bnn, kl, kernel, memory
        self.step, self.noise = step, noise
        self.starts, self.shapes = bnn.layout.starts, bnn.layout.shapes
        self.prior_mean, self.mask = bnn.prior_mean, bnn.posterior.mask

    def of(self, mean: Tensor, rho: Tensor) -> SampledPosterior:
        return SampledPosterior(mean, rho, self.prior_mean, self.mask)

    def sample(self, mean: Tensor, rho: Tensor) -> tuple[Tensor, float, int]:
        """Return the weights, their KL, and a sum by which an edit of the weights is seen."""
        weights = self.memory.take(mean)
        return weights, *self.kernel.sample(self.of(mean, rho), self.step, self.noise, weights)

    def parts_of(self, weights: Tensor) -> list[Tensor]:
        """Return the weights of each parameter, in the same memory.

        They are no views of one tensor, of which a network could not edit one in place.
        """
        vector = weights.numpy()
        bounds = zip(self.starts[:-1], self.starts[1:], self.shapes, strict=True)
        return [torch.from_numpy(vector[a:b].reshape(shape)) for a, b, shape in bounds]


class _Draw(torch.autograd.Function):
    """From mean and rho to the KL of a weight sample and the weights of each parameter."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, rho: Tensor, drawing: _Drawing) -> tuple[Tensor, ...]:
        weights, kl, total = drawing.sample(mean, rho)
        ctx.set_materialize_grads(False)
        ctx.drawing, ctx.weights, ctx.total = drawing, weights, total
        ctx.posterior, ctx.versions = (mean, rho), (mean._version, rho._version)
        return mean.new_tensor(kl), *drawing.parts_of(weights)

    @staticmethod
    def backward(ctx: Any, in_kl: Tensor | None, *in_weights: Tensor | None) -> Any:
        mean, rho = ctx.posterior
        if ctx.versions != (mean._version, rho._version):
            raise RuntimeError(
                "mean and rho must not change between the objective and its backward pass; call "
                "loss.backward() before optimizer.step()"
            )
        drawing: _Drawing = ctx.drawing
        if torch.is_grad_enabled():  # create_graph=True
            return *_differentiable(drawing, in_kl, in_weights), None
        gradients = drawing.memory.take(mean), drawing.memory.take(mean)
        of, factor = drawing.of(mean, rho), 0.0 if in_kl is None else float(in_kl)
        # The memory is free for the next sample, also where the loss is still held by then.
        weights, ctx.weights = ctx.weights, None
        while True:
            if weights is None:  # a second backward pass, or the network has edited its weights
                weights, _, ctx.total = drawing.sample(mean, rho)
            total = drawing.kernel.gradients(of, weights, in_weights, factor, gradients)
            if total == ctx.total:
                return *gradients, None
            weights = None


def _differentiable(
    drawing: _Drawing, in_kl: Tensor | None, in_weights: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return the gradients with a graph of their own, for second derivatives."""
    bnn, (key, opposite) = drawing.bnn, drawing.noise
    q = bnn.posterior
    assert isinstance(q, MeanFieldGaussian)
    noise = normals(*key, drawing.step, q.num_weights, dtype=q.mean.dtype, device="cpu")
    draw = q.draw((-noise if opposite else noise).unsqueeze(0))
    kl = kl_divergence(q, bnn.weight_prior, draw, method=drawing.kl, prior_mean=bnn.prior_mean)
    weights = bnn.layout.unflatten(draw.weights[0]).values()
    pairs = [
        (value, gradient)
        for value, gradient in zip((kl, *weights), (in_kl, *in_weights), strict=True)
        if gradient is not None
    ]
    values, gradients = zip(*pairs, strict=True)
    return torch.autograd.grad(values, (q.mean, q.rho), gradients, create_graph=True)


class _Memory:
    """Vectors that are used again once no tensor lies in them.

    Memory fresh from the system costs as much as the kernel, for its pages are filled with zeros.
    """

    _MOST_FREE = 4

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: list[npt.NDArray[np.uint8]] = []

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
