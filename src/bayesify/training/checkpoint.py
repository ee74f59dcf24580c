"""The state of a run in one file, from which it resumes exactly."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bayesify.io import (
    StorageError,
    freeze_as_described,
    frozen_of,
    model_meta,
    read_tensors,
    unpack_state,
    without_frozen,
    write_tensors,
)
from bayesify.training.backends.backend import Noise
from bayesify.training.elbo import ELBO
from bayesify.training.history import History

__all__ = [
    "CHECKPOINT_NAME",
    "Position",
    "as_json",
    "check_same",
    "load_trained",
    "objective_meta",
    "read_checkpoint",
    "scheduler_meta",
    "trained_parts",
    "update_settings",
    "write_checkpoint",
]

CHECKPOINT_NAME = "checkpoint.safetensors"
#: Begins the names of the objective's own parameters and buffers.
_OWN = "objective."
#: Entries of an optimiser's group that are compared elsewhere, or may change with the device.
_NOT_COMPARED = frozenset(
    ("lr", "initial_lr", "foreach", "fused", "capturable", "differentiable", "params")
)
#: The setting that holds the state of the schedule before its first step.
_START = "start of the schedule"


@dataclass
class Position:
    """The position of a run: finished epochs, and finished minibatches of the next epoch.

    ``noise`` is the source of the noise of its steps, ``processes`` how many trained together, and
    ``shared_noise`` whether they drew the same weights. ``first_epoch`` is the number of the run's
    first epoch among all of its objective, which orders the data, ``batches`` the number of
    minibatches of an epoch, and ``epochs`` that of the whole run; both are 0 in older checkpoints.
    ``lacks_comparison`` says that the last epoch is done, and not yet its comparison with untrained
    means, by which its row is completed.
    """

    epoch: int = 0
    batch: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    epoch_seconds: float = 0.0
    history: History = field(default_factory=list)
    noise: Noise | None = None
    processes: int = 1
    shared_noise: bool = False
    first_epoch: int = field(default=0, compare=False)
    batches: int = field(default=0, compare=False)
    epochs: int = field(default=0, compare=False)
    lacks_comparison: bool = field(default=False, compare=False)

    def begin_epoch(self, epoch: int) -> None:
        """Move to the start of an epoch."""
        self.epoch, self.batch, self.sums = epoch, 0, {}
        self.epoch_seconds, self.lacks_comparison = 0.0, False


def write_checkpoint(
    path: Path,
    elbo: ELBO,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    settings: dict[str, Any],
    position: Position,
    frozen: bool | Sequence[str] = True,
) -> None:
    """Write everything that the next step depends on, atomically.

    The noise, the order of the data and dropout are functions of seed, step and epoch: they need
    no state. Frozen parameters are left out as ``bayesify.save`` leaves them out.

    Raises:
        OSError: the file cannot be written; the last checkpoint is then left as it was.
        TypeError: the scheduler's state cannot be stored without pickle.
    """
    tensors, trained = trained_parts(elbo, optimizer)
    tensors, described = without_frozen(elbo.bnn, tensors, frozen)
    trained["model"] |= described
    meta = {
        "kind": "checkpoint",
        **trained,
        "training": settings,
        "scheduler": scheduler_meta(scheduler),
        "position": dataclasses.asdict(position),
    }
    write_tensors(path, tensors, meta)


def read_checkpoint(
    path: Path,
    elbo: ELBO,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    settings: dict[str, Any],
    batches: int,
) -> Position:
    """Restore a newly built run to the state of its checkpoint.

    Raises:
        StorageError: the file is cut off, altered, or of a run with another architecture,
            objective or optimiser, or, within an epoch or under a schedule of the learning rate,
            with another number of minibatches than ``batches``; nothing has then been changed.
    """
    tensors, meta = read_tensors(path)
    if meta.get("kind") != "checkpoint":
        raise StorageError(f"{path} holds a network but not the state of a run; use bayesify.load")
    _check_training(path, settings, meta["training"])
    # Older checkpoints do not name their noise: it was the generator's.
    position = Position(**{"noise": "generator", **meta["position"]})
    if position.sums.pop("lacks_comparison", None):  # as they kept it
        position.lacks_comparison = True
    if position.batch and position.batches not in (0, batches):
        raise StorageError(
            f"{path} is of a run that was interrupted within an epoch of {position.batches} "
            f"minibatches; resume it with as many, got {batches}"
        )
    if settings["scheduler"] != "Constant" and position.batches not in (0, batches):
        raise StorageError(
            f"{path} is of a run with a schedule of the learning rate by steps, and epochs of "
            f"{position.batches} minibatches; resume it with as many, got {batches}, or begin "
            "another run in another folder, with the network that bayesify.load reads from the file"
        )
    load_trained(path, elbo, optimizer, tensors, meta)
    scheduler.load_state_dict(_from_json(meta["scheduler"], scheduler.state_dict()))
    return position


def update_settings(
    optimizer: Optimizer, scheduler: LRScheduler, *, is_stored: bool
) -> dict[str, Any]:
    """Return what a resumed run must share of how parameters are updated, as JSON.

    These are the learning rates, the kind of schedule with its numbers, and the other numbers of
    the optimiser, which would be those of the checkpoint whatever a resumed run asks for.

    Args:
        optimizer: of the run.
        scheduler: of the optimiser. One that has made steps tells nothing of its start.
        is_stored: whether the run has checkpoints.

    Raises:
        TypeError: the scheduler's state cannot be stored without pickle.
    """
    groups = optimizer.param_groups
    is_new = is_stored and getattr(scheduler, "last_epoch", 0) == 0
    return {
        **({_START: scheduler_meta(scheduler)} if is_new else {}),
        "lr": [float(group.get("initial_lr", group["lr"])) for group in groups],
        "scheduler": type(scheduler).__name__.lstrip("_"),
        "optimizer": [
            {
                name: as_json(value)
                for name, value in group.items()
                if name not in (*_NOT_COMPARED, *_cycled(group))
                and isinstance(value, bool | float | int | tuple)
            }
            for group in groups
        ],
    }


def _cycled(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the entries of an optimiser's group that OneCycleLR or CyclicLR change."""
    has_cycle = any(name in group for name in ("max_momentum", "base_momentum"))
    return ("betas", "momentum") if has_cycle else ()


def _check_training(path: Path, wanted: dict[str, Any], stored: dict[str, Any]) -> None:
    """Raise StorageError where a run is trained in another way than its checkpoint was.

    Older checkpoints have neither scheduler nor optimiser, and older versions of PyTorch fewer
    numbers of an optimiser.
    """
    here = {k: v for k, v in wanted.items() if k in stored or k not in ("scheduler", "optimizer")}
    there = dict(stored)
    start, start_there = here.pop(_START, {}), there.pop(_START, {})
    own, other = here.pop("optimizer", []), there.pop("optimizer", [])
    check_same(path, "schedule", here, there)
    for group, group_there in zip(own, other, strict=False):
        shared = group.keys() & group_there.keys()
        check_same(
            path,
            "optimizer",
            {name: group[name] for name in sorted(shared)},
            {name: group_there[name] for name in sorted(shared)},
        )
    _check_start(path, start, start_there)


def _check_start(path: Path, wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Raise StorageError where a schedule began with other numbers, such as one of its steps.

    The checkpoint's would replace them, so that a schedule of more epochs would end too early. One
    that cannot go beyond its steps has its own check.
    """
    if "total_steps" in wanted:
        return
    for name, here in wanted.items():
        there = stored.get(name, here)
        if name == "_schedulers":
            for part, part_there in zip(here, there, strict=False):
                _check_start(path, part, part_there)
        elif here != there:
            raise StorageError(
                f"{path} is of a run whose schedule of the learning rate began with "
                f"{name.lstrip('_')} = {_numbers(there)}, got {_numbers(here)}; resume it with the "
                "same, or use bayesify.training.schedules.cosine or a LambdaLR of a function, "
                "which may have more steps"
            )


def trained_parts(elbo: ELBO, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything that training changes, as tensors and JSON, with the settings it belongs to."""
    optimizer_state = optimizer.state_dict()
    # Whole vectors, unlike a saved model: an optimiser may still update masked weights.
    tensors: dict[str, Tensor] = {**elbo.bnn.state_dict(), **_own_tensors(elbo)}
    scalars: dict[str, dict[str, Any]] = {}
    for index, entries in optimizer_state["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{name}"] = value
            else:
                scalars.setdefault(str(index), {})[name] = value
    return tensors, {
        "model": model_meta(elbo.bnn),
        "objective": objective_meta(elbo),
        "step": elbo.step,
        "running": elbo.running,
        "optimizer": {
            "type": type(optimizer).__name__,
            "groups": as_json(optimizer_state["param_groups"]),
            "scalars": scalars,
        },
    }


def load_trained(
    path: Path,
    elbo: ELBO,
    optimizer: Optimizer,
    tensors: dict[str, Tensor],
    meta: dict[str, Any],
) -> None:
    """Restore network, optimiser and step counter from :func:`trained_parts`.

    Raises:
        StorageError: it is of another architecture, objective or optimiser; nothing has then been
            changed.
    """
    groups = meta["optimizer"]["groups"]
    stored = {k: v for k, v in meta["model"].items() if k not in ("frozen", "untrained")}
    check_same(path, "network", model_meta(elbo.bnn), stored)
    objective = objective_meta(elbo)
    if "type" not in meta["objective"]:  # of the ELBO, or an older checkpoint
        objective.pop("type", None)
    check_same(path, "objective", objective, meta["objective"])
    check_same(path, "optimizer", type(optimizer).__name__, meta["optimizer"]["type"])
    frozen = frozen_of(elbo.bnn.net, meta["model"], str(path))
    own = _own_tensors(elbo)
    there = {name: each for name, each in tensors.items() if name.startswith(_OWN)}
    check_same(path, "set of tensors of the objective", _shapes(own), _shapes(there))
    others = {name: each for name, each in tensors.items() if name not in there}
    state = unpack_state(elbo.bnn, {**frozen, **others})
    check_same(path, "set of tensors", _shapes(elbo.bnn.state_dict()), _shapes(state))
    check_same(path, "grouping of parameters", _members(optimizer.param_groups), _members(groups))
    elbo.bnn.load_state_dict(state)
    freeze_as_described(elbo.bnn, meta["model"])
    for name, tensor in own.items():
        tensor.copy_(there[name])
    elbo.step = meta["step"]
    elbo.running = meta.get("running", {})  # older checkpoints are of the ELBO, which has none
    groups = _from_json(groups, optimizer.state_dict()["param_groups"])
    optimizer.load_state_dict({"state": _optimizer_state(tensors, meta), "param_groups": groups})


def objective_meta(elbo: ELBO) -> dict[str, Any]:
    """The settings of the objective, as JSON."""
    # The ELBO has no name there, as in older checkpoints.
    kind = {} if type(elbo) is ELBO else {"type": type(elbo).__name__}
    settings = {
        **kind,
        "num_data": elbo.num_data,
        "kl": elbo.kl,
        "kl_weighting": elbo.kl_weighting,
        "temperature": elbo.temperature,
        "num_samples": elbo.num_samples,
        "num_batches": elbo.num_batches,
        **elbo.settings,
    }
    # What was assigned may be a number of NumPy.
    return {name: as_json(value) for name, value in settings.items()}


def _own_tensors(elbo: ELBO) -> dict[str, Tensor]:
    """Return the parameters and buffers of an objective that are not its network's."""
    return {
        f"{_OWN}{name}": value.detach()
        for name, value in elbo.state_dict().items()
        if isinstance(value, Tensor) and not name.startswith("bnn.") and "_extra_state" not in name
    }


def scheduler_meta(scheduler: LRScheduler) -> dict[str, Any]:
    """A scheduler's state, as JSON.

    Raises:
        TypeError: it holds something that JSON does not.
    """
    state: dict[str, Any] = as_json(scheduler.state_dict())
    try:
        json.dumps(state)
    except TypeError as error:
        raise TypeError(
            f"the state of {type(scheduler).__name__} cannot be stored without pickle ({error}); "
            "use a scheduler whose state is numbers and text, such as "
            "bayesify.training.schedules.cosine"
        ) from error
    return state


#: The only name in a mapping whose keys are numbers, as those of milestones; JSON has none such.
_COUNTS = "counts by number"


def as_json(state: Any) -> Any:
    """Write tensors of one number, as learning rates may be, as numbers, and counts as pairs.

    Example:
        >>> as_json({"lr": torch.tensor(0.5), "betas": (np.float64(0.9), 0.99)})
        {'lr': 0.5, 'betas': [0.9, 0.99]}
    """
    if isinstance(state, Mapping):
        if state and all(isinstance(key, Integral) for key in state):
            return {_COUNTS: [[int(key), as_json(state[key])] for key in state]}
        return {key: as_json(value) for key, value in state.items()}
    if isinstance(state, np.generic) or (isinstance(state, Tensor) and state.numel() == 1):
        return state.item()
    return [as_json(each) for each in state] if isinstance(state, list | tuple) else state


def _numbers(state: Any) -> Any:
    """Return counts by number as a list of the numbers, and any other state as it is."""
    counts = _from_json(state, None)
    return sorted(counts.elements()) if isinstance(counts, Counter) else state


def _from_json(state: Any, like: Any) -> Any:
    """Undo :func:`as_json`.

    Args:
        state: what it wrote; mappings with whole numbers as keys are counts, as in ``MultiStepLR``.
        like: the state of the new run, which tells the numbers that were tensors, or of NumPy.
    """
    if isinstance(state, dict):
        if set(state) == {_COUNTS}:
            return Counter({key: _from_json(value, None) for key, value in state[_COUNTS]})
        known = like if isinstance(like, Mapping) else {}
        return {key: _from_json(value, known.get(key)) for key, value in state.items()}
    if isinstance(state, list):
        parts = like if isinstance(like, list | tuple) else ()
        return [_from_json(each, part) for each, part in zip_longest(state, parts[: len(state)])]
    if isinstance(like, Tensor):
        return torch.full_like(like, state)
    is_number = isinstance(like, np.generic) and isinstance(state, int | float)
    return type(like)(state) if is_number else state


def _optimizer_state(tensors: dict[str, Tensor], meta: dict[str, Any]) -> dict[int, dict[str, Any]]:
    state: dict[int, dict[str, Any]] = {}
    for index, entries in meta["optimizer"]["scalars"].items():
        state.setdefault(int(index), {}).update(entries)
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, entry = name.split(".", 2)
            state.setdefault(int(index), {})[entry] = tensor
    return state


def _shapes(state: Mapping[str, Tensor]) -> dict[str, list[int]]:
    # A checkpoint may be pruned where the new network is not.
    return {name: list(state[name].shape) for name in state if name != "posterior.mask"}


def _members(groups: list[dict[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def check_same(path: Path, part: str, wanted: Any, stored: Any) -> None:
    """Raise StorageError, naming the difference, where a part of a run differs from its file."""
    wanted = json.loads(json.dumps(wanted))
    if wanted == stored:
        return
    if isinstance(wanted, dict):
        names = [name for name in wanted | stored if wanted.get(name) != stored.get(name)]
        difference = "; ".join(
            f"{name} is {wanted.get(name)} here and {stored.get(name)} there" for name in names[:3]
        )
    else:
        difference = f"this run has {wanted}, the checkpoint {stored}"
    raise StorageError(
        f"{path} belongs to a run with another {part}; resume with the same settings "
        f"({difference}), or start in another folder"
    )
