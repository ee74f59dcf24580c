"""What the experiments on images share: training by ``bayesify train``'s code, and what is kept."""

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

from bayesify.datasets import ImageData
from bayesify.experiments.experiment import Context, Progress
from bayesify.module import BayesianModule
from bayesify.noise import NoiseKey, Stream
from bayesify.runs import RunConfig
from bayesify.runs.folder import Run
from bayesify.runs.train import train
from bayesify.training.history import History

__all__ = ["curve", "held_out", "histogram", "sampled_weights", "settings_of", "trained"]


def trained(
    config: RunConfig,
    data: ImageData,
    context: Context,
    after_epoch: Callable[[Path], None] | None = None,
) -> tuple[BayesianModule, History]:
    """A network trained as ``bayesify train`` would, from where its last epoch left it.

    Its notes become warnings, which the experiment's row keeps. ``after_epoch`` is given the
    folder with the checkpoint of each epoch that is run here.
    """
    with ExitStack() as stack:
        folder = context.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        run = Run(folder, config)
        then = None if after_epoch is None else partial(after_epoch, folder)
        bnn, history, notes = train(run, data, Progress(context, config.epochs, then))
    for note in notes:
        warnings.warn(note, UserWarning, stacklevel=2)
    return bnn, history


def settings_of(config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The settings of a run as a unit's JSON holds them, for ``RunConfig.of``."""
    settings = {**config, **more}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in settings.items()}


def curve(history: History, key: str, digits: int = 5) -> list[float]:
    """One number of each epoch."""
    return [round(float(row[key] or 0.0), digits) for row in history]


def held_out(data: ImageData, count: int, generator: torch.Generator | None = None) -> ImageData:
    """The training images alone: ``count`` of them as the test part, the others for training.

    Args:
        data: of which the test images are not used.
        count: images to hold out.
        generator: which are held out is drawn from it; None holds out the last.

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


def sampled_weights(bnn: BayesianModule, seed: int) -> Tensor:
    """One sample of all random weights, shape (D,); of a point its only one."""
    noise = bnn.posterior.noise(NoiseKey(seed, Stream.PREDICTION, 0), range(1))
    return bnn.posterior.draw(noise).weights[0]


def histogram(values: Tensor, limit: float, bins: int = 161) -> dict[str, Any]:
    """A density on a grid that many rows can share, as JSON.

    Args:
        values: any number of them.
        limit: the grid goes from -limit to limit.
        bins: on it; odd, so that one is centred on 0.

    Returns:
        ``limit``; ``density``, per unit; ``outside``, the share of values beyond the grid.

    Example:
        >>> histogram(torch.tensor([-0.5, 0.0, 0.1, 3.0]), limit=1.5, bins=3)
        {'limit': 1.5, 'density': [0.0, 0.75, 0.0], 'outside': 0.25}
    """
    counts = torch.histc(values.detach().double(), bins, -limit, limit)
    width = 2.0 * limit / bins
    density = [float(f"{c:.5g}") for c in (counts / values.numel() / width).tolist()]
    outside = 1.0 - float(counts.sum()) / values.numel()
    return {"limit": limit, "density": density, "outside": round(outside, 6)}
