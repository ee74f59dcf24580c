"""Two processes that train together, for tests."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from torch import distributed, set_num_threads

__all__ = ["run_ranks", "together"]


@contextmanager
def together(rank: int, folder: Path, limit: float) -> Iterator[None]:
    """Connect this process with the other one, over a file in a folder that both know."""
    set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=(folder / "store").as_uri(),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=limit),
    )
    try:
        yield
        distributed.barrier()  # nobody leaves while the other may still ask
    finally:
        distributed.destroy_process_group()


def run_ranks(command: Callable[[int], list[str]], limit: float) -> list[str]:
    """Run both processes and return what they said; when one fails or is late, end both."""
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    processes = [
        subprocess.Popen(
            command(rank),
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    end = time.monotonic() + limit
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes) or time.monotonic() > end:
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
        said = [process.communicate()[0] for process in processes]
    codes = [process.returncode for process in processes]
    assert codes == [0, 0], f"the processes ended with {codes}:\n" + "\n".join(said)
    return said
