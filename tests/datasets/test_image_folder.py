"""Folders of images: what is read, how it becomes an input, what is held out."""

from __future__ import annotations

import dataclasses
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from bayesify.datasets import (
    DataError,
    FolderData,
    ImageSchema,
    find_images_and_remarks,
    find_labelled_images,
    fit_labelled_images,
    load_labelled_images,
    open_image,
)
from bayesify.datasets.image_files import image_kind


def fit(folder: Path, **options: Any) -> tuple[FolderData, ImageSchema]:
    return fit_labelled_images(find_labelled_images(folder), **options)


def write(
    folder: Path, shape: tuple[int, ...] = (6, 6), counts: tuple[int, ...] = (10, 20)
) -> Path:
    random = np.random.default_rng(1)
    for label, count in enumerate(counts):
        (folder / f"class-{label}").mkdir(parents=True)
        for place in range(count):
            pixels = random.integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"class-{label}" / f"{place:03d}.png")
    return folder


def test_inputs_are_standardised_by_channel(tmp_path: Path) -> None:
    data, schema = fit(write(tmp_path / "a", (6, 6, 3)))
    images = data.train_inputs.unflatten(1, schema.image_shape).transpose(0, 1).flatten(1)
    assert torch.allclose(images.mean(1), torch.zeros(3), atol=1e-5)
    assert torch.allclose(images.std(1), torch.ones(3), atol=1e-5)
    path = find_images_and_remarks(tmp_path / "a")[0][0]
    pixels = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1) / 255.0
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in (schema.mean, schema.std))
    assert torch.allclose(schema.inputs([path]), ((pixels - mean) / std).flatten()[None], atol=1e-5)


def test_numbers_of_numpy_can_be_saved(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", (6, 6))
    _, schema = fit(folder, seed=np.int64(3), test_fraction=np.float32(0.25))
    schema.save(tmp_path)
    assert type(schema).load(tmp_path) == fit(folder, seed=3, test_fraction=0.25)[1]


@pytest.mark.parametrize(
    ("shape", "size", "expected"),
    [
        ((6, 6), None, (1, 6, 6)),
        ((6, 6, 3), None, (3, 6, 6)),
        ((6, 8), None, (1, 32, 32)),
        ((40, 40), None, (1, 32, 32)),
        ((40, 40), 12, (1, 12, 12)),
    ],
)
def test_size_and_channels(
    shape: tuple[int, ...], size: int | None, expected: tuple[int, ...], tmp_path: Path
) -> None:
    data, schema = fit(write(tmp_path / "a", shape, (3, 3)), size=size)
    assert data.image_shape == schema.image_shape == expected
    assert data.train_inputs.shape[1] == np.prod(expected)


def test_the_middle_square_counts(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", (4, 4), (3, 3))
    _, schema = fit(folder)
    pixels = np.zeros((4, 12), dtype=np.uint8)
    pixels[:, 4:8] = 200
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    Image.fromarray(pixels[:, 4:8]).save(tmp_path / "middle.png")
    wide, middle = schema.inputs([tmp_path / "wide.png", tmp_path / "middle.png"])
    assert torch.equal(wide, middle)


def test_an_image_is_turned_as_its_camera_said(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", (4, 4), (3, 3))
    _, schema = fit(folder)
    image = Image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4) * 16)
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    image.save(tmp_path / "turned.png", exif=exif)
    image.rotate(180).save(tmp_path / "plain.png")
    turned, plain = schema.inputs([tmp_path / "turned.png", tmp_path / "plain.png"])
    assert torch.equal(turned, plain)


@pytest.mark.parametrize("kind", ["jpg", "png", "webp"])
def test_a_turned_image_with_an_odd_tag_is_read(tmp_path: Path, kind: str) -> None:
    """Pillow writes all EXIF data again as it turns an image, and cannot write such a one."""

    def entry(tag: int, form: int, count: int, value: bytes) -> bytes:
        return struct.pack("<HHI4s", tag, form, count, value)

    exif = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", 2)
    exif += entry(0x0112, 3, 1, struct.pack("<HH", 6, 0))  # turned by a quarter
    exif += entry(0x0128, 2, 4, b"72\0\0") + bytes(4)  # the unit of resolution as a text
    image = Image.new("L", (8, 4))
    image.save(tmp_path / f"odd.{kind}", exif=exif)
    assert open_image(tmp_path / f"odd.{kind}").size == (4, 8)


def test_any_error_of_pillow_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("Failed to decode image")

    monkeypatch.setattr(Image, "open", broken)
    with pytest.raises(DataError, match=r"a\.avif cannot be read as an image \(RuntimeError: Fail"):
        open_image(tmp_path / "a.avif")
    monkeypatch.undo()
    Image.new("LAB", (4, 4)).save(tmp_path / "lab.tiff")
    with pytest.raises(DataError, match=r"lab\.tiff has pixels of mode LAB; save it with RGB"):
        open_image(tmp_path / "lab.tiff")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"test_fraction": 20}, ValueError, "test_fraction must lie strictly between 0 and 1"),
        ({"test_fraction": 1.0}, ValueError, "test_fraction must lie strictly between 0 and 1"),
        ({"test_fraction": math.nan}, ValueError, "test_fraction must lie strictly between"),
        ({"limit": 0}, ValueError, "limit must be at least 1, got 0"),
        ({"limit": 1.5}, TypeError, "limit must be a whole number"),
        ({"size": 0}, ValueError, "size must be at least 1, got 0"),
    ],
)
def test_numbers_out_of_range(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    folder = write(tmp_path / "a", (4, 4), (3, 3))
    with pytest.raises(error, match=message):
        fit(folder, **options)


def test_sixteen_bits_are_not_clipped(tmp_path: Path) -> None:
    _, schema = fit(write(tmp_path / "a", (4, 4), (3, 3)))
    bytes_ = np.arange(16, dtype=np.uint8).reshape(4, 4) * 17
    Image.fromarray(bytes_).save(tmp_path / "8.png")
    Image.fromarray(bytes_.astype(np.uint16) * 257).save(tmp_path / "16.png")
    words = (bytes_.astype(">u2") * 257).astype(">u2").tobytes()
    (tmp_path / "16.pgm").write_bytes(b"P5 4 4 65535\n" + words)
    eight, *sixteen = schema.inputs([tmp_path / name for name in ("8.png", "16.png", "16.pgm")])
    assert all(torch.equal(eight, each) for each in sixteen)
    order = tmp_path / "16.tiff"  # of which Pillow tells that its bytes are in the other order
    Image.frombytes("I;16B", (4, 4), words).save(order)
    assert torch.equal(schema.inputs([order])[0], eight)
    for name in ("8.png", "16.png", "16.pgm", "16.tiff"):
        assert image_kind(tmp_path / name) == (4, 4, False)
    Image.fromarray(np.ones((4, 4), dtype=np.float32)).save(tmp_path / "float.tiff")
    with pytest.raises(
        DataError, match=r"float\.tiff has pixels of mode F, whose range is not known"
    ):
        schema.inputs([tmp_path / "float.tiff"])


def test_what_is_transparent_becomes_white(tmp_path: Path) -> None:
    _, schema = fit(write(tmp_path / "a", (4, 4, 3), (3, 3)))
    pixels = np.zeros((4, 4, 4), dtype=np.uint8)
    pixels[0, 0] = (200, 30, 9, 255)
    Image.fromarray(pixels).save(tmp_path / "clear.png")
    pixels[pixels[..., 3] == 0] = 255
    Image.fromarray(pixels[..., :3]).save(tmp_path / "white.png")
    clear, white = schema.inputs([tmp_path / "clear.png", tmp_path / "white.png"])
    assert torch.equal(clear, white)


def test_each_class_is_on_either_side(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", counts=(10, 20, 2))
    data, schema = fit(folder, test_fraction=0.2)
    assert data.test_targets.bincount().tolist() == [2, 4, 1]
    assert data.train_targets.bincount().tolist() == [8, 16, 1]
    assert (schema.split["train"], schema.split["test"]) == (25, 7)
    everything = torch.cat([data.train_inputs, data.test_inputs])
    assert len(everything.unique(dim=0)) == 32


def test_the_split_is_a_function_of_the_seed(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    (one, _), (same, _), (other, _) = (fit(folder, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.test_inputs, same.test_inputs)
    assert not torch.equal(one.test_targets, other.test_targets) or not torch.allclose(
        one.test_inputs, other.test_inputs
    )


def test_names_that_are_not_utf_8_are_read_again(tmp_path: Path) -> None:
    schema = fit(write(tmp_path / "a"))[1]
    # As the operating system's functions give the name of a folder in Latin-1.
    schema = dataclasses.replace(schema, classes=("caf\udce9", "tea"))
    schema.save(tmp_path)
    assert ImageSchema.load(tmp_path) == schema
    images = find_labelled_images(tmp_path / "a")
    named = dataclasses.replace(images, keys=tuple(f"{key}\udce9" for key in images.keys))
    assert named.sha256() != images.sha256()


@pytest.mark.parametrize("limit", [None, 7])
def test_the_same_data_are_read_again(limit: int | None, tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    data, schema = fit(folder, limit=limit)
    schema.save(tmp_path)
    again = ImageSchema.load(tmp_path)
    assert again == schema
    loaded = load_labelled_images(find_labelled_images(folder), again)
    assert len(data.train_targets) == (limit or 24)
    for name in ("train_inputs", "train_targets", "test_inputs", "test_targets"):
        assert torch.equal(getattr(loaded, name), getattr(data, name)), name


def test_an_altered_schema_is_an_error(tmp_path: Path) -> None:
    fit(write(tmp_path / "a"))[1].save(tmp_path)
    file = tmp_path / "images.json"
    file.write_text(file.read_text().replace('"mean": [\n  0.', '"mean": [\n  1.'))
    with pytest.raises(DataError, match=r"images\.json cannot be read: it was altered after it"):
        ImageSchema.load(tmp_path)


def test_an_empty_subfolder_is_no_class(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    (folder / "nothing").mkdir()
    data, schema = fit(folder)
    assert data.class_names == ("class-0", "class-1")
    assert schema.remarks == ("nothing has no images and is no class",)


def test_links_to_folders_are_followed(tmp_path: Path) -> None:
    write(tmp_path / "a", counts=(3, 4))
    folder = write(tmp_path / "b", counts=(5,))
    (folder / "class-1").symlink_to(tmp_path / "a" / "class-1")
    (folder / "class-0" / "more").symlink_to(tmp_path / "a" / "class-0")
    (folder / "class-0" / "back").symlink_to(folder)
    (folder / "class-0" / "above").symlink_to(tmp_path)
    # Two links that lead to each other.
    (folder / "class-0" / "there").symlink_to(tmp_path / "c")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "back").symlink_to(folder / "class-0")
    found, _ = find_images_and_remarks(folder)
    assert found == sorted(found)
    names = [path.relative_to(folder).as_posix() for path in found]
    assert names == [
        *(f"class-0/{place:03d}.png" for place in range(5)),
        *(f"class-0/more/{place:03d}.png" for place in range(3)),
        *(f"class-1/{place:03d}.png" for place in range(4)),
    ]
    data, schema = fit(folder)
    assert schema.classes == ("class-0", "class-1")
    assert len(data.train_targets) + len(data.test_targets) == 12


def test_files_of_other_kinds_are_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    for name in ("class-0/a.heic", "class-1/b.HEIC", "notes", "Thumbs.db", "desktop.ini", ".x.y"):
        (folder / name).touch()
    _, schema = fit(folder)
    remark = "3 files without the suffix of an image are left out: 2 .heic, 1 without suffix"
    assert schema.remarks == (remark,)
    (tmp_path / "phone").mkdir()
    (tmp_path / "phone" / "a.heic").touch()
    with pytest.raises(DataError, match=r"has none; 1 file without .* is left out: 1 \.heic"):
        find_images_and_remarks(tmp_path / "phone")


@pytest.mark.parametrize("suffix", [".avif", ".jp2", ".tga", ".pbm"])
def test_what_pillow_reads_is_found(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    Image.new("1" if suffix == ".pbm" else "RGB", (16, 16)).save(path)
    assert find_images_and_remarks(tmp_path)[0] == [path]


def test_reading_tells_how_far_it_is(tmp_path: Path) -> None:
    said: list[tuple[int, int]] = []
    fit(write(tmp_path / "a"), on_images=lambda *counts: said.append(counts))
    assert said == [(place, 30) for place in range(1, 31)]
