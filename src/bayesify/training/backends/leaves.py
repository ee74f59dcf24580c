"""The leaves of a step's graph: random parameters as views of a vector of weights or moments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from bayesify.distributions.layout import ParameterLayout
from bayesify.distributions.posteriors import MeanFieldGaussian, Moments
from bayesify.module.inputs import Inputs, arguments_of
from bayesify.noise.keys import NoiseKey, NoiseKind, Stream
from bayesify.noise.threefry import counter_key
from bayesify.training.elbo import ELBO
from bayesify.training.kernel.formulas import LeafKind
from bayesify.training.kernel.interface import Kernel

__all__ = [
    "CounterKey",
    "EditedInPlaceError",
    "LeafPosterior",
    "Leaves",
    "ParameterGradients",
    "gather",
    "leaf_views",
]

#: The gradient in each random parameter; None stands for zeros.
ParameterGradients = Sequence[Tensor | None]


class EditedInPlaceError(RuntimeError):
    """A network changes its weights in its forward pass, where they are leaves of the graph."""

    def __init__(self, why: str = 'under this backend; use backend="auto"') -> None:
        super().__init__(
            f"the network must not edit its weights in place {why}, or compute new ones, as "
            "weight.clamp(-1, 1) instead of weight.clamp_(-1, 1)"
        )


class Leaves:
    """The random parameters of a network as leaves, each a view of a flat vector of shape (D,).

    Autograd ends at the leaves; the gradients of mean and rho follow in closed form.

    Args:
        elbo: the objective.
        leaf: the sampled weights, standard deviations or variances.
        kind: which; for the last two the means are leaves too, the posterior's own.
        kernel: draws the noise of outputs; None for PyTorch's generators.
        first_sample: index of the noise of outputs.
    """

    def __init__(
        self,
        elbo: ELBO,
        leaf: Tensor,
        kind: LeafKind,
        kernel: Kernel | None = None,
        *,
        first_sample: int = 0,
    ) -> None:
        self._elbo, self._kernel, self._first_sample = elbo, kernel, first_sample
        layout, mean = elbo.bnn.layout, elbo.bnn.posterior.mean
        self._first = leaf_views(layout, leaf if kind == "weights" else mean)
        self._second = {} if kind == "weights" else leaf_views(layout, leaf)
        self._leaves = [*self._first.values(), *self._second.values()]
        self._addresses = [each.data_ptr() for each in self._leaves]
        self._vector, self._is_first_pass = leaf, True
        self._stand_in = None
        if kind != "weights":
            moments = Moments(self._first, self._second, squared=kind == "variances")
            self._stand_in = LeafPosterior(mean, moments)

    def outputs(self, inputs: Inputs) -> Tensor:
        """The network's outputs for the step that the objective is at, shape (S, N, ...).

        Raises:
            EditedInPlaceError: the network changes its weights in its pass.
        """
        versions = [leaf._version for leaf in self._leaves]
        # Edits of .data change no version. Later passes compare no values: that takes as long as a
        # pass over all weights.
        before = self._vector.clone() if self._is_first_pass else None
        self._is_first_pass = False
        try:
            outputs = self._run(inputs)
        except RuntimeError as error:
            if "a leaf Variable that requires grad" not in str(error):
                raise
            raise EditedInPlaceError from error
        if (
            versions != [leaf._version for leaf in self._leaves]
            or self._addresses != [leaf.data_ptr() for leaf in self._leaves]
            or (before is not None and not _is_same(before, self._vector))
        ):
            raise EditedInPlaceError
        return outputs

    def _run(self, inputs: Inputs) -> Tensor:
        bnn = self._elbo.bnn
        if self._stand_in is None:
            args, kwargs = arguments_of(inputs)
            return bnn.tensor_of(bnn.run_with_named(self._first, *args, **kwargs)).unsqueeze(0)
        key = NoiseKey(bnn.seed, Stream.TRAINING, self._elbo.step)
        if self._kernel is not None:
            key = CounterKey(key.seed, key.stream, key.step, self._kernel)
        samples = range(self._first_sample, self._first_sample + self._elbo.num_samples)
        outputs, _ = bnn.sample_outputs(inputs, key, samples, posterior=self._stand_in)
        return outputs

    def backward(self, nll: Tensor) -> None:
        """Discard gradients that the forward pass left, then run the backward pass."""
        self.take_gradients()
        if nll.requires_grad:  # not where a pass used no weight at all
            nll.backward()

    def take_gradients(self) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
        """The gradients of each parameter, in weights or means and in spreads, then forgotten.

        None stands for zeros; the second is empty where the network ran on weights.
        """
        return _taken(self._first), _taken(self._second)


class LeafPosterior(MeanFieldGaussian):
    """The posterior as an estimator sees it, with leaves instead of mean and rho."""

    def __init__(self, mean: Tensor, moments: Moments) -> None:
        nn.Module.__init__(self)
        self.mean = nn.Parameter(mean.detach(), requires_grad=False)
        self.register_buffer("mask", None)
        self._moments = moments

    def moments_of(self, layout: ParameterLayout) -> Moments:  # noqa: ARG002
        """Return the leaves."""
        return self._moments


@dataclass(frozen=True)
class CounterKey(NoiseKey):
    """A key whose numbers the kernel draws."""

    kernel: Kernel

    def numbers(
        self,
        kind: NoiseKind,
        sample: int,
        place: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device | str,  # noqa: ARG002
    ) -> Tensor:
        """Draw one vector of shape (size,); see ``NoiseKey.numbers``."""
        draw = self.kernel.normals if kind == "normal" else self.kernel.signs
        return draw(counter_key(self, sample, place), int(self.step), size).to(dtype)


def leaf_views(layout: ParameterLayout, vector: Tensor) -> dict[str, Tensor]:
    """Return each parameter's part of a vector of shape (..., D), as a leaf with a gradient."""
    parts = layout.unflatten(vector.detach())
    return {name: part.detach().requires_grad_() for name, part in parts.items()}


def _is_same(one: Tensor, two: Tensor) -> bool:
    """Return whether all bits are equal, those of NaN too."""
    return torch.equal(one.view(torch.uint8), two.view(torch.uint8))


def gather(flat: Tensor, starts: Sequence[int], parts: ParameterGradients) -> None:
    """Write the gradients of the parameters into one vector; None stands for zeros."""
    for (start, stop), part in zip(pairwise(starts), parts, strict=True):
        if part is None:
            flat[start:stop].zero_()
        else:
            flat[start:stop].copy_(part.reshape(-1))


def _taken(leaves: dict[str, Tensor]) -> list[Tensor | None]:
    gradients = [leaf.grad for leaf in leaves.values()]
    for leaf in leaves.values():
        # The next backward pass then hands its tensor over, and adds nothing.
        leaf.grad = None
    return gradients
