"""Find how each column of a new table is written, and refuse what cannot be read surely.

A column is read in the format of training. Where that does not read a share of the cells, or where
another format fits training's values far better, another reading is chosen if it is unambiguous;
otherwise an error names the column.
"""

from bayesify.tabular.drift.reading import Reading
from bayesify.tabular.drift.table_readings import read_columns, reading_of, reading_of_numbers
from bayesify.tabular.drift.target import target_column
from bayesify.tabular.drift.word_readings import levels_of_cells

__all__ = [
    "Reading",
    "levels_of_cells",
    "read_columns",
    "reading_of",
    "reading_of_numbers",
    "target_column",
]
