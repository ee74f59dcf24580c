"""The cases of the benchmark: networks, their inputs, and training or prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from bayesify.module.networks import mlp, resnet20

__all__ = ["CASES", "CLASSES", "NUM_DATA", "Case", "Work", "find_cases", "perceptron"]

Work = Literal["train", "predict", "predict-once", "predict-mean"]

CLASSES = 10
#: N of the objective, which is only a factor on the KL.
NUM_DATA = 60_000


@dataclass(frozen=True)
class Case:
    """A network and its work: training or prediction.

    Args:
        name: as on the command line.
        make_net: builds the plain network, always with the same initial values.
        shape: of one example.
        batches: default numbers of examples at once.
        hidden: units of each of the two hidden layers of a multilayer perceptron, or None.
        work: a training step, a prediction with 100 weight samples that follows others with the
            same posterior, one that is the first with its posterior, or one with the mean weights.
        device: where network and data are, ``"cpu"`` or ``"cuda"``.
        is_large: whether the network is so large that only Adam with weight sampling is measured,
            by the compiled backend and in a loop of one's own, and only where it is named.
    """

    name: str
    make_net: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batches: tuple[int, ...]
    hidden: int | None = None
    work: Work = "train"
    device: str = "cpu"
    is_large: bool = False

    def net(self) -> nn.Module:
        """Return the plain network on the device, always with the same initial values.

        Example:
            >>> len(CASES["mlp-400"].net())
            5
        """
        return self.make_net().to(self.device)

    def data(self, batch: int) -> tuple[Tensor, Tensor]:
        """Return ``batch`` random inputs between 0 and 1 and classes, the same at every call.

        Example:
            >>> inputs, targets = CASES["mlp-400"].data(128)
            >>> inputs.shape, targets.shape
            (torch.Size([128, 784]), torch.Size([128]))
        """
        generator = torch.Generator().manual_seed(0)
        inputs = torch.rand(batch, *self.shape, generator=generator)
        targets = torch.randint(CLASSES, (batch,), generator=generator)
        return inputs.to(self.device), targets.to(self.device)


def perceptron(
    name: str,
    hidden: int,
    *,
    inputs: int = 784,
    batches: tuple[int, ...] = (128, 1024),
    work: Work = "train",
    is_large: bool = False,
) -> Case:
    """Return the case of a multilayer perceptron with two hidden layers.

    Example:
        >>> perceptron("tiny", 8, inputs=4).make_net()[0]
        Linear(in_features=4, out_features=8, bias=True)
    """
    make_net = partial(mlp, inputs, (hidden, hidden), CLASSES)
    return Case(name, make_net, (inputs,), batches, hidden, work, is_large=is_large)


CASES = {
    case.name: case
    for case in (
        perceptron("mlp-400", 400),
        perceptron("mlp-1200", 1200),
        perceptron("mlp-2900", 2900, batches=(16,)),
        perceptron("mlp-9600", 9600, batches=(16,), is_large=True),
        Case("resnet-20", partial(resnet20, num_classes=CLASSES), (3, 32, 32), (128,)),
        perceptron("predict", 400, batches=(1, 16, 128, 1024), work="predict"),
        perceptron("predict-once", 400, work="predict-once"),
        perceptron("predict-mean", 400, work="predict-mean"),
    )
}


def find_cases(names: Sequence[str]) -> list[Case]:
    """Return the cases of these names, in the order of ``CASES``; without names all but the large.

    Raises:
        ValueError: a case is unknown.

    Example:
        >>> [case.name for case in find_cases(["resnet-20", "mlp-400"])]
        ['mlp-400', 'resnet-20']
    """
    for name in names:
        if name not in CASES:
            raise ValueError(f"case must be one of {', '.join(CASES)}, got {name!r}")
    return [case for case in CASES.values() if (case.name in names if names else not case.is_large)]
