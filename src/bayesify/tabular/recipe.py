"""Train a table: settings by the number of its rows, chosen by measurement."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from bayesify.datasets import Passes, TensorLoader
from bayesify.distributions.families import PosteriorName, named_posterior
from bayesify.distributions.likelihoods import CensoredGaussianLikelihood, Likelihood
from bayesify.distributions.priors import Gaussian
from bayesify.estimators import LocalReparameterization, WeightSampling
from bayesify.module.bayesian import BayesianModule
from bayesify.noise.arguments import positive_number, whole_number
from bayesify.noise.keys import Stream, derived_seed
from bayesify.tabular.model import Noise, TableNet, table_module
from bayesify.tabular.relevance import sparse_relevance
from bayesify.tabular.weights import WeightedLikelihood
from bayesify.training import fit
from bayesify.training.backends import why_no_closed_forms
from bayesify.training.elbo import ELBO
from bayesify.training.history import History
from bayesify.training.progress import Callback
from bayesify.training.schedules import cosine
from bayesify.training.streaming import StreamingELBO

__all__ = ["STEPS_PER_EPOCH", "TableRecipe"]

#: Steps of an epoch of few rows: each epoch has a fixed cost.
STEPS_PER_EPOCH = 50
#: Of classes, whose logits have no unit, as standardised numbers have one.
_OF_CLASSES: dict[str, Any] = {"steps": 1000, "lr": 0.03, "prior_std": 7.0, "kl_warmup": 0.3}


@dataclass(frozen=True)
class TableRecipe:
    """Settings of a network and its training, for a table of standardised numbers.

    The defaults suit numbers. They were chosen by measurement, see docs/adr/0008. :meth:`for_rows`
    adapts them to a number of rows and to classes.

    Args:
        hidden: units of each hidden layer (ReLU).
        batch_size: rows a step; a step uses all rows of a table with no more.
        steps: total number of steps, rounded up to whole epochs.
        lr: learning rate of Adam at the start; it falls to 0 by half a cosine.
        rho_lr_scale: learning rate of rho as a multiple of ``lr``.
        init_std: standard deviation of the posterior at the start.
        prior_std: standard deviation of the Gaussian prior of biases; that of weights is divided by
            the root of their layer's inputs, see ``prior_by_inputs``.
        relevance: whether a prior's width is learned for each input, see :class:`TableNet`.
        kl_warmup: part of the steps over which the weight of the KL rises from 0 to 1.
        posterior: the family of the posterior, see docs/which-posterior.md.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> x = torch.linspace(-1.0, 1.0, 40, dtype=torch.float64).unsqueeze(-1)
        >>> recipe = TableRecipe.for_rows(len(x), hidden=(8,), steps=20)
        >>> bnn = recipe.module(1, 1, noise="learned", seed=0)
        >>> import warnings
        >>> from bayesify.training.progress import NoProgress
        >>> with warnings.catch_warnings(action="ignore"):  # of so few steps
        ...     history = recipe.fit(bnn, x, x.square(), callback=NoProgress())
        >>> bnn.predict(x).mean.shape
        torch.Size([40, 1])
    """

    hidden: tuple[int, ...] = (50, 50)
    batch_size: int = 512
    steps: int = 3000
    lr: float = 0.02
    rho_lr_scale: float = 2.0
    init_std: float = 0.03
    prior_std: float = 1.5
    relevance: bool = True
    kl_warmup: float = 0.4
    posterior: PosteriorName = "mean-field"

    def __post_init__(self) -> None:
        """Check the settings."""
        given: Any = self.hidden
        units = tuple(map(operator.index, given if isinstance(given, Sequence) else (given,)))
        object.__setattr__(self, "hidden", units)
        if not units or min(units) < 1:
            raise ValueError(f"hidden must be positive numbers of units such as (50,), got {units}")
        for name in ("batch_size", "steps"):
            whole_number(name, getattr(self, name))
        for name in ("lr", "rho_lr_scale", "init_std", "prior_std"):
            object.__setattr__(self, name, positive_number(name, getattr(self, name)))
        named_posterior(self.posterior)
        if not 0.0 <= self.kl_warmup < 1.0:
            raise ValueError(f"kl_warmup must be at least 0 and below 1, got {self.kl_warmup}")

    @classmethod
    def for_rows(cls, num_rows: int, *, has_classes: bool = False, **given: Any) -> Self:
        """Return the recipe for a number of rows, with the given settings instead of its own.

        Args:
            num_rows: number of training rows.
            has_classes: whether the target is a class.
            given: any of the settings; None means the recipe's own.
        """
        recipe = cls(**_OF_CLASSES) if has_classes else cls()
        chosen = {name: value for name, value in given.items() if value is not None}
        recipe = replace(recipe, **chosen)
        return recipe if "steps" in chosen else replace(recipe, steps=recipe.steps_for(num_rows))

    def steps_for(self, num_rows: int) -> int:
        """Return the steps that are at least 20 passes over a number of rows.

        Example:
            >>> TableRecipe(steps=500, batch_size=512).steps_for(100_000)
            3920
        """
        return max(self.steps, 20 * math.ceil(num_rows / self.batch_size))

    def module(
        self,
        num_features: int,
        num_outputs: int,
        *,
        noise: Noise | None,
        likelihood: Likelihood | None = None,
        log_rates: Sequence[float] | None = None,
        seed: int,
    ) -> BayesianModule:
        """Return a Bayesian :class:`TableNet` in float64, before training.

        Args:
            num_features: columns of the inputs.
            num_outputs: K, classes or targets.
            noise: noise of the targets; None for classes and counts.
            likelihood: as for ``table_module``.
            log_rates: of counts, as for :class:`TableNet`.
            seed: the initial values and all noise are functions of it.
        """
        net = TableNet(
            num_features,
            self.hidden,
            num_outputs,
            noise=noise,
            log_rates=log_rates,
            relevance=self.relevance,
            seed=seed,
        )
        return table_module(
            net,
            likelihood=likelihood,
            prior_of=lambda width: Gaussian(width * self.prior_std),
            init_std=self.init_std,
            # No estimator with noise for each example knows the correlations of a layer.
            estimator=(
                WeightSampling() if self.posterior == "matrix" else LocalReparameterization()
            ),
            posterior=self.posterior,
            seed=seed,
            dtype=torch.float64,
        )

    def fit(
        self,
        bnn: BayesianModule,
        inputs: Tensor,
        targets: Tensor,
        *,
        weights: Tensor | None = None,
        validation: tuple[Tensor, Tensor, Tensor] | None = None,
        num_before: float = 0.0,
        callback: Callback | None = None,
    ) -> History:
        """Train ``bnn`` in place by ``bayesify.fit``, with its errors and warnings.

        An epoch of the history is a pass over the rows, or as many passes as 50 steps allow.

        Args:
            bnn: from :meth:`module`.
            inputs: standardised, float64, shape (N, F).
            targets: class indices (N,), or numbers (N, K) in float64: counts, others standardised;
                bounds (N, K, 2) of censored numbers.
            weights: the number of times that each row counts, shape (N,), positive; None for once.
                A row of weight 2 is the row twice; see :class:`WeightedLikelihood`.
            validation: inputs, targets and weights of rows whose error and nll are measured after
                each epoch; their weights count where ``weights`` are given.
            num_before: the number of rows of which the present posterior is, which is the prior of
                these rows, see :class:`StreamingELBO`; there is no warm-up then. 0 for the first.
            callback: as for ``bayesify.fit``.

        Returns:
            The history. With weights its means are over distinct rows, see
            :func:`~bayesify.tabular.weights.per_counted_row`.
        """
        if num_before:  # noise of its own, since errors of parts that share it add up
            bnn.seed = derived_seed(bnn.seed, Stream.TRAINING, 1)
        plain = bnn.likelihood
        if weights is not None:
            targets = WeightedLikelihood.packed(targets, weights)
            if validation is not None:
                x, y, counts = validation
                validation = x, WeightedLikelihood.packed(y, counts), counts
        # The order within the only minibatch does not matter.
        several = len(inputs) > self.batch_size
        bounds = {"has_bounds": isinstance(plain, CensoredGaussianLikelihood)}
        once = TensorLoader(
            inputs, targets, self.batch_size, shuffle=several, seed=bnn.seed, **bounds
        )
        loader = Passes(once, max(1, min(STEPS_PER_EPOCH, self.steps) // len(once)))
        held_out = None
        if validation is not None:
            held_out = TensorLoader(validation[0], validation[1], 4096, shuffle=False, **bounds)
        epochs = math.ceil(self.steps / len(loader))
        if weights is not None:
            bnn.likelihood = WeightedLikelihood(plain)
        try:
            elbo = (
                StreamingELBO(bnn, num_data=len(inputs), num_before=num_before)
                if num_before
                else ELBO(bnn, num_data=len(inputs))
            )
            with sparse_relevance(elbo):
                return fit(
                    elbo,
                    loader,
                    held_out,
                    epochs=epochs,
                    optimizer=partial(torch.optim.Adam, lr=self.lr, fused=True),
                    scheduler=cosine,
                    rho_lr_scale=self.rho_lr_scale,
                    kl_warmup_epochs=0.0 if num_before else self.kl_warmup * epochs,
                    # A small network trains faster without a kernel to compile.
                    backend="closed-form" if why_no_closed_forms(elbo) is None else "autograd",
                    callback=callback,
                )
        finally:
            bnn.likelihood = plain
