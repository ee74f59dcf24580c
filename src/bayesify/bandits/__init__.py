"""Contextual bandits: agents that learn the rewards of actions by acting.

``ThompsonSampler`` and ``EpsilonGreedy`` choose actions by the rewards that a network predicts.
``play`` runs an agent in an environment with Gymnasium's interface and records the rewards.
``MushroomBandit`` is the environment of Blundell et al. 2015, section 5.3.
"""

from bayesify.bandits.agents import EpsilonGreedy, ThompsonSampler
from bayesify.bandits.environment import Discrete, Environment
from bayesify.bandits.learning import Learning
from bayesify.bandits.mushroom_bandit import MushroomBandit
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
