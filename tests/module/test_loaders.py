"""Loaders as inputs of predictions: the same answers as for the tensors that they bring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cases import normals
from tests.loops import loop_over
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import bayesify as bf
from bayesify.datasets import TensorLoader
from bayesify.module.inputs import inputs_of
from bayesify.module.networks import mlp

X, Y = normals(23, 4, seed=3), torch.arange(23) % 3


def dropout_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)).double()


def dictionaries() -> list[dict[str, Tensor]]:
    return [{"rows": x, "labels": y} for x, y in zip(X, Y, strict=True)]


LOADERS: dict[str, Callable[[], Any]] = {
    "inputs alone": lambda: DataLoader(X, batch_size=7),  # type: ignore[arg-type]
    "rows of one": lambda: DataLoader(TensorDataset(X), batch_size=7),
    "pairs": lambda: DataLoader(TensorDataset(X, Y), batch_size=7),
    "tensors": lambda: TensorLoader(X, Y, 7, shuffle=False),
    "batch sampler": lambda: DataLoader(
        TensorDataset(X, Y), batch_sampler=[list(range(20)), [20, 21, 22]]
    ),
}


@loop_over("name", LOADERS)
def test_a_loader_is_what_it_brings(name: str) -> None:
    bnn = bf.BayesianModule(mlp(4, (6,), 3).double(), init_std=0.3)
    predictors: list[Any] = [
        bnn,
        bf.MCDropout(dropout_net(), bf.CategoricalLikelihood()),
        bf.DeepEnsemble([bnn, bf.BayesianModule(mlp(4, (6,), 3).double(), seed=1)]),
    ]
    for each in predictors:
        found = each.predict(LOADERS[name](), 5, keep_samples=True).samples
        assert torch.equal(found, each.predict(X, 5, keep_samples=True).samples)
    assert torch.equal(bnn.predict_mean(LOADERS[name]()).mean, bnn.predict_mean(X).mean)
    assert torch.equal(bnn.mean_outputs(LOADERS[name]()), bnn.mean_outputs(X))
    assert torch.equal(bf.acquire(bnn, LOADERS[name](), 4), bf.acquire(bnn, X, 4))


@loop_over(("names", "wrong"), [(("x", "labels"), "x"), (("input", "y"), "y")])
def test_a_mapping_has_the_names_of_the_networks_arguments(
    names: tuple[str, str], wrong: str
) -> None:
    pairs = [dict(zip(names, pair, strict=True)) for pair in zip(X, Y, strict=True)]
    rows = DataLoader(pairs, batch_size=7)  # type: ignore[arg-type]
    bnn = bf.BayesianModule(dropout_net())
    predictors: list[Any] = [
        bnn,
        bf.MCDropout(dropout_net(), bf.CategoricalLikelihood()),
        bf.DeepEnsemble([bnn]),
    ]
    message = rf"arguments of Sequential\.forward, input, got {wrong}; rename .*\(inputs, targets\)"
    for each in predictors:
        with pytest.raises(TypeError, match=message):
            each.predict(rows)
    with pytest.raises(TypeError, match=message):
        bnn.predict_mean({wrong: X})
    batch = {names[0]: X, names[1]: Y, "labels": Y}
    with pytest.raises(TypeError, match=message):
        bf.fit(bf.ELBO(bnn, num_data=23), [batch], epochs=1, progress=False)


def test_mappings_and_several_inputs() -> None:
    class Two(nn.Linear):
        def forward(self, rows: Tensor, factor: Tensor | None = None) -> Tensor:
            return super().forward(rows) * (1.0 if factor is None else factor)

    bnn, factor = bf.BayesianModule(Two(4, 3).double()), normals(23, 1, seed=4)
    by_name = DataLoader(dictionaries(), batch_size=7)  # type: ignore[arg-type]
    assert torch.equal(bnn.mean_outputs(by_name), bnn.mean_outputs(X))
    two = [((x, f), y) for x, f, y in zip(X, factor, Y, strict=True)]
    several = DataLoader(two, batch_size=7)  # type: ignore[arg-type]
    assert torch.equal(bnn.mean_outputs(several), bnn.mean_outputs((X, factor)))


@loop_over(
    ("loader", "message"),
    [
        (DataLoader(TensorDataset(X, Y), 7, shuffle=True), "order.*shuffles; make it with shuffle"),
        (DataLoader(X, 7, sampler=RandomSampler(range(23))), "must keep the order"),  # type: ignore[arg-type]
        (TensorLoader(X, Y, 7), "must keep the order"),
        (DataLoader(TensorDataset(X), 7, num_workers=2, in_order=False), "make it with in_order"),
        (DataLoader(TensorDataset(X, Y, Y), 7), r"pair \(inputs, targets\).*got list of 3"),
        (DataLoader(TensorDataset(X[:0]), 7), "must bring a minibatch, got none"),
    ],
)
def test_a_loader_that_cannot_be_used(loader: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bf.BayesianModule(mlp(4, (6,), 3).double()).predict(loader)


def test_tensors_of_a_loader_go_to_the_network_s_device() -> None:
    meta = torch.device("meta")
    found = inputs_of(LOADERS["pairs"](), meta)
    assert isinstance(found, Tensor)
    assert (found.device, found.shape) == (meta, X.shape)


def test_minibatches_of_different_lengths_are_named() -> None:
    rows = [torch.zeros(5, 4), torch.zeros(5, 4), torch.zeros(6, 4), torch.zeros(6, 4)]
    loader = DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"one shape but .* got \(5, 4\) and \(6, 4\); pad all"):
        bf.BayesianModule(nn.Linear(4, 2)).predict(loader)


def test_tensors_of_the_cpu_are_moved_and_others_stay() -> None:
    there, elsewhere = torch.device("meta"), torch.zeros(3, 2, dtype=torch.float16)
    moved: Any = inputs_of({"x": elsewhere, "flag": True, "z": None}, there)
    assert moved["x"].device == there
    assert moved["flag"] is True
    assert moved["z"] is None
    assert inputs_of(elsewhere, there).device == there  # type: ignore[union-attr]
    assert inputs_of(elsewhere, torch.device("cpu")) is elsewhere
    far = torch.zeros(3, 2, device="meta")
    assert inputs_of(far, torch.device("cpu")) is far


def test_a_loader_that_drops_examples_is_refused() -> None:
    bnn = bf.BayesianModule(mlp(4, (6,), 3).double())
    with pytest.raises(ValueError, match="must bring every example, got one that drops"):
        bnn.predict(DataLoader(TensorDataset(X), batch_size=7, drop_last=True))
    whole = DataLoader(TensorDataset(X[:21]), batch_size=7, drop_last=True)
    assert torch.equal(bnn.predict(whole).mean, bnn.predict(X[:21]).mean)
