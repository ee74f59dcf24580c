"""Export the network of a run on images, with all that a program needs to use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify.app.runs.abstention import COVERAGE, MOST_HELD_OUT, threshold_of
from bayesify.app.runs.declarations import ConfigError
from bayesify.app.runs.folder import Run
from bayesify.app.runs.run_data import RunData
from bayesify.app.runs.run_files import RunError
from bayesify.datasets import ImageData
from bayesify.distributions.posteriors import Delta
from bayesify.export import (
    ExportMetadata,
    ExportReport,
    export_onnx,
    export_program,
    onnx_session,
)
from bayesify.module.bayesian import BayesianModule
from bayesify.module.freezing import FrozenNetwork, freeze
from bayesify.module.pruning import prune
from bayesify.module.shrinking import shrink

__all__ = ["check_export", "export_run", "network_to_export"]

#: Held-out examples on which the exported network is compared with PyTorch's.
_COMPARED = 100
_AT_ONCE = 100


def check_export(out: Path, *, samples: int, fraction: float | None, int8: bool) -> None:
    """Check the arguments of an export, before anything is loaded.

    Raises:
        ConfigError: one is wrong.
    """
    if out.suffix not in (".onnx", ".pt2"):
        raise ConfigError(f"out must end in .onnx or .pt2, got {out.name}")
    if int8 and out.suffix != ".onnx":
        raise ConfigError(f"int8 is for ONNX; choose a file that ends in .onnx, got {out.name}")
    if samples < 0:
        raise ConfigError(f"samples must be at least 1, or 0 for the mean weights, got {samples}")
    if fraction is not None and not 0.0 < fraction < 1.0:
        raise ConfigError(
            f"fraction must be above 0 and below 1, got {fraction}; leave it out for all weights"
        )


def export_run(
    run: Run, out: Path, data: RunData, *, samples: int, fraction: float | None, int8: bool
) -> dict[str, Any]:
    """Export the network of a run on images, and measure the exported file.

    Args:
        run: the run.
        out: the file, ``.onnx`` or ``.pt2``; an existing file is replaced.
        data: the run's data. Its held-out part gives the threshold of abstention and the errors.
        samples: weight samples; 0 for the mean weights, from which the units that pruning left
            without use are removed.
        fraction: the fraction of the weights to remove, or None.
        int8: whether to store the weights in 8 bits.

    Returns:
        What was written, as JSON; errors in percent of the held-out examples.

    Raises:
        RunError: the run holds no examples out, or is a baseline that cannot be pruned.
        ExportError: the network cannot be exported.
    """
    inputs, targets = data.test_inputs[:MOST_HELD_OUT], data.test_targets[:MOST_HELD_OUT]
    if not len(inputs):
        raise RunError(
            f"{run.folder} holds no examples out to check the export on; train with a larger "
            "--test-fraction"
        )
    frozen = _frozen(run, inputs[:2], samples=samples, fraction=fraction)
    predicted = _predictions(frozen, inputs)
    metadata = ExportMetadata(
        "classification",
        frozen.num_samples,
        classes=run.class_names,
        input=_described_input(run),
        thresholds={"total": threshold_of(predicted["total"])},
    )
    compared = inputs[:_COMPARED]
    if out.suffix == ".onnx":
        report = export_onnx(frozen, out, compared, metadata=metadata, int8=int8)
    else:
        report = export_program(frozen, out, compared, metadata=metadata)
    error = _error(predicted["mean"], targets)
    return {
        "out": str(out),
        "bytes": report.bytes,
        "num_samples": frozen.num_samples,
        "weights": sum(each.numel() for each in frozen.outputs.state_dict().values()),
        "inputs": list(report.inputs),
        "outputs": list(report.outputs),
        "largest_difference": report.largest_difference,
        "threshold": metadata.thresholds["total"],
        "coverage": COVERAGE,
        "held_out": len(inputs),
        "error": error,
        "int8": _int8_costs(report, inputs, targets) if int8 else None,
    }


def network_to_export(run: Run, fraction: float | None) -> BayesianModule:
    """Return the network of a run, without a fraction of its weights where one is given.

    Raises:
        RunError: the run is a baseline, which cannot be pruned.
    """
    bnn = run.load_module()
    if fraction is None:
        return bnn
    if isinstance(bnn.posterior, Delta):
        raise RunError(
            f"{run.folder} holds a {run.config.baseline} baseline, whose weights have no "
            "signal-to-noise ratio; leave --fraction out"
        )
    return prune(bnn, fraction)


def _frozen(run: Run, example: Tensor, *, samples: int, fraction: float | None) -> FrozenNetwork:
    bnn = network_to_export(run, fraction)
    if samples or bnn.posterior.mask is None:
        return freeze(bnn, samples)
    return FrozenNetwork.of_plain(shrink(bnn, example), bnn.likelihood)


def _described_input(run: Run) -> dict[str, Any]:
    """Describe how pixels become inputs: (pixel - shift) / scale by channel, then flattened."""
    if run.images is None:
        shape, shift, scale = (1, *ImageData.image_shape), [0.0], [ImageData.pixel_scale]
    else:
        shape = run.images.image_shape
        shift, scale = (
            [255.0 * each for each in values] for values in (run.images.mean, run.images.std)
        )
    return {
        "kind": "image",
        "shape": [int(np.prod(shape))],
        "image_shape": list(shape),
        "pixels": [0, 255],
        "shift": shift,
        "scale": scale,
    }


@torch.no_grad()
def _predictions(frozen: FrozenNetwork, inputs: Tensor) -> dict[str, Tensor]:
    parts = [frozen(part)._asdict() for part in inputs.split(_AT_ONCE)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _error(mean: Tensor, targets: Tensor) -> float:
    return 100.0 * float((mean.argmax(-1) != targets).double().mean())


def _int8_costs(report: ExportReport, inputs: Tensor, targets: Tensor) -> dict[str, Any]:
    session = onnx_session(report.path)
    parts = [
        torch.from_numpy(session.run(["mean"], {report.inputs[0]: part.numpy()})[0])
        for part in inputs.split(_AT_ONCE)
    ]
    return {"error": _error(torch.cat(parts), targets), "float_bytes": report.float_bytes}
