"""The networks and the data of the experiment ``pyro-local``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from bayesify import ELBO, BayesianModule, Gaussian, LocalReparameterization
from bayesify.datasets import ImageData
from bayesify.experiments.networks import held_out
from bayesify.experiments.rates import RatedGaussian, layer_sizes
from bayesify.groups import ByGroup
from bayesify.networks import mlp
from bayesify.noise import Stream, derived_seed

__all__ = ["dropout_net", "make_data", "make_elbo"]


def make_data(images: ImageData, count: int, seed: int) -> ImageData:
    """A random split of the training images, pixels from 0 to 1.

    Args:
        images: as loaded; the test images are not used.
        count: images to hold out, which become the test part.
        seed: which they are is a function of it.
    """
    generator = torch.Generator().manual_seed(derived_seed(seed, Stream.SHUFFLE, 0))
    parts = held_out(images, count, generator)
    return replace(
        parts,
        # Loaded as pixel / 126, the scale of Blundell et al.
        train_inputs=(126.0 * parts.train_inputs).round() / 255.0,
        test_inputs=(126.0 * parts.test_inputs).round() / 255.0,
    )


def make_elbo(config: Mapping[str, Any], num_data: int, seed: int) -> ELBO:
    """The Bayesian network of the document, untrained, and its objective."""
    net = mlp(784, config["hidden"], 10, init_std=config["mean_init_std"], seed=seed)
    first = net[0]
    assert isinstance(first, nn.Linear)
    # The document's biases are the weights of a one beside the hidden units: the first has none.
    first.register_parameter("bias", None)
    layers = [name for name, part in net.named_children() if isinstance(part, nn.Linear)]
    stds = zip(layers, config["prior_std"], strict=True)
    bnn = BayesianModule(
        _leaky(net),
        prior=ByGroup([(f"{name}.*", Gaussian(std)) for name, std in stds]),
        perturbation=LocalReparameterization(),
        seed=seed,
    )
    bnn.posterior = RatedGaussian(
        bnn.posterior.mean.detach(),
        config["init_scale"],
        layer_sizes(bnn.layout),
        config["init_rates"],
    )
    return ELBO(bnn, num_data=num_data, kl="closed", temperature=config["temperature"])


def dropout_net(config: Mapping[str, Any], seed: int) -> nn.Sequential:
    """The dropout network of the document, untrained.

    It drops units before their leaky ReLU and this one after it, which is the same: the function
    takes a positive factor out, and 0 to 0.
    """
    rates = (config["dropout_input"], config["dropout_hidden"])
    return _leaky(mlp(784, config["hidden"], 10, dropout=rates, seed=seed))


def _leaky(net: nn.Sequential) -> nn.Sequential:
    return nn.Sequential(*(nn.LeakyReLU() if isinstance(m, nn.ReLU) else m for m in net))
