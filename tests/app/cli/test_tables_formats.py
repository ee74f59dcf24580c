"""New tables in other formats than training's: the same predictions, or an error that tells why."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from tests.app.cli.test_cli import bayesify, quick_runs
from tests.app.cli.test_tables import QUICK, rows_of

COLUMNS = ("when", "size", "price", "share", "sold", "city", "y")
CITIES = ("Rome", "Köln", "San José")
Row = dict[str, str]
Table = list[Row]

pytestmark = pytest.mark.usefixtures("quick")


def table(rows: int = 120) -> Table:
    """Dates as dd/mm/yyyy, decimal points, whole thousands without a separator, yes and no."""
    generator = np.random.default_rng(0)
    found = []
    for i in range(rows):
        day = date(2023, 1, 1) + timedelta(days=int(generator.integers(0, 700)))
        size, price = generator.uniform(0.5, 60.0), int(generator.integers(1200, 90_000))
        share, sold = generator.uniform(3.0, 97.0), bool(generator.integers(0, 2))
        y = size / 9.0 + price / 20_000 + share / 30.0 + 2.0 * sold + day.month / 4.0 + i % 3
        found.append(
            {
                "when": day.strftime("%d/%m/%Y"),
                "size": "" if i % 9 == 0 else f"{size:.3f}",
                "price": str(price),
                "share": f"{share:.1f}",
                "sold": "yes" if sold else "no",
                "city": CITIES[i % 3],
                "y": f"{y:.3f}",
            }
        )
    return found


def written(rows: Table, separator: str = ",", quoting: int = csv.QUOTE_MINIMAL) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(
        text, list(rows[0]), delimiter=separator, lineterminator="\n", quoting=quoting
    )
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def each(**changes: Callable[[str], str]) -> Callable[[Table], Table]:
    """Write the named columns in another way; an empty cell stays empty."""

    def change(rows: Table) -> Table:
        return [
            {
                name: changes[name](cell) if name in changes and cell else cell
                for name, cell in row.items()
            }
            for row in rows
        ]

    return change


def day(form: str) -> Callable[[Table], Table]:
    def change(cell: str) -> str:
        day, month, year = map(int, cell.split("/"))
        return date(year, month, day).strftime(form)

    return each(when=change)


def comma(cell: str) -> str:
    return cell.replace(".", ",")


def months_first(cell: str) -> str:
    return "/".join(cell.split("/")[i] for i in (1, 0, 2))


def grouped(sign: str) -> Callable[[str], str]:
    return lambda cell: f"{int(cell):,}".replace(",", sign)


def words(no: str, yes: str) -> Callable[[Table], Table]:
    return each(sold=lambda cell: {"no": no, "yes": yes}[cell])


def blank(name: str, word: str) -> Callable[[Table], Table]:
    return lambda rows: [{**row, name: row[name] or word} for row in rows]


#: How a table is rewritten; and whether its meaning is beyond doubt, so that it must be read.
REWRITTEN: dict[str, tuple[Callable[[Table], Table], bool]] = {
    "as it was": (lambda rows: rows, True),
    "iso dates": (day("%Y-%m-%d"), True),
    "iso times": (day("%Y-%m-%dT00:00:00"), True),
    "us dates": (day("%m/%d/%Y"), False),
    "dates with dots": (day("%d.%m.%Y"), True),
    "dates with dashes": (day("%d-%m-%Y"), True),
    "us dates with dashes": (day("%m-%d-%Y"), False),
    "year first": (day("%Y/%m/%d"), True),
    "short years": (day("%d/%m/%y"), True),
    "us short years": (day("%m/%d/%y"), False),
    "years first and short": (day("%y/%m/%d"), False),
    "names of months": (day("%d %b %Y"), True),
    "times after dates": (day("%d/%m/%Y 00:00"), True),
    "a clock of twelve hours": (day("%d/%m/%Y 12:00 AM"), True),
    "iso dates and twelve hours": (day("%Y-%m-%d 12:00 AM"), True),
    "names of months and short years": (day("%d-%b-%y"), True),
    "dates without signs": (day("%Y%m%d"), False),
    "days of a spreadsheet": (
        each(when=lambda cell: str(pd.to_datetime(cell, dayfirst=True).toordinal() - 693594)),
        False,
    ),
    "decimal commas": (each(size=comma, share=comma), True),
    "decimal commas everywhere": (each(size=comma, share=comma, y=comma), True),
    "commas between thousands": (each(price=grouped(",")), True),
    "points between thousands": (each(price=grouped(".")), False),
    "blanks between thousands": (each(price=grouped(" ")), True),
    "narrow blanks": (each(price=grouped("\u202f")), True),
    "apostrophes": (each(price=grouped("'")), True),
    "True and False": (words("False", "True"), True),
    "0 and 1": (words("0", "1"), True),
    "0.0 and 1.0": (words("0.0", "1.0"), True),
    "ja and nein": (words("nein", "ja"), True),
    "upper case": (words("NO", "YES"), True),
    "other words": (words("unsold", "gone"), False),
    "kilograms": (each(size="{} kg".format), True),
    "euros": (each(price="€{}".format), True),
    "dollars and thousands": (each(price=lambda cell: f"${int(cell):,}"), True),
    "percent": (each(share="{} %".format), True),
    "fractions of one": (each(share=lambda cell: f"{float(cell) / 100:.3f} %"), False),
    "grams": (each(size=lambda cell: f"{1000 * float(cell):.0f} g"), False),
    "two units": (
        lambda rows: [
            {**row, "size": row["size"] and f"{row['size']} {('kg', 'lb')[i % 2]}"}
            for i, row in enumerate(rows)
        ],
        False,
    ),
    "another word for missing": (blank("size", "n/a"), True),
    "an unknown word for missing": (blank("size", "unknown"), True),
    "cities in upper case": (each(city=str.upper), True),
    "cities in lower case": (each(city=str.lower), True),
    "blanks around cells": (each(city="  {} ".format, size=" {} ".format), True),
    "two blanks within": (each(city=lambda cell: cell.replace(" ", "  ")), True),
    "other cities": (each(city="{}, IT".format), False),
    "columns in another order": (
        lambda rows: [dict(reversed(row.items())) for row in rows],
        True,
    ),
    "more columns": (lambda rows: [{"new": "7", **row, "z": "a"} for row in rows], True),
}
FILES: dict[str, Callable[[Table, Path], None]] = {
    "quoted": lambda rows, path: _write(path, written(rows, quoting=csv.QUOTE_ALL)),
    "semicolons": lambda rows, path: _write(path, written(rows, ";")),
    "semicolons and decimal commas": lambda rows, path: _write(
        path, written(each(size=comma, share=comma, y=comma)(rows), ";")
    ),
    "tabs": lambda rows, path: _write(path, written(rows, "\t")),
    "a mark": lambda rows, path: _write(path, written(rows), "utf-8-sig"),
    "utf-16": lambda rows, path: _write(path, written(rows), "utf-16"),
    "latin-1": lambda rows, path: _write(path, written(rows), "latin-1"),
    "windows-1252 with euros": lambda rows, path: _write(
        path, written(each(price="{} €".format)(rows)), "cp1252"
    ),
    "windows lines": lambda rows, path: _write(path, written(rows).replace("\n", "\r\n")),
    "parquet of texts": lambda rows, path: pd.DataFrame(rows).to_parquet(path),
    "parquet of types": lambda rows, path: typed(rows).to_parquet(path),
}


def _write(path: Path, text: str, encoding: str = "utf-8") -> None:
    path.write_bytes(text.encode(encoding))


def typed(rows: Table) -> pd.DataFrame:
    frame = pd.DataFrame(rows)
    frame["when"] = pd.to_datetime(frame["when"], dayfirst=True)
    frame["sold"] = frame["sold"] == "yes"
    frame["city"] = frame["city"].astype("category")
    for name in ("size", "price", "share", "y"):
        frame[name] = pd.to_numeric(frame[name])
    return frame


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and the predictions of its own table."""
    place = tmp_path_factory.mktemp("formats")
    (place / "old.csv").write_text(written(table()))
    with quick_runs():
        out = ("--out", place / "run")
        said = bayesify("train", place / "old.csv", "--target", "y", *out, *QUICK)
        assert said.code == 0, said.err
        assert "1 date, 3 numbers, 1 flag, 1 category" in said.err
        said = bayesify("predict", place / "run", place / "old.csv", "--out", place / "p.csv")
    assert said.code == 0, said.err
    assert "note" not in said.err
    return place


def numbers(path: Path) -> np.ndarray:
    return np.array([[float(row["mean"]), float(row["std"])] for row in rows_of(path)])


def check(trained: Path, new: Path, *, must_be_read: bool, columns: set[str]) -> None:
    """Either the predictions of the original, or exit code 2 with the name of a column."""
    out = new.parent / "p.csv"
    said = bayesify("predict", trained / "run", new, "--out", out)
    if said.code == 0:
        found, original = numbers(out), numbers(trained / "p.csv")
        assert found[:, 0] == pytest.approx(original[:, 0], rel=1e-4, abs=1e-4)
        # A row that is marked as outside has a wider distribution.
        flags = [
            [row["outside_training"] == "true" for row in rows_of(path)]
            for path in (out, trained / "p.csv")
        ]
        newly = np.array(flags[0]) & ~np.array(flags[1])
        assert found[~newly, 1] == pytest.approx(original[~newly, 1], rel=1e-4, abs=1e-4)
        assert (found[newly, 1] > original[newly, 1]).all()
    else:
        assert said.code == 2
        assert not out.exists()
        last = said.err.splitlines()[-1]
        assert any(f"the column {name!r} must hold" in last for name in columns), last
        assert not must_be_read, last


@pytest.mark.parametrize("case", REWRITTEN)
def test_a_rewritten_table_is_read_right_or_not_at_all(
    trained: Path, tmp_path: Path, case: str
) -> None:
    rewrite, must_be_read = REWRITTEN[case]
    rows = table()
    others = rewrite(rows)
    _write(tmp_path / "new.csv", written(others))
    changed = {n for n in COLUMNS if [r[n] for r in rows] != [r[n] for r in others]}
    check(trained, tmp_path / "new.csv", must_be_read=must_be_read, columns=changed)


@pytest.mark.parametrize("case", FILES)
def test_the_kind_of_file_makes_no_difference(trained: Path, tmp_path: Path, case: str) -> None:
    new = tmp_path / ("new.parquet" if "parquet" in case else "new.csv")
    FILES[case](table(), new)
    check(trained, new, must_be_read=True, columns=set())


def test_lenient_goes_on_and_says_so(trained: Path, tmp_path: Path) -> None:
    rows = each(price=grouped("."), when=months_first)(table())
    _write(tmp_path / "new.csv", written(rows))
    command = ("predict", trained / "run", tmp_path / "new.csv", "--out", tmp_path / "p.csv")
    said = bayesify(*command)
    assert said.code == 2
    assert "the column 'when' must hold dates as dd/mm/yyyy" in said.err
    assert "which are mm/dd/yyyy; write them as YYYY-MM-DD (and 1 more such column)" in said.err
    assert said.err.endswith("or go on with --lenient\n")
    said = bayesify(*command, "--lenient")
    assert said.code == 0
    for name in ("when", "price"):
        assert f"note: --lenient reads on: the column {name!r} must hold" in said.err
    outside = [row["outside_training"] for row in rows_of(tmp_path / "p.csv")]
    assert outside.count("true") > 60


def test_a_few_strange_cells_lie_outside_and_are_named(trained: Path, tmp_path: Path) -> None:
    rows = table()
    rows[3]["size"] = rows[7]["size"] = "much"
    rows[5]["when"] = "soon"
    _write(tmp_path / "new.csv", written(rows))
    out = tmp_path / "p.csv"
    said = bayesify("predict", trained / "run", tmp_path / "new.csv", "--out", out)
    assert said.code == 0, said.err
    assert (
        "note: size: 2 cells like 'much' lie outside, for training has numbers with a" in said.err
    )
    assert (
        "note: when: 1 cell like 'soon' lies outside, for training has dates as dd/mm" in said.err
    )
    columns = [row["outside_column"] for row in rows_of(out)]
    assert {place: name for place, name in enumerate(columns) if name} == {
        3: "size",
        5: "when",
        7: "size",
    }


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_short_tables(trained: Path, tmp_path: Path, rows: int) -> None:
    """All days are at most 12: either order of day and month is possible, and this is said."""
    short = [{**row, "when": f"0{1 + i}/07/2023"} for i, row in enumerate(table()[:rows])]
    new, out = tmp_path / "new.csv", tmp_path / "p.csv"
    _write(new, written(short))
    said = bayesify("predict", trained / "run", new, "--out", out)
    assert said.code == 0, said.err
    assert "when: dates read as dd/mm/yyyy, as in training, though all fit mm/dd/yyyy" in said.err
    _write(new, written([{**row, "size": "much"} for row in short]))
    said = bayesify("predict", trained / "run", new, "--out", out, "--force")
    assert said.code == 2
    assert f"as in training, got {rows} of {rows} cells like 'much'; write them" in said.err


def test_dates_that_fit_training_the_other_way_round_are_refused(tmp_path: Path) -> None:
    """Training's are all on the first of a month, and so are those of the US file, read so."""
    first = [f"01/{1 + i % 12:02d}/{2018 + i // 12 % 6}" for i in range(72)]
    rows = [{"when": day, "y": str(0.37 * i % 7)} for i, day in enumerate(first)]
    # One day that shows the order.
    rows.append({"when": "13/01/2018", "y": "1.5"})
    _write(tmp_path / "old.csv", written(rows))
    run, new, out = tmp_path / "run", tmp_path / "new.csv", tmp_path / "p.csv"
    said = bayesify("train", tmp_path / "old.csv", "--target", "y", "--out", run, *QUICK)
    assert said.code == 0, said.err
    _write(new, "when\n02/01/2019\n03/01/2020\n")
    said = bayesify("predict", run, new, "--out", out)
    assert said.code == 2
    assert "which fit training's dates better as mm/dd/yyyy; write them as YYYY-MM-DD" in said.err
    _write(new, "when\n01/02/2019\n01/03/2020\n")
    assert bayesify("predict", run, new, "--out", out).code == 0


def test_a_format_that_the_first_rows_do_not_show(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rows are read too before anything is written."""
    monkeypatch.setattr("bayesify.tabular.drift.column_cells._MOST_TEXTS", 20)
    monkeypatch.setattr("bayesify.tabular.files.table_file.CHUNK_ROWS", 16)
    rows = each(size=comma)(table())
    _write(tmp_path / "new.csv", written(rows))
    check(trained, tmp_path / "new.csv", must_be_read=True, columns=set())
    (tmp_path / "p.csv").unlink()
    for row in rows[-30:]:
        row["size"] = row["size"].replace(",", "*")
    _write(tmp_path / "new.csv", written(rows))
    said = bayesify("predict", trained / "run", tmp_path / "new.csv", "--out", tmp_path / "p.csv")
    assert said.code == 2
    assert "the column 'size' must hold numbers with a decimal point" in said.err


def test_force_overwrites_but_never_the_input(trained: Path, tmp_path: Path) -> None:
    new, out = tmp_path / "new.csv", tmp_path / "p.csv"
    shutil.copy(trained / "old.csv", new)
    out.write_text("mine")
    said = bayesify("predict", trained / "run", new, "--out", out)
    assert said.code == 2
    assert "or overwrite it with --force" in said.err
    assert out.read_text() == "mine"
    assert bayesify("predict", trained / "run", new, "--out", out, "--force").code == 0
    assert numbers(out) == pytest.approx(numbers(trained / "p.csv"))
    said = bayesify("predict", trained / "run", new, "--out", new, "--force")
    assert said.code == 2
    assert "is the input; choose another file with --out" in said.err
    shutil.copy(new, tmp_path / "new2.csv")
    before = new.read_bytes()
    said = bayesify("predict", trained / "run", tmp_path / "new*.csv", "--out", new, "--force")
    assert said.code == 2
    assert "is a file of the input; choose another file with --out" in said.err
    assert new.read_bytes() == before
    said = bayesify("predict", trained / "run", new, "--out", tmp_path, "--force")
    assert "is a folder; choose a file with --out" in said.err


def test_infinite_cells_that_training_had_are_read_again(tmp_path: Path) -> None:
    rows = [f"{'inf' if i % 4 == 0 else i % 7 + 0.5},{i % 13}" for i in range(80)]
    _write(tmp_path / "t.csv", "\n".join(["r,y", *rows]) + "\n")
    run = tmp_path / "run"
    options = ["--target", "y", "--task", "regression", "--out", run, *QUICK]
    assert bayesify("train", tmp_path / "t.csv", *options).code == 0
    said = bayesify("predict", run, tmp_path / "t.csv", "--out", tmp_path / "p.csv")
    assert said.code == 0, said.err
    assert len(numbers(tmp_path / "p.csv")) == 80
    assert bayesify("evaluate", run, tmp_path / "t.csv").code == 0


def test_infinite_cells_that_training_did_not_have_are_an_error(tmp_path: Path) -> None:
    rows = [f"{'' if i % 9 == 0 else i % 7 + 0.5},{i % 13}" for i in range(80)]
    _write(tmp_path / "t.csv", "\n".join(["r,y", *rows]) + "\n")
    run = tmp_path / "run"
    options = ["--target", "y", "--task", "regression", "--out", run, *QUICK]
    assert bayesify("train", tmp_path / "t.csv", *options).code == 0
    _write(tmp_path / "new.csv", "r,y\n" + "inf,1\n" * 40)
    said = bayesify("predict", run, tmp_path / "new.csv", "--out", tmp_path / "p.csv")
    assert said.code == 2
    assert "got 40 of 40 cells like 'inf'" in said.err


def test_a_recorded_target_beyond_its_limit_counts_as_the_limit(tmp_path: Path) -> None:
    rows = [f"{i % 13},{1e30 if i == 5 else i % 11}" for i in range(80)]
    _write(tmp_path / "t.csv", "\n".join(["x,y", *rows]) + "\n")
    out = tmp_path / "run"
    options = ["--likelihood", "censored", "--censored-above", "9", "--out", out, *QUICK]
    said = bayesify("train", tmp_path / "t.csv", "--target", "y", *options)
    assert said.code == 0, said.err


def test_a_target_of_which_most_values_are_0_but_for_rounding_is_trained_on(tmp_path: Path) -> None:
    """Its interquartile range is 1e-17."""
    low = (0.0, 0.1 + 0.2 - 0.3)
    rows = [f"{i % 13},{50 + i % 80 if i % 5 == 0 else low[i % 2]}" for i in range(100)]
    _write(tmp_path / "t.csv", "\n".join(["x,y", *rows]) + "\n")
    out = tmp_path / "run"
    options = ["--target", "y", "--task", "regression", "--out", out, *QUICK]
    said = bayesify("train", tmp_path / "t.csv", *options)
    assert said.code == 0, said.err


@pytest.mark.parametrize(
    ("wild", "code", "message"),
    [
        ("1e300", 2, "the target 'y' must be at most 1e+150 in size, got 1e+300 in row 3"),
        ("-3.4028235e38", 2, "must be within 1e+18 standard deviations of the others"),
        ("1e12", 0, "the target 'y' is 1e+12 in row 3, where half of the rows are within"),
    ],
)
def test_wild_targets(tmp_path: Path, wild: str, code: int, message: str) -> None:
    rows = [f"{i * 0.31},{i * 0.7}" for i in range(40)]
    rows[2] = f"0.1,{wild}"
    _write(tmp_path / "t.csv", "\n".join(["x,y", *rows]) + "\n")
    out = tmp_path / "run"
    said = bayesify("train", tmp_path / "t.csv", "--target", "y", "--out", out, *QUICK)
    assert said.code == code, said.err
    assert message in said.err
    assert out.exists() == (code == 0)
