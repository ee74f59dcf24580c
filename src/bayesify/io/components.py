"""Priors, estimators, likelihoods and posteriors as JSON, and made again from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from bayesify import estimators
from bayesify.distributions import by_group, families, likelihoods, posteriors, priors, sparsity
from bayesify.distributions.likelihoods import Likelihood
from bayesify.distributions.posteriors import Posterior
from bayesify.distributions.priors import Prior
from bayesify.distributions.structured import PosteriorFamily, StructuredGaussian
from bayesify.estimators import Estimator

__all__ = [
    "described",
    "described_posterior",
    "estimator_of",
    "likelihood_of",
    "posterior_of",
    "prior_of",
]


def described(component: Prior | Estimator | PosteriorFamily | Likelihood) -> dict[str, Any]:
    """Return a component's type and arguments, as JSON.

    Of a user's own component only the type: it is passed to ``load``.

    Example:
        >>> described(priors.Gaussian(0.5))
        {'type': 'Gaussian', 'std': 0.5}
    """
    name = _type_name(component)
    if isinstance(component, Likelihood):
        return {"type": name, **component.config()}
    fields: dict[str, Any] = {}
    if dataclasses.is_dataclass(component) and "." not in name:
        for field in dataclasses.fields(component):
            value = getattr(component, field.name)
            # Defaults of estimators are not saved, so that runs can resume after a new option is
            # added.
            if not (isinstance(component, Estimator) and value == field.default):
                fields[field.name] = _as_json(value)
    return {"type": name, **fields}


def described_posterior(posterior: Posterior) -> str | dict[str, Any]:
    """Return the name of a posterior's class, or the description of its family.

    Example:
        >>> import torch
        >>> described_posterior(posteriors.Delta(torch.zeros(3)))
        'Delta'
    """
    if isinstance(posterior, StructuredGaussian):
        return described(posterior.family)
    return _type_name(posterior)


def prior_of(description: Mapping[str, Any]) -> Any:
    """Make a prior from its description, with the priors that it consists of.

    Raises:
        ValueError: there is no such prior.

    Example:
        >>> prior_of({"type": "Gaussian", "std": 0.5})
        Gaussian(std=0.5)
    """
    # dict() raises TypeError where a damaged file has no description.
    fields = {name: _from_json(value) for name, value in dict(description).items()}
    modules = (by_group, sparsity, priors)
    module = next((each for each in modules if fields["type"] in each.__all__), priors)
    return _component(module, Prior, fields)


def estimator_of(description: Mapping[str, Any]) -> Any:
    """Make an estimator from its description, with the one of the layers below.

    Raises:
        ValueError: there is no such estimator.

    Example:
        >>> estimator_of({"type": "Flipout"})
        Flipout(antithetic=False)
    """
    fields = dict(description)
    if "below" in fields:
        fields["below"] = estimator_of(fields["below"])
    return _component(estimators, Estimator, fields)


def likelihood_of(description: Mapping[str, Any]) -> Any:
    """Make a likelihood from its description.

    Raises:
        ValueError: there is no such likelihood.

    Example:
        >>> likelihood_of({"type": "CategoricalLikelihood"})
        CategoricalLikelihood()
    """
    return _component(likelihoods, Likelihood, description)


def posterior_of(description: str | Mapping[str, Any]) -> Any:
    """Return a class of posteriors, or make a family with the families that it consists of.

    Raises:
        ValueError: there is no such posterior.

    Example:
        >>> posterior_of("MeanFieldGaussian").__name__
        'MeanFieldGaussian'
        >>> posterior_of({"type": "LowRankGaussian", "rank": 4})
        LowRankGaussian(rank=4)
    """
    if isinstance(description, str):
        return _component_class(posteriors, Posterior, description)
    fields = dict(description)
    if "groups" in fields:
        fields["groups"] = [(pattern, posterior_of(each)) for pattern, each in fields["groups"]]
    return _component(families, PosteriorFamily, fields)


def _as_json(value: Any) -> Any:
    if isinstance(value, Prior | PosteriorFamily | Estimator):
        return described(value)
    if isinstance(value, type):  # MeanFieldGaussian within a PosteriorByGroup
        return value.__name__
    if isinstance(value, np.generic):  # such as np.True_, which is no bool
        return value.item()
    return [_as_json(item) for item in value] if isinstance(value, tuple) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return prior_of(value)
    return tuple(_from_json(item) for item in value) if isinstance(value, list) else value


def _type_name(component: object) -> str:
    kind = type(component)
    is_ours = kind.__module__.partition(".")[0] == __name__.partition(".")[0]
    return kind.__name__ if is_ours else f"{kind.__module__}.{kind.__qualname__}"


def _component(module: Any, kind: type[Any], description: Mapping[str, Any]) -> Any:
    arguments = dict(description)
    return _component_class(module, kind, arguments.pop("type"))(**arguments)


def _component_class(module: Any, kind: type[Any], name: str) -> Any:
    found = getattr(module, name, None) if name in module.__all__ else None
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ValueError(
            f"bayesify has no {kind.__name__.lower()} named {name!r}; pass your own to load()"
        )
    return found
