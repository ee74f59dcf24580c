"""The network run on tensors that are leaves of the graph: autograd ends at the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayesify.elbo import ELBO
from bayesify.fused.formulas import LeafKind
from bayesify.fused.kernels import Kernel
from bayesify.fused.threefry import counter_key
from bayesify.inputs import Inputs, arguments_of
from bayesify.layout import ParameterLayout
from bayesify.noise import NoiseKey, NoiseKind, Stream
from bayesify.posteriors import MeanFieldGaussian
from bayesify.random_network import as_tensor

__all__ = ["EditedInPlaceError", "Leaves"]


class EditedInPlaceError(RuntimeError):
    """A network changes its weights in its pass, where they are leaves of the graph."""

    def __init__(self) -> None:
        super().__init__(
            'the network edits its weights in place, which only autograd follows; use step="auto"'
        )


class Leaves:
    """A network's random parameters as leaves, each a view of a flat vector of shape (D,).

    What follows for the posterior's parameters is no business of autograd's: it is in closed form.

    Args:
        elbo: the objective.
        leaf: the sampled weights, standard deviations or variances.
        kind: which; beside the last two the means are the posterior's own.
        kernel: what draws the noise of outputs; None for the generator of all plain passes.
    """

    def __init__(
        self, elbo: ELBO, leaf: Tensor, kind: LeafKind, kernel: Kernel | None = None
    ) -> None:
        self._elbo, self._kernel = elbo, kernel
        layout, mean = elbo.bnn.layout, elbo.bnn.posterior.mean
        self._first = _views(layout, leaf if kind == "weights" else mean)
        self._second = {} if kind == "weights" else _views(layout, leaf)
        self._stand_in = None
        if kind != "weights":
            self._stand_in = _StandIn(
                mean, self._first, self._second, variances=kind == "variances"
            )

    def outputs(self, inputs: Inputs) -> Tensor:
        """The network's outputs for the step that the objective is at, shape (S, N, ...).

        Raises:
            EditedInPlaceError: the network changes its weights in its pass.
        """
        leaves = [*self._first.values(), *self._second.values()]
        versions = [leaf._version for leaf in leaves]
        try:
            outputs = self._run(inputs)
        except RuntimeError as error:
            if "a leaf Variable that requires grad" not in str(error):
                raise
            raise EditedInPlaceError from error
        if versions != [leaf._version for leaf in leaves]:
            raise EditedInPlaceError
        return outputs

    def _run(self, inputs: Inputs) -> Tensor:
        bnn = self._elbo.bnn
        if self._stand_in is None:
            args, kwargs = arguments_of(inputs)
            return as_tensor(bnn.run_with_named(self._first, *args, **kwargs)).unsqueeze(0)
        key = NoiseKey(bnn.seed, Stream.TRAINING, self._elbo.step)
        if self._kernel is not None:
            key = _CounterKey(key.seed, key.stream, key.step, self._kernel)
        samples = range(self._elbo.num_samples)
        outputs, _ = bnn.sample_outputs(inputs, key, samples, posterior=self._stand_in)
        return outputs

    def backward(self, nll: Tensor) -> None:
        """The backward pass; a network that has one of its own within its pass may have begun."""
        self.take_gradients()
        if nll.requires_grad:  # not where a pass used no weight at all
            nll.backward()

    def take_gradients(self) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
        """The gradients of each parameter, in weights or means and in spreads, then forgotten.

        None stands for zeros; the second is empty where the network ran on weights.
        """
        return _taken(self._first), _taken(self._second)


class _StandIn(MeanFieldGaussian):
    """The posterior as a perturbation sees it, of leaves instead of mean and rho."""

    def __init__(
        self,
        mean: Tensor,
        means: dict[str, Tensor],
        spreads: dict[str, Tensor],
        *,
        variances: bool,
    ) -> None:
        nn.Module.__init__(self)
        self.mean = nn.Parameter(mean.detach(), requires_grad=False)
        self.register_buffer("kept", None)
        self._moments = means, spreads
        self.gives_variances = variances

    def moments_of(self, layout: ParameterLayout) -> tuple[dict[str, Tensor], dict[str, Tensor]]:  # noqa: ARG002
        return self._moments


@dataclass(frozen=True)
class _CounterKey(NoiseKey):
    """A key whose normals the kernel draws."""

    kernel: Kernel

    def numbers(
        self,
        kind: NoiseKind,
        sample: int,
        place: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Tensor:
        if kind != "normal":
            return super().numbers(kind, sample, place, size, dtype, device)
        words = counter_key(self, sample, place)
        return self.kernel.normals(words, int(self.step), size).to(dtype)


def _views(layout: ParameterLayout, vector: Tensor) -> dict[str, Tensor]:
    parts = layout.unflatten(vector.detach())
    return {name: part.detach().requires_grad_() for name, part in parts.items()}


def _taken(leaves: dict[str, Tensor]) -> list[Tensor | None]:
    gradients = [leaf.grad for leaf in leaves.values()]
    for leaf in leaves.values():
        # The next backward pass then hands its tensor over, and adds nothing.
        leaf.grad = None
    return gradients
