"""Contextual bandits: agents that learn what actions are worth by acting.

``ThompsonSampler`` and ``EpsilonGreedy`` act by any network's belief about rewards; ``play`` has
one act in an environment with Gymnasium's interface, and records what it got. ``MushroomBandit``
is the environment of Blundell et al. 2015.
"""

from bayesify.bandits.agents import EpsilonGreedy, ThompsonSampler
from bayesify.bandits.environment import Discrete, Environment
from bayesify.bandits.learning import Learning
from bayesify.bandits.mushroom import MushroomBandit
from bayesify.bandits.playing import Agent, Record, play
from bayesify.bandits.replay import ReplayBuffer

__all__ = [
    "Agent",
    "Discrete",
    "Environment",
    "EpsilonGreedy",
    "Learning",
    "MushroomBandit",
    "Record",
    "ReplayBuffer",
    "ThompsonSampler",
    "play",
]
