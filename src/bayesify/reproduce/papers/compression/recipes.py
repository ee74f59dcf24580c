"""Settings of each network, chosen on held-out training images: ``compression-tuning``."""

from __future__ import annotations

from typing import Any

__all__ = ["QUICK", "RECIPES", "SECONDS"]

#: The prior is a scale mixture whose spike, of std .01, weights can reach.
_COMMON: dict[str, Any] = {
    **{"pi": 0.1, "std1": 1.0, "std2": 0.01, "init_std": 0.02},
    **{"rho_lr_scale": 2.0, "batch_size": 256, "dropout_input": 0.2},
}
#: First phase: on the bound, temperature 1, with dropped pixels. The KL rises as a square.
_BOUND: dict[str, Any] = {
    **{"temperature": 1.0, "kl_warmup": 0.6, "kl_warmup_power": 2.0, "lr": 3e-3},
    "prune_between": [0.05, 0.5],
}
#: Second phase: the weights that are left, under a weak KL, with all pixels.
_TUNING: dict[str, Any] = {"temperature": 0.1, "lr": 2e-3, "dropout_input": 0.0}

_SMALL: dict[str, Any] = {
    **_COMMON,
    "network": "lenet-300-100",
    "tuning": {**_TUNING, "epochs": 40},
}
_CAFFE: dict[str, Any] = {
    **{**_COMMON, "network": "lenet-5-caffe", "dropout_input": 0.0},
    "tuning": {**_TUNING, "epochs": 30},
}
#: A job for each: the network, its two phases of training, and the steps of the file as a multiple
#: of the typical std.
RECIPES: dict[str, dict[str, Any]] = {
    "lenet-300-100-weights": {
        **{**_SMALL, "step_size": 0.4},
        "bound": {**_BOUND, "epochs": 150, "fraction": 0.9855},
    },
    "lenet-300-100-bytes": {
        **{**_SMALL, "step_size": 0.6},
        "bound": {**_BOUND, "epochs": 150, "fraction": 0.99},
    },
    "lenet-300-100-units": {
        **{**_SMALL, "step_size": 1.0, "dropout_input": 0.1},
        "bound": {
            **{**_BOUND, "temperature": 0.3, "epochs": 150, "fraction": 0.955},
            "units": [97, 71, 33],
        },
        "tuning": {**_TUNING, "epochs": 40, "temperature": 0.3, "dropout_input": 0.1},
    },
    "lenet-5-caffe-weights": {
        **{**_CAFFE, "step_size": 0.5},
        "bound": {**_BOUND, "epochs": 100, "fraction": 0.99643},
    },
    "lenet-5-caffe-units": {
        **{**_CAFFE, "step_size": 1.0},
        "bound": {**_BOUND, "epochs": 60, "fraction": 0.99, "units": [1, 5, 10, 16]},
    },
    "2x1200": {
        **{**_COMMON, "network": "2x1200", "step_size": 1.0},
        "bound": {
            **{**_BOUND, "kl_warmup": 0.95, "lr": 1.5e-3},
            **{"epochs": 100, "fraction": 0.99, "prune_between": [0.3, 0.9]},
        },
        "tuning": {**_TUNING, "epochs": 10, "temperature": 1.0, "lr": 5e-4, "dropout_input": 0.2},
    },
}
#: Estimated seconds of an epoch on one core.
SECONDS = {"lenet-300-100": 1.6, "lenet-5-caffe": 14.0, "2x1200": 9.0}
#: Changes of a quick run.
QUICK: dict[str, Any] = {"limit": 2000, "batch_size": 50}
