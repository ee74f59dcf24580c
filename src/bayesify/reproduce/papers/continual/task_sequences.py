"""Sequences of tasks: permuted MNIST and split MNIST."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify.datasets import ImageData
from bayesify.noise.keys import Stream, derived_seed

__all__ = ["Task", "permuted_tasks", "split_tasks", "with_head"]


@dataclass(frozen=True, eq=False)
class Task:
    """A task on the images of a data set; its examples are made when they are asked for.

    Args:
        data: the images of all tasks.
        pixels: the order of the pixels, shape (784,); None keeps it.
        classes: the classes to tell apart, which become the targets 0, 1, ...; None keeps all.
        head: the index of the head that answers; None where one head answers for all tasks.
    """

    data: ImageData
    pixels: Tensor | None = None
    classes: tuple[int, ...] | None = None
    head: int | None = None

    def train(self) -> tuple[Tensor, Tensor]:
        """Return the inputs (N, 784) and the targets (N,) to train on."""
        return self._examples(self.data.train_inputs, self.data.train_targets)

    def test(self) -> tuple[Tensor, Tensor]:
        """Return the inputs and the targets of the test part."""
        return self._examples(self.data.test_inputs, self.data.test_targets)

    def _examples(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if self.classes is not None:
            wanted = torch.tensor(self.classes)
            rows, targets = (targets.unsqueeze(1) == wanted).nonzero(as_tuple=True)
            inputs = inputs[rows]
        return (inputs if self.pixels is None else inputs[:, self.pixels]), targets


def permuted_tasks(data: ImageData, count: int, seed: int) -> list[Task]:
    """Return tasks of all ten digits, each with an order of the pixels of its own.

    Example:
        >>> from bayesify.datasets import load_images
        >>> tasks = permuted_tasks(load_images("mnist", limit=20), 2, seed=0)
        >>> (first, labels), (second, _) = tasks[0].train(), tasks[1].train()
        >>> torch.equal(first, second), torch.equal(first.sort().values, second.sort().values)
        (False, True)
    """
    generator = torch.Generator().manual_seed(derived_seed(seed, Stream.ENVIRONMENT, 0))
    size = data.train_inputs.shape[1]
    return [Task(data, pixels=torch.randperm(size, generator=generator)) for _ in range(count)]


def split_tasks(data: ImageData) -> list[Task]:
    """Return five tasks: 0 or 1, 2 or 3, and so on to 8 or 9, each with a head of its own.

    Example:
        >>> from bayesify.datasets import load_images
        >>> tasks = split_tasks(load_images("mnist", limit=20))
        >>> tasks[1].classes, tasks[1].train()[1]
        ((2, 3), tensor([0, 1, 1, 1, 0]))
    """
    return [Task(data, classes=(2 * i, 2 * i + 1), head=i) for i in range(5)]


def with_head(inputs: Tensor, head: int | None) -> Sequence[Tensor]:
    """Return the arguments of the network: the inputs, and the head of each if there are several.

    Example:
        >>> [each.shape for each in with_head(torch.zeros(5, 784), 2)]
        [torch.Size([5, 784]), torch.Size([5])]
    """
    return (inputs,) if head is None else (inputs, torch.full((len(inputs),), head))
