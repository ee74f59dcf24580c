"""Hamiltonian Monte Carlo: the no-U-turn sampler on the posterior of a network's weights."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayesify.estimators.network_state import evaluation_mode
from bayesify.module.bayesian import BayesianModule
from bayesify.module.inputs import Inputs
from bayesify.noise.arguments import positive_number, whole_number
from bayesify.noise.keys import NoiseKey, Stream, derived_seed
from bayesify.referee.density import PosteriorDensity
from bayesify.referee.draws import PosteriorDraws
from bayesify.referee.to_jax import import_optional, to_jax

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

    The sampler is NumPyro's no-U-turn sampler (Hoffman and Gelman 2014), in float64 on the CPU,
    with a step size and a diagonal mass matrix adapted in warm-up. The density is translated to
    JAX, which knows linear layers and the common activations. A draw takes up to
    ``2 ** max_tree_depth`` gradients over all examples: this is for networks of up to a few
    thousand weights. Check ``r_hat`` of the predictions before trusting the draws.

    Args:
        bnn: the model; it is copied.
        data: all N training examples: inputs as for ``BayesianModule.predict``, no loader, and
            targets.
        num_chains: number of independent chains, at least 1.
        num_warmup: discarded transitions of each chain, in which the sampler adapts; at least 1.
        num_samples: draws of each chain after warm-up, at least 4.
        temperature: of the ELBO, positive; 1 gives Bayes' posterior.
        init_std: a chain begins at the centre of the prior plus noise of this standard deviation.
        step_size: a fixed step size, with a unit mass matrix; None adapts both.
        target_acceptance: the acceptance probability to which the step size is adapted.
        max_tree_depth: logarithm to base 2 of the largest number of gradients in a draw.
        seed: seed of the starting points and of the sampler.
        on_progress: called after each chain with the part of all chains that is done.

    Returns:
        The draws and their diagnostics.

    Raises:
        ModuleNotFoundError: NumPyro is not installed; it is in the extra ``referee``.
        NotImplementedError: the network uses an operator that is not translated to JAX, or the
            translation has another density.
        TypeError: ``bnn`` is not a ``BayesianModule``, ``data`` is not a pair, the prior has no
            density of its own (``EmpiricalGaussian``), or a count is no whole number.
        ValueError: a number is out of its range, inputs and targets do not belong together, or the
            density is not finite where a chain begins.

    Warns:
        UserWarning: trajectories diverged, so that the draws may miss a part of the posterior; or
            more than a quarter of them had the greatest length.

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
    jax, infer = import_optional("jax"), import_optional("numpyro.infer")
    # Not the caller's network, as its dtype changes.
    model = copy.deepcopy(bnn).cpu().double()
    cut_off = 0
    found: dict[str, list[Tensor]] = {name: [] for name in ("weights", *_DIAGNOSTICS, "step_size")}
    with evaluation_mode(model.net), jax.enable_x64(True):
        density = PosteriorDensity(model, *data, temperature=temperature)
        key = NoiseKey(seed, Stream.INITIALIZATION, 0)
        noise = key.normals(range(num_chains), len(density.centre), dtype=torch.float64)
        starts = density.centre + init_std * noise
        with torch.no_grad():
            for start in starts:
                if not bool(density(start).isfinite()):
                    raise ValueError(
                        "the log density must be finite where a chain begins, got a value that is "
                        "not; lower init_std, and check inputs and targets for nan"
                    )
        translated = to_jax(density, density.centre)
        with torch.no_grad():
            for start in starts:
                ours, theirs = float(density(start)), float(translated(start.numpy()))
                if not math.isclose(ours, theirs, rel_tol=1e-6, abs_tol=1e-6):
                    raise NotImplementedError(
                        f"the network's density in JAX must be PyTorch's, {ours:.8g} where a chain "
                        f"begins, got {theirs:.8g}: an operator of the network or the likelihood "
                        "is not translated rightly; please report it"
                    )
        kernel = infer.NUTS(
            potential_fn=translated,
            step_size=1.0 if step_size is None else step_size,
            adapt_step_size=step_size is None,
            adapt_mass_matrix=step_size is None,
            target_accept_prob=target_acceptance,
            max_tree_depth=max_tree_depth,
        )
        mcmc = infer.MCMC(
            kernel, num_warmup=num_warmup, num_samples=num_samples, progress_bar=False
        )

        def draw(random: Any, start: Any) -> tuple[Any, Any, Any]:
            mcmc.run(random, init_params=start, extra_fields=tuple(_DIAGNOSTICS))
            last = mcmc.last_state.adapt_state.step_size
            return mcmc.get_samples(), mcmc.get_extra_fields(), last

        # NumPyro compiles each of its runs anew, which takes seconds: one serves all chains.
        compiled = jax.jit(draw)
        for chain, start in enumerate(starts):
            # Chain by chain: together, all would take as many steps as the one that takes the most.
            random = jax.random.key(derived_seed(seed, Stream.TRAINING, chain))
            drawn, reported, last = compiled(random, start.numpy())
            found["weights"].append(_tensor(drawn))
            extra = {name: _tensor(each) for name, each in reported.items()}
            cut_off += int((extra["num_steps"] >= 2**max_tree_depth - 1).sum())
            for name, values in extra.items():
                found[name].append(values.double().mean())
            found["step_size"].append(_tensor(last))
            if on_progress is not None:
                on_progress((chain + 1) / num_chains)
    stacked = {name: torch.stack(values) for name, values in found.items()}
    if cut_off > _CUT_OFF * num_chains * num_samples:
        warnings.warn(
            f"{cut_off} of {num_chains * num_samples} trajectories had the greatest length, "
            f"2^{max_tree_depth} - 1 steps, and did not turn: the draws are valid, but more "
            "dependent; raise max_tree_depth, or take more draws, and look at "
            "effective_sample_size",
            UserWarning,
            stacklevel=2,
        )
    diverged = round(float(stacked["diverging"].sum()) * num_samples)
    if diverged:
        warnings.warn(
            f"{diverged} of {num_chains * num_samples} trajectories diverged: the draws may miss a "
            "part of the posterior; raise target_acceptance, or lower step_size",
            UserWarning,
            stacklevel=2,
        )
    return PosteriorDraws(
        bnn=model,
        weights=density.full(stacked["weights"]),
        acceptance=stacked["accept_prob"],
        divergences=(stacked["diverging"] * num_samples).round().long(),
        step_size=stacked["step_size"],
        num_steps=stacked["num_steps"],
    )


#: Part of the trajectories of the greatest length above which there is a warning.
_CUT_OFF = 0.25
#: What NumPyro reports of each draw.
_DIAGNOSTICS = ("accept_prob", "diverging", "num_steps")


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array))


def _check_numbers(
    counts: Mapping[str, int],
    widths: Mapping[str, float | None],
    num_samples: int,
    target_acceptance: float,
) -> None:
    for name, count in counts.items():
        whole_number(name, count)
    if whole_number("num_samples", num_samples, None) < 4:
        raise ValueError(
            f"num_samples must be at least 4, as R-hat compares the halves of a chain, got "
            f"{num_samples}"
        )
    for name, width in widths.items():
        if width is not None:
            positive_number(name, width)
    if not 0.0 < target_acceptance < 1.0:
        raise ValueError(
            f"target_acceptance must lie strictly between 0 and 1, got {target_acceptance}"
        )
