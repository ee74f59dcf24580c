"""Several processes for one run: start them by Lightning Fabric, or join torchrun's."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import distributed

from bayesify.app.runs.declarations import ConfigError

__all__ = ["Launch", "requested_launch", "was_restarted"]


@dataclass(frozen=True)
class Launch:
    """The processes of a run.

    Args:
        devices: processes on each node.
        nodes: machines.
        by_torchrun: whether torchrun started them; else they are started by :meth:`joined`.
    """

    devices: int
    nodes: int
    by_torchrun: bool

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes for all."""
        names = ("RANK",) if self.by_torchrun else ("NODE_RANK", "LOCAL_RANK")
        return all(int(os.environ.get(name, 0)) == 0 for name in names)

    @property
    def count(self) -> int:
        """The number of processes."""
        return self.devices * self.nodes

    @property
    def command(self) -> str:
        """The options that repeat it, with a space before; nothing where torchrun decides."""
        if self.by_torchrun:
            return ""
        nodes = f" --nodes {self.nodes}" if self.nodes > 1 else ""
        return f" --devices {self.devices}{nodes}"

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Start the other processes of this node, and connect all until the context ends."""
        from lightning.fabric import Fabric

        for name in ("lightning.fabric", "lightning.pytorch"):  # which it loads too
            logging.getLogger(name).setLevel(logging.WARNING)
        Fabric(
            accelerator="cpu", strategy="ddp", devices=self.devices, num_nodes=self.nodes
        ).launch()
        try:
            yield
        finally:
            distributed.destroy_process_group()


def requested_launch(devices: int | None, nodes: int | None) -> Launch | None:
    """Return what the options or torchrun ask for, or None for one process.

    Raises:
        ConfigError: an option is out of range, contradicts torchrun, or lacks what it needs.

    Example:
        >>> requested_launch(None, None) is None
        True
        >>> requested_launch(0, None)
        Traceback (most recent call last):
        bayesify.app.runs.declarations.ConfigError: devices must be at least 1, got 0
    """
    for name, value in (("devices", devices), ("nodes", nodes)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        here, whole = (int(os.environ[name]) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
        found = Launch(here, whole // here, by_torchrun=True)
        for name, value in (("devices", devices), ("nodes", nodes)):
            if value is not None and value != getattr(found, name):
                raise ConfigError(
                    f"torchrun has started {found.count} processes on {found.nodes} nodes, got "
                    f"{name} {value}; leave it out"
                )
        if here * found.nodes != whole:
            raise ConfigError(
                f"every node must have as many processes, got {here} here of {whole} in all; give "
                "torchrun the same --nproc-per-node on each"
            )
    else:
        found = Launch(devices or 1, nodes or 1, by_torchrun=False)
        missing = [n for n in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if n not in os.environ]
        if found.nodes > 1 and missing:
            raise ConfigError(
                f"nodes {found.nodes} needs {', '.join(missing)} in the environment: the address "
                "and a free port of the first machine, and 0, 1, ... for this one; give the same "
                "command on each, or start it by torchrun"
            )
    if found.count == 1:
        return None
    try:
        import lightning.fabric  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "several processes need Lightning Fabric; pip install 'bayesify[distributed]'"
        ) from error
    return found


def was_restarted() -> bool:
    """Return True if torchrun has started this process again after one had ended.

    Example:
        >>> was_restarted()
        False
    """
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
