"""Train an image network as ``bayesify train`` does, and summarise it for a result."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayesify.app.runs import RunConfig
from bayesify.app.runs.folder import Run
from bayesify.app.runs.train import train
from bayesify.datasets import ImageData, load_images
from bayesify.module.bayesian import BayesianModule
from bayesify.noise.keys import NoiseKey, Stream, derived_seed
from bayesify.reproduce.harness.experiment import Context, EpochProgress, Job
from bayesify.training.history import History

__all__ = [
    "curve",
    "held_out",
    "histogram",
    "images_of",
    "mnist_of",
    "sampled_weights",
    "settings_of",
    "trained",
]


def trained(
    config: RunConfig,
    data: ImageData,
    context: Context,
    after_epoch: Callable[[Path], None] | None = None,
) -> tuple[BayesianModule, History]:
    """Return a network trained as ``bayesify train`` trains it, and the history of the training.

    An interrupted training resumes after its last epoch. The notes of the training become warnings,
    which the result of the job keeps.

    Args:
        config: settings of the run.
        data: images to train on and to validate on.
        context: surroundings of the job.
        after_epoch: called after each epoch with the folder that holds the epoch's checkpoint.
    """
    with ExitStack() as stack:
        folder = context.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        run = Run(folder, config)
        then = None if after_epoch is None else partial(after_epoch, folder)
        progress = EpochProgress(context, config.epochs, then)
        bnn, history, notes = train(run, data, progress, torch.device(context.device))
    for note in notes:
        warnings.warn(note, UserWarning, stacklevel=2)
    return bnn, history


def settings_of(config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return the arguments of ``RunConfig.of`` from the settings that a job holds as JSON."""
    settings = {**config, **more}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in settings.items()}


def curve(history: History, key: str, digits: int = 5) -> list[float]:
    """Return one column of the history, rounded; a missing value is 0."""
    return [round(float(row[key] or 0.0), digits) for row in history]


def held_out(data: ImageData, count: int, generator: torch.Generator | None = None) -> ImageData:
    """Split the training images: ``count`` of them become the test part.

    Args:
        data: images; the test images are not used.
        count: number of images to hold out.
        generator: draws the images to hold out; None holds out the last ones.

    Example:
        >>> from bayesify.datasets import load_images
        >>> parts = held_out(load_images("mnist", limit=50), 10)
        >>> len(parts.train_inputs), len(parts.test_inputs)
        (40, 10)
    """
    num_data = len(data.train_targets)
    order = torch.arange(num_data)
    if generator is not None:
        order = torch.randperm(num_data, generator=generator)
    inside, outside = order[: num_data - count], order[num_data - count :]
    return replace(
        data,
        train_inputs=data.train_inputs[inside],
        train_targets=data.train_targets[inside],
        test_inputs=data.train_inputs[outside],
        test_targets=data.train_targets[outside],
    )


def images_of(context: Context, name: str, limit: int | None = None) -> ImageData:
    """Load a data set of images for a job, or its first ``limit`` training images.

    Raises:
        DataError: the data set is missing.
    """
    return load_images(name, context.data_dir, limit=limit, progress=context.on_download)


def mnist_of(job: Job, context: Context) -> ImageData:
    """Load MNIST; of a job with ``held_out``, so many training images are the test part.

    They are the same for every seed.
    """
    settings = job.config.get("settings", job.config)
    limit = settings.get("limit")
    data = images_of(context, "mnist", limit)
    if "held_out" not in job.config:
        return data
    generator = torch.Generator().manual_seed(derived_seed(0, Stream.SHUFFLE, 0))
    return held_out(data, job.config["held_out"], generator)


def sampled_weights(bnn: BayesianModule, seed: int) -> Tensor:
    """Draw one sample of all random weights, shape (D,)."""
    noise = bnn.posterior.noise(NoiseKey(seed, Stream.PREDICTION, 0), range(1))
    return bnn.posterior.draw(noise).weights[0]


def histogram(values: Tensor, limit: float, bins: int = 161) -> dict[str, Any]:
    """A density on a grid that many rows can share, as JSON.

    Args:
        values: any number of them.
        limit: the grid goes from -limit to limit.
        bins: on it; odd, so that one is centred on 0.

    Returns:
        ``limit``; ``density``, per job; ``outside``, the share of values beyond the grid.

    Example:
        >>> histogram(torch.tensor([-0.5, 0.0, 0.1, 3.0]), limit=1.5, bins=3)
        {'limit': 1.5, 'density': [0.0, 0.75, 0.0], 'outside': 0.25}
    """
    counts = torch.histc(values.detach().double(), bins, -limit, limit)
    width = 2.0 * limit / bins
    density = [float(f"{c:.5g}") for c in (counts / values.numel() / width).tolist()]
    outside = 1.0 - float(counts.sum()) / values.numel()
    return {"limit": limit, "density": density, "outside": round(outside, 6)}
