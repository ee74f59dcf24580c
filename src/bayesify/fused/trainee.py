"""One network in a fused step: its kernel, its optimiser's state, and where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from bayesify.elbo import ELBO
from bayesify.fused.formulas import OptimizerRule, Rates, prior_form
from bayesify.fused.kernels import Kernel, Recipe, SampleNoise, Vectors
from bayesify.fused.native import NativeKernel
from bayesify.fused.samples import sources
from bayesify.fused.support import group_of, leaf_kind
from bayesify.fused.tensors import TensorKernel
from bayesify.fused.threefry import counter_key, normals
from bayesify.noise import NoiseKey, Stream
from bayesify.posteriors import MeanFieldGaussian, WeightDraw

__all__ = ["Moved", "Trainee"]


class Trainee:
    """What a fused step does for one network, but for the network's passes.

    Args:
        elbo: the objective.
        optimizer: whose state the kernel goes on with; ``why_not_fused`` has nothing against it.
        leaf: what the network runs on, shape (D,), written by the kernel.
        compiled: False for the same numbers without a compiler, at many times the price.

    Raises:
        CompilerError: the kernel cannot be compiled here.
    """

    def __init__(
        self, elbo: ELBO, optimizer: Optimizer, leaf: Tensor, *, compiled: bool = True
    ) -> None:
        posterior, form = elbo.bnn.posterior, prior_form(elbo.bnn.weight_prior, elbo.kl)
        assert isinstance(posterior, MeanFieldGaussian)
        assert form is not None
        self.elbo, self.optimizer = elbo, optimizer
        self._posterior, self._leaf = posterior, leaf
        self._moved = Moved(optimizer, posterior.mean), Moved(optimizer, posterior.rho)
        assert self._moved[0].rule == self._moved[1].rule
        self._kind = leaf_kind(elbo)
        stream = Stream.TRAINING if self._kind == "weights" else Stream.DIVERGENCE
        key = NoiseKey(elbo.bnn.seed, stream, 0)
        #: Of each weight sample.
        self._noises = [
            SampleNoise(counter_key(key, source.sample), source.opposite)
            for source in sources(elbo)
        ]
        several = len(self._noises) > 1
        vectors = Vectors(
            mean=posterior.mean.detach(),
            rho=posterior.rho.detach(),
            leaf=leaf,
            of_mean=self._moved[0].moments,
            of_rho=self._moved[1].moments,
            starts=elbo.bnn.layout.starts,
            prior_mean=elbo.bnn.prior_mean,
            kept=posterior.kept,
            sums=(torch.empty_like(leaf), torch.empty_like(leaf)) if several else (),
        )
        recipe = Recipe(form, self._moved[0].rule, self._kind, leaf.dtype, len(self._noises))
        self._kernel: Kernel
        if compiled and leaf.device.type == "cpu":
            self._kernel, kind = NativeKernel(recipe, vectors, self._noises[0].key), "C++"
        else:
            self._kernel = TensorKernel(recipe, vectors, self._noises[0].key, compiled=compiled)
            kind = "torch.compile" if compiled else "not compiled, slow"
        self.description = f"{kind}; {recipe.optimizer}, {form.kind} prior"
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self._others = [p for p in held if p is not posterior.mean and p is not posterior.rho]
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._called = False
        kept = posterior.kept
        self._count = posterior.num_weights if kept is None else int(kept.sum())
        self._ready: tuple[int, int, int] | None = None

    @property
    def kernel_on_cpu(self) -> Kernel | None:
        """What draws other noise, too; a GPU has a generator that is as fast as any."""
        return self._kernel if self._leaf.device.type == "cpu" else None

    def begin(self) -> None:
        """Have the leaf ready for the step that the objective is at."""
        self._step = self.elbo.step
        if self._ready != self._state():  # the first step, or somebody changed the posterior
            self._kernel.refresh(self._step)

    def draw(self, sample: int) -> WeightDraw | None:
        """See ``SampledStep.draw``."""
        if self._kind != "weights":
            return None
        leaf, (key, opposite) = self._leaf, self._noises[sample]
        noise = normals(*key, self._step, leaf.numel(), dtype=leaf.dtype, device=leaf.device)
        noise = -noise if opposite else noise
        return WeightDraw(leaf.unsqueeze(0), noise.unsqueeze(0))

    def forget_gradients(self) -> None:
        """Before the backward pass."""
        if self._others or not self._called:
            self.optimizer.zero_grad(set_to_none=True)

    def accumulate(self, in_mean: Sequence[Tensor | None], sample: int, factor: float) -> None:
        """See ``SampledStep.accumulate``."""
        self._ready = None  # until the step is done the leaf is no step's first sample
        self._kernel.accumulate(
            in_mean,
            step=self._step,
            kl_factor=factor,
            first=sample == 0,
            then=self._noises[sample + 1],
        )

    def move(
        self,
        in_mean: Sequence[Tensor | None],
        in_spread: Sequence[Tensor | None],
        factor: float,
    ) -> float | None:
        """Move all parameters; see ``TrainingStep.update`` for the result."""
        total = self._kernel.update(
            in_mean,
            in_spread,
            step=self._step,
            kl_factor=factor,
            rates=(self._moved[0].next_rates(), self._moved[1].next_rates()),
        )
        return self._concluded(total)

    def prepare(self, batch_size: int, *, batch_index: int, kl_scale: float) -> float:
        """Count a step whose passes and :meth:`advance` follow; returns what multiplies the KL."""
        self.begin()
        factor = self.elbo.kl_factor(batch_size, batch_index=batch_index, kl_scale=kl_scale)
        rates = self._moved[0].next_rates(), self._moved[1].next_rates()
        self._on_device().prepare(self._step, factor, rates)
        self.elbo.count_step()
        return factor

    def advance(self, in_mean: Sequence[Tensor | None], in_spread: Sequence[Tensor | None]) -> None:
        """Move mean and rho with nothing asked of the processor, as a captured graph needs it."""
        self._on_device().advance(in_mean, in_spread)
        # Which a graph writes anew at each replay, wherever they point to by then.
        self._gradients = [(parameter, parameter.grad) for parameter in self._others]

    def conclude(self, *, residual: bool) -> float | None:
        """Move all other parameters after :meth:`advance`."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return self._concluded(self._on_device().total if residual else None)

    def _concluded(self, total: float | None) -> float | None:
        self._posterior.mean.grad = self._posterior.rho.grad = None
        if self._others or not self._called:
            # Of whatever else is trained: mean and rho have no gradient. Once at least, since
            # schedulers ask for it.
            self.optimizer.step()
            self._called = True
        self._ready = self._state()
        return total / self._count if self._count and total is not None else None

    def _on_device(self) -> TensorKernel:
        if not isinstance(self._kernel, TensorKernel):
            raise TypeError("a graph is captured of PyTorch's operations, not of compiled C++")
        return self._kernel

    def _state(self) -> tuple[int, int, int]:
        """What the leaf was made for; the kernel's own writes do not count as versions."""
        posterior = self._posterior
        return self.elbo.step, posterior.mean._version, posterior.rho._version


class Moved:
    """A parameter and the state of the optimiser that moves it, made where there is none yet.

    Args:
        optimizer: Adam or SGD.
        parameter: which it holds.

    Example:
        >>> mean = torch.nn.Parameter(torch.zeros(3))
        >>> moved = Moved(Adam([mean], lr=0.1), mean)
        >>> moved.rule, len(moved.moments), round(moved.next_rates().correction1, 3)
        ('adam', 2, 0.1)
    """

    def __init__(self, optimizer: Optimizer, parameter: Tensor) -> None:
        group = group_of(optimizer, parameter)
        assert group is not None
        self._group: dict[str, Any] = group
        self._state: dict[str, Any] = optimizer.state[parameter]
        self.rule: OptimizerRule
        self.moments: tuple[Tensor, ...]
        if isinstance(optimizer, Adam):
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
        """The rates of one more step, which is counted."""
        lr = float(self._group["lr"])
        if self.rule != "adam":
            return Rates(lr, float(self._group["momentum"]))
        self._state["step"] += 1
        taken = float(self._state["step"])
        beta1, beta2 = map(float, self._group["betas"])
        eps = float(self._group["eps"])
        return Rates(lr, beta1, beta2, eps, 1.0 - beta1**taken, 1.0 - beta2**taken)
