"""What a step costs: time and memory beside the plain network, measured in turns in one run."""

from bayesify.bench.cases import CASES, Case, find_cases
from bayesify.bench.contestants import Contestant, contestants_of
from bayesify.bench.measuring import Group, Measurement, estimated_seconds, measure
from bayesify.bench.peers import PEERS, Peer, installed_peers, peer_contestants

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
