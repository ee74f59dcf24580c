"""The part of a network's result that the likelihood sees."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor

__all__ = ["MissingKLWarning", "Output", "check_output", "tensor_of", "warn_of_own_loss"]

#: The name of a field, such as ``"logits"``, or a function of the result.
Output: TypeAlias = str | Callable[[Any], Tensor]


def check_output(output: object) -> None:
    """Check that this picks a part of a result.

    Raises:
        TypeError: it is neither None, nor a name, nor a function.

    Example:
        >>> check_output("logits")
    """
    if not (output is None or isinstance(output, str) or callable(output)):
        raise TypeError(
            'output must be the name of a field, such as "logits", or a function of the network\'s '
            f"result, got {output!r}"
        )


def tensor_of(result: object, output: Output | None = None) -> Tensor:
    """Return the tensor that a likelihood needs from what a network returned.

    Args:
        result: one tensor; or what ``output`` takes: an object or a mapping with a field of that
            name, such as the results of Hugging Face's models, or any argument of the function.
        output: the name, the function, or None.

    Raises:
        TypeError: there is no such field, or what was picked is not a tensor.

    Example:
        >>> import torch
        >>> tensor_of({"logits": torch.zeros(2)}, "logits")
        tensor([0., 0.])
        >>> tensor_of({"logits": torch.zeros(2)})
        Traceback (most recent call last):
        TypeError: the network must return one tensor for the likelihood, got dict with logits; ...
    """
    picked = result
    if callable(output):
        picked = output(result)
    elif output is not None:
        picked = (
            result.get(output) if isinstance(result, Mapping) else getattr(result, output, None)
        )
    if isinstance(picked, Tensor):
        return picked
    got = type(picked).__name__
    if callable(output):
        raise TypeError(f"the function output must return one tensor for the likelihood, got {got}")
    fields = list(result) if isinstance(result, Mapping) else list(getattr(result, "_fields", ()))
    listed = f" with {', '.join(map(str, fields))}" if fields else ""
    if output is not None:
        held = f"{type(result).__name__}{listed}"
        raise TypeError(f"the network's result must have a tensor {output!r}, got {held}")
    example = '"logits"' if "logits" in fields else "lambda result: result[0]"
    raise TypeError(
        f"the network must return one tensor for the likelihood, got {got}{listed}; pick it with "
        f"BayesianModule(..., output={example})"
    )


class MissingKLWarning(UserWarning):
    """A network in training returned a loss of its own, in which the KL is missing.

    Example:
        >>> import torch
        >>> from bayesify import BayesianModule
        >>> class Labelled(torch.nn.Linear):
        ...     def forward(self, x, labels):
        ...         return {"loss": (super().forward(x) - labels).square().mean()}
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     _ = BayesianModule(Labelled(3, 1))(torch.zeros(2, 3), torch.zeros(2, 1))
        >>> str(caught[0].message)[:42]
        "the network's own loss lacks the KL: train"
    """


def warn_of_own_loss(result: object) -> None:
    """Warn if a network's result has a loss that can be differentiated.

    Raises:
        MissingKLWarning: it has, and warnings are errors.

    Example:
        >>> warn_of_own_loss({"logits": 1.0})
    """
    found = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(result, tuple) and len(result) > 1 and not hasattr(result, "loss"):
        # Models of Hugging Face without ``return_dict``: the loss first, a single number.
        first: object = result[0]
        found = first if isinstance(first, Tensor) and not first.dim() else None
    if isinstance(found, Tensor) and found.requires_grad:
        warnings.warn(
            "the network's own loss lacks the KL: train bayesify.ELBO(bnn, num_data=N), which "
            "takes the targets itself, without passing them to the network; with "
            "Hugging Face's Trainer use bayesify.integrations.transformers.ELBOTrainer",
            MissingKLWarning,
            stacklevel=5,
        )
