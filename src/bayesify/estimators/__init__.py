"""Gradient estimators: weight sampling, local reparametrisation, Flipout, closed last layer."""

from bayesify.estimators.estimator import Estimator, ForwardPass, ParameterUse, Treatment
from bayesify.estimators.flipout import Flipout
from bayesify.estimators.last_layer import ClosedFormLastLayer
from bayesify.estimators.local_reparameterization import LocalReparameterization
from bayesify.estimators.weight_sampling import WeightSampling

__all__ = [
    "ClosedFormLastLayer",
    "Estimator",
    "Flipout",
    "ForwardPass",
    "LocalReparameterization",
    "ParameterUse",
    "Treatment",
    "WeightSampling",
]
