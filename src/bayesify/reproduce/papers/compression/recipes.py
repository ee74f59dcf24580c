"""Settings of each network, chosen on held-out training images by ``bayesify reproduce compression-tuning``."""

from __future__ import annotations

from typing import Any

__all__ = ["QUICK", "RECIPES", "SECONDS"]

_PRIOR: dict[str, Any] = {"pi": 0.1, "std1": 1.0, "std2": 0.01, "init_std": 0.02}
_COMMON: dict[str, Any] = {**_PRIOR, "rho_lr_scale": 2.0, "batch_size": 256}
#: On the bound, temperature 1: the KL rises over the first part of the training.
_BOUND: dict[str, Any] = {"temperature": 1.0, "kl_warmup": 0.5, "lr": 3e-3}

#: A job for each: the network, its two phases of training and the step of quantisation.
RECIPES: dict[str, dict[str, Any]] = {
    "lenet-300-100-weights": {
        **_COMMON,
        **{"network": "lenet-300-100", "dropout_input": 0.0, "step": 1.5},
        "bound": {**_BOUND, "epochs": 100, "fraction": 0.9856, "prune_between": [0.1, 0.5]},
        "tuning": {"temperature": 0.1, "lr": 1e-3, "epochs": 30, "dropout_input": 0.0},
    },
    "lenet-300-100-units": {
        **_COMMON,
        **{"network": "lenet-300-100", "dropout_input": 0.0, "step": 1.0},
        "bound": {
            **{**_BOUND, "epochs": 100, "fraction": 0.97, "prune_between": [0.1, 0.5]},
            "units": [97, 71, 33],
        },
        "tuning": {"temperature": 0.1, "lr": 1e-3, "epochs": 30, "dropout_input": 0.0},
    },
    "lenet-5-caffe-weights": {
        **_COMMON,
        **{"network": "lenet-5-caffe", "dropout_input": 0.0, "step": 1.5},
        "bound": {**_BOUND, "epochs": 60, "fraction": 0.99643, "prune_between": [0.05, 0.5]},
        "tuning": {"temperature": 0.1, "lr": 1e-3, "epochs": 20, "dropout_input": 0.0},
    },
    "lenet-5-caffe-units": {
        **_COMMON,
        **{"network": "lenet-5-caffe", "dropout_input": 0.0, "step": 1.5},
        "bound": {
            **{**_BOUND, "epochs": 60, "fraction": 0.995, "prune_between": [0.05, 0.5]},
            "units": [1, 5, 10, 16],
        },
        "tuning": {"temperature": 0.1, "lr": 1e-3, "epochs": 20, "dropout_input": 0.0},
    },
    "2x1200": {
        **_COMMON,
        **{"network": "2x1200", "dropout_input": 0.2, "step": 1.5},
        "bound": {
            **{"temperature": 1.0, "kl_warmup": 0.95, "kl_warmup_power": 2.0, "lr": 1.5e-3},
            **{"epochs": 100, "fraction": 0.99, "prune_between": [0.3, 0.9]},
        },
        "tuning": {"temperature": 1.0, "lr": 5e-4, "epochs": 10, "dropout_input": 0.2},
    },
}
#: Estimated seconds of an epoch on one core.
SECONDS = {"lenet-300-100": 1.6, "lenet-5-caffe": 14.0, "2x1200": 9.0}
#: Changes of a quick run.
QUICK: dict[str, Any] = {"limit": 2000, "batch_size": 50}
