"""Recognise errors that say that there is not enough memory."""

import torch

__all__ = ["is_out_of_memory"]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there is not enough memory, also that of PyTorch's CPU.

    Example:
        >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"))
        True
    """
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )
