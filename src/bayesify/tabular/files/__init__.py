"""Table files: open a table, one file or several, CSV or Parquet, and read its rows in chunks.

The rows of both formats have a text, so that a typed Parquet column and the same column in a CSV
file give the same inputs. Rows are read in chunks, so that memory does not grow with the file.
"""

from bayesify.tabular.files.data_frame import table_of
from bayesify.tabular.files.errors import CellError, TableError, no_rows
from bayesify.tabular.files.opening import open_table, table_paths
from bayesify.tabular.files.table_file import CHUNK_ROWS, TableFile, path_of_image

__all__ = [
    "CHUNK_ROWS",
    "CellError",
    "TableError",
    "TableFile",
    "no_rows",
    "open_table",
    "path_of_image",
    "table_of",
    "table_paths",
]
