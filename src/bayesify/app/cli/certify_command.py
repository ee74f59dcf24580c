"""``bayesify certify``: a bound on the error of a run's randomised classifier."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console

from bayesify.app.cli.opened_run import AsJson, DataDir, Folder, opened, read_data
from bayesify.app.runs import ConfigError, RunError
from bayesify.app.runs.defaults import PRIOR_CANDIDATES, PRIOR_STD_CERTIFIED
from bayesify.app.runs.train import prior_indices, use_threads
from bayesify.training.certificate import certify as certified

__all__ = ["certify"]


def certify(
    folder: Folder,
    delta: Annotated[
        float, typer.Option(help="Probability with which the PAC-Bayes bound may fail.")
    ] = 0.025,
    delta_sampling: Annotated[
        float, typer.Option(help="Probability with which the sampling bound may fail.")
    ] = 0.01,
    samples: Annotated[int, typer.Option(help="Weight samples.")] = 100_000,
    candidates: Annotated[
        int | None,
        typer.Option(
            help="Number of certificates among which this one is chosen; both deltas are divided "
            rf"by it. \[default: {PRIOR_CANDIDATES} on mnist with the default --prior-std, which "
            "was chosen among as many on training images; else 1]"
        ),
    ] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Certify the error of a run on new examples (PAC-Bayes).

    The run must be trained with --objective f-quad, f-classic or f-lambda. The bound is evaluated
    on the training images that its prior has not seen, and holds for the randomised classifier,
    which draws new weights for each prediction.
    """
    for name, count in (("samples", samples), ("candidates", candidates)):
        if count is not None and count < 1:
            raise ConfigError(f"{name} must be at least 1, got {count}")
    run = opened(folder)
    config = run.config
    if config.objective == "elbo":
        raise RunError(
            f"no certificate can be given for {folder}: its prior was not learned on a part of the "
            "data that is set apart, and all its settings may have been chosen on these data; "
            "train with --objective f-quad on mnist or fashion-mnist"
        )
    if candidates is None:
        is_default = config.prior_std == PRIOR_STD_CERTIFIED
        candidates = PRIOR_CANDIDATES if config.dataset == "mnist" and is_default else 1
    use_threads(run)
    bnn, data = run.load_module(), read_data(run, data_dir)
    with Console(stderr=True).status("sampling weights ..."):
        found = certified(
            bnn,
            data.train_inputs,
            data.train_targets,
            prior_indices=prior_indices(config, data),
            delta=delta,
            delta_sampling=delta_sampling,
            num_samples=samples,
            num_candidates=candidates,
        )
    if as_json:
        typer.echo(json.dumps({**dataclasses.asdict(found), "confidence": found.confidence}))
        return
    typer.echo(str(found))
