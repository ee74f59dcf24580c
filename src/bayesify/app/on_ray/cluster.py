"""Connect to a Ray cluster, and check that its nodes share a folder and run the same code."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import bayesify
from bayesify.app.runs.environment import commit
from bayesify.io import StorageError

try:
    import ray
except ImportError as error:
    raise ImportError(
        "tasks on a Ray cluster need ray; run pip install 'bayesify[ray]' on every node"
    ) from error

__all__ = ["Cluster", "SharedFolder", "connected", "shared"]

#: Time that a cluster has to accept a connection.
_ANSWER_SECONDS = 10.0


class Cluster(NamedTuple):
    """The size of a cluster.

    Attributes:
        nodes: number of its nodes.
        cpus: number of their CPUs together.
        memory: memory of the largest node, in bytes.
    """

    nodes: int
    cpus: int
    memory: float

    def __str__(self) -> str:
        """Return nodes and CPUs in words.

        Example:
            >>> print(Cluster(1, 8, 1e9))
            1 node, 8 CPUs
        """
        return f"{self.nodes} node{'s'[: self.nodes != 1]}, {self.cpus} CPU{'s'[: self.cpus != 1]}"


@contextmanager
def connected(address: str | None) -> Iterator[Cluster]:
    """Connect to a cluster for a ``with`` block.

    At the end of the block the tasks that still run are stopped, and so is the cluster if it was
    started for the block. A program that was connected before uses and keeps its connection.

    Args:
        address: as ``address_of`` returns it.

    Raises:
        ConnectionError: no cluster answers at the address, or it has no CPU.
    """
    # Without usage statistics of a cluster that is started here, unless the user asks for them.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = address or os.environ.get("RAY_ADDRESS") or None
    is_own = not ray.is_initialized()
    try:
        if is_own:
            _check_listens(address)
            ray.init(
                address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
            )
    except (OSError, ValueError) as error:
        raise ConnectionError(
            f"no Ray cluster answers at {address} ({error}); start one by ray start --head, or "
            "leave the address out to run on this machine"
        ) from error
    try:
        found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        nodes = [node["Resources"] for node in found if node["Alive"]]
        if not any(node.get("CPU") for node in nodes):
            raise ConnectionError("the Ray cluster must have a CPU, got none; add a node")
        yield Cluster(
            len(nodes),
            int(sum(node.get("CPU", 0.0) for node in nodes)),
            max((node.get("memory", 0.0) for node in nodes), default=0.0),
        )
    finally:
        if is_own:
            ray.shutdown()


def _check_listens(address: str | None) -> None:
    """Raise OSError if nothing listens at an address, where Ray would try for many minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()


class SharedFolder(NamedTuple):
    """A folder that all nodes of a cluster must share, and the code that they must run.

    Attributes:
        folder: its absolute path.
        mark: a file that this process has put there.
        code: version of bayesify in this process, with its commit if it is a checkout.
    """

    folder: Path
    mark: Path
    code: str

    def check(self) -> None:
        """Check that this process, on any node, shares the folder and runs the same code.

        Raises:
            StorageError: it does not; the message names the node.
        """
        node = socket.gethostname()
        if not self.mark.exists():
            raise StorageError(
                f"all nodes must share {self.folder}, but {node} has no such folder, or another "
                "one; choose a folder on shared storage"
            )
        if _code() != self.code:
            raise StorageError(
                f"all nodes must run the same code, but {node} has bayesify {_code()} instead of "
                f"{self.code}; install it there, and do not change a checkout during the command"
            )


@cache  # of the code that this process has loaded
def _code() -> str:
    found = commit()
    return bayesify.__version__ + ("" if found is None else f" at commit {found}")


@contextmanager
def shared(folder: Path) -> Iterator[SharedFolder]:
    """Mark a folder, so that the nodes of a cluster can check that they share it."""
    mark = folder.absolute() / f".ray-{uuid.uuid4().hex}.tmp"
    mark.touch()
    try:
        yield SharedFolder(folder.absolute(), mark, _code())
    finally:
        mark.unlink(missing_ok=True)
