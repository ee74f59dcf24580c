"""Rules for settings: the ranges of their values, and the kinds of runs to which they apply."""

from __future__ import annotations

import math

from bayesify.app.runs.declarations import Rule
from bayesify.module.batching import parse_bytes
from bayesify.tabular.likelihoods import COUNTS

__all__ = [
    "ADAPTER",
    "AT_MOST_HALF",
    "AUGMENTED",
    "BASELINE",
    "BAYES",
    "BAYESIAN_DIGITS",
    "BAYESIAN_TABLE",
    "BYTES",
    "CENSORED",
    "CERTIFIED",
    "CLASSES",
    "COUNT",
    "DIGITS",
    "DROPOUT",
    "FINITE",
    "GROUPED",
    "HELD_OUT",
    "HIDDEN_LAYERS",
    "MIXTURE",
    "NOT_NEGATIVE",
    "ONE_STD",
    "OWN_IMAGES",
    "OWN_NOISE",
    "OWN_RHO",
    "PART",
    "POSITIVE",
    "PRUNABLE",
    "PRUNED",
    "RANDOM_PART",
    "REGRESSION",
    "SGD",
    "TABLE",
    "TABLE_COLUMNS",
    "TABLE_FILE",
    "TABLE_TEXTS",
    "WARMUP",
]


def _is_bytes(text: str) -> bool:
    try:
        return parse_bytes(text) > 0
    except ValueError:
        return False


BYTES = Rule("be a number of bytes such as 2GB or 512 MB", _is_bytes)
COUNT = Rule("be at least 1 and at most 2,147,483,647", lambda x: 1 <= x < 2**31)
POSITIVE = Rule("be positive and finite", lambda x: 0.0 < x < math.inf)
NOT_NEGATIVE = Rule("be at least 0 and finite", lambda x: 0.0 <= x < math.inf)
AT_MOST_HALF = Rule("be from 0 to .5", lambda x: 0.0 <= x <= 0.5)
PART = Rule("be at least 0 and below 1", lambda x: 0.0 <= x < 1.0)

TABLE = Rule("tables", lambda run: run.net == "table")
TABLE_COLUMNS = Rule("tables", lambda run: run.net == "table" and run.target is not None)
TABLE_FILE = Rule("tables", lambda run: run.target is not None)
TABLE_TEXTS = Rule("--text with --encoder", lambda run: bool(run.text))
OWN_IMAGES = Rule(
    "folders and tables of images, without --encoder", lambda run: run.net == "resnet8"
)
HELD_OUT = Rule("tables and folders of images", lambda run: run.net in ("table", "resnet8"))
REGRESSION = Rule(
    "regression on a table", lambda run: run.net == "table" and run.task != "classification"
)
CLASSES = Rule(
    "classification of a table", lambda run: run.net == "table" and run.task != "regression"
)
OWN_NOISE = Rule(
    "regression on a table with a likelihood of other numbers than counts",
    lambda run: REGRESSION.holds(run) and run.likelihood not in COUNTS,
)
CENSORED = Rule(
    "--likelihood censored", lambda run: REGRESSION.holds(run) and run.likelihood == "censored"
)
ADAPTER = Rule("--adapter", lambda run: run.adapter)
FINITE = Rule("be finite", math.isfinite)
DIGITS = Rule("mnist and fashion-mnist", lambda run: run.net in ("mlp", "lenet5"))
AUGMENTED = Rule("images without --encoder", lambda run: run.net in ("mlp", "lenet5", "resnet8"))
HIDDEN_LAYERS = Rule("--net mlp and tables", lambda run: run.net in ("mlp", "table"))
BAYESIAN_DIGITS = Rule(
    "mnist and fashion-mnist without --baseline",
    lambda run: run.net in ("mlp", "lenet5") and run.baseline is None,
)
DROPOUT = Rule(
    "mnist and fashion-mnist without --baseline sgd",
    lambda run: run.net in ("mlp", "lenet5") and run.baseline != "sgd",
)
BAYES = Rule("runs without --baseline", lambda run: run.baseline is None)
PRUNABLE = Rule(
    "runs without --baseline and with --objective elbo",
    lambda run: run.baseline is None and run.objective == "elbo",
)
PRUNED = Rule(
    "--prune-fraction above 0", lambda run: PRUNABLE.holds(run) and run.prune_fraction > 0.0
)
RANDOM_PART = Rule(
    "folders and tables of images without --encoder and --baseline",
    lambda run: run.net == "resnet8" and run.baseline is None,
)
BAYESIAN_TABLE = Rule(
    "tables without --baseline and --adapter",
    lambda run: run.net == "table" and run.baseline is None and not run.adapter,
)
CERTIFIED = Rule("--objective f-quad, f-classic or f-lambda", lambda run: run.objective != "elbo")
BASELINE = Rule("--baseline", lambda run: run.baseline is not None)
MIXTURE = Rule(
    "--prior scale-mixture or spike-and-slab",
    lambda run: run.baseline is None and run.prior in ("scale-mixture", "spike-and-slab"),
)
ONE_STD = Rule(
    "--prior gaussian or laplace",
    lambda run: run.baseline is None and run.prior in ("gaussian", "laplace"),
)
GROUPED = Rule(
    "--prior grouped-gaussian or spike-and-slab",
    lambda run: run.baseline is None and run.prior in ("grouped-gaussian", "spike-and-slab"),
)
WARMUP = Rule("--kl-warmup above 0", lambda run: run.baseline is None and run.kl_warmup > 0.0)
SGD = Rule("--optimizer sgd", lambda run: run.optimizer == "sgd")
OWN_RHO = Rule(
    "runs without --baseline or --optimizer ivon",
    lambda run: run.baseline is None and run.optimizer != "ivon",
)
