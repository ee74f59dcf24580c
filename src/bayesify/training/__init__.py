"""Training: the loop, schedules, checkpoints and progress."""

from bayesify.training.convergence import ConvergenceWarning
from bayesify.training.loop import NonFiniteLossError, fit

__all__ = ["ConvergenceWarning", "NonFiniteLossError", "fit"]
