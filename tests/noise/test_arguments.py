"""Numbers among arguments: Python's, NumPy's and tensors are taken alike, all else is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.cases import mlp
from tests.loops import loop_over

import bayesify as bf
from bayesify.bandits.learning import Learning
from bayesify.module.pretrained import RelativeStd
from bayesify.training.schedules import KLWarmup


def objective() -> bf.ELBO:
    return bf.ELBO(bf.BayesianModule(mlp(), prior=bf.Gaussian(0.1)), num_data=10)


def certifiable() -> bf.BayesianModule:
    return bf.BayesianModule(
        mlp(), prior=bf.Gaussian(0.1), prior_mean="initial", init_std=0.1, estimator=None
    )


def certified(**given: Any) -> object:
    x, y = torch.zeros(40, 3, dtype=torch.float64), torch.zeros(40, dtype=torch.long)
    return bf.certify(certifiable(), x, y, prior_indices=(), num_samples=100, **given)


TAKEN: dict[str, tuple[float, Callable[[Any], object]]] = {
    "std": (0.5, bf.Gaussian),
    "pi": (0.5, lambda value: bf.ScaleMixture(pi=value)),
    "scale": (0.5, lambda value: bf.StudentTLikelihood(value)),
    "dispersion": (0.5, bf.NegativeBinomialLikelihood),
    "temperature": (0.5, lambda value: bf.ELBO(objective().bnn, num_data=1, temperature=value)),
    "num_before": (5, lambda v: bf.StreamingELBO(objective().bnn, num_data=1, num_before=v)),
    "init_std": (
        0.5,
        lambda value: bf.StreamingELBO(objective().bnn, num_data=1, new=("*",), init_std=value),
    ),
    "lr": (0.5, lambda value: bf.IVON(objective(), lr=value)),
    "h0": (0.5, lambda value: bf.IVON(objective(), h0=value)),
    "delta": (0.5, lambda v: bf.PACBayesObjective(certifiable(), num_data=80, delta=v)),
    "p_min": (0.5, lambda v: bf.PACBayesObjective(certifiable(), num_data=80, p_min=v)),
    "delta_sampling": (0.01, lambda value: certified(delta_sampling=value)),
    "kl_warmup_epochs": (0.5, KLWarmup),
    "kl_warmup_power": (0.5, lambda value: KLWarmup(1, value)),
    "fraction": (0.5, lambda value: bf.prune(objective().bnn, value)),
    "power": (0.5, lambda v: bf.PruningSchedule(0.5, from_epoch=0, until_epoch=1, power=v)),
    "from_epoch": (0.5, lambda v: bf.PruningSchedule(0.5, from_epoch=v, until_epoch=1)),
    "minimum": (0.5, lambda value: RelativeStd(0.1, value)),
    "reward_scale": (0.5, lambda value: Learning(reward_scale=value)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_number_may_be_of_numpy_or_a_tensor(name: str) -> None:
    value, call = TAKEN[name]
    for each in (value, np.float32(value), np.asarray(value), torch.tensor(value)):
        call(each)


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_no_number_is_refused_by_name(name: str) -> None:
    _, call = TAKEN[name]
    for bad in (True, "0.1", [0.5], torch.ones(2)):
        with pytest.raises(TypeError, match=f"^{name} must be (a|one) number, got "):
            call(bad)


@loop_over("name", [name for name in TAKEN if name not in ("pi", "fraction")])
def test_what_is_no_finite_number_is_refused_by_name(name: str) -> None:
    _, call = TAKEN[name]
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"{name}.* must be .*{bad}"):
            call(bad)
