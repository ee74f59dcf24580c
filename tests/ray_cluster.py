"""A Ray cluster of two nodes, which are processes of this machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from filelock import FileLock

_MEMORY = {"object_store_memory": 100 * 2**20}


@contextmanager
def own_ray_folder() -> Iterator[None]:
    """Keep Ray's files, and the address that ``ray.init`` finds, apart from those of others."""
    # In /tmp, since paths of sockets are short.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as name:
        variables = {"RAY_TMPDIR": name, "RAY_USAGE_STATS_ENABLED": "0"}
        with mock.patch.dict(os.environ, variables):
            yield


@contextmanager
def two_nodes() -> Iterator[Any]:
    """Start a head and another node, of one CPU each, with the present environment variables."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    # One cluster at a time: two that start on few CPUs take several times as long as in turn.
    turn = FileLock(Path(tempfile.gettempdir(), "bayesify-tests-ray.lock"))
    with turn, own_ray_folder(), mock.patch.dict(os.environ, {"PYTHONPATH": path}):
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **_MEMORY})
        try:
            cluster.add_node(num_cpus=1, **_MEMORY)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
