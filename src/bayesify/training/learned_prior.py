"""Learn the centre of a prior on a part of the data, for a PAC-Bayes bound on the rest."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from bayesify.distributions.posteriors import Delta
from bayesify.module.bayesian import BayesianModule
from bayesify.module.outputs import Output
from bayesify.noise.arguments import one_number, whole_number
from bayesify.noise.keys import Stream, derived_seed
from bayesify.training.elbo import ELBO
from bayesify.training.fit import fit
from bayesify.training.minibatches import Loader
from bayesify.training.optimizers import OptimizerFactory
from bayesify.training.progress import Callback
from bayesify.training.schedules import ScheduleFactory

__all__ = ["learn_prior_mean", "split_for_prior", "without_dropout"]


def split_for_prior(num_data: int, fraction: float, *, seed: int = 0) -> Tensor:
    """Draw the examples that the prior may see, as ``certify`` takes them.

    Args:
        num_data: N, the number of examples.
        fraction: share of them, above 0 and below 1.
        seed: determines the split, whatever else is drawn with it.

    Returns:
        Their indices, ascending, shape (round(fraction * N),).

    Raises:
        TypeError: ``num_data`` is no whole number, or ``fraction`` no number.
        ValueError: ``fraction`` is out of its range, or leaves nothing on one side.

    Example:
        >>> split_for_prior(6, 0.5).shape
        torch.Size([3])
    """
    num_data = whole_number("num_data", num_data)
    fraction = one_number("fraction", fraction)
    count = round(fraction * num_data) if 0.0 < fraction < 1.0 else 0
    if not 0 < count < num_data:
        raise ValueError(
            "fraction must leave examples on both sides: above 0 and below 1, got "
            f"{fraction} of {num_data}"
        )
    generator = torch.Generator().manual_seed(derived_seed(seed, Stream.CERTIFICATE, 0, 1))
    return torch.randperm(num_data, generator=generator)[:count].sort().values


def learn_prior_mean(
    net: nn.Module,
    loader: Loader,
    *,
    num_data: int,
    epochs: int = 10,
    output: Output | None = None,
    lr: float | None = None,
    optimizer: OptimizerFactory | None = None,
    scheduler: LRScheduler | ScheduleFactory | None = None,
    seed: int = 0,
    checkpoint_dir: str | Path | None = None,
    resume: bool = False,
    callback: Callback | None = None,
    progress: bool = True,
) -> nn.Module:
    """Train a classifier by plain empirical risk minimisation, as the centre of a prior.

    Dropout in the network is used here and is off in the returned one (Perez-Ortiz et al. 2021).
    ``F.dropout(x, p, self.training)`` within a forward pass is not: it stays on in training mode,
    which the returned network is in, unless its ``p`` is an attribute that you set to 0.

    Args:
        net: the network, which is copied.
        loader: the examples of the prior only, of which ``split_for_prior`` draws the indices.
        num_data: their number.
        epochs: see ``fit``, as for the other arguments.
        output: what of the network's result is the logits, as for ``BayesianModule``.
        lr: see ``fit``.
        optimizer: see ``fit``.
        scheduler: see ``fit``.
        seed: of the order of the data and of dropout.
        checkpoint_dir: see ``fit``.
        resume: see ``fit``.
        callback: see ``fit``.
        progress: see ``fit``.

    Returns:
        The trained network. ``BayesianModule(it, prior=Gaussian(std), prior_mean="initial",
        init_std=std)`` has the posterior at its prior.

    Example:
        >>> from bayesify.datasets import TensorLoader
        >>> loader = TensorLoader(torch.eye(4), torch.arange(4) % 2, 2)
        >>> net = nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 2))
        >>> net = learn_prior_mean(net, loader, num_data=4, epochs=1)
        >>> net[0].p
        0.0
    """
    bnn = BayesianModule(net, posterior=Delta, output=output, seed=seed)
    fit(
        ELBO(bnn, num_data=num_data, temperature=0.0),
        loader,
        epochs=epochs,
        lr=lr,
        optimizer=optimizer,
        scheduler=scheduler,
        checkpoint_dir=checkpoint_dir,
        resume=resume,
        callback=callback,
        progress=progress,
    )
    return without_dropout(bnn.to_module())


def without_dropout(net: nn.Module) -> nn.Module:
    """Set the probability of each dropout layer to 0, in place, and return the network.

    Example:
        >>> without_dropout(nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 2)))[0].p
        0.0
    """
    for module in net.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            module.dropout = 0.0
    return net
