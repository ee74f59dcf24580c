"""Settings and fixtures of every test: one thread, as the networks here are too small for two."""

import torch
from tests.killable import epochs_done
from tests.places import make_tiny, places, server

__all__ = ["epochs_done", "make_tiny", "places", "server"]

torch.set_num_threads(1)
