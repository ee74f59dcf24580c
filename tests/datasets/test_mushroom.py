"""The Mushroom data as they are shipped, catalogued and encoded."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bayesify.datasets import MUSHROOM, DataError, known_datasets, load_mushroom, mushroom

REPOSITORY = Path(__file__).resolve().parents[2] / "datasets" / "mushroom"
NAME = "agaricus-lepiota.data"


def test_the_repositorys_table_loads() -> None:
    data = load_mushroom()
    assert data.contexts.shape == (8124, 117)
    assert data.contexts.dtype == torch.float32
    assert data.contexts.is_contiguous()
    assert data.poisonous.shape == (8124,)
    assert data.poisonous.dtype == torch.bool
    assert int(data.poisonous.sum()) == 3916
    assert len(set(data.names)) == 117


def test_each_feature_is_one_hot_and_its_letters_are_the_files() -> None:
    data = load_mushroom()
    lines = gzip.decompress((REPOSITORY / f"{NAME}.gz").read_bytes()).decode().split()
    features = [name.partition("=")[0] for name in data.names]
    assert len(dict.fromkeys(features)) == 22
    for row in (0, 1, 4000, 8123):
        shown = data.contexts[row].nonzero().flatten().tolist()
        assert "".join(data.names[place][-1] for place in shown) == lines[row].replace(",", "")[1:]
        assert [features[place] for place in shown] == list(dict.fromkeys(features))
        assert bool(data.poisonous[row]) is lines[row].startswith("p")
    assert set(data.contexts.unique().tolist()) == {0.0, 1.0}


def test_an_unknown_root_is_a_value_of_its_own() -> None:
    data = load_mushroom()
    unknown = data.contexts[:, data.names.index("stalk-root=?")]
    assert int(unknown.sum()) == 2480


def test_it_is_known() -> None:
    assert known_datasets()["mushroom"] is MUSHROOM
    (file,) = MUSHROOM.files
    assert file.dataset == "mushroom"
    assert all(address.startswith("https://") for address in file.addresses)
    notice = (REPOSITORY / "NOTICE.md").read_text(encoding="utf-8")
    assert {path.name for path in REPOSITORY.iterdir()} == {"NOTICE.md", f"{NAME}.gz"}
    raw = (REPOSITORY / f"{NAME}.gz").read_bytes()
    assert hashlib.sha256(raw).hexdigest() in notice
    assert file.sha256 in notice
    assert len(gzip.decompress(raw)) == MUSHROOM.num_bytes  # the mirror's is not compressed


def test_another_directory_is_the_only_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=NAME):
        load_mushroom(tmp_path)
    (tmp_path / NAME).write_bytes(gzip.decompress((REPOSITORY / f"{NAME}.gz").read_bytes()))
    assert torch.equal(load_mushroom(tmp_path).contexts, load_mushroom().contexts)
    (tmp_path / NAME).write_bytes(b"p,x\n")
    with pytest.raises(DataError, match="is not the right file"):
        load_mushroom(tmp_path)


@pytest.mark.parametrize("text", ["", "p,x,s\n", "?" + ",x" * 22 + "\n"])
def test_a_table_of_another_form_raises(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.sha256(text.encode()).hexdigest()
    other = replace(MUSHROOM, files=(replace(MUSHROOM.files[0], sha256=digest),))
    monkeypatch.setattr(mushroom, "MUSHROOM", other)
    (tmp_path / NAME).write_text(text)
    with pytest.raises(DataError, match="lines of 23 letters, the first e or p"):
        load_mushroom(tmp_path)
