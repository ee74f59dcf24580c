"""Hamiltonian Monte Carlo: the no-U-turn sampler on the posterior of a network's weights."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from bayesify.estimators import stateless
from bayesify.module.bayesian import BayesianModule
from bayesify.module.inputs import Inputs
from bayesify.noise.keys import NoiseKey, Stream, seed_global_generators
from bayesify.referee.density import PosteriorDensity
from bayesify.referee.draws import PosteriorDraws
from bayesify.referee.pyro import pyro_module
from bayesify.training.minibatches import kept_generators

__all__ = ["hmc"]


def hmc(
    bnn: BayesianModule,
    data: tuple[Inputs, Tensor],
    *,
    num_chains: int = 4,
    num_warmup: int = 1000,
    num_samples: int = 1000,
    temperature: float = 1.0,
    init_std: float = 0.1,
    step_size: float | None = None,
    target_acceptance: float = 0.8,
    max_tree_depth: int = 10,
    compiled: bool = False,
    seed: int = 0,
    on_progress: Callable[[float], None] | None = None,
) -> PosteriorDraws:
    """Draw the random weights of a network from their posterior by Hamiltonian Monte Carlo.

    The density is p(w | data), in proportion to p(data | w)^(1 / temperature) p(w), with the
    network, the prior and the likelihood of ``bnn``: the distribution that an ELBO of this
    temperature approximates. All random weights are sampled. Point estimates are held at their
    present values: the learned noise of a likelihood, and the deterministic parameters and buffers
    of the network. Pruned weights stay 0. Dropout and batch normalisation are in evaluation mode.
    The variational posterior is not used and no chain begins in it, so that the draws can judge it.

    The sampler is Pyro's no-U-turn sampler (Hoffman and Gelman 2014), in float64, with a step size
    and a diagonal mass matrix adapted in warm-up. A draw takes up to ``2 ** max_tree_depth``
    gradients over all examples: this is for networks of up to a few thousand weights. Check
    ``r_hat`` of the predictions before trusting the draws.

    Args:
        bnn: the model; it is copied.
        data: all N training examples: inputs as for ``BayesianModule.predict``, and targets.
        num_chains: number of independent chains, at least 1.
        num_warmup: discarded transitions of each chain, in which the sampler adapts; at least 1.
        num_samples: draws of each chain after warm-up, at least 4.
        temperature: of the ELBO, positive; 1 gives Bayes' posterior.
        init_std: a chain begins at the centre of the prior plus noise of this standard deviation.
        step_size: a fixed step size, with a unit mass matrix; None adapts both.
        target_acceptance: the acceptance probability to which the step size is adapted.
        max_tree_depth: logarithm to base 2 of the largest number of gradients in a draw.
        compiled: whether ``torch.compile`` compiles the gradient. That takes about 20 seconds and
            makes a gradient of a small network several times faster.
        seed: seed of the starting points and of the sampler.
        on_progress: called with the part of all transitions that is done, from 0 to 1.

    Returns:
        The draws and their diagnostics.

    Raises:
        ModuleNotFoundError: Pyro is not installed; it is in the extra ``referee``.
        TypeError: ``bnn`` is not a ``BayesianModule``, ``data`` is not a pair, or the prior has no
            density of its own (``EmpiricalGaussian``).
        ValueError: a number is out of its range, inputs and targets do not belong together, or the
            density is not finite where a chain begins.

    Warns:
        UserWarning: trajectories diverged: the draws may miss a part of the posterior.

    Example:
        >>> import bayesify as bf
        >>> x = torch.linspace(-1.0, 1.0, 20).unsqueeze(-1)
        >>> bnn = bf.BayesianModule(torch.nn.Linear(1, 1), likelihood=bf.GaussianLikelihood(0.1))
        >>> draws = hmc(bnn, (x, 2.0 * x), num_chains=2, num_warmup=100, num_samples=100)
        >>> draws.weights.shape, draws.predict(x).mean.shape
        (torch.Size([2, 100, 2]), torch.Size([20, 1]))
        >>> bool((draws.r_hat(x) < 1.05).all())
        True
    """
    _check_numbers(
        {"num_chains": num_chains, "num_warmup": num_warmup, "max_tree_depth": max_tree_depth},
        {"temperature": temperature, "init_std": init_std, "step_size": step_size},
        num_samples,
        target_acceptance,
    )
    if not isinstance(bnn, BayesianModule):
        raise TypeError(f"bnn must be a BayesianModule, got {type(bnn).__name__}")
    if not isinstance(data, tuple | list) or len(data) != 2 or not isinstance(data[1], Tensor):
        raise TypeError(
            "data must be a pair (inputs, targets) of all training examples, got "
            f"{type(data).__name__}; join the minibatches of a loader"
        )
    nuts = pyro_module("pyro.infer.mcmc").NUTS
    # Not the caller's network: its dtype changes, and so may its buffers.
    model = copy.deepcopy(bnn).double()
    chains = []
    with kept_generators(), stateless.evaluation_mode(model.net):
        density = PosteriorDensity(model, *data, temperature=temperature)
        gradient = density.gradient(compiled=compiled)
        for chain in range(num_chains):
            potential = _Potential(gradient)
            kernel = nuts(
                potential_fn=potential,
                step_size=1.0 if step_size is None else step_size,
                adapt_step_size=step_size is None,
                adapt_mass_matrix=step_size is None,
                target_accept_prob=target_acceptance,
                max_tree_depth=max_tree_depth,
            )
            key = NoiseKey(seed, Stream.INITIALIZATION, chain)
            noise = key.normals(range(1), len(density.centre), dtype=torch.float64)[0]
            start = density.centre + init_std * noise.to(density.centre)
            if not math.isfinite(float(gradient(start)[1])):
                raise ValueError(
                    "the log density must be finite where a chain begins, got a value that is not; "
                    "lower init_std, and check inputs and targets for nan"
                )
            seed_global_generators(seed, Stream.TRAINING, chain)
            draws, total = [], num_warmup + num_samples
            kernel.initial_params = state = {"weights": start}
            kernel.setup(num_warmup)
            for number in range(total):
                state = kernel.sample(state)
                if number >= num_warmup:
                    draws.append(state["weights"].detach().clone())
                if on_progress is not None:
                    on_progress((chain + (number + 1) / total) / num_chains)
            chains.append(
                _Chain(
                    torch.stack(draws),
                    float(kernel.logging()["acc. prob"]),
                    len(kernel.diagnostics()["divergences"]),
                    float(kernel.step_size),
                    potential.num_gradients,
                )
            )
    diverged = sum(chain.divergences for chain in chains)
    if diverged:
        warnings.warn(
            f"{diverged} of {num_chains * num_samples} trajectories diverged: the draws may "
            "miss a part of the posterior; raise target_acceptance, or lower step_size",
            UserWarning,
            stacklevel=2,
        )
    return PosteriorDraws(
        model,
        density.full(torch.stack([chain.weights for chain in chains])),
        *(torch.tensor(values) for values in list(zip(*chains, strict=True))[1:]),
    )


class _Chain(NamedTuple):
    """The free weights of the draws, shape (draws, F), and the diagnostics of one chain."""

    weights: Tensor
    acceptance: float
    divergences: int
    step_size: float
    num_gradients: int


class _Potential:
    """The potential energy as Pyro calls it, from a function that computes the gradient too."""

    def __init__(self, gradient: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        self._gradient, self.num_gradients = gradient, 0

    def __call__(self, state: Mapping[str, Tensor]) -> Tensor:
        """Return U, a scalar whose gradient in the weights is the one that was computed."""
        weights = state["weights"]
        gradient, energy = self._gradient(weights.detach())
        self.num_gradients += 1
        if not weights.requires_grad:
            return energy
        return energy + (weights - weights.detach()) @ gradient


def _check_numbers(
    counts: Mapping[str, int],
    widths: Mapping[str, float | None],
    num_samples: int,
    target_acceptance: float,
) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    if num_samples < 4:
        raise ValueError(
            f"num_samples must be at least 4, as R-hat compares the halves of a chain, got "
            f"{num_samples}"
        )
    for name, width in widths.items():
        if width is not None and not 0.0 < width < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {width}")
    if not 0.0 < target_acceptance < 1.0:
        raise ValueError(
            f"target_acceptance must lie strictly between 0 and 1, got {target_acceptance}"
        )
