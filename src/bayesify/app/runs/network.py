"""The network of a run, from its settings and what it knows of its data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from bayesify.app.runs.declarations import ConfigError
from bayesify.distributions.families import named_posterior
from bayesify.distributions.likelihoods import CategoricalLikelihood
from bayesify.distributions.posteriors import Delta
from bayesify.distributions.structured import StructuredGaussian
from bayesify.module.bayesian import BayesianModule
from bayesify.module.networks import lenet5, mlp, resnet8
from bayesify.module.pretrained import last_layer
from bayesify.tabular import TableNet, table_baseline, table_module

if TYPE_CHECKING:  # pandas takes its time to load
    from bayesify.app.runs.run_config import RunConfig
    from bayesify.datasets import ImageSchema
    from bayesify.tabular.schema import TableSchema

__all__ = ["bayesian_network", "check_prunable", "plain_network"]


def plain_network(
    config: RunConfig,
    table: TableSchema | None,
    images: ImageSchema | None,
    *,
    num_inputs: int,
    num_classes: int,
) -> nn.Module:
    """Build the plain network of a run, with initial values.

    Args:
        config: its settings.
        table: what it knows of its table, if it has one.
        images: what it knows of its folder of images, if it has one.
        num_inputs: number of inputs for one example.
        num_classes: number of classes; 0 for regression.
    """
    if images is not None:
        return resnet8(images.image_shape, num_classes, seed=config.seed)
    if table is not None:
        target = table.target
        has_noise = target.task == "regression" and not target.has_counts
        options: dict[str, Any] = {
            "hidden": config.hidden,
            "num_outputs": 1 if target.is_ordered else num_classes or 1,
            "noise": config.noise if has_noise else None,
            "log_rates": [target.log_rate] if target.has_counts else None,
            "seed": config.seed,
        }
        if config.adapter:
            return _adapter_network(config, table, num_inputs, **options)
        return TableNet(num_inputs, relevance=config.relevance == "learned", **options)
    options = {
        "dropout": (config.dropout_input, config.dropout_hidden),
        "init_std": config.mean_init_std,
        "seed": config.seed,
    }
    if config.net == "lenet5":
        return lenet5(**options)
    return mlp(num_inputs, config.hidden, num_classes, **options)


def bayesian_network(
    net: nn.Module, config: RunConfig, table: TableSchema | None
) -> BayesianModule:
    """Make the plain network of a run Bayesian, or a baseline's, by its settings."""
    common: dict[str, Any] = {"seed": config.seed}
    if config.baseline is None:
        common |= {"init_std": config.init_std, "estimator": config.make_estimator()}
    if config.adapter:
        return _bayesian_adapter(net, config, table)
    if isinstance(net, TableNet):
        assert table is not None
        common["likelihood"] = table.target.make_likelihood()
        if config.baseline is not None:
            return table_baseline(net, **common)
        return table_module(net, prior_of=config.make_prior, posterior=config.posterior, **common)
    common["likelihood"] = CategoricalLikelihood()
    if config.baseline is not None:
        return BayesianModule(net, posterior=Delta, **common)
    if config.net == "resnet8" and config.random == "last-layer":
        common["include"] = last_layer(net)
    if config.objective != "elbo":
        common["prior_mean"] = "initial"
    common["posterior"] = named_posterior(config.posterior)
    return BayesianModule(net, prior=config.make_prior(), **common)


def check_prunable(bnn: BayesianModule, config: RunConfig) -> None:
    """Raise ConfigError where a new network cannot be pruned as it is trained, and is to be."""
    if config.make_pruning() is None or not isinstance(bnn.posterior, StructuredGaussian):
        return
    try:
        bnn.posterior.check_prunable()
    except TypeError as error:
        raise ConfigError(
            f"posterior {config.posterior} of this network cannot be pruned in training; use "
            f"--posterior mean-field or low-rank, or leave out --prune-fraction: {error}"
        ) from error


def _adapter_network(
    config: RunConfig, table: TableSchema, num_inputs: int, **options: Any
) -> nn.Module:
    """Build the pretrained network with an adapter and a head for the table."""
    from bayesify.tabular.columns import TokenColumn
    from bayesify.tabular.grids import column_places
    from bayesify.tabular.text_adapter import adapter_net
    from bayesify.tabular.text_encoder import encoder_of

    assert config.encoder is not None
    encoder, sha256 = encoder_of(config.encoder)
    places, texts = column_places(table), []
    for column in table.columns:
        if isinstance(column, TokenColumn):
            column.check_weights(sha256)
            texts.append(places[column.name][: column.size])
    taken = {place for each in texts for place in each}
    net: nn.Module = adapter_net(
        encoder,
        texts=texts,
        others=[place for place in range(num_inputs) if place not in taken],
        rank=config.adapter_rank,
        **options,
    )
    return net


def _bayesian_adapter(net: Any, config: RunConfig, table: TableSchema | None) -> BayesianModule:
    from bayesify.tabular.text_adapter import adapter_baseline, adapter_module

    assert table is not None
    likelihood = table.target.make_likelihood()
    if config.baseline is not None:
        return adapter_baseline(net, likelihood=likelihood, seed=config.seed)
    return adapter_module(
        net,
        likelihood=likelihood,
        prior=config.make_prior(),
        init_std=config.init_std,
        estimator=config.make_estimator(),
        seed=config.seed,
    )
