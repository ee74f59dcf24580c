"""Training backends: one file each, with one interface, ``Backend.step``."""

from bayesify.training.backends.autograd import AutogradBackend
from bayesify.training.backends.backend import (
    NOT_COMPILED,
    Backend,
    BackendName,
    Noise,
    NonFiniteLossError,
    StepOptions,
)
from bayesify.training.backends.choose import check_backend, check_shared_noise, make_backend
from bayesify.training.backends.closed_form import ClosedFormBackend
from bayesify.training.backends.compiled import CompiledBackend
from bayesify.training.backends.graph import GraphBackend
from bayesify.training.backends.leaves import EditedInPlaceError
from bayesify.training.backends.replicas import ReplicaBackend
from bayesify.training.backends.requirements import why_no_closed_forms, why_not_compiled
from bayesify.training.kernel.compiler import CompilerError

__all__ = [
    "NOT_COMPILED",
    "AutogradBackend",
    "Backend",
    "BackendName",
    "ClosedFormBackend",
    "CompiledBackend",
    "CompilerError",
    "EditedInPlaceError",
    "GraphBackend",
    "Noise",
    "NonFiniteLossError",
    "ReplicaBackend",
    "StepOptions",
    "check_backend",
    "check_shared_noise",
    "make_backend",
    "why_no_closed_forms",
    "why_not_compiled",
]
