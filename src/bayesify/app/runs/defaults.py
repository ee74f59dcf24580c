"""Defaults of a run that depend on its data, its baseline and its estimator."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any, Literal

from bayesify.datasets import IMAGE_DATASETS
from bayesify.tabular.recipe import STEPS_PER_EPOCH, TableRecipe
from bayesify.tabular.suffixes import TABLE_SUFFIXES

__all__ = [
    "PRIOR_CANDIDATES",
    "PRIOR_STD_CERTIFIED",
    "SPARSITY",
    "DataKind",
    "closed_forms_hold",
    "defaults_for",
    "is_image_folder",
    "is_table_file",
    "kind_of_data",
]

#: Data of a run: the digits or clothes of a known data set, images of one's own, or a table.
DataKind = Literal["digits", "images", "table"]

#: Priors whose KL has a closed form and no kernel.
SPARSITY = ("grouped-gaussian", "spike-and-slab", "log-uniform")

#: The optimizer of Blundell et al. 2015, each baseline with the better of the rates 0.1 and 0.02.
_BASELINES: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "batch_size": 128},
    "dropout": {
        "optimizer": "sgd",
        "lr": 0.02,
        "momentum": 0.9,
        "batch_size": 128,
        "dropout_input": 0.2,
        "dropout_hidden": 0.5,
    },
}
#: The paper's mixture, for what the search below did not include.
_EARLIER_MIXTURE: dict[str, Any] = {"pi": 0.75, "std1": 1.0, "std2": math.exp(-8.0)}
#: A narrower spike is beyond the reach of a whole unit.
_SPIKE_AND_SLAB: dict[str, Any] = {"pi": 0.1, "std1": 0.5, "std2": 0.02}
#: With one std for all weights, and for LeNet-5: the defaults before the search of ``bayesify
#: reproduce train-defaults``, whose best trial has the fields' own.
_EARLIER: dict[str, Any] = {
    "prior": "gaussian",
    **_EARLIER_MIXTURE,
    "lr": 1.5e-3,
    "rho_lr_scale": 1.5,
    "epochs": 25,
    "kl_warmup": 0.75,
    "kl_warmup_power": 1.0,
}
#: Of IVON, from short runs on training images held out: docs/ivon.md.
_IVON: dict[str, Any] = {
    "optimizer": "ivon",
    "prior": "gaussian",
    "prior_std": 0.1,
    "lr": 0.01,
    "batch_size": 128,
    "epochs": 20,
    "kl_warmup": 0.0,
    "kl_warmup_power": 1.0,
}
#: Of images of one's own, and where the last layer alone is random: docs/image-folders.md.
_IMAGES: dict[str, Any] = {**_EARLIER, "net": "resnet8", "batch_size": 64, "lr": 3e-3}
_LAST_LAYER: dict[str, Any] = {
    "random": "last-layer",
    "prior_std": 1.0,
    "init_std": 0.05,
    "rho_lr_scale": 10.0,
    "kl_warmup": 0.25,
}
#: Among so many stds of the prior that of a PAC-Bayes objective was chosen, on training images of
#: MNIST: certificates on these hold for all of them.
PRIOR_STD_CERTIFIED, PRIOR_CANDIDATES = 0.01, 5
#: Of a PAC-Bayes objective: docs/certificates.md.
_CERTIFIED: dict[str, Any] = {
    "prior": "gaussian",
    "prior_std": PRIOR_STD_CERTIFIED,
    **_EARLIER_MIXTURE,
    "rho_lr_scale": 1.0,
    "optimizer": "sgd",
    "lr": 1e-3,
    "momentum": 0.95,
    "batch_size": 250,
    "epochs": 3,
    "dropout_input": 0.2,
    "dropout_hidden": 0.2,
    "kl_warmup": 0.0,
}
#: Of a table with classes and texts or images, whose hundreds of features are dependent:
#: docs/tables.md.
_TEXTS = TableRecipe(
    hidden=(50,), steps=500, lr=0.02, init_std=0.05, prior_std=0.5, relevance=False, kl_warmup=0.2
)
_STEPS_WITH_TEXTS = 2
#: Of an adapter: those of the best trial of ``bayesify reproduce clinc150-tuning``, and steps for
#: small tables.
_ADAPTER: dict[str, Any] = {
    "hidden": (50,),
    "prior": "gaussian",
    "prior_std": 0.05,
    **_EARLIER_MIXTURE,
    "estimator": "flipout",
    "init_std": 0.05,
    "lr": 4e-3,
    "rho_lr_scale": 1.0,
    "kl_warmup": 0.0,
    "kl_warmup_power": 1.0,
    "batch_size": 32,
    "test_samples": 10,
}
_ADAPTER_EPOCHS, _ADAPTER_STEPS = 4, 500


def defaults_for(given: Mapping[str, Any], num_rows: int | None = None) -> dict[str, Any]:
    """Return the defaults that differ from the fields' own, for a run with these settings.

    Args:
        given: the settings that were given.
        num_rows: rows of a table for training, if it was read.

    Example:
        >>> defaults_for({"estimator": "antithetic"})
        {'train_samples': 2}
    """
    kind = kind_of_data(given)
    if kind == "table" and given.get("adapter"):
        defaults = _adapter_defaults(given, num_rows)
    elif kind == "table":
        defaults = _table_defaults(given, num_rows)
    elif kind == "images":
        defaults = dict(_IMAGES)
        if given.get("baseline") is not None:
            sgd = _BASELINES.get(given["baseline"], {})
            defaults |= {**sgd, "batch_size": 64, "lr": 0.05}
        elif given.get("random", "last-layer") == "last-layer":
            defaults |= _LAST_LAYER
    elif given.get("baseline") is not None:
        # An unknown baseline is an error that the field's check reports.
        defaults = dict(_BASELINES.get(given["baseline"], {}))
    elif given.get("optimizer") == "ivon":
        defaults = dict(_IVON)
    elif given.get("objective", "elbo") != "elbo":
        # The posterior begins at the prior.
        std = given.get("prior_std", _CERTIFIED["prior_std"])
        defaults = {**_CERTIFIED, "init_std": std}
    else:
        defaults = {} if _was_searched(given) else dict(_EARLIER)
    if given.get("prior") == "spike-and-slab":
        defaults |= _SPIKE_AND_SLAB
    if given.get("estimator") == "antithetic":
        defaults["train_samples"] = 2
    if given.get("prune_fraction") and defaults.get("backend") == "closed-form":
        defaults["backend"] = "auto"  # closed forms of local estimators are of all weights
    if given.get("posterior", "mean-field") != "mean-field":
        defaults["backend"] = "autograd"  # the others are of the mean field
    if given.get("posterior") == "matrix":
        defaults["estimator"] = "sampling"
    if "kl_warmup" in given:  # the fields' own power was found with their length
        defaults["kl_warmup_power"] = 1.0
    return defaults


def kind_of_data(given: Mapping[str, Any]) -> DataKind:
    """Return what a run's data are, which the settings that were given tell.

    Example:
        >>> kind_of_data({"dataset": "mnist"}), kind_of_data({"dataset": "photos"})
        ('digits', 'images')
        >>> kind_of_data({"dataset": "a.csv", "target": "y"})
        'table'
        >>> kind_of_data({"dataset": "a.csv", "target": "y", "image": "path"})
        'images'
        >>> kind_of_data({"dataset": "photos", "encoder": "vit"})  # of its features
        'table'
    """
    if given.get("target") is None and not is_image_folder(given.get("dataset", "mnist")):
        return "digits"
    if given.get("encoder") is not None:
        return "table"
    is_table = given.get("target") is not None and given.get("image") is None
    return "table" if is_table else "images"


def is_image_folder(dataset: str) -> bool:
    """Return whether a data set without a target is a folder of images.

    Example:
        >>> is_image_folder("mnist"), is_image_folder("photos")
        (False, True)
    """
    return dataset not in IMAGE_DATASETS


def is_table_file(dataset: str) -> bool:
    """Return whether the name of a data set is that of a file with a table.

    Example:
        >>> is_table_file("sales.csv"), is_table_file("mnist")
        (True, False)
    """
    return PurePath(dataset).suffix.lower() in TABLE_SUFFIXES


def _was_searched(given: Mapping[str, Any]) -> bool:
    """Whether a run on images has the network and the family of priors of the search."""
    if given.get("net", "mlp") != "mlp":
        return False
    prior = given.get("prior")
    return "prior_std" not in given if prior is None else bool(prior == "scale-mixture")


def closed_forms_hold(settings: Mapping[str, Any]) -> bool:
    """Return whether the gradients of a run have the closed forms that the backend needs.

    Several samples a step under an estimator without sampled weights need a KL in closed form.
    """
    sampled = settings.get("estimator", "sampling") in ("sampling", "antithetic")
    if settings.get("prior") in SPARSITY:
        return False
    exact_kl = settings.get("prior") != "scale-mixture" and settings.get("kl") != "monte-carlo"
    return sampled or exact_kl or settings.get("train_samples", 1) == 1


def _adapter_defaults(given: Mapping[str, Any], num_rows: int | None) -> dict[str, Any]:
    size = max(1, given.get("batch_size") or _ADAPTER["batch_size"])
    batches = -(-(num_rows or size) // size)
    epochs = max(_ADAPTER_EPOCHS, math.ceil(_ADAPTER_STEPS / batches))
    noise = {"noise": "input-dependent"} if given.get("task") == "regression" else {}
    defaults = {"net": "table", **noise, "epochs": epochs, **_ADAPTER}
    if given.get("baseline") is None:
        return defaults
    plain = ("net", "noise", "epochs", "hidden", "batch_size")
    return {name: defaults[name] for name in plain if name in defaults} | {
        "optimizer": "adam",
        "lr": 2e-3,
    }


def _table_defaults(given: Mapping[str, Any], num_rows: int | None) -> dict[str, Any]:
    """Return those of ``TableRecipe`` under the names of a run's settings."""
    size = max(1, given.get("batch_size") or TableRecipe.batch_size)
    classes = given.get("task") != "regression"
    if given.get("encoder") is not None and classes:
        recipe = replace(_TEXTS, batch_size=size)
        recipe = replace(recipe, steps=_STEPS_WITH_TEXTS * recipe.steps_for(num_rows or size))
    else:
        recipe = TableRecipe.for_rows(num_rows or size, has_classes=classes, batch_size=size)
    batches = -(-(num_rows or size) // recipe.batch_size)
    passes = given.get("passes") or max(1, STEPS_PER_EPOCH // batches)
    common = {
        "net": "table",
        "hidden": recipe.hidden,
        "batch_size": recipe.batch_size,
        "passes": passes,
        "epochs": math.ceil(recipe.steps / (batches * max(1, passes))),
    }
    if not classes:
        common["noise"] = "input-dependent"
    if given.get("baseline") is not None:
        return {**common, "optimizer": "adam", "lr": 1e-3}
    backend = "auto"
    if given.get("task") is not None or given.get("target") is None:
        exact = closed_forms_hold({"estimator": "local", **given})
        backend = "closed-form" if exact else "autograd"
    return {
        **common,
        "prior": "gaussian",
        "prior_std": recipe.prior_std,
        "relevance": "learned" if recipe.relevance else "equal",
        **_EARLIER_MIXTURE,
        "estimator": "local",
        "lr": recipe.lr,
        "rho_lr_scale": recipe.rho_lr_scale,
        "init_std": recipe.init_std,
        "kl_warmup": recipe.kl_warmup,
        "kl_warmup_power": 1.0,
        "backend": backend,
    }
