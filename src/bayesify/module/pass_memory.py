"""Measure the memory of a forward pass on a few examples."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from bayesify.estimators.module_attributes import ModuleAttributes
from bayesify.estimators.network_state import snapshot
from bayesify.estimators.out_of_memory import is_out_of_memory
from bayesify.module.edited_inputs import copied
from bayesify.module.inputs import Inputs, batches_of, check_output_rows, count_examples
from bayesify.module.kept_samples import sampler_of
from bayesify.module.random_network import RandomNetwork
from bayesify.noise.keys import NoiseKey, Stream

__all__ = [
    "PROBE_SIZE",
    "Carried",
    "MemoryTracker",
    "PassMemory",
    "UnfusedAttention",
    "Unmeasured",
]

#: Number of examples in the larger of the two measured passes.
PROBE_SIZE = 8

# Operations for which torch.vmap has a batching rule that emits no warning. A network with any
# other operation is run sample by sample.
_VECTORISED = frozenset({
    "_adaptive_avg_pool2d", "_log_softmax", "_prelu_kernel", "_softmax", "_to_copy",
    "_unsafe_view", "abs", "add", "add_", "addmm", "avg_pool2d", "baddbmm", "bmm", "cat",
    "clamp", "clone", "convolution", "cos", "div", "div_", "elu", "embedding", "empty", "exp",
    "expand", "gelu", "hardtanh", "index", "leaky_relu", "log", "masked_fill",
    "max_pool2d_with_indices", "mean", "mm", "mul", "mul_", "native_batch_norm",
    "native_group_norm", "native_layer_norm", "neg", "permute", "pow", "relu", "relu_", "rsub",
    "select", "sigmoid", "silu", "sin", "slice", "softplus", "split", "split_with_sizes",
    "sqrt", "squeeze", "stack", "sub", "sub_", "sum", "t", "tanh", "transpose", "unsqueeze",
    "view",
})  # fmt: skip


class MemoryTracker(TorchDispatchMode):
    """A context that counts the bytes of the tensors that are allocated in it.

    Attributes:
        live: bytes of the tensors that still exist.
        peak: the largest number of bytes at any time, including the workspace of convolutions and
            recurrent layers.
        operations: names of the operations that were run.
        written: the storages of the tensors that were written to, by their address.

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
        self.written: set[int] = set()
        self._held: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports its compiler here, which takes a second and 70 MB.
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation and count the tensors that it allocates."""
        named = kwargs or {}
        given = {
            value.untyped_storage()._cdata
            for value in (*args, *named.values())
            if isinstance(value, Tensor)
        }
        result = func(*args, **named)
        name = func._schema.name.removeprefix("aten::")
        self.operations.add(name)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info and argument.alias_info.is_write:
                self._write(value)
        self._write(named.get("out"))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor) and value.untyped_storage()._cdata not in given:
                self._hold(value.untyped_storage())
        self.peak = max(self.peak, self.live + _workspace(name, args, result))
        return result

    @property
    def vectorises(self) -> bool:
        """Whether several weight samples can share what was run; ask once its results are gone.

        A network that stores tensors of a pass would store unusable vmap tensors.
        """
        return self.live == 0 and self.operations <= _VECTORISED

    def _write(self, target: object) -> None:
        for each in target if isinstance(target, list | tuple) else (target,):
            if isinstance(each, Tensor):
                self.written.add(each.untyped_storage()._cdata)

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._held:
            return

        def release(_: object) -> None:
            del self._held[key]
            self.live -= size

        self._held[key] = weakref.ref(storage, release)
        self.live += size


def _workspace(name: str, args: Sequence[Any], result: Any) -> int:
    """Return the bytes that a kernel allocates internally, for kernels measured to do so."""
    if name == "mkldnn_rnn_layer":
        return 5 * int(result[0].nbytes)
    if name != "convolution":
        return 0
    inputs, kernel = args[:2]
    if inputs.dtype in (torch.float32, torch.bfloat16):
        return int(inputs.nbytes + result.nbytes)  # copies in the kernel's memory layout
    # im2col: all patches of the inputs as one matrix.
    return int(kernel[0].numel() * result.numel() // result.shape[1] * result.element_size())


class UnfusedAttention(TorchFunctionMode):
    """A context in which attention layers do not use their fused kernel.

    Transformer layers skip the kernel whenever a function mode is active, so that the mode itself
    does nothing. The fused kernel hides its tensors from ``MemoryTracker``, has no dropout and
    cannot run several weight samples.

    Example:
        >>> with UnfusedAttention():
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
        """Call the function unchanged."""
        return func(*args, **(kwargs or {}))


class Carried(NamedTuple):
    """What a pass leaves in a network, where the outputs of passes with other weights depend on it.

    Args:
        names: the attributes that hold it.
        is_cache: whether it is a function of the weights alone, such as a derived weight that is
            kept in evaluation mode. Otherwise it is a state, as of a recurrent network that resumes
            from its last one.

    Example:
        >>> bool(Carried()), Carried(("net.scaled_weight",), is_cache=True).is_cache
        (False, True)
    """

    names: tuple[str, ...] = ()
    is_cache: bool = False

    def __bool__(self) -> bool:
        return bool(self.names)


class PassMemory(NamedTuple):
    """The memory of a forward pass as a function of the number of examples.

    Args:
        single: bytes of a pass over one example.
        fixed: bytes of a pass over several examples that do not depend on their number.
        per_example: additional bytes for each example.
        output: bytes of the output of one example, which ``per_example`` includes.
        vectorises: whether several weight samples can share a pass.
        edits_weights: whether the network writes to its weights.
        carried: what a pass leaves for later ones.
    """

    single: int
    fixed: int
    per_example: int
    output: int
    vectorises: bool
    edits_weights: bool = False
    carried: Carried = Carried()

    def bytes_for(self, num_examples: int) -> int:
        """Return the bytes of a pass over this number of examples.

        Example:
            >>> PassMemory(70, fixed=50, per_example=20, output=4, vectorises=True).bytes_for(10)
            250
        """
        return self.single if num_examples == 1 else self.fixed + num_examples * self.per_example

    def examples_within(self, available: int) -> int:
        """Return the largest number of examples in a pass of at most ``available`` bytes.

        Example:
            >>> memory = PassMemory(70, fixed=50, per_example=20, output=4, vectorises=True)
            >>> memory.examples_within(269)
            10
        """
        several = (available - self.fixed) // self.per_example
        return several if several > 1 else int(self.single <= available)

    @classmethod
    def of(
        cls,
        network: RandomNetwork,
        inputs: Inputs,
        available: int,
        probe_size: int = PROBE_SIZE,
    ) -> tuple[PassMemory, Tensor]:
        """Measure a pass of the mean network over one example and one over a few examples.

        Buffers and generator states of the network are restored afterwards, and attributes that
        carry tensors to later passes.

        Args:
            network: the network, in evaluation mode.
            inputs: as for ``BayesianModule.predict``.
            available: the largest number of bytes that a measured pass may need.
            probe_size: the largest number of examples in the second pass.

        Returns:
            The memory of a pass, and the outputs of the second pass.

        Raises:
            ValueError: the outputs are not rows of examples.

        Example:
            >>> from torch import nn
            >>> from bayesify import BayesianModule
            >>> with torch.no_grad():
            ...     memory, _ = PassMemory.of(BayesianModule(nn.Linear(3, 2)), torch.ones(9, 3), 99)
            >>> memory.single, memory.per_example, memory.vectorises, memory.edits_weights
            (8, 8, True, False)
        """
        weights = network.posterior.masked_mean.clone()
        undo, attributes = snapshot(network.net), ModuleAttributes(network.net)

        edits_weights = False

        def measure(count: int) -> tuple[int, Tensor, bool]:
            nonlocal edits_weights
            args, kwargs = next(batches_of(inputs, count))
            # Copies, as a network may edit its inputs.
            args, kwargs = copied((args, kwargs))
            with MemoryTracker() as tracker, UnfusedAttention():
                result = network.tensor_of(network.run_with(weights, *args, **kwargs))
            edits_weights |= weights.untyped_storage()._cdata in tracker.written
            outputs = result.clone()
            del result
            return tracker.peak, outputs, tracker.vectorises

        try:
            one, outputs, vectorises = measure(1)
            affordable = available // max(1, one)
            count = max(1, min(PROBE_SIZE, probe_size, count_examples(inputs), affordable))
            peak = one
            if count > 1:
                try:
                    peak, outputs, vectorises = measure(count)
                except Exception:
                    attributes.restore()  # what one example has left may not suit several
                    peak, outputs, vectorises = measure(count)
            carried = _carried(network, inputs, count, undo, attributes)
        except Exception:
            attributes.restore()
            raise
        finally:
            undo()
        check_output_rows(outputs, count)
        per_example = (peak - one) / (count - 1) if count == PROBE_SIZE else peak / count
        pass_memory = cls(
            single=one,
            fixed=max(0, ceil(peak - count * per_example)),
            per_example=max(1, ceil(per_example)),
            output=outputs.nbytes // count,
            vectorises=vectorises,
            edits_weights=edits_weights,
            carried=carried,
        )
        return pass_memory, outputs


class Unmeasured(NamedTuple):
    """A pass of a network that takes no few examples, such as some of the nodes of a graph.

    Args:
        carried: as for :class:`PassMemory`.
        takes_few: whether it takes a few examples, though their memory cannot be measured.
    """

    carried: Carried = Carried()
    takes_few: bool = True

    @classmethod
    def of(cls, network: RandomNetwork, inputs: Inputs, count: int) -> Unmeasured:
        """Run the mean network, and restore its buffers, generator states and attributes.

        Args:
            network: the network, in evaluation mode.
            inputs: as for ``BayesianModule.predict``.
            count: the number of examples in a pass.
        """
        undo, attributes = snapshot(network.net), ModuleAttributes(network.net)
        try:
            args, kwargs = copied(next(batches_of(inputs, count)))
            network.run_with(network.posterior.masked_mean.clone(), *args, **kwargs)
            return cls(_carried(network, inputs, count, undo, attributes))
        finally:
            undo()
            attributes.restore()


def _carried(
    network: RandomNetwork,
    inputs: Inputs,
    count: int,
    undo: Callable[[], None],
    attributes: ModuleAttributes,
) -> Carried:
    """Return what a pass left on which the outputs under a weight sample depend.

    If there is any, the attributes are those of before that pass.

    Args:
        network: the network, after a pass with other weights.
        inputs: as for ``BayesianModule.predict``.
        count: the number of examples.
        undo: restores buffers and generator states.
        attributes: those before the pass.
    """
    names = tuple(attributes.new_tensors())
    if not names:
        return Carried()
    key = NoiseKey(network.seed, Stream.PREDICTION, 0)
    (weights,) = sampler_of(network.posterior, key)(range(1))

    def outputs(*, is_zero: bool = False) -> Tensor:
        undo()
        args, kwargs = copied(next(batches_of(inputs, count)))
        if is_zero:
            args, kwargs = tree_map_only(Tensor, torch.zeros_like, (args, kwargs))
        with UnfusedAttention():
            result = network.run_with(weights.clone(), *args, **kwargs)
        return network.tensor_of(result).clone()

    first, alone = outputs(), []
    for _ in range(2):  # since a network may be random
        attributes.restore()
        alone.append(outputs())
    if not _are_equal(*alone) or _are_equal(first, alone[0]):
        return Carried()
    try:
        attributes.restore()
        outputs(is_zero=True)
        is_cache = _are_equal(outputs(), alone[0])
    except Exception as error:  # of the user's network, which may not take zeros
        if is_out_of_memory(error):
            raise
        is_cache = False
    attributes.restore()
    return Carried(names, is_cache)


def _are_equal(some: Tensor, others: Tensor) -> bool:
    return some.shape == others.shape and torch.allclose(
        some, others, rtol=1e-4, atol=0.0, equal_nan=True
    )
