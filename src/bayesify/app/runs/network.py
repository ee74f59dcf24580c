"""The network of a run, from its settings and what it knows of its data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from bayesify.distributions.families import named_posterior
from bayesify.distributions.likelihoods import CategoricalLikelihood
from bayesify.distributions.posteriors import Delta
from bayesify.module.bayesian import BayesianModule
from bayesify.module.networks import lenet5, mlp, resnet8
from bayesify.module.pretrained import last_layer
from bayesify.tabular import TableNet, table_baseline, table_module

if TYPE_CHECKING:
    from bayesify.app.runs.folder import Run

__all__ = ["bayesian_network", "plain_network"]


def plain_network(run: Run) -> nn.Module:
    """Build the plain network of a run, with initial values."""
    config = run.config
    if run.images is not None:
        shape = run.images.image_shape
        return resnet8(shape, len(run.images.classes), seed=config.seed)
    if run.table is not None:
        target = run.table.target
        has_noise = target.task == "regression" and not target.has_counts
        table: dict[str, Any] = {
            "hidden": config.hidden,
            "num_outputs": 1 if target.is_ordered else len(run.class_names) or 1,
            "noise": config.noise if has_noise else None,
            "log_rates": [target.log_rate] if target.has_counts else None,
            "seed": config.seed,
        }
        if config.adapter:
            return _adapter_network(run, **table)
        relevance = config.relevance == "learned"
        return TableNet(run.num_inputs, relevance=relevance, **table)
    options: dict[str, Any] = {
        "dropout": (config.dropout_input, config.dropout_hidden),
        "init_std": config.mean_init_std,
        "seed": config.seed,
    }
    if config.net == "lenet5":
        return lenet5(**options)
    return mlp(run.num_inputs, config.hidden, len(run.class_names), **options)


def bayesian_network(run: Run, net: nn.Module) -> BayesianModule:
    """Make the plain network of a run Bayesian, or a baseline's, by its settings."""
    config = run.config
    common: dict[str, Any] = {"seed": config.seed}
    if config.baseline is None:
        common |= {"init_std": config.init_std, "estimator": config.make_estimator()}
    if config.adapter:
        return _bayesian_adapter(run, net)
    if isinstance(net, TableNet):
        assert run.table is not None
        common["likelihood"] = run.table.target.make_likelihood()
        if config.baseline is not None:
            return table_baseline(net, **common)
        return table_module(net, prior_of=config.make_prior, posterior=config.posterior, **common)
    common["likelihood"] = CategoricalLikelihood()
    if config.baseline is not None:
        return BayesianModule(net, posterior=Delta, **common)
    if run.images is not None and config.random == "last-layer":
        common["include"] = last_layer(net)
    if config.objective != "elbo":
        common["prior_mean"] = "initial"
    common["posterior"] = named_posterior(config.posterior)
    return BayesianModule(net, prior=config.make_prior(), **common)


def _adapter_network(run: Run, **table: Any) -> nn.Module:
    """Build the pretrained network with an adapter and a head for the table."""
    from bayesify.tabular.columns import TokenColumn
    from bayesify.tabular.grids import column_places
    from bayesify.tabular.text_adapter import adapter_net
    from bayesify.tabular.text_encoder import encoder_of

    assert run.table is not None
    assert run.config.encoder is not None
    encoder, sha256 = encoder_of(run.config.encoder)
    places, texts = column_places(run.table), []
    for column in run.table.columns:
        if isinstance(column, TokenColumn):
            column.check_weights(sha256)
            texts.append(places[column.name][: column.size])
    taken = {place for each in texts for place in each}
    net: nn.Module = adapter_net(
        encoder,
        texts=texts,
        others=[place for place in range(run.num_inputs) if place not in taken],
        rank=run.config.adapter_rank,
        **table,
    )
    return net


def _bayesian_adapter(run: Run, net: Any) -> BayesianModule:
    from bayesify.tabular.text_adapter import adapter_baseline, adapter_module

    assert run.table is not None
    config, likelihood = run.config, run.table.target.make_likelihood()
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
