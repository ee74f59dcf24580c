"""How noise enters the forward pass: the estimator of the gradient of the expected likelihood."""

from bayesify.perturbations.base import Call, Perturbation, Treatment, Use
from bayesify.perturbations.flipout import Flipout
from bayesify.perturbations.local import LocalReparameterization
from bayesify.perturbations.sampling import WeightSampling

__all__ = [
    "Call",
    "Flipout",
    "LocalReparameterization",
    "Perturbation",
    "Treatment",
    "Use",
    "WeightSampling",
]
