"""Open a run of a table from Python, and predict new rows with it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # pandas and matplotlib take their time to load
    import pandas as pd

    from bayesify.app.runs.folder import Run
    from bayesify.module.bayesian import BayesianModule

__all__ = ["TrainedTable", "open_run"]


@dataclass(frozen=True)
class TrainedTable:
    """Run of a table, ready to predict; from :func:`open_run`.

    Args:
        run: the run.
        bnn: its network, pruned or not.

    Example:
        >>> import bayesify as bf
        >>> run = bf.open_run("runs/houses")  # doctest: +SKIP
        >>> found = run.predict("new.csv")  # doctest: +SKIP
    """

    run: Run
    bnn: BayesianModule

    def predict(
        self,
        table: Any,
        *,
        level: float | None = None,
        num_samples: int | None = None,
        lenient: bool = False,
    ) -> pd.DataFrame:
        """Return the predictions for new rows: the columns that ``bayesify predict`` writes.

        Notes on how the table is read are warnings.

        Args:
            table: a pandas data frame, whose index the predictions have; another frame that has
                ``to_pandas``, such as polars'; or the path of a file.
            level: probability of a regression's intervals; None is 0.95.
            num_samples: weight samples to average over; None for as many as in training.
            lenient: whether to read columns as in training even where their cells look otherwise.

        Raises:
            TypeError: ``table`` is neither a data frame nor a path.
            TableError: the table cannot be read surely.
            RunError: ``level`` or ``num_samples`` is out of range, ``level`` is given for classes,
                or a prediction is not finite.

        Example:
            >>> import bayesify as bf
            >>> run = bf.open_run("runs/houses")  # doctest: +SKIP
            >>> found = run.predict("new.csv", level=0.9, num_samples=200)  # doctest: +SKIP
            >>> found[["mean", "lower_90", "upper_90"]]  # doctest: +SKIP
        """
        import pandas as pd

        from bayesify.app.runs.predict import (
            TEXT_COLUMNS,
            Predictions,
            chosen_level,
            table_predictions,
        )
        from bayesify.tabular.files import table_of
        from bayesify.tabular.image_table import new_table_file
        from bayesify.tabular.new_table import NewTable

        if not isinstance(table, str | Path | pd.DataFrame) and hasattr(table, "to_pandas"):
            table = table.to_pandas()
        if not isinstance(table, pd.DataFrame | str | Path):
            raise TypeError(
                "table must be a pandas DataFrame or the path of a file, got "
                f"{type(table).__name__}; make a frame of it with pandas.DataFrame, one row of a "
                "frame with row.to_frame().T"
            )
        run = self.run
        assert run.table is not None
        predictions = Predictions.of(
            run,
            self.bnn,
            level=chosen_level(level, run.class_names),
            samples=run.config.test_samples if num_samples is None else num_samples,
        )
        frame = table if isinstance(table, pd.DataFrame) else None
        file = new_table_file(Path(table), run.table) if frame is None else table_of(frame)
        new = NewTable.open(file, run.table, lenient=lenient)
        for note in new.remarks:
            warnings.warn(note, stacklevel=2)
        header, rows = table_predictions(new, predictions)
        found = pd.DataFrame(list(rows), columns=header)
        carried = sum(name in new.file.columns for name in new.schema.carried)
        texts = {*TEXT_COLUMNS, *header[1 : 1 + carried]}
        for name in set(header) - texts - {"row", "outside_training"}:
            found[name] = pd.to_numeric(found[name])
        found["outside_training"] = found["outside_training"] == "true"
        return found if frame is None else found.set_axis(frame.index)


def open_run(path: str | Path, *, pruned: str | Path | None = None) -> TrainedTable:
    """Open the folder of a run that ``bayesify train FILE.csv --target NAME`` made.

    It needs the extra ``cli``.

    Args:
        path: the folder.
        pruned: file of ``bayesify prune DIR --out FILE``, to predict with the pruned network. The
            folder needs no checkpoint then.

    Raises:
        RunError: there is no run, or it is not of a table or not trained, or ``pruned`` is a file
            of another network.
        StorageError: a file with weights is missing or damaged.

    Example:
        >>> open_run("no/such/folder")
        Traceback (most recent call last):
        bayesify.app.runs.run_files.RunError: no/such/folder holds no run: there is no
        no/such/folder/config.json
    """
    from bayesify.app.runs.folder import Run
    from bayesify.app.runs.run_files import RunError

    run = Run.open(Path(path))
    if run.table is None:
        raise RunError(
            f"{path} must hold a run of a table, got one of images; use bayesify predict"
        )
    return TrainedTable(run, run.load_module(None if pruned is None else Path(pruned)))
