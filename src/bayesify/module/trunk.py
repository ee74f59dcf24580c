"""The operations of a pass before the first random parameter: run once for all weight samples."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bayesify.estimators.stateless import modules_of
from bayesify.module.random_network import RandomNetwork
from bayesify.module.recorded_pass import (
    Call,
    Forgotten,
    Recording,
    Replay,
    State,
    held_tensors,
    tensors_in_containers,
)

__all__ = ["Trunk", "may_have_trunk"]

#: The least part of a pass's operations that are answered from memory.
_LEAST_SHARE = 0.2


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
        for module in modules
    )


class Trunk:
    """The results of a first pass that depend on no random weight, for use in later passes.

    A later pass runs the same code. A PyTorch function that is called in the same place with the
    same arguments, the same objects and not only equal values, returns the result of the first
    pass; all others are computed. So whatever depends on the random weights is computed, whichever
    way it does. Results that only answered functions need are not kept.

    Args:
        network: the network, in evaluation mode.

    Example:
        >>> import torch
        >>> from bayesify import BayesianModule
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> bnn, x = BayesianModule(net, include=("2.*",)), torch.ones(5, 3)
        >>> trunk, weights = Trunk(bnn), bnn.posterior.mean.detach()
        >>> with torch.no_grad():
        ...     _ = trunk.first(weights, (x,), {})
        ...     outputs = trunk.again(weights + 1.0, (x,), {})
        ...     expected = bnn.run_with(weights + 1.0, x)
        >>> trunk.share, torch.equal(outputs, expected)
        (0.6666666666666666, True)
    """

    def __init__(self, network: RandomNetwork) -> None:
        self._network = network
        self._calls: list[Call | None] = []
        self._objects: list[Any] = []
        self._states: list[tuple[int, State]] = []
        self._inputs: Sequence[int] = ()
        #: Whether later passes can be run by :meth:`again`, which saves a part of the operations.
        self.is_used = False
        #: The part of a pass's operations that depends on no random weight; 0 if it is not used.
        self.share = 0.0

    def first(self, weights: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Run the first pass, and return its outputs.

        Args:
            weights: shape (D,).
            args: positional inputs.
            kwargs: keyword inputs.
        """
        recording = Recording(
            tensors_in_containers((args, kwargs)), held_tensors(self._network.net)
        )
        outputs = self._run(recording, weights, args, kwargs)
        self.is_used = recording.is_sound(outputs) and recording.share >= _LEAST_SHARE
        if self.is_used:
            self.share = recording.share
            self._calls, self._inputs = recording.calls, recording.inputs
            self._objects = [
                Forgotten(self) if each is None else each for each in recording.objects
            ]
            self._states = [
                (place, State.of(each))
                for place, each in enumerate(recording.objects)
                if each is not None and place not in recording.inputs
            ]
        return outputs

    def again(self, weights: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Run a later pass, and return its outputs.

        If ``is_used`` is False afterwards, the pass went another way than the first, and must be
        run again without.

        Args:
            weights: shape (D,).
            args: the positional inputs of this pass, of the same values as in the first.
            kwargs: its keyword inputs.
        """
        for place, tensor in zip(self._inputs, tensors_in_containers((args, kwargs)), strict=True):
            self._objects[place] = tensor
        outputs = self._run(Replay(self._calls, self._objects), weights, args, kwargs)
        is_edited = any(State.of(self._objects[place]) != was for place, was in self._states)
        # Besides the list, the loop and the call: what the network keeps, it shall have whole.
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
