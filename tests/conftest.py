"""Settings and fixtures of every test: one thread, as the networks here are too small for two."""

import signal
from collections.abc import Iterator

import pytest
import torch
from tests.killable import epochs_done
from tests.places import make_tiny, places, server

__all__ = ["epochs_done", "make_tiny", "places", "server"]

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Ctrl-C is heard, also where the tests were started in the background."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)
