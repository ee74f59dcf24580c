"""Frozen parameters in files of networks: which there are, and which of them a file leaves out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from bayesify.distributions.layout import abbreviate
from bayesify.io.files import StorageError, digest_of
from bayesify.module.bayesian import BayesianModule

__all__ = ["check_patterns", "freeze_as_described", "frozen_of", "without_frozen"]


def without_frozen(
    bnn: BayesianModule, tensors: Mapping[str, Tensor], frozen: bool | Sequence[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Leave the frozen parameters of a network out of the tensors of its file, and describe them.

    Args:
        bnn: the network.
        tensors: those of its file, such as its state dict.
        frozen: as for ``bayesify.save``.

    Returns:
        The tensors that are left, and for the description of the network which parameters are
        frozen and which of them were left out.

    Raises:
        TypeError: ``frozen`` is neither a bool nor a sequence of patterns.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 2).requires_grad_(False), nn.Linear(2, 2))
        >>> bnn = BayesianModule(net, include=["1.*"])
        >>> without_frozen(bnn, bnn.state_dict(), frozen=False)[1]["frozen"]["names"]
        ['net.0.bias', 'net.0.weight']
    """
    if isinstance(frozen, str) or not isinstance(frozen, bool | Collection):
        raise TypeError(f"frozen must be a bool or a sequence of patterns, got {frozen!r}")
    untrained = sorted(n for n, each in bnn.named_parameters() if not each.requires_grad)
    left_out = _frozen_tensors(bnn.net, ("*",) if frozen is True else frozen or ())
    if not left_out:
        return dict(tensors), {"untrained": untrained}
    kept = {name: each for name, each in tensors.items() if name not in left_out}
    description = {"names": sorted(left_out), "sha256": digest_of(left_out, {})}
    return kept, {"untrained": untrained, "frozen": description}


def freeze_as_described(bnn: BayesianModule, meta: Mapping[str, Any]) -> None:
    """Freeze the parameters that the description of a network in a file has as frozen, no others.

    Args:
        bnn: the network.
        meta: the description. One of an earlier version says nothing, and nothing is changed.

    Example:
        >>> bnn = BayesianModule(nn.Linear(3, 2))
        >>> freeze_as_described(bnn, {"untrained": ["posterior.rho"]})
        >>> [name for name, each in bnn.named_parameters() if each.requires_grad]
        ['posterior.mean']
    """
    if "untrained" in meta:
        untrained = set(meta["untrained"])
        for name, parameter in bnn.named_parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.requires_grad_(name not in untrained)


def check_patterns(frozen: bool | Sequence[str], *nets: nn.Module) -> None:
    """Check the patterns of the frozen parameters that a file of some networks is to hold.

    Raises:
        ValueError: a pattern matches no frozen parameter of any.

    Example:
        >>> check_patterns(["boddy.*"], nn.Linear(3, 2).requires_grad_(False))
        Traceback (most recent call last):
        ValueError: every pattern of frozen must match a frozen parameter, but 'boddy.*' matches ...
    """
    if isinstance(frozen, bool | str) or not frozen:
        return
    names = [
        name
        for net in nets
        for name, each in net.named_parameters(remove_duplicate=False)
        if not each.requires_grad
    ]
    for pattern in frozen:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f"every pattern of frozen must match a frozen parameter, but {pattern!r} matches "
                f"none of {abbreviate(names) or 'them, as none is frozen'}; correct or remove it"
            )


def _frozen_tensors(net: nn.Module, but: Sequence[str]) -> dict[str, Tensor]:
    """Return the frozen parameters of a network that match no pattern, by their names in a file."""
    return {
        f"net.{name}": parameter.detach().cpu()
        for name, parameter in net.named_parameters(remove_duplicate=False)
        if not (parameter.requires_grad or any(fnmatchcase(name, pattern) for pattern in but))
    }


def frozen_of(net: nn.Module, meta: Mapping[str, Any], source: str) -> dict[str, Tensor]:
    """Return the parameters of a network that a file leaves out.

    Args:
        net: the network.
        meta: the description of the network in the file.
        source: the file, for the error.

    Raises:
        StorageError: they are not those that the file was saved with.

    Example:
        >>> frozen_of(nn.Linear(3, 2), {}, "model.safetensors")
        {}
    """
    left_out = meta.get("frozen")
    if left_out is None:
        return {}
    own = {f"net.{name}": p for name, p in net.named_parameters(remove_duplicate=False)}
    found = {name: own[name].detach().cpu() for name in left_out["names"] if name in own}
    if len(found) < len(left_out["names"]) or digest_of(found, {}) != left_out["sha256"]:
        raise StorageError(
            f"{source} was saved without its frozen parameters, and those of the given network are "
            "others; pass the pretrained network that was made Bayesian, with its values and dtype"
        )
    return found
