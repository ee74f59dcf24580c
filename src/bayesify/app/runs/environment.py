"""Describe where a run was made: versions, commit and hardware."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

import bayesify
from bayesify.app.runs.declarations import ConfigError

__all__ = [
    "check_committed",
    "checkout",
    "commit",
    "hardware",
    "has_fast_bfloat16",
    "load_average",
    "versions",
]


def versions(*, table: bool = False, encoder: bool = False) -> dict[str, str]:
    """Return the versions that a result depends on; that of pandas only if it read a table.

    Args:
        table: whether a table was read.
        encoder: whether a network of transformers read texts or images.

    Example:
        >>> sorted(versions())
        ['bayesify', 'numpy', 'python', 'safetensors', 'torch']
    """
    more = [*(["pandas"] if table else []), *(["transformers"] if encoder else [])]
    names = ("numpy", *more, "safetensors", "torch")
    installed = {name: metadata.version(name) for name in names}
    return {
        "bayesify": bayesify.__version__,
        "python": platform.python_version(),
        **installed,
    }


def checkout() -> Path | None:
    """Return the root of bayesify's checkout, or None where it was installed otherwise."""
    root = Path(bayesify.__file__).resolve().parents[2]
    return root if (root / ".git").exists() else None


def commit(*folders: str) -> str | None:
    """Return the commit of bayesify's checkout, or None without one.

    It ends in ``-dirty`` where the package's code differs from that commit, new files included;
    documentation and stored results do not count.

    Args:
        *folders: other folders of the checkout whose code counts too.
    """
    root = checkout()
    if root is None:
        return None
    try:
        head = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--", "src", "pyproject.toml", *folders)
    except (FileNotFoundError, PermissionError, subprocess.SubprocessError):  # no usable git
        return None
    return f"{head}-dirty" if head and changed else head or None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()


def load_average() -> float | None:
    """Return the mean number of processes that wanted a CPU in the last minute.

    Returns:
        None where the system does not tell.
    """
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):  # Windows has no such function
        return None


def check_committed(found: str | None) -> None:
    """Check that new results can be traced to a commit, as :func:`commit` returned it.

    Raises:
        ConfigError: the code differs from its commit.

    Example:
        >>> check_committed("0123456789abcdef-dirty")
        Traceback (most recent call last):
        bayesify.app.runs.declarations.ConfigError: results must be of a commit, but the code ...
    """
    if found is not None and found.endswith("-dirty"):
        raise ConfigError(
            "results must be of a commit, but the code in src differs from "
            f"{found.removesuffix('-dirty')[:12]}; commit or undo the changes, or pass "
            "--uncommitted to store results that are marked as made by uncommitted code"
        )


def has_fast_bfloat16() -> bool:
    """Return whether the CPU has bfloat16 instructions; True where PyTorch cannot tell."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def hardware(device: str = "cpu") -> str:
    """Return the name of the CPU, and how many threads and cores of it are used.

    Args:
        device: ``"cpu"``, or ``"cuda"`` for the name of the GPU before it.
    """
    threads = torch.get_num_threads()
    gpu = f"{torch.cuda.get_device_name()}; " if device == "cuda" else ""
    return f"{gpu}{_cpu()}, {threads} thread{'s'[: threads > 1]} on {os.cpu_count()} cores"


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except FileNotFoundError:  # only Linux has it
        pass
    return platform.processor() or platform.machine()
