"""Export of trained networks to ONNX and to PyTorch's programs, with their uncertainty."""

from bayesify.export.metadata import ExportMetadata, read_metadata

__all__ = ["ExportMetadata", "read_metadata"]
