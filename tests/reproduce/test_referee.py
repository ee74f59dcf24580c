"""The comparison of approximate posteriors with Hamiltonian Monte Carlo."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from bayesify.reproduce import Context, Job, Result, find_experiment
from bayesify.reproduce.papers.referee import experiment
from bayesify.reproduce.papers.referee.contestants import CONTESTANTS
from bayesify.reproduce.papers.referee.problems import PROBLEMS, load_problem

pytest.importorskip("numpyro")
pytestmark = pytest.mark.filterwarnings("ignore:.*standard deviations have not converged")
EXPERIMENT = find_experiment("referee")


def quick_job(name: str, **config: Any) -> Job:
    (job,) = [job for job in EXPERIMENT.jobs((0,), True) if job.name == name]
    return Job(job.name, job.seed, {**job.config, **config}, job.seconds, job.datasets)


def made_up(problem: str, contestant: str, seed: int, metrics: Mapping[str, Any]) -> Result:
    config = {"problem": problem, "contestant": contestant}
    return {"job": f"{problem}-{contestant}", "seed": seed, "config": config, "metrics": metrics}


def test_every_contestant_meets_the_referee_on_every_problem() -> None:
    jobs = EXPERIMENT.jobs((0, 1), False)
    assert len(jobs) == 2 * len(PROBLEMS) * (1 + len(CONTESTANTS))
    for job in jobs:
        own = PROBLEMS[job.config["problem"]]
        assert {key: job.config[key] for key in own} == own
    assert all(len({**job.config}) > 6 for job in EXPERIMENT.jobs((0,), True))


def test_problems_have_the_sizes_that_are_stated() -> None:
    toy, images, table = (
        load_problem(PROBLEMS[name], Context()) for name in ("toy", "mnist-160", "yacht")
    )
    assert images.train_inputs.shape == (160, 49)
    assert images.test_inputs.shape == (500, 49)
    assert not images.is_numeric
    assert toy.train_targets.bincount().tolist() == [30, 30]
    assert set(toy.test_targets.tolist()) == {0, 1}
    assert table.train_inputs.shape == (277, 6)
    assert table.is_numeric
    assert table.train_targets.std().item() == pytest.approx(1.0, abs=0.01)
    assert table.scale > 1.0


def test_the_table_says_that_all_seeds_have_the_same_data() -> None:
    jobs = [job for job in EXPERIMENT.jobs((0, 1), False) if job.name == "yacht-plain"]
    first, second = (load_problem(job.config, Context()) for job in jobs)
    assert torch.equal(first.train_inputs, second.train_inputs)
    assert torch.equal(first.test_targets, second.test_targets)
    assert "seeds, which all have the same training and test part" in EXPERIMENT.table([])


@pytest.mark.parametrize(
    "name",
    [
        "yacht-plain",
        "toy-mc-dropout",
        "yacht-ensemble",
        "toy-mean-field-ivon",
        "toy-matrix",
        "toy-full-4-samples",
        "yacht-low-rank",
        "yacht-full",
        "toy-mean-field-mixture",
        "yacht-matrix-mixture",
    ],
)
def test_a_contestant_is_measured(name: str) -> None:
    (job,) = [job for job in EXPERIMENT.jobs((0,), False) if job.name == name]
    short = {"steps": 100, "test_samples": 50, "members": 2}
    metrics = EXPERIMENT.run(
        Job(name, 0, {**job.config, **short}, job.seconds, job.datasets), Context()
    )
    stored = torch.tensor(metrics["prediction"])
    if name.startswith("yacht"):
        assert stored.shape == (31, 50)
        assert (stored.diff(dim=1) > 0.0).all()  # quantiles
        assert 0.0 < metrics["rmse"] < 15.0
        assert metrics["width_90"] > 0.0
    else:
        assert stored.shape == (400, 2)
        torch.testing.assert_close(stored.sum(-1), torch.ones(400), rtol=0.0, atol=1e-4)
        assert 0.0 <= metrics["error"] <= 60.0


def test_the_distances_of_a_table_are_those_of_the_stored_predictions() -> None:
    floor = {"agreement": 99.5, "total_variation": 0.004}
    of_hmc = {"r_hat_max": 1.01, "ess_min": 700.0, "divergences": 0, "steps_a_draw": 63.0}
    hmc = {"nll": 0.5, "error": 10.0, "prediction": [[0.9, 0.1], [0.4, 0.6]]}
    results = [made_up("toy", "hmc", 0, {**hmc, **of_hmc, "between_halves": floor})]
    plain = {"nll": 0.7, "error": 20.0, "prediction": [[1.0, 0.0], [0.6, 0.4]]}
    results.append(made_up("toy", "plain", 0, plain))
    text = EXPERIMENT.table(results)
    assert "| plain | 0.700 | 20.0 | 50.0 | 0.150 |" in text
    assert "| hmc | 0.500 | 10.0 | 99.5 | 0.004 |" in text
    assert "the chains agree, largest R-hat of a prediction 1.010" in text
    (figure,) = EXPERIMENT.figures(results).values()
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["toy"]
    parted = [{**results[0], "metrics": {**results[0]["metrics"], "r_hat_max": 1.2}}]
    assert "the chains do not agree" in EXPERIMENT.table(parted)
    assert "HMC has not been run" in EXPERIMENT.table(results[1:])
    assert EXPERIMENT.figures(results[1:]) == {}
    numbers = {"nll": 1.0, "rmse": 1.0, "width_90": 2.0}
    between = {**of_hmc, "between_halves": {"wasserstein": 0.01}}
    yacht = [
        made_up("yacht", "hmc", 0, {**numbers, **between, "prediction": [[0.0, 1.0]]}),
        made_up("yacht", "plain", 0, {**numbers, "prediction": [[0.5, 2.0]]}),
    ]
    assert "| plain | 1.000 | 1.000 | 2.00 | 0.750 |  |" in EXPERIMENT.table(yacht)
    for name, far in (("sampling", 2.0), ("local", 1.0)):
        prediction = {**numbers, "prediction": [[0.0, 1.0 + far]]}
        yacht.append(made_up("yacht", f"mean-field-{name}", 0, prediction))
    text = EXPERIMENT.table(yacht)
    assert "| mean-field-sampling | 1.000 | 1.000 | 2.00 | 1.000 | +100 % |" in text
    assert "| plain | 1.000 | 1.000 | 2.00 | 0.750 | +50 % |" in text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*had the greatest length:UserWarning")  # of 4 steps
def test_the_referee_resumes_after_the_chains_that_it_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = quick_job("toy-hmc", warmup=5, samples=5, max_tree_depth=2)
    whole = EXPERIMENT.run(job, Context())
    calls, sampler = [], experiment.hmc

    def stop_at_second(*args: Any, **options: Any) -> Any:
        calls.append(options["seed"])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return sampler(*args, **options)

    monkeypatch.setattr(experiment, "hmc", stop_at_second)
    with pytest.raises(KeyboardInterrupt):
        EXPERIMENT.run(job, Context(work=tmp_path))
    parts: list[float] = []
    resumed = EXPERIMENT.run(job, Context(work=tmp_path, on_progress=parts.append))
    assert len(calls) == 3
    assert calls[1] == calls[2] != calls[0]
    assert resumed == whole
    assert parts == [1.0]
    assert {"r_hat_max", "ess_min", "divergences", "between_halves"} <= set(whole)
