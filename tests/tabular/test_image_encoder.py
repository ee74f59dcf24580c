"""The features of images: a pretrained network's pooled output, or the mean of its last states."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.encoders import save_encoder, save_image_encoder

from bayesify.tabular.columns import ImageColumn, column_from_json
from bayesify.tabular.files import CellError, TableError
from bayesify.tabular.image_encoder import ImageEncoder, image_encoder

pytestmark = pytest.mark.filterwarnings("ignore:.*SwigPy|.*swigvarlink:DeprecationWarning")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder and ten images."""
    place = tmp_path_factory.mktemp("encoder")
    save_image_encoder(place / "net")
    random = np.random.default_rng(0)
    for number in range(10):
        pixels = random.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
    return place


def pixels_of(paths: list[Path]) -> object:
    import torch

    found = [np.asarray(Image.open(path), np.float32).transpose(2, 0, 1) for path in paths]
    return torch.from_numpy(np.stack(found) / 127.5 - 1.0)


@pytest.mark.parametrize("kind", ["vit", "vit with pooler", "resnet"])
def test_the_pooled_output_or_the_mean_of_the_states(
    kind: str, place: Path, tmp_path: Path
) -> None:
    import transformers

    folder = save_image_encoder(tmp_path / "net", kind=kind)
    paths = sorted(place.glob("*.png"))
    encoder = ImageEncoder(str(folder))
    found = encoder.features([Image.open(path) for path in paths])
    outputs = transformers.AutoModel.from_pretrained(folder).eval()(pixel_values=pixels_of(paths))
    pooled = outputs.last_hidden_state.mean(1) if kind == "vit" else outputs.pooler_output
    assert found.shape == (10, encoder.size) == (10, 8)
    assert np.allclose(found, pooled.flatten(1).detach().numpy(), atol=1e-5)


def test_grey_images_are_read(place: Path) -> None:
    grey = Image.open(place / "0.png").convert("L")
    encoder = ImageEncoder(str(place / "net"))
    assert np.allclose(*encoder.features([grey, grey.convert("RGB")]), atol=1e-6)


def test_the_digest_is_that_of_the_stored_weights(place: Path, tmp_path: Path) -> None:
    again = ImageEncoder(str(place / "net")).sha256  # the pooler is drawn anew
    assert ImageEncoder(str(place / "net")).sha256 == again
    other = save_image_encoder(tmp_path / "b", seed=1)
    assert ImageEncoder(str(other)).sha256 != again


def test_another_image_processor_of_the_same_weights_is_noticed(place: Path) -> None:
    draft = ImageColumn.of("path", str(place / "net")).within(place)
    other = shutil.copytree(place / "net", place / "other")
    moved = dataclasses.replace(draft, encoder=str(other))
    moved.check_network()
    path = other / "preprocessor_config.json"
    settings = {**json.loads(path.read_text()), "image_mean": [0.0] * 3}
    path.write_text(json.dumps(settings))
    image_encoder.cache_clear()
    with pytest.raises(TableError, match="must have the image processor of the training, with SH"):
        moved.parse(np.array(["0.png"], dtype=object))
    del (old := moved.to_json())["reader_sha256"]  # as earlier versions stored it
    column_from_json(old).within(place).parse(np.array(["0.png"], dtype=object))


def test_a_column_of_paths(place: Path) -> None:
    draft = ImageColumn.of("path", str(place / "net")).within(place)
    cells = np.array([*(f"{number}.png" for number in range(10)), "", " 3.png"], dtype=object)
    values = draft.parse(cells)
    assert values.shape == (12, 8)
    assert np.isnan(values[10]).all()
    assert np.array_equal(values[11], values[3])
    fitted = draft.fit(values)
    assert fitted.features[-1] == "path is missing"
    assert np.allclose(fitted.encode(values[:10])[:, :8].mean(0), 0.0, atol=0.2)
    assert not fitted.outside(values).any()
    far = np.asarray(fitted.means) + 20.0 * np.asarray(fitted.stds)
    assert fitted.outside(far[None])[0] > 1.0
    stored = fitted.to_json()
    assert "folder" not in stored
    assert column_from_json(stored).within(place) == fitted


def test_an_image_that_cannot_be_read_is_named_with_its_place(place: Path) -> None:
    column = ImageColumn.of("path", str(place / "net")).within(place)
    with pytest.raises(CellError, match="there is no image") as caught:
        column.parse(np.array(["1.png", "", "1.png", "none.png", "0.png"], dtype=object))
    assert caught.value.place == 3
    assert str(caught.value.in_row(Path("a.csv"), 101)).startswith("a.csv, row 104: there is no")


def test_what_is_no_image_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(TableError, match="model with an image processor and weights as safe"):
        ImageEncoder(str(tmp_path))
    texts = save_encoder(tmp_path / "texts")
    with pytest.raises(TableError, match="model with an image processor and weights as safe"):
        ImageEncoder(str(texts))
    images = save_image_encoder(tmp_path / "images")
    (texts / "preprocessor_config.json").write_text(
        (images / "preprocessor_config.json").read_text()
    )
    with pytest.raises(TableError, match="must be a model whose states follow from images alone"):
        ImageEncoder(str(texts))
