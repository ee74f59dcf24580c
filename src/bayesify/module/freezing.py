"""Frozen networks: ordinary modules that predict with a fixed set of weight samples."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from bayesify.distributions.likelihoods import Likelihood
from bayesify.distributions.posteriors import Delta
from bayesify.estimators import Estimator, LocalReparameterization, WeightSampling, stateless
from bayesify.estimators.module_attributes import ModuleAttributes, kept_attributes
from bayesify.estimators.network_state import kept_tensors
from bayesify.module.bayesian import BayesianModule
from bayesify.module.edited_inputs import Repeated, copied
from bayesify.module.frozen_local import local_samples, why_not_local
from bayesify.module.frozen_outputs import ClassOutputs, NumberOutputs, frozen_head
from bayesify.module.kept_samples import sampler_of
from bayesify.module.outputs import Output, tensor_of
from bayesify.module.random_network import RandomNetwork
from bayesify.module.shared_pass import in_one_pass
from bayesify.module.trunk import may_zero_padding
from bayesify.module.turns import Turns
from bayesify.noise.arguments import whole_number
from bayesify.noise.keys import NoiseKey, Stream

__all__ = ["FrozenNetwork", "freeze"]

#: The levels of the quantiles of numbers, unless others are asked for.
QUANTILES = (0.025, 0.5, 0.975)


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
        copied = copy.deepcopy(net, kept_tensors(net))
        return cls(_MeanWeights(copied, output), head, num_samples=0)

    @property
    def quantiles(self) -> tuple[float, ...]:
        """The levels of the quantiles of numbers; none for classes."""
        levels = getattr(self.head, "levels", None)
        return () if levels is None else tuple(levels.tolist())

    def forward(self, *args: Any, **kwargs: Any) -> ClassOutputs | NumberOutputs:
        """Return the prediction for the network's own inputs.

        Raises:
            TypeError: an input is an array instead of a tensor.
        """
        for each in (*args, *kwargs.values()):
            if isinstance(each, np.ndarray):
                raise TypeError("a frozen network needs tensors, got an array; use torch.as_tensor")
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
    samples have exactly the distribution that S weight samples give it, where the squares of inputs
    do not overflow, as from 1e19 on in float32; but all examples share the noise of a layer's
    outputs instead of the weights, so that the joint distribution of several examples is another
    one. It is for an ``nn.Sequential`` whose random parameters all belong to ``nn.Linear`` layers
    on inputs (N, features), and for a mean-field posterior. The layers that follow the first of
    these must be PyTorch's own and act on each example by itself: activations, dropout,
    ``LayerNorm``, ``Flatten``, batch normalisation with running statistics.

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
    reason = why_not_local(bnn)
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
        outputs = local_samples(bnn, key, samples, antithetic=estimator.antithetic)
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
        args, kwargs = copied((args, kwargs))  # the network may edit its inputs in place
        return tensor_of(self.net(*args, **kwargs), self.output).unsqueeze(0)


class _StackedWeights(nn.Module):
    """The outputs under S weight samples: products with stacked weights, where vmap has them."""

    def __init__(self, bnn: BayesianModule, key: NoiseKey, num_samples: int) -> None:
        super().__init__()
        with bnn.in_turn():
            self.net = copy.deepcopy(bnn.net, kept_tensors(bnn.net))
        self.output, self.num_samples, self._layout = bnn.output, num_samples, bnn.layout
        self._turns = Turns()
        self._keeps_results: bool | None = None
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

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        with self._turns.taken():
            return stateless.state_dict_of(self, self._layout, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        stacked = {
            path: getattr(self, name) for name, paths in self._places.items() for path in paths
        }

        # A network may edit its inputs in place, also in a pass that then fails under vmap.
        is_exporting = torch.compiler.is_exporting()
        take = copied if is_exporting else Repeated().take

        def run(tensors: Mapping[str, Tensor], inputs: tuple[Any, Any]) -> Tensor:
            return tensor_of(stateless.run_with(self.net, tensors, *inputs), self.output)

        def run_sample(number: int) -> Tensor:
            weights = {path: each[number] for path, each in stacked.items()}
            # A cache would be of this sample. TorchDynamo, as in a strict export, cannot look.
            is_blind = torch.compiler.is_dynamo_compiling()
            with nullcontext() if is_blind else kept_attributes(self.net):
                return run(weights, take((args, kwargs)))

        def looped() -> Tensor:
            return torch.stack([run_sample(number) for number in range(self.num_samples)])

        # A traced program has operations without a form under vmap in ONNX, and any batch size.
        if is_exporting:
            return looped()
        with self._turns.taken():
            # Results that a pass keeps would be of all samples at once.
            attributes = ModuleAttributes(self.net) if self._keeps_results is not False else None
            inputs = take((args, kwargs))
            with _noted_padding(self.net) as padded:
                outputs = in_one_pass(self.net, lambda each: run(each, inputs), stacked)
            if padded:  # which the fused kernel sets to 0, and no pass under vmap has that
                outputs = None
            if attributes is not None:
                self._keeps_results = bool(attributes.new_tensors())
                if self._keeps_results:
                    attributes.restore()
            return looped() if outputs is None else outputs


@contextmanager
def _noted_padding(net: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield a list of the encoders that are called with a mask of padding within the block."""
    padded: list[nn.Module] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None)
        if mask is not None:
            padded.append(module)

    with ExitStack() as hooks:
        for module in filter(may_zero_padding, net.modules()):
            hooks.callback(module.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield padded
