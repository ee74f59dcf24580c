"""Export to ONNX, checked by ONNX Runtime, with weights in int8 on request."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.export.metadata import METADATA_KEY, ExportMetadata, metadata_of
from bayesify.export.report import ExportError, ExportReport
from bayesify.export.tracing import TracedNetwork, first_line
from bayesify.io.files import atomic_write
from bayesify.module.inputs import Inputs

__all__ = [
    "check_installed",
    "encoded",
    "export_onnx",
    "loaded_session",
    "onnx_path",
    "onnx_session",
]

_LARGEST = 2**31 - 1  # bytes of a protocol buffer


def export_onnx(
    net: nn.Module,
    path: str | os.PathLike[str],
    example: Inputs,
    *,
    metadata: ExportMetadata | None = None,
    int8: bool = False,
) -> ExportReport:
    """Export a network to an ONNX file, which ONNX Runtime and others run without PyTorch.

    The number of examples may vary. ONNX Runtime runs the result on the examples; where its
    outputs differ from the network's by more than 1e-5, nothing is written.

    Args:
        net: a frozen network, whose outputs are a prediction with its uncertainty, or an ordinary
            one, such as of :func:`bayesify.shrink`; it is exported in evaluation mode.
        path: the file, ending in ``.onnx``; an existing file is replaced.
        example: inputs with N examples on the first axis, in the form in which it is called.
            Arguments that are no tensors keep that value.
        metadata: the description to store; None stores what a frozen network tells of itself.
        int8: whether the weights of matrix products are stored in 8 bits and multiplied as
            integers (dynamic quantisation). The file in floating point must agree with PyTorch; the
            report has by how much the one in int8 differs.

    Returns:
        A report with the largest difference from PyTorch and the size of the file.

    Raises:
        ExportError: the network cannot be exported, or its outputs are others in ONNX Runtime.
        ValueError: the file's name does not end in ``.onnx``.
        ModuleNotFoundError: the extra ``onnx`` is not installed.
        TypeError: the network is a ``BayesianModule``, which is to be frozen first.
        OSError: the file cannot be written.

    Example:
        >>> import tempfile, bayesify as bf
        >>> frozen = bf.freeze(bf.BayesianModule(nn.Linear(3, 2)), num_samples=8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export_onnx(frozen, f"{folder}/net.onnx", torch.zeros(5, 3)).outputs
        ('mean', 'total', 'epistemic')
    """
    place = onnx_path(path)
    check_installed()
    traced = TracedNetwork.of(net, example)
    payload = encoded(traced, metadata or metadata_of(net))
    difference = traced.check(_runner(payload, traced))
    if not int8:
        atomic_write(place, payload)
        return ExportReport(place, len(payload), traced.inputs, traced.outputs, difference)
    small = _quantised(payload)
    difference = traced.compare(_runner(small, traced))
    atomic_write(place, small)
    return ExportReport(
        place, len(small), traced.inputs, traced.outputs, difference, float_bytes=len(payload)
    )


def onnx_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file that is to be written.

    Raises:
        ValueError: its name does not end in .onnx.
    """
    place = Path(path)
    if place.suffix != ".onnx":
        raise ValueError(f"the file of an ONNX network must end in .onnx, got {place.name}")
    return place


def onnx_session(model: bytes | Path) -> Any:
    """Return ONNX Runtime's session of a model on the CPU.

    Its threads sleep between passes; by ONNX Runtime's own default they would spin, on CPUs that
    others need.

    Args:
        model: the file, or its bytes.

    Raises:
        Exception: ONNX Runtime cannot load it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "net.onnx")
        ...     report = export_onnx(nn.Linear(3, 2), path, torch.zeros(5, 3))
        ...     session = onnx_session(path)
        >>> (answer,) = session.run(None, {report.inputs[0]: torch.ones(4, 3).numpy()})
        >>> answer.shape
        (4, 2)
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    source = model if isinstance(model, bytes) else str(model)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def check_installed() -> None:
    """Raise ModuleNotFoundError unless the extra ``onnx`` is installed."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"export to ONNX needs {error.name}; pip install 'bayesify[onnx]'", name=error.name
        ) from error


def encoded(traced: TracedNetwork, metadata: ExportMetadata | None) -> bytes:
    """Return the ONNX file of a program.

    Raises:
        ExportError: an operation has no counterpart, the forward pass depends on a large number of
            examples, an input has the name of an output, or the
            file would be too large.
    """
    import onnx

    if both := set(traced.inputs) & set(traced.outputs):
        raise ExportError(
            f"an ONNX file needs one name for each input and output, got {min(both)} for both; "
            "rename that argument of the network's forward, or export to .pt2"
        )
    if (most := traced.max_examples) is not None:  # of which the file would know nothing
        raise ExportError(
            "an ONNX file must hold for any number of examples, but the forward pass takes "
            f"another branch, or fails, from {most + 1:,} on; export to .pt2, which raises there"
        )
    try:
        with _quiet():
            program = torch.onnx.export(traced.program, dynamo=True, verbose=False)
    except Exception as error:  # the exporter raises errors of many kinds
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise ExportError(f"the network has no form in ONNX: {first_line(cause)}") from error
    assert program is not None
    _rename(program.model.graph, traced)
    model = program.model_proto
    _name_batch(model.graph)
    if metadata is not None:
        onnx.helper.set_model_props(model, {METADATA_KEY: metadata.to_json()})
    if model.ByteSize() > _LARGEST:
        raise ExportError(
            f"an ONNX file holds at most 2 GB, got {model.ByteSize() / 1e9:.1f} GB; choose fewer "
            "weight samples, or export to .pt2"
        )
    payload: bytes = model.SerializeToString()
    return payload


def _rename(graph: Any, traced: TracedNetwork) -> None:
    """Name inputs and outputs; values within the graph may bear their names."""
    for place, value in enumerate(value for node in graph for value in node.outputs):
        value.name = f"inner/value_{place}"  # no name of an argument
    names = (*traced.inputs, *traced.outputs)
    for value, name in zip((*graph.inputs, *graph.outputs), names, strict=True):
        value.name = name


def _name_batch(graph: Any) -> None:
    """Give the axis of the examples its name."""
    first = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output, *graph.value_info):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param == first:
                axis.dim_param = "batch"


def loaded_session(model: bytes) -> Any:
    """Return ONNX Runtime's session of a model that was just written.

    Raises:
        ExportError: ONNX Runtime cannot load it.
    """
    try:
        return onnx_session(model)
    except Exception as error:  # ONNX Runtime raises errors of many kinds
        raise ExportError(f"ONNX Runtime cannot load the network: {first_line(error)}") from error


def _runner(model: bytes, traced: TracedNetwork) -> Any:
    session = loaded_session(model)

    def run(*tensors: Tensor) -> Sequence[Tensor]:
        values = {
            name: tensor.detach().cpu().numpy()
            for name, tensor in zip(traced.inputs, tensors, strict=True)
        }
        return [torch.from_numpy(value) for value in session.run(list(traced.outputs), values)]

    return run


def _quantised(model: bytes) -> bytes:
    """Return a model whose matrix products have weights in int8."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder, _quiet():
        source, target = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        source.write_bytes(model)
        quantize_dynamic(source, target, weight_type=QuantType.QInt8, per_channel=True)
        small = onnx.load_model(target)
    # The quantiser forgets the description.
    entries = {entry.key: entry.value for entry in onnx.load_from_string(model).metadata_props}
    onnx.helper.set_model_props(small, entries)
    payload: bytes = small.SerializeToString()
    return payload


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters' warnings of their own parts; errors are raised as ever."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "root")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
