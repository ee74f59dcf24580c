"""Measure the memory of predictions, in processes of their own, and define their networks.

``prediction.py`` calls :func:`memory`; a measured process runs this file:

python benchmarks/prediction_memory.py lenet5 10000 "64 MB" warm 5 --threads 1
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayesify as bf
from bayesify.module.networks import lenet5, mlp

CAPS = ("64 MB", "1 GB")


def conv_net() -> nn.Sequential:
    """Make two convolutions of 32 channels with batch normalisation, on 3 x 32 x 32."""
    layers: list[nn.Module] = []
    for channels in (3, 32):
        layers += [nn.Conv2d(channels, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


#: Each network with the shape of an example.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "13-50-1": (lambda: mlp(13, (50,), 1), (13,)),
    "13-50-50-1": (lambda: mlp(13, (50, 50), 1), (13,)),
    "20-100-100-2": (lambda: mlp(20, (100, 100), 2), (20,)),
    "50-200-200-10": (lambda: mlp(50, (200, 200), 10), (50,)),
    "784-100-10": (lambda: mlp(784, (100,), 10), (784,)),
    "784-400-400-10": (lambda: mlp(784, (400, 400), 10), (784,)),
    "lenet5": (lenet5, (784,)),
    "conv": (conv_net, (3, 32, 32)),
}


def made(name: str, num_data: int) -> tuple[nn.Module, bf.BayesianModule, Tensor]:
    """Make a plain network, the same network made Bayesian, and inputs."""
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    net = make().eval()
    return net, bf.BayesianModule(net), torch.rand(num_data, *shape)


def memory(samples: int) -> list[dict[str, Any]]:
    """Measure the growth of the peak of resident memory, each in a process of its own."""
    rows = []
    for name, num_data in (("784-400-400-10", 10_000), ("lenet5", 10_000), ("conv", 1000)):
        for cap in CAPS:
            for start in ("fresh", "warm"):
                for count in (samples // 10, samples) if name == "784-400-400-10" else (5,):
                    command = [sys.executable, __file__, "--threads", str(torch.get_num_threads())]
                    command += [name, str(num_data), cap, start, str(count)]
                    answer = subprocess.run(command, check=True, capture_output=True, text=True)
                    row = {"network": name, "data": num_data, "cap": cap, "start": start}
                    rows.append({**row, "samples": count, "growth_mb": float(answer.stdout)})
    return rows


def grow(name: str, num_data: str, cap: str, start: str, samples: str) -> float:
    """Return by how many MB a prediction raises this process's peak of resident memory."""
    _, bnn, x = made(name, int(num_data))
    if start == "warm":
        bnn.predict(x[:2], 2)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
    before = resident("VmRSS")
    bnn.predict(x, int(samples), max_memory=cap)
    return (resident("VmHWM") - before) / 1e6


def resident(what: str) -> int:
    """Return a line of the kernel's statistics of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(what)).split()[1])


@torch.no_grad()
def main() -> None:
    """Measure in this process and print MB."""
    parser = argparse.ArgumentParser(description="the growth of one prediction's process, in MB")
    parser.add_argument("what", nargs=5, help="network, data, cap, fresh or warm, weight samples")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(grow(*options.what))


if __name__ == "__main__":
    main()
