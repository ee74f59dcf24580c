"""Saving, loading and compressing of Bayesian networks, without pickle."""

from bayesify.io.compression import Compressed, compress, decompress
from bayesify.io.files import (
    StorageError,
    atomic_path,
    atomic_write,
    encoded_size,
    read_tensors,
    write_tensors,
)
from bayesify.io.frozen_parameters import freeze_as_described, frozen_of, without_frozen
from bayesify.io.models import (
    check_can_be_stored,
    load,
    model_document,
    model_meta,
    model_tensors,
    restore_model,
    save,
    unpack_state,
)

__all__ = [
    "Compressed",
    "StorageError",
    "atomic_path",
    "atomic_write",
    "check_can_be_stored",
    "compress",
    "decompress",
    "encoded_size",
    "freeze_as_described",
    "frozen_of",
    "load",
    "model_document",
    "model_meta",
    "model_tensors",
    "read_tensors",
    "restore_model",
    "save",
    "unpack_state",
    "without_frozen",
    "write_tensors",
]
