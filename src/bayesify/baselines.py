"""What a Bayesian network is compared with: MC dropout and deep ensembles, with the same answers.

Plain training (SGD, Adam) needs nothing of its own: it is a ``Delta`` posterior whose penalty has
weight 0, ``ELBO(BayesianModule(net, posterior=Delta), num_data=N, temperature=0)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from bayesify import stateless
from bayesify.footprint import SlowPath
from bayesify.inputs import Inputs, batches_of, check_rows
from bayesify.likelihoods import Likelihood
from bayesify.module import BayesianModule
from bayesify.noise import Stream, derived_seed
from bayesify.posteriors import Delta
from bayesify.predictive import Predictive
from bayesify.random_network import as_tensor
from bayesify.training.minibatches import kept_generators

__all__ = ["DeepEnsemble", "MCDropout"]

_BATCH_SIZE = 1024


class MCDropout:
    """A network with dropout that is left on for prediction (Gal and Ghahramani 2016).

    Each of S passes is one sample of the weights, so that the answer is a :class:`Predictive` like
    a Bayesian network's. Only dropout is on: batch normalisation stays in its evaluation mode,
    and so do functions such as ``F.dropout``, which are not seen.

    Args:
        net: a trained network with dropout; either a ``BayesianModule`` with the posterior
            ``Delta``, as ``fit`` trains one, or any other module. Held, not copied.
        likelihood: what its outputs say about the targets; None takes the ``BayesianModule``'s.
        seed: what the dropout masks are a function of, with the size of the batches.

    Raises:
        ValueError: nothing in the network drops anything, the posterior is no ``Delta``, or the
            likelihood is missing.
        TypeError: ``net`` is no module, or ``likelihood`` no likelihood.

    Example:
        >>> import bayesify as bf
        >>> net = nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5), nn.ReLU(), nn.Linear(50, 2))
        >>> bnn = bf.BayesianModule(net, posterior=bf.Delta)
        >>> p = bf.MCDropout(bnn).predict(torch.zeros(5, 3), num_samples=10)
        >>> p.mean.shape, bool((p.epistemic > 0).all())
        (torch.Size([5, 2]), True)
    """

    def __init__(
        self, net: nn.Module, likelihood: Likelihood | None = None, *, seed: int = 0
    ) -> None:
        if not isinstance(net, nn.Module):
            raise TypeError(f"net must be an nn.Module, got {net!r}")
        if isinstance(net, BayesianModule) and not isinstance(net.posterior, Delta):
            raise ValueError(
                "MC dropout is of a network with point weights, got the posterior "
                f"{type(net.posterior).__name__}; train with posterior=Delta, or use net.predict"
            )
        if likelihood is None and isinstance(net, BayesianModule):
            likelihood = net.likelihood
        if likelihood is None:
            raise ValueError(
                "a plain module does not say what its outputs mean; pass a likelihood such as "
                "CategoricalLikelihood()"
            )
        if not isinstance(likelihood, Likelihood):
            raise TypeError(
                f"likelihood must be a Likelihood such as CategoricalLikelihood(), got "
                f"{likelihood!r}"
            )
        if not _droppers(net):
            raise ValueError(
                "MC dropout needs a network with a dropout layer whose p is above 0, got none; "
                "functions such as F.dropout are not seen, use nn.Dropout"
            )
        self.net = net
        self.likelihood = likelihood
        self.seed = seed

    @torch.no_grad()
    def predict(
        self,
        inputs: Inputs,
        num_samples: int = 100,
        *,
        keep_samples: bool = False,
        batch_size: int | None = None,
        seed: int | None = None,
    ) -> Predictive:
        """The average over S passes with dropout.

        Modes and generators are left as they were; the same call gives the same answer.

        Args:
            inputs: as for ``BayesianModule.predict``.
            num_samples: S, at least 1.
            keep_samples: whether the result holds every sample's answer.
            batch_size: how many data go through the network at once; None is at most 1024. Each
                datum has masks of its own, and other batches are other masks.
            seed: other masks than those of the object's own seed.

        Raises:
            ValueError: ``num_samples`` or ``batch_size`` is below 1, or there are no data.
        """
        _check_counts(num_samples, batch_size)
        net, run = self.net, self.net.__call__
        if isinstance(self.net, BayesianModule):
            net, run = self.net.net, _at_the_mean(self.net)
        passes = _Passes(
            run,
            inputs,
            num_samples,
            batch_size or _BATCH_SIZE,
            self.seed if seed is None else seed,
        )
        with kept_generators(), stateless.evaluating(net):
            for module in _droppers(net):
                module.training = True
            return self.likelihood.predictive(passes, keep_samples=keep_samples)


class DeepEnsemble:
    """Several networks that were trained apart, from other initial values (Lakshminarayanan 2017).

    The answer is the mixture of theirs in equal shares. Members with point weights (``Delta``)
    give one sample each; where any member is a distribution over weights, each gives
    ``num_samples``.

    Args:
        members: ``BayesianModule`` objects with likelihoods of one kind, each trained by ``fit``.

    Raises:
        TypeError: a member is no ``BayesianModule``.
        ValueError: there are none, or their likelihoods differ in kind.

    Example:
        >>> import bayesify as bf
        >>> members = []
        >>> for seed in range(5):  # each with initial values of its own; then bf.fit each
        ...     _ = torch.manual_seed(seed)
        ...     members.append(bf.BayesianModule(nn.Linear(3, 2), posterior=bf.Delta, seed=seed))
        >>> p = bf.DeepEnsemble(members).predict(torch.zeros(4, 3), keep_samples=True)
        >>> p.mean.shape, p.samples.shape
        (torch.Size([4, 2]), torch.Size([5, 4, 2]))
    """

    def __init__(self, members: Sequence[BayesianModule]) -> None:
        if isinstance(members, nn.Module) and not isinstance(members, nn.ModuleList):
            raise TypeError(
                f"members must be a list of networks, got one {type(members).__name__}; pass "
                "[member]"
            )
        self.members = list(members)
        if not self.members:
            raise ValueError("an ensemble needs at least one member, got none")
        for member in self.members:
            if not isinstance(member, BayesianModule):
                raise TypeError(
                    f"members must be BayesianModule objects, got {type(member).__name__}; wrap "
                    "a plain network: BayesianModule(net, posterior=Delta, likelihood=...)"
                )
        kinds = {_kind(member.likelihood) for member in self.members}
        if len(kinds) > 1:
            raise ValueError(
                f"members must have likelihoods of one kind, got {', '.join(sorted(kinds))}"
            )

    def predict(
        self,
        inputs: Inputs,
        num_samples: int = 100,
        *,
        keep_samples: bool = False,
        batch_size: int | None = None,
        seed: int | None = None,
    ) -> Predictive:
        """The mixture of the members' answers.

        Args:
            inputs: as for ``BayesianModule.predict``.
            num_samples: weight samples of each member; 1 where all have point weights.
            keep_samples: whether the result holds every sample's answer.
            batch_size: how many data go through a network at once; None chooses what is fast.
            seed: other weight samples than those of the members' own seeds. Members never share
                noise, also where their seeds are equal.

        Raises:
            ValueError: ``num_samples`` or ``batch_size`` is below 1, there are no data, or the
                members' answers are of different shapes.
        """
        _check_counts(num_samples, batch_size)
        points = all(isinstance(member.posterior, Delta) for member in self.members)
        own = [member.seed for member in self.members]
        seeds = [
            # Unequal, for members that share noise are not independent.
            derived_seed(first if seed is None else seed, Stream.PREDICTION, number)
            if seed is not None or first in own[:number]
            else first
            for number, first in enumerate(own)
        ]
        parts: list[Any] = [
            member.predict(
                inputs,
                1 if points else num_samples,
                keep_samples=keep_samples,
                batch_size=batch_size,
                seed=chosen,
            )
            for member, chosen in zip(self.members, seeds, strict=True)
        ]
        joined: Predictive = type(parts[0]).joined(parts)
        return joined


class _Passes:
    """The outputs (N, ...) of each of S passes, made as they are asked for."""

    def __init__(
        self,
        run: Callable[..., Any],
        inputs: Inputs,
        num_samples: int,
        batch_size: int,
        seed: int,
    ) -> None:
        self._run, self._inputs = run, inputs
        self._num_samples, self._batch_size, self._seed = num_samples, batch_size, seed

    def __len__(self) -> int:
        return self._num_samples

    def __iter__(self) -> Iterator[Tensor]:
        for sample in range(self._num_samples):
            torch.manual_seed(derived_seed(self._seed, Stream.PREDICTION, sample))
            parts = []
            for args, kwargs in batches_of(self._inputs, self._batch_size):
                # The fused kernel of a transformer's layer has no dropout.
                with SlowPath():
                    part = as_tensor(self._run(*args, **kwargs))
                check_rows(part, len(next(iter((*args, *kwargs.values())))))
                parts.append(part)
            yield parts[0].clone() if len(parts) == 1 else torch.cat(parts)


def _at_the_mean(bnn: BayesianModule) -> Callable[..., Any]:
    mean = bnn.posterior.masked_mean.detach()
    # A copy, as the network may edit it in place.
    return lambda *args, **kwargs: bnn.run_with(mean.clone(), *args, **kwargs)


def _droppers(net: nn.Module) -> list[nn.Module]:
    """The modules that drop something in training, and do nothing else in another way then."""
    return [
        module
        for module in net.modules()
        if (isinstance(module, _DropoutNd) and module.p > 0.0)
        # Between the layers of a recurrent network, of which there may be but one.
        or (isinstance(module, nn.RNNBase) and module.dropout > 0.0 and module.num_layers > 1)
        or (isinstance(module, nn.MultiheadAttention) and module.dropout > 0.0)
    ]


def _kind(likelihood: Likelihood) -> str:
    noise = "input-dependent " if getattr(likelihood, "input_dependent", False) else ""
    return noise + type(likelihood).__name__


def _check_counts(num_samples: int, batch_size: int | None) -> None:
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
