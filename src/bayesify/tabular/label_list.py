"""Write labels as one text, separated by commas, and read them."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from bayesify.tabular.files.errors import TableError

__all__ = ["joined_labels", "split_labels"]


def joined_labels(labels: Sequence[object]) -> str:
    """Join labels with commas, those with a comma or a line end of their own in quotation marks.

    Example:
        >>> joined_labels(["0-999", "1,000-5,000"])
        '0-999,"1,000-5,000"'
    """
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(labels)
    return line.getvalue().removesuffix("\n")


def split_labels(text: str) -> list[str]:
    """Return the labels that :func:`joined_labels` joined.

    Raises:
        TableError: a quotation mark is not closed, or does not enclose a whole label.

    Example:
        >>> split_labels('0-999, "1,000-5,000"'), split_labels("")
        (['0-999', '1,000-5,000'], [''])
    """
    if '"' not in text:
        return [label.strip() for label in text.split(",")]
    rows = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
    try:
        (labels,) = rows
    except (csv.Error, ValueError) as error:
        raise TableError(
            "--ordered must be labels separated by commas, in quotation marks those that hold a "
            f"comma or a line end, got {text}"
        ) from error
    return [label.strip() for label in labels]
