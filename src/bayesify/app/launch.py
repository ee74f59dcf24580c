"""The device of a run, and its processes: start them by Lightning Fabric, or join torchrun's."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed

from bayesify.app.runs import RunError
from bayesify.app.runs.declarations import ConfigError

__all__ = [
    "Joined",
    "Launch",
    "OtherProcessError",
    "requested_device",
    "requested_launch",
    "was_restarted",
]

#: How long a process waits for another that reads a table.
_PATIENCE = timedelta(days=7)


class OtherProcessError(RunError):
    """Another process of the run failed, and says why."""


class Joined:
    """The processes of a run, connected with each other, or one alone.

    Args:
        device: that of this process.
        group: connects all; None for one process.

    Example:
        >>> with Joined(torch.device("cpu")).all_succeed():
        ...     print("begun")
        begun
    """

    def __init__(self, device: torch.device, group: distributed.ProcessGroup | None = None) -> None:
        self.device = device
        self._group = group

    @contextmanager
    def all_succeed(self) -> Iterator[None]:
        """Wait at the end for the other processes, and go on only if no process failed.

        Raises:
            OtherProcessError: another process failed, and this one did not.
        """
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # the connection: the error here is the one to tell
                self._failures(1)
            raise
        if self._failures(0):
            raise OtherProcessError(
                "all processes must be able to begin, but another one failed; mend what its "
                "message says"
            )

    def _failures(self, own: int) -> int:
        failures = torch.tensor(own)
        if self._group is not None:
            distributed.all_reduce(failures, group=self._group)
        return int(failures)


@dataclass(frozen=True)
class Launch:
    """The processes of a run.

    Args:
        devices: processes on each node.
        nodes: machines.
        by_torchrun: whether torchrun started them; else they are started by :meth:`joined`.
        device: ``"cpu"``, or ``"cuda"`` for a GPU of its own for each process.
        shared_noise: whether all processes draw the same weights.
    """

    devices: int
    nodes: int
    by_torchrun: bool
    device: str = "cpu"
    shared_noise: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes for all."""
        names = ("RANK",) if self.by_torchrun else ("NODE_RANK", "LOCAL_RANK")
        return self.count == 1 or all(int(os.environ.get(name, 0)) == 0 for name in names)

    @property
    def count(self) -> int:
        """The number of processes."""
        return self.devices * self.nodes

    @property
    def command(self) -> str:
        """The options that repeat it, with a space before; torchrun decides on the numbers."""
        options = {"device": self.device} if self.device != "cpu" else {}
        if self.count > 1 and not self.by_torchrun:
            options["devices"] = str(self.devices)
        if self.nodes > 1 and not self.by_torchrun:
            options["nodes"] = str(self.nodes)
        words = [f" --{name} {value}" for name, value in options.items()]
        return "".join(words) + (" --shared-noise" if self.shared_noise else "")

    @property
    def waits_for(self) -> str | None:
        """Return the address of the first machine; None on that machine.

        Under torchrun, and in the other processes that a machine starts, it is None too.
        """
        if self.by_torchrun or self.is_first or int(os.environ.get("LOCAL_RANK", 0)):
            return None
        return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"

    @contextmanager
    def joined(self) -> Iterator[Joined]:
        """Start the other processes of this node, and connect all until the context ends."""
        if self.count == 1:
            yield Joined(torch.device(self.device))
            return
        from lightning.fabric import Fabric
        from lightning.fabric.plugins.environments import (
            LightningEnvironment,
            TorchElasticEnvironment,
        )

        for name in ("lightning.fabric", "lightning.pytorch"):  # which it loads too
            logging.getLogger(name).setLevel(logging.WARNING)
        fabric = Fabric(
            accelerator=self.device,
            strategy="ddp",
            devices=self.devices,
            num_nodes=self.nodes,
            # Else variables of a cluster's scheduler could decide who is first.
            plugins=TorchElasticEnvironment() if self.by_torchrun else LightningEnvironment(),
        )
        fabric.launch()
        try:
            # Not NCCL, which keeps a GPU busy while it waits.
            yield Joined(fabric.device, distributed.new_group(backend="gloo", timeout=_PATIENCE))
        finally:
            distributed.destroy_process_group()


def requested_device(name: str) -> str:
    """Return ``"cpu"`` or ``"cuda"`` for the name of a device.

    Args:
        name: ``"cpu"``, ``"cuda"``, or ``"auto"`` for a GPU where there is one.

    Raises:
        ConfigError: the name is another, or there is no GPU.

    Example:
        >>> requested_device("gpu")
        Traceback (most recent call last):
        bayesify.app.runs.declarations.ConfigError: device must be auto, cpu or cuda, got 'gpu'
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu or cuda, got {name!r}")
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        build = f"torch {torch.__version__}"
        found = f"{build} finds none" if torch.version.cuda else f"{build} is a build for CPUs"
        raise ConfigError(
            f"device cuda needs a GPU, but {found}; leave --device out, or install a build for "
            "your GPU as the README says"
        )
    return "cuda" if has_gpu and name != "cpu" else "cpu"


def requested_launch(
    devices: int | None, nodes: int | None, device: str = "cpu", *, shared_noise: bool = False
) -> Launch:
    """Return what the options or torchrun ask for.

    Args:
        devices: processes on each node; None is not given.
        nodes: machines; None is not given.
        device: ``"cpu"`` or ``"cuda"``.
        shared_noise: whether all processes are to draw the same weights.

    Raises:
        ConfigError: an option is out of range, contradicts torchrun, or lacks what it needs.

    Example:
        >>> requested_launch(None, None).count
        1
        >>> requested_launch(0, None)
        Traceback (most recent call last):
        bayesify.app.runs.declarations.ConfigError: devices must be at least 1, got 0
    """
    for name, value in (("devices", devices), ("nodes", nodes)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        here, whole = (int(os.environ[name]) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
        found = Launch(here, whole // here, True, device, shared_noise)
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
        found = Launch(devices or 1, nodes or 1, False, device, shared_noise)
        missing = [n for n in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if n not in os.environ]
        if found.nodes > 1 and missing:
            raise ConfigError(
                f"nodes {found.nodes} needs {', '.join(missing)} in the environment: the address "
                "and a free port of the first machine, and 0, 1, ... for this one; give the same "
                "command on each, or start it by torchrun"
            )
        if found.count > 1:
            _check_node_rank(found.nodes)
    if found.count == 1:
        if shared_noise:
            raise ConfigError("shared-noise would do nothing in one process; leave it out")
        return found
    if device == "cuda" and found.devices > (gpus := torch.cuda.device_count()):
        raise ConfigError(f"devices must be at most the {gpus} GPUs here, got {found.devices}")
    try:
        import lightning.fabric  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "several processes need Lightning Fabric; pip install 'bayesify[distributed]'"
        ) from error
    return found


def _check_node_rank(nodes: int) -> None:
    text = os.environ.get("NODE_RANK", "0")
    if not text.isdecimal() or not 0 <= int(text) < nodes:
        wanted = f"a number from 0 to {nodes - 1}" if nodes > 1 else "0 or unset, with one machine"
        raise ConfigError(f"NODE_RANK must be {wanted}, got {text!r}")


def was_restarted() -> bool:
    """Return True if torchrun has started this process again after one had ended.

    Example:
        >>> was_restarted()
        False
    """
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
