"""Import of Pyro, an optional dependency."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["pyro_module"]


def pyro_module(name: str) -> Any:
    """Import a module of Pyro; it takes seconds, so that it is imported on use.

    Raises:
        ModuleNotFoundError: Pyro is not installed.

    Example:
        >>> pyro_module("pyro.ops.stats").__name__
        'pyro.ops.stats'
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "pyro":
            raise
        raise ModuleNotFoundError(
            "Hamiltonian Monte Carlo needs Pyro, which is not installed; install it with "
            "pip install 'bayesify[referee]' or pip install pyro-ppl",
            name="pyro",
        ) from error
