"""Store a trained estimator as a safetensors file with a JSON description, without pickle."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bayesify.io import (
    StorageError,
    model_meta,
    model_tensors,
    read_tensors,
    restore_model,
    write_tensors,
)
from bayesify.tabular.columns import column_from_json
from bayesify.tabular.files import TableError
from bayesify.tabular.model import TableNet
from bayesify.tabular.recipe import TableRecipe

__all__ = ["read_estimator", "write_estimator"]

_KIND = "estimator"
_FORMAT = 1


def write_estimator(model: Any, path: str | os.PathLike[str]) -> None:
    """Write a trained ``BayesianMLP``; see its method ``save``."""
    bnn = model.bnn_
    net = bnn.net
    assert isinstance(net, TableNet)
    noise = None if net.noise is None else "input-dependent" if net.input_dependent else "learned"
    names = getattr(model, "feature_names_in_", None)
    meta = {
        "kind": _KIND,
        "estimator_format": _FORMAT,
        "class": type(model).__name__,
        "settings": {name: _plain(value) for name, value in model.get_params().items()},
        "columns": [column.to_json() for column in model.columns_],
        "names": None if names is None else names.tolist(),
        "num_features": model.n_features_in_,
        "recipe": _plain(dataclasses.asdict(model.recipe_)),
        "net": {
            "num_features": net.linear.in_features,
            "noise": noise,
            "counts": net.log_rates is not None,
        },
        "history": model.history_,
        "num_steps": model.n_iter_,
        "targets": model._stored_targets(),
        "model": model_meta(bnn),
    }
    try:
        write_tensors(Path(path), model_tensors(bnn), meta)
    except TypeError as error:
        raise TypeError(
            f"the settings and labels of an estimator must be numbers, texts, booleans, or lists "
            f"of these to be stored ({error}); change them, or use joblib.dump"
        ) from error


def read_estimator(kind: type[Any], path: str | os.PathLike[str]) -> Any:
    """Read an estimator of a subclass of ``BayesianMLP``; see its method ``load``."""
    tensors, meta = read_tensors(Path(path))
    if meta.get("kind") != _KIND:
        raise StorageError(
            f"{path} holds no estimator, it is a {meta.get('kind', 'file')!r} of bayesify; use a "
            f"file of {kind.__name__}.save"
        )
    if meta["estimator_format"] != _FORMAT:
        raise StorageError(
            f"{path} has the estimator format {meta['estimator_format']}, this version of bayesify "
            f"reads {_FORMAT}; install a newer one"
        )
    if meta["class"] != kind.__name__:
        raise StorageError(f"{path} holds a {meta['class']}; use {meta['class']}.load")
    try:
        model = kind(**{name: _given(value) for name, value in meta["settings"].items()})
        model.columns_ = tuple(column_from_json(column) for column in meta["columns"])
        if meta["names"] is not None:
            model.feature_names_in_ = np.array(meta["names"], dtype=object)
        model.n_features_in_ = meta["num_features"]
        model.recipe_ = TableRecipe(**_given(meta["recipe"]))
        model.history_, model.n_iter_ = meta["history"], meta["num_steps"]
        outputs = model._restore_targets(meta["targets"])
        net = TableNet(
            meta["net"]["num_features"],
            model.recipe_.hidden,
            outputs,
            noise=meta["net"]["noise"],
            # Their values are among the tensors; files of earlier versions have none.
            log_rates=[0.0] * outputs if meta["net"].get("counts") else None,
            relevance=model.recipe_.relevance,
        )
    except (KeyError, TypeError, ValueError, TableError) as error:
        raise StorageError(f"{path} does not describe an estimator: {error}") from error
    model.bnn_ = restore_model(net, tensors, meta["model"], source=str(path))
    return model


def _plain(value: Any) -> Any:
    """Return a setting as JSON; a random generator has no value."""
    if isinstance(value, np.random.RandomState):
        return None
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {"pairs": [[_plain(key), _plain(each)] for key, each in value.items()]}
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value


def _given(value: Any) -> Any:
    """Return a setting that :func:`_plain` made JSON; lists become tuples."""
    if isinstance(value, dict):
        return {_given(key): _given(each) for key, each in value["pairs"]}
    return tuple(map(_given, value)) if isinstance(value, list) else value
