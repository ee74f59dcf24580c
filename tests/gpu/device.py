"""The device of the tests in this folder, which are skipped where there is no GPU.

``BAYESIFY_TEST_DEVICE=cpu pytest tests/gpu`` runs on a CPU what can run there.
"""

import os

import pytest
import torch

#: PyTorch's compiler uses what PyTorch itself has deprecated.
COMPILER_WARNING = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
DEVICE = os.environ.get("BAYESIFY_TEST_DEVICE", "cuda")
needs_gpu = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a GPU"
)
