"""The table of known data sets: checksums, mirrors, licences."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bayesify.datasets.files import DataError, DataFile

__all__ = ["IMAGE_DATASETS", "DataSet", "find_dataset"]


@dataclass(frozen=True)
class DataSet:
    """A data set as it is published.

    Args:
        name: what users call it.
        description: one line for a list.
        license: as its authors state it, or as it is usually quoted.
        num_bytes: of the download, compressed.
        class_names: of label 0, 1, ...
        files: for images: training images, training labels, test images, test labels.
    """

    name: str
    description: str
    license: str
    num_bytes: int
    class_names: tuple[str, ...]
    files: tuple[DataFile, ...]


def find_dataset(name: str) -> DataSet:
    """The data set called ``name``.

    Raises:
        DataError: there is none; the known ones are listed.

    Example:
        >>> find_dataset("mnist").num_bytes
        11594722
    """
    if name not in IMAGE_DATASETS:
        known = ", ".join(IMAGE_DATASETS)
        raise DataError(f"there is no data set {name!r}; known are {known}")
    return IMAGE_DATASETS[name]


def _idx_files(
    dataset: str,
    sha256: tuple[str, str, str, str],
    *,
    mirrors: tuple[str, ...],
    system_directories: tuple[Path, ...] = (),
) -> tuple[DataFile, ...]:
    names = (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    )
    return tuple(
        DataFile(
            dataset,
            name,
            checksum,
            addresses=tuple(f"{mirror}{name}.gz" for mirror in mirrors),
            system_directories=system_directories,
        )
        for name, checksum in zip(names, sha256, strict=True)
    )


_MNIST = DataSet(
    name="mnist",
    description="60,000 + 10,000 handwritten digits, 28 x 28 (LeCun, Cortes, Burges)",
    license="usually quoted as CC BY-SA 3.0",
    num_bytes=11_594_722,
    class_names=tuple("0123456789"),
    files=_idx_files(
        "mnist",
        (
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        mirrors=(
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
        ),
    ),
)

_FASHION_MNIST = DataSet(
    name="fashion-mnist",
    description="60,000 + 10,000 pictures of clothes, 28 x 28 (Xiao, Rasul, Vollgraf 2017)",
    license="MIT",
    num_bytes=30_878_645,
    class_names=(
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    files=_idx_files(
        "fashion-mnist",
        (
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        mirrors=(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ),
        # Debian's package dataset-fashion-mnist: the same images in other gzip headers.
        system_directories=(Path("/usr/share/datasets/fashion-mnist"),),
    ),
)

#: By name. To add one: its files and checksums here.
IMAGE_DATASETS: dict[str, DataSet] = {set_.name: set_ for set_ in (_MNIST, _FASHION_MNIST)}
