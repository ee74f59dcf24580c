"""Saving a Bayesian network to a file and loading it again."""

from __future__ import annotations

import copy
import dataclasses
import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bayesify import groups, likelihoods, perturbations, posteriors, priors
from bayesify.likelihoods import Likelihood
from bayesify.module import BayesianModule
from bayesify.perturbations import Perturbation
from bayesify.posteriors import Posterior
from bayesify.priors import Prior
from bayesify.storage import StorageError, read_tensors, write_tensors

__all__ = ["load", "model_meta", "model_tensors", "restore_model", "save", "unpacked"]

_PRIOR_MEAN = "prior_mean"


def save(bnn: BayesianModule, path: str | os.PathLike[str]) -> None:
    """Write a Bayesian network's parameters, buffers and components, without pickle.

    The file is in the safetensors format and appears whole or not at all. Of a pruned network
    only the weights that are left are stored, with one bit a weight for their places.

    Args:
        bnn: the network. Its architecture is not stored: :func:`load` is given the plain network.
        path: where to write; an existing file is replaced.

    Raises:
        OSError: the file cannot be written; an existing one is then left as it was.

    Example:
        >>> import tempfile
        >>> bnn = BayesianModule(nn.Linear(3, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(bnn, f"{folder}/model.safetensors")
        ...     again = load(f"{folder}/model.safetensors", nn.Linear(3, 2))
        >>> bool((again.posterior.mean == bnn.posterior.mean).all())
        True
    """
    write_tensors(Path(path), model_tensors(bnn), {"kind": "model", "model": model_meta(bnn)})


def load(
    path: str | os.PathLike[str],
    net: nn.Module,
    *,
    likelihood: Likelihood | None = None,
    prior: Prior | None = None,
    perturbation: Perturbation | None = None,
    posterior: type[Posterior] | None = None,
) -> BayesianModule:
    """Read a Bayesian network that :func:`save` or a training checkpoint wrote.

    Args:
        path: the file.
        net: a network of the same architecture; its values do not matter and it is not changed.
        likelihood: only for one that bayesify does not know by name.
        prior: likewise.
        perturbation: likewise, or to use another estimator than the stored one.
        posterior: likewise, its class.

    Returns:
        The network as it was saved, on the CPU.

    Raises:
        StorageError: the file is missing, cut off, altered, not bayesify's, or of another
            architecture.

    Example:
        >>> import tempfile
        >>> bnn = BayesianModule(nn.Linear(3, 2), seed=5)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(bnn, f"{folder}/model.safetensors")
        ...     load(f"{folder}/model.safetensors", nn.Linear(3, 2)).seed
        5
    """
    tensors, meta = read_tensors(Path(path))
    return restore_model(
        net,
        tensors,
        meta.get("model", {}),
        source=str(path),
        likelihood=likelihood,
        prior=prior,
        perturbation=perturbation,
        posterior=posterior,
    )


def model_tensors(bnn: BayesianModule) -> dict[str, Tensor]:
    """The tensors of :func:`save`: the state dict, of pruned vectors only what is left."""
    state: dict[str, Tensor] = dict(bnn.state_dict())
    kept = bnn.posterior.kept
    if kept is None:
        return state
    for name in _vectors(bnn):
        state[name] = state[name][kept]
    packed = np.packbits(kept.cpu().numpy())
    return state | {"posterior.kept": torch.from_numpy(packed)}


def model_meta(bnn: BayesianModule) -> dict[str, Any]:
    """What :func:`load` needs beside the tensors, as JSON."""
    return {
        "names": list(bnn.layout.names),
        "shapes": [list(shape) for shape in bnn.layout.shapes],
        "dtype": str(bnn.layout.dtype).removeprefix("torch."),
        "posterior": _type_name(bnn.posterior),
        "prior": _described(bnn.prior),
        "perturbation": _described(bnn.perturbation),
        "likelihood": {"type": _type_name(bnn.likelihood), **bnn.likelihood.config()},
        "seed": bnn.seed,
    }


def restore_model(
    net: nn.Module,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    *,
    source: str,
    likelihood: Likelihood | None = None,
    prior: Prior | None = None,
    perturbation: Perturbation | None = None,
    posterior: type[Posterior] | None = None,
) -> BayesianModule:
    """Build the network of :func:`model_tensors` and :func:`model_meta` again.

    Raises:
        StorageError: the parts are incomplete or do not fit ``net``.
    """
    try:
        names, shapes = meta["names"], [tuple(shape) for shape in meta["shapes"]]
        _check_architecture(net, names, shapes, source)
        bnn = BayesianModule(
            copy.deepcopy(net).to(getattr(torch, meta["dtype"])),
            likelihood=_component(likelihoods, Likelihood, meta["likelihood"])
            if likelihood is None
            else likelihood,
            prior=prior or _prior(meta["prior"]),
            posterior=posterior or _component_class(posteriors, Posterior, meta["posterior"]),
            perturbation=perturbation
            or _component(perturbations, Perturbation, meta["perturbation"]),
            prior_mean="initial" if _PRIOR_MEAN in tensors else None,
            include=[glob.escape(name) for name in names],
            exclude=(),
            seed=meta["seed"],
        )
        if list(bnn.layout.names) != list(names):
            raise StorageError(
                f"{source} is of another architecture: its parameters come in the order "
                f"{', '.join(names)}, those of the network given in {', '.join(bnn.layout.names)}"
            )
        state = unpacked(bnn, tensors)
        for name, tensor in bnn.state_dict(keep_vars=True).items():
            # Parts may have a dtype of their own, such as a learned noise or an excluded parameter.
            if name in state:
                tensor.data = tensor.data.to(state[name].dtype)
        bnn.load_state_dict(state)
    except StorageError:
        raise
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise StorageError(
            f"{source} does not describe a network of this kind: {reason}"
        ) from error
    return bnn


def _described(component: Prior | Perturbation) -> dict[str, Any]:
    name = _type_name(component)
    fields: dict[str, Any] = {}
    # A component from elsewhere is handed to load(), and its fields may be anything.
    if dataclasses.is_dataclass(component) and "." not in name:
        for field in dataclasses.fields(component):
            value = getattr(component, field.name)
            # An estimator that gains an option stays the same component: old runs go on.
            if not (isinstance(component, Perturbation) and value == field.default):
                fields[field.name] = _as_json(value)
    return {"type": name, **fields}


def _as_json(value: Any) -> Any:
    if isinstance(value, Prior):
        return _described(value)
    return [_as_json(item) for item in value] if isinstance(value, tuple) else value


def _type_name(component: object) -> str:
    kind = type(component)
    own = kind.__module__.partition(".")[0] == __name__.partition(".")[0]
    return kind.__name__ if own else f"{kind.__module__}.{kind.__qualname__}"


def _component_class(module: Any, kind: type[Any], name: str) -> Any:
    found = getattr(module, name, None) if name in module.__all__ else None
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ValueError(
            f"bayesify has no {kind.__name__.lower()} called {name!r}; pass your own to load()"
        )
    return found


def _component(module: Any, kind: type[Any], description: Mapping[str, Any]) -> Any:
    arguments = dict(description)
    return _component_class(module, kind, arguments.pop("type"))(**arguments)


def _prior(description: Mapping[str, Any]) -> Any:
    """The prior of a description, with the priors that it is made of."""
    fields = {name: _from_json(value) for name, value in dict(description).items()}
    own = groups if fields["type"] in groups.__all__ else priors
    return _component(own, Prior, fields)


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return _prior(value)
    return tuple(_from_json(item) for item in value) if isinstance(value, list) else value


def _check_architecture(
    net: nn.Module, names: list[str], shapes: list[tuple[int, ...]], source: str
) -> None:
    have = {name: tuple(p.shape) for name, p in net.named_parameters(remove_duplicate=False)}
    for name, shape in zip(names, shapes, strict=True):
        if have.get(name) != shape:
            got = f"shape {have[name]}" if name in have else "no such parameter"
            raise StorageError(
                f"{source} is of another architecture: its parameter {name!r} has shape {shape}, "
                f"the network given has {got}"
            )


def _vectors(bnn: BayesianModule) -> list[str]:
    """What the state holds one number of for each weight."""
    names = [f"posterior.{name}" for name, _ in bnn.posterior.named_parameters()]
    return names if bnn.prior_mean is None else [*names, _PRIOR_MEAN]


def unpacked(bnn: BayesianModule, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict behind :func:`model_tensors` or a checkpoint; passes over other tensors."""
    state = {
        name: tensors[name]
        for name in tensors
        if name.startswith(("posterior.", "likelihood.", "net.")) or name == _PRIOR_MEAN
    }
    if "posterior.kept" not in state or state["posterior.kept"].dtype == torch.bool:
        return state
    num_weights = bnn.layout.num_weights
    bits = np.unpackbits(state["posterior.kept"].numpy(), count=num_weights)
    kept = torch.from_numpy(bits.astype(bool))
    for name in _vectors(bnn):
        state[name] = torch.zeros(num_weights, dtype=state[name].dtype).masked_scatter(
            kept, state[name]
        )
    return state | {"posterior.kept": kept}
