"""Gradient estimators: weight sampling, local reparametrisation and Flipout."""

from bayesify.estimators.estimator import Estimator, ForwardPass, ParameterUse, Treatment
from bayesify.estimators.flipout import Flipout
from bayesify.estimators.local_reparameterization import LocalReparameterization
from bayesify.estimators.weight_sampling import WeightSampling

__all__ = [
    "Estimator",
    "Flipout",
    "ForwardPass",
    "LocalReparameterization",
    "ParameterUse",
    "Treatment",
    "WeightSampling",
]
