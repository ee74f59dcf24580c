"""Store a table with texts as it was read: a pretrained network takes minutes to read texts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bayesify.io import read_tensors, write_tensors
from bayesify.tabular.table_data import TableData

if TYPE_CHECKING:  # pandas takes its time to load
    from bayesify.tabular.schema import TableSchema

__all__ = ["STORED_NAME", "store_table", "stored_table"]

STORED_NAME = "table.safetensors"
_TENSORS = ("train_inputs", "train_targets", "test_inputs", "test_targets")


def store_table(folder: Path, data: TableData, schema: TableSchema) -> None:
    """Write the inputs and targets of a table with texts; a table without is quick to read.

    Raises:
        OSError: the file cannot be written.
    """
    if not data.test_texts:
        return
    tensors = {name: getattr(data, name) for name in _TENSORS}
    meta = {"kind": "table", "source": schema.source["sha256"], "texts": list(data.test_texts)}
    write_tensors(folder / STORED_NAME, tensors, meta)


def stored_table(folder: Path, path: Path, schema: TableSchema) -> TableData | None:
    """Return the table that :func:`store_table` wrote; None if there is none of this source.

    Args:
        folder: the folder of the run.
        path: file of the table.
        schema: the table's schema.

    Raises:
        StorageError: the file is truncated or was altered.
    """
    if not (folder / STORED_NAME).exists():
        return None
    tensors, meta = read_tensors(folder / STORED_NAME)
    if meta.get("source") != schema.source["sha256"]:
        return None
    target = schema.target
    return TableData(
        path.name,
        tensors["train_inputs"],
        tensors["train_targets"],
        tensors["test_inputs"],
        tensors["test_targets"],
        target.classes,
        target.shift,
        target.scale,
        test_texts=tuple(meta["texts"]),
    )
