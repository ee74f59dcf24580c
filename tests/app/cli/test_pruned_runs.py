"""Runs that are pruned as they are trained: settings, metrics, table, later commands."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from tests.app.cli.test_cli import TINY, as_json, bayesify, quick_runs
from tests.app.cli.test_errors import check_refused

from bayesify import load
from bayesify.app.runs import RunConfig
from bayesify.module.networks import mlp

pytestmark = pytest.mark.usefixtures("quick")

PRUNED = ["--prune-fraction", "0.9", "--prune-from", "0.5", "--prune-until", "1.5"]
#: 784 x 16 + 16 + 16 x 10 + 10 weights, of which floor(0.9 x 12,730) are pruned.
WEIGHTS, LEFT = 12_730, 1_273


@pytest.fixture(scope="module")
def pruned_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run that was pruned, and what it printed."""
    place = tmp_path_factory.mktemp("pruned") / "run"
    with quick_runs():
        said = bayesify("train", "mnist", "--out", place, *TINY, *PRUNED)
    assert said.code == 0, said.err
    return place, said.err


def test_the_metrics_tell_what_is_left(pruned_run: tuple[Path, str]) -> None:
    folder, printed = pruned_run
    metrics = json.loads((folder / "metrics.json").read_text())
    assert (metrics["num_weights"], metrics["num_weights_left"]) == (WEIGHTS, LEFT)
    assert metrics["fraction_pruned"] == pytest.approx(0.9)
    with (folder / "history.csv").open(newline="") as file:
        rows = [float(row["fraction_pruned"]) for row in csv.DictReader(file)]
    assert 0.0 < rows[0] < rows[1] == pytest.approx(0.9)
    header, *lines = [line for line in printed.splitlines() if "%" in line or "/2 " in line]
    assert "pruned %" in header
    assert f"{100 * rows[0]:.2f}" in lines[0]
    assert "90.00" in lines[1]


def test_a_run_without_pruning_has_no_column_of_it(tmp_path: Path) -> None:
    said = bayesify("train", "mnist", "--out", tmp_path / "run", *TINY)
    assert "pruned" not in said.err
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["num_weights_left"] == WEIGHTS
    assert metrics["fraction_pruned"] == 0.0


def test_the_checkpoint_holds_the_pruned_network(pruned_run: tuple[Path, str]) -> None:
    posterior = load(pruned_run[0] / "checkpoint.safetensors", mlp(784, (16,), 10)).posterior
    assert posterior.mask is not None
    assert int(posterior.mask.sum()) == LEFT
    assert int((posterior.mean != 0).sum()) == LEFT


def test_inspect_has_medians_of_the_weights_that_are_left(pruned_run: tuple[Path, str]) -> None:
    for row in as_json("inspect", pruned_run[0])["parameters"]:  # no infinity, which is no JSON
        assert (row["std_median"] or 1.0) > 0.0
        assert (row["std_median"] is None) == (row["snr_db_median"] is None)
    posterior = load(pruned_run[0] / "checkpoint.safetensors", mlp(784, (16,), 10)).posterior
    first = posterior.std.detach()[: 784 * 16]
    row = as_json("inspect", pruned_run[0])["parameters"][0]
    assert row["std_median"] == pytest.approx(float(first[first > 0.0].median()))


def test_later_commands_begin_with_what_is_left(
    pruned_run: tuple[Path, str], tmp_path: Path
) -> None:
    folder = pruned_run[0]
    # Of a fraction that removes none more than were removed there is no row.
    fractions = ("--fractions", "0.5,0.90005,0.95")
    found = as_json("prune", folder, *fractions, "--out", tmp_path / "s.safetensors")
    rows = found["rows"]
    assert [row["weights_left"] for row in rows] == [LEFT, WEIGHTS - int(0.95 * WEIGHTS)]
    assert [row["fraction"] for row in rows] == pytest.approx([0.9, 0.95])
    assert found["written"]["fraction"] == 0.95
    metrics = json.loads((folder / "metrics.json").read_text())
    assert as_json("evaluate", folder)["num_weights_left"] == metrics["num_weights_left"]
    assert f"{LEFT:,} left after pruning" in (folder / "report.html").read_text()


def test_a_fraction_that_is_exceeded_writes_the_network_as_it_is(
    pruned_run: tuple[Path, str], tmp_path: Path
) -> None:
    out = tmp_path / "s.safetensors"
    found = as_json("prune", pruned_run[0], "--fractions", "0.5", "--out", out)
    assert found["written"]["fraction"] == pytest.approx(0.9)
    whole = load(pruned_run[0] / "checkpoint.safetensors", mlp(784, (16,), 10))
    assert torch.equal(load(out, mlp(784, (16,), 10)).posterior.mean, whole.posterior.mean)


def test_resuming_needs_the_same_schedule(pruned_run: tuple[Path, str]) -> None:
    again = ["train", "mnist", "--out", pruned_run[0], "--resume", *TINY]
    assert bayesify(*again, *PRUNED).code == 0
    said = bayesify(*again, *PRUNED[:-1], "1.75")
    assert said.code == 2
    assert "prune-until is 1.5, but 1.75 was asked for" in said.err


@pytest.mark.parametrize("posterior", ["mean-field", "low-rank"])
def test_a_table_is_pruned_as_it_is_trained(posterior: str, tmp_path: Path) -> None:
    """The defaults of tables are local reparametrisation by closed forms, of all weights."""
    table = tmp_path / "table.csv"
    rows = [f"{k % 7},{k % 3},{(k % 7) * 2 + k % 3}" for k in range(60)]
    table.write_text("\n".join(["a,b,y", *rows]))
    options = ["--target", "y", "--prune-fraction", "0.5", "--epochs", "4", "--hidden", "6"]
    options += ["--posterior", posterior, "--test-samples", "3"]
    metrics = as_json("train", table, "--out", tmp_path / "run", *options)
    assert metrics["fraction_pruned"] == pytest.approx(0.5, abs=0.03)
    assert metrics["num_weights_left"] == metrics["num_weights"] - metrics["num_weights"] // 2


def test_the_schedule_has_defaults_in_parts_of_the_epochs() -> None:
    schedule = RunConfig.of("mnist", prune_fraction=0.9, epochs=10).make_pruning()
    assert schedule is not None
    assert (schedule.from_epoch, schedule.until_epoch) == (1.0, 5.0)
    assert RunConfig.of("mnist").make_pruning() is None
    assert RunConfig.of("mnist", baseline="sgd").make_pruning() is None


def test_a_posterior_that_cannot_be_pruned_is_refused_before_the_folder_is_made(
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    train = ["train", "mnist", "--limit", "200", "--epochs", "3", "--hidden", "10", "--out", out]
    done = bayesify(*train, "--posterior", "matrix", "--prune-fraction", "0.5")
    check_refused(done, "posterior matrix of this network cannot be pruned in training")
    assert not out.exists()


def test_pruning_up_to_the_last_step_leaves_no_folder(tmp_path: Path) -> None:
    out = tmp_path / "run"
    said = bayesify("train", "mnist", "--out", out, *TINY, *PRUNED[:-1], "1.99")
    check_refused(said, "prune-from 0.5 and prune-until 1.99 end after step 8 of 8, with 4 min")
    assert not out.exists()
    said = bayesify("train", "mnist", "--out", out, *TINY, *PRUNED)
    assert said.code == 0, said.err
