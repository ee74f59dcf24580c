"""Write encoded rows to an Arrow file, and read them as shuffled minibatches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from bayesify.io import atomic_path
from bayesify.noise.arguments import whole_number
from bayesify.noise.keys import Stream, derived_seed
from bayesify.tabular.files import TableError

__all__ = ["BLOCK_ROWS", "STREAM_NAME", "EncodedRows", "EncodedRowsLoader", "write_encoded"]

STREAM_NAME = "table.arrow"
#: Rows of a block, which are read together; larger ones where a file would have too many.
BLOCK_ROWS = 256
_MOST_BLOCKS = 100_000


@dataclass(frozen=True)
class EncodedRows:
    """Training rows of a large table as inputs and targets in a file.

    Args:
        path: the Arrow file; :func:`write_encoded` makes it.
        num_rows: number of rows.
        num_inputs: D, inputs of a row.
        target_shape: shape of a row's target: () for a class, (1,) for a number, (1, 2) for bounds.
        buffer_rows: rows that are in memory to be shuffled.
        source: SHA-256 of the table.
    """

    path: Path
    num_rows: int
    num_inputs: int
    target_shape: tuple[int, ...]
    buffer_rows: int
    source: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the file, but for a few per cent."""
        target = 4 * math.prod(self.target_shape) if self.target_shape else 8
        return self.num_rows * (4 * self.num_inputs + target)

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return max(BLOCK_ROWS, -(-self.num_rows // _MOST_BLOCKS))

    @property
    def schema(self) -> pa.Schema:
        """Arrow's description of the file."""
        width = math.prod(self.target_shape)
        kind = pa.float32() if self.target_shape else pa.int64()
        fields = [
            ("inputs", pa.list_(pa.float32(), self.num_inputs)),
            ("targets", pa.list_(kind, width)),
        ]
        return pa.schema(fields, {"source": self.source, "rows": str(self.num_rows)})

    def is_there(self) -> bool:
        """Return whether the file is there, whole, and of this table."""
        if not self.path.exists():
            return False
        try:
            with pa.OSFile(str(self.path)) as file, pa.ipc.open_file(file) as reader:
                found: bool = reader.schema.metadata == self.schema.metadata
                return found
        except (pa.ArrowException, OSError):
            return False

    def loader(self, batch_size: int, *, seed: int) -> EncodedRowsLoader:
        """Return the rows as minibatches in random order."""
        return EncodedRowsLoader(self, batch_size, seed=seed)


def write_encoded(rows: EncodedRows, parts: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write inputs and targets, under a temporary name until the file is complete.

    Args:
        rows: description of the file.
        parts: inputs (N, D) in float32 and targets (N, ...) of consecutive rows.

    Raises:
        TableError: there are more or fewer rows than described, as of a table that was changed.
        OSError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> x, y = torch.arange(6.0).unsqueeze(1), torch.arange(6)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rows = EncodedRows(Path(folder, "t.arrow"), 6, 1, (), 100, "sha")
        ...     write_encoded(rows, [(x[:4], y[:4]), (x[4:], y[4:])])
        ...     batches = [targets.tolist() for _, targets in rows.loader(4, seed=0)]
        >>> [len(batch) for batch in batches], sorted(sum(batches, []))
        ([4, 2], [0, 1, 2, 3, 4, 5])
    """
    schema, size = rows.schema, rows.block_rows
    count = 0
    with atomic_path(rows.path) as temporary:
        with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            waiting: list[pa.Table] = []
            for inputs, targets in parts:
                count += len(inputs)
                waiting.append(_as_table(inputs, targets, schema))
                table = pa.concat_tables(waiting)
                full = table.num_rows - table.num_rows % size
                _write_blocks(writer, table.slice(0, full), size)
                waiting = [table.slice(full)]
            _write_blocks(writer, pa.concat_tables(waiting) if waiting else None, size)
        if count != rows.num_rows:
            raise TableError(
                f"the table must have {rows.num_rows:,} rows to train on, got {count:,}: it was "
                "changed while it was read; train again"
            )


def _as_table(inputs: Tensor, targets: Tensor, schema: pa.Schema) -> pa.Table:
    columns = []
    for tensor, field in zip((inputs, targets), schema, strict=True):
        flat = pa.array(tensor.contiguous().flatten().numpy())
        columns.append(pa.FixedSizeListArray.from_arrays(flat, type=field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def _write_blocks(writer: Any, table: pa.Table | None, size: int) -> None:
    if table is not None and table.num_rows:
        writer.write_table(table.combine_chunks(), max_chunksize=size)


class EncodedRowsLoader:
    """Minibatches of encoded rows in an order that seed and epoch determine.

    Each epoch reads all blocks of the file in random order. As many as the buffer holds are in
    memory together, and their rows are permuted; those that fill no minibatch wait for the next
    ones. The mean of a minibatch of m rows then varies more than with a permutation of all rows:
    if the table is sorted, so that the rows of a block are alike, by a factor of 1 + m / G in its
    variance, for G blocks in the buffer; not at all if the order of the table is random or
    all rows fit into the buffer.

    Args:
        rows: the file.
        batch_size: rows per minibatch, at least 1.
        seed: seed of the order.

    Raises:
        ValueError: ``batch_size`` is below 1.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rows = EncodedRows(Path(folder, "t.arrow"), 4, 1, (), 100, "sha")
        ...     write_encoded(rows, [(torch.zeros(4, 1), torch.arange(4))])
        ...     len(EncodedRowsLoader(rows, 3, seed=0))
        2
    """

    def __init__(self, rows: EncodedRows, batch_size: int, *, seed: int) -> None:
        batch_size = whole_number("batch_size", batch_size)
        self._rows, self.batch_size, self.seed = rows, batch_size, seed
        self.epoch = 0

    @property
    def num_data(self) -> int:
        """N, the number of rows in an epoch."""
        return self._rows.num_rows

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.num_data // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rows = self._rows
        generator = torch.Generator()
        generator.manual_seed(derived_seed(self.seed, Stream.SHUFFLE, self.epoch))
        blocks = -(-rows.num_rows // rows.block_rows)
        together = max(1, -(-rows.buffer_rows // rows.block_rows))
        order = torch.randperm(blocks, generator=generator)
        # Rows that filled no minibatch come first.
        room = min(rows.num_rows, together * rows.block_rows) + self.batch_size
        inputs = torch.empty(room, rows.num_inputs)
        kind = torch.float32 if rows.target_shape else torch.int64
        targets = torch.empty((room, *rows.target_shape), dtype=kind)
        x, y = inputs.numpy(), targets.numpy()
        left = 0
        with pa.OSFile(str(rows.path)) as file, pa.ipc.open_file(file) as reader:
            for some in order.split(together):
                end = left
                for block in some.tolist():
                    batch = reader.get_batch(block)
                    stop = end + batch.num_rows
                    x[end:stop].reshape(-1)[:] = batch.column(0).flatten().to_numpy()
                    y[end:stop].reshape(-1)[:] = batch.column(1).flatten().to_numpy()
                    end = stop
                places = torch.randperm(end, generator=generator)
                full = end - end % self.batch_size
                # Split makes one part of no rows.
                for part in places[:full].split(self.batch_size) if full else ():
                    yield inputs.index_select(0, part), targets.index_select(0, part)
                rest = places[full:]
                left = len(rest)
                kept = inputs.index_select(0, rest), targets.index_select(0, rest)
                inputs[:left], targets[:left] = kept
        if left:
            yield inputs[:left].clone(), targets[:left].clone()
