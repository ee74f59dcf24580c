"""Store a trained estimator without pickle: tensors and a JSON description, in a file or not."""

from __future__ import annotations

import dataclasses
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, is_classifier
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from bayesify.io import (
    StorageError,
    model_meta,
    model_tensors,
    read_tensors,
    restore_model,
    write_tensors,
)
from bayesify.prediction.conformal import ConformalIntervals, ConformalSets
from bayesify.tabular.columns import column_from_json
from bayesify.tabular.files import TableError
from bayesify.tabular.model import TableNet
from bayesify.tabular.recipe import TableRecipe

__all__ = ["StorableEstimator"]

_KIND = "estimator"
_FORMAT = 1
#: Before the names of the tensors of a calibration.
_SCORES, _FOLDS = "scores.", "folds."
#: The entry of an estimator's state that stands for what training found.
_PACKED = "_packed"


class StorableEstimator(BaseEstimator, ABC):  # type: ignore[misc]
    """Base class of estimators that are stored without pickle, by us or by other libraries."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without tensors, which libraries such as skops cannot write.

        What has no such form, as after a failed fit or with a changed setting, stays as it is.
        """
        state: dict[str, Any] = super().__getstate__()
        try:
            packed = _packed(self)
            found = vars(_unpacked(type(self), packed)).keys()
            untrained = vars(type(self)(**self.get_params(deep=False))).keys()
        except (AttributeError, AssertionError, KeyError, TypeError, ValueError):
            return state
        restored = found - untrained
        kept = {name: value for name, value in state.items() if name not in restored}
        return {**kept, _PACKED: packed}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Restore the state of :meth:`__getstate__`, with the network on the CPU and not frozen."""
        own = dict(state)
        packed = own.pop(_PACKED, None)
        if packed is not None:
            self.__dict__.update(vars(_unpacked(type(self), packed)))
        super().__setstate__(own)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trained estimator and its calibration to a safetensors file, without pickle.

        Later versions of bayesify read it. A ``random_state`` that is a generator is stored as
        None.

        Args:
            path: the file; an existing file is replaced.

        Raises:
            NotFittedError: it is not trained.
            OSError: the file cannot be written; an existing file is then unchanged.
            TypeError: a setting or a label cannot be stored.
        """
        check_is_fitted(self)
        tensors, meta = _described(self)
        try:
            write_tensors(Path(path), tensors, meta)
        except TypeError as error:
            raise TypeError(
                f"the settings and labels of an estimator must be numbers, texts, booleans, or "
                f"lists of these to be stored ({error}); change them, or use joblib.dump"
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Return the estimator that :meth:`save` wrote.

        Raises:
            StorageError: the file is missing, damaged or of another class.
        """
        tensors, meta = read_tensors(Path(path))
        if meta.get("kind") != _KIND:
            raise StorageError(
                f"{path} holds no estimator, it is a {meta.get('kind', 'file')!r} of bayesify; use "
                f"a file of {cls.__name__}.save"
            )
        found: Self = _restored(cls, tensors, meta, source=str(path))
        return found

    @abstractmethod
    def _stored_targets(self) -> dict[str, Any]:
        """Return what was found in the targets, as JSON."""

    @abstractmethod
    def _restore_targets(self, stored: Mapping[str, Any]) -> int:
        """Set what :meth:`_stored_targets` returned, and return the number of outputs."""


def _packed(model: Any) -> dict[str, Any]:
    """Return what training found as arrays and a text, which any library of storage can write.

    Raises:
        AttributeError: it is not trained.
        TypeError: a label or a setting has no form in JSON, or a tensor none in NumPy.
    """
    tensors, meta = _described(model)
    return {
        "description": json.dumps(meta),
        "tensors": {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()},
    }


def _unpacked(kind: type[Any], packed: Mapping[str, Any]) -> Any:
    """Return the estimator that :func:`_packed` packed, without random generators."""
    tensors = {name: torch.from_numpy(np.array(part)) for name, part in packed["tensors"].items()}
    return _restored(kind, tensors, json.loads(packed["description"]), source="the estimator")


def _described(model: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and description of an estimator, those of its folds' models included."""
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
        "num_rows": model._num_rows,
        "targets": model._stored_targets(),
        "model": model_meta(bnn),
        "calibration": None,
    }
    tensors = model_tensors(bnn)
    if hasattr(model, "conformal_"):
        folds = [_described(each) for each in model.fold_models_]
        meta["calibration"] = {
            "networks": len(model.conformal_.scores),
            "folds": [fold for _, fold in folds],
        }
        tensors |= {f"{_SCORES}{k}": part for k, part in enumerate(model.conformal_.scores)}
        for k, (parts, _) in enumerate(folds):
            tensors |= {f"{_FOLDS}{k}.{name}": part for name, part in parts.items()}
    return tensors, meta


def _restored(
    kind: type[Any], tensors: Mapping[str, Tensor], meta: Mapping[str, Any], *, source: str
) -> Any:
    """Return the estimator that :func:`_described` describes; raise StorageError if it cannot."""
    try:
        return _rebuilt(kind, tensors, meta, source)
    except StorageError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, TableError) as error:
        raise StorageError(f"{source} does not describe an estimator: {error!r}") from error


def _rebuilt(
    kind: type[Any], tensors: Mapping[str, Tensor], meta: Mapping[str, Any], source: str
) -> Any:
    if meta["estimator_format"] != _FORMAT:
        raise StorageError(
            f"{source} has the estimator format {meta['estimator_format']}, this version of "
            f"bayesify reads {_FORMAT}; install a newer one"
        )
    if meta["class"] != kind.__name__:
        raise StorageError(f"{source} holds a {meta['class']}; use {meta['class']}.load")
    model = kind(**{name: _given(value) for name, value in meta["settings"].items()})
    model.columns_ = tuple(column_from_json(column) for column in meta["columns"])
    if meta["names"] is not None:
        model.feature_names_in_ = np.array(meta["names"], dtype=object)
    model.n_features_in_ = meta["num_features"]
    model.recipe_ = TableRecipe(**_given(meta["recipe"]))
    model.history_, model.n_iter_ = meta["history"], meta["num_steps"]
    model._num_rows = meta.get("num_rows", 1.0)  # files of earlier versions do not tell
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
    own = {name: part for name, part in tensors.items() if not name.startswith((_SCORES, _FOLDS))}
    model.bnn_ = restore_model(net, own, meta["model"], source=source)
    calibration = meta.get("calibration")  # files of earlier versions have none
    if calibration is not None:
        scores = tuple(tensors[f"{_SCORES}{k}"] for k in range(calibration["networks"]))
        model.conformal_ = (
            ConformalSets(scores, len(model.classes_))
            if is_classifier(model)
            else ConformalIntervals(scores)
        )
        model.fold_models_ = [
            _restored(kind, _below(f"{_FOLDS}{k}.", tensors), fold, source=source)
            for k, fold in enumerate(calibration["folds"])
        ]
    return model


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {name: part for name, part in tensors.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): part for name, part in found.items()}


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
