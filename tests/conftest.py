"""Settings of every test: one thread, since the networks here are too small for two."""

import torch

torch.set_num_threads(1)
