"""Settings and fixtures of every test: one thread, as the networks here are too small for two."""

import torch
from tests.places import make_tiny, places, server

__all__ = ["make_tiny", "places", "server"]

torch.set_num_threads(1)
