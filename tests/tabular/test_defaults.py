"""A run on a table trains the network of the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bayesify.app.runs import Run, RunConfig
from bayesify.tabular import Noise, TableRecipe
from bayesify.tabular.columns import NumberColumn
from bayesify.tabular.schema import TableSchema, Target


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_defaults_are_those_of_the_recipe(task: str) -> None:
    """The recipe is tested where it is; a run must train what it does."""
    has_classes = task == "classification"
    recipe = TableRecipe.for_rows(100, has_classes=has_classes)
    config = RunConfig.of("a.csv", target="y", task=task, num_rows=100)
    for name in (
        "hidden",
        "batch_size",
        "lr",
        "rho_lr_scale",
        "init_std",
        "prior_std",
        "kl_warmup",
    ):
        assert getattr(config, name) == getattr(recipe, name), name
    assert config.epochs * config.passes == recipe.steps
    assert (config.relevance == "learned") == recipe.relevance
    assert config.noise == ("learned" if has_classes else "input-dependent")
    many = RunConfig.of("a.csv", target="y", task=task, num_rows=2_000_000)
    steps = many.epochs * many.passes * -(-2_000_000 // many.batch_size)
    assert steps == TableRecipe.for_rows(2_000_000).steps


@pytest.mark.parametrize("noise", [None, "learned", "input-dependent"])
def test_the_network_is_the_recipes(tmp_path: Path, noise: Noise | None) -> None:
    task, classes = ("regression", ()) if noise else ("classification", ("a", "b", "c"))
    schema = TableSchema((NumberColumn(name="x"),), Target("y", task, classes))
    given = {"noise": noise} if noise else {}
    config = RunConfig.of("a.csv", target="y", task=task, num_rows=100, **given)
    made = Run(tmp_path, config, None, schema).make_module()
    recipe = TableRecipe.for_rows(100, has_classes=noise is None)
    expected = recipe.module(1, 1 if noise else 3, noise=noise, seed=0)
    assert made.prior == expected.prior
    assert made.estimator == expected.estimator
    assert made.layout.names == expected.layout.names
    assert torch.equal(made.posterior.mean.double(), expected.posterior.mean)
