"""Products with a weight, as ``x @ w``, ``addmm`` and ``einsum``, in the form of a linear layer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from string import ascii_lowercase
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bayesify.estimators.operations import LinearOperation

__all__ = ["product"]

#: The functions, by the names under which they are reported.
_PRODUCTS: dict[Callable[..., Any], str] = {
    **dict.fromkeys((operator.matmul, torch.matmul, Tensor.matmul, Tensor.__matmul__), "matmul"),
    **dict.fromkeys((torch.mm, Tensor.mm), "mm"),
    **dict.fromkeys((torch.mv, Tensor.mv), "mv"),
    **dict.fromkeys((torch.addmm, Tensor.addmm), "addmm"),
    Tensor.__rmatmul__: "rmatmul",
    torch.einsum: "einsum",
}


def product(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    is_weight: Callable[[object], bool],
) -> LinearOperation | None:
    """Parse a product of inputs and a weight, which has no axis of the examples.

    Args:
        function: the function of PyTorch that was called.
        args: its positional arguments.
        kwargs: its keyword arguments.
        is_weight: whether an argument is a weight.

    Returns:
        The linear layer that computes it, or None if the call is no such product.

    Example:
        >>> x, w = torch.ones(4, 2), torch.arange(6.0).view(2, 3)
        >>> operation = product(torch.mm, (x, w), {}, lambda value: value is w)
        >>> operation.output_axes, operation.input_axes
        ((1,), (0,))
        >>> bool((operation.apply(x, w, None) == x @ w).all())
        True
    """
    if function not in _PRODUCTS or kwargs:
        return None
    name = _PRODUCTS[function]
    bias, equation, operands = None, None, list(args)
    if name == "einsum":
        equation, *operands = operands
        if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
            operands = list(operands[0])
    elif name == "addmm":
        bias, *operands = operands
    elif name == "rmatmul":
        operands.reverse()
    if len(operands) != 2 or not all(isinstance(each, Tensor) for each in operands):
        return None
    if not any(is_weight(each) for each in (bias, *operands)):
        return None
    second = name == "addmm" or is_weight(operands[1])
    inputs, weight = operands if second else operands[::-1]
    if bias is not None and (not isinstance(bias, Tensor) or bias.dim() != 1):
        return None
    if inputs.layout is not torch.strided or inputs.is_nested:
        return None  # F.linear does not take all of these
    if equation is None:
        equation = _matmul(inputs.dim(), weight.dim(), second)
    letters = _axes(equation, inputs.dim(), second)
    if letters is None or not _fit(inputs, weight, *letters[:2]):
        return None
    return _as_layer(inputs, weight, bias, *letters, name=name)


def _matmul(inputs: int, weight: int, second: bool) -> str | None:
    """Return the equation of a matrix product, given how many axes inputs and weight have."""
    if weight not in (1, 2) or inputs == 0:
        return None
    lead, out = ascii_lowercase[: inputs - 1], "z" * (weight - 1)
    if second:
        return f"{lead}y,y{out}->{lead}{out}"
    if inputs == 1:
        return f"{out}y,y->{out}"
    return f"{out}y,{lead[:-1]}y{lead[-1]}->{lead[:-1]}{out}{lead[-1]}"


def _axes(equation: object, dims: int, second: bool) -> tuple[str, str, str] | None:
    """Return the axes' letters of inputs, weight and outputs, or None if this is no such product.

    Args:
        equation: of ``einsum``, with two operands.
        dims: the number of the inputs' axes.
        second: whether the weight is the second operand.
    """
    if not isinstance(equation, str) or equation.count("->") != 1:
        return None
    left, outputs = equation.replace(" ", "").split("->")
    operands = left.split(",")
    if len(operands) != 2:
        return None
    inputs, weight = operands if second else operands[::-1]
    unused = [letter for letter in ascii_lowercase if letter not in equation]
    rest = dims - len(inputs.replace("...", ""))
    if "..." in inputs and 0 <= rest <= len(unused):
        letters = "".join(unused[:rest])
        inputs, outputs = inputs.replace("...", letters), outputs.replace("...", letters)
    if "." in inputs + weight + outputs or len(inputs) != dims:
        return None
    if any(len(set(letters)) < len(letters) for letters in (inputs, weight, outputs)):
        return None
    # A letter of the weight is one of the inputs' or of the outputs', and not of both; no letter
    # is summed over the inputs alone.
    summed = set(inputs) & set(weight)
    if not summed or summed & set(outputs) or set(inputs) ^ set(weight) != set(outputs):
        return None
    return inputs, weight, outputs


def _fit(inputs: Tensor, weight: Tensor, input_letters: str, weight_letters: str) -> bool:
    """Whether axes of one letter have one size; einsum also repeats an axis of size 1."""
    if len(weight_letters) != weight.dim():
        return False
    sizes = dict(zip(input_letters, inputs.shape, strict=True))
    pairs = zip(weight_letters, weight.shape, strict=True)
    return all(sizes.get(letter, size) == size for letter, size in pairs)


def _as_layer(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    input_letters: str,
    weight_letters: str,
    output_letters: str,
    name: str,
) -> LinearOperation:
    summed = [letter for letter in weight_letters if letter in input_letters]
    made = [letter for letter in weight_letters if letter not in summed]
    lead = [letter for letter in input_letters if letter not in summed]
    axes = [input_letters.index(letter) for letter in lead + summed]
    if axes != list(range(len(axes))) or len(summed) > 1:
        inputs = inputs.permute(axes).flatten(len(lead))
    sizes = [weight.shape[weight_letters.index(letter)] for letter in made]
    order = [(lead + made).index(letter) for letter in output_letters]
    return LinearOperation(
        F.linear,
        inputs,
        weight,
        bias,
        output_axes=tuple(weight_letters.index(letter) for letter in made),
        input_axes=tuple(weight_letters.index(letter) for letter in summed),
        name=name,
        reshape=partial(_reshaped, sizes=sizes, order=order),
    )


def _reshaped(outputs: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    return outputs.reshape(*outputs.shape[:-1], *sizes).permute(*order)
