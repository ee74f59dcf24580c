"""Export of trained networks to ONNX and to PyTorch's programs, with their uncertainty."""

from bayesify.export.metadata import ExportMetadata, read_metadata
from bayesify.export.onnx import export_onnx, onnx_session
from bayesify.export.program import export_program
from bayesify.export.report import ExportError, ExportReport
from bayesify.export.table_graph import export_table

__all__ = [
    "ExportError",
    "ExportMetadata",
    "ExportReport",
    "export_onnx",
    "export_program",
    "export_table",
    "onnx_session",
    "read_metadata",
]
