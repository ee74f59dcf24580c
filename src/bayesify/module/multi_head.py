"""Network with a body for all tasks and an output layer for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

__all__ = ["MultiHead"]


class MultiHead(nn.Module):
    """A body that all tasks share, and a head for each task (Nguyen et al. 2018, section 3).

    Each example says which head answers, so that one minibatch may hold several tasks. The other
    heads have no gradient from it.

    Args:
        body: maps inputs to features; any module.
        heads: one module for each task, from features to outputs, all of the same shape. Each runs
            on the examples of all tasks, so that none may normalise by the batch, and each must be
            finite on all of them: the gradient of an overflow, though it counts 0 times, is NaN.

    Raises:
        ValueError: there is no head, or one has batch normalisation or running statistics.

    Example:
        >>> body = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        >>> net = MultiHead(body, [nn.Linear(8, 2) for _ in range(3)])
        >>> x, head = torch.zeros(5, 4), torch.tensor([0, 2, 1, 1, 0])
        >>> net(x, head).shape
        torch.Size([5, 2])
        >>> from bayesify import BayesianModule
        >>> BayesianModule(net).predict((x, head), num_samples=10).mean.shape
        torch.Size([5, 2])
    """

    def __init__(self, body: nn.Module, heads: Sequence[nn.Module]) -> None:
        super().__init__()
        if len(heads) < 1:
            raise ValueError("heads must have at least 1 module, got 0")
        for number, each in enumerate(heads):
            for name, module in each.named_modules():
                if isinstance(module, _NormBase) and _uses_batch(module):
                    place = f"{number}.{name}".rstrip(".")
                    raise ValueError(
                        "heads must treat each example by itself, since each runs on the examples "
                        f"of all tasks, but heads.{place} is {type(module).__name__}; use "
                        "nn.LayerNorm or nn.GroupNorm there"
                    )
        self.body = body
        self.heads = nn.ModuleList(heads)

    def forward(self, inputs: Tensor, head: Tensor) -> Tensor:
        """Return the outputs of each example's own head, shape (N, ...).

        Args:
            inputs: of the body, shape (N, ...).
            head: the index of each example's head, from 0, integers of shape (N,).

        Raises:
            TypeError: ``head`` does not hold integers.
            ValueError: ``head`` has another shape, or an index without a head; or the heads'
                outputs differ in shape.
        """
        features = self.body(inputs)
        check_head(head, features.shape[0], len(self.heads))
        return of_own_head([each(features) for each in self.heads], head)


def _uses_batch(module: _NormBase) -> bool:
    """Return whether the outputs for an example depend on others, of its batch or before it."""
    return isinstance(module, _BatchNorm) or module.track_running_stats


def check_head(head: Tensor, num_examples: int, count: int) -> None:
    """Check that each example has an index of a head, see :meth:`MultiHead.forward`.

    Example:
        >>> check_head(torch.tensor([0, 1]), num_examples=2, count=2)
    """
    if head.is_floating_point() or head.is_complex() or head.dtype == torch.bool:
        raise TypeError(f"head must hold integers, got {head.dtype}; use head.long()")
    if head.shape != (num_examples,):
        raise ValueError(
            f"head must have shape ({num_examples},), one index for each example, got "
            f"{tuple(head.shape)}"
        )
    # In compiled and exported code the values are not known.
    if not torch.compiler.is_compiling() and bool(((head < 0) | (head >= count)).any()):
        raise ValueError(
            f"head must lie from 0 to {count - 1}, got {int(head.min())} to {int(head.max())}"
        )


def of_own_head(outputs: Sequence[Tensor], head: Tensor) -> Tensor:
    """Return the outputs of each example's own head, shape (N, ...), from those of all heads.

    Example:
        >>> of_own_head([torch.zeros(2, 1), torch.ones(2, 1)], torch.tensor([0, 1]))
        tensor([[0.],
                [1.]])
    """
    # Not by a set: the symbolic sizes of an export cannot be hashed.
    if any(each.shape != outputs[0].shape for each in outputs):
        shapes = {tuple(each.shape) for each in outputs}
        raise ValueError(
            f"heads must return outputs of one shape, got {', '.join(map(str, sorted(shapes)))}"
        )
    stacked = torch.stack(list(outputs), dim=1)  # (N, heads, ...)
    index = head.long().view(-1, *[1] * (stacked.dim() - 1)).expand_as(stacked[:, :1])
    return stacked.gather(1, index).squeeze(1)


# For torch.fx, by which shrink traces, each is one operation: its code depends on values.
fx.wrap("check_head")
fx.wrap("of_own_head")
