"""Print the files of bayesify that one minibatch of ``fit`` runs through, and the deepest chain.

    python benchmarks/call_chain.py

It works with every version of the package, so that two can be compared.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import bayesify as bf

ROOT = Path(bf.__file__).parent
#: The steps before it compile, trace and allocate.
RECORDED_STEP = 5


class Recorder:
    """A callback of ``fit`` that profiles one step."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.deepest: list[str] = []

    def on_start(self, **_: Any) -> None:
        """Do nothing."""

    def on_epoch(self, row: Any) -> None:
        """Do nothing."""

    def on_step(self, *, epoch: int, batch: int) -> None:  # noqa: ARG002
        """Profile the step after this one."""
        sys.setprofile(self._note if batch == RECORDED_STEP - 1 else None)

    def _note(self, frame: FrameType | None, event: str, _: object) -> None:
        if event != "call":
            return
        chain: list[str] = []
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT):
                chain.append(str(path.relative_to(ROOT)))
            frame = frame.f_back
        self.files.update(chain[:1])
        chain = list(dict.fromkeys(reversed(chain)))
        if len(chain) > len(self.deepest):
            self.deepest = chain


def main() -> None:
    """Train a small network and print what one of its steps runs through."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(20, 33), torch.nn.ReLU(), torch.nn.Linear(33, 5))
    loader = DataLoader(TensorDataset(torch.randn(320, 20), torch.arange(320) % 5), 32)
    recorder = Recorder()
    with warnings.catch_warnings(action="ignore"):
        bf.fit(bf.ELBO(bf.BayesianModule(net), num_data=320), loader, epochs=1, callback=recorder)
    print(f"{len(recorder.files)} files in one minibatch:")
    print(*(f"  {name}" for name in sorted(recorder.files)), sep="\n")
    print(f"{len(recorder.deepest)} files in the deepest chain of calls:")
    print("  " + " -> ".join(recorder.deepest))


if __name__ == "__main__":
    main()
