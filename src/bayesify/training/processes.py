"""The processes that train one network together, and what they exchange."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from bayesify.noise.keys import process_count, process_rank

__all__ = ["PendingNumbers", "Processes", "digest"]


class PendingNumbers:
    """Numbers that are being added up while a process computes something else."""

    def __init__(self, numbers: Tensor, work: Any, conclude: Callable[[Tensor], None]) -> None:
        self._numbers, self._work, self._conclude = numbers, work, conclude

    def result(self) -> Tensor:
        """Wait for the sums and return them, float64, in the order of the numbers."""
        self._work.wait()
        self._conclude(self._numbers)
        return self._numbers[:-1]


class Processes:
    """All processes of ``torch.distributed``, or this one alone where there are no others.

    Every process holds the same parameters. A step's loss is the sum of what each process adds for
    its part of the minibatch, and so are the gradients: they are added up, never averaged.

    Args:
        shared_noise: whether all processes draw the same weights.

    Example:
        >>> processes = Processes()
        >>> processes.rank, processes.count, processes.total(2.5)
        (0, 1, 2.5)
    """

    def __init__(self, *, shared_noise: bool = False) -> None:
        self.rank, self.count = process_rank(), process_count()
        self.shared_noise = shared_noise and self.count > 1
        #: Whether this process was asked to stop; each step tells the others.
        self.asked_to_stop: Callable[[], bool] = lambda: False
        self._stops = False
        self._device = torch.device("cpu")  # of the last numbers

    @classmethod
    def alone(cls) -> Processes:
        """This process by itself, whatever others there are."""
        made = cls()
        made.rank, made.count = 0, 1
        return made

    @property
    def is_alone(self) -> bool:
        """Whether there is nothing to exchange."""
        return self.count == 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and messages."""
        return self.rank == 0

    @property
    def stops(self) -> bool:
        """Whether a process had been asked to stop when the last step began: equal in all."""
        return self.asked_to_stop() if self.is_alone else self._stops

    def first_sample(self, num_samples: int) -> int:
        """The index of the first of this process's weight samples of a step."""
        return 0 if self.shared_noise else self.rank * num_samples

    def begin_sums(self, numbers: Sequence[Tensor]) -> PendingNumbers:
        """Begin to add up numbers over the processes, and whether one of them is to stop."""
        own = [each.detach().to(torch.float64) for each in numbers]
        own.append(own[0].new_tensor(float(self.asked_to_stop())))
        joined = torch.stack(own)
        self._device = joined.device
        work = distributed.all_reduce(joined, async_op=True)
        return PendingNumbers(joined, work, self._take_stop)

    def _take_stop(self, numbers: Tensor) -> None:
        self._stops = bool(numbers[-1] > 0.0)

    def agree_to_stop(self) -> None:
        """Tell the others whether this process was asked to stop since the last step began."""
        if not self.is_alone:
            self._stops = self.total(float(self.asked_to_stop()), self._device) > 0.0

    def add_up(self, vectors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the processes."""
        if self.is_alone:
            return
        works = [distributed.all_reduce(each, async_op=True) for each in vectors]
        for work in works:
            work.wait()

    def add_up_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Add up the gradients of parameters over the processes, in place.

        A parameter that only some processes used counts with zeros in the others.
        """
        if self.is_alone or not parameters:
            return
        missing = [float(each.grad is None) for each in parameters]
        without = torch.tensor(missing, device=parameters[0].device)
        self.add_up([without])
        wanted = [
            each
            for each, count in zip(parameters, without.tolist(), strict=True)
            if count < self.count
        ]
        for each in wanted:
            if each.grad is None:
                each.grad = torch.zeros_like(each)
        # Small ones in one message for each dtype; a large one as it is.
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        large = []
        for each in wanted:
            assert each.grad is not None
            if each.numel() >= _LARGE and each.grad.is_contiguous():
                large.append(each.grad)
            else:
                by_dtype.setdefault(each.grad.dtype, []).append(each.grad)
        joined = {kind: torch.cat([g.reshape(-1) for g in gs]) for kind, gs in by_dtype.items()}
        self.add_up([*large, *joined.values()])
        for kind, gradients in by_dtype.items():
            parts = joined[kind].split([each.numel() for each in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def total(self, number: float, device: torch.device | str = "cpu") -> float:
        """Return the sum of a number over the processes."""
        if self.is_alone:
            return number
        joined = torch.tensor(number, dtype=torch.float64, device=device)
        self.add_up([joined])
        return float(joined)

    def from_first(self, value: Any) -> Any:
        """Return the first process's value in all of them."""
        if self.is_alone:
            return value
        values = [value]
        distributed.broadcast_object_list(values, src=0)
        return values[0]

    def wait(self) -> None:
        """Wait until all processes are here."""
        if not self.is_alone:
            distributed.barrier()

    def check_equal(self, values: Mapping[str, object], mend: str) -> None:
        """Raise ValueError in all processes where a value is not the same in all of them.

        Args:
            values: by what they are called in the message; they are compared as text.
            mend: how to mend a difference.
        """
        if self.is_alone:
            return
        own = {name: str(value) for name, value in values.items()}
        found: list[dict[str, str]] = [{}] * self.count
        distributed.all_gather_object(found, own)
        for name in own:
            different = list(dict.fromkeys(each[name] for each in found))
            if len(different) > 1:
                ranks = [
                    next(rank for rank, each in enumerate(found) if each[name] == value)
                    for value in different
                ]
                pairs = zip(different, ranks, strict=True)
                told = ", ".join(f"{value[:200]} in process {rank}" for value, rank in pairs)
                raise ValueError(
                    f"the {name} must be the same in all processes, got {told}; {mend}"
                )

    @torch.no_grad()
    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        """Copy the first process's values of tensors to the others."""
        if self.is_alone:
            return
        for tensor in tensors:
            dimensions = zip(tensor.shape, tensor.stride(), strict=True)
            if any(size > 1 and stride == 0 for size, stride in dimensions):
                continue  # an expanded view, which cannot be written
            # As bytes: a backend may not know every dtype.
            whole = tensor.detach().contiguous()
            distributed.broadcast(whole.view(-1).view(torch.uint8), src=0)
            if not self.is_first and not tensor.is_contiguous():
                tensor.copy_(whole)

    @torch.no_grad()
    def equalise_buffers(self, net: nn.Module) -> None:
        """Average the running statistics of batch normalisation; copy the first's other buffers.

        Each process's are of its own examples.
        """
        if self.is_alone:
            return
        averaged = [
            each
            for module in net.modules()
            if isinstance(module, nn.modules.batchnorm._NormBase)
            for each in (module.running_mean, module.running_var)
            if each is not None
        ]
        for each in averaged:
            each.div_(self.count)
        self.add_up(averaged)
        known = set(map(id, averaged))
        self.copy_first(each for each in net.buffers() if id(each) not in known)


def digest(values: Iterable[object]) -> str:
    """Return a short text that differs between different values; tensors by their bytes.

    Example:
        >>> digest([torch.ones(2), "a"]) == digest([torch.ones(2), "b"])
        False
    """
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor) and value.layout is torch.strided:
            whole = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
            found.update(whole.numpy().tobytes())
        else:
            found.update(repr(value).encode())
    return found.hexdigest()[:16]


#: Elements from which a gradient is a message of its own.
_LARGE = 1_000_000
