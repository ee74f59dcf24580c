"""The loop of active learning: train, measure, choose what to label, and begin again."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.datasets import Passes, TensorLoader, load_images
from bayesify.distributions.families import named_posterior
from bayesify.distributions.priors import Gaussian
from bayesify.estimators import LocalReparameterization, WeightSampling
from bayesify.io import StorageError, atomic_write
from bayesify.metrics import error_percent, nll
from bayesify.module.acquire import acquire
from bayesify.module.bayesian import BayesianModule
from bayesify.module.networks import mlp
from bayesify.noise.keys import Stream, derived_seed
from bayesify.prediction import CategoricalPredictive
from bayesify.reproduce.harness.experiment import Context
from bayesify.reproduce.harness.result_files import read_object
from bayesify.reproduce.papers.active.wavelet_features import (
    principal_components,
    scattering,
    straightened,
)
from bayesify.training import ConvergenceWarning
from bayesify.training.elbo import ELBO
from bayesify.training.fit import fit
from bayesify.training.schedules import cosine

__all__ = ["Problem", "ask", "balanced", "load_problem", "make_network"]

_STATE = "rounds.json"
#: Images from which the principal components are found.
_FOR_COMPONENTS = 10_000
#: The components that are kept in memory.
_MOST_COMPONENTS = 200


@dataclass(frozen=True, eq=False)
class Problem:
    """Features of a pool of images, whose labels cost, and of images to measure on.

    Args:
        pool_inputs: shape (N, K).
        pool_targets: shape (N,), read only where a label is asked for.
        test_inputs: shape (M, K).
        test_targets: shape (M,).
    """

    pool_inputs: Tensor
    pool_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor


def load_problem(config: Mapping[str, Any], data_dir: str | None) -> Problem:
    """Load MNIST as principal components of its features; the last features are kept in memory.

    With ``held_out`` that many of the last training images take the place of the test images. The
    components are those of the first training images; no label is used.

    Raises:
        DataError: the data set is missing.
    """
    names = ("limit", "num_test", "angles", "levels", "grid")
    found = _features(data_dir, *(config[name] for name in names))
    if config["held_out"]:
        cut = len(found.pool_targets) - config["held_out"]
        found = Problem(
            found.pool_inputs[:cut],
            found.pool_targets[:cut],
            found.pool_inputs[cut:],
            found.pool_targets[cut:],
        )
    mean, projection = principal_components(
        found.pool_inputs[:_FOR_COMPONENTS], config["components"], whitening=config["whitening"]
    )
    return replace(
        found,
        pool_inputs=(found.pool_inputs - mean) @ projection,
        test_inputs=(found.test_inputs - mean) @ projection,
    )


@lru_cache(maxsize=1)
def _features(
    data_dir: str | None,
    limit: int | None,
    num_test: int | None,
    angles: int,
    levels: int,
    grid: int,
) -> Problem:
    data = load_images("mnist", data_dir, limit=limit)

    def features(inputs: Tensor) -> Tensor:
        straight = straightened(inputs.unflatten(-1, data.image_shape))
        # Square roots, because averages of moduli have a long tail.
        return scattering(straight, angles=angles, levels=levels, grid=grid).sqrt()

    first = features(data.train_inputs[:_FOR_COMPONENTS])
    count = min(_MOST_COMPONENTS, first.shape[1])
    mean, projection = principal_components(first, count, whitening=0.0)

    def components_of(inputs: Tensor) -> Tensor:
        return torch.cat([(features(part) - mean) @ projection for part in inputs.split(2000)])

    return Problem(
        components_of(data.train_inputs),
        data.train_targets,
        components_of(data.test_inputs[:num_test]),
        data.test_targets[:num_test],
    )


def balanced(targets: Tensor, per_class: int, seed: int) -> list[int]:
    """Draw the same number of examples of each class.

    Args:
        targets: shape (N,), classes from 0.
        per_class: examples of each class.
        seed: determines the examples.

    Raises:
        ValueError: a class has fewer examples.

    Example:
        >>> chosen = balanced(torch.tensor([0, 1, 0, 1, 0]), 2, seed=0)
        >>> sorted(chosen)[-1] <= 4, len(set(chosen))
        (True, 4)
    """
    generator = torch.Generator().manual_seed(derived_seed(seed, Stream.ENVIRONMENT, 0))
    chosen: list[int] = []
    for label in range(int(targets.max()) + 1):
        found = (targets == label).nonzero().flatten()
        if len(found) < per_class:
            raise ValueError(
                f"class {label} must have at least {per_class} examples, got {len(found)}"
            )
        order = torch.randperm(len(found), generator=generator)[:per_class]
        chosen += found[order].tolist()
    return chosen


def make_network(config: Mapping[str, Any], num_inputs: int, seed: int) -> BayesianModule:
    """Create the random head: a linear layer, or a perceptron where ``hidden`` has layers."""
    if config["hidden"]:
        net: nn.Module = mlp(num_inputs, config["hidden"], 10, seed=seed)
    else:
        net = nn.Linear(num_inputs, 10)
        for parameter in net.parameters():
            nn.init.zeros_(parameter)
    is_mean_field = config["posterior"] == "mean-field"
    return BayesianModule(
        net,
        prior=Gaussian(config["prior_std"]),
        posterior=named_posterior(config["posterior"]),
        init_std=config["init_std"],
        estimator=LocalReparameterization() if is_mean_field else WeightSampling(),
        seed=seed,
    )


def ask(
    problem: Problem, config: Mapping[str, Any], seed: int, context: Context
) -> dict[str, list[Any]]:
    """Label, train from scratch, measure, choose, until ``num_labels`` are labelled.

    The state of each round is stored in ``context.work``, from which an interrupted job resumes.

    Returns:
        ``labels``, ``accuracy`` in percent and ``nll`` in nats per example of the averaged
        prediction on the test part, for each round; ``asked``, the indices of the labelled
        examples of the pool in the order in which they were chosen.

    Raises:
        StorageError: the stored state is damaged.
    """
    state = _stored(context, len(problem.pool_targets)) or {
        "labels": [],
        "accuracy": [],
        "nll": [],
        "asked": balanced(problem.pool_targets, config["start_per_class"], seed),
    }
    num_labels, start = config["num_labels"], 10 * config["start_per_class"]
    while True:
        asked, number = state["asked"], len(state["labels"])
        bnn = _trained(problem, asked, config, derived_seed(seed, Stream.TRAINING, number))
        predictive = bnn.predict(problem.test_inputs, num_samples=config["test_samples"])
        assert isinstance(predictive, CategoricalPredictive)
        accuracy = 100.0 - error_percent(predictive.mean, problem.test_targets)
        state["labels"].append(len(asked))
        state["accuracy"].append(round(accuracy, 3))
        state["nll"].append(round(nll(predictive.log_mean, problem.test_targets), 5))
        if context.on_progress is not None:
            context.on_progress((len(asked) - start + 1) / (num_labels - start + 1))
        if len(asked) >= num_labels:
            return state
        count = min(config["batch"], num_labels - len(asked))
        asked += _chosen(problem, bnn, asked, count, config, number)
        if context.work is not None:
            context.work.mkdir(parents=True, exist_ok=True)
            atomic_write(context.work / _STATE, json.dumps(state))


def _stored(context: Context, num_pool: int) -> dict[str, Any] | None:
    if context.work is None or not (context.work / _STATE).exists():
        return None
    path = context.work / _STATE
    state = read_object(path)
    lists = [state.get(name) for name in ("labels", "accuracy", "nll", "asked")]
    if not all(isinstance(values, list) for values in lists) or not all(
        isinstance(each, int) and 0 <= each < num_pool for each in state["asked"]
    ):
        raise StorageError(f"{path} does not hold the state of an experiment on these examples")
    return state


def _trained(
    problem: Problem, asked: list[int], config: Mapping[str, Any], seed: int
) -> BayesianModule:
    inputs, targets = problem.pool_inputs[asked], problem.pool_targets[asked]
    bnn = make_network(config, inputs.shape[1], seed)
    elbo = ELBO(
        bnn,
        num_data=len(targets),
        temperature=config["temperature"],
        num_samples=config["train_samples"],
    )
    # All examples in each step; one epoch is the whole training, so that its cost is the steps'.
    loader = Passes(TensorLoader(inputs, targets, len(targets), seed=seed), config["steps"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        fit(
            elbo,
            loader,
            epochs=1,
            optimizer=partial(torch.optim.Adam, lr=config["lr"], fused=True),
            scheduler=cosine,
            progress=False,
        )
    return bnn


def _chosen(
    problem: Problem,
    bnn: BayesianModule,
    asked: list[int],
    count: int,
    config: Mapping[str, Any],
    number: int,
) -> list[int]:
    """Choose examples from a random part of the pool that is the same for every method."""
    is_left = torch.ones(len(problem.pool_targets), dtype=torch.bool)
    is_left[asked] = False
    left = is_left.nonzero().flatten()
    generator = torch.Generator().manual_seed(derived_seed(bnn.seed, Stream.ACTING, number))
    left = left[torch.randperm(len(left), generator=generator)]
    candidates = left[: config["candidates"]]
    # Targets of EPIG: other images of the pool, without their labels.
    targets = left[-config["targets"] :]
    chosen = acquire(
        bnn,
        problem.pool_inputs[candidates],
        count,
        config["method"],
        target_inputs=problem.pool_inputs[targets] if config["method"] == "epig" else None,
        num_samples=config["num_samples"],
    )
    return [int(index) for index in candidates[chosen]]
