"""The part of a pass that no random weight reaches: it is run once for all weight samples."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bayesify.estimators.network_state import evaluation_mode, modules_of, snapshot
from bayesify.estimators.out_of_memory import is_out_of_memory
from bayesify.module.edited_inputs import Repeated
from bayesify.module.recorded_pass import (
    RecordedCall,
    Recording,
    held_tensors,
    tensors_in_containers,
    version_of,
)
from bayesify.module.replayed_pass import Forgotten, Replay

__all__ = ["Trunk", "may_have_trunk", "may_zero_padding", "shared_part"]

#: The least part of a pass's work that must be saved.
_LEAST_SAVING = 0.2


class _Network(Protocol):
    """What is used of a ``RandomNetwork``, which itself uses this module."""

    net: Any
    layout: Any
    posterior: Any

    def run_with_named(self, tensors: Mapping[str, Tensor], /, *args: Any, **kwargs: Any) -> Any:
        """Run the network with one tensor for each random parameter."""

    def tensor_of(self, result: Any) -> Tensor:
        """Return what of a result the likelihood sees."""


def may_have_trunk(net: nn.Module) -> bool:
    """Return whether a part of a network may depend on no random weight, and can be left out.

    It needs weights that are not random. Forward hooks must see every pass, and compiled code
    hides its operations.

    Args:
        net: a network without its random parameters.

    Example:
        >>> from bayesify import BayesianModule
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> may_have_trunk(BayesianModule(net).net)
        False
        >>> may_have_trunk(BayesianModule(net, include=("2.*",)).net)
        True
    """
    modules = modules_of(net)
    return any(
        each is not None and each.dim() > 1
        for module in modules
        for each in (*module._parameters.values(), *module._buffers.values())
    ) and not any(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._compiled_call_impl is not None
        or hasattr(module, "_orig_mod")  # of torch.compile
        or may_zero_padding(module)  # in a kernel that no pass with a function mode takes
        for module in modules
    )


def may_zero_padding(module: nn.Module) -> bool:
    """Return whether the fused kernel of a module sets the outputs of padding to 0.

    Example:
        >>> layer = nn.TransformerEncoderLayer(4, 2, batch_first=True)
        >>> may_zero_padding(nn.TransformerEncoder(layer, 1)), may_zero_padding(layer)
        (True, False)
    """
    return isinstance(module, nn.TransformerEncoder) and bool(module.use_nested_tensor)


class Trunk:
    """The results of a first pass that depend on no random weight, for use in later passes.

    A later pass runs the same code, and calls the same functions. A function whose tensors are the
    very objects that they were in the first pass returns the result that it had there; all others
    are computed. A pass that calls another function, or with another number, has to be run as a
    whole. Results that only answered functions need are not kept.

    Args:
        network: the network, in evaluation mode.

    Example:
        >>> from bayesify import BayesianModule
        >>> net = nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 2))
        >>> bnn, x = BayesianModule(net, include=("2.*",)), torch.ones(5, 300)
        >>> trunk, weights = Trunk(bnn), bnn.posterior.mean.detach()
        >>> with torch.no_grad():
        ...     _ = trunk.first(weights, (x,), {})
        ...     outputs = trunk.again(weights + 1.0, (x,), {})
        ...     expected = bnn.run_with(weights + 1.0, x)
        >>> torch.equal(outputs, expected)
        True
    """

    def __init__(self, network: _Network) -> None:
        self._network = network
        self._calls: list[RecordedCall] = []
        self._objects: list[Any] = []
        self._versions: list[tuple[int, int]] = []
        self._inputs: Sequence[int] = ()
        #: Whether later passes differ from the first in the values of random tensors only.
        self.is_sound = False
        #: Whether later passes can be run by :meth:`again`, which saves a part of the work.
        self.is_used = False
        #: The part of a pass's work that depends on no random weight; 0 if it is not used.
        self.share = 0.0

    def first(self, weights: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Run the first pass, and return its outputs.

        Args:
            weights: shape (D,).
            args: positional inputs.
            kwargs: keyword inputs.
        """
        inputs, held = tensors_in_containers((args, kwargs)), held_tensors(self._network.net)
        recording = Recording(inputs, held)
        outputs = self._run(recording, weights, args, kwargs)
        self.is_sound = recording.is_sound(outputs)
        self.is_used = self.is_sound and recording.saving >= _LEAST_SAVING
        if self.is_used:
            self.share = recording.share
            self._calls, self._inputs = recording.calls, recording.inputs
            self._objects = [
                Forgotten(self) if each is None else each for each in recording.objects
            ]
            self._versions = [
                (place, version_of(each))
                for place, each in enumerate(recording.objects)
                if each is not None and place not in recording.inputs
            ]
        return outputs

    def again(self, weights: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Run a later pass, and return its outputs.

        If ``is_used`` is False afterwards, the pass went another way than the first, and must be
        run again as a whole.

        Args:
            weights: shape (D,).
            args: the positional inputs of this pass, of the same values as in the first.
            kwargs: its keyword inputs.
        """
        inputs = tensors_in_containers((args, kwargs))
        for place, tensor in zip(self._inputs, inputs, strict=True):
            self._objects[place] = tensor
        versions = [
            *self._versions,
            *((place, version_of(self._objects[place])) for place in self._inputs),
        ]
        outputs = self._run(Replay(self._calls, self._objects, self), weights, args, kwargs)
        is_edited = any(version_of(self._objects[place]) != was for place, was in versions)
        # More references than those of the list, the loop and the call are the network's.
        is_kept = any(
            type(each) is Forgotten and sys.getrefcount(each) > 3 for each in self._objects
        )
        self.is_used = self.is_used and not is_edited and not is_kept
        return outputs

    def _run(
        self,
        mode: TorchFunctionMode,
        weights: Tensor,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Tensor:
        tensors = self._network.layout.unflatten(weights)  # not an operation of the network
        with mode:
            return self._network.tensor_of(self._network.run_with_named(tensors, *args, **kwargs))


def shared_part(network: _Network, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    """Return the part of a pass's work that later passes leave out, from one pass at the mean.

    Args:
        network: the network; its modes, buffers and generator states are restored.
        args: positional inputs.
        kwargs: keyword inputs.

    Returns:
        From 0 to 1; 0 for a network that raises an error, as where the likelihood cannot read its
        result.

    Example:
        >>> from bayesify import BayesianModule
        >>> net = nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 2))
        >>> bnn = BayesianModule(net, include=("2.*",))
        >>> round(shared_part(bnn, (torch.ones(5, 300),), {}), 2)
        0.98
    """
    if not may_have_trunk(network.net):
        return 0.0
    trunk, undo = Trunk(network), snapshot(network.net)
    args, kwargs = Repeated().take((args, dict(kwargs)))
    evaluating = evaluation_mode(network.net)
    try:
        with torch.inference_mode(mode=False), torch.no_grad(), evaluating:
            trunk.first(network.posterior.masked_mean.detach().clone(), args, kwargs)
    except Exception as error:  # the user's network may raise any kind of error
        if is_out_of_memory(error):
            raise
    finally:
        undo()
    return trunk.share
