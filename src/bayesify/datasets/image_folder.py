"""Folder with one subfolder of images for each class."""

from __future__ import annotations

from pathlib import Path

from bayesify.datasets.files import DataError
from bayesify.datasets.image_files import find_images_and_remarks
from bayesify.datasets.labelled_images import LabelledImages

__all__ = ["find_labelled_images"]


def find_labelled_images(folder: Path) -> LabelledImages:
    """Return the images of a folder with one subfolder for each class.

    Args:
        folder: its subfolders have the names of the classes and hold the images.

    Raises:
        DataError: there is no such folder, it holds no image, or an image lies in no subfolder.

    Example:
        >>> find_labelled_images(Path("nowhere"))
        Traceback (most recent call last):
        bayesify.datasets.files.DataError: there is no folder nowhere
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    paths, left_out = find_images_and_remarks(folder)
    loose = [path for path in paths if path.parent == folder]
    if loose:
        raise DataError(
            f"each image must lie in a subfolder of {folder} that has the name of its class, but "
            f"{len(loose)} {'lie' if len(loose) > 1 else 'lies'} in none, such as {loose[0].name}"
        )
    inside = [path.relative_to(folder) for path in paths]
    labels = tuple(path.parts[0] for path in inside)
    empty = sorted(
        path.name
        for path in folder.iterdir()
        if path.is_dir() and path.name not in labels and not path.name.startswith(".")
    )
    return LabelledImages(
        folder,
        tuple(paths),
        labels,
        tuple(path.as_posix() for path in inside),
        remarks=(
            *(f"{name} has no images and is no class" for name in empty),
            *left_out,
        ),
    )
