"""Runs: settings, the folder with everything a run writes, training, measuring and predicting."""

from bayesify.app.runs.declarations import ConfigError
from bayesify.app.runs.folder import Run
from bayesify.app.runs.run_config import RunConfig
from bayesify.app.runs.run_data import RunData
from bayesify.app.runs.run_files import RunError
from bayesify.app.runs.stored_settings import renamed_settings
from bayesify.app.runs.train import Trained, train

__all__ = [
    "ConfigError",
    "Run",
    "RunConfig",
    "RunData",
    "RunError",
    "Trained",
    "renamed_settings",
    "train",
]
