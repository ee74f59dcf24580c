"""The update of one network's posterior by a kernel: its vectors, noise and optimiser's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Adam, Optimizer

from bayesify.distributions.posteriors import MeanFieldGaussian, WeightDraw
from bayesify.noise.keys import NoiseKey, Stream
from bayesify.noise.threefry import counter_key, normals
from bayesify.training.convergence import StdResidual
from bayesify.training.elbo import ELBO
from bayesify.training.ivon import IVON
from bayesify.training.kernel.formulas import OptimizerRule, Rates, leaf_kind, prior_blocks
from bayesify.training.kernel.interface import Kernel, Recipe, SampleNoise, Vectors
from bayesify.training.kernel.native import NativeKernel
from bayesify.training.kernel.tensors import TensorKernel
from bayesify.training.optimizers import group_of

__all__ = ["OptimizerState", "PosteriorUpdate"]


class PosteriorUpdate:
    """Everything in a compiled step of one network but its forward and backward pass.

    Args:
        elbo: the objective.
        optimizer: Adam, SGD or IVON, whose state the kernel reads and writes.
        leaf: the vector that the network runs on, shape (D,), written by the kernel.
        sources: for each weight sample of a step the index of its noise, and whether the sample
            has the negative of it.
        compiled: False for the same numbers without a compiler, many times slower.
        from_sums: whether :meth:`accumulate` is called for every weight sample of a step, and
            :meth:`update` adds no gradients of its own.

    Raises:
        CompilerError: the kernel cannot be compiled on this machine.
    """

    def __init__(
        self,
        elbo: ELBO,
        optimizer: Optimizer,
        leaf: Tensor,
        sources: Sequence[tuple[int, bool]],
        *,
        compiled: bool = True,
        from_sums: bool = False,
    ) -> None:
        posterior = elbo.bnn.posterior
        prior = prior_blocks(elbo.bnn.weight_prior, elbo.kl)
        assert isinstance(posterior, MeanFieldGaussian)
        assert prior is not None
        self._elbo, self._optimizer = elbo, optimizer
        self._posterior, self._leaf = posterior, leaf
        self._mean, self._rho = posterior.mean, posterior.rho
        self._states = (
            OptimizerState(optimizer, posterior.mean),
            OptimizerState(optimizer, posterior.rho),
        )
        assert self._states[0].rule == self._states[1].rule
        self._kind = leaf_kind(elbo.bnn.estimator)
        stream = Stream.TRAINING if self._kind == "weights" else Stream.DIVERGENCE
        key = NoiseKey(elbo.bnn.seed, stream, 0)
        self._noises = [
            SampleNoise(counter_key(key, sample), opposite) for sample, opposite in sources
        ]
        #: The derivatives in mean and log std, shape (2, D); see ``Vectors.sums``.
        self.sums = leaf.new_empty(2, leaf.numel() if from_sums or len(self._noises) > 1 else 0)
        vectors = Vectors(
            mean=posterior.mean.detach(),
            rho=posterior.rho.detach(),
            leaf=leaf,
            of_mean=self._states[0].moments,
            of_rho=self._states[1].moments,
            starts=elbo.bnn.layout.starts,
            prior_mean=elbo.bnn.prior_mean,
            mask=posterior.mask,
            sums=tuple(self.sums) if self.sums.numel() else (),
        )
        rule, count = self._states[0].rule, len(self._noises)
        recipe = Recipe(prior, rule, self._kind, leaf.dtype, count, from_sums)
        self._kernel: Kernel
        if compiled and leaf.device.type == "cpu":
            self._kernel, kind = NativeKernel(recipe, vectors, self._noises[0].key), "C++"
        else:
            self._kernel = TensorKernel(recipe, vectors, self._noises[0].key, compiled=compiled)
            kind = "torch.compile" if compiled else "not compiled, slow"
        self.description = f"{kind}; {recipe.optimizer}, {prior.kind} prior"
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self._others = [p for p in held if p is not posterior.mean and p is not posterior.rho]
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._optimizer_called = False
        self._leaf_is_for: tuple[int, ...] | None = None

    @property
    def kernel(self) -> Kernel:
        """The kernel, to draw other noise too."""
        return self._kernel

    @property
    def kernel_on_cpu(self) -> Kernel | None:
        """The kernel, to draw other noise too; None on a GPU, whose own generator is as fast."""
        return self._kernel if self._leaf.device.type == "cpu" else None

    def begin(self) -> None:
        """Fill the leaf for the step that the objective is at, unless the last update did."""
        self._step = self._elbo.step
        if self._leaf_is_for != self._state():  # the first step, or a changed posterior
            self._kernel.refresh(self._step)

    def draw(self, sample: int) -> WeightDraw | None:
        """The weights in the leaf, shape (1, D), with their noise; None where it holds moments."""
        if self._kind != "weights":
            return None
        leaf, (key, opposite) = self._leaf, self._noises[sample]
        noise = normals(*key, self._step, leaf.numel(), dtype=leaf.dtype, device=leaf.device)
        noise = -noise if opposite else noise
        return WeightDraw(leaf.unsqueeze(0), noise.unsqueeze(0))

    def forget_gradients(self) -> None:
        """Clear the gradients of the other parameters before a backward pass."""
        if self._others or not self._optimizer_called:
            self._optimizer.zero_grad(set_to_none=True)

    def accumulate(self, in_mean: Sequence[Tensor | None], sample: int, factor: float) -> None:
        """Add the gradients of one sample, and fill the leaf with the next one, if there is one."""
        self._leaf_is_for = None  # until the update it holds no step's first sample
        self._kernel.accumulate(
            in_mean,
            step=self._step,
            kl_factor=factor,
            first=sample == 0,
            then=self._noises[sample + 1] if sample + 1 < len(self._noises) else None,
        )

    def update(
        self,
        in_mean: Sequence[Tensor | None],
        in_spread: Sequence[Tensor | None],
        factor: float,
        *,
        with_residual: bool,
    ) -> StdResidual | None:
        """Update all parameters; returns ``ELBOTerms.std_residual``."""
        residual = self._kernel.update(
            in_mean,
            in_spread,
            step=self._step,
            kl_factor=factor,
            rates=self._next_rates(),
            with_residual=with_residual,
        )
        self._finish()
        return residual

    def prepare(self, factor: float) -> None:
        """Set the numbers of the step that a captured graph takes next."""
        self.begin()
        self._on_device().prepare(self._step, factor, self._next_rates())

    def advance(self, in_mean: Sequence[Tensor | None], in_spread: Sequence[Tensor | None]) -> None:
        """Update mean and rho without reading from the device, as a captured graph needs it."""
        self._on_device().advance(in_mean, in_spread)
        # A graph writes these anew at each replay, wherever ``grad`` points by then.
        self._gradients = [(parameter, parameter.grad) for parameter in self._others]

    def conclude(self, *, with_residual: bool) -> StdResidual | None:
        """Update all other parameters after :meth:`advance`."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._finish()
        return self._on_device().residual if with_residual else None

    def _next_rates(self) -> tuple[Rates, Rates]:
        return self._states[0].next_rates(), self._states[1].next_rates()

    def _finish(self) -> None:
        for parameter in (self._mean, self._rho):
            parameter.grad = None
            # Else autograd would not notice that a graph of before needs the old values.
            increment_version(parameter)
        if self._others or not self._optimizer_called:
            # For the other parameters: mean and rho have no gradient. At least once, because
            # schedulers ask for it.
            self._optimizer.step()
            self._optimizer_called = True
        self._leaf_is_for = self._state()

    def _on_device(self) -> TensorKernel:
        if not isinstance(self._kernel, TensorKernel):
            raise TypeError("a graph captures PyTorch's operations, not compiled C++")
        return self._kernel

    def _state(self) -> tuple[int, ...]:
        """The step that the leaf is for, and the versions of mean, rho and mask."""
        q = self._posterior
        tensors = (*q._parameters.values(), *q._buffers.values())  # in less time than by name
        # A mask made in inference mode has no version.
        versions = [t._version for t in tensors if t is not None and not t.is_inference()]
        return self._elbo.step, *versions


class OptimizerState:
    """The optimiser's state for one parameter, allocated where there is none yet.

    Args:
        optimizer: Adam, SGD or IVON.
        parameter: one of its parameters.

    Example:
        >>> mean = torch.nn.Parameter(torch.zeros(3))
        >>> state = OptimizerState(Adam([mean], lr=0.1), mean)
        >>> state.rule, len(state.moments), round(state.next_rates().correction1, 3)
        ('adam', 2, 0.1)
    """

    def __init__(self, optimizer: Optimizer, parameter: Tensor) -> None:
        group = group_of(optimizer, parameter)
        assert group is not None
        self._optimizer, self._group = optimizer, group
        self._state: dict[str, Any] = optimizer.state[parameter]
        self.rule: OptimizerRule
        self.moments: tuple[Tensor, ...]
        if isinstance(optimizer, IVON):
            momentum, h = optimizer.state_of()
            self._is_mean = parameter is optimizer.elbo.bnn.posterior.mean
            self.rule, self.moments = "ivon", (momentum if self._is_mean else h,)
        elif isinstance(optimizer, Adam):
            if not self._state:
                on_device = group.get("fused") or group.get("capturable")
                device = parameter.device if on_device else torch.device("cpu")
                self._state["step"] = torch.zeros((), device=device)
                self._state["exp_avg"] = torch.zeros_like(parameter)
                self._state["exp_avg_sq"] = torch.zeros_like(parameter)
            self.rule = "adam"
            self.moments = self._state["exp_avg"], self._state["exp_avg_sq"]
        elif group["momentum"]:
            if self._state.get("momentum_buffer") is None:
                self._state["momentum_buffer"] = torch.zeros_like(parameter)
            self.rule, self.moments = "momentum", (self._state["momentum_buffer"],)
        else:
            self.rule, self.moments = "sgd", ()

    def next_rates(self) -> Rates:
        """Count one more step and return its rates."""
        if isinstance(self._optimizer, IVON):  # those of the mean serve both
            return self._optimizer.next_rates() if self._is_mean else Rates(0.0, 0.0)
        lr = float(self._group["lr"])
        if self.rule != "adam":
            return Rates(lr, float(self._group["momentum"]))
        self._state["step"] += 1
        taken = float(self._state["step"])
        beta1, beta2 = map(float, self._group["betas"])
        eps = float(self._group["eps"])
        return Rates(lr, beta1, beta2, eps, 1.0 - beta1**taken, 1.0 - beta2**taken)
