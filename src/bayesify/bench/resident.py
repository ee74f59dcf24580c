"""The memory of a whole process, beside the bytes of tensors that ``memory`` counts.

``python -m bayesify.bench.resident CASE BATCH PATH ESTIMATOR OPTIMIZER THREADS`` prints how many
bytes more than before anything was built the process holds at the worst moment of a few steps.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from bayesify.bench.cases import CASES, Case, perceptron
from bayesify.bench.contestants import Contestant, Step, contestants_of
from bayesify.bench.peers import installed_peers, peer_contestants

__all__ = ["can_measure", "grown_by", "resident_bytes"]

_WARMUP, _STEPS = 2, 5
_TIMEOUT_S = 600


def can_measure() -> bool:
    """Whether this system tells the peak of a process, and lets it begin anew."""
    return Path("/proc/self/clear_refs").exists()


def resident_bytes(case: Case, batch: int, contestant: Contestant) -> int:
    """The growth of a process of its own.

    Raises:
        RuntimeError: the process failed.
    """
    who = (contestant.path, contestant.estimator, contestant.optimizer)
    words = [case.name, str(batch), *who, str(torch.get_num_threads())]
    command = [sys.executable, "-m", "bayesify.bench.resident", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()[-300:]}")
    return int(done.stdout)


def grown_by(build: Callable[[], Step]) -> int:
    """How many bytes more than before building this process holds at most during a few steps."""
    # What is loaded at the first use of anything is no memory of the step.
    tiny = perceptron("tiny", 8, inputs=4)
    contestants_of(tiny, 8)[0].build()()
    before = _status("VmRSS")
    step = build()
    for _ in range(_WARMUP):
        step()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    for _ in range(_STEPS):
        step()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def main(words: list[str]) -> None:
    """See the module."""
    name, batch, *who, threads = words
    torch.set_num_threads(int(threads))
    case = CASES[name]
    entered = contestants_of(case, int(batch))
    entered += peer_contestants(installed_peers()[0], case, int(batch))
    (contestant,) = [each for each in entered if [each.path, each.estimator, each.optimizer] == who]
    print(grown_by(contestant.build))


if __name__ == "__main__":
    main(sys.argv[1:])
