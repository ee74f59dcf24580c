"""The unnormalised posterior density of a network's random weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from bayesify.module.bayesian import BayesianModule
from bayesify.module.edited_inputs import copied
from bayesify.module.inputs import Inputs, arguments_of, count_examples

__all__ = ["PosteriorDensity", "as_float64"]


class PosteriorDensity:
    """The negative log density of the weights that are free, up to a constant, in nats.

    U(w) = -log p(targets | inputs, w) / temperature - log p(w), summed over all examples and
    weights. Hamiltonian Monte Carlo calls it the potential energy.

    Args:
        bnn: the model, in float64 and evaluation mode.
        inputs: all N training inputs, as for ``BayesianModule.predict``, no loader.
        targets: all N targets.
        temperature: divides the log likelihood.

    Raises:
        ValueError: the inputs are not rows of N examples, as many as there are targets.

    Example:
        >>> import bayesify as bf
        >>> net = torch.nn.Linear(1, 1, bias=False)
        >>> bnn = bf.BayesianModule(net, prior=bf.Gaussian(1.0), likelihood=bf.GaussianLikelihood())
        >>> x = torch.ones(2, 1)
        >>> density = PosteriorDensity(bnn.double(), x, x, temperature=1.0)
        >>> energy = [float(density(torch.tensor([w]).double())) for w in (0.0, 1.0)]
        >>> round(energy[0] - energy[1], 6)  # (1 + 1) / 2 of the likelihood, - 1 / 2 of the prior
        0.5
    """

    def __init__(
        self, bnn: BayesianModule, inputs: Inputs, targets: Tensor, *, temperature: float
    ) -> None:
        self._bnn, self._temperature = bnn, temperature
        self._args, self._kwargs = arguments_of(as_float64(inputs))
        num_examples = count_examples(inputs)
        if targets.dim() < 1 or len(targets) != num_examples:
            raise ValueError(
                f"there must be a target for each of {num_examples} examples, got shape "
                f"{tuple(targets.shape)}"
            )
        self._targets = targets.double() if targets.is_floating_point() else targets
        mean, mask = bnn.posterior.mean.detach(), bnn.posterior.mask
        centre = torch.zeros_like(mean) if bnn.prior_mean is None else bnn.prior_mean
        #: Indices of the weights that are not pruned, shape (F,).
        self._free = None if mask is None else mask.nonzero().flatten()
        self._pruned = torch.zeros_like(mean)
        #: The centre of the prior of the free weights, shape (F,).
        self.centre: Tensor = centre if self._free is None else centre[self._free]

    def full(self, free: Tensor) -> Tensor:
        """Return the weight vectors (..., D) of free weights (..., F); pruned weights are 0."""
        if self._free is None:
            return free
        return self._pruned.expand(*free.shape[:-1], -1).index_copy(-1, self._free, free)

    def __call__(self, free: Tensor) -> Tensor:
        """Return U of the free weights, shape (F,), a scalar."""
        bnn, weights = self._bnn, self.full(free)
        args, kwargs = copied((self._args, self._kwargs))  # which the network may edit
        outputs = bnn.tensor_of(bnn.run_with(weights, *args, **kwargs))
        log_likelihood = bnn.likelihood.log_prob(outputs.unsqueeze(0), self._targets).sum()
        centred = weights if bnn.prior_mean is None else weights - bnn.prior_mean
        # A pruned weight is 0 whatever the free weights are, so that it adds a constant.
        return -log_likelihood / self._temperature - bnn.weight_prior.log_prob(centred).sum()


def as_float64(inputs: Inputs) -> Inputs:
    """Convert floating inputs to float64, and leave others such as token indices.

    Example:
        >>> as_float64({"x": torch.zeros(1), "index": torch.zeros(1, dtype=torch.int64)})
        {'x': tensor([0.], dtype=torch.float64), 'index': tensor([0])}
    """

    def wide(value: Tensor) -> Tensor:
        return value.double() if value.is_floating_point() else value

    if isinstance(inputs, Tensor):
        return wide(inputs)
    args, kwargs = arguments_of(inputs)
    # Values that are no tensors, such as flags, stay as they are.
    converted: Inputs = tree_map_only(Tensor, wide, kwargs or args)
    return converted
