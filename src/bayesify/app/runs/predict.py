"""Predict new data with a trained run, and write the predictions as CSV or Parquet."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayesify.app.runs.folder import Run
from bayesify.app.runs.measure import RowMetrics, distinct_samples, in_units, predict_rows
from bayesify.app.runs.out_file import check_can_be_written
from bayesify.app.runs.run_data import RunData
from bayesify.app.runs.run_files import RunError
from bayesify.io import atomic_path
from bayesify.io.files import named_file, remove_leftovers
from bayesify.module.bayesian import BayesianModule
from bayesify.prediction import CategoricalPredictive, CountPredictive, Predictive
from bayesify.prediction.conformal import Conformal, ConformalIntervals, ConformalSets, whole_ends
from bayesify.tabular.censoring import Limits
from bayesify.tabular.table_data import TableData

if TYPE_CHECKING:  # pandas takes its time to load
    from bayesify.tabular.new_table import NewTable

__all__ = [
    "TEXT_COLUMNS",
    "Predictions",
    "chosen_level",
    "table_predictions",
    "write_predictions",
    "write_table",
]

#: Columns of predictions that are no numbers, but for those that identify rows.
TEXT_COLUMNS = ("prediction", "set", "outside_column")

#: Rows that are predicted at once. Every chunk uses the same weight samples.
_CHUNK_ROWS = 10_000
_HOUR = 3600.0


@dataclass
class Predictions:
    """Predictions of a run's network for new data, as rows of a table.

    Args:
        run: the run.
        bnn: its network.
        level: probability of the intervals of a regression, or of calibrated sets of classes.
        samples: weight samples.
        measures: metrics of the rows so far whose targets are known.
        totals: sums over the rows so far, for :meth:`summary`.
        conformal: calibration of the intervals or sets, see :meth:`calibrate`.
    """

    run: Run
    bnn: BayesianModule
    level: float
    samples: int
    measures: RowMetrics
    totals: dict[str, float] = field(default_factory=dict)
    conformal: Conformal | None = None

    @classmethod
    def of(
        cls,
        run: Run,
        bnn: BayesianModule,
        *,
        level: float,
        samples: int,
    ) -> Predictions:
        """Prepare the predictions of a trained run by its network, pruned or not.

        Raises:
            RunError: level or samples is out of its range.
        """
        if not 0.0 < level < 1.0:
            raise RunError(f"level must lie strictly between 0 and 1, got {level}")
        if samples < 1:
            raise RunError(f"samples must be at least 1, got {samples}")
        measures = RowMetrics(bnn, 0.0, 1.0)
        if run.table is not None:
            target = run.table.target
            measures = RowMetrics(bnn, target.shift, target.scale, target.limits)
        return cls(run, bnn, level, distinct_samples(bnn, samples), measures)

    @property
    def class_names(self) -> Sequence[str]:
        """The names of the classes; none of a regression."""
        return self.run.class_names

    def calibrate(self, data: RunData) -> None:
        """Calibrate the intervals, or sets of classes, on the run's held-out test part.

        Its rows outside the training data are predicted as new ones are, with a widened
        distribution: the guarantee is for one predictor.

        Raises:
            RunError: it is empty or too small for the level, or a prediction is not finite.
        """
        inputs, targets = data.test_inputs, data.test_targets
        if not len(inputs):
            raise RunError(
                f"{self.run.folder} must hold out test rows to calibrate on, got none "
                "(--test-fraction 0); predict without --conformal, or train with a larger fraction"
            )
        distances = inputs.new_zeros(len(inputs))
        if isinstance(data, TableData):
            distances = data.test_distances
            if not self.class_names:
                targets = targets.double() * data.scale + data.shift
        chunks = zip(inputs.split(_CHUNK_ROWS), distances.split(_CHUNK_ROWS), strict=True)
        parts = [(p.mean, p.total.sqrt()) for p in (self._predictive(*each) for each in chunks)]
        mean, std = (torch.cat(part) for part in zip(*parts, strict=True))
        _check_finite([mean, std])
        try:
            if self.class_names:
                self.conformal = ConformalSets.of(mean, targets)
            else:
                if targets.dim() > mean.dim():
                    targets = Limits.recorded(targets)
                self.conformal = ConformalIntervals.of(mean, std, targets)
            self.conformal.guarantee(self.level)
        except ValueError as error:
            raise RunError(
                f"{self.run.folder} holds out {len(targets):,} test rows to calibrate on: {error} "
                "with --level; the rows that are held out are set by train --test-fraction"
            ) from error

    @property
    def header(self) -> list[str]:
        """The names of the columns."""
        split = ["total", "aleatoric", "epistemic"]
        if self.class_names:
            more = [] if self.conformal is None else ["set"]
            return ["prediction", *more, *(f"p({name})" for name in self.class_names), *split]
        percent = f"{100.0 * self.level:.15g}"
        return ["mean", "std", f"lower_{percent}", f"upper_{percent}", *split]

    def measure(self, inputs: Tensor, targets: Tensor, distances: Tensor) -> None:
        """Measure rows of a table, and write nothing.

        Args:
            inputs: inputs of the network, shape (N, D).
            targets: as for :meth:`RowMetrics.update`.
            distances: how far each row lies outside the training data, shape (N,).
        """
        parts = (part.split(_CHUNK_ROWS) for part in (inputs, targets, distances))
        for x, y, far in zip(*parts, strict=True):
            self.measures.update(self._predictive(x, far), x, y)

    def rows(
        self,
        inputs: Tensor,
        targets: Tensor | None = None,
        distances: Tensor | None = None,
    ) -> Iterator[list[object]]:
        """Yield the cells of each example of inputs (N, D).

        Args:
            inputs: inputs of the network, shape (N, D).
            targets: what to measure the predictions by, as for :meth:`RowMetrics.update`.
            distances: how far each row of a table lies outside the training data, shape (N,).

        Raises:
            RunError: a prediction is not finite.
        """
        for texts, numbers in self.parts(inputs, targets, distances):
            cells = [[f"{value:.{self._digits}g}" for value in part.tolist()] for part in numbers]
            yield from (list(row) for row in zip(*texts, *cells, strict=True))

    def parts(
        self,
        inputs: Tensor,
        targets: Tensor | None = None,
        distances: Tensor | None = None,
    ) -> Iterator[tuple[list[list[str]], list[Tensor]]]:
        """Yield the columns of :attr:`header`, those of texts first, for 10,000 examples at a time.

        Args:
            inputs: as for :meth:`rows`.
            targets: see there.
            distances: see there.

        Raises:
            RunError: a prediction is not finite.
        """
        far = inputs.new_zeros(len(inputs)) if distances is None else distances
        for start in range(0, len(inputs), _CHUNK_ROWS):
            part = slice(start, start + _CHUNK_ROWS)
            chunk = inputs[part]
            predictive = self._predictive(chunk, far[part])
            split = [predictive.total, predictive.aleatoric, predictive.epistemic]
            _check_finite([predictive.mean, *split])
            if targets is not None:
                self.measures.update(predictive, chunk, targets[part])
            if isinstance(predictive, CategoricalPredictive):
                first = [[self.class_names[i] for i in predictive.mean.argmax(-1).tolist()]]
                numbers = [*predictive.mean.unbind(-1)]
                if isinstance(self.conformal, ConformalSets):
                    first.append(self._sets(self.conformal.sets(predictive.mean, self.level)))
            else:
                std = split[0].sqrt()
                if isinstance(self.conformal, ConformalIntervals):
                    low, high = self.conformal.interval(predictive.mean, std, self.level)
                    if isinstance(predictive, CountPredictive):
                        low, high = whole_ends(low, high)
                else:
                    low, high = predictive.interval(self.level)
                numbers = [part.squeeze(-1) for part in (predictive.mean, std, low, high)]
                first = []
            numbers += [part.reshape(len(chunk)) for part in split]
            _check_finite(numbers)
            self._count(predictive, len(chunk))
            yield first, numbers

    def _sets(self, member: Tensor) -> list[str]:
        """Return the names of each set as a JSON list, since a name may hold any character."""
        return [
            json.dumps(
                [name for name, held in zip(self.class_names, row, strict=True) if held],
                ensure_ascii=False,
            )
            for row in member.tolist()
        ]

    @property
    def _digits(self) -> int:
        """Digits of a number: the seven of float32, or more for a target far from 0."""
        if self.run.table is None or self.class_names:
            return 7
        target = self.run.table.target
        distance = abs(target.shift) / target.scale
        return min(17, 10 + math.ceil(math.log10(max(1.0, distance))))

    def _predictive(self, inputs: Tensor, distances: Tensor) -> Predictive:
        if self.run.table is None:
            return self.bnn.predict(inputs, self.samples)
        target = self.run.table.target
        found = predict_rows(self.bnn, inputs, distances, self.samples, target.marginal)
        return in_units(found, target.shift, target.scale)

    def _count(self, predictive: Predictive, rows: int) -> None:
        sums = {
            "rows": float(rows),
            **{
                name: float(getattr(predictive, name).double().sum())
                for name in ("total", "aleatoric", "epistemic")
            },
        }
        for name, value in sums.items():
            self.totals[name] = self.totals.get(name, 0.0) + value

    def summary(self) -> dict[str, Any]:
        """Return the number of predicted rows, and the means of their uncertainties."""
        rows = int(self.totals["rows"])
        return {
            "rows": rows,
            "weight_samples": self.samples,
            **({} if self.class_names and self.conformal is None else {"level": self.level}),
            **self._calibration(),
            **{
                f"mean_{name}": self.totals[name] / rows
                for name in ("total", "aleatoric", "epistemic")
            },
            "unit": "nats" if self.class_names else "variance, squared units of the target",
        }

    def _calibration(self) -> dict[str, Any]:
        if self.conformal is None:
            return {}
        return {
            "method": "conformal",
            "calibration_rows": self.conformal.num_scores,
            "guaranteed_level": self.conformal.guarantee(self.level),
        }


def _check_finite(numbers: Iterable[Tensor]) -> None:
    """Raise RunError where a prediction is NaN or infinite."""
    if not all(bool(part.isfinite().all()) for part in numbers):
        raise RunError(
            "predictions must be finite, got NaN or infinity: some values lie too far outside the "
            "training data; correct or remove these rows"
        )


def chosen_level(
    level: float | None, class_names: Sequence[str], *, conformal: bool | None = None
) -> float:
    """Return the probability of intervals or sets: the one that was asked for, or 0.95.

    Args:
        level: the one that was asked for, or None.
        class_names: of a classification.
        conformal: whether sets of classes are calibrated; None where they cannot be.

    Raises:
        RunError: it would do nothing, as classes have no intervals.

    Example:
        >>> chosen_level(None, ["a", "b"]), chosen_level(0.5, [])
        (0.95, 0.5)
    """
    if level is not None and class_names and not conformal:
        more = "" if conformal is None else ", or add --conformal for sets of classes"
        raise RunError(
            f"level would do nothing here: classes have no intervals; leave it out{more}"
        )
    return 0.95 if level is None else level


def table_predictions(
    table: NewTable, predictions: Predictions
) -> tuple[list[str], Iterator[list[object]]]:
    """Return header and rows of the predictions for a table, which measure them by its targets.

    The columns that identify rows come after the row's number; the last two tell which rows lie
    outside the training data, and where.
    """
    carried = [name for name in table.schema.carried if name in table.file.columns]
    own = ["row", *predictions.header, "outside_training", "outside_column"]
    header = [own[0], *_carried_names(own, carried), *own[1:]]
    return header, _table_rows(table, predictions, carried)


def _carried_names(own: Sequence[str], carried: Sequence[str]) -> list[str]:
    """Return the names of carried columns; "(input)" follows those that our own columns have."""
    taken, names = {*own, *carried}, []
    for name in carried:
        new = name
        while new in own or (new != name and new in taken):
            new += " (input)"
        taken.add(new)
        names.append(new)
    return names


def _table_rows(
    table: NewTable, predictions: Predictions, carried: Sequence[str]
) -> Iterator[list[object]]:
    for piece in table:
        columns = [piece.carried[name] for name in carried]
        targets = None if piece.targets is None else torch.from_numpy(piece.targets)
        rows = predictions.rows(piece.inputs, targets, piece.distances)
        answers = zip(rows, piece.outside, strict=True)
        for place, (cells, outside) in enumerate(answers):
            ids = [column[place] for column in columns]
            yield [piece.first + place, *ids, *cells, "true" if outside else "false", outside]


def write_predictions(
    out: Path,
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    overwrite: bool = False,
) -> None:
    """Write a CSV file row by row, under a temporary name until it is complete.

    Raises:
        RunError: the file exists and is not to be overwritten, or its folder does not exist.
        OSError: it cannot be written; what was there is left as it was then.
    """
    check_can_be_written(out, overwrite=overwrite)
    _remove_leftovers_of(out)
    with (
        atomic_path(out) as temporary,
        # A file's name may hold bytes that the locale could not decode.
        temporary.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file,
    ):
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


def write_table(
    out: Path, table: NewTable, predictions: Predictions, *, overwrite: bool = False
) -> None:
    """Write the predictions for a table, under a temporary name until the file is complete.

    The columns are those of :func:`table_predictions`. A file that ends in ``.parquet`` is
    Parquet, any other CSV. Numbers of Parquet are not rounded to the digits of the CSV file; row
    groups have as many rows as the parts in which the table is read.

    Raises:
        RunError: the file exists and is not to be overwritten, or its folder does not exist.
        OSError: it cannot be written; what was there is left as it was then.
    """
    check_can_be_written(out, overwrite=overwrite)
    if out.suffix.lower() == ".parquet":
        _write_parquet(out, table, predictions)
    else:
        write_predictions(out, *table_predictions(table, predictions), overwrite=overwrite)


def _remove_leftovers_of(out: Path) -> None:
    """Remove the temporary files of killed processes for this file, which may be large."""
    place = named_file(out)
    # In a folder that several machines share, a file of late may be another's in progress.
    with suppress(OSError):  # a folder that may not be listed
        remove_leftovers(place.parent, place.name, min_age=_HOUR)


def _write_parquet(out: Path, table: NewTable, predictions: Predictions) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    header, _ = table_predictions(table, predictions)
    carried = [name for name in table.schema.carried if name in table.file.columns]
    own: dict[str, Any] = {"row": pa.int64(), "outside_training": pa.bool_()}
    texts = {*TEXT_COLUMNS, *header[1 : 1 + len(carried)]}
    kinds = [own.get(name, pa.string() if name in texts else pa.float64()) for name in header]
    schema = pa.schema(list(zip(header, kinds, strict=True)))
    _remove_leftovers_of(out)
    with atomic_path(out) as temporary, parquet.ParquetWriter(temporary, schema) as writer:
        for piece in table:
            targets = None if piece.targets is None else torch.from_numpy(piece.targets)
            found = list(predictions.parts(piece.inputs, targets, piece.distances))
            texts_of_parts = zip(*(part[0] for part in found), strict=True)
            words = [list(itertools.chain.from_iterable(column)) for column in texts_of_parts]
            numbers = [torch.cat(each) for each in zip(*(part[1] for part in found), strict=True)]
            columns = [
                range(piece.first, piece.first + len(piece.inputs)),
                *(piece.carried[name] for name in carried),
                *words,
                *(number.double().numpy() for number in numbers),
                piece.outside != "",
                piece.outside,
            ]
            arrays = [pa.array(each, kind) for each, kind in zip(columns, kinds, strict=True)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
