"""Train on two machines: bytes and time of a step, the error, and what killed processes change.

python benchmarks/two_machines.py exchange       # stores results/two-machines
python benchmarks/two_machines.py training kill --data-dir DIR
python benchmarks/two_machines_table.py          # writes the numbers into docs/

The machines are two network namespaces of this one, joined by a veth pair; making them needs root.
They share its CPUs and its disk.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import records
import torch
from records import require_clean_tree
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import bayesify as bf
from bayesify.io import read_tensors

_ADDRESSES = "10.213.7.1", "10.213.7.2"
_MACHINES = "bayesify-0", "bayesify-1"
_PORT = 29517
_STEPS, _WARM_UP, _ROUNDS, _BATCH = 200, 20, 5, 256
_HIDDEN = 400


# ------------------------------------------------------------------------------------ the machines


@contextmanager
def two_machines() -> Iterator[None]:
    """Make two network namespaces that reach each other, and remove them at the end."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    remove_machines()
    try:
        for name in _MACHINES:
            ip("netns", "add", name)
        ip("link", "add", "veth0", "netns", _MACHINES[0], "type", "veth", "peer", "name", "veth1")
        ip("link", "set", "veth1", "netns", _MACHINES[1])
        for place, name in enumerate(_MACHINES):
            inside = ("netns", "exec", name, "ip")
            ip(*inside, "addr", "add", f"{_ADDRESSES[place]}/24", "dev", f"veth{place}")
            ip(*inside, "link", "set", f"veth{place}", "up")
            ip(*inside, "link", "set", "lo", "up")
        yield
    finally:
        remove_machines()


def remove_machines() -> None:
    """Kill what runs in the namespaces and remove them."""
    for name in _MACHINES:
        kill(pids_of(name))
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def pids_of(machine: str) -> list[int]:
    """The processes that run on a machine."""
    found = subprocess.run(["ip", "netns", "pids", machine], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def kill(pids: Sequence[int]) -> None:
    """Kill processes at once."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def start(place: int, command: Sequence[str], log: Path, **environment: str) -> subprocess.Popen:
    """Start a command on a machine."""
    common = {
        "MASTER_ADDR": _ADDRESSES[0],
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": f"veth{place}",
        "TP_SOCKET_IFNAME": f"veth{place}",
        "OMP_NUM_THREADS": "1",
        # A store for each attempt: else processes that start again meet the last one's addresses.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with log.open("a") as file:
        return subprocess.Popen(
            ["ip", "netns", "exec", _MACHINES[place], *command],
            env={**os.environ, **common, **environment},
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def wait_for(processes: Sequence[subprocess.Popen], logs: Sequence[Path]) -> None:
    """Wait until all have ended; raise RuntimeError with what the failed ones printed."""
    codes = [process.wait() for process in processes]
    if any(codes):
        told = "\n".join(log.read_text()[-3000:] for log in logs)
        raise RuntimeError(f"the processes ended with {codes}:\n{told}")


# --------------------------------------------------------------------------------------- exchange


def sent_bytes() -> int:
    """The bytes that this machine has sent to the other."""
    total = 0
    for path in Path("/sys/class/net").glob("veth*/statistics/tx_bytes"):
        total += int(path.read_text())
    return total


def worker(mode: str, batch: int) -> None:
    """Train for some steps as one of the ranks, and print what was measured."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(784, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, 10),
    )
    rows = batch // world
    generator = torch.Generator().manual_seed(rank)
    x = torch.rand(8, rows, 784, generator=generator)
    y = torch.randint(10, (8, rows), generator=generator)
    step, module = step_of(mode, net, world)
    for place in range(_WARM_UP):
        step(x[place % 8], y[place % 8])
    distributed.barrier()
    before, begun = sent_bytes(), time.perf_counter()
    for place in range(_STEPS):
        step(x[place % 8], y[place % 8])
    seconds = time.perf_counter() - begun
    sent = sent_bytes() - before
    distributed.barrier()
    begun = time.perf_counter()
    for _ in range(_STEPS):
        exchange_only(mode, net)
    seconds_exchange = time.perf_counter() - begun
    vector = torch.cat([each.detach().flatten() for each in module.parameters()])
    found = {
        "seconds": seconds,
        "seconds_exchange": seconds_exchange,
        "bytes": sent,
        "weights": sum(each.numel() for each in net.parameters()),
        "digest": hashlib.sha256(vector.numpy().tobytes()).hexdigest(),
    }
    print(f"found {json.dumps(found)}", flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


def step_of(
    mode: str, net: nn.Module, world: int
) -> tuple[Callable[[Tensor, Tensor], object], nn.Module]:
    """The training step of a mode, and the module that it trains."""
    if mode == "plain":
        model: nn.Module = DistributedDataParallel(net) if world > 1 else net
        adam = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)

        def plain(x: Tensor, y: Tensor) -> None:
            adam.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            adam.step()

        return plain, net
    elbo = bf.ELBO(bf.BayesianModule(net, seed=0), num_data=60_000)
    adam = torch.optim.Adam(bf.parameter_groups(elbo), lr=1e-3, fused=True)
    shared = mode == "shared" and world > 1
    return bf.make_step(elbo, adam, backend="compiled", shared_noise=shared), elbo


def exchange_only(mode: str, net: nn.Module) -> None:
    """Add up what a step of a mode exchanges, and compute nothing."""
    count = sum(each.numel() for each in net.parameters())
    works = [
        distributed.all_reduce(torch.zeros(count), async_op=True)
        for _ in range(2 if mode == "own" else 1)
    ]
    for work in works:
        work.wait()


def run_workers(mode: str, world: int, batch: int, folder: Path) -> list[dict[str, Any]]:
    """Run a mode with one process, one on each machine, or two on each."""
    name = f"{mode}-{world}-{batch}-{time.monotonic_ns()}"
    logs = [folder / f"{name}-{rank}.log" for rank in range(world)]
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", mode, str(batch)]
    each = max(1, world // 2)
    processes = [
        start(rank // each, command, logs[rank], RANK=str(rank), WORLD_SIZE=str(world))
        for rank in range(world)
    ]
    wait_for(processes, logs)
    lines = [line for log in logs for line in log.read_text().splitlines()]
    return [json.loads(line[6:]) for line in lines if line.startswith("found ")]


def exchange(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Bytes and time of a step by mode and number of processes, interleaved.

    A process alone has the whole minibatch, and half of it, which is what each of two computes.
    """
    cases = [("plain", 1, _BATCH), ("plain", 1, _BATCH // 2)]
    cases += [("own", 1, _BATCH), ("own", 1, _BATCH // 2)]
    cases += [(mode, world, _BATCH) for mode in ("plain", "own", "shared") for world in (2, 4)]
    found: dict[tuple[str, int, int], list[list[dict[str, Any]]]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for case in cases:
            found[case].append(run_workers(*case, folder))
    for case in cases:
        mode, world, batch = case
        runs = found[case]
        seconds = [max(each["seconds"] for each in run) / _STEPS for run in runs]
        alone = [max(each["seconds_exchange"] for each in run) / _STEPS for run in runs]
        equal = [len({each["digest"] for each in run}) == 1 for run in runs]
        yield {
            "noise": mode,
            "processes": world,
            "minibatch": batch,
            "weights": runs[0][0]["weights"],
            "ms": 1e3 * median(seconds),
            "ms_spread": 1e3 * (max(seconds) - min(seconds)),
            **({"ms_exchange_only": 1e3 * median(alone)} if world > 1 else {}),
            "bytes_sent_by_a_machine": median(run[0]["bytes"] for run in runs) / _STEPS,
            "equal_after_steps": all(equal) and _STEPS + _WARM_UP,
        }
    yield variance()


def variance(draws: int = 400) -> dict[str, Any]:
    """The variance of a gradient under shared noise, as a multiple of that under own noise.

    Of a network after some training, for one minibatch of two processes; only the noise of the
    weights varies.
    """
    torch.manual_seed(0)
    data = bf.datasets.load_images("mnist", limit=6000)
    net = nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))
    elbo = bf.ELBO(bf.BayesianModule(net, seed=0), num_data=6000)
    loader = bf.datasets.TensorLoader(data.train_inputs, data.train_targets, _BATCH)
    bf.fit(elbo, loader, epochs=20, progress=False)
    x, y = data.train_inputs[:_BATCH], data.train_targets[:_BATCH]
    parameters = elbo.bnn.posterior.mean, elbo.bnn.posterior.get_parameter("rho")

    def gradient(rows: slice) -> list[Tensor]:
        terms = elbo(x[rows], y[rows])
        return list(torch.autograd.grad(terms.loss, parameters))

    half = _BATCH // 2
    shared = [gradient(slice(None)) for _ in range(draws)]
    own = []
    for _ in range(draws):
        pair = gradient(slice(0, half)), gradient(slice(half, None))
        own.append([(a + b) / 2 for a, b in zip(*pair, strict=True)])

    def total(found: list[list[Tensor]], place: int) -> float:
        return float(torch.stack([each[place] for each in found]).double().var(0).sum())

    return {
        "draws": draws,
        "variance_ratio_mean": total(shared, 0) / total(own, 0),
        "variance_ratio_rho": total(shared, 1) / total(own, 1),
    }


# ---------------------------------------------------------------------------- training and killing


def training(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The test error of runs by one process, and by two processes on each of two machines."""
    for seed in range(options.seeds):
        train = ["train", "mnist", "--seed", str(seed), *data_dir(options)]
        one = folder / f"one-{seed}"
        run(folder, [*train, "--out", str(one)])
        yield {"processes": 1, "seed": seed, **measured(one)}
        four, logs = folder / f"four-{seed}", [folder / f"four-{seed}-{n}.log" for n in (0, 1)]
        command = [sys.executable, "-m", "bayesify", *train, "--out", str(four)]
        command += ["--devices", "2", "--nodes", "2"]
        processes = [start(n, command, logs[n], NODE_RANK=str(n)) for n in (0, 1)]
        wait_for(processes, logs)
        yield {"processes": 4, "seed": seed, **measured(four)}


def killing(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Whether a run of which processes are killed ends with the weights of one that was not."""
    settings = ["--limit", "10000", "--epochs", "10", *data_dir(options)]
    ends = {}
    for name in ("undisturbed", "killed"):
        out = folder / name
        begun = time.perf_counter()
        agents = [torchrun(n, folder, out, settings) for n in (0, 1)]
        if name == "killed":
            wait_for_epoch(out, 2, agents)
            rank = newest(_MACHINES[1])
            kill([rank])
            print(f"killed process {rank} on the second machine", flush=True)
            wait_for_epoch(out, epochs_of(out) + 2, agents)
            kill(pids_of(_MACHINES[1]))
            print("killed all processes of the second machine", flush=True)
            agents[1].wait()
            time.sleep(5)
            agents[1] = torchrun(1, folder, out, settings)
        wait_for(agents, [folder / f"{out.name}-{n}.log" for n in (0, 1)])
        tensors, _ = read_tensors(out / "checkpoint.safetensors")
        ends[name] = tensors
        yield {"run": name, "seconds": time.perf_counter() - begun, **measured(out)}
    one, other = ends.values()
    same = one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
    yield {"same_checkpoint": same}


def torchrun(
    place: int, folder: Path, out: Path, settings: Sequence[str]
) -> subprocess.Popen[bytes]:
    """Start a machine's two ranks by torchrun."""
    endpoint = f"{_ADDRESSES[0]}:{_PORT}"
    elastic = ["--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "5"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", out.name]
    # It would find out by the machine's name, which both namespaces have.
    here = ["--local-addr", _ADDRESSES[place], "--rdzv-conf", f"is_host={place == 0}"]
    run = [*elastic, *meeting, *here, "-m", "bayesify", "train", "mnist", "--out", str(out)]
    command = [sys.executable, "-m", "torch.distributed.run", *run, *settings, "--resume"]
    return start(place, command, folder / f"{out.name}-{place}.log")


def epochs_of(out: Path) -> int:
    """The number of epochs in a run's history."""
    path = out / "history.csv"
    if not path.exists():
        return 0
    with path.open() as file:
        return sum(1 for _ in csv.DictReader(file))


def wait_for_epoch(out: Path, epoch: int, agents: Sequence[subprocess.Popen]) -> None:
    """Wait until a run has finished an epoch, and is in the middle of the next."""
    while epochs_of(out) < epoch:
        if any(agent.poll() is not None for agent in agents):
            raise RuntimeError(f"a machine ended before epoch {epoch}")
        time.sleep(0.05)
    time.sleep(0.2)


def newest(machine: str) -> int:
    """The last process that was started on a machine: a rank of its torchrun."""
    return max(pids_of(machine))


def run(folder: Path, words: Sequence[str]) -> None:
    """Run a command of bayesify on this machine."""
    with (folder / "alone.log").open("a") as log:
        command = [sys.executable, "-m", "bayesify", *words]
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)


def data_dir(options: argparse.Namespace) -> list[str]:
    """The option of the data's folder, if it was given."""
    return [] if options.data_dir is None else ["--data-dir", options.data_dir]


def measured(out: Path) -> dict[str, Any]:
    """What a run reached."""
    metrics = json.loads((out / "metrics.json").read_text())
    test = metrics["test"]
    return {
        "error_predictive": test["error_predictive"],
        "error_mean_weights": test["error_mean_weights"],
        "nll": test["nll"],
        "seconds_train": metrics["seconds_train"],
    }


PARTS: dict[str, Callable[[Path, argparse.Namespace], Iterator[dict[str, Any]]]] = {
    "exchange": exchange,
    "training": training,
    "kill": killing,
}


def main() -> None:
    """Measure, and store the rows."""
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], int(sys.argv[3]))
        return
    require_clean_tree()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--data-dir")
    parser.add_argument("--seeds", type=int, default=2, help="runs of training")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help="of exchange")
    options = parser.parse_args()
    for part in options.parts:
        config = {"seeds": options.seeds} if part == "training" else {}
        config |= {"rounds": options.rounds, "steps": _STEPS} if part == "exchange" else {}
        config["load_before"] = os.getloadavg()[0]
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, two_machines():
            rows = []
            for row in PARTS[part](Path(folder), options):
                print(row, flush=True)
                rows.append(row)
        document = records.resumed("two-machines", part, config)
        document["seed"] = 0  # the first one of training
        records.store_rows(document, rows, time.perf_counter() - begun)


if __name__ == "__main__":
    main()
