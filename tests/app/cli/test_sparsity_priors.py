"""Priors that remove weights, on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.app.cli.test_cli import as_json, bayesify
from tests.app.cli.test_errors import check_refused
from tests.app.cli.test_posterior import QUICK, table

import bayesify as bf
from bayesify.app.report.run_tables import key_numbers
from bayesify.app.runs import Run
from bayesify.app.runs.run_config import RunConfig

__all__ = ["table"]  # a fixture

PRIORS = {
    "--prior log-uniform": bf.LogUniform(),
    "--prior grouped-gaussian": bf.GroupedGaussian("input"),
    "--prior grouped-gaussian --group-by weight": bf.GroupedGaussian("weight"),
    "--prior spike-and-slab --group-by output": bf.SpikeAndSlab(0.1, 0.5, 0.02, by="output"),
}

pytestmark = pytest.mark.usefixtures("quick")


def test_the_settings_name_the_prior() -> None:
    for options, prior in PRIORS.items():
        words = options.split()
        names = [word.removeprefix("--").replace("-", "_") for word in words[::2]]
        given = dict(zip(names, words[1::2], strict=True))
        assert RunConfig.of("mnist", **given).make_prior() == prior


@pytest.mark.parametrize("options", PRIORS)
def test_a_run_with_it_goes_through_every_command(
    options: str, table: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train = ("train", table, "--target", "y", *options.split(), "--out", run, *QUICK)
    metrics = as_json(*train)
    again = as_json(*train, "--resume")
    assert as_json("evaluate", run)["test"] == again["test"]
    small = tmp_path / "small.safetensors"
    as_json("prune", run, "--fractions", "0.5", "--out", small)
    improper = "log-uniform" in options
    assert metrics.get("kl_is_up_to_a_constant", False) is improper
    assert (metrics["free_energy"] is None) is improper
    assert any("improper prior" in note for note in metrics["notes"]) is improper
    [unit] = [n.note for n in key_numbers(Run.open(run).metrics()) if n.heading.startswith("KL")]
    assert unit == ("nats, up to a constant" if improper else "nats")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--prior spike-and-slab --group-by weight", "needs --group-by input or output"),
        ("--prior log-uniform --kl monte-carlo", "has a closed-form KL only"),
        ("--prior log-uniform --prior-std 1", "prior-std would do nothing here"),
        ("--prior grouped-gaussian --backend compiled", "use --backend auto"),
        ("--prior laplace --group-by output", "group-by would do nothing here"),
        ("--prior log-uniform --objective f-quad", "needs prior gaussian"),
    ],
)
def test_what_it_cannot_do_is_refused(options: str, message: str, tmp_path: Path) -> None:
    check_refused(bayesify("train", "mnist", *options.split(), "--out", tmp_path / "run"), message)
