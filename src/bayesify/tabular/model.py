"""Build the network for a table, an MLP plus a linear path, and the Bayesian module around it.

The command line builds it in float32, the scikit-learn estimators in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from bayesify.distributions.by_group import ByGroup
from bayesify.distributions.families import PosteriorName, named_posterior
from bayesify.distributions.likelihoods import (
    CategoricalLikelihood,
    GaussianLikelihood,
    Likelihood,
)
from bayesify.distributions.posteriors import Delta
from bayesify.distributions.priors import Prior
from bayesify.estimators import Estimator
from bayesify.module.bayesian import BayesianModule
from bayesify.module.networks import mlp

__all__ = ["Noise", "TableNet", "prior_by_inputs", "table_baseline", "table_module"]

#: Noise of numbers: one standard deviation for each target, or one predicted for each row.
Noise = Literal["learned", "input-dependent"]
_NOISE_NAME, _RELEVANCE_NAME, _RATES_NAME = "noise", "log_relevance", "log_rates"

# softplus(_ONE) is 1, the standard deviation of a standardised target.
_ONE = 0.5413248546129181
# Scale of a row's departure from the common noise in the prior; the means have scale 1.
_NOISE_SCALE = 0.5


class TableNet(nn.Module):
    """Sum of a multilayer perceptron and a linear function of the inputs.

    A linear dependence then costs few weights, hence few nats of KL, and the hidden units are left
    to the rest.

    For classes the outputs are logits (N, K). For numbers they are (N, K, 2): the mean and the
    inverse softplus of the noise's standard deviation, as
    ``GaussianLikelihood(input_dependent=True)`` expects them. The latter is a parameter for each
    target, the same for every row; with ``noise="input-dependent"`` the network adds a departure
    for each row. For counts they are logarithms of means (N, K), with ``log_rates`` added.

    Args:
        num_features: F, columns of the inputs.
        hidden: units of each hidden layer (ReLU).
        num_outputs: K, classes or targets.
        noise: noise of numbers, ``"learned"`` or ``"input-dependent"``; None for classes and
            counts.
        log_rates: the logarithm of the mean of each target's training counts, from which a
            parameter starts; None for classes and other numbers.
        relevance: whether to learn a factor of each input.
        seed: the initial values are a function of it.

    Example:
        >>> TableNet(3, (50,), 2)(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
        >>> TableNet(3, (50,), 2, noise="learned")(torch.zeros(5, 3)).shape
        torch.Size([5, 2, 2])
    """

    noise: Tensor | None
    log_relevance: Tensor | None
    log_rates: Tensor | None

    def __init__(
        self,
        num_features: int,
        hidden: Sequence[int],
        num_outputs: int,
        *,
        noise: Noise | None = None,
        log_rates: Sequence[float] | None = None,
        relevance: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if noise not in (None, "learned", "input-dependent"):
            raise ValueError(f'noise must be "learned", "input-dependent" or None, got {noise!r}')
        if log_rates is not None and (noise is not None or len(log_rates) != num_outputs):
            raise ValueError(
                f"log_rates must be one number for each of {num_outputs} targets, without noise, "
                f"got {len(log_rates)} and noise={noise!r}"
            )
        width = 2 * num_outputs if noise == "input-dependent" else num_outputs
        # nn.Linear's own initial values would be drawn from the global generator.
        self.linear = nn.utils.skip_init(nn.Linear, num_features, width, bias=False)
        nn.init.zeros_(self.linear.weight)
        self.hidden: nn.Sequential = mlp(num_features, hidden, width, seed=seed)
        self.log_relevance = nn.Parameter(torch.zeros(num_features)) if relevance else None
        self.noise = None if noise is None else nn.Parameter(torch.full((num_outputs,), _ONE))
        self.log_rates = None if log_rates is None else nn.Parameter(torch.tensor(log_rates))
        self.input_dependent = noise == "input-dependent"
        if self.input_dependent:
            last = self.hidden[-1]
            assert isinstance(last, nn.Linear)
            with torch.no_grad():  # at the start every row has the same noise
                last.weight[1::2] = 0.0
                last.bias[1::2] = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs for inputs (N, F)."""
        if self.log_relevance is not None:
            inputs = inputs * self.log_relevance.exp()
        outputs: Tensor = self.linear(inputs) + self.hidden(inputs)
        if self.log_rates is not None:
            return outputs + self.log_rates
        if self.noise is None:
            return outputs
        if not self.input_dependent:
            return torch.stack([outputs, self.noise.expand_as(outputs)], dim=-1)
        means, departures = outputs.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([means, self.noise + _NOISE_SCALE * departures], dim=-1)


def table_module(
    net: TableNet,
    *,
    likelihood: Likelihood | None = None,
    prior_of: Callable[[float], Prior],
    init_std: float,
    estimator: Estimator,
    posterior: PosteriorName = "mean-field",
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> BayesianModule:
    """Return the Bayesian module of a table, before training.

    Args:
        net: its network.
        likelihood: likelihood of its outputs; None is the Gaussian one for a network with noise,
            and that of classes without an order for others.
        prior_of: prior of the weights of a relative width. Networks of numbers or with
            ``relevance`` have :func:`prior_by_inputs`, others ``prior_of(1)`` for all weights.
        init_std: standard deviation of the posterior at the start.
        estimator: gradient estimator.
        posterior: the family of the posterior.
        seed: all noise is a function of it.
        dtype: floating-point type of all parameters.

    Example:
        >>> from bayesify import Gaussian, LocalReparameterization
        >>> net = TableNet(3, (50,), 1, noise="learned")
        >>> estimator = LocalReparameterization()
        >>> bnn = table_module(net, prior_of=Gaussian, init_std=0.05, estimator=estimator, seed=0)
        >>> bnn.predict(torch.zeros(5, 3)).total.shape
        torch.Size([5, 1])
    """
    net = net.to(dtype)
    parts = (net.noise, net.log_relevance, net.log_rates)
    by_inputs = any(each is not None for each in parts)
    bnn = BayesianModule(
        net,
        likelihood=_usual(net) if likelihood is None else likelihood,
        prior=prior_by_inputs(net, prior_of) if by_inputs else prior_of(1.0),
        posterior=named_posterior(posterior),
        init_std=init_std,
        estimator=estimator,
        exclude=_deterministic(net),
        seed=seed,
    )
    return bnn.to(dtype)


def table_baseline(
    net: TableNet, *, likelihood: Likelihood | None = None, seed: int
) -> BayesianModule:
    """Return the plain network of a table, every weight a point estimate.

    Args:
        net: its network.
        likelihood: as for :func:`table_module`.
        seed: seed of the module.

    Example:
        >>> table_baseline(TableNet(3, (50,), 2), seed=0).posterior.__class__.__name__
        'Delta'
    """
    return BayesianModule(
        net,
        likelihood=_usual(net) if likelihood is None else likelihood,
        posterior=Delta,
        exclude=_deterministic(net),
        seed=seed,
    )


def _usual(net: TableNet) -> Likelihood:
    return (
        CategoricalLikelihood() if net.noise is None else GaussianLikelihood(input_dependent=True)
    )


def _deterministic(net: TableNet) -> tuple[str, ...] | None:
    """Return the parameters without uncertainty: noise, factors of inputs and rates of all rows."""
    points = (
        (_NOISE_NAME, net.noise),
        (_RELEVANCE_NAME, net.log_relevance),
        (_RATES_NAME, net.log_rates),
    )
    return tuple(name for name, parameter in points if parameter is not None) or None


def prior_by_inputs(net: nn.Module, prior_of: Callable[[float], Prior]) -> ByGroup:
    """Return a prior under which the spread of a layer's outputs does not depend on its inputs.

    The weights of a layer of F inputs are narrower by the root of F (Neal 1996, section 2.1).
    How much functions of the prior vary then depends on ``prior_of`` and the number of layers, not
    on the numbers of inputs and units: with the recipe's defaults three to four times as much as
    standardised targets. Under one width for every weight they would vary many times more, and for
    few examples, where the posterior stays near the prior, intervals would be wider than all
    targets.

    Args:
        net: a network; the inputs of its linear layers count.
        prior_of: prior of a relative width; biases have width 1.

    Example:
        >>> from bayesify.distributions.priors import Gaussian
        >>> prior_by_inputs(TableNet(4, (25,), 1), Gaussian).groups[1:]
        (('hidden.0.weight', Gaussian(std=0.5)), ('hidden.2.weight', Gaussian(std=0.2)), \
('*', Gaussian(std=1.0)))
    """
    layers = {n: m.in_features for n, m in net.named_modules() if isinstance(m, nn.Linear)}
    widths = {f"{name}.weight": 1.0 / math.sqrt(inputs) for name, inputs in layers.items()}
    return ByGroup({name: prior_of(width) for name, width in {**widths, "*": 1.0}.items()})
