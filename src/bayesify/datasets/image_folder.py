"""Folder with one subfolder of images for each class."""

from __future__ import annotations

from pathlib import Path

from bayesify.datasets.files import DataError
from bayesify.datasets.image_files import find_images_and_remarks
from bayesify.datasets.labelled_images import (
    FolderData,
    ImageSchema,
    LabelledImages,
    OnImages,
    fit_labelled_images,
    load_labelled_images,
)

__all__ = ["find_labelled_images", "fit_image_folder", "load_image_folder"]


def find_labelled_images(folder: Path) -> LabelledImages:
    """Return the images of a folder with one subfolder for each class.

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


def fit_image_folder(
    folder: Path,
    *,
    size: int | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    limit: int | None = None,
    on_images: OnImages | None = None,
) -> tuple[FolderData, ImageSchema]:
    """Read a folder with one subfolder of images for each class, and hold out a part of each class.

    Args:
        folder: the folder; below a class's subfolder images may lie in others.
        size: height and width of an input; None keeps that of images that are all squares of one
            size of at most 32 pixels, and is 32 for others.
        test_fraction: part of each class that is held out, strictly between 0 and 1.
        seed: the held-out images are a function of it.
        limit: use only this number of training images.
        on_images: called as images are read.

    Raises:
        DataError: Pillow is not installed, the folder has no such subfolders, a class has fewer
            than two images, or an image cannot be read.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for place, name in enumerate(("dark/a", "dark/b", "light/a", "light/b")):
        ...         path = Path(folder, f"{name}.png")
        ...         path.parent.mkdir(exist_ok=True)
        ...         Image.new("L", (8, 8), 60 * place).save(path)
        ...     data, schema = fit_image_folder(Path(folder))
        >>> data.train_inputs.shape, data.class_names, schema.image_shape
        (torch.Size([2, 64]), ('dark', 'light'), (1, 8, 8))
    """
    return fit_labelled_images(
        find_labelled_images(folder),
        size=size,
        test_fraction=test_fraction,
        seed=seed,
        limit=limit,
        on_images=on_images,
    )


def load_image_folder(
    folder: Path, schema: ImageSchema, on_images: OnImages | None = None
) -> FolderData:
    """Read again the folder that a schema was fitted to: the same images, the same held-out part.

    Raises:
        DataError: the folder is missing, or has changed.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for place, name in enumerate(("dark/a", "dark/b", "light/a", "light/b")):
        ...         path = Path(folder, f"{name}.png")
        ...         path.parent.mkdir(exist_ok=True)
        ...         Image.new("L", (8, 8), 60 * place).save(path)
        ...     data, schema = fit_image_folder(Path(folder))
        ...     again = load_image_folder(Path(folder), schema)
        >>> bool((again.train_inputs == data.train_inputs).all())
        True
    """
    return load_labelled_images(find_labelled_images(folder), schema, on_images)
