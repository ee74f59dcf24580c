"""IDX arrays, images with their labels, and the catalogue of images."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.places import LABELS, PIXELS, Places, idx

from bayesify.datasets import (
    IMAGE_DATASETS,
    DataError,
    DataSet,
    find_test_inputs,
    load_images,
    parse_idx,
)


def test_idx_values_come_out_in_their_order() -> None:
    tensor = parse_idx(idx((2, 1, 3), bytes([0, 1, 2, 253, 254, 255])), num_dims=3)
    assert tensor.dtype == torch.uint8
    assert tensor.tolist() == [[[0, 1, 2]], [[253, 254, 255]]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begin with 00000801 .* got nothing"),
        (idx((3,), b"abc", kind=9), "begin with 00000801 .* got 00000901"),
        (b"\1" + idx((3,), b"abc")[1:], "begin with 00000801 .* got 01000801"),
        (idx((3, 1), b"abc"), "1 dimensions.* got 00000802"),
        (idx((3,), b"abc")[:6], "header of 8 bytes, got 6"),
        (idx((0,), b""), r"not be empty, got shape \(0,\)"),
        (idx((3,), b"ab"), r"hold 3 values .* got 2"),
        (idx((3,), b"abcd"), r"hold 3 values .* got 4"),
        (idx((2**32 - 1,), b"abcd"), r"hold 4294967295 values .* got 4"),
    ],
)
def test_idx_faults_are_named(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"^labels.gz must .*{message}"):
        parse_idx(content, num_dims=1, source="labels.gz")


def test_images_are_pixels_over_126_with_their_labels(
    make_tiny: Callable[[dict[str, bytes]], DataSet],
) -> None:
    make_tiny({})
    data = load_images("tiny")
    assert (data.name, data.image_shape, data.pixel_scale) == ("tiny", (28, 28), 126.0)
    assert data.class_names == tuple("abcdefghij")
    assert data.train_inputs.dtype == torch.float32
    expected = torch.tensor(list(PIXELS), dtype=torch.float32).view(256, 784) / 126
    assert torch.equal(data.train_inputs, expected)
    assert torch.equal(data.test_inputs, expected[:2])
    assert data.train_targets.tolist() == list(LABELS)
    assert data.test_targets.tolist() == [9, 0]
    assert data.train_targets.dtype == data.test_targets.dtype == torch.int64


def test_limit_keeps_the_first_training_images(
    make_tiny: Callable[[dict[str, bytes]], DataSet],
) -> None:
    make_tiny({})
    whole, part = load_images("tiny"), load_images("tiny", limit=3)
    assert torch.equal(part.train_inputs, whole.train_inputs[:3])
    assert torch.equal(part.train_targets, whole.train_targets[:3])
    assert torch.equal(part.test_inputs, whole.test_inputs)
    assert len(load_images("tiny", limit=256).train_inputs) == 256
    with pytest.raises(DataError, match=r"at most 256, .* of tiny, got 257"):
        load_images("tiny", limit=257)
    for limit in (0, -1):
        with pytest.raises(DataError, match=f"at least 1, got {limit}"):
            load_images("tiny", limit=limit)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train-labels": idx((256,), LABELS[:250] + b"\x0a\xff" + LABELS[252:])},
            r"train-labels.gz must hold labels from 0 to 9, got 2 .*, the first 10 at index 250",
        ),
        (
            {"test-labels": idx((3,), bytes(3))},
            r"test-images.gz and .*test-labels.gz must hold as many .* got 2 and 3",
        ),
        (
            {"test-images": idx((2, 28, 27), bytes(2 * 28 * 27))},
            r"test-images.gz must hold images of \(28, 28\) pixels, got \(28, 27\)",
        ),
        ({"train-images": idx((256,), LABELS)}, r"train-images.gz must begin with 00000803"),
        ({"train-labels": idx((256, 1), LABELS)}, r"train-labels.gz must begin with 00000801"),
    ],
)
def test_files_that_do_not_match_are_named(
    make_tiny: Callable[[dict[str, bytes]], DataSet], changes: dict[str, bytes], message: str
) -> None:
    make_tiny(changes)
    with pytest.raises(DataError, match=message):
        load_images("tiny")


@pytest.mark.parametrize("missing", ["test-images", "test-labels"])
def test_test_inputs_need_images_and_labels(
    make_tiny: Callable[[dict[str, bytes]], DataSet], places: Places, missing: str
) -> None:
    make_tiny({})
    assert find_test_inputs("tiny") is not None
    (places.env / "tiny" / f"{missing}.gz").unlink()
    assert find_test_inputs("tiny") is None


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(DataError, match=r"'emnist'; known are mnist, fashion-mnist$") as caught:
        load_images("emnist")
    assert isinstance(caught.value, ValueError)


def test_the_repositorys_mnist_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only the checkout can have it: BAYESIFY_DATA is not set and the cache is empty.
    monkeypatch.delenv("BAYESIFY_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(
        IMAGE_DATASETS,
        "mnist",
        replace(
            IMAGE_DATASETS["mnist"],
            files=tuple(replace(file, addresses=()) for file in IMAGE_DATASETS["mnist"].files),
        ),
    )
    data = load_images("mnist")
    assert data.train_inputs.shape == (60000, 784)
    assert data.test_inputs.shape == (10000, 784)
    assert float(data.train_inputs.min()) == 0.0
    assert data.train_inputs.max() == torch.tensor(255 / 126)
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert data.train_targets.bincount().tolist() == counts
    assert data.test_targets[:5].tolist() == [7, 2, 1, 0, 4]
    # The usual mean and standard deviation of MNIST's pixels.
    pixels = data.train_inputs * (data.pixel_scale / 255)
    assert float(pixels.mean()) == pytest.approx(0.1307, abs=5e-5)
    assert float(pixels.std()) == pytest.approx(0.3081, abs=5e-5)


def test_the_catalogue_is_complete() -> None:
    assert list(IMAGE_DATASETS) == ["mnist", "fashion-mnist"]
    checksums = set()
    for name, dataset in IMAGE_DATASETS.items():
        assert dataset.name == name
        assert len(dataset.class_names) == 10
        assert len(dataset.files) == 4
        for file in dataset.files:
            checksums.add(file.sha256)
            assert file.dataset == name
            assert len(bytes.fromhex(file.sha256)) == 32
            assert len(file.addresses) == 2
            assert all(address.endswith(f"/{file.name}.gz") for address in file.addresses)
    assert len(checksums) == 8
    debian = (Path("/usr/share/datasets/fashion-mnist"),)
    for file in IMAGE_DATASETS["fashion-mnist"].files:
        assert file.system_directories == debian
        assert file.package == "dataset-fashion-mnist"
