"""Text that is not UTF-8: Windows-1252 where it can be, else Latin-1; runs of earlier versions."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bayesify.tabular.files import open_table
from bayesify.tabular.new_table import NewTable
from bayesify.tabular.schema import TableSchema
from bayesify.tabular.training_table import fit_table, load_table

KINDS = ("5 €", "a \N{EN DASH} b", "“c”")


def write(path: Path, encoding: str, kinds: tuple[str, ...] = KINDS) -> Path:
    rows = "".join(f"{kinds[i % len(kinds)]},{i * 0.7}\n" for i in range(30))
    path.write_bytes(("größe €,y\n" + rows).encode(encoding))
    return path


def test_windows_1252_keeps_its_characters(tmp_path: Path) -> None:
    _, schema = fit_table(write(tmp_path / "a.csv", "cp1252"), "y")
    assert schema.features == tuple(f"größe € = {kind}" for kind in sorted(KINDS))
    assert schema.remarks[0] == (
        "the file is not UTF-8 and was read as Windows-1252; if names look wrong, save it as UTF-8"
    )


@pytest.mark.parametrize("byte", [0x81, 0x8D, 0x8F, 0x90, 0x9D])
def test_what_windows_1252_lacks_is_latin_1(tmp_path: Path, byte: int) -> None:
    path = tmp_path / "a.csv"
    rows = b"".join(b"%c\xe9,%d\n" % (byte, i) for i in range(30))
    path.write_bytes(b"x,y\n" + rows)
    file = open_table(path)
    assert next(file.chunks())["x"][0] == chr(byte) + "é"
    assert "was read as Latin-1" in file.remarks[0]


def as_before(schema: TableSchema, path: Path) -> TableSchema:
    """The schema that an earlier version fitted, which read the file as Latin-1."""
    columns = [name.encode("cp1252").decode("latin-1") for name in schema.source["columns"]]
    source = {"path": str(path), "sha256": schema.source["sha256"], "columns": columns}
    column = dataclasses.replace(
        schema.columns[0],
        name=columns[0],
        levels=tuple(each.encode("cp1252").decode("latin-1") for each in schema.columns[0].levels),
    )
    remark = schema.remarks[0].replace("Windows-1252", "Latin-1")
    old = dataclasses.replace(schema, columns=(column,), source=source, remarks=(remark,))
    return TableSchema.from_json(old.to_json())


def test_runs_of_earlier_versions_read_their_files_as_they_did(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "cp1252")
    data, schema = fit_table(path, "y")
    old = as_before(schema, path)
    assert (load_table(path, old).train_inputs == data.train_inputs).all()
    rows = list(NewTable.open(path, old))
    assert not any(part.outside.any() for part in rows)
    assert (load_table(path, schema).train_inputs == data.train_inputs).all()
    assert not any(part.outside.any() for part in NewTable.open(path, schema))


def test_new_tables_may_be_in_another_encoding(tmp_path: Path) -> None:
    _, schema = fit_table(write(tmp_path / "a.csv", "cp1252"), "y")
    new = write(tmp_path / "b.csv", "utf-8")
    assert not any(part.outside.any() for part in NewTable.open(new, schema))


def test_names_with_commas_and_numbers_with_decimal_commas_are_separated_by_semicolons(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.csv"
    path.write_text(
        "Temperatur, °C;Druck, bar;Klasse\n20,4;0,93;gut\n21,7;1,04;schlecht\n", encoding="utf-8"
    )
    table = open_table(path)
    assert table.columns == ("Temperatur, °C", "Druck, bar", "Klasse")
    (rows,) = table.batches()
    assert rows.texts("Druck, bar").tolist() == ["0,93", "1,04"]
    path.write_text("Temperatur, °C;Druck\n20,4;0,93\n21,7;1,04\n", encoding="utf-8")
    assert open_table(path).columns == ("Temperatur, °C", "Druck")
    for text, names in (
        ("a,b,c\n1;2,3;4,5\n6;7,8;9,0\n", ("a", "b", "c")),
        ('name,"lat;lon"\na,"1.0;2.0"\nb,"3.0;4.0"\n', ("name", "lat;lon")),
        ("id,a|b\n1,x|y\n2,z|w\n", ("id", "a|b")),
        ("k;l,a\nx;1,2.5\ny;3,4.5\n", ("k;l", "a")),
    ):
        path.write_text(text, encoding="utf-8")
        assert open_table(path).columns == names
