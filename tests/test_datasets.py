"""The data layer: where files are looked for, how they are checked, what comes out of them."""

import gzip
import hashlib
import json
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bayesify.cli.data import data_app, download_bar
from bayesify.datasets import (
    IMAGE_DATASETS,
    DataError,
    DataFile,
    DataSet,
    TensorLoader,
    download,
    files,
    find_file,
    get_file,
    load_images,
    parse_idx,
)

CONTENT = b"the right bytes" * 100
OTHER = CONTENT.replace(b"right", b"wrong", 1)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


TINY = DataFile("tiny", "tiny-idx", sha256(CONTENT))


@dataclass
class Places:
    """The directories that are searched, all empty, in their order."""

    env: Path
    repository: Path
    cache: Path
    system: Path
    file: DataFile

    @property
    def ordered(self) -> list[Path]:
        return [self.env, self.repository, self.cache, self.system]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    monkeypatch.setenv("BAYESIFY_DATA", str(tmp_path / "env"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(files, "_repository", lambda: tmp_path / "checkout")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    system = tmp_path / "system"
    return Places(
        env=tmp_path / "env",
        repository=tmp_path / "checkout" / "datasets",
        cache=tmp_path / "xdg" / "bayesify",
        system=system,
        file=replace(TINY, system_directories=(system,)),
    )


def put(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# ------------------------------------------------------------------------------------ the search


def test_the_search_goes_through_the_directories_in_order(places: Places) -> None:
    paths = [
        put(directory / "tiny" / "tiny-idx.gz", gzip.compress(CONTENT))
        for directory in places.ordered
    ]
    for path in paths:
        found = find_file(places.file)
        assert found == (path, CONTENT)
        path.unlink()
    assert find_file(places.file) is None


def test_within_a_directory_the_data_sets_folder_comes_first(tmp_path: Path) -> None:
    names = ("tiny/tiny-idx.gz", "tiny/tiny-idx", "tiny-idx.gz", "tiny-idx")
    paths = [
        put(tmp_path / name, gzip.compress(CONTENT) if name.endswith("gz") else CONTENT)
        for name in names
    ]
    for path in paths:
        found = find_file(TINY, tmp_path)
        assert found == (path, CONTENT)
        path.unlink()
    assert find_file(TINY, tmp_path) is None


def test_an_explicit_directory_is_the_only_one(places: Places, tmp_path: Path) -> None:
    for directory in places.ordered:
        put(directory / "tiny-idx", CONTENT)
    elsewhere = tmp_path / "elsewhere"
    assert find_file(places.file, elsewhere) is None
    with pytest.raises(DataError, match=r"elsewhere \(no such directory\), and with --data-dir"):
        get_file(replace(places.file, addresses=("http://127.0.0.1:1/tiny-idx",)), elsewhere)


def test_without_settings_the_cache_is_in_the_home(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAYESIFY_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    # An empty variable is unset, and not the working directory.
    monkeypatch.chdir(put(tmp_path / "here" / "tiny-idx", OTHER).parent)
    path = put(tmp_path / "home" / ".cache" / "bayesify" / "tiny" / "tiny-idx", CONTENT)
    assert find_file(TINY) == (path, CONTENT)
    (tmp_path / "home" / "mine").mkdir()
    path = put(tmp_path / "home" / "mine" / "tiny-idx", CONTENT)
    assert find_file(TINY, "~/mine") == (path, CONTENT)


def test_an_unknown_home_is_named(places: Places) -> None:
    with pytest.raises(DataError, match="~nobody-of-this-name/data needs a home directory"):
        find_file(TINY, "~nobody-of-this-name/data")


COMPRESSED = gzip.compress(CONTENT)
WRONG = {
    "another file": (gzip.compress(OTHER), sha256(OTHER)),
    "an altered byte, uncompressed": (OTHER, sha256(OTHER)),
    "a truncated gzip": (COMPRESSED[: len(COMPRESSED) // 2], "damaged gzip"),
    "a gzip without its last byte": (COMPRESSED[:-1], "damaged gzip"),
    "an altered byte in the gzip's checksum": (
        COMPRESSED[:-8] + bytes([COMPRESSED[-8] ^ 1]) + COMPRESSED[-7:],
        "damaged gzip",
    ),
    "rubbish after the gzip": (COMPRESSED + b"rubbish", "damaged gzip"),
    "an altered byte in the compressed stream": (
        COMPRESSED[:12] + bytes([COMPRESSED[12] ^ 255]) + COMPRESSED[13:],
        "damaged gzip",
    ),
    "nothing": (b"", sha256(b"")),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_an_error_though_a_good_one_lies_further_down(
    places: Places, case: str
) -> None:
    raw, part_of_message = WRONG[case]
    wrong = put(places.repository / "tiny" / "tiny-idx.gz", raw)
    put(places.repository / "tiny" / "tiny-idx", CONTENT)
    put(places.repository / "tiny-idx.gz", COMPRESSED)
    put(places.cache / "tiny" / "tiny-idx.gz", COMPRESSED)
    with pytest.raises(DataError) as caught:
        find_file(places.file)
    message = str(caught.value)
    assert "\n" not in message
    for part in (str(wrong), f"SHA-256 {TINY.sha256}, got ", part_of_message, "delete it or put"):
        assert part in message
    with pytest.raises(DataError, match="is not the right file"):
        get_file(places.file)


def test_a_gzip_that_lacks_only_its_end_is_wrong_though_all_bytes_came_out(tmp_path: Path) -> None:
    content = bytes(1 << 20)
    put(tmp_path / "tiny-idx.gz", gzip.compress(content)[:-1])
    with pytest.raises(DataError, match=f"damaged gzip .* got {sha256(content)}"):
        find_file(replace(TINY, sha256=sha256(content)), tmp_path)


def test_a_wrong_flat_file_says_that_the_folder_goes_first(tmp_path: Path) -> None:
    put(tmp_path / "tiny-idx.gz", gzip.compress(OTHER))
    with pytest.raises(DataError) as caught:
        find_file(TINY, tmp_path)
    assert f"or put that into {tmp_path / 'tiny'}, which is looked at first" in str(caught.value)


def test_a_link_to_nothing_and_a_folder_are_present_but_wrong(places: Places) -> None:
    put(places.cache / "tiny-idx", CONTENT)
    link = places.env / "tiny-idx"
    link.parent.mkdir()
    link.symlink_to("nowhere")
    with pytest.raises(DataError, match="tiny-idx is a link to nothing"):
        find_file(TINY)
    link.unlink()
    link.mkdir()
    with pytest.raises(DataError, match="tiny-idx cannot be read"):
        find_file(TINY)


# ---------------------------------------------------------------------------------- the download


@dataclass
class Server:
    """A web server on this machine; ``routes`` maps paths to bodies."""

    base: str
    routes: dict[str, bytes] = field(default_factory=dict)
    cut_short: set[str] = field(default_factory=set)
    stalled: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def server(places: Places) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append(self.path)
            body = state.routes.get(self.path)
            if body is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.path in state.stalled:
                state.released.wait(10)
                return
            self.wfile.write(body[: len(body) // 2] if self.path in state.cut_short else body)

        def log_message(self, *args: object) -> None:
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state = Server(f"http://127.0.0.1:{web.server_port}")
    thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state
    state.released.set()
    web.shutdown()
    thread.join()
    web.server_close()


def tiny_from(server: Server, *paths: str) -> DataFile:
    return replace(TINY, addresses=tuple(server.base + path for path in paths))


def all_files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def test_a_download_goes_to_the_cache_by_way_of_a_part_file(
    places: Places, server: Server, tmp_path: Path
) -> None:
    server.routes["/tiny-idx.gz"] = COMPRESSED
    calls: list[tuple[str, int, int | None]] = []
    seen: set[str] = set()

    def progress(name: str, done: int, total: int | None) -> None:
        calls.append((name, done, total))
        seen.update(path.name for path in all_files(tmp_path))

    file = tiny_from(server, "/tiny-idx.gz")
    path = places.cache / "tiny" / "tiny-idx.gz"
    assert get_file(file, progress=progress) == (path, CONTENT)
    assert path.read_bytes() == COMPRESSED
    assert all_files(tmp_path) == [path]
    assert {name.split(".gz.")[0] for name in seen} == {"tiny-idx"}
    assert all(name.endswith(".part") for name in seen)
    assert calls == [
        ("tiny-idx.gz", 0, len(COMPRESSED)),
        ("tiny-idx.gz", len(COMPRESSED), len(COMPRESSED)),
    ]
    # From now on it is there, and the mirror is left alone.
    assert get_file(file, progress=progress) == (path, CONTENT)
    assert server.asked == ["/tiny-idx.gz"]


def test_a_plain_file_is_kept_under_its_plain_name(places: Places, server: Server) -> None:
    server.routes["/tiny"] = CONTENT
    path = places.cache / "tiny" / "tiny-idx"
    assert get_file(tiny_from(server, "/tiny")) == (path, CONTENT)
    assert find_file(TINY) == (path, CONTENT)


def test_a_download_can_go_to_a_directory_of_ones_own(
    places: Places, server: Server, tmp_path: Path
) -> None:
    put(places.cache / "tiny-idx", CONTENT)
    server.routes["/tiny-idx.gz"] = COMPRESSED
    file = tiny_from(server, "/tiny-idx.gz")
    path = tmp_path / "new" / "tiny" / "tiny-idx.gz"
    assert get_file(file, download_to=tmp_path / "new") == (path, CONTENT)
    with pytest.raises(ValueError, match="not both"):
        get_file(file, tmp_path, download_to=tmp_path)


def test_every_mirror_is_tried_and_a_bad_one_leaves_nothing(
    places: Places, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_TIMEOUT_SECONDS", 0.2)
    server.routes |= {
        "/wrong.gz": gzip.compress(OTHER),
        "/short.gz": COMPRESSED,
        "/stalled.gz": COMPRESSED,
        "/good.gz": COMPRESSED,
    }
    server.cut_short.add("/short.gz")
    server.stalled.add("/stalled.gz")
    bad = ["/none.gz", "/wrong.gz", "/short.gz", "/stalled.gz"]
    with pytest.raises(DataError) as caught:
        get_file(tiny_from(server, *bad))
    message = str(caught.value)
    half = len(COMPRESSED) // 2
    for part in (
        f"{server.base}/none.gz (HTTP Error 404: Not Found)",
        f"{server.base}/wrong.gz (its uncompressed bytes must have SHA-256 {TINY.sha256}, got "
        f"{sha256(OTHER)}",
        f"{server.base}/short.gz (the connection ended after {half} of {len(COMPRESSED)} bytes)",
        f"{server.base}/stalled.gz (timed out)",
    ):
        assert part in message
    assert all_files(tmp_path) == []
    found = get_file(tiny_from(server, *bad, "/good.gz"))
    assert found.content == CONTENT
    assert all_files(tmp_path) == [found.path]


def test_an_interrupted_download_leaves_nothing(
    places: Places, server: Server, tmp_path: Path
) -> None:
    server.routes["/tiny-idx.gz"] = COMPRESSED

    def interrupt(name: str, done: int, total: int | None) -> None:
        assert len(all_files(tmp_path)) == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get_file(tiny_from(server, "/tiny-idx.gz"), progress=interrupt)
    assert all_files(tmp_path) == []


def test_offline_the_message_says_all_that_is_needed(places: Places, tmp_path: Path) -> None:
    places.env.mkdir()
    # Port 1 of this machine: nothing listens there.
    addresses = ("http://127.0.0.1:1/a/tiny-idx.gz", "http://127.0.0.1:1/b/tiny-idx.gz")
    with pytest.raises(DataError) as caught:
        get_file(replace(places.file, addresses=addresses))
    message = str(caught.value)
    assert "\n" not in message
    assert f"is not in {places.env}, {places.repository} (no such directory)" in message
    for part in (
        "tiny-idx.gz of tiny",
        f"SHA-256 {TINY.sha256}",
        *map(str, places.ordered),
        *(f"{address} ([Errno " for address in addresses),
        "--data-dir",
        "BAYESIFY_DATA",
    ):
        assert part in message
    assert all_files(tmp_path) == []


# ------------------------------------------------------------------------------------------- IDX


def idx(shape: tuple[int, ...], values: bytes, kind: int = 8) -> bytes:
    return bytes([0, 0, kind, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + values


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


# ---------------------------------------------------------------------------------------- images

PIXELS = bytes(range(256)) * 28 * 28  # 256 images
LABELS = bytes(index % 10 for index in range(256))


@pytest.fixture
def make_tiny(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> Callable[[dict[str, bytes]], DataSet]:
    """Register a data set of four files of one's own, and put them into $BAYESIFY_DATA."""

    def make(changes: dict[str, bytes]) -> DataSet:
        contents = {
            "train-images": idx((256, 28, 28), PIXELS),
            "train-labels": idx((256,), LABELS),
            "test-images": idx((2, 28, 28), PIXELS[: 2 * 784]),
            "test-labels": idx((2,), bytes([9, 0])),
        } | changes
        for name, content in contents.items():
            put(places.env / "tiny" / f"{name}.gz", gzip.compress(content, compresslevel=1))
        dataset = DataSet(
            name="tiny",
            description="made for a test",
            license="none",
            num_bytes=1234,
            class_names=tuple("abcdefghij"),
            files=tuple(DataFile("tiny", name, sha256(raw)) for name, raw in contents.items()),
        )
        monkeypatch.setitem(IMAGE_DATASETS, "tiny", dataset)
        return dataset

    return make


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
    ],
)
def test_files_that_do_not_fit_are_named(
    make_tiny: Callable[[dict[str, bytes]], DataSet], changes: dict[str, bytes], message: str
) -> None:
    make_tiny(changes)
    with pytest.raises(DataError, match=message):
        load_images("tiny")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(DataError, match=r"'emnist'; known are mnist, fashion-mnist$"):
        load_images("emnist")


def test_a_data_error_is_a_value_error() -> None:
    assert issubclass(DataError, ValueError)


def test_the_repositorys_mnist_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only the checkout can have it: the environment names nothing, and the cache is empty.
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
    # The mean and standard deviation of MNIST's pixels that everybody quotes.
    pixels = data.train_inputs * (data.pixel_scale / 255)
    assert float(pixels.mean()) == pytest.approx(0.1307, abs=5e-5)
    assert float(pixels.std()) == pytest.approx(0.3081, abs=5e-5)


def test_the_catalog_is_whole() -> None:
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
    assert all(f.system_directories == debian for f in IMAGE_DATASETS["fashion-mnist"].files)


# ------------------------------------------------------------------------------------ the loader


def seen_by(loader: TensorLoader) -> list[int]:
    """The targets in the order of a pass, each checked to come with its input."""
    order: list[int] = []
    for inputs, targets in loader:
        assert torch.equal(inputs[:, 0], targets.float())
        order += targets.tolist()
    return order


def make_loader(num_data: int = 103, batch_size: int = 10, **options: int) -> TensorLoader:
    inputs = torch.arange(num_data, dtype=torch.float32).unsqueeze(1).expand(-1, 3)
    return TensorLoader(inputs, torch.arange(num_data), batch_size, **options)


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    loader = make_loader(seed=7)
    epochs = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        epochs.append(seen_by(loader))
    assert len({tuple(order) for order in epochs}) == 3
    # Another loader, straight at the last epoch, with the global generator elsewhere.
    torch.manual_seed(123)
    state = torch.get_rng_state()
    again = make_loader(seed=7)
    again.set_epoch(2)
    assert seen_by(again) == epochs[2]
    assert seen_by(again) == epochs[2]
    assert torch.equal(torch.get_rng_state(), state)
    again.set_epoch(0)
    assert seen_by(again) == epochs[0]
    assert seen_by(make_loader(seed=8)) != epochs[0]
    # The order does not depend on how it is cut.
    assert seen_by(make_loader(seed=7, batch_size=50)) == epochs[0]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(
    ("num_data", "batch_size", "sizes"),
    [(103, 50, [50, 50, 3]), (100, 50, [50, 50]), (3, 50, [3]), (1, 1, [1])],
)
def test_a_pass_covers_each_datum_once(
    shuffle: bool, num_data: int, batch_size: int, sizes: list[int]
) -> None:
    loader = make_loader(num_data, batch_size, shuffle=shuffle)
    assert [len(targets) for _, targets in loader] == sizes
    assert len(loader) == len(sizes)
    assert loader.num_data == num_data
    order = seen_by(loader)
    assert sorted(order) == list(range(num_data))
    if num_data >= 100:
        assert (order != list(range(num_data))) is shuffle


def test_values_that_are_not_finite_are_counted_and_placed() -> None:
    inputs = torch.zeros(4, 2, 3)
    targets = torch.zeros(4)
    TensorLoader(inputs, targets, 2)
    inputs[1, 0, 2] = torch.nan
    inputs[3, 1, 1] = -torch.inf
    with pytest.raises(ValueError, match=r"inputs must be finite, got 2 .* index \(1, 0, 2\)"):
        TensorLoader(inputs, targets, 2)
    with pytest.raises(ValueError, match=r"targets must be finite, got 1 .* index \(2,\)"):
        TensorLoader(torch.zeros(4, 1), torch.tensor([0.0, 1.0, torch.inf, 0.0]), 2)


@pytest.mark.parametrize(
    ("num_inputs", "num_targets", "batch_size", "message"),
    [
        (3, 4, 1, "same length, got 3 and 4"),
        (0, 0, 1, "at least 1 datum, got 0"),
        (3, 3, 0, "batch_size must be at least 1, got 0"),
        (3, 3, -2, "batch_size must be at least 1, got -2"),
    ],
)
def test_loader_arguments_are_checked(
    num_inputs: int, num_targets: int, batch_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TensorLoader(torch.zeros(num_inputs, 2), torch.zeros(num_targets), batch_size)


def test_scalars_and_negative_epochs_are_refused() -> None:
    with pytest.raises(ValueError, match="targets must have a first axis"):
        TensorLoader(torch.zeros(1), torch.tensor(0), 1)
    with pytest.raises(ValueError, match="epoch must be at least 0, got -1"):
        make_loader().set_epoch(-1)


# -------------------------------------------------------------------------------- the command line


def test_list_says_where_each_is_and_downloads_nothing(
    places: Places,
    make_tiny: Callable[[dict[str, bytes]], DataSet],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("list went to the network")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    make_tiny({})
    result = CliRunner().invoke(data_app, ["list", "--json"])
    assert result.exit_code == 0
    rows = {row["name"]: row for row in json.loads(result.stdout)["datasets"]}
    assert list(rows) == ["mnist", "fashion-mnist", "tiny"]
    assert rows["tiny"] == {
        "name": "tiny",
        "description": "made for a test",
        "num_bytes": 1234,
        "license": "none",
        "directories": [str(places.env / "tiny")],
        "missing": [],
        "problem": None,
    }
    assert rows["mnist"]["directories"] == []
    assert len(rows["mnist"]["missing"]) == 4

    monkeypatch.setenv("COLUMNS", "1000")
    assert_where("tiny", str(places.env / "tiny"))
    assert_where("mnist", "not here")
    (places.env / "tiny" / "test-labels.gz").unlink()
    assert_where("tiny", f"{places.env / 'tiny'}, without test-labels")
    (places.env / "tiny" / "test-images.gz").write_bytes(b"")
    assert_where("tiny", "test-images.gz is not the right file")


def test_list_cuts_no_path_on_a_narrow_terminal(
    places: Places,
    make_tiny: Callable[[dict[str, bytes]], DataSet],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_tiny({})
    monkeypatch.setenv("COLUMNS", "80")
    lines = CliRunner().invoke(data_app, ["list"]).stdout.splitlines()
    column = "".join(line.split("│")[-2].strip() for line in lines if line.startswith("│"))
    assert column.endswith(str(places.env / "tiny"))


def assert_where(name: str, where: str) -> None:
    result = CliRunner().invoke(data_app, ["list"])
    assert result.exit_code == 0
    (line,) = [line for line in result.stdout.splitlines() if line.split()[1:2] == [name]]
    assert where in line


def test_get_prints_the_paths(
    places: Places, make_tiny: Callable[[dict[str, bytes]], DataSet]
) -> None:
    dataset = make_tiny({})
    paths = [str(places.env / "tiny" / f"{file.name}.gz") for file in dataset.files]
    result = CliRunner().invoke(data_app, ["get", "tiny"])
    assert result.exit_code == 0
    assert result.stdout.splitlines() == paths
    assert result.stderr == ""


def test_get_downloads_into_the_directory_it_is_given(
    places: Places,
    server: Server,
    make_tiny: Callable[[dict[str, bytes]], DataSet],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    dataset = make_tiny({})
    for file in dataset.files:
        path = places.env / "tiny" / f"{file.name}.gz"
        server.routes[f"/{file.name}.gz"] = path.read_bytes()
    monkeypatch.setitem(
        IMAGE_DATASETS,
        "tiny",
        replace(
            dataset,
            files=tuple(
                replace(file, addresses=(f"{server.base}/{file.name}.gz",))
                for file in dataset.files
            ),
        ),
    )
    target = tmp_path / "target"
    result = CliRunner().invoke(data_app, ["get", "tiny", "--data-dir", str(target), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "name": "tiny",
        "files": [
            {
                "name": file.name,
                "path": str(target / "tiny" / f"{file.name}.gz"),
                "sha256": file.sha256,
            }
            for file in dataset.files
        ],
    }
    assert len(server.asked) == 4
    assert "train-images.gz" in result.stderr
    assert len(load_images("tiny", target).train_inputs) == 256


def test_get_leaves_a_data_error_to_the_main_program(places: Places) -> None:
    result = CliRunner().invoke(data_app, ["get", "emnist", "--json"])
    assert isinstance(result.exception, DataError)
    assert result.stdout == ""


def test_the_bar_is_on_standard_error_only(capsys: pytest.CaptureFixture[str]) -> None:
    with download_bar():
        pass
    assert capsys.readouterr() == ("", "")
    with download_bar() as progress:
        progress("tiny.gz", 0, None)
        progress("tiny.gz", 1000, 2000)
        progress("tiny.gz", 2000, 2000)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "tiny.gz" in captured.err
    assert "2.0/2.0 kB" in captured.err
