"""Adaptive coding of sparse tensors of integers as bits of a range coder.

Every probability is a fraction of 2^20 that integer arithmetic makes from counts of what was coded
before. Encoder and decoder run the same code (:class:`_Model`), so that they agree on every
machine and with every version of PyTorch and NumPy. The range coder is that of ``constriction``.

A tensor is coded as a matrix of units by inputs, column by column: whether the column has a nonzero
integer; which; their signs; their magnitudes. The chance of a nonzero integer is a product of the
density of its row, the density of the columns next to it, and a factor for the neighbours that are
nonzero. Pruned networks have dead inputs and dead units, so that this takes fewer bits than
independent places would.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["CodingError", "IntArray", "Scan", "decode_tensors", "encode_tensors"]

IntArray: TypeAlias = npt.NDArray[np.int64]

#: Unit of probabilities; the least and the largest are this many units from 0 and 1.
_ONE, _LEAST = 1 << 20, 8
#: Counts of neighbours are halved above this sum, so that no product overflows 64 bits.
_MOST = 1 << 32
#: Expected nonzero integers of each neighbourhood before any was seen, as if the neighbours did not
#: matter; and those of each input, on average, that the units of the tensor before it stand for.
_PRIOR_NEIGHBOURS, _PRIOR_INPUTS = 64, 4
#: Bits of a magnitude below its first, from the top, whose chances are learned.
_LEARNED_BITS = 4
#: Bits of the largest magnitude.
_MAX_BITS = 31


class CodingError(ValueError):
    """Bytes are not those of tensors of the given shapes."""


class Scan(NamedTuple):
    """The order in which a tensor is coded.

    Args:
        by_rows: whether its units are coded one after another, not its inputs.
        width: inputs this far apart are neighbours too, such as pixels one above the other in an
            image of this width; 0 for none.
    """

    by_rows: bool = False
    width: int = 0


def encode_tensors(tensors: Sequence[IntArray]) -> tuple[bytes, list[Scan]]:
    """Encode tensors of integers, each in the order that needs the fewest bits.

    Args:
        tensors: integers below 2^31 in magnitude. The first axis is that of the units, unless there
            is no other.

    Returns:
        The bytes, and the order of each tensor, which the decoder needs.

    Raises:
        ImportError: ``constriction`` is not installed.
        ValueError: an integer is too large.

    Example:
        >>> payload, scans = encode_tensors([np.eye(20, dtype=np.int64)])
        >>> bool((decode_tensors(payload, [(20, 20)], scans)[0] == np.eye(20)).all())
        True
    """
    model, writer, scans = _Model(), _Writer(), []
    for tensor in tensors:
        if np.abs(tensor).max(initial=0) >= 1 << _MAX_BITS:
            raise ValueError(f"integers must be below 2^{_MAX_BITS}, got {np.abs(tensor).max()}")
        matrix = tensor.reshape(_matrix_shape(tensor.shape))
        scan = min(_scans(tensor.shape), key=lambda each: _bits(model, matrix, each))
        model.code(writer, matrix.shape, scan, matrix)
        scans.append(scan)
    return writer.payload(), scans


def decode_tensors(
    payload: bytes, shapes: Sequence[tuple[int, ...]], scans: Sequence[Scan]
) -> list[IntArray]:
    """Decode what :func:`encode_tensors` encoded.

    Raises:
        ImportError: ``constriction`` is not installed.
        CodingError: the bytes are not those of such tensors.
    """
    model, reader = _Model(), _Reader(payload)
    found = [
        model.code(reader, _matrix_shape(shape), scan, None).reshape(shape)
        for shape, scan in zip(shapes, scans, strict=True)
    ]
    reader.check_end()
    return found


def _scans(shape: tuple[int, ...]) -> list[Scan]:
    """Return the orders that are tried, with the widths of kernels, or of square images."""
    rows, columns = _matrix_shape(shape)
    if rows == 1 or columns == 1:
        return [Scan(by_rows=columns == 1 < rows)]
    if len(shape) > 2:
        widths = [shape[-1]] if shape[-1] > 2 else []
    else:
        widths = [width for width in range(3, math.isqrt(columns) + 1) if columns % width**2 == 0]
    return [Scan(by_rows=True), *(Scan(width=width) for width in (0, *widths))]


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of a tensor as a matrix of units by inputs; a bias is one row."""
    units, inputs = (shape[0], shape[1:]) if len(shape) > 1 else (1, shape)
    return units, math.prod(inputs)


def _bits(model: _Model, matrix: IntArray, scan: Scan) -> float:
    counter = _Counter()
    copy.deepcopy(model).code(counter, matrix.shape, scan, matrix)
    return counter.bits


class _Coder(Protocol):
    def code(self, chances: IntArray, bits: IntArray | None, /) -> IntArray:
        """Write bits, or read them if they are None; return them.

        Args:
            chances: the probability of a one in units of 1 / ``_ONE``, shape (n,).
            bits: zeros and ones, shape (n,).
        """


class _Writer:
    def __init__(self) -> None:
        stream, self._family = _constriction()
        self._encoder = stream.queue.RangeEncoder()

    def code(self, chances: IntArray, bits: IntArray | None, /) -> IntArray:
        assert bits is not None
        self._encoder.encode(bits.astype(np.int32), self._family, chances / _ONE)
        return bits

    def payload(self) -> bytes:
        # The reader puts the zeros at the end back.
        words: npt.NDArray[np.uint32] = self._encoder.get_compressed()
        return words.astype(">u4").tobytes().rstrip(b"\0")


class _Reader:
    def __init__(self, payload: bytes) -> None:
        stream, self._family = _constriction()
        words = np.frombuffer(payload + b"\0" * (-len(payload) % 4), ">u4")
        self._decoder = stream.queue.RangeDecoder(words.astype(np.uint32))

    def code(self, chances: IntArray, _: IntArray | None, /) -> IntArray:
        try:
            found: IntArray = self._decoder.decode(self._family, chances / _ONE).astype(np.int64)
        except (AssertionError, ValueError) as error:  # constriction's for bytes of no encoder
            raise CodingError(f"the bytes are not those of an encoder: {error}") from error
        return found

    def check_end(self) -> None:
        if not self._decoder.maybe_exhausted():
            raise CodingError("there are more bytes than tensors of these shapes have")


class _Counter:
    """Count the bits that a writer would need."""

    def __init__(self) -> None:
        self.bits = 0.0

    def code(self, chances: IntArray, bits: IntArray | None, /) -> IntArray:
        assert bits is not None
        self.bits -= float(np.log2(np.where(bits, chances, _ONE - chances) / _ONE).sum())
        return bits


class _LearnedBits:
    """Bits with a chance for each context, from counts of zeros and ones (Krichevsky-Trofimov)."""

    def __init__(self, num_contexts: int) -> None:
        self._counts = np.zeros((2, num_contexts), np.int64)

    def code(self, coder: _Coder, contexts: IntArray, bits: IntArray | None) -> IntArray:
        zeros, ones = self._counts[:, contexts]
        found = coder.code(_within((2 * ones + 1) * _ONE // (2 * (zeros + ones) + 2)), bits)
        np.add.at(self._counts, (found, contexts), 1)
        return found

    def forget(self) -> None:
        """Halve the counts, before bits that may be of another kind."""
        self._counts //= 2


class _Model:
    """The chances of all bits, which adapt to what was coded."""

    def __init__(self) -> None:
        # By the number of columns with a nonzero integer next to this one.
        self._filled = _LearnedBits(5)
        # By the nonzero neighbours of an integer: how many were nonzero, and were expected to be.
        self._found = np.full(16, _PRIOR_NEIGHBOURS * _ONE)
        self._expected = self._found.copy()
        # Nonzero integers of each unit of the last tensor with several units.
        self._units = np.zeros(0, np.int64)
        # By whether a neighbour has a sign.
        self._signs = _LearnedBits(2)
        self._lengths = _LearnedBits(_MAX_BITS)
        self._digits = _LearnedBits((_MAX_BITS + 1) << _LEARNED_BITS)

    def code(
        self, coder: _Coder, shape: tuple[int, ...], scan: Scan, matrix: IntArray | None
    ) -> IntArray:
        """Code a matrix, or decode one if it is None; return it."""
        for learned in (self._filled, self._lengths, self._digits):
            learned.forget()
        rows, columns = shape[::-1] if scan.by_rows else shape
        given = None if matrix is None else matrix.T if scan.by_rows else matrix
        steps = (1, 2, scan.width, scan.width - 1) if scan.width else (1, 2)
        # One row for each column of the matrix, since a column is read at once.
        found = np.zeros((columns, rows), np.int64)
        by_column = np.zeros(columns, np.int64)
        weights = 5 * self._likely_inputs(rows) + 2 if scan.by_rows else np.full(rows, 2, np.int64)
        total = 0
        for column in range(columns):
            values = None if given is None else given[:, column]
            near = [column - step for step in steps if step <= column]
            densities = by_column[near]
            contexts = np.array([np.count_nonzero(densities)])
            some = None if values is None else np.array([int(values.any())])
            if not self._filled.code(coder, contexts, some)[0]:
                continue
            density = _density(densities, total, column, rows)
            neighbours = np.zeros(rows, np.int64)
            for place, other in enumerate(near):
                neighbours |= (found[other] != 0).astype(np.int64) << place
            nonzero = self._nonzero(coder, weights, density, neighbours, values)
            places = nonzero.nonzero()[0]
            signs = np.sign(found[near][:, places]).sum(axis=0)
            found[column, places] = self._values(
                coder, signs, None if values is None else values[places]
            )
            weights += 5 * nonzero
            by_column[column] = len(places)
            total += len(places)
        matrix = found if scan.by_rows else found.T
        if len(matrix) > 1:
            self._units = np.count_nonzero(matrix, axis=1)
        return matrix

    def _likely_inputs(self, count: int) -> IntArray:
        """Return nonzero integers to expect of each input, if the units before it are the inputs.

        A unit without weights is an input without weights. Channels of a convolution that are
        flattened are several inputs each.
        """
        units = self._units
        if not (units.any() and count % len(units) == 0):
            return np.zeros(count, np.int64)
        return np.repeat(_PRIOR_INPUTS * units * len(units) // units.sum(), count // len(units))

    def _nonzero(
        self,
        coder: _Coder,
        weights: IntArray,
        density: int,
        neighbours: IntArray,
        values: IntArray | None,
    ) -> IntArray:
        """Code which integers of a column are nonzero."""
        if len(weights) == 1:  # the column has one
            return np.ones(1, np.int64)
        alone = _within(density * weights // int(weights.sum()))
        factors = (self._found << 10) // self._expected
        chances = _within(alone * factors[neighbours] >> 10)
        bits = None if values is None else (values != 0).astype(np.int64)
        nonzero = coder.code(chances, bits)
        np.add.at(self._found, neighbours, nonzero * _ONE)
        np.add.at(self._expected, neighbours, alone)
        if max(self._found.max(), self._expected.max()) > _MOST:
            self._found = self._found // 2 + 1
            self._expected = self._expected // 2 + 1
        return nonzero

    def _values(self, coder: _Coder, signs: IntArray, values: IntArray | None) -> IntArray:
        """Code nonzero integers, given the sums of the signs of their neighbours."""
        against = signs < 0
        bits = None if values is None else ((values < 0) ^ against).astype(np.int64)
        bits = self._signs.code(coder, (signs != 0).astype(np.int64), bits)
        negative = bits.astype(bool) ^ against
        magnitudes = self._magnitudes(coder, len(signs), None if values is None else np.abs(values))
        return np.where(negative, -magnitudes, magnitudes)

    def _magnitudes(self, coder: _Coder, count: int, given: IntArray | None) -> IntArray:
        """Code positive integers: the number of binary digits, then the digits after the first."""
        lengths = np.ones(count, np.int64)
        known = None if given is None else np.frexp(given)[1].astype(np.int64)
        open_ = np.arange(count)
        for length in range(1, _MAX_BITS):
            if not len(open_):
                break
            bits = None if known is None else (known[open_] > length).astype(np.int64)
            longer = self._lengths.code(coder, np.full(len(open_), length), bits)
            open_ = open_[longer.astype(bool)]
            lengths[open_] += 1
        found = np.ones(count, np.int64)
        for place in range(1, int(lengths.max(initial=1))):
            here = (lengths > place).nonzero()[0]
            bits = None if given is None else given[here] >> (lengths[here] - 1 - place) & 1
            if place <= _LEARNED_BITS:
                contexts = (lengths[here] << _LEARNED_BITS) | found[here]
                digits = self._digits.code(coder, contexts, bits)
            else:
                digits = coder.code(np.full(len(here), _ONE // 2), bits)
            found[here] = found[here] * 2 + digits
        return found


def _density(near: IntArray, total: int, columns: int, rows: int) -> int:
    """Return the expected nonzero integers of a column that has one, in units of 1 / ``_ONE``.

    Args:
        near: nonzero integers of the columns next to it.
        total: those of all columns before it.
        columns: columns before it.
        rows: number of rows.
    """
    if not len(near):
        return max(_ONE, rows * _ONE // 20)
    before = total * _ONE // columns
    return max(_ONE, (2 * int(near.sum()) * _ONE + before) // (2 * len(near) + 1))


def _within(chances: IntArray) -> IntArray:
    return chances.clip(_LEAST, _ONE - _LEAST)


def _constriction() -> tuple[Any, Any]:
    """Return the module of stream codes, and the family of the laws of one bit."""
    try:
        from constriction import stream
    except ModuleNotFoundError as error:
        raise ImportError(
            "compressing needs constriction; pip install 'bayesify[compress]'"
        ) from error
    return stream, stream.model.Bernoulli(perfect=False)
