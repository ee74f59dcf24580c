"""Time and memory of a training step and of a prediction, relative to the plain network."""

from bayesify.app.bench.cases import CASES, Case, find_cases
from bayesify.app.bench.contestants import Contestant, contestants_of
from bayesify.app.bench.measuring import Group, Measurement, estimated_seconds, measure
from bayesify.app.bench.peers import PEERS, Peer, installed_peers, peer_contestants

__all__ = [
    "CASES",
    "PEERS",
    "Case",
    "Contestant",
    "Group",
    "Measurement",
    "Peer",
    "contestants_of",
    "estimated_seconds",
    "find_cases",
    "installed_peers",
    "measure",
    "peer_contestants",
]
