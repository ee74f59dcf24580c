"""Training of the networks: on the bound while weights are pruned, then of the weights left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.datasets import AugmentedImages, ImageData, TensorLoader
from bayesify.distributions.priors import ScaleMixture
from bayesify.module.bayesian import BayesianModule
from bayesify.reproduce.harness.experiment import Context, EpochProgress, Job
from bayesify.reproduce.harness.half_precision import half_precision
from bayesify.reproduce.papers.compression.networks import make_network
from bayesify.reproduce.papers.compression.unit_pruning import UnitPruning
from bayesify.training import fit
from bayesify.training.elbo import ELBO
from bayesify.training.pruning_schedule import PruningSchedule
from bayesify.training.schedules import cosine

__all__ = ["train"]


def train(job: Job, data: ImageData, context: Context) -> BayesianModule:
    """Train the network of a job; an interrupted training resumes after its last epoch.

    The settings of the two phases are ``bound`` and ``tuning``. In the first the network is trained
    on the bound and pruned; in the second the weights that are left are trained on, at a lower
    temperature.
    """
    config = job.config
    net = make_network(config["network"], dropout_input=config["dropout_input"], seed=job.seed)
    prior = ScaleMixture(pi=config["pi"], std1=config["std1"], std2=config["std2"])
    bnn = BayesianModule(net, prior=prior, init_std=config["init_std"], seed=job.seed)
    bnn.to(context.device)
    with _channels_last(bnn.net):
        _fit(bnn, config["bound"], config, data, context.part("bound", 0, 2))
        for module in bnn.net.modules():
            if isinstance(module, nn.Dropout):
                module.p = config["tuning"]["dropout_input"]
        _fit(bnn, config["tuning"], config, data, context.part("tuning", 1, 2))
    return bnn.to("cpu")


@contextmanager
def _channels_last(net: nn.Module) -> Iterator[None]:
    """Pool images with their channels last meanwhile: PyTorch is slow in bfloat16 otherwise."""

    def turn(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(each.contiguous(memory_format=torch.channels_last) for each in args)

    with ExitStack() as hooks:
        for module in net.modules():
            if isinstance(module, nn.MaxPool2d):
                hooks.callback(module.register_forward_pre_hook(turn).remove)
        yield


def _fit(
    bnn: BayesianModule,
    phase: Mapping[str, Any],
    config: Mapping[str, Any],
    data: ImageData,
    context: Context,
) -> None:
    """Train in one phase, in bfloat16 where the machine has it."""
    num_data, epochs = len(data.train_targets), phase["epochs"]
    warmup = phase.get("kl_warmup", 0.0) * epochs
    inputs, targets = (each.to(context.device) for each in (data.train_inputs, data.train_targets))
    images = TensorLoader(inputs, targets, config["batch_size"], seed=bnn.seed)
    with half_precision(context.device):
        fit(
            ELBO(bnn, num_data=num_data, temperature=phase["temperature"]),
            AugmentedImages(images, config.get("moved", 0.0), data.image_shape),
            epochs=epochs,
            optimizer=partial(torch.optim.Adam, lr=phase["lr"], fused=True),
            scheduler=cosine,
            rho_lr_scale=config["rho_lr_scale"],
            kl_warmup_epochs=warmup,
            kl_warmup_power=phase.get("kl_warmup_power", 1.0),
            pruning=_schedule(phase, epochs),
            checkpoint_dir=context.work,
            resume=context.work is not None,
            callback=EpochProgress(context, epochs),
        )


def _schedule(phase: Mapping[str, Any], epochs: int) -> PruningSchedule | None:
    """Return the schedule of pruning, whose begin and end are parts of the training."""
    if "fraction" not in phase:
        return None
    first, last = phase["prune_between"]
    shared: dict[str, Any] = {
        "fraction": phase["fraction"],
        "from_epoch": first * epochs,
        "until_epoch": last * epochs,
    }
    if "units" in phase:
        return UnitPruning(**shared, units=tuple(phase["units"]))
    return PruningSchedule(**shared)
