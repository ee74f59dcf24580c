"""A folder or a pattern of files is one table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from bayesify.tabular.columns.images import ImageColumn
from bayesify.tabular.files import TableError, open_table, table_file
from bayesify.tabular.image_table import check_images, read_image_table
from bayesify.tabular.training_table import fit_table, load_table


def table(rows: int = 60) -> pa.Table:
    generator = np.random.default_rng(0)
    numbers = generator.normal(size=(rows, 2))
    levels = pa.array(["a", "b", "c"] * (rows // 3)).dictionary_encode()
    columns = {"x": pa.array(numbers[:, 0]), "level": levels, "y": pa.array(numbers[:, 1])}
    return pa.table(columns)


def divided(folder: Path, whole: pa.Table, *, parts: int = 4) -> Path:
    """The table as several files, with others in the folder that are no tables."""
    folder.mkdir()
    size = -(-whole.num_rows // parts)
    for part in range(parts):
        parquet.write_table(whole.slice(part * size, size), folder / f"part-{part}.parquet")
    (folder / "_SUCCESS").write_text("")
    (folder / ".hidden.csv").write_text("x\n1\n")
    return folder


@pytest.mark.parametrize("pattern", ["", "*.parquet"])
def test_a_folder_reads_as_the_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    monkeypatch.setattr(table_file, "CHUNK_ROWS", 7)
    parquet.write_table(table(), tmp_path / "one.parquet")
    several = divided(tmp_path / "parts", table()) / pattern
    one, schema = fit_table(tmp_path / "one.parquet", "y")
    other, found = fit_table(several, "y")
    assert (found.columns, found.target) == (schema.columns, schema.target)
    assert found.remarks[0] == "4 files were read as one table"
    assert torch.equal(other.train_inputs, one.train_inputs)
    assert torch.equal(load_table(several, found).test_targets, one.test_targets)
    chunks = [len(rows) for rows in open_table(several).batches()]
    assert chunks == [7] * 8 + [4]
    assert [len(rows) for rows in open_table(several).batches(10)] == [7, 3]
    # Paths of images in its cells are relative to this folder.
    assert open_table(several).folder == tmp_path / "parts"


def test_a_changed_part_is_noticed(tmp_path: Path) -> None:
    several = divided(tmp_path / "parts", table())
    _, schema = fit_table(several, "y")
    parquet.write_table(table().slice(0, 9), several / "part-1.parquet")
    with pytest.raises(TableError, match="was changed after the run was made"):
        load_table(several, schema)


def test_a_column_that_files_store_differently_is_read_as_text(tmp_path: Path) -> None:
    several = divided(tmp_path / "parts", table())
    part = parquet.read_table(several / "part-1.parquet")
    texts = pa.array([f"{value!r}" for value in part["x"].to_pylist()])
    parquet.write_table(part.set_column(0, "x", texts), several / "part-1.parquet")
    rows = next(open_table(several).batches())
    assert rows.numbers("x") is None
    assert rows.numbers("y") is not None
    assert [float(text) for text in rows.texts("x")] == table()["x"].to_pylist()


def test_text_files_are_one_table_too(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x;y\n1;2\n3;4\n")
    (tmp_path / "b.csv").write_text("y;x\n6;5\n")
    rows = next(open_table(tmp_path).batches())
    assert rows.texts("x").tolist() == ["1", "3", "5"]
    assert open_table(tmp_path).num_rows is None


def test_files_that_are_no_table(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"holds no table: a folder must have files that end in"):
        open_table(tmp_path)
    with pytest.raises(TableError, match=r"no file matches .*a pattern such as"):
        open_table(tmp_path / "*.parquet")
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "b.csv").write_text("x,z\n1,2\n")
    with pytest.raises(TableError, match=r"must have the same columns, .* differ in 'y', 'z'"):
        open_table(tmp_path)
    (tmp_path / "b.csv").write_text("x;y\n1,5;2\n")
    with pytest.raises(TableError, match="must separate values alike"):
        open_table(tmp_path)


def test_memory_does_not_grow_with_the_row_groups(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    many = pa.table({f"x{place}": generator.normal(size=200_000) for place in range(8)})
    parquet.write_table(many, tmp_path / "t.parquet", row_group_size=2000)
    del many
    before = pa.total_allocated_bytes()
    used = []
    for rows in open_table(tmp_path / "t.parquet").batches(size=1500):
        used.append(pa.total_allocated_bytes() - before)
        assert len(rows) == 1500 or len(used) == 134
    assert len(used) == 134
    assert max(used) < 4_000_000


@pytest.mark.parametrize("folders", [("a", "a"), ("a", "b")])
def test_images_are_named_from_one_folder(tmp_path: Path, folders: tuple[str, str]) -> None:
    """Their paths are relative to the folder of the table."""
    for number, folder in enumerate(folders):
        (tmp_path / folder).mkdir(exist_ok=True)
        text = f"file,kind\n{number}.png,{'ab'[number]}\n"
        (tmp_path / folder / f"{number}.csv").write_text(text)
    pattern = tmp_path / "*" / "*.csv"
    if folders[0] == folders[1]:
        paths = read_image_table(pattern, image="file", target="kind").paths
        assert [path.relative_to(tmp_path).as_posix() for path in paths] == ["a/0.png", "a/1.png"]
        return
    with pytest.raises(TableError, match="that names images must lie in one folder"):
        read_image_table(pattern, image="file", target="kind")
    column = ImageColumn(name="file", encoder="", sha256="", size=1)
    with pytest.raises(TableError, match="that names images must lie in one folder"):
        check_images(open_table(pattern), [column])
    assert next(open_table(pattern).batches()).texts("file").tolist() == ["0.png", "1.png"]
