"""CSV files with short rows, which are read, with a remark, and with what must not be dropped."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from tests.app.cli.test_cli import bayesify, quick_runs
from tests.app.cli.test_tables import QUICK

from bayesify.tabular.files import TableError, open_table
from bayesify.tabular.files.short_rows import SeparatorCount

HEADER = "x,note,z,y\n"
WHOLE = "".join(f'{i % 13},"a, {i % 3}\n""b""",{i % 5},{i % 7}\n' for i in range(60))
SHORT = "".join(f"{i % 13},c\n" for i in range(30))


def remarks(path: Path, content: bytes | str) -> list[str]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return [each for each in open_table(path).remarks if "fewer values" in each]


@pytest.mark.parametrize(
    "change",
    [
        str.encode,
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: text.encode("utf-16"),
        lambda text: gzip.compress(text.encode()),
        lambda text: text.replace("a", "é").encode("cp1252"),
        lambda text: text.rstrip("\n").encode(),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_short_rows_are_counted(tmp_path: Path, change: object, first: bool) -> None:
    text = HEADER + (SHORT + WHOLE if first else WHOLE + SHORT)
    found = remarks(tmp_path / "a.csv", change(text))  # type: ignore[operator]
    row = 2 if first else 62
    assert found == [
        f"30 rows have fewer values than the header, the first is row {row}; what lacks is read as "
        "missing"
    ]


@pytest.mark.parametrize(
    "text",
    [
        HEADER + WHOLE,
        HEADER + WHOLE + "\n\n  \n",
        HEADER + WHOLE + '1,5" pipe,2,3\n',
        HEADER + WHOLE + "1,,,\n,,,\n",
        HEADER + WHOLE.replace(",", ";").replace("\n", "\r"),
        "x\n1\n\n2\n",
    ],
)
def test_whole_rows_have_no_remark(tmp_path: Path, text: str) -> None:
    text = (
        text.replace(HEADER, HEADER.replace(",", ";").replace("\n", "\r")) if ";" in text else text
    )
    assert remarks(tmp_path / "a.csv", text) == []


def test_quotes_across_two_blocks(tmp_path: Path) -> None:
    """The text is read a megabyte at a time."""
    text = "x,note,y\n" + "".join(f'{i},"{"a," * 40_000}\n",4\n' for i in range(30))
    assert remarks(tmp_path / "a.csv", text) == []
    assert "row 32;" in remarks(tmp_path / "a.csv", text + "1,2\n")[0]


def test_one_row_is_named(tmp_path: Path) -> None:
    found = remarks(tmp_path / "a.csv", "x,y\n1,2\n3\n4,5\n")
    assert found == ["1 row has fewer values than the header, row 3; what lacks is read as missing"]


def test_training_and_predicting_tell(tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    table.write_text("x,z,y\n" + "".join(f"{i % 13},{i % 7},{i % 5}\n" for i in range(60)) + "1\n")
    with quick_runs():
        said = bayesify(
            "train",
            table,
            "--target",
            "y",
            "--task",
            "regression",
            "--out",
            tmp_path / "run",
            *QUICK,
        )
    note = "note: 1 row has fewer values than the header, row 62; what lacks is read as missing"
    assert note in said.err
    said = bayesify("predict", tmp_path / "run", table, "--out", tmp_path / "p.csv")
    assert said.code == 0, said.err
    assert note in said.err


def test_a_long_value_hides_no_short_row(tmp_path: Path) -> None:
    rows = ["x,t,y", *(f"{i},a,{i}" for i in range(400))]
    for place in (50, 300):
        rows[place] = f"{place},{'b' * 140_000},1"
    [found] = remarks(tmp_path / "a.csv", "\n".join([*rows, "1"]))
    assert "row 402; what lacks is read as missing" in found


@pytest.mark.parametrize("ending", [",", ", ", ",,"])
def test_a_value_beyond_the_header_is_an_error_though_rows_end_with_a_separator(
    tmp_path: Path, ending: str
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x,y\n" + f"12,25{ending}\n" * 210 + "5\n5,1\n")
    [rows] = open_table(path).batches()
    assert rows.texts("x")[-3:].tolist() == ["12", "5", "5"]
    assert rows.texts("y")[-3:].tolist() == ["25", "", "1"]
    path.write_text("x,y\n" + f"12,25{ending}\n" * 210 + "5,1,7\n")
    with pytest.raises(TableError, match=r"as names, 2, but row 212 has more; put quotes around"):
        list(open_table(path).batches(size=50))


@pytest.mark.parametrize("encoding", ["utf-32", "utf-32-be"])
def test_utf_32_is_named(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "a.csv"
    mark = "" if encoding == "utf-32" else "\ufeff"  # which Python writes for the first
    path.write_bytes(f"{mark}x,y\n1,é\n".encode(encoding))
    with pytest.raises(TableError, match="must be UTF-8, got UTF-32; save it as UTF-8"):
        open_table(path)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_carriage_return_that_tears_a_row_is_told(tmp_path: Path, end: str) -> None:
    """A value with one, as spreadsheets write it, begins a row where it is not quoted."""
    rows = ["x,note", *(f"{i},whole" for i in range(300)), "7,first\rsecond", "8,whole", ""]
    [found] = remarks(tmp_path / "a.csv", end.join(rows))
    assert "1 row has fewer values than the header, row 303;" in found
    assert remarks(tmp_path / "b.csv", end.join(rows).replace("first\rsecond", '"a\rb"')) == []


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_are_counted_across_blocks(end: str, size: int) -> None:
    text = f'x,y{end}1,"2,{end}3"{end}4,5{end}'.encode()
    for last, fits in ((b"", True), (b"6,7", True), (b"6" + end.encode(), False)):
        counts, content = SeparatorCount(","), text + last
        for start in range(0, len(content), size):
            counts.update(content[start : start + size])
        assert counts.agree(",", 2) == fits
