"""A step of training in as few kernels as possible; the objective by autograd specifies it."""

from bayesify.fused.compiler import CompilerError
from bayesify.fused.direct import DirectStep
from bayesify.fused.graphs import GraphedStep
from bayesify.fused.leaves import EditedInPlaceError
from bayesify.fused.step import FusedStep
from bayesify.fused.support import why_no_closed_forms, why_not_fused
from bayesify.fused.values import StepValues, TrainingStep

__all__ = [
    "CompilerError",
    "DirectStep",
    "EditedInPlaceError",
    "FusedStep",
    "GraphedStep",
    "StepValues",
    "TrainingStep",
    "why_no_closed_forms",
    "why_not_fused",
]
