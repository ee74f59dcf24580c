"""The fused step: the network by autograd, and all else in one kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from bayesify.elbo import ELBO
from bayesify.fused.formulas import OptimizerRule, Rates, prior_form
from bayesify.fused.kernels import Kernel, Recipe, Vectors
from bayesify.fused.leaves import Leaves
from bayesify.fused.native import NativeKernel
from bayesify.fused.support import group_of, runs_on_moments
from bayesify.fused.tensors import TensorKernel
from bayesify.fused.threefry import counter_key, normals
from bayesify.fused.values import StepValues
from bayesify.inputs import Inputs
from bayesify.noise import NoiseKey, Stream
from bayesify.posteriors import MeanFieldGaussian, WeightDraw

__all__ = ["FusedStep"]


class FusedStep:
    """A step of training in two parts: the network's passes, and one kernel for all the rest.

    The kernel goes over the weights once: it makes the noise of the step again, turns the
    network's gradients into those of mean and rho, moves both as the optimiser would (its state is
    the optimiser's own), and leaves behind the weights of the next step. Noise comes from a
    counter-based generator, so that its numbers are others than the objective's own.

    Args:
        elbo: the objective.
        optimizer: what moves the parameters; ``why_not_fused`` has nothing against the two.
        compiled: False for the same numbers without a compiler, at many times the price.

    Raises:
        CompilerError: the kernel cannot be compiled here.
    """

    def __init__(self, elbo: ELBO, optimizer: Optimizer, *, compiled: bool = True) -> None:
        posterior, form = elbo.bnn.posterior, prior_form(elbo.bnn.weight_prior, elbo.kl)
        assert isinstance(posterior, MeanFieldGaussian)
        assert form is not None
        self._elbo, self._optimizer, self._posterior = elbo, optimizer, posterior
        moments = runs_on_moments(elbo)
        mean, rho = posterior.mean.detach(), posterior.rho.detach()
        leaf = torch.empty_like(mean)
        vectors = Vectors(
            mean=mean,
            rho=rho,
            leaf=leaf,
            of_mean=self._state_of(posterior.mean),
            of_rho=self._state_of(posterior.rho),
            starts=elbo.bnn.layout.starts,
            prior_mean=elbo.bnn.prior_mean,
            kept=posterior.kept,
        )
        rule = _rule_of(optimizer, self._group_of(posterior.mean))
        recipe = Recipe(form, rule, moments, mean.dtype)
        stream = Stream.DIVERGENCE if moments else Stream.TRAINING
        key = counter_key(NoiseKey(elbo.bnn.seed, stream, 0))
        self._key, self._leaf, self._moments = key, leaf, moments
        self._kernel: Kernel
        if compiled and mean.device.type == "cpu":
            self._kernel, kind = NativeKernel(recipe, vectors, key), "C++"
        else:
            self._kernel = TensorKernel(recipe, vectors, key, compiled=compiled)
            kind = "torch.compile" if compiled else "not compiled, slow"
        self._leaves = Leaves(elbo, leaf, moments=moments)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._others = bool(held - {id(posterior.mean), id(posterior.rho)})
        self._first = True
        kept = posterior.kept
        self._count = posterior.num_weights if kept is None else int(kept.sum())
        self._ready: tuple[int, int, int] | None = None
        self.description = f"fused ({kind}; {recipe.optimizer}, {form.kind} prior)"

    def evaluate(
        self, inputs: Inputs, targets: Tensor, *, batch_index: int, kl_scale: float, values: bool
    ) -> StepValues:
        """See ``TrainingStep.evaluate``."""
        elbo = self._elbo
        self._step = elbo.step
        if self._ready != self._state():  # the first step, or somebody changed the posterior
            self._kernel.refresh(self._step)
        outputs = self._leaves.outputs(inputs)
        self._nll = elbo.nll(outputs, targets)
        self._factor = elbo.kl_factor(outputs.shape[1], batch_index=batch_index, kl_scale=kl_scale)
        complexity = None
        if values:
            with torch.no_grad():
                complexity = elbo.complexity(self._draw(), self._step, range(elbo.num_samples))
        elbo.count_step()
        return StepValues(self._nll.detach(), outputs.detach(), self._factor, complexity)

    def update(self, *, residual: bool) -> float | None:  # noqa: ARG002
        """See ``TrainingStep.update``."""
        posterior, optimizer = self._posterior, self._optimizer
        if self._others:
            optimizer.zero_grad(set_to_none=True)
        self._nll.backward()
        in_mean, in_std = self._leaves.take_gradients()
        total = self._kernel.update(
            in_mean,
            in_std,
            step=self._step,
            kl_factor=self._factor,
            rates=(self._rates(posterior.mean), self._rates(posterior.rho)),
        )
        if self._others or self._first:
            # Of whatever else is trained: mean and rho have no gradient. Once at least, since
            # schedulers ask for it.
            optimizer.step()
            self._first = False
        self._ready = self._state()
        return total / self._count if self._count else None

    def _state(self) -> tuple[int, int, int]:
        """What the leaves were made for; the kernel's own writes are not counted as versions."""
        posterior = self._posterior
        return self._elbo.step, posterior.mean._version, posterior.rho._version

    def _state_of(self, parameter: Tensor) -> tuple[Tensor, ...]:
        """The optimiser's moments of a parameter, made as the optimiser would at its first step."""
        state, group = self._optimizer.state[parameter], self._group_of(parameter)
        if isinstance(self._optimizer, Adam):
            if not state:
                state["step"] = torch.zeros((), device=_counter_device(group, parameter))
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            return state["exp_avg"], state["exp_avg_sq"]
        if not group["momentum"]:
            return ()
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return (state["momentum_buffer"],)

    def _rates(self, parameter: Tensor) -> Rates:
        group = self._group_of(parameter)
        lr = float(group["lr"])
        if not isinstance(self._optimizer, Adam):
            return Rates(lr, float(group["momentum"]))
        count = self._optimizer.state[parameter]["step"]
        count += 1
        beta1, beta2 = map(float, group["betas"])
        taken = float(count)
        return Rates(lr, beta1, beta2, group["eps"], 1.0 - beta1**taken, 1.0 - beta2**taken)

    def _group_of(self, parameter: Tensor) -> dict[str, Any]:
        group = group_of(self._optimizer, parameter)
        assert group is not None
        return group

    def _draw(self) -> WeightDraw | None:
        if self._moments:
            return None
        mean = self._posterior.mean
        noise = normals(*self._key, self._step, mean.numel(), dtype=mean.dtype, device=mean.device)
        return WeightDraw(self._leaf.unsqueeze(0), noise.unsqueeze(0))


def _rule_of(optimizer: Optimizer, group: dict[str, Any]) -> OptimizerRule:
    if isinstance(optimizer, Adam):
        return "adam"
    return "momentum" if group["momentum"] else "sgd"


def _counter_device(group: dict[str, Any], parameter: Tensor) -> torch.device:
    on_device = group.get("fused") or group.get("capturable")
    return parameter.device if on_device else torch.device("cpu")
