"""Settings and fixtures of every test: one thread, as the networks here are too small for two."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from tests.places import make_tiny, places, server

__all__ = ["make_tiny", "places", "server"]

torch.set_num_threads(1)
# For the processes that tests start: there is a test worker for each CPU.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Give the next test one thread, whatever this one has set, as Lightning does for the process.

    With two, and another test worker on the other core, some take minutes instead of seconds.
    """
    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where the tests were started in the background."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)
