"""Settings of each network: the first ones, what trials change, and which trial was chosen.

The choice is by the error on held-out training images, ``compression-tuning``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["CHOSEN", "QUICK", "RECIPES", "SECONDS", "TRIALS", "Trial"]

#: The prior is a scale mixture whose spike, of std .01, weights can reach.
_COMMON: dict[str, Any] = {
    "pi": 0.1,
    "std1": 1.0,
    "std2": 0.01,
    "init_std": 0.02,
    "rho_lr_scale": 2.0,
    "batch_size": 256,
    "dropout_input": 0.2,
}
#: First phase: on the bound, temperature 1, with dropped pixels. The KL rises as a square.
_BOUND: dict[str, Any] = {
    "temperature": 1.0,
    "kl_warmup": 0.6,
    "kl_warmup_power": 2.0,
    "lr": 3e-3,
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
    **_COMMON,
    "network": "lenet-5-caffe",
    "dropout_input": 0.0,
    "tuning": {**_TUNING, "epochs": 30},
}
#: The first settings of each recipe: the network, its two phases of training, and the steps of the
#: file as a multiple of the typical std.
_FIRST: dict[str, dict[str, Any]] = {
    "lenet-300-100-weights": {
        **_SMALL,
        "step_size": 0.4,
        "bound": {**_BOUND, "epochs": 150, "fraction": 0.9855},
    },
    "lenet-300-100-bytes": {
        **_SMALL,
        "step_size": 0.6,
        "bound": {**_BOUND, "epochs": 150, "fraction": 0.99},
    },
    "lenet-300-100-units": {
        **_SMALL,
        "step_size": 1.0,
        "dropout_input": 0.1,
        "bound": {
            **_BOUND,
            "temperature": 0.3,
            "epochs": 150,
            "fraction": 0.955,
            "units": [97, 71, 33],
        },
        "tuning": {**_TUNING, "epochs": 40, "temperature": 0.3, "dropout_input": 0.1},
    },
    "lenet-5-caffe-weights": {
        **_CAFFE,
        "step_size": 0.5,
        "bound": {**_BOUND, "epochs": 100, "fraction": 0.99643},
    },
    "lenet-5-caffe-bytes": {
        **_CAFFE,
        "step_size": 1.0,
        "dropout_input": 0.1,
        "bound": {**_BOUND, "epochs": 100, "fraction": 0.9948, "prune_between": [0.1, 0.8]},
    },
    "lenet-5-caffe-error": {
        **_CAFFE,
        "moved": 0.1,
        "step_size": 1.0,
        "bound": {**_BOUND, "epochs": 150, "fraction": 0.9951, "prune_between": [0.1, 0.8]},
        "tuning": {**_TUNING, "epochs": 100},
    },
    "lenet-5-caffe-fast": {
        **_CAFFE,
        "step_size": 1.0,
        "dropout_input": 0.1,
        "bound": {
            **_BOUND,
            "temperature": 0.3,
            "epochs": 80,
            "fraction": 0.98,
            "prune_between": [0.1, 0.6],
            "units": [1, 8, 16, 64],
        },
        "tuning": {**_TUNING, "epochs": 50, "dropout_input": 0.1},
    },
    "lenet-5-caffe-units": {
        **_CAFFE,
        "step_size": 1.0,
        "bound": {**_BOUND, "epochs": 60, "fraction": 0.99, "units": [1, 5, 10, 16]},
    },
    "2x1200": {
        **_COMMON,
        "network": "2x1200",
        "step_size": 1.0,
        "bound": {
            **_BOUND,
            "kl_warmup": 0.95,
            "lr": 1.5e-3,
            "epochs": 100,
            "fraction": 0.99,
            "prune_between": [0.3, 0.9],
        },
        "tuning": {**_TUNING, "epochs": 10, "temperature": 1.0, "lr": 5e-4, "dropout_input": 0.2},
    },
}


class Trial(NamedTuple):
    """A recipe and what a trial changes of its first settings, by phase or on the top level."""

    recipe: str
    what: str
    changes: Mapping[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """The first settings with the changes."""
        made = dict(_FIRST[self.recipe])
        for key, value in self.changes.items():
            made[key] = {**made[key], **value} if isinstance(value, Mapping) else value
        return made


def _colder(temperature: float) -> dict[str, Any]:
    return {phase: {"temperature": temperature} for phase in ("bound", "tuning")}


#: A fraction of weights that the pruned units exceed.
_WHOLE: dict[str, Any] = {"fraction": 0.9}


def _late(pixels: float = 0.1, **more: Mapping[str, Any]) -> dict[str, Any]:
    """Units pruned between 10 and 80 % at temperature .1, and a second phase of 80 epochs."""
    bound = {**_WHOLE, "temperature": 0.1, "prune_between": [0.1, 0.8]}
    tuning = {"temperature": 0.03, "epochs": 80, "dropout_input": pixels}
    return {
        "dropout_input": pixels,
        "bound": {**bound, **more.get("bound", {})},
        "tuning": {**tuning, **more.get("tuning", {})},
    }


def _moved(amount: float) -> dict[str, Any]:
    """Images moved at random; a second phase of 100 epochs that drops a twentieth of the pixels."""
    tuning = {"temperature": 0.1, "epochs": 100, "dropout_input": 0.05}
    return {"moved": amount, "bound": {"temperature": 0.1}, "tuning": tuning}


def _moved_late(amount: float = 0.1, **more: Mapping[str, Any]) -> dict[str, Any]:
    """Images moved at random, weights pruned late, and phases of 150 and 100 epochs."""
    bound = {"epochs": 150, "prune_between": [0.1, 0.8]}
    return {
        "moved": amount,
        "bound": {**bound, **more.get("bound", {})},
        "tuning": {"epochs": 100, **more.get("tuning", {})},
    }


#: Both phases of 2x1200 longer, and the second one colder.
_LONG: dict[str, Any] = {"bound": {"epochs": 200}, "tuning": {"epochs": 40, "temperature": 0.3}}

#: What a trial is in words and what it changes, by the recipe and the end of the trial's name.
_CHANGES: dict[str, dict[str, tuple[str, Mapping[str, Any]]]] = {
    "lenet-300-100-weights": {
        "no-pixels": ("no pixels dropped", {"dropout_input": 0.0}),
        "fast-rise": (
            "KL rises over 30 %, as a straight line",
            {"bound": {"kl_warmup": 0.3, "kl_warmup_power": 1.0}},
        ),
        "low-rate": ("learning rate .0015", {"bound": {"lr": 1.5e-3}}),
        "late": ("weights pruned between 20 and 80 %", {"bound": {"prune_between": [0.2, 0.8]}}),
        "cold": ("temperature .3", {"bound": {"temperature": 0.3}}),
        "tuned-at-1": ("second phase at temperature 1", {"tuning": {"temperature": 1.0}}),
        "tuned-at-0": ("second phase without KL", {"tuning": {"temperature": 0.0}}),
        "coarse": ("steps of 1", {"step_size": 1.0}),
    },
    "lenet-300-100-units": {
        "0.1": ("temperature .1", _colder(0.1)),
        "1": ("temperature 1", _colder(1.0)),
        "whole": ("no weights pruned but those of units", {"bound": _WHOLE}),
        "late": ("the same, late and cold", _late()),
        "late-long": ("late and cold, 300 epochs", _late(bound={"epochs": 300})),
        "late-no-pixels": ("late and cold, no pixels dropped", _late(0.0)),
        "late-pixels": ("late and cold, 20 % of the pixels dropped", _late(0.2)),
        "late-tuned-at-0": (
            "late and cold, second phase without KL",
            _late(tuning={"temperature": 0.0}),
        ),
        "late-tuned-long": (
            "late and cold, second phase of 200 epochs, rate .003",
            _late(tuning={"epochs": 200, "lr": 3e-3}),
        ),
        "moved": ("temperature .1, second phase of 100 epochs, images moved by .1", _moved(0.1)),
        "moved-less": (
            "temperature .1, second phase of 100 epochs, images moved by .05",
            _moved(0.05),
        ),
        "not-moved": ("temperature .1, second phase of 100 epochs", _moved(0.0)),
    },
    "lenet-5-caffe-weights": {
        "0.1": ("10 % of the pixels dropped", {"dropout_input": 0.1}),
        "0.2": ("20 % of the pixels dropped", {"dropout_input": 0.2}),
        "long": ("300 epochs", {"bound": {"epochs": 300}}),
        "late": ("weights pruned between 10 and 80 %", {"bound": {"prune_between": [0.1, 0.8]}}),
        "cold": ("temperature .3", {"bound": {"temperature": 0.3}}),
        "long-late-cold": (
            "long, late and cold, second phase of 60 epochs",
            {
                "bound": {"epochs": 300, "prune_between": [0.1, 0.8], "temperature": 0.3},
                "tuning": {"epochs": 60},
            },
        ),
        "moved": (
            "late, 80 epochs and a second phase of 50, images moved by .1",
            _moved_late(bound={"epochs": 80}, tuning={"epochs": 50}),
        ),
        "moved-long": (
            "late, 150 epochs and a second phase of 100, images moved by .1",
            _moved_late(),
        ),
        "moved-cold": (
            "the same at temperature .3, second phase at .03 and a rate of .003",
            _moved_late(bound={"temperature": 0.3}, tuning={"temperature": 0.03, "lr": 3e-3}),
        ),
        "moved-tuned": (
            "moved and long, second phase of 150 epochs at temperature .02 and a rate of .003",
            _moved_late(tuning={"epochs": 150, "temperature": 0.02, "lr": 3e-3}),
        ),
        "moved-less": ("moved and long, images moved by .05", _moved_late(0.05)),
        "moved-more": ("moved and long, images moved by .15", _moved_late(0.15)),
        "moved-longest": (
            "moved and long, but 300 epochs",
            _moved_late(bound={"epochs": 300}),
        ),
        "moved-pixels": (
            "moved and long, 10 % of the pixels dropped, 5 % in the second phase",
            {"dropout_input": 0.1, **_moved_late(tuning={"dropout_input": 0.05})},
        ),
        "moved-later": (
            "moved and long, weights pruned between 30 and 95 %",
            _moved_late(bound={"prune_between": [0.3, 0.95]}),
        ),
    },
    "lenet-5-caffe-bytes": {
        "fewer": ("one weight in 204 left", {"bound": {"fraction": 0.9951}}),
        "moved": (
            "150 epochs and a second phase of 100, no pixels dropped, images moved by .1",
            {"dropout_input": 0.0, **_moved_late()},
        ),
    },
    "lenet-5-caffe-fast": {
        "whole": (
            "no weights pruned but those of units, late and cold",
            _late(bound={"epochs": 80}, tuning={"epochs": 50}),
        ),
    },
    "lenet-5-caffe-units": {
        "late": (
            "units pruned between 10 and 80 %, temperature .3",
            {"bound": {"prune_between": [0.1, 0.8], "temperature": 0.3}},
        ),
    },
    "2x1200": {
        "long": ("200 epochs", {"bound": {"epochs": 200}}),
        "cold": ("temperature .3", {"bound": {"temperature": 0.3}}),
        "tuned-long": (
            "second phase of 40 epochs at temperature .3",
            {"tuning": {"epochs": 40, "temperature": 0.3}},
        ),
        "long-tuned-long": ("200 epochs, second phase of 40 at temperature .3", _LONG),
        "fine": (
            "200 epochs, second phase of 40 at temperature .3, steps of .25",
            {**_LONG, "step_size": 0.25},
        ),
        "cold-fine": (
            "200 epochs and 40, both at temperature .3, steps of .25",
            {**_LONG, "bound": {"epochs": 200, "temperature": 0.3}, "step_size": 0.25},
        ),
        "moved": (
            "200 epochs, second phase of 40 at temperature .3, images moved by .1",
            {**_LONG, "moved": 0.1},
        ),
        "moved-pixels": (
            "the same, 10 % of the pixels dropped",
            {
                **_LONG,
                "moved": 0.1,
                "dropout_input": 0.1,
                "tuning": {**_LONG["tuning"], "dropout_input": 0.1},
            },
        ),
    },
}


def _trials() -> dict[str, Trial]:
    made = {name: Trial(name, "the first settings", {}) for name in _FIRST}
    for recipe, trials in _CHANGES.items():
        made |= {
            f"{recipe}-{end}": Trial(recipe, what, changes)
            for end, (what, changes) in trials.items()
        }
    return made


#: All trials by the name of their job.
TRIALS = _trials()
#: The trial of each recipe whose settings are used: that of lowest error, but for three. Of
#: lenet-300-100-weights one had .05 less, and .01 less had one of lenet-5-caffe-weights with a
#: longer second phase, which is noise of one seed; two files of lenet-5-caffe-bytes were larger
#: than the literature's, whatever their error: that of moved images led to the settings of
#: lenet-5-caffe-error, which remove a few more weights.
CHOSEN = {
    "lenet-300-100-weights": "lenet-300-100-weights",
    "lenet-300-100-bytes": "lenet-300-100-bytes",
    "lenet-300-100-units": "lenet-300-100-units-moved",
    "lenet-5-caffe-weights": "lenet-5-caffe-weights-moved-long",
    "lenet-5-caffe-bytes": "lenet-5-caffe-bytes-fewer",
    "lenet-5-caffe-error": "lenet-5-caffe-error",
    "lenet-5-caffe-fast": "lenet-5-caffe-fast",
    "lenet-5-caffe-units": "lenet-5-caffe-units",
    "2x1200": "2x1200-moved-pixels",
}
#: The settings of each job.
RECIPES = {recipe: TRIALS[trial].settings for recipe, trial in CHOSEN.items()}
#: Estimated seconds of an epoch on one core.
SECONDS = {"lenet-300-100": 1.6, "lenet-5-caffe": 14.0, "2x1200": 9.0}
#: Changes of a quick run.
QUICK: dict[str, Any] = {"limit": 2000, "batch_size": 50}
