"""What the two processes of test_processes.py run, with their rank and a folder as arguments."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import save_file
from tests.ranks import together
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, TensorDataset

import bayesify as bf
from bayesify.datasets import TensorLoader
from bayesify.training.backends import NonFiniteLossError, StepOptions, make_backend
from bayesify.training.division import Division, Share, part_of
from bayesify.training.history import History
from bayesify.training.minibatches import minibatches
from bayesify.training.pac_bayes import PACBayesObjective
from bayesify.training.processes import Processes

RANKS, LIMIT = range(2), 200.0
N, BATCH, EPOCHS = 101, 10, 4  # the last minibatch of an epoch has one example for two processes

#: Estimator, backend, weight samples, prior, shared noise.
STEPS: dict[str, tuple[Any, Any, int, Any, bool]] = {
    f"{estimator}, {backend}, {samples}, {prior}{', shared' if shared else ''}": (
        {
            "sampling": bf.WeightSampling(),
            "antithetic": bf.WeightSampling(antithetic=True),
            "local": bf.LocalReparameterization(),
            "flipout": bf.Flipout(),
        }[estimator],
        backend,
        samples,
        {"gaussian": bf.Gaussian(0.5), "mixture": bf.ScaleMixture(0.5, 1.0, 0.1)}[prior],
        shared,
    )
    for estimator in ("sampling", "antithetic", "local", "flipout")
    for backend in ("compiled", "closed-form", "autograd")
    for samples in (1, 2)
    for prior in ("gaussian", "mixture")
    for shared in (False, True)
    if (estimator, samples) != ("antithetic", 1)
    and not (shared and (backend == "autograd" or estimator in ("local", "flipout")))
    and not (prior == "mixture" and samples == 2 and estimator in ("local", "flipout"))
}


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 3, dtype=torch.float64, generator=generator)
    return x, (x[:, 0] + 0.1 * x[:, 1] > 0).long()


def new_bnn(**options: Any) -> bf.BayesianModule:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    return bf.BayesianModule(net, **{"init_std": 0.3, "seed": 11, **options})


def parameters_of(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def stepped(
    case: str, inputs: Tensor, targets: Tensor, share: Share | None, processes: Processes
) -> tuple[Tensor, float]:
    """What one step of SGD with rate 1 adds to mean and rho, and the nll of the step."""
    estimator, backend, samples, prior, _ = STEPS[case]
    # The likelihood's noise and a layer without noise are trained too.
    bnn = new_bnn(estimator=estimator, prior=prior, exclude=("2.bias",))
    elbo = bf.ELBO(bnn, num_data=N, num_samples=samples)
    before = parameters_of(elbo)
    made = make_backend(elbo, SGD(elbo.parameters(), lr=1.0), backend, processes=processes)
    terms = made.step(inputs, targets, StepOptions(batch_index=0, share=share))
    return parameters_of(elbo) - before, float(terms.nll)


def fitted(name: str, **options: Any) -> tuple[bf.ELBO, History]:
    """Train a network as one of FITS."""
    bnn_options, loader, fit_options = FITS[name]
    bnn = new_bnn(**bnn_options)
    elbo = bf.ELBO(bnn, num_data=N)
    x, y = data()
    validation = TensorLoader(x[:50], y[:50], 7, shuffle=False)
    history = bf.fit(
        elbo,
        loader(),
        validation,
        **{"epochs": EPOCHS, "lr": 0.02, "progress": False, **fit_options, **options},
    )
    return elbo, history


def of_tensors() -> Any:
    return TensorLoader(*data(), BATCH, seed=11)


def of_dataset() -> Any:
    return DataLoader(TensorDataset(*data()), BATCH, shuffle=True)


#: Options of the network, loader, and options of ``fit``.
FITS: dict[str, tuple[dict[str, Any], Callable[[], Any], dict[str, Any]]] = {
    "point estimate": ({"posterior": bf.Delta, "init_std": None}, of_tensors, {}),
    "DataLoader": ({"posterior": bf.Delta, "init_std": None}, of_dataset, {}),
    "shared, compiled": ({}, of_tensors, {"shared_noise": True, "backend": "compiled"}),
    "shared, closed-form": ({}, of_dataset, {"shared_noise": True, "backend": "closed-form"}),
    "own, compiled": ({}, of_tensors, {"backend": "compiled"}),
    "own, closed-form": ({}, of_tensors, {"backend": "closed-form"}),
    "own, autograd": ({}, of_tensors, {"backend": "autograd"}),
    "own, fused": ({}, of_tensors, {"optimizer": partial(torch.optim.AdamW, lr=0.02), "lr": None}),
    "local": ({"estimator": bf.LocalReparameterization()}, of_tensors, {}),
    "pruned": ({}, of_tensors, {"pruning": bf.PruningSchedule(0.5, 1, 2)}),
    "point, accumulated": (
        {"posterior": bf.Delta, "init_std": None},
        of_tensors,
        {"accumulate_batches": 2},
    ),
    "own, accumulated": ({}, of_tensors, {"accumulate_batches": 3}),
}


# --------------------------------------------------------------------------- in the two processes


class Endless(Sampler[int]):
    """Draws examples for ever."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(N, ()))


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Random inputs, as augmentation makes them; the target is the index."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = [float(torch.rand(())), random.random(), float(np.random.random())]  # noqa: NPY002
        return torch.tensor(drawn), torch.tensor(index)


def augmented(rank: int, workers: int) -> tuple[Tensor, list[int]]:
    """An epoch of one process's part: what was drawn, and the targets."""
    torch.manual_seed(rank)
    loader = DataLoader(Augmented(), 4, shuffle=True, num_workers=workers)
    division = Division(loader, Processes())
    assert division.is_loaded_in_parts
    seeds = {"seed": 3, "epoch": 0, "skip": 0, "rank": rank, "fetch_rank": rank}
    with closing(minibatches(division.loader, **seeds)) as epoch:
        pairs = [pair for _, pair in epoch]
    return torch.cat([x for x, _ in pairs]), [int(y) for _, ys in pairs for y in ys]


class At:
    """A callback that does something after one step."""

    def __init__(self, action: Callable[[], None], epoch: int, batch: int) -> None:
        self.action, self.place = action, (epoch, batch)
        self.notes: list[str] = []

    def on_start(self, **_: Any) -> None: ...

    def on_note(self, text: str) -> None:
        self.notes.append(text)

    def on_step(self, *, epoch: int, batch: int) -> None:
        self.last = (epoch, batch)
        if (epoch, batch) == self.place:
            self.action()

    def on_epoch(self, row: Any) -> None: ...


def measure_steps(rank: int) -> dict[str, Any]:
    x, y = data()
    found: dict[str, Any] = {}
    for case, (*_, shared) in STEPS.items():
        for size in (8, 9):
            part = part_of(x[:size], y[:size], rank, 2)
            step, nll = stepped(case, *part, Processes(shared_noise=shared))
            found |= {f"{case}, {size}": step, f"{case}, {size}, nll": nll}
    return found


def measure_fits(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in FITS:
        elbo, history = fitted(name)
        found |= {name: parameters_of(elbo), f"{name}, rows": history}
    return found


def measure_interrupt(rank: int, folder: Path) -> dict[str, Any]:
    """Ctrl-C in one process alone, in the middle of an epoch, then the rest."""

    def ctrl_c() -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGINT)

    # Ignored where the tests were started in the background of a script.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    at, options = At(ctrl_c, 1, 3), {"checkpoint_dir": folder / "interrupted"}
    try:
        fitted("own, compiled", **options, callback=at)
        raise AssertionError("the training was not interrupted")
    except KeyboardInterrupt:
        pass
    distributed.barrier()
    elbo, history = fitted("own, compiled", **options, resume=True)
    return {
        "interrupted": parameters_of(elbo),
        "interrupted, rows": history,
        "interrupted at": at.last,
    }


def measure_rest(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    # Statistics of batch normalisation, and other initial values in each process.
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 2))
    bnn = bf.BayesianModule(net.double(), seed=11)
    x, y = data()
    loader = TensorLoader(x[:100], y[:100], 20, seed=11)
    bf.fit(bf.ELBO(bnn, num_data=100), loader, epochs=2, progress=False)
    found["normalised"] = parameters_of(bnn)
    found["statistics"] = torch.cat([each.flatten().double() for each in bnn.net.buffers()])

    class Draws(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            Draws.seen = torch.rand(3)
            output: Tensor = self.linear(x)
            return output

    one = bf.BayesianModule(Draws(), seed=11)
    bf.fit(bf.ELBO(one, num_data=N), of_tensors(), epochs=1, progress=False)
    found["drawn by the network"] = Draws.seen
    # A step of one's own, which begins with the first process's parameters.
    elbo = bf.ELBO(new_bnn(), num_data=N)
    with torch.no_grad():
        elbo.bnn.posterior.mean.add_(rank)
    step = bf.make_step(elbo, SGD(elbo.parameters(), lr=1.0))
    part = slice(4 * rank, 4 * rank + 4)
    before = parameters_of(elbo)
    step(x[part], y[part])
    found["own loop"] = parameters_of(elbo) - before
    # Geometric weights, by DistributedDataParallel and by fit.
    elbo = bf.ELBO(new_bnn(), num_data=8, kl_weighting="geometric", num_batches=3)
    found["geometric"] = elbo(x[part], y[part], batch_index=1).kl_factor
    # Validation data in an order of its own, and an endless stream of minibatches.
    point = bf.ELBO(new_bnn(posterior=bf.Delta, init_std=None), num_data=N)
    for name, validation in {
        "shuffled": DataLoader(TensorDataset(x, y), 9, shuffle=True),
        "in order": DataLoader(TensorDataset(x, y), 9),
    }.items():
        torch.manual_seed(rank)
        rows = bf.fit(
            point,
            DataLoader(TensorDataset(x, y), N),
            validation,
            optimizer=partial(SGD, lr=1e-12),
            epochs=1,
            progress=False,
        )
        found[f"validation, {name}"] = rows[-1]["validation_nll"]
    endless = DataLoader(TensorDataset(x, y), 10, sampler=Endless())
    rows = bf.fit(bf.ELBO(new_bnn(), num_data=N), endless, epochs=1, progress=False)
    found["endless"] = rows[-1]["nll"]

    class Own(bf.ELBO):
        """An objective of one's own, without the newer arguments."""

        def forward(self, inputs: Any, targets: Any, *, batch_index: Any = None, kl_scale: Any = 1):
            return super().forward(inputs, targets, batch_index=batch_index, kl_scale=kl_scale)

    bf.fit(Own(new_bnn(), num_data=N), of_tensors(), epochs=1, progress=False)

    class Averages(nn.Module):
        """A running mean, in a buffer that fit knows nothing of."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2).double()
            self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))
            self.register_buffer("expanded", torch.zeros(1).expand(4))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.seen.lerp_(x.mean(0), 0.1)
            output: Tensor = self.linear(x)
            return output

    own = bf.BayesianModule(Averages(), seed=11)
    bf.fit(bf.ELBO(own, num_data=N), of_tensors(), epochs=1, progress=False)
    found["own buffer"] = own.net.get_buffer("seen").clone()

    # Ctrl-C in one process during the last step.
    def ctrl_c() -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGINT)

    try:
        fitted("own, compiled", epochs=1, callback=At(ctrl_c, 0, 10))
        found["stopped at the end"] = False
    except KeyboardInterrupt:
        found["stopped at the end"] = True
    # Each process has a network of its own.
    agent = bf.ELBO(new_bnn(seed=rank), num_data=N)
    made = make_backend(agent, SGD(agent.parameters(), lr=0.1))
    if rank == 0:
        made.step(x[:4], y[:4], StepOptions(batch_index=0))
    for workers in (0, 1):
        drawn, targets = augmented(rank, workers)
        found[f"augmented by {workers}"] = drawn
        found[f"augmented by {workers}, targets"] = targets
    # Resumed by another number of processes.
    if rank == 0:
        with mock.patch("bayesify.training.processes.process_count", return_value=1):
            fitted("own, compiled", checkpoint_dir=folder / "alone", epochs=2)
    distributed.barrier()
    at = At(lambda: None, 0, 0)
    elbo, history = fitted(
        "own, compiled", checkpoint_dir=folder / "alone", resume=True, callback=at
    )
    found["resumed"] = parameters_of(elbo)
    found["resumed, notes"], found["resumed, epochs"] = at.notes, len(history)
    return found


class Cauchy(bf.Prior):
    """A prior of one's own."""

    def __init__(self, scale: float) -> None:
        self.scale, self.parts = scale, (torch.full((2000,), scale), Parts(scale))

    def log_prob(self, weights: Tensor) -> Tensor:
        return -torch.log1p((weights / self.scale).square())


class Parts:
    """What a component may hold."""

    def __init__(self, scale: float) -> None:
        self.scale, self.held = scale, {"function": lambda weights: weights, "object": object()}


def measure_errors(rank: int, folder: Path) -> dict[str, Any]:
    x, y = data()
    found: dict[str, Any] = {}

    def train(loader: Any = None, elbo: Any = None, **options: Any) -> None:
        elbo = bf.ELBO(new_bnn(), num_data=N) if elbo is None else elbo
        loader = of_tensors() if loader is None else loader
        bf.fit(elbo, loader, **{"epochs": 1, "progress": False, **options})

    dataset = TensorDataset(x, y)
    images = bf.BayesianModule(nn.Linear(3, 2).double(), prior=bf.Gaussian(0.5), init_std=0.1)
    lists = [((x[:4], torch.zeros(2)), y[:4])]
    cases: dict[str, Callable[[], None]] = {
        "sampler": lambda: train(DataLoader(dataset, 10, sampler=DistributedSampler(dataset))),
        "order": lambda: train(TensorLoader(x, y, BATCH, seed=rank)),
        "order of a DataLoader": lambda: train(
            DataLoader(dataset, 10, sampler=range(rank, N + rank - 1))
        ),
        "epochs": lambda: train(epochs=1 + rank),
        "seed": lambda: train(elbo=bf.ELBO(new_bnn(seed=rank), num_data=N)),
        "shared, flipout": lambda: train(
            elbo=bf.ELBO(new_bnn(estimator=bf.Flipout()), num_data=N), shared_noise=True
        ),
        "shared, autograd": lambda: train(backend="autograd", shared_noise=True),
        "checkpoint": lambda: train(checkpoint_dir=folder / f"own-{rank}", epochs=2, resume=True),
        "pac-bayes": lambda: train(elbo=PACBayesObjective(images, num_data=N)),
        "rate": lambda: train(lr=0.1 + rank),
        "warm-up": lambda: train(kl_warmup_epochs=rank),
        "likelihood": lambda: train(
            elbo=bf.ELBO(new_bnn(likelihood=bf.GaussianLikelihood(std=1.0 + rank)), num_data=N)
        ),
        "prior": lambda: train(elbo=bf.ELBO(new_bnn(prior=Cauchy(1.0 + rank)), num_data=N)),
        "temperature": lambda: train(elbo=bf.ELBO(new_bnn(), num_data=N, temperature=1.0 + rank)),
        "state": lambda: train(**of_state(rank)),
        "network": lambda: train(
            elbo=bf.ELBO(bf.BayesianModule(nn.Linear(3, 2 + rank)), num_data=N)
        ),
        "shared in one": lambda: train(shared_noise=rank == 0),
        "shared no more": lambda: train(checkpoint_dir=folder / "shared", epochs=2, resume=True),
        "validation": lambda: train(
            validation_loader=DataLoader(dataset, 10, sampler=DistributedSampler(dataset))
        ),
        "strings": lambda: train([(["a", "b"], y[:2])], bf.ELBO(new_bnn(), num_data=2)),
        "step": lambda: void(bf.make_step(*of_step(rank))),
        "replicas": lambda: void(bf.fit_replicas([bf.ELBO(new_bnn(), num_data=N)], of_tensors())),
        "rows": lambda: train(lists, bf.ELBO(new_bnn(), num_data=4)),
        "sharded": lambda: train(elbo=fully_shard(bf.ELBO(new_bnn(), num_data=N))),
    }
    if rank == 0:
        with mock.patch("bayesify.training.processes.process_count", return_value=1):
            train(checkpoint_dir=folder / "own-0")
    train(checkpoint_dir=folder / "shared", shared_noise=True)
    train(elbo=bf.ELBO(new_bnn(prior=Cauchy(1.0)), num_data=N))  # whose repr is its place in memory
    distributed.barrier()
    for name, case in cases.items():
        try:
            case()
            found[f"error, {name}"] = "nothing was raised"
        except (ValueError, TypeError) as error:
            found[f"error, {name}"] = f"{type(error).__name__}: {error}"
    # NaN in the part of one process only.
    elbo = bf.ELBO(new_bnn(), num_data=N)
    before = parameters_of(elbo)
    optimizer = SGD(elbo.parameters(), lr=1.0)
    for backend in ("compiled", "closed-form", "autograd"):
        made = make_backend(elbo, optimizer, backend, processes=Processes())  # type: ignore[arg-type]
        inputs = x[:4] if rank == 0 else x[:4] * torch.nan
        try:
            made.step(inputs, y[:4], StepOptions(batch_index=0))
        except NonFiniteLossError as error:
            found[f"error, nan, {backend}"] = str(error)
    found["after nan"] = parameters_of(elbo) - before
    return found


def of_state(rank: int) -> dict[str, Any]:
    """An optimiser that has a state in one process only."""
    elbo = bf.ELBO(new_bnn(), num_data=N)
    optimizer = torch.optim.Adam(bf.parameter_groups(elbo))
    if rank == 0:
        elbo(*data()).loss.backward()
        optimizer.step()
    elbo.step = 0
    return {"elbo": elbo, "optimizer": optimizer}


def of_step(rank: int) -> tuple[bf.ELBO, torch.optim.Optimizer]:
    elbo = bf.ELBO(new_bnn(), num_data=N)
    return elbo, SGD(elbo.parameters(), lr=0.1 + rank)


def void(_: object) -> None: ...


def main(rank: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    with together(rank, folder, LIMIT / 2):
        found = measure_steps(rank) | measure_fits(rank) | measure_interrupt(rank, folder)
        found |= measure_rest(rank, folder) | measure_errors(rank, folder)
        tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        rest = {name: value for name, value in found.items() if name not in tensors}
        save_file(tensors, folder / f"{rank}.safetensors")
        (folder / f"{rank}.json").write_text(json.dumps(rest))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
