"""Run the service until it is told to stop, and finish the requests in progress."""

from __future__ import annotations

import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

__all__ = ["bound_socket", "is_loopback", "run", "url_of"]


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on a host and port; port 0 takes a free one.

    Raises:
        ValueError: the port is out of its range, or the host and port cannot be listened on.

    Example:
        >>> with bound_socket("127.0.0.1", 0) as listening:
        ...     url_of(listening).startswith("http://127.0.0.1:")
        True
    """
    if not 0 <= port <= 65_535:
        raise ValueError(f"port must lie from 0 to 65535, got {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"the service cannot listen on {host} port {port}: {error}; choose others with --host "
            "and --port"
        ) from error
    # Connections inherit it. Without it each response waits 40 ms for an acknowledgement, because
    # its head and its body are two packets.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def url_of(listening: socket.socket) -> str:
    """Return the address of a service."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(listening: socket.socket) -> bool:
    """Return whether only programs on this machine can connect."""
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback


def run(
    app: FastAPI, listening: socket.socket, *, timeout_s: float, on_start: Callable[[], None]
) -> None:
    """Serve until SIGTERM or Ctrl-C, and then finish the requests in progress.

    Args:
        app: the application.
        listening: from :func:`bound_socket`.
        timeout_s: seconds that the requests in progress have to finish.
        on_start: called when the service is about to accept requests.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(timeout_s)),
    )
    with _quiet_signals():
        on_start()
        uvicorn.Server(config).run(sockets=[listening])


@contextmanager
def _quiet_signals() -> Iterator[None]:
    """Ignore the signals that uvicorn raises again after it has stopped by them."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
