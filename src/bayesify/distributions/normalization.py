"""Parameters that scale and shift features, which stay deterministic unless they are named."""

from __future__ import annotations

import re

from torch import Tensor, nn

__all__ = ["NORMALIZATION_LAYERS", "affine_names_within", "is_affine"]

NORMALIZATION_LAYERS: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)

#: Names of classes of other libraries, but not of what is called after the normal distribution.
_NORM = re.compile(r"norm(?!al(?!i[sz]))|layer_?scale", re.IGNORECASE)
#: Names of vectors that scale features.
_SCALE = re.compile(r"gamma(_?\d)?|layer_?scale\w*|lambda_?\d")


def is_affine(net: nn.Module, name: str) -> bool:
    """Return True if a parameter scales or shifts features: of a normalisation layer, or a scale.

    Those of PyTorch's normalisation layers, of which a module may be a part; vectors of modules
    whose class is called so, such as ``LlamaRMSNorm`` or ``LayerScale``; and vectors that are
    called ``gamma``, ``lambda_1`` or ``layer_scale``, as in the blocks of ConvNeXt and BEiT.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
        >>> is_affine(net, "0.weight"), is_affine(net, "1.weight")
        (False, True)
    """
    *path, leaf = name.split(".")
    module = net
    for step in ["", *path]:
        module = getattr(module, step) if step else module
        if isinstance(module, NORMALIZATION_LAYERS):
            return True
    weight = getattr(module, leaf)
    if not isinstance(weight, Tensor) or isinstance(weight, nn.parameter.UninitializedParameter):
        return False
    if weight.numel() != max(weight.shape, default=1):
        return False
    return _is_called_norm(type(module)) or _SCALE.fullmatch(leaf) is not None


def affine_names_within(net: nn.Module, kind: type[nn.Module]) -> set[str]:
    """Return the names of affine parameters that a type selects because it is a type of norm.

    All that are in modules of PyTorch's types. Of a class that is only called so, its own: a
    ``PreNorm`` may be a block around a norm, and the type of a block does not select what is in it.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
        >>> sorted(affine_names_within(net, nn.LayerNorm)), affine_names_within(net, nn.Sequential)
        (['1.bias', '1.weight'], set())
    """
    is_norm = issubclass(kind, NORMALIZATION_LAYERS)
    if not is_norm and not _is_called_norm(kind):
        return set()
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in net.named_modules(remove_duplicate=False)
        if isinstance(module, kind)
        for name, _ in module.named_parameters(recurse=is_norm, remove_duplicate=False)
    }


def _is_called_norm(kind: type) -> bool:
    return _NORM.search(kind.__name__) is not None
