"""A last layer that is integrated out: moments of the outputs in the place of their noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from bayesify.distributions.kronecker import Kronecker
from bayesify.distributions.posteriors import Posterior, WeightDraw
from bayesify.distributions.structured import Group, StructuredGaussian
from bayesify.estimators.estimator import Estimator, ForwardPass, ParameterUse, Treatment
from bayesify.estimators.last_outputs import LastOutputs
from bayesify.estimators.per_example import PerExampleEstimator
from bayesify.estimators.weight_sampling import WeightSampling
from bayesify.noise.keys import NoiseKey

__all__ = ["ClosedFormLastLayer"]


@dataclass(frozen=True)
class ClosedFormLastLayer(Estimator):
    """Integrate the last layer out in training, and add noise to the layers below only.

    Given its inputs h, the outputs of a linear layer under a Gaussian posterior are Gaussian, of
    mean and variances in closed form. The ELBO then takes
    ``likelihood.expected_log_prob(mean, variance, targets)``, the mean of the log likelihood over
    the last layer's weights, in the place of its value at a weight sample (variational Bayesian
    last layers, Harrison et al. 2024). For ``GaussianLikelihood`` it is exact::

        E[log N(y | W h, std^2)] = log N(y | E[W] h, std^2) - Var[W h] / (2 std^2)

    in nats, for each component of the target; for ``CategoricalLikelihood`` it is a lower bound.
    With only the last layer random, as by ``include=last_layer(net)``, the objective has no noise
    at all; otherwise its gradients have that of the layers below. Predictions sample all weights,
    as under every estimator.

    The last layer is the last linear operation of a pass that has random parameters. Its outputs
    must be those of the network, apart from views such as ``squeeze(-1)``; it must use its weights
    once. Under ``MeanFieldGaussian`` and ``LowRankGaussian`` it may be any layer; under
    ``MatrixGaussian``, whose layers have one correlation of the inputs for all outputs, one that
    computes x W^T + b without pruned weights; under ``FullGaussian`` it must be a group of its own,
    its weight before its bias: ``PosteriorByGroup({"last.*": FullGaussian(), ...})``. Under
    ``LowRankGaussian`` the normals that weights share are drawn; mean and variances are those given
    them, so that the objective keeps their noise.

    Args:
        below: the estimator of the layers below: ``WeightSampling()``,
            ``LocalReparameterization()`` or ``Flipout()``.

    Raises:
        TypeError: ``below`` is another estimator.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from bayesify import ELBO, BayesianModule, GaussianLikelihood, last_layer
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> bnn = BayesianModule(
        ...     net,
        ...     likelihood=GaussianLikelihood(std=0.5),
        ...     include=last_layer(net),
        ...     estimator=ClosedFormLastLayer(),
        ... )
        >>> x, y = torch.ones(5, 3), torch.ones(5, 1)
        >>> [row.treatment for row in bnn.summary(x)]
        ['integrated', 'integrated']
        >>> elbo = ELBO(bnn, num_data=5)
        >>> bool(elbo(x, y).loss == elbo(x, y).loss)
        True
    """

    below: Estimator = field(default_factory=WeightSampling)

    def __post_init__(self) -> None:
        """Check the estimator below."""
        if not isinstance(self.below, WeightSampling | PerExampleEstimator):
            raise TypeError(
                "the estimator below a ClosedFormLastLayer must be WeightSampling(), "
                f"LocalReparameterization() or Flipout(), got {self.below!r}"
            )

    @property
    def antithetic(self) -> bool:  # type: ignore[override]
        """Whether samples of the layers below come in pairs of opposite noise."""
        return self.below.antithetic

    def treatment(self, uses: Sequence[ParameterUse]) -> Treatment:
        """See :meth:`Estimator.treatment`."""
        if _is_last(uses):
            reason = f"{uses[0].function} gives the outputs, whose moments are in closed form"
            return Treatment("integrated", reason)
        return self.below.treatment(uses)

    def treatments(
        self, uses: Mapping[str, Sequence[ParameterUse]], posterior: Posterior
    ) -> dict[str, Treatment]:
        """See :meth:`Estimator.treatments`."""
        found = self.below.treatments(uses, posterior)
        last = {name: self.treatment(own) for name, own in uses.items() if _is_last(own)}
        if isinstance(posterior, StructuredGaussian):
            for group in posterior.joint_groups:
                reason = self._why_not(group, uses, posterior)
                last |= {name: Treatment("sampled", reason) for name in group.names if reason}
        return {name: last.get(name, found[name]) for name in uses}

    @staticmethod
    def _why_not(
        group: Group, uses: Mapping[str, Sequence[ParameterUse]], posterior: StructuredGaussian
    ) -> str:
        """Return why dependent weights of which some are the last layer's are not integrated."""
        are_last = [_is_last(uses[name]) for name in group.names]
        if not any(are_last):
            return ""
        layers = [set(use.layer) for name in group.names for use in uses[name]]
        if not all(are_last) or not all(set(group.names) <= layer for layer in layers):
            return "depends on weights that are not of one layer x W^T + b"
        layer = next(use.layer for name in group.names for use in uses[name])
        in_order = group.names == tuple(name for name in layer if name in group.names)
        if not (in_order or isinstance(group.correlation, Kronecker)):
            return "has its bias before its weight"
        if posterior.is_pruned(group.names) and not group.correlation.scale_is_own:
            return "some weights of its layer are pruned"
        return ""

    def run(
        self, forward_pass: ForwardPass, posterior: Posterior, key: NoiseKey, samples: range
    ) -> tuple[list[Any], WeightDraw | None]:
        """See :meth:`Estimator.run`; the last layer is sampled once for the minibatch."""
        return self.below.run(forward_pass, posterior, key, samples)

    def run_moments(
        self, forward_pass: ForwardPass, posterior: Posterior, key: NoiseKey, samples: range
    ) -> list[tuple[Any, LastOutputs]]:
        """Run the network once for each sample of the layers below.

        Args:
            forward_pass: as for :meth:`Estimator.run`.
            posterior: as for :meth:`Estimator.run`.
            key: as for :meth:`Estimator.run`.
            samples: the indices of the S samples.

        Returns:
            For each sample what the network returns, with the mean of the last layer's outputs in
            the place of the outputs, and these outputs' variances.
        """
        below = self.below if isinstance(self.below, PerExampleEstimator) else _Sampled()
        antithetic = self.antithetic
        return below.run_moments(forward_pass, posterior, key, samples, antithetic=antithetic)


def _is_last(uses: Sequence[ParameterUse]) -> bool:
    return len(uses) == 1 and uses[0].is_output and uses[0].positions is not None


@dataclass(frozen=True)
class _Sampled(PerExampleEstimator):
    """Weight sampling of the layers below."""

    def treatment(self, uses: Sequence[ParameterUse]) -> Treatment:
        return WeightSampling().treatment(uses)

    def noisy_output(self, *arguments: object) -> Tensor:  # noqa: ARG002
        raise AssertionError("all parameters are sampled")
