"""Training: the loop, schedules, checkpoints and progress."""

from bayesify.training.checks import NonFiniteLossError
from bayesify.training.convergence import ConvergenceWarning
from bayesify.training.loop import fit
from bayesify.training.replicas import fit_replicas

__all__ = ["ConvergenceWarning", "NonFiniteLossError", "fit", "fit_replicas"]
