"""What a pass of a network takes: measured on a few data, before there are many."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from bayesify import stateless
from bayesify.inputs import Inputs, batches_of, check_rows, count_data
from bayesify.random_network import RandomNetwork, as_tensor

__all__ = ["FEW", "Footprint", "MemoryTracker", "SlowPath"]

#: How many data a footprint is measured on.
FEW = 8

# What torch.vmap does in one operation, for all weight samples and without a word of warning. A
# network of any other operation is run sample by sample.
_VECTORISED = frozenset({
    "_adaptive_avg_pool2d", "_log_softmax", "_prelu_kernel", "_softmax", "_to_copy",
    "_unsafe_view", "abs", "add", "add_", "addmm", "avg_pool2d", "baddbmm", "bmm", "cat",
    "clamp", "clone", "convolution", "cos", "div", "div_", "elu", "embedding", "empty", "exp",
    "expand", "gelu", "hardtanh", "leaky_relu", "log", "masked_fill", "max_pool2d_with_indices",
    "mean", "mm", "mul", "mul_", "native_batch_norm", "native_group_norm", "native_layer_norm",
    "neg", "permute", "pow", "relu", "relu_", "rsub", "select", "sigmoid", "silu", "sin",
    "slice", "softplus", "split", "split_with_sizes", "sqrt", "squeeze", "stack", "sub", "sub_",
    "sum", "t", "tanh", "transpose", "unsqueeze", "view",
})  # fmt: skip


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of the tensors that are made while it is entered.

    Attributes:
        live: of those that still exist.
        peak: the most that existed at one time, with what convolutions and recurrent layers take
            beside them.
        operations: what was run.

    Example:
        >>> with MemoryTracker() as tracker:
        ...     x = torch.ones(10).exp()
        >>> tracker.live, tracker.peak, sorted(tracker.operations)
        (40, 80, ['exp', 'ones'])
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self.operations: set[str] = set()
        self._held: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch imports its compiler here: a second, and 70 MB.
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation, and count what it makes."""
        named = kwargs or {}
        given = {
            value.untyped_storage()._cdata
            for value in (*args, *named.values())
            if isinstance(value, Tensor)
        }
        result = func(*args, **named)
        name = func._schema.name.removeprefix("aten::")
        self.operations.add(name)
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor) and value.untyped_storage()._cdata not in given:
                self._hold(value.untyped_storage())
        self.peak = max(self.peak, self.live + _workspace(name, args, result))
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._held:
            return

        def let_go(_: object) -> None:
            del self._held[key]
            self.live -= size

        self._held[key] = weakref.ref(storage, let_go)
        self.live += size


def _workspace(name: str, args: Sequence[Any], result: Any) -> int:
    """Bytes that a kernel takes for itself, where that was found to be more than its result."""
    if name == "mkldnn_rnn_layer":
        return 5 * int(result[0].nbytes)
    if name != "convolution":
        return 0
    inputs, kernel = args[:2]
    if inputs.dtype in (torch.float32, torch.bfloat16):
        return int(inputs.nbytes + result.nbytes)  # in an order of its own
    # Every patch is laid beside the next.
    return int(kernel[0].numel() * result.numel() // result.shape[1] * result.element_size())


class SlowPath(TorchFunctionMode):
    """Does nothing but by being there: attention then goes without its fused kernel.

    Within that kernel no tracker sees the tensors, and it takes one weight sample only.

    Example:
        >>> with SlowPath():
        ...     torch.ones(2).exp()
        tensor([2.7183, 2.7183])
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the function as it is."""
        return func(*args, **(kwargs or {}))


class Footprint(NamedTuple):
    """What a pass of a network takes.

    Args:
        single: bytes of a pass over one datum.
        fixed: bytes of one over several, whatever their number.
        per_datum: and for each of them.
        output: of these, bytes of its output.
        vectorises: whether several weight samples can share a pass.
    """

    single: int
    fixed: int
    per_datum: int
    output: int
    vectorises: bool

    def taken(self, num_data: int) -> int:
        """Bytes of a pass over so many data.

        Example:
            >>> Footprint(70, fixed=50, per_datum=20, output=4, vectorises=True).taken(10)
            250
        """
        return self.single if num_data == 1 else self.fixed + num_data * self.per_datum

    def fitting(self, room: int) -> int:
        """How many data a pass can have that takes at most ``room`` bytes.

        Example:
            >>> Footprint(70, fixed=50, per_datum=20, output=4, vectorises=True).fitting(269)
            10
        """
        several = (room - self.fixed) // self.per_datum
        return several if several > 1 else int(self.single <= room)

    @classmethod
    def of(
        cls, network: RandomNetwork, inputs: Inputs, room: int, most: int = FEW
    ) -> tuple[Footprint, Tensor]:
        """Run the mean network on one datum and on a few; of these passes nothing stays.

        Args:
            network: in evaluation mode.
            inputs: as for ``BayesianModule.predict``.
            room: how many bytes a pass may take.
            most: how many data the few may be.

        Returns:
            The footprint, and the outputs of the few.

        Raises:
            ValueError: the outputs are no rows of data.

        Example:
            >>> from torch import nn
            >>> from bayesify import BayesianModule
            >>> with torch.no_grad():
            ...     Footprint.of(BayesianModule(nn.Linear(3, 2)), torch.zeros(100, 3), 10**6)[0]
            Footprint(single=8, fixed=0, per_datum=8, output=8, vectorises=True)
        """
        weights = network.posterior.masked_mean.clone()
        undo = stateless.snapshot(network.net)

        def measure(count: int) -> tuple[int, Tensor, bool]:
            args, kwargs = next(batches_of(inputs, count))
            # Copies, as a network may edit its inputs.
            args = tuple(value.clone() for value in args)
            kwargs = {name: value.clone() for name, value in kwargs.items()}
            with MemoryTracker() as tracker, SlowPath():
                result = as_tensor(network.run_with(weights, *args, **kwargs))
            outputs = result.clone()
            del result
            # What a network keeps of a pass would under vmap be no tensor that it can use.
            keeps = tracker.live > 0
            return tracker.peak, outputs, not keeps and tracker.operations <= _VECTORISED

        try:
            one, outputs, vectorises = measure(1)
            count = max(1, min(FEW, most, count_data(inputs), room // max(1, one)))
            peak, outputs, vectorises = measure(count) if count > 1 else (one, outputs, vectorises)
        finally:
            undo()
        check_rows(outputs, count)
        per_datum = (peak - one) / (count - 1) if count == FEW else peak / count
        footprint = cls(
            single=one,
            fixed=max(0, ceil(peak - count * per_datum)),
            per_datum=max(1, ceil(per_datum)),
            output=outputs.nbytes // count,
            vectorises=vectorises,
        )
        return footprint, outputs
