"""The posterior of a small network by Hamiltonian Monte Carlo, to judge approximations by.

The draws come from the posterior of the same model: the network, its prior and its likelihood. For
a small network they are as good as exact where their diagnostics say so.
"""

from bayesify.referee.draws import PosteriorDraws
from bayesify.referee.sampler import hmc

__all__ = ["PosteriorDraws", "hmc"]
