"""Measure the memory of a step: the bytes of its tensors, and the growth of a process.

``python -m bayesify.app.bench.step_memory CASE BATCH PATH ESTIMATOR OPTIMIZER THREADS`` prints by
how many bytes the process grows at the peak of building a contestant and running a few steps.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from bayesify.app.bench.cases import CASES, Case, perceptron
from bayesify.app.bench.contestants import Contestant, Step, contestants_of
from bayesify.app.bench.peers import installed_peers, peer_contestants
from bayesify.app.runs.memory import peak_memory, used_memory
from bayesify.module.pass_memory import MemoryTracker

__all__ = [
    "built_on_gpu_with_peak",
    "built_with_peak",
    "can_measure",
    "grown_by",
    "resident_bytes",
]

_WARMUP, _STEPS = 2, 5
_TIMEOUT_S = 600


def built_with_peak(build: Callable[[], Step], *, warmup: int) -> tuple[Step, int]:
    """Build a step, run a few, and count the bytes of tensors at the peak of one more.

    Counted are the tensors that building left behind (parameters, buffers, the optimizer's state,
    vectors, the minibatch) and those that the step makes; not the scratch memory within an
    operation of PyTorch.

    Args:
        build: builds the step.
        warmup: number of steps before.

    Returns:
        The step, and the bytes.

    Example:
        >>> def build():
        ...     held = torch.zeros(100)
        ...     return lambda: (held + 1).exp()
        >>> built_with_peak(build, warmup=1)[1]         # held, its sum, and the result
        1200
    """
    with MemoryTracker() as tracker:
        step = build()
        for _ in range(warmup):
            step()
        gc.collect()
        tracker.peak = tracker.live
        step()
    return step, tracker.peak


def built_on_gpu_with_peak(build: Callable[[], Step], *, warmup: int) -> tuple[Step, int]:
    """Build a step on a GPU, run a few and one more, and count the bytes of tensors at their peak.

    Counted is what PyTorch's allocator gave out, scratch memory of operations included. A captured
    graph keeps the memory of its capture, which is among the first steps.

    Args:
        build: builds the step.
        warmup: number of steps before the last.

    Returns:
        The step, and the bytes.
    """
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step = build()
    for _ in range(warmup + 1):
        step()
    torch.cuda.synchronize()
    return step, torch.cuda.max_memory_allocated() - before


def can_measure() -> bool:
    """Return whether this system reports the peak memory of a process, and can reset it."""
    return Path("/proc/self/clear_refs").exists()


def resident_bytes(case: Case, batch: int, contestant: Contestant) -> int:
    """Return the growth of a new process that runs a contestant.

    Raises:
        RuntimeError: the process failed.
    """
    who = (contestant.path, contestant.estimator, contestant.optimizer)
    words = [case.name, str(batch), *who, str(torch.get_num_threads())]
    command = [sys.executable, "-m", "bayesify.app.bench.step_memory", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()[-300:]}")
    return int(done.stdout)


def grown_by(build: Callable[[], Step]) -> int:
    """Return the bytes by which this process grows at the peak of building and a few steps.

    Call it in a new process: what earlier work left behind, and frees meanwhile, would be missing.
    """
    # Libraries that are loaded at the first step are not memory of the step.
    tiny = perceptron("tiny", 8, inputs=4)
    contestants_of(tiny, 8)[0].build()()
    before = used_memory()
    step = build()
    for _ in range(_WARMUP):
        step()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    for _ in range(_STEPS):
        step()
    return peak_memory() - before


def main(words: list[str]) -> None:
    """Run the module's command."""
    name, batch, *who, threads = words
    torch.set_num_threads(int(threads))
    case = CASES[name]
    entered = contestants_of(case, int(batch))
    entered += peer_contestants(installed_peers()[0], case, int(batch))
    (contestant,) = [each for each in entered if [each.path, each.estimator, each.optimizer] == who]
    print(grown_by(contestant.build))


if __name__ == "__main__":
    main(sys.argv[1:])
