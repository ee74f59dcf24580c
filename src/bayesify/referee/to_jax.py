"""Translation of a PyTorch function of one vector to JAX, operator by operator.

NumPyro's sampler is compiled by JAX as a whole, which makes a step of it several times faster
than one that calls PyTorch. ``torch.export`` writes the function in PyTorch's core operators; here
is what those of small networks, priors and likelihoods are in JAX.
"""

from __future__ import annotations

import importlib
import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["import_optional", "to_jax"]

_aten = torch.ops.aten
#: Arguments of operators that say where and how a tensor is stored.
_OF_STORAGE = {"dtype", "device", "layout", "memory_format", "pin_memory", "non_blocking"}
#: Kept whole, as their decomposition has an infinite gradient in a branch that is not taken.
_WHOLE = (_aten.softplus.default, _aten.logaddexp.default, _aten.log_sigmoid_forward.default)


def import_optional(name: str) -> Any:
    """Import a module of JAX or NumPyro; it takes seconds, so that it is imported on use.

    Raises:
        ModuleNotFoundError: it is not installed.

    Example:
        >>> import_optional("jax.numpy").__name__
        'jax.numpy'
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("jax", "jaxlib", "numpyro"):
            raise
        raise ModuleNotFoundError(
            f"Hamiltonian Monte Carlo needs {error.name}, which is not installed; install it with "
            "pip install 'bayesify[referee]' or pip install numpyro",
            name=error.name,
        ) from error


def to_jax(function: Callable[[Tensor], Tensor], example: Tensor) -> Callable[[Any], Any]:
    """Return a function of a JAX vector that computes what ``function`` does of a tensor.

    Tensors that the function uses become constants. Call the result where JAX has float64.

    Args:
        function: maps a tensor of the shape of ``example`` to a tensor.
        example: a vector to trace the function with.

    Raises:
        NotImplementedError: the function uses an operator that is not translated.

    Example:
        >>> import jax
        >>> with jax.enable_x64(True):
        ...     square = to_jax(lambda w: w.square().sum(), torch.ones(2, dtype=torch.float64))
        ...     float(jax.grad(square)(jax.numpy.array([3.0, 4.0]))[1])
        8.0
    """
    jnp = import_optional("jax.numpy")
    table = _operators()
    decompositions = torch.export.default_decompositions()
    for whole in _WHOLE:
        decompositions.pop(whole, None)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of PyTorch's own use of its functions
        program = torch.export.export(_Function(function), (example,), strict=False)
        program = program.run_decompositions(decompositions)
    signature = program.graph_signature
    constants = {
        spec.arg.name: jnp.asarray((program.state_dict | program.constants)[spec.target].numpy())
        for spec in signature.input_specs
        if spec.target is not None
    }
    nodes = list(program.graph.nodes)
    unknown = {str(n.target) for n in nodes if n.op == "call_function"} - {str(t) for t in table}
    if unknown:
        raise NotImplementedError(
            f"the network or its likelihood uses {', '.join(sorted(unknown))}, which is not "
            "translated to JAX; the referee is for small networks of linear layers and common "
            "activations"
        )

    def run(weights: Any) -> Any:
        values: dict[Any, Any] = {}

        def value_of(argument: Any) -> Any:
            if isinstance(argument, torch.fx.Node):
                return values[argument]
            if isinstance(argument, list | tuple):
                return [value_of(each) for each in argument]
            return argument

        for node in nodes:
            if node.op == "placeholder":
                values[node] = constants.get(node.name, weights)
            elif node.op == "call_function":
                arguments = [value_of(each) for each in node.args]
                named = {k: value_of(v) for k, v in node.kwargs.items() if k not in _OF_STORAGE}
                try:
                    result = table[node.target](*arguments, **named)
                except TypeError as error:
                    raise NotImplementedError(
                        f"{node.target} with the arguments {node.args}, {dict(node.kwargs)} is not "
                        "translated to JAX; the referee is for small networks of linear layers and "
                        "common activations"
                    ) from error
                values[node] = _of_kind(result, node.meta.get("val"))
            else:
                (result,) = value_of(node.args[0])
        return result

    return run


def _of_kind(result: Any, like: Any) -> Any:
    """Return a result as numbers, whole numbers or truth values, whatever PyTorch's has."""
    if not isinstance(like, Tensor) or not hasattr(result, "astype"):
        return result
    jnp = import_optional("jax.numpy")
    if like.is_floating_point():
        kind = jnp.float64
    else:
        kind = jnp.bool_ if like.dtype == torch.bool else jnp.int64
    return result if result.dtype == kind else result.astype(kind)


class _Function(nn.Module):
    """A function as the module that ``torch.export`` takes."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, weights: Tensor) -> Tensor:
        """Call the function."""
        return self._function(weights)


def _operators() -> dict[Any, Callable[..., Any]]:
    """Return the JAX function of each translated operator, with the operator's arguments.

    Those of storage are left out: all is on the CPU, and :func:`_of_kind` converts results.
    """
    jax, jnp = import_optional("jax"), import_optional("jax.numpy")

    def split(x: Any, sizes: list[int], axis: int = 0) -> Any:
        ends = [sum(sizes[: place + 1]) for place in range(len(sizes) - 1)]
        return jnp.split(x, ends, axis)

    def expand(x: Any, shape: list[int]) -> Any:
        own = [1] * (len(shape) - x.ndim) + [*x.shape]
        return jnp.broadcast_to(x, [o if s == -1 else s for s, o in zip(shape, own, strict=True)])

    def add(x: Any, y: Any, alpha: Any = 1) -> Any:
        return x + (y if alpha == 1 else alpha * y)

    def sub(x: Any, y: Any, alpha: Any = 1) -> Any:
        return x - (y if alpha == 1 else alpha * y)

    def addmm(bias: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1) -> Any:
        return beta * bias + alpha * (x @ y)

    def softplus(x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
        return jnp.where(beta * x > threshold, x, jax.nn.softplus(beta * x) / beta)

    def elu(x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
        below = alpha * jnp.expm1(input_scale * jnp.minimum(x, 0.0))
        return scale * jnp.where(x > 0.0, x, below)

    def batch_norm(
        x: Any, weight: Any, bias: Any, mean: Any, variance: Any, momentum: float, eps: float
    ) -> Any:
        del momentum  # the averages are those of training
        shape = (1, -1, *(1,) * (x.ndim - 2))
        scaled = (x - mean.reshape(shape)) * jax.lax.rsqrt(variance.reshape(shape) + eps)
        scaled = scaled if weight is None else scaled * weight.reshape(shape)
        return (scaled if bias is None else scaled + bias.reshape(shape),)

    def total(x: Any, axes: list[int] | None = None, keepdims: bool = False) -> Any:
        return jnp.sum(x, None if not axes else tuple(axes), keepdims=keepdims)

    def average(x: Any, axes: list[int] | None = None, keepdims: bool = False) -> Any:
        return jnp.mean(x, None if not axes else tuple(axes), keepdims=keepdims)

    def layer_norm(x: Any, shape: list[int], weight: Any, bias: Any, eps: float) -> Any:
        axes = tuple(range(-len(shape), 0))
        centred = x - x.mean(axes, keepdims=True)
        scaled = centred * jax.lax.rsqrt(jnp.square(centred).mean(axes, keepdims=True) + eps)
        scaled = scaled if weight is None else scaled * weight
        return (scaled if bias is None else scaled + bias,)

    def gelu(x: Any, approximate: str = "none") -> Any:
        return jax.nn.gelu(x, approximate=approximate == "tanh")

    def cut(x: Any, axis: int = 0, start: int = 0, stop: int | None = None, step: int = 1) -> Any:
        place = [slice(None)] * x.ndim
        place[axis] = slice(start, stop, step)
        return x[tuple(place)]

    def index_copy(x: Any, axis: int, index: Any, source: Any) -> Any:
        return jnp.moveaxis(
            jnp.moveaxis(x, axis, 0).at[index].set(jnp.moveaxis(source, axis, 0)), 0, axis
        )

    def index_put(x: Any, indices: list[Any], source: Any) -> Any:
        return x.at[tuple(slice(None) if i is None else i for i in indices)].set(source)

    return {
        operator.getitem: operator.getitem,
        _aten._assert_tensor_metadata.default: lambda *_: None,
        # shapes
        _aten.alias.default: lambda x: x,
        _aten.detach.default: jax.lax.stop_gradient,
        _aten.clone.default: lambda x: x,
        _aten._to_copy.default: lambda x: x,
        _aten.view.default: jnp.reshape,
        _aten.permute.default: jnp.transpose,
        _aten.unsqueeze.default: jnp.expand_dims,
        _aten.squeeze.dims: lambda x, axes: jnp.squeeze(x, tuple(axes)),
        _aten.expand.default: expand,
        _aten.split_with_sizes.default: split,
        _aten.cat.default: lambda parts, axis=0: jnp.concatenate(parts, axis),
        _aten.select.int: lambda x, axis, place: jnp.take(x, place, axis),
        _aten.slice.Tensor: cut,
        _aten.gather.default: lambda x, axis, index: jnp.take_along_axis(x, index, axis),
        _aten.index_copy.default: index_copy,
        _aten.index_put.default: index_put,
        _aten.full.default: jnp.full,
        _aten.full_like.default: jnp.full_like,
        _aten.scalar_tensor.default: jnp.asarray,
        # arithmetic
        _aten.add.Tensor: add,
        _aten.add.Scalar: add,
        _aten.sub.Tensor: sub,
        _aten.sub.Scalar: sub,
        _aten.mul.Tensor: operator.mul,
        _aten.mul.Scalar: operator.mul,
        _aten.div.Tensor: operator.truediv,
        _aten.div.Scalar: operator.truediv,
        _aten.neg.default: operator.neg,
        _aten.abs.default: jnp.abs,
        _aten.sign.default: jnp.sign,
        _aten.reciprocal.default: jnp.reciprocal,
        _aten.pow.Tensor_Scalar: operator.pow,
        _aten.sqrt.default: jnp.sqrt,
        _aten.exp.default: jnp.exp,
        _aten.expm1.default: jnp.expm1,
        _aten.log.default: jnp.log,
        _aten.log1p.default: jnp.log1p,
        _aten.sin.default: jnp.sin,
        _aten.cos.default: jnp.cos,
        _aten.erf.default: jax.scipy.special.erf,
        _aten.lgamma.default: jax.scipy.special.gammaln,
        _aten.logaddexp.default: jnp.logaddexp,
        _aten.maximum.default: jnp.maximum,
        _aten.minimum.default: jnp.minimum,
        _aten.clamp.default: jnp.clip,
        _aten.clamp_min.default: jnp.maximum,
        _aten.where.self: jnp.where,
        _aten.eq.Tensor: operator.eq,
        _aten.eq.Scalar: operator.eq,
        _aten.ne.Scalar: operator.ne,
        _aten.ge.Tensor: operator.ge,
        _aten.ge.Scalar: operator.ge,
        _aten.gt.Tensor: operator.gt,
        _aten.gt.Scalar: operator.gt,
        _aten.lt.Scalar: operator.lt,
        _aten.le.Scalar: operator.le,
        _aten.logical_and.default: jnp.logical_and,
        _aten.logical_not.default: jnp.logical_not,
        _aten.bitwise_and.Tensor: operator.and_,
        _aten.bitwise_not.default: operator.invert,
        # sums
        _aten.sum.dim_IntList: total,
        _aten.sum.default: total,
        _aten.mean.default: average,
        _aten.mean.dim: average,
        # layers
        _aten.mm.default: operator.matmul,
        _aten.bmm.default: operator.matmul,
        _aten.addmm.default: addmm,
        _aten.native_layer_norm.default: layer_norm,
        _aten._native_batch_norm_legit_no_training.default: batch_norm,
        _aten.relu.default: jax.nn.relu,
        _aten.tanh.default: jnp.tanh,
        _aten.sigmoid.default: jax.nn.sigmoid,
        _aten.softplus.default: softplus,
        _aten.log_sigmoid_forward.default: lambda x: (jax.nn.log_sigmoid(x),),
        _aten.elu.default: elu,
        _aten.gelu.default: gelu,
        _aten.leaky_relu.default: jax.nn.leaky_relu,
        _aten._log_softmax.default: lambda x, axis, _: jax.nn.log_softmax(x, axis),
        _aten._softmax.default: lambda x, axis, _: jax.nn.softmax(x, axis),
    }
