"""Empty directories to search for data in, a server to download from, and a small data set."""

import gzip
import hashlib
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bayesify.datasets import IMAGE_DATASETS, DataFile, DataSet, files

CONTENT = b"the right bytes" * 100
OTHER = CONTENT.replace(b"right", b"wrong", 1)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


PIXELS = bytes(range(256)) * 28 * 28  # 256 images
LABELS = bytes(index % 10 for index in range(256))
COMPRESSED = gzip.compress(CONTENT)
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


def idx(shape: tuple[int, ...], values: bytes, kind: int = 8) -> bytes:
    return bytes([0, 0, kind, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + values


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
