"""Training: the loop, schedules, checkpoints and progress."""

from bayesify.training.backends import NonFiniteLossError
from bayesify.training.convergence import ConvergenceWarning
from bayesify.training.fit import fit
from bayesify.training.fit_warnings import (
    RowCountWarning,
    ShortStreamWarning,
    SigmoidOutputWarning,
    SoftmaxOutputWarning,
    TargetScaleWarning,
    UnreadParameterWarning,
)
from bayesify.training.replicas import fit_replicas

__all__ = [
    "ConvergenceWarning",
    "NonFiniteLossError",
    "RowCountWarning",
    "ShortStreamWarning",
    "SigmoidOutputWarning",
    "SoftmaxOutputWarning",
    "TargetScaleWarning",
    "UnreadParameterWarning",
    "fit",
    "fit_replicas",
]
