"""Local reparametrisation in a frozen network: outputs of layers drawn from fixed noise."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.distributions.posteriors import MeanFieldGaussian
from bayesify.estimators.moments import std_of
from bayesify.module.bayesian import BayesianModule
from bayesify.module.edited_inputs import copied
from bayesify.module.unit_roles import ELEMENTWISE
from bayesify.noise.keys import NoiseKey, NoiseSource

__all__ = ["local_samples", "why_not_local"]

#: Further layers that act on each row by itself in evaluation mode. Batch normalisation without
#: running statistics has a check of its own.
_BY_ROW = {
    nn.Identity,
    nn.Linear,
    nn.PReLU,
    nn.RReLU,
    nn.GroupNorm,
    nn.Dropout,
    nn.Dropout1d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
}


class _LocalLinear(nn.Module):
    """A linear layer that draws the S outputs of each example from fixed noise.

    Its outputs have S N rows, sample by sample. Its inputs have as many, but for the first such
    layer, whose inputs have N rows: they are the same for all samples.
    """

    weight: Tensor
    variance: Tensor
    bias: Tensor | None
    bias_variance: Tensor | None
    noise: Tensor

    def __init__(
        self,
        weight: tuple[Tensor, Tensor],
        bias: tuple[Tensor | None, Tensor | None],
        noise: Tensor,
        *,
        is_first: bool,
    ) -> None:
        super().__init__()
        tensors = {"weight": weight[0], "variance": weight[1].square(), "noise": noise}
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.detach().clone())
        self.register_buffer("bias", None if bias[0] is None else bias[0].detach().clone())
        self.register_buffer("bias_variance", None if bias[1] is None else bias[1].square())
        self.is_first = is_first

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.dim() != 2:
            raise ValueError(
                "local reparametrisation needs inputs of shape (N, features) for a linear layer, "
                f"got {tuple(inputs.shape)}, whose positions share the weights; use "
                "freeze(..., estimator=WeightSampling())"
            )
        mean = nn.functional.linear(inputs, self.weight, self.bias)
        variance = nn.functional.linear(inputs * inputs, self.variance, self.bias_variance)
        std = std_of(variance)
        if not self.is_first:
            mean, std = (each.unflatten(0, (len(self.noise), -1)) for each in (mean, std))
        return torch.addcmul(mean, std, self.noise).flatten(0, 1)


class _LocalSamples(nn.Module):
    """The outputs of a chain of layers, of which the random ones are :class:`_LocalLinear`."""

    def __init__(self, chain: Sequence[nn.Module], num_samples: int) -> None:
        super().__init__()
        self.chain, self.num_samples = nn.Sequential(*chain), num_samples

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.chain(copied(inputs)).unflatten(0, (self.num_samples, -1))
        return outputs


@torch.no_grad()
def local_samples(
    bnn: BayesianModule, key: NoiseKey, num_samples: int, *, antithetic: bool
) -> _LocalSamples:
    """Return a module of the network's layers that draws the outputs of S samples, (S, N, ...).

    Args:
        bnn: a network for which :func:`why_not_local` has no reason.
        key: the noise, which is that of the estimator.
        num_samples: S.
        antithetic: whether the noise has opposite pairs, as that of the estimator.

    Example:
        >>> from bayesify.noise.keys import Stream
        >>> key = NoiseKey(0, Stream.PREDICTION, 0)
        >>> samples = local_samples(BayesianModule(nn.Linear(3, 2)), key, 8, antithetic=False)
        >>> samples(torch.zeros(5, 3)).shape
        torch.Size([8, 5, 2])
    """
    sources = [NoiseSource(key, sample, antithetic=antithetic) for sample in range(num_samples)]
    posterior = bnn.posterior
    assert isinstance(posterior, MeanFieldGaussian)
    means = bnn.layout.unflatten(posterior.masked_mean)
    stds = bnn.layout.unflatten(posterior.std)
    chain: list[nn.Module] = []
    is_first = True
    for path, module in _chain(bnn.net):
        prefix = f"{path}." if path else ""
        name = f"{prefix}weight"
        if name not in means:
            chain.append(copy.deepcopy(module))
            continue
        assert isinstance(module, nn.Linear)
        weight = means[name]
        bias = means.get(f"{prefix}bias", module.bias), stds.get(f"{prefix}bias")
        shape, like = (1, len(weight)), (weight.dtype, weight.device)
        noise = torch.stack([source.normals(shape, *like) for source in sources])
        chain.append(_LocalLinear((weight, stds[name]), bias, noise, is_first=is_first))
        is_first = False
    return _LocalSamples(chain, num_samples)


def why_not_local(bnn: BayesianModule) -> str:
    """Return why local reparametrisation would not be exact, or nothing if it may be.

    Example:
        >>> why_not_local(BayesianModule(nn.Linear(3, 2)))
        ''
        >>> why_not_local(BayesianModule(nn.Conv1d(3, 2, 1)))
        'weight is not a parameter of one nn.Linear in an nn.Sequential'
    """
    if type(bnn.posterior) is not MeanFieldGaussian:
        return f"its posterior is {type(bnn.posterior).__name__}, not a mean-field Gaussian"
    if bnn.layout.dtype not in (torch.float32, torch.float64):
        return f"its weights are {bnn.layout.dtype}"
    if bnn.output is not None:
        return "its output is picked from a result"
    places = dict(_chain(bnn.net))
    modules = list(places.values())
    if len({id(module) for module in modules}) < len(modules):
        return "a layer is used twice"
    random = {aliases[0].rpartition(".")[0] for aliases in bnn.layout.ties}
    for path, module in bnn.net.named_modules():
        # Of these the chain has the operation only.
        is_taken_apart = path in random or type(module) is nn.Sequential
        if is_taken_apart and _runs_more(module):
            return f"{path or 'the network'} has hooks, or a forward of its own"
    for path, module in places.items():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            return f"{path} normalises by the examples of a batch, so that these are not apart"
    weights = set()
    for aliases in bnn.layout.ties:
        path, _, leaf = aliases[0].rpartition(".")
        if len(aliases) > 1 or type(places.get(path)) is not nn.Linear:
            return f"{aliases[0]} is not a parameter of one nn.Linear in an nn.Sequential"
        weights |= {path} if leaf == "weight" else set()
    biases = {aliases[0].rpartition(".")[0] for aliases in bnn.layout.ties} - weights
    if biases:
        return f"of layer {min(biases)} the bias is random and the weight is not"
    is_stacked = False  # whether the rows are those of all samples
    for path, module in places.items():
        if path in random:
            is_stacked = True
        elif is_stacked and not _acts_on_rows(module):
            return (
                f"layer {path}, {type(module).__name__}({module.extra_repr()}), is not known to "
                "act on each example by itself, and would see those of all samples at once"
            )
    return ""


def _runs_more(module: nn.Module) -> bool:
    """Return whether a call runs more than the forward pass of the module's class."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def _acts_on_rows(module: nn.Module) -> bool:
    """Return whether a layer is certain to compute each row of its outputs from that of its inputs.

    The rows are those of an axis in front of one or more others.
    """
    kind: Any = type(module)
    if _runs_more(module):
        return False
    if kind in (nn.LayerNorm, nn.RMSNorm):  # with more axes it may normalise over the rows
        return len(module.normalized_shape) == 1  # type: ignore[arg-type]
    if kind in (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU, nn.Unflatten):
        axis = module.dim
        return isinstance(axis, int) and (axis == -1 or axis >= 1)
    if kind is nn.Flatten:
        return isinstance(module.start_dim, int) and module.start_dim >= 1
    return kind in _BY_ROW or kind in ELEMENTWISE


def _chain(net: nn.Module, path: str = "") -> list[tuple[str, nn.Module]]:
    """Return the modules that a network runs one after the other, with their paths."""
    if type(net) is not nn.Sequential:
        return [(path, net)]
    prefix = f"{path}." if path else ""
    return [
        each
        for name, part in net._modules.items()
        if part is not None
        for each in _chain(part, f"{prefix}{name}")
    ]
