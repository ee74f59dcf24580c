"""The nine regression tables: search, checks and published splits."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bayesify.datasets import (
    REGRESSION_DATASETS,
    DataError,
    load_images,
    load_regression,
    standard_splits,
)

REPOSITORY = Path(__file__).resolve().parents[2] / "datasets" / "regression"
#: Those that ship with the repository: rows, features, and the mean of the target.
SHIPPED = {
    "concrete": (1030, 8, 35.817961),
    "energy": (768, 8, 22.307201),
    "wine": (1599, 11, 5.636023),
    "yacht": (308, 6, 10.495357),
}


@pytest.fixture(autouse=True)
def only_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("the network was used")

    monkeypatch.delenv("BAYESIFY_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("requests.get", refuse)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_repositorys_tables_load(name: str) -> None:
    data = load_regression(name)
    rows, features, mean = SHIPPED[name]
    assert data.inputs.shape == (rows, features)
    assert data.targets.shape == (rows,)
    assert data.inputs.dtype == data.targets.dtype == np.float64
    assert data.targets.mean() == pytest.approx(mean, abs=1e-6)
    assert data.inputs.flags.c_contiguous


def test_the_notice_lists_what_lies_there() -> None:
    notice = (REPOSITORY / "NOTICE.md").read_text(encoding="utf-8")
    assert {path.name for path in REPOSITORY.iterdir()} == {
        "NOTICE.md",
        *(f"{name}.txt.gz" for name in SHIPPED),
    }
    for name in SHIPPED:
        raw = (REPOSITORY / f"{name}.txt.gz").read_bytes()
        assert hashlib.sha256(raw).hexdigest() in notice
        assert REGRESSION_DATASETS[name].files[0].sha256 in notice
        # The mirror's is not compressed.
        assert len(gzip.decompress(raw)) == REGRESSION_DATASETS[name].num_bytes


def test_the_catalogue_is_complete() -> None:
    checksums = {set_.files[0].sha256 for set_ in REGRESSION_DATASETS.values()}
    assert len(REGRESSION_DATASETS) == len(checksums) == 9
    for name, set_ in REGRESSION_DATASETS.items():
        (file,) = set_.files
        assert set_.name == file.dataset == name
        assert file.name == f"{name}.txt"
        assert set_.license in ("CC BY 4.0", "none stated")
        (address,) = file.addresses
        assert address.startswith("https://")
        assert address.endswith("/data/data.txt")
        assert not set_.class_names
    # In these two each number takes 16 bytes, and each row a line break.
    for name, rows, columns in (("kin8nm", 8192, 9), ("naval", 11_934, 18)):
        assert REGRESSION_DATASETS[name].num_bytes == rows * (16 * columns + 1)


def naval_like(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    digest = hashlib.sha256(text.encode()).hexdigest()
    known = REGRESSION_DATASETS["naval"]
    file = replace(known.files[0], sha256=digest, addresses=())
    monkeypatch.setitem(REGRESSION_DATASETS, "naval", replace(known, files=(file,)))


def test_naval_has_two_targets_of_which_the_first_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [" ".join(str(100 * row + column) for column in range(18)) for row in (1, 2)]
    text = "\n".join(rows) + "\n"
    naval_like(monkeypatch, text)
    (tmp_path / "naval.txt").write_text(text)
    data = load_regression("naval", tmp_path)
    assert data.inputs.tolist() == [[100.0 * row + c for c in range(16)] for row in (1, 2)]
    assert data.targets.tolist() == [116.0, 216.0]


@pytest.mark.parametrize("folder", ["regression", "uci-regression", "."])
def test_the_environment_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    place = tmp_path / "data" / folder
    place.mkdir(parents=True)
    content = gzip.decompress((REPOSITORY / "yacht.txt.gz").read_bytes())
    (place / "yacht.txt").write_bytes(content)
    monkeypatch.setenv("BAYESIFY_DATA", str(tmp_path / "data"))
    assert len(load_regression("yacht").targets) == 308
    # A wrong file there is not skipped for the repository's.
    (place / "yacht.txt").write_bytes(content.replace(b"0", b"1"))
    with pytest.raises(DataError, match=r"yacht\.txt.*must have SHA-256 00dfecc0"):
        load_regression("yacht")


def test_a_data_dir_is_the_only_place(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"with --data-dir nothing else is searched.*data get yacht"
    ):
        load_regression("yacht", tmp_path)


def test_names_are_checked() -> None:
    with pytest.raises(DataError, match="no data set 'mnist'; known are boston, concrete"):
        load_regression("mnist")
    with pytest.raises(DataError, match=r"'yacht'; known are mnist, fashion-mnist$"):
        load_images("yacht")


def test_numbers_must_be_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(["1"] * 17 + ["nan"]) + "\n"
    naval_like(monkeypatch, text)
    (tmp_path / "naval.txt").write_text(text)
    with pytest.raises(DataError, match="must hold finite numbers"):
        load_regression("naval", tmp_path)


def test_splits_are_the_published_ones() -> None:
    # By the published recipe, written out once more with the generator's own permutation:
    # choice(range(n), n, replace=False) is a permutation of n, and nothing is drawn between.
    generator = np.random.RandomState(1)
    for train, test in standard_splits(308, 20):
        order = generator.permutation(308)
        assert train.tolist() == order[:277].tolist()
        assert test.tolist() == order[277:].tolist()


@pytest.mark.parametrize(("rows", "train"), [(5, 4), (308, 277), (506, 455), (45730, 41157)])
def test_splits_part_the_rows(rows: int, train: int) -> None:
    for split in standard_splits(rows, 2):
        assert len(split.train) == train
        together = np.concatenate([split.train, split.test])
        assert np.array_equal(np.sort(together), np.arange(rows))


def test_more_splits_begin_with_the_same() -> None:
    few, many = standard_splits(30, 2), standard_splits(30, 5)
    for one, other in zip(few, many, strict=False):
        assert np.array_equal(one.test, other.test)
    assert not np.array_equal(many[0].test, many[1].test)


@pytest.mark.parametrize(("rows", "splits"), [(4, 20), (0, 1), (10, 0)])
def test_there_must_be_something_to_split(rows: int, splits: int) -> None:
    with pytest.raises(ValueError, match="num_data must be at least 5"):
        standard_splits(rows, splits)
