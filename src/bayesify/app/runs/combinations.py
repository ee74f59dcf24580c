"""Check that the settings of a run do not contradict each other."""

from __future__ import annotations

from typing import Any

from bayesify.app.runs.declarations import ConfigError, option
from bayesify.app.runs.defaults import SPARSITY, is_image_folder, is_table_file
from bayesify.app.runs.rules import BAYESIAN_DIGITS, CENSORED, COUNT, DIGITS, PRUNED

__all__ = ["check_combination"]


def check_combination(run: Any) -> None:
    """Raise ConfigError where settings contradict each other.

    Args:
        run: a ``RunConfig``, which calls this when it is made.
    """
    if run.target is None and is_table_file(run.dataset):
        raise ConfigError(f"a table needs --target NAME, the column of {run.dataset} to predict")
    if run.target is not None:
        nets: tuple[str, ...] = ("table",)
    else:
        nets = ("resnet8",) if is_image_folder(run.dataset) else ("mlp", "lenet5")
    if run.net not in nets:
        raise ConfigError(f"net must be one of {', '.join(nets)}, got {run.net}")
    if run.text and run.max_memory is not None:
        raise ConfigError(
            "columns of texts cannot be streamed: leave out --max-memory, or --text and --encoder"
        )
    if bool(run.text) != (run.encoder is not None):
        raise ConfigError(
            "columns of texts need --encoder with the folder or the name of a pretrained network"
            if run.text
            else "encoder reads texts; name their column by --text"
        )
    if CENSORED.holds(run) and (run.censored_below, run.censored_above) == (None, None):
        raise ConfigError("likelihood censored needs --censored-below, --censored-above or both")
    try:
        run.limits()
    except ValueError as error:
        raise ConfigError(f"censored-below and censored-above: {error}") from error
    if run.net in ("table", "resnet8") and run.baseline == "dropout":
        kind = "table" if run.net == "table" else "folder of images"
        raise ConfigError(f"a {kind} has no dropout baseline; use --baseline sgd")
    if not (run.hidden and all(COUNT.holds(units) for units in run.hidden)):
        raise ConfigError(
            f"hidden must be positive numbers of units such as 400,400, got "
            f"{','.join(map(str, run.hidden)) or 'none'}"
        )
    if run.estimator == "local-per-position" and run.net not in ("lenet5", "resnet8"):
        raise ConfigError(
            f"estimator local-per-position needs --net lenet5 or a folder of images: net {run.net} "
            "uses each weight once per example; use --estimator local"
        )
    if run.prior == "spike-and-slab" and run.group_by == "weight":
        raise ConfigError(
            "prior spike-and-slab needs --group-by input or output, got weight; with a choice for "
            "each weight it is --prior scale-mixture"
        )
    try:
        run.make_prior()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if run.make_estimator().antithetic and run.train_samples % 2:
        raise ConfigError(
            f"estimator {run.estimator} takes weight samples in pairs, so train-samples must "
            f"be even, got {run.train_samples}; use --train-samples 2"
        )
    if run.kl == "closed" and run.prior == "scale-mixture":
        raise ConfigError(
            "the scale mixture has no closed-form KL; use --kl auto, or --prior gaussian"
        )
    if PRUNED.holds(run):
        _check_pruned(run)
    if run.prior in SPARSITY:
        if run.kl == "monte-carlo":
            raise ConfigError(f"prior {run.prior} has a closed-form KL only; leave out --kl")
        if run.backend in ("compiled", "closed-form"):
            raise ConfigError(
                f"backend {run.backend} does not support --prior {run.prior}; use --backend auto"
            )
    if run.posterior != "mean-field":
        _check_structured(run)
    if run.optimizer == "ivon":
        _check_ivon(run)
    if run.objective != "elbo" and BAYESIAN_DIGITS.holds(run):
        _check_certified(run)
    if run.kl_weighting == "geometric" and run.passes > 1:
        raise ConfigError(
            f"geometric weights divide the KL over one pass, got passes {run.passes}; add "
            "--passes 1"
        )


def _check_pruned(run: Any) -> None:
    """Raise ConfigError where a run cannot be pruned as it is trained."""
    first, last = run.pruning_epochs
    if not first < last < run.epochs:
        raise ConfigError(
            "prune-from must be below prune-until, and that below epochs, so that the weights that "
            f"are left are trained on; got prune-from {first:g}, prune-until {last:g} and epochs "
            f"{run.epochs}"
        )
    if run.backend in ("compiled", "closed-form") and run.estimator not in (
        "sampling",
        "antithetic",
    ):
        raise ConfigError(
            f"backend {run.backend} prunes with --estimator sampling or antithetic only, got "
            f"{run.estimator}; use --backend auto"
        )


def _check_structured(run: Any) -> None:
    """Raise ConfigError where weights that depend on each other cannot be trained."""
    if run.optimizer == "ivon" or run.objective != "elbo":
        other = "optimizer ivon" if run.optimizer == "ivon" else f"objective {run.objective}"
        raise ConfigError(f"{other} needs --posterior mean-field, got {run.posterior}")
    if run.backend in ("compiled", "closed-form"):
        raise ConfigError(
            f"backend {run.backend} needs --posterior mean-field, got {run.posterior}; use "
            "--backend auto"
        )
    if run.posterior == "matrix" and run.estimator not in ("sampling", "antithetic"):
        raise ConfigError(
            f"posterior matrix needs --estimator sampling or antithetic, got {run.estimator}"
        )


def _check_ivon(run: Any) -> None:
    """Raise ConfigError where IVON cannot train a run."""
    if run.baseline is not None or not DIGITS.holds(run):
        raise ConfigError(
            "optimizer ivon trains mnist and fashion-mnist without --baseline; use --optimizer adam"
        )
    if run.prior != "gaussian":
        raise ConfigError(
            f"optimizer ivon needs --prior gaussian, whose precision is its weight decay, got "
            f"{run.prior}"
        )
    if run.kl == "monte-carlo" or run.kl_weighting != "uniform":
        raise ConfigError("optimizer ivon needs --kl auto and --kl-weighting uniform")
    if run.temperature == 0.0:
        raise ConfigError("optimizer ivon needs a temperature above 0; use --optimizer adam")
    if run.objective != "elbo":
        raise ConfigError(f"optimizer ivon needs --objective elbo, got {run.objective}")


def _check_certified(run: Any) -> None:
    """Raise ConfigError where a PAC-Bayes bound would not be one."""
    usual = {"prior": "gaussian", "kl_weighting": "uniform", "temperature": 1.0, "kl_warmup": 0.0}
    for name, value in usual.items():
        if getattr(run, name) != value:
            raise ConfigError(
                f"objective {run.objective} needs {option(name)} {value}, got {getattr(run, name)}"
            )
    if run.kl == "monte-carlo":
        raise ConfigError(f"objective {run.objective} needs the exact KL; leave out --kl")
