"""Store a table as it was read, where reading it again takes minutes: with texts, or streamed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bayesify.io import read_tensors, write_tensors
from bayesify.tabular.table_data import TableData

if TYPE_CHECKING:  # pandas takes its time to load
    from bayesify.tabular.schema import TableSchema

__all__ = ["STORED_NAME", "store_table", "stored_table"]

STORED_NAME = "table.safetensors"
_TENSORS = tuple(
    f"{part}_{name}" for part in ("train", "test") for name in ("inputs", "targets", "distances")
)


def store_table(folder: Path, data: TableData, schema: TableSchema) -> None:
    """Write the inputs and targets of a table with texts, or of a streamed one the rows in memory.

    Another table is quick to read again.

    Raises:
        OSError: the file cannot be written.
    """
    if not data.test_texts and data.stream is None:
        return
    tensors = {name: getattr(data, name) for name in _TENSORS}
    meta = {"kind": "table", "source": schema.source["sha256"], "texts": list(data.test_texts)}
    write_tensors(folder / STORED_NAME, tensors, meta)


def stored_table(folder: Path, path: Path, schema: TableSchema) -> TableData | None:
    """Return the table that :func:`store_table` wrote.

    It is None if there is none, or one of another source, or one without the distances that the
    run's predictions need.

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
    target = schema.target
    if meta.get("source") != schema.source["sha256"]:
        return None
    for part in ("train", "test"):
        if f"{part}_distances" not in tensors:
            if target.marginal:
                return None
            tensors[f"{part}_distances"] = torch.zeros(len(tensors[f"{part}_inputs"]))
    return TableData(
        name=path.name,
        train_inputs=tensors["train_inputs"],
        train_targets=tensors["train_targets"],
        train_distances=tensors["train_distances"],
        test_inputs=tensors["test_inputs"],
        test_targets=tensors["test_targets"],
        test_distances=tensors["test_distances"],
        class_names=target.classes,
        shift=target.shift,
        scale=target.scale,
        marginal=target.marginal,
        test_texts=tuple(meta["texts"]),
        limits=target.limits,
        likelihood=target.likelihood,
    )
