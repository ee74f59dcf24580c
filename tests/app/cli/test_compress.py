"""``bayesify compress``: the smallest file that keeps to the error, chosen on other examples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.app.cli.test_cli import Whole, as_json, bayesify, quick_runs
from tests.app.cli.test_errors import check_refused
from tests.app.cli.test_tables import QUICK, TABLES

import bayesify as bf
from bayesify.app.runs import Run, RunError
from bayesify.app.runs import compress as choosing
from bayesify.app.runs.compress import Parts, choose, split_parts


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(choosing, "_MOST_VALIDATION", 500)
    monkeypatch.setattr(choosing, "_TIMED_CALLS", 3)
    monkeypatch.setattr(choosing, "STEP_SIZES", (1.0, 2.0))
    with quick_runs():
        yield


@pytest.fixture(scope="module", params=TABLES)
def table_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a table of 60 rows, 12 of which it holds out."""
    place = tmp_path_factory.mktemp("compress")
    (place / "table.csv").write_text(TABLES[request.param])
    command = ("train", place / "table.csv", "--target", "price", "--out", place / "run", *QUICK)
    with quick_runs():
        said = bayesify(*command)
    assert said.code == 0, said.err
    return place / "run"


def error_of(run: Run, net: torch.nn.Module) -> float:
    """The error of a plain network on the test images, in percent."""
    data = run.load_data()
    with torch.no_grad():
        wrong = net.eval()(data.test_inputs).argmax(-1) != data.test_targets
    return 100 * float(wrong.double().mean())


def test_the_file_is_what_the_table_says(finished: Path, tmp_path: Path) -> None:
    file = tmp_path / "net.bfz"
    said = as_json("compress", finished, "--out", file, "--max-error-rise", "1")
    run = Run.open(finished)
    net = bf.decompress(file, run.make_net())
    averaged, at_mean, row = said["rows"]
    assert said["num_bytes"] == row["bytes"] == file.stat().st_size
    nonzero = sum(int((each != 0).sum()) for each in net.parameters())
    assert said["num_nonzero"] == row["weights"] == nonzero
    assert row["error_mean_weights"] == pytest.approx(error_of(run, net))
    whole = run.load_module()
    assert at_mean["error_mean_weights"] == pytest.approx(error_of(run, whole.to_module()))
    assert averaged["milliseconds"] is None
    assert row["milliseconds"] > 0
    assert said["num_weights"] == at_mean["weights"] == whole.layout.num_weights
    assert said["chosen_on"] == "training images beyond --limit"
    assert (said["chosen_on_examples"], said["measured_on_examples"]) == (500, 500)

    given = ("--fraction", said["fraction"], "--step-size", said["step_size"])
    text = bayesify("compress", finished, "--out", tmp_path / "again.bfz", *given)
    assert text.code == 0
    assert f"{said['num_bytes']:,} bytes" in text.out
    assert (tmp_path / "again.bfz").read_bytes() == file.read_bytes()


def test_a_table_is_chosen_on_one_half_and_measured_on_the_other(
    table_run: Path, tmp_path: Path
) -> None:
    said = as_json("compress", table_run, "--out", tmp_path / "net.bfz", "--max-error-rise", "20")
    assert (said["chosen_on_examples"], said["measured_on_examples"]) == (6, 6)
    assert said["measured_on"] == "the other half"
    run = Run.open(table_run)
    net = bf.decompress(tmp_path / "net.bfz", run.make_net())
    assert said["num_nonzero"] == sum(
        int((net.get_parameter(name) != 0).sum()) for name in run.load_module().layout.names
    )
    text = bayesify("compress", table_run, "--out", tmp_path / "b.bfz", "--max-error-rise", "20")
    assert ("RMSE" if run.config.task == "regression" else "error %") in text.out
    few = "note: one of 6 examples to choose by is 17 percentage points, more than the 5 that"
    text = bayesify("compress", table_run, "--out", tmp_path / "c.bfz", "--max-error-rise", "5")
    assert (few in text.err) == (run.config.task == "classification")


def check_apart(parts: Parts, data: choosing.RunData) -> None:
    assert parts.choosing is not None
    chosen, measured = parts.choosing.test_inputs, parts.measuring.test_inputs
    assert len(chosen) + len(measured) == len(data.test_inputs)
    both = torch.cat([chosen, measured])
    assert both.sort(dim=0).values.equal(data.test_inputs.sort(dim=0).values)


def test_the_halves_are_apart(table_run: Path) -> None:
    run = Run.open(table_run)
    data = run.load_data()
    parts = split_parts(run, data, choose=True)
    check_apart(parts, data)
    with pytest.raises(AssertionError):
        check_apart(parts._replace(measuring=parts.choosing), data)


def test_more_error_is_allowed_for_fewer_bytes(finished: Path) -> None:
    run = Run.open(finished)
    bnn, data = run.load_module(), run.load_data()
    sizes = []
    for rise in (0.5, 5.0, 100.0):
        found = choose(bnn, data, max_error_rise=rise)
        sizes.append(found.size.num_bytes)
        error = error_of(run, choosing.decompressed(found.content, run.make_net()))
        assert error <= error_of(run, bnn.to_module()) + rise + 1e-9
    assert sizes[0] > sizes[2]
    assert sizes == sorted(sizes, reverse=True)


def test_an_impossible_error_is_an_error(finished: Path) -> None:
    run = Run.open(finished)
    data = run.load_data()
    bnn = run.load_module()
    right = bnn.mean_outputs(data.test_inputs).argmax(-1)
    with pytest.raises(RunError, match=r"error within 0 percentage points, .* the least was \d+"):
        choose(bnn, replace(data, test_targets=right), max_error_rise=0.0, step_size=40.0)


def test_both_can_be_given(table_run: Path, tmp_path: Path) -> None:
    options = ("--fraction", "0.5", "--step-size", "0.1")
    said = as_json("compress", table_run, "--out", tmp_path / "net.bfz", *options)
    assert (said["fraction"], said["step_size"]) == (0.5, 0.1)
    assert said["chosen_on"] is said["chosen_on_examples"] is None
    assert said["measured_on_examples"] == 12
    bnn = bf.prune(Run.open(table_run).load_module(), 0.5)
    expected = bf.compress(bnn, tmp_path / "direct.bfz", step_size=0.1)
    assert expected.num_bytes == said["num_bytes"]


def test_a_network_that_does_not_shrink_is_timed_as_it_is(
    table_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("shrink must not change the outputs, but they differ")

    monkeypatch.setattr(choosing, "shrink", refuse)
    options = ("--fraction", "0.5", "--step-size", "0.1")
    said = as_json("compress", table_run, "--out", tmp_path / "net.bfz", *options)
    assert said["rows"][-1]["milliseconds"] > 0.0


def test_with_nothing_held_out(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(TABLES["classification"])
    command = ("train", tmp_path / "table.csv", "--target", "price", "--out", tmp_path / "run")
    assert bayesify(*command, *QUICK, "--test-fraction", "0").code == 0
    start = ("compress", tmp_path / "run", "--out", tmp_path / "net.bfz")
    check_refused(
        bayesify(*start), "must hold out two examples", "give both --fraction and --step-size"
    )
    said = as_json(*start, "--fraction", "0.5", "--step-size", "1")
    assert said["measured_on"] == "training examples, as none are held out"
    assert said["measured_on_examples"] == 60


def test_errors(finished: Path, baseline: Whole, tmp_path: Path) -> None:
    start = ("compress", finished, "--out", tmp_path / "net.bfz")
    for option, value, message in (
        ("--max-error-rise", "-1", "max-error-rise must be a number from 0, got -1"),
        ("--max-error-rise", "nan", "max-error-rise must be"),
        ("--fraction", "1.5", "fraction must be a number from 0 to 1, got 1.5"),
        ("--step-size", "0", "step-size must be positive and finite, got 0"),
        ("--step-size", "inf", "step-size must be positive"),
    ):
        check_refused(bayesify(*start, option, value), message)
    nowhere = tmp_path / "none" / "net.bfz"
    check_refused(bayesify("compress", finished, "--out", nowhere), "there is no folder")
    (tmp_path / "there").touch()
    check_refused(bayesify("compress", finished, "--out", tmp_path / "there"), "exists already")
    check_refused(bayesify("compress", tmp_path, "--out", tmp_path / "n"), "holds no run")
    said = bayesify("compress", baseline.folder, "--out", tmp_path / "net.bfz")
    check_refused(said, "baseline, whose weights have no std")
    assert not (tmp_path / "net.bfz").exists()


def test_the_fraction_of_a_network_that_was_pruned_before_is_its_own(finished: Path) -> None:
    bnn = bf.prune(Run.open(finished).load_module(), fraction=0.8)
    for asked, expected in ((0.0, 0.8), (0.5, 0.8), (0.9, 0.9)):
        choice = choose(bnn, None, max_error_rise=1.0, fraction=asked, step_size=1.0)
        assert choice.fraction == pytest.approx(expected, abs=1e-4)
