"""Export to PyTorch's own programs: ``torch.export``, files ``.pt2``."""

from __future__ import annotations

import io
import os
from pathlib import Path

import torch
from torch import nn

from bayesify.export.metadata import METADATA_KEY, ExportMetadata, metadata_of
from bayesify.export.report import ExportReport
from bayesify.export.tracing import TracedNetwork
from bayesify.io.files import atomic_write
from bayesify.module.inputs import Inputs

__all__ = ["export_program"]


def export_program(
    net: nn.Module,
    path: str | os.PathLike[str],
    example: Inputs,
    *,
    metadata: ExportMetadata | None = None,
) -> ExportReport:
    """Export a network to a file of ``torch.export``, which PyTorch runs without bayesify.

    The number of examples may vary. ``torch.export.load(path).module()(x)`` returns the outputs by
    name; the inputs are positional. The program is loaded again and compared with the network on
    the examples; where they differ by more than 1e-5, nothing is written.

    Args:
        net: a frozen network, or an ordinary one, which is exported in evaluation mode.
        path: the file, ending in ``.pt2``; an existing file is replaced.
        example: inputs with N examples on the first axis, in the form in which it is called.
            Arguments that are no tensors keep that value.
        metadata: the description to store; None stores what a frozen network tells itself.

    Raises:
        ExportError: the network cannot be traced, or the program's outputs are others.
        ValueError: the file's name does not end in ``.pt2``.
        TypeError: the network is a ``BayesianModule``, which is to be frozen first.
        OSError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = export_program(nn.Linear(3, 2), f"{folder}/net.pt2", torch.zeros(5, 3))
        ...     program = torch.export.load(f"{folder}/net.pt2").module()
        >>> report.outputs, program(torch.zeros(7, 3))["output"].shape
        (('output',), torch.Size([7, 2]))
    """
    place = Path(path)
    if place.suffix != ".pt2":
        raise ValueError(f"the file of a PyTorch program must end in .pt2, got {place.name}")
    traced = TracedNetwork.of(net, example)
    description = metadata or metadata_of(net)
    extra = {} if description is None else {METADATA_KEY: description.to_json()}
    traced.program.example_inputs = None  # they would be stored by pickle
    buffer = io.BytesIO()
    torch.export.save(traced.program, buffer, extra_files=extra)
    payload = buffer.getvalue()
    loaded = torch.export.load(io.BytesIO(payload)).module()
    difference = traced.check(lambda *tensors: list(loaded(*tensors).values()))
    atomic_write(place, payload)
    return ExportReport(place, len(payload), traced.inputs, traced.outputs, difference)
