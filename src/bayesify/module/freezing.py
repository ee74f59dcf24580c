"""Frozen networks: ordinary modules that predict with a fixed set of weight samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from bayesify.distributions.likelihoods import Likelihood
from bayesify.distributions.posteriors import Delta, MeanFieldGaussian
from bayesify.estimators import Estimator, LocalReparameterization, WeightSampling, stateless
from bayesify.module.bayesian import BayesianModule
from bayesify.module.frozen_outputs import ClassOutputs, NumberOutputs, frozen_head
from bayesify.module.kept_samples import sampler_of
from bayesify.module.outputs import Output, tensor_of
from bayesify.module.random_network import RandomNetwork
from bayesify.module.shared_pass import in_one_pass
from bayesify.module.turns import Turns
from bayesify.module.unit_roles import ELEMENTWISE
from bayesify.noise.keys import NoiseKey, NoiseSource, Stream
from bayesify.noise.whole_numbers import whole_number

__all__ = ["FrozenNetwork", "freeze"]

#: The levels of the quantiles of numbers, unless others are asked for.
QUANTILES = (0.025, 0.5, 0.975)

#: Further layers that act on each row by itself in evaluation mode. Batch normalisation without
#: running statistics is refused apart.
_BY_ROW = {
    *(nn.Identity, nn.Linear, nn.PReLU, nn.RReLU, nn.GroupNorm),
    *(nn.Dropout, nn.Dropout1d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
}


class FrozenNetwork(nn.Module):
    """A network that returns the prediction and its uncertainty; create it with :func:`freeze`.

    It is an ordinary module of tensor operations without randomness: it has no posterior and no
    likelihood to train, stays in evaluation mode, and can be exported.

    Args:
        outputs: returns the outputs of S weight samples, shape (S, N, ...).
        head: turns them into a prediction.
        num_samples: S, or 0 for the mean weights.

    Example:
        >>> frozen = freeze(BayesianModule(nn.Linear(3, 2)), num_samples=8)
        >>> mean, total, epistemic = frozen(torch.zeros(5, 3))
        >>> mean.shape, total.shape, epistemic.shape
        (torch.Size([5, 2]), torch.Size([5]), torch.Size([5]))
    """

    def __init__(self, outputs: nn.Module, head: nn.Module, num_samples: int) -> None:
        super().__init__()
        self.outputs, self.head, self.num_samples = outputs, head, num_samples
        self.requires_grad_(False)
        self.train(False)

    @classmethod
    def of_plain(
        cls,
        net: nn.Module,
        likelihood: Likelihood,
        *,
        output: Output | None = None,
        quantiles: Sequence[float] = QUANTILES,
    ) -> FrozenNetwork:
        """Freeze an ordinary network, such as one of :func:`bayesify.shrink`.

        Args:
            net: the network, which is copied.
            likelihood: the distribution of the targets given its outputs.
            output: as for ``BayesianModule``.
            quantiles: as for :func:`freeze`.

        Raises:
            TypeError: the network is Bayesian, or the likelihood is of another kind.
            ValueError: a level of the quantiles lies outside of 0.0001 to 0.9999.

        Example:
            >>> bnn = BayesianModule(nn.Linear(3, 2))
            >>> FrozenNetwork.of_plain(bnn.to_module(), bnn.likelihood)(torch.zeros(5, 3)).epistemic
            tensor([0., 0., 0., 0., 0.])
        """
        if isinstance(net, RandomNetwork):
            raise TypeError(
                f"of_plain needs an ordinary network, got {type(net).__name__}; use "
                "freeze(bnn, num_samples=0), or bnn.to_module()"
            )
        head = frozen_head(likelihood, quantiles)
        return cls(_MeanWeights(copy.deepcopy(net), output), head, num_samples=0)

    @property
    def quantiles(self) -> tuple[float, ...]:
        """The levels of the quantiles of numbers; none for classes."""
        levels = getattr(self.head, "levels", None)
        return () if levels is None else tuple(levels.tolist())

    def forward(self, *args: Any, **kwargs: Any) -> ClassOutputs | NumberOutputs:
        """Return the prediction for the network's own inputs."""
        predicted: ClassOutputs | NumberOutputs = self.head(self.outputs(*args, **kwargs))
        return predicted

    def train(self, mode: bool = True) -> Self:  # noqa: ARG002
        """Stay in evaluation mode: a frozen network is not trained."""
        return super().train(False)

    def extra_repr(self) -> str:
        """Return the number of weight samples."""
        return f"num_samples={self.num_samples}"


def freeze(
    bnn: BayesianModule,
    num_samples: int = 32,
    *,
    seed: int | None = None,
    estimator: Estimator | None = None,
    quantiles: Sequence[float] = QUANTILES,
) -> FrozenNetwork:
    """Freeze a Bayesian network to an ordinary module that predicts with its uncertainty.

    The result is a function of its inputs, which can be exported by ``torch.export`` and to ONNX.
    Two methods give its weight samples:

    ``WeightSampling()`` holds S copies of the random weights, those of ``bnn.predict(x,
    num_samples=S)``, and has its predictions.

    ``LocalReparameterization()`` holds mean and variance of each weight, and draws S outputs of
    each layer from fixed noise (Kingma et al. 2015, eq. 6). It holds 2 D numbers instead of S D,
    and is far faster for few examples; from some dozens on it costs as much. Each example's S
    samples have exactly the distribution that S weight samples give it; but all examples share the
    noise of a layer's outputs instead of the weights, so that the joint distribution of several
    examples is another one. It is for an ``nn.Sequential`` whose random parameters all belong to
    ``nn.Linear`` layers on inputs (N, features), and for a mean-field posterior. The layers that
    follow the first of these must be PyTorch's own and act on each example by itself: activations,
    dropout, ``LayerNorm``, ``Flatten``, batch normalisation with running statistics.

    Args:
        bnn: the network, which is not changed. Its likelihood is one of classes, or Gaussian.
        num_samples: S; 0 for the mean weights alone, without epistemic uncertainty. A point
            estimate has only these.
        seed: the seed of the weight samples, as in ``bnn.predict``; None is the module's.
        estimator: ``WeightSampling()`` or ``LocalReparameterization()``; None chooses the second
            where it is possible.
        quantiles: the levels of the quantiles of numbers.

    Returns:
        A module that returns :class:`~bayesify.module.frozen_outputs.ClassOutputs` or
        :class:`~bayesify.module.frozen_outputs.NumberOutputs`, on the device of ``bnn``.

    Raises:
        ValueError: ``num_samples`` is negative; the estimator does not suit the network; or a level
            does not lie between 0 and 1.
        TypeError: the network, the likelihood or the estimator is of another kind.

    Example:
        >>> bnn = BayesianModule(nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Linear(50, 2)))
        >>> x = torch.ones(5, 3)
        >>> frozen = freeze(bnn, num_samples=32, estimator=WeightSampling())
        >>> torch.allclose(frozen(x).mean, bnn.predict(x, num_samples=32).mean, atol=1e-5)
        True
    """
    if not isinstance(bnn, BayesianModule):
        mend = (
            "an ordinary network is frozen by FrozenNetwork.of_plain(net, likelihood)"
            if isinstance(bnn, nn.Module)
            else "of an ensemble freeze each member"
        )
        raise TypeError(f"freeze needs a BayesianModule, got {type(bnn).__name__}; {mend}")
    samples = whole_number("num_samples", num_samples, None)
    if samples < 0:
        raise ValueError(
            f"num_samples must be at least 1, or 0 for the mean weights, got {samples}"
        )
    if not samples or isinstance(bnn.posterior, Delta):
        return FrozenNetwork.of_plain(
            bnn.to_module(), bnn.likelihood, output=bnn.output, quantiles=quantiles
        )
    head = frozen_head(bnn.likelihood, quantiles)
    reason = _not_local(bnn)
    if estimator is None:
        estimator = WeightSampling() if reason else LocalReparameterization()
    if type(estimator) not in (WeightSampling, LocalReparameterization):
        raise TypeError(
            "estimator must be WeightSampling() or LocalReparameterization(), got "
            f"{type(estimator).__name__}"
        )
    key = NoiseKey(bnn.seed if seed is None else seed, Stream.PREDICTION, 0)
    outputs: nn.Module
    if isinstance(estimator, LocalReparameterization):
        if reason:
            raise ValueError(
                f"local reparametrisation cannot be frozen here: {reason}; use "
                "estimator=WeightSampling()"
            )
        outputs = _local_samples(bnn, key, samples, antithetic=estimator.antithetic)
    else:
        if estimator.antithetic:
            raise ValueError(
                "weight samples are frozen as bnn.predict draws them, without opposite pairs, got "
                "antithetic=True; use WeightSampling(), or LocalReparameterization(antithetic=True)"
            )
        outputs = _StackedWeights(bnn, key, samples)
    return FrozenNetwork(outputs, head, samples)


class _MeanWeights(nn.Module):
    """The outputs of one plain network, as those of one sample."""

    def __init__(self, net: nn.Module, output: Output | None) -> None:
        super().__init__()
        self.net, self.output = net, output

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return tensor_of(self.net(*args, **kwargs), self.output).unsqueeze(0)


class _StackedWeights(nn.Module):
    """The outputs under S weight samples: products with stacked weights, where vmap has them."""

    def __init__(self, bnn: BayesianModule, key: NoiseKey, num_samples: int) -> None:
        super().__init__()
        with bnn.in_turn():
            self.net = copy.deepcopy(bnn.net)
        self.output, self.num_samples = bnn.output, num_samples
        self._turns = Turns()
        with torch.no_grad():
            weights = sampler_of(bnn.posterior, key)(range(num_samples))
        self._places: dict[str, list[str]] = {}
        names: dict[int, str] = {}  # a tied weight is placed more than once
        placed = bnn.placed(bnn.layout.unflatten(weights))
        for path, tensor in placed.items():
            if id(tensor) not in names:
                names[id(tensor)] = f"stacked_{len(names)}"
                self.register_buffer(names[id(tensor)], tensor.clone())
            self._places.setdefault(names[id(tensor)], []).append(path)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        stacked = {
            path: getattr(self, name) for name, paths in self._places.items() for path in paths
        }

        def run(tensors: Mapping[str, Tensor]) -> Tensor:
            return tensor_of(stateless.run_with(self.net, tensors, args, kwargs), self.output)

        # A traced program has operations without a form under vmap in ONNX, and any batch size.
        if torch.compiler.is_exporting():
            return _looped(run, stacked, self.num_samples)
        with self._turns.taken():
            outputs = in_one_pass(self.net, run, stacked)
            return _looped(run, stacked, self.num_samples) if outputs is None else outputs


def _looped(
    run: Callable[[Mapping[str, Tensor]], Tensor], stacked: Mapping[str, Tensor], num_samples: int
) -> Tensor:
    weights = ({p: each[sample] for p, each in stacked.items()} for sample in range(num_samples))
    return torch.stack([run(each) for each in weights])


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
        std = nn.functional.linear(inputs * inputs, self.variance, self.bias_variance).sqrt()
        if not self.is_first:
            mean, std = (each.unflatten(0, (len(self.noise), -1)) for each in (mean, std))
        return torch.addcmul(mean, std, self.noise).flatten(0, 1)


class _LocalSamples(nn.Module):
    """The outputs of a chain of layers, of which the random ones are :class:`_LocalLinear`."""

    def __init__(self, chain: Sequence[nn.Module], num_samples: int) -> None:
        super().__init__()
        self.chain, self.num_samples = nn.Sequential(*chain), num_samples

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.chain(inputs).unflatten(0, (self.num_samples, -1))
        return outputs


@torch.no_grad()
def _local_samples(
    bnn: BayesianModule, key: NoiseKey, num_samples: int, *, antithetic: bool
) -> _LocalSamples:
    """Return the chain with local reparametrisation; its noise is that of the estimator."""
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


def _not_local(bnn: BayesianModule) -> str:
    """Return why local reparametrisation would not be exact, or nothing if it may be."""
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
