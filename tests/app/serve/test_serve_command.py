"""``bayesify serve`` as a process: bad usage, killed, restarted, stopped, and sent too much."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import psutil
import pytest
from tests.app.cli.test_cli import bayesify
from tests.app.cli.test_errors import check_refused

from bayesify.app.serve.running import bound_socket, is_loopback

IMAGES = np.random.default_rng(1).integers(0, 256, (4, 28, 28)).tolist()


class Service(NamedTuple):
    """A running service."""

    process: subprocess.Popen[str]
    url: str
    model: dict[str, Any]

    def ask(self, images: list[Any]) -> httpx.Response:
        return httpx.post(f"{self.url}/predict", json={"examples": images}, timeout=60)


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Service]:
    """Run the command, as a user would."""
    program = "from bayesify.app.cli import main; main()"
    words = [sys.executable, "-c", program, "serve", str(folder), "--port", "0", "--json"]
    with subprocess.Popen(
        [*words, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            started = json.loads(process.stdout.readline())
            yield Service(process, started["url"], started["model"])
        finally:
            process.kill()


def test_bad_usage(runs: dict[str, Path], tmp_path: Path) -> None:
    run = runs["digits"]
    for words, message in {
        ("--port", "99999"): "port must lie from 0 to 65535",
        ("--port", "0", "--host", "no.such.host.invalid"): "the service cannot listen on",
        ("--port", "0", "--max-batch", "0"): "max-batch must be at least 1",
        ("--port", "0", "--timeout-s", "nan"): "timeout-s must be at least",
        ("--port", "0", "--samples", "0"): "samples must be at least 1",
        ("--port", "0", "--coverage", "2"): "coverage must lie strictly between 0 and 1",
        ("--port", "0", "--level", "0.5"): "level would do nothing here: classes have no intervals",
        ("--port", "0", "--pruned", str(tmp_path / "x")): "there is no file",
    }.items():
        check_refused(bayesify("serve", run, *words), message)
    check_refused(bayesify("serve", tmp_path / "none", "--port", "0"), "holds no run")
    said = bayesify("serve", runs["regression"], "--port", "0", "--level", "0")
    check_refused(said, "level must lie strictly between 0 and 1")


def test_a_port_that_is_taken(runs: dict[str, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check_refused(bayesify("serve", runs["digits"], "--port", port), f"127.0.0.1 port {port}")


def test_a_package_that_is_not_installed(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bayesify.app.cli.serve_command.find_spec", lambda _: None)
    check_refused(bayesify("serve", runs["digits"]), "pip install 'bayesify[cli,serve]'")


@pytest.mark.slow
def test_killed_and_restarted_it_answers_as_before(runs: dict[str, Path]) -> None:
    with serving(runs["digits"]) as service:
        assert service.url.startswith("http://127.0.0.1:")
        before = [service.ask([image]).json() for image in IMAGES]

        def ask_on() -> None:
            try:
                while True:
                    service.ask(IMAGES)
            except httpx.HTTPError:
                pass  # it was killed

        clients = [threading.Thread(target=ask_on) for _ in range(4)]
        for each in clients:
            each.start()
        service.process.send_signal(signal.SIGKILL)
        for each in clients:
            each.join(timeout=60)
    with serving(runs["digits"]) as service:
        assert [service.ask([image]).json() for image in IMAGES] == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_it_finishes_the_requests_in_progress(
    runs: dict[str, Path], number: signal.Signals
) -> None:
    with serving(runs["digits"], "--batch-wait-ms", "1000") as service:
        found: list[httpx.Response] = []
        client = threading.Thread(target=lambda: found.append(service.ask(IMAGES)))
        client.start()
        while "bayesify_requests_in_progress 1.0" not in httpx.get(f"{service.url}/metrics").text:
            pass
        service.process.send_signal(number)
        client.join(timeout=60)
        assert found[0].status_code == 200
        assert service.process.wait(timeout=60) == 0
        with pytest.raises(httpx.ConnectError):
            service.ask(IMAGES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["digits", "folder", "regression", "classification"])
def test_requests_made_from_openapi(runs: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """Schemathesis sends what the description allows and what it does not: no answer is a 500.

    Each answer has a status and a schema of the description, and what it does not allow gets 4xx.
    JSON schema cannot say that a text is an image file or a number, so 422 is allowed always.
    """
    with serving(runs[kind]) as service:
        words = [
            "run",
            f"{service.url}/openapi.json",
            "--max-examples",
            "200",
            "--seed",
            "0",
            "--generation-database",
            "none",
        ]
        words += ["--continue-on-failure", "--exclude-checks", "positive_data_acceptance"]
        found = subprocess.run(
            [sys.executable, "-m", "schemathesis.cli", *words],
            cwd=tmp_path,
            text=True,
            capture_output=True,
        )
        assert found.returncode == 0, found.stdout
        assert "Tested: 4" in found.stdout
        metrics = httpx.get(f"{service.url}/metrics").text
        for status in (200, 422):
            assert f'bayesify_requests_total{{status="{status}"}}' in metrics


@pytest.mark.slow
def test_bodies_of_a_gigabyte_and_a_million_rows_take_no_memory(runs: dict[str, Path]) -> None:
    def answer_to(service: Service, headers: str, chunks: Iterator[bytes]) -> bytes:
        """Send a body as far as the service reads it, and return what it answers."""
        host, _, port = service.url.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            start = "POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{start}{headers}\r\n\r\n".encode())
            try:
                for chunk in chunks:
                    connection.sendall(chunk)
            except (BrokenPipeError, ConnectionResetError):
                pass
            try:
                return connection.recv(10_000)
            except ConnectionResetError:
                return b""

    with serving(runs["digits"]) as service:
        process = psutil.Process(service.process.pid)
        service.ask(IMAGES)
        before = process.memory_info().rss
        block = b" " * 1_000_000
        found = answer_to(service, "Content-Length: 1000000000", iter([]))
        assert found.startswith(b"HTTP/1.1 413 ")
        for headers, chunks in {
            "Content-Length: 1000000000": (block for _ in range(1000)),
            "Transfer-Encoding: chunked": (b"f4240\r\n" + block + b"\r\n" for _ in range(1000)),
        }.items():
            found = answer_to(service, headers, chunks)
            assert found.startswith(b"HTTP/1.1 413 ") or not found
        rows = [0] * 1_000_000
        assert service.ask(rows).status_code == 422
        assert process.memory_info().rss - before < 300e6
        assert service.ask(IMAGES).status_code == 200


def test_connections_do_not_wait_for_acknowledgements() -> None:
    with bound_socket("127.0.0.1", 0) as listening:
        client = socket.create_connection(listening.getsockname())
        connection, _ = listening.accept()
        with client, connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert is_loopback(connection)
