"""A run: settings, a folder with everything it left, and the way back from it."""

from bayesify.runs.config import BASELINES, ConfigError, RunConfig
from bayesify.runs.finish import finish, rewrite_report
from bayesify.runs.folder import Run, RunError
from bayesify.runs.train import Trained, train

__all__ = [
    "BASELINES",
    "ConfigError",
    "Run",
    "RunConfig",
    "RunError",
    "Trained",
    "finish",
    "rewrite_report",
    "train",
]
