"""Recognise errors that mean that memory is exhausted."""

import torch

__all__ = ["is_out_of_memory"]


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error means that memory is exhausted.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("a shape is wrong"))
        (True, False)
    """
    # PyTorch's CPU allocator raises a plain RuntimeError; its words differ between versions.
    words = ("can't allocate memory", "DefaultCPUAllocator")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(each in str(error) for each in words)
    )
