"""Monte Carlo dropout, a baseline.

Plain training by SGD or Adam needs no class of its own. It is a ``Delta`` posterior whose penalty
has weight 0: ``ELBO(BayesianModule(net, posterior=Delta), num_data=N, temperature=0)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Generic, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from bayesify.distributions.likelihoods import Likelihood
from bayesify.distributions.likelihoods.likelihood import predictive_of
from bayesify.distributions.posteriors import Delta
from bayesify.estimators.network_state import evaluation_mode, has_own_code, snapshot
from bayesify.estimators.out_of_memory import is_out_of_memory
from bayesify.module.bayesian import BayesianModule
from bayesify.module.edited_inputs import Repeated, copied
from bayesify.module.inputs import (
    WHOLE,
    Inputs,
    batches_of,
    check_output_rows,
    count_examples,
    inputs_of,
    num_batches,
)
from bayesify.module.outputs import Output, check_output, tensor_of
from bayesify.module.pass_memory import UnfusedAttention
from bayesify.module.turns import Turns
from bayesify.noise.arguments import whole_number
from bayesify.noise.keys import Stream, kept_generators, seed_global_generators
from bayesify.prediction.predictive import P_co

__all__ = ["MCDropout"]

_BATCH_SIZE = 1024
#: Of all objects, since they seed PyTorch's generators, which all threads share.
_TURNS = Turns()


class MCDropout(Generic[P_co]):
    """Monte Carlo dropout: prediction with dropout turned on (Gal and Ghahramani 2016).

    Each of S passes is one weight sample, so that the result is a :class:`Predictive` like that of
    a Bayesian network. Only dropout layers are in training mode, and modules that read the p of a
    dropout layer of theirs instead of calling it, as the attention of many transformers does. Batch
    normalisation stays in evaluation mode, and so do functions such as ``F.dropout``, which are not
    modules.

    Args:
        net: a trained network with dropout layers: a ``BayesianModule`` with posterior ``Delta``,
            or any other module. It is not copied.
        likelihood: the likelihood of the outputs; None stands for that of the ``BayesianModule``.
        output: as of ``BayesianModule``, whose own is taken where this is None.
        seed: the seed of the dropout masks, which also depend on the batch size.

    Raises:
        ValueError: the network has no dropout layer with p > 0, the posterior is not a ``Delta``,
            or the likelihood is missing.
        TypeError: ``net`` is not a module, or ``likelihood`` is not a likelihood.

    Example:
        >>> import bayesify as bf
        >>> net = nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5), nn.ReLU(), nn.Linear(50, 2))
        >>> bnn = bf.BayesianModule(net, posterior=bf.Delta)
        >>> p = bf.MCDropout(bnn).predict(torch.zeros(5, 3), num_samples=10)
        >>> p.mean.shape, bool((p.epistemic > 0).all())
        (torch.Size([5, 2]), True)
    """

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood[P_co] | None = None,
        *,
        output: Output | None = None,
        seed: int = 0,
    ) -> None:
        check_output(output)
        if not isinstance(net, nn.Module):
            raise TypeError(f"net must be an nn.Module, got {net!r}")
        if isinstance(net, BayesianModule) and not isinstance(net.posterior, Delta):
            raise ValueError(
                "MC dropout needs a network with point weights, got the posterior "
                f"{type(net.posterior).__name__}; train with posterior=Delta, or use net.predict"
            )
        if likelihood is None and isinstance(net, BayesianModule):
            likelihood = net.likelihood
        if likelihood is None:
            raise ValueError(
                "a plain module has no likelihood; pass one such as CategoricalLikelihood()"
            )
        if not isinstance(likelihood, Likelihood):
            raise TypeError(
                f"likelihood must be a Likelihood such as CategoricalLikelihood(), got "
                f"{likelihood!r}"
            )
        if not _dropout_modules(net):
            raise ValueError(
                "MC dropout needs a network with a dropout layer whose p is above 0, got none; "
                "functions such as F.dropout are not modules, use nn.Dropout"
            )
        self.net = net
        self.likelihood = likelihood
        self.output = output
        if output is None and isinstance(net, BayesianModule):
            self.output = net.output
        self.seed = seed

    @torch.no_grad()
    def predict(
        self,
        inputs: Inputs | Iterable[Any],
        num_samples: int = 100,
        *,
        keep_samples: bool = False,
        batch_size: int | Literal["all"] | None = None,
        seed: int | None = None,
    ) -> P_co:
        """Predict with S passes with dropout.

        Modes and generator states are restored; repeated calls give the same result.

        Args:
            inputs: as for ``BayesianModule.predict``.
            num_samples: S, the number of passes, at least 1.
            keep_samples: whether the result holds the prediction of every sample.
            batch_size: the number of examples in one pass; None is at most 1024, and with ``"all"``
                the inputs are not divided. Each example has its own masks, which change with the
                batch size.
            seed: a seed for other masks; None stands for the seed of the object.

        Raises:
            TypeError: ``num_samples`` or ``batch_size`` is no whole number.
            ValueError: one of them is below 1, or there are no examples.
        """
        num_samples = whole_number("num_samples", num_samples)
        if batch_size is None:
            batch_size = _BATCH_SIZE
        size = WHOLE if batch_size == "all" else whole_number("batch_size", batch_size)
        inputs = inputs_of(inputs, _device_of(self.net), self.net)
        net, run = self.net, self.net.__call__
        if isinstance(self.net, BayesianModule):
            net, run = self.net.net, _at_the_mean(self.net)
        outputs = _DropoutOutputs(
            run,
            inputs,
            num_samples,
            size,
            self.seed if seed is None else seed,
            self.output,
        )
        turn = self.net.in_turn() if isinstance(self.net, BayesianModule) else nullcontext()
        with _TURNS.taken(), turn, kept_generators(), evaluation_mode(net), _kept_buffers(net):
            for module in _dropout_modules(net):
                module.training = True
            for module in _readers_of_dropout(net, outputs):
                module.training = True
            return predictive_of(self.likelihood, outputs, keep_samples=keep_samples)


class _DropoutOutputs:
    """The outputs (N, ...) of each of S passes with dropout, computed on iteration."""

    def __init__(
        self,
        run: Callable[..., Any],
        inputs: Inputs,
        num_samples: int,
        batch_size: int,
        seed: int,
        output: Output | None,
    ) -> None:
        self._run, self._inputs, self._output = run, inputs, output
        self._num_samples, self._batch_size, self._seed = num_samples, batch_size, seed

    def __len__(self) -> int:
        return self._num_samples

    def run_once(self) -> None:
        """Run the network on the first batch, whatever it returns."""
        args, kwargs = copied(next(batches_of(self._inputs, self._batch_size)))
        with UnfusedAttention():
            self._run(*args, **kwargs)

    def __iter__(self) -> Iterator[Tensor]:
        passes = Repeated(num_batches(self._inputs, self._batch_size))
        for sample in range(self._num_samples):
            seed_global_generators(self._seed, Stream.PREDICTION, sample)
            parts: list[Tensor] = []
            for args, kwargs in batches_of(self._inputs, self._batch_size):
                args, kwargs = passes.take((args, kwargs))
                # The fused kernel of transformer layers has no dropout.
                with UnfusedAttention():
                    part = tensor_of(self._run(*args, **kwargs), self._output)
                if self._batch_size != WHOLE:
                    first = parts[0] if parts else None
                    check_output_rows(part, count_examples(kwargs or args), first)
                parts.append(part)
            yield parts[0].clone() if len(parts) == 1 else torch.cat(parts)


def _at_the_mean(bnn: BayesianModule) -> Callable[..., Any]:
    mean = bnn.posterior.masked_mean.detach()
    # A copy, since the network may edit its weights in place.
    return lambda *args, **kwargs: bnn.run_with(mean.clone(), *args, **kwargs)


def _dropout_modules(net: nn.Module) -> list[nn.Module]:
    """Return the modules with dropout; training mode changes nothing else in them."""
    return [
        module
        for module in net.modules()
        if (isinstance(module, _DropoutNd) and module.p > 0.0)
        # Recurrent networks have dropout between their layers only.
        or (isinstance(module, nn.RNNBase) and module.dropout > 0.0 and module.num_layers > 1)
        or (isinstance(module, nn.MultiheadAttention) and module.dropout > 0.0)
    ]


def _readers_of_dropout(net: nn.Module, outputs: _DropoutOutputs) -> list[nn.Module]:
    """Return the modules that read the p of a dropout layer of theirs, which they do not call."""
    unused = {each for each in _dropout_modules(net) if isinstance(each, _DropoutNd)}
    if not (unused and has_own_code(net)):  # PyTorch's modules call theirs
        return []
    read: set[nn.Module] = set()
    with ExitStack() as stack:
        for layer in list(unused):
            called = layer.register_forward_pre_hook(lambda each, _: unused.discard(each))
            stack.callback(called.remove)
        outputs.run_once()
        # Some read it in training mode only. A layer may also be left over, or of training alone.
        owners = [owner for owner in net.modules() if not unused.isdisjoint(owner.children())]
        if not owners:
            return []
        for layer in list(unused):
            stack.enter_context(_noted_reads(layer, read))
        for owner in owners:
            owner.training = True
            stack.callback(setattr, owner, "training", False)
        try:
            outputs.run_once()
        except Exception as error:  # as of a network that needs targets in training mode
            if is_out_of_memory(error):
                raise
            read |= unused  # they may be read after it
    read &= unused
    return [owner for owner in owners if not read.isdisjoint(owner.children())]


@contextmanager
def _noted_reads(layer: nn.Module, read: set[nn.Module]) -> Iterator[None]:
    """Add the layer to ``read`` when its p is read within the block."""

    def get_p(self: nn.Module) -> Any:
        read.add(self)
        return vars(self)["p"]

    def set_p(self: nn.Module, value: Any) -> None:
        vars(self)["p"] = value

    kind = type(layer)
    layer.__class__ = type(kind.__name__, (kind,), {"p": property(get_p, set_p)})
    try:
        yield
    finally:
        layer.__class__ = kind


@contextmanager
def _kept_buffers(net: nn.Module) -> Iterator[None]:
    """Restore the buffers on exit: a module that reads the p of a layer is in training mode."""
    undo = snapshot(net)
    try:
        yield
    finally:
        undo()


def _device_of(net: nn.Module) -> torch.device | None:
    """The device of the first parameter, or None of a network without any."""
    first = next(net.parameters(), None)
    return None if first is None else first.device
