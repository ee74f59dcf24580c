"""What a run will cost, measured before it starts."""

from __future__ import annotations

import copy
import time
from statistics import median

import torch

from bayesify.module import BayesianModule
from bayesify.runs.config import RunConfig
from bayesify.runs.data import RunData
from bayesify.runs.folder import Run
from bayesify.runs.train import make_elbo, optimizer_factory, precision_of
from bayesify.training.optimizers import make_optimizer
from bayesify.training.steps import make_step

__all__ = ["seconds_per_epoch", "use_threads"]

_STEPS = 8


def use_threads(run: Run) -> None:
    """Compute with as many threads as the run does: their number may change the last bits."""
    torch.set_num_threads(run.config.threads)


def seconds_per_epoch(bnn: BayesianModule, config: RunConfig, data: RunData) -> float:
    """Seconds an epoch takes here, from the median of a few steps on a copy of the network."""
    elbo = make_elbo(copy.deepcopy(bnn), config, data)
    optimizer = make_optimizer(elbo, optimizer_factory(config), 1.0)
    step = make_step(elbo, optimizer, config.step)  # type: ignore[arg-type]
    inputs = data.train_inputs[: config.batch_size]
    targets = data.train_targets[: config.batch_size]
    times = []
    for _ in range(_STEPS):
        started = time.perf_counter()
        with precision_of(config):
            step.evaluate(inputs, targets, batch_index=0, kl_scale=1.0, values=False)
        step.update(residual=False)
        times.append(time.perf_counter() - started)
    # The first steps pay for memory and threads.
    batches = config.passes * -(-len(data.train_targets) // config.batch_size)
    return median(times[2:]) * batches
