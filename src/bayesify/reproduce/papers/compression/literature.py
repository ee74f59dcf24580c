"""Results that papers report for the networks of this comparison, as they print them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["REPORTED", "REPORTED_SPEED", "Reported"]


class Reported(NamedTuple):
    """A row of the literature; an empty text is what a paper does not report.

    ``fewer`` is the number of all weights divided by that of the weights left.
    """

    network: str
    method: str
    error: str
    fewer: str = ""
    units: str = ""
    size: str = ""


#: Coded size, count of weights and units are different axes; each method is made for one.
REPORTED = (
    Reported("lenet-300-100", "sparse variational dropout", "1.92", "68"),
    Reported("lenet-300-100", "entropy-penalized reparametrization", "1.9", size="8,560"),
    Reported("lenet-300-100", "variational information bottleneck", "1.6", units="97-71-33"),
    Reported("lenet-5-caffe", "sparse variational dropout", ".75", "280"),
    Reported("lenet-5-caffe", "entropy-penalized reparametrization", "1.0", size="2,840"),
    Reported("lenet-5-caffe", "Bayesian compression, group horseshoe", "1.0", units="5-10-76-16"),
    Reported("lenet-5-caffe", "MIRACLE, least error", ".69", size="3,030"),
    Reported("lenet-5-caffe", "MIRACLE, least size", ".96", size="1,520"),
    Reported("2x1200", "Bayes by Backprop, pruned after training", "1.39", "50"),
)

#: Times faster than the whole network on a CPU (structured Bayesian pruning); the first is of a
#: larger network, LeNet-500-300.
REPORTED_SPEED = {"lenet-300-100": 2.33, "lenet-5-caffe": 5.41}
