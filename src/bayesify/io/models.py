"""Saving and loading of Bayesian networks."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bayesify.distributions.likelihoods import Likelihood
from bayesify.distributions.posteriors import Posterior
from bayesify.distributions.priors import Prior
from bayesify.distributions.structured import PosteriorFamily
from bayesify.estimators import Estimator
from bayesify.estimators.network_state import copy_network
from bayesify.io.components import (
    described,
    described_posterior,
    estimator_of,
    likelihood_of,
    posterior_of,
    prior_of,
)
from bayesify.io.files import StorageError, check_restored, one_line, read_tensors, write_tensors
from bayesify.io.frozen_parameters import (
    check_patterns,
    freeze_as_described,
    frozen_of,
    without_frozen,
)
from bayesify.module.bayesian import BayesianModule
from bayesify.module.outputs import Output

__all__ = [
    "check_can_be_stored",
    "described_model",
    "load",
    "model_document",
    "model_meta",
    "model_tensors",
    "read_model",
    "restore_model",
    "save",
    "unpack_state",
]

_PRIOR_MEAN = "prior_mean"


def save(
    bnn: BayesianModule, path: str | os.PathLike[str], *, frozen: bool | Sequence[str] = True
) -> None:
    """Save parameters, buffers and components of a Bayesian network to a safetensors file.

    The file is written atomically. For a pruned network it holds the remaining weights only, and a
    mask of one bit per weight.

    Args:
        bnn: the network. Its architecture is not saved; :func:`load` needs the plain network.
        path: the file; an existing file is replaced.
        frozen: whether the file holds the frozen parameters too, such as the body of a pretrained
            network; name patterns select those that it holds. The others :func:`load` takes from
            the network that it is given, where they must be the same; their digest is stored.

    Raises:
        OSError: the file cannot be written; an existing file is then unchanged.
        TypeError: ``bnn`` is another object, or ``frozen`` neither a bool nor a sequence of
            patterns.
        ValueError: a pattern of ``frozen`` matches no frozen parameter, a module has state that is
            no tensor (``get_extra_state``), or a tensor a dtype that the format lacks, such as
            complex128.

    Example:
        >>> import tempfile
        >>> bnn = BayesianModule(nn.Linear(3, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(bnn, f"{folder}/model.safetensors")
        ...     again = load(f"{folder}/model.safetensors", nn.Linear(3, 2))
        >>> bool((again.posterior.mean == bnn.posterior.mean).all())
        True
    """
    if not isinstance(bnn, BayesianModule):
        fix = "an ordinary network is saved by safetensors.torch.save_model(net, path)"
        if isinstance(getattr(bnn, "bnn", None), BayesianModule):
            fix = "save its network: save(elbo.bnn, path)"
        elif hasattr(bnn, "members"):
            fix = "an ensemble is saved by ensemble.save(path)"
        raise TypeError(f"save needs a BayesianModule, got {type(bnn).__name__}; {fix}")
    check_patterns(frozen, bnn.net)
    write_tensors(Path(path), *model_document(bnn, frozen))


def model_document(
    bnn: BayesianModule, frozen: bool | Sequence[str] = True
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the description that :func:`save` writes.

    Example:
        >>> tensors, document = model_document(BayesianModule(nn.Linear(3, 2)))
        >>> sorted(tensors), document["kind"]
        (['posterior.mean', 'posterior.rho'], 'model')
    """
    tensors, described = described_model(bnn, frozen)
    return tensors, {"kind": "model", "model": described}


def described_model(
    bnn: BayesianModule, frozen: bool | Sequence[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a network, and the description that :func:`restore_model` needs."""
    with bnn.in_turn():  # a pass of another thread holds its weights in the modules
        tensors, described = without_frozen(bnn, model_tensors(bnn), frozen)
        return tensors, {**model_meta(bnn), **described}


def load(
    path: str | os.PathLike[str],
    net: nn.Module,
    *,
    likelihood: Likelihood | None = None,
    prior: Prior | None = None,
    estimator: Estimator | None = None,
    posterior: type[Posterior] | PosteriorFamily | None = None,
    output: Output | None = None,
) -> BayesianModule:
    """Load a Bayesian network from a file of :func:`save` or from a training checkpoint.

    Args:
        path: the file.
        net: a network of the same architecture. It is not changed. Its values are ignored, but
            for frozen parameters that the file leaves out.
        likelihood: the likelihood, required if it is not a class of bayesify.
        prior: the prior, required if it is not a class of bayesify.
        estimator: the estimator, required if it is not a class of bayesify; it may replace the
            saved one.
        posterior: the class or family of the posterior, required if it is not one of bayesify.
        output: what of the network's result the likelihood sees, required if it was a function.

    Returns:
        The network as it was saved, on the CPU. The parameters that were frozen then are frozen.

    Raises:
        TypeError: ``path`` is no path, or ``net`` no plain network.
        StorageError: the file is missing, truncated, altered, not written by bayesify, or of
            another architecture; or it leaves out frozen parameters, and those of ``net`` are
            others.

    Example:
        >>> import tempfile
        >>> bnn = BayesianModule(nn.Linear(3, 2), seed=5)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(bnn, f"{folder}/model.safetensors")
        ...     load(f"{folder}/model.safetensors", nn.Linear(3, 2)).seed
        5
    """
    tensors, meta = read_model(path, net)
    if meta.get("kind") == "ensemble":
        raise StorageError(f"{path} holds an ensemble; use bayesify.DeepEnsemble.load(path, net)")
    return restore_model(
        net,
        tensors,
        meta.get("model", {}),
        source=str(path),
        likelihood=likelihood,
        prior=prior,
        estimator=estimator,
        posterior=posterior,
        output=output,
    )


def read_model(
    path: str | os.PathLike[str], *nets: nn.Module
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the description in a file, for plain networks.

    Args:
        path: the file.
        nets: the networks that are to be restored; only their types are checked.

    Raises:
        TypeError: ``path`` is no path, or one of the networks no plain network.
        StorageError: the file is missing, truncated, altered or not written by bayesify.

    Example:
        >>> read_model("model.safetensors", BayesianModule(nn.Linear(3, 2)))
        Traceback (most recent call last):
        TypeError: net must be the plain network, got a BayesianModule; pass net.to_module()
    """
    for net in nets or (None,):
        if not isinstance(path, str | os.PathLike) or not isinstance(net, nn.Module):
            raise TypeError(
                "load needs a path and a network of the same architecture, load(path, net), got "
                f"{path!r} and {net!r}"
            )
        if isinstance(net, BayesianModule):
            raise TypeError(
                "net must be the plain network, got a BayesianModule; pass net.to_module()"
            )
    return read_tensors(Path(path))


def check_can_be_stored(bnn: BayesianModule) -> None:
    """Check that the state of a network is tensors, which files hold.

    Raises:
        ValueError: a module's ``get_extra_state`` returns something else.

    Example:
        >>> from torch import nn
        >>> check_can_be_stored(BayesianModule(nn.Linear(2, 1)))
    """
    for name, value in bnn.state_dict().items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"a file holds tensors, got a network with a {type(value).__name__} in {name}; "
                "keep what get_extra_state returns in a buffer; a network with PyTorch's quantised "
                "layers is saved before it is quantised"
            )


def model_tensors(bnn: BayesianModule) -> dict[str, Tensor]:
    """Return the tensors that :func:`save` writes: the state dict without pruned weights."""
    check_can_be_stored(bnn)
    state: dict[str, Tensor] = dict(bnn.state_dict())
    mask = bnn.posterior.mask
    if mask is None:
        return state
    for name in _weight_vectors(bnn):
        state[name] = state[name][mask]
    packed = np.packbits(mask.cpu().numpy())
    return state | {"posterior.mask": torch.from_numpy(packed)}


def model_meta(bnn: BayesianModule) -> dict[str, Any]:
    """Return the JSON description that :func:`load` needs in addition to the tensors."""
    return {
        "names": list(bnn.layout.names),
        "shapes": [list(shape) for shape in bnn.layout.shapes],
        "dtype": str(bnn.layout.dtype).removeprefix("torch."),
        "posterior": described_posterior(bnn.posterior),
        "prior": described(bnn.prior),
        "estimator": described(bnn.estimator),
        "likelihood": described(bnn.likelihood),
        "seed": bnn.seed,
        # A function cannot be stored, but that there was one can.
        **({} if bnn.output is None else {"output": {"name": _output_name(bnn.output)}}),
    }


def restore_model(
    net: nn.Module,
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    *,
    source: str,
    likelihood: Likelihood | None = None,
    prior: Prior | None = None,
    estimator: Estimator | None = None,
    posterior: type[Posterior] | PosteriorFamily | None = None,
    output: Output | None = None,
) -> BayesianModule:
    """Restore a network from the results of :func:`model_tensors` and :func:`model_meta`.

    The other arguments are those of :func:`load`.

    Raises:
        StorageError: tensors or description are incomplete, or do not fit ``net``.
    """
    try:
        names, shapes = meta["names"], [tuple(shape) for shape in meta["shapes"]]
        _check_architecture(net, names, shapes, source)
        bnn = BayesianModule(
            _of_dtype(net, names, getattr(torch, meta["dtype"])),
            likelihood=likelihood_of(meta["likelihood"]) if likelihood is None else likelihood,
            prior=prior or prior_of(meta["prior"]),
            posterior=posterior or posterior_of(meta["posterior"]),
            estimator=estimator or estimator_of(meta["estimator"]),
            prior_mean="initial" if _PRIOR_MEAN in tensors else None,
            include=[glob.escape(name) for name in names],
            exclude=(),
            output=_output_of(meta) if output is None else output,
            seed=meta["seed"],
        )
        if list(bnn.layout.names) != list(names):
            raise StorageError(
                f"{source} is of another architecture: its parameters have the order "
                f"{', '.join(names)}, those of the given network {', '.join(bnn.layout.names)}"
            )
        state = unpack_state(bnn, {**frozen_of(net, meta, source), **tensors})
        for name, tensor in bnn.state_dict(keep_vars=True).items():
            # A learned noise or an excluded parameter may have another dtype than the weights.
            if name in state:
                wide = tensor.dtype if name.startswith("posterior.") else state[name].dtype
                tensor.data = tensor.data.to(torch.promote_types(wide, state[name].dtype))
        try:
            bnn.load_state_dict(state)
        except RuntimeError:  # whose text is of PyTorch's classes
            _check_state(bnn, state, source)
            raise
        check_restored(state, bnn.state_dict(), source)
        freeze_as_described(bnn, meta)
    except StorageError:
        raise
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        is_absent = isinstance(error, KeyError)
        reason = f"it lacks {error}" if is_absent else one_line(error)
        raise StorageError(
            f"{source} does not describe a network that can be restored: {reason}"
        ) from error
    return bnn


def _of_dtype(net: nn.Module, names: Sequence[str], dtype: torch.dtype) -> nn.Module:
    """Return a copy with parameters of a dtype, and with them the buffers that had theirs.

    Other buffers stay as they are: those that a file does not hold may be complex, or times.
    """
    copied = copy_network(net)
    parameters = dict(copied.named_parameters(remove_duplicate=False))
    random = [parameters[name] for name in names]
    before = {parameter.dtype for parameter in random}
    for tensor in (*random, *(each for each in copied.buffers() if each.dtype in before)):
        tensor.data = tensor.data.to(dtype)
    return copied


def _check_state(bnn: BayesianModule, state: Mapping[str, Tensor], source: str) -> None:
    """Raise StorageError where the parts that are not random are those of another network."""
    own = {name: tuple(tensor.shape) for name, tensor in bnn.state_dict().items()}
    for name in sorted(own.keys() ^ state.keys()):
        if not name.startswith("net."):
            continue
        has = "lacks" if name in own else "has"
        raise StorageError(
            f"{source} is of another architecture: it {has} {name.removeprefix('net.')!r}, which "
            f"the given network {'has' if name in own else 'lacks'}"
        )
    for name, shape in own.items():
        if name.startswith("net.") and tuple(state[name].shape) != shape:
            raise StorageError(
                f"{source} is of another architecture: its {name.removeprefix('net.')!r} has shape "
                f"{tuple(state[name].shape)}, that of the given network {shape}"
            )


def _output_name(output: Output) -> str | None:
    return output if isinstance(output, str) else None


def _output_of(meta: Mapping[str, Any]) -> str | None:
    """Return the name of the field of the network's result, if one was picked by name.

    Raises:
        ValueError: a function picked it.
    """
    if "output" not in meta:
        return None
    name: str | None = meta["output"]["name"]
    if name is None:
        raise ValueError(
            "a function picked a tensor of the network's result; pass it to load(..., output=...)"
        )
    return name


def _check_architecture(
    net: nn.Module, names: list[str], shapes: list[tuple[int, ...]], source: str
) -> None:
    parameters = dict(net.named_parameters(remove_duplicate=False))
    for name, shape in zip(names, shapes, strict=True):
        found = parameters.get(name)
        if found is None or tuple(found.shape) != shape:
            got = "no such parameter" if found is None else f"shape {tuple(found.shape)}"
            raise StorageError(
                f"{source} is of another architecture: its parameter {name!r} has shape {shape}, "
                f"the given network has {got}"
            )
        if not found.requires_grad:
            raise StorageError(
                f"{source} is of another architecture: its parameter {name!r} is random, that of "
                "the given network is frozen; thaw it with requires_grad_(True)"
            )


def _weight_vectors(bnn: BayesianModule) -> list[str]:
    """Return the names of the entries of the state whose first axis is that of the weights."""
    names = [f"posterior.{name}" for name in bnn.posterior.names_by_weight()]
    return names if bnn.prior_mean is None else [*names, _PRIOR_MEAN]


def unpack_state(bnn: BayesianModule, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict from the tensors of :func:`model_tensors` or of a checkpoint.

    Tensors that are not part of the network's state are ignored.
    """
    state = {
        name: tensors[name]
        for name in tensors
        if name.startswith(("posterior.", "likelihood.", "net.")) or name == _PRIOR_MEAN
    }
    if "posterior.mask" not in state or state["posterior.mask"].dtype == torch.bool:
        return state
    num_weights = bnn.layout.num_weights
    bits = np.unpackbits(state["posterior.mask"].numpy(), count=num_weights)
    mask = torch.from_numpy(bits.astype(bool))
    for name in _weight_vectors(bnn):
        kept = state[name]
        state[name] = kept.new_zeros(num_weights, *kept.shape[1:])
        state[name][mask] = kept
    return state | {"posterior.mask": mask}
