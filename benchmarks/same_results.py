"""Digests of the weights that short training runs end with, to compare two versions of bayesify.

Both versions run this script; equal digests mean equal weights, bit for bit::

    python benchmarks/same_results.py --out before.json     # with the older version installed
    python benchmarks/same_results.py --against before.json # with the newer one

It knows the names of the arguments before and after they were renamed, so that it runs with both.
Another CPU or PyTorch rounds differently: make both files on one machine. Each names its own.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import json
import tempfile
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bayesify as bf
from bayesify.bandits import Learning, ThompsonSampler

RENAMED = "backend" in inspect.signature(bf.fit).parameters
#: The names of a backend before and after they were renamed.
_OLD_BACKENDS = {"compiled": "fused", "closed-form": "plain", "autograd": "plain", "auto": "auto"}
EPOCHS = 6


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A multilayer perceptron with fixed initial values."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 33), nn.ReLU(), nn.Linear(33, 5)).to(dtype)


def convolution() -> nn.Module:
    """A small convolutional network with batch normalisation and dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 20)),
        nn.Conv1d(1, 4, 3),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(72, 5),
    )


def batches(dtype: torch.dtype = torch.float32) -> DataLoader[tuple[Tensor, ...]]:
    """Minibatches of 200 examples of 20 numbers in 5 classes."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(200, 20, generator=generator, dtype=dtype)
    return DataLoader(
        TensorDataset(inputs, torch.arange(200) * 7 % 5),
        batch_size=32,
        shuffle=True,
        generator=torch.Generator(),
    )


def module(net: nn.Module, estimator: Any = None, **options: Any) -> bf.BayesianModule:
    """A Bayesian module, its estimator given under the name that this version knows."""
    name = "estimator" if RENAMED else "perturbation"
    return bf.BayesianModule(net, **{name: estimator}, init_std=0.05, **options)


def trained(
    bnn: bf.BayesianModule, backend: str, elbo: dict[str, Any] | None = None, **options: Any
) -> list[Tensor]:
    """The final weights of a run of ``fit``."""
    chosen = {"backend": backend} if RENAMED else {"step": _OLD_BACKENDS[backend]}
    dtype = bnn.posterior.mean.dtype
    objective = bf.ELBO(bnn, num_data=200, **(elbo or {}))
    loader = options.pop("loader", None) or batches(dtype)
    bf.fit(objective, loader, **{"epochs": EPOCHS, **chosen, **options})
    return weights(bnn)


def weights(bnn: bf.BayesianModule) -> list[Tensor]:
    """All parameters and buffers, in an order that does not depend on their names."""
    posterior = bnn.posterior
    rest = [*bnn.net.parameters(), *bnn.net.buffers(), *bnn.likelihood.parameters()]
    return [posterior.mean, posterior.rho, *rest]


def resumed() -> list[Tensor]:
    """A run that stops after half of its epochs and resumes from its checkpoint."""
    sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    with tempfile.TemporaryDirectory() as folder:
        common = {"optimizer": sgd, "checkpoint_dir": folder, "kl_warmup_epochs": 2}
        trained(module(convolution(), bf.Flipout()), "compiled", epochs=3, **common)
        again = module(convolution(), bf.Flipout())
        return trained(again, "compiled", epochs=EPOCHS, resume=True, **common)


def bandit() -> list[Tensor]:
    """An agent that explores by Thompson sampling, 40 interactions."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3 + 2, 16), nn.ReLU(), nn.Linear(16, 1))
    model = module(net, likelihood=bf.GaussianLikelihood())
    agent = ThompsonSampler(model, num_actions=2, learning=Learning(updates=3, batch_size=8))
    generator = torch.Generator().manual_seed(2)
    for _ in range(40):
        context = torch.randn(3, generator=generator)
        action = agent.act(context)
        agent.observe(context, action, float(context[action]))
        agent.learn()
    return weights(agent.rewards.bnn)


def table(name: str, targets: Callable[[Any], Any], **options: Any) -> list[Tensor]:
    """A scikit-learn estimator on 120 rows of 4 columns."""
    estimators = importlib.import_module("bayesify.sklearn")
    estimator = getattr(estimators, name)(random_state=0, steps=60, **options)
    rows = np.random.default_rng(3).normal(size=(120, 4))
    return weights(estimator.fit(rows, targets(rows)).bnn_)


def replicas() -> list[Tensor]:
    """Three networks trained at once."""
    elbos = [bf.ELBO(module(network(), seed=seed), num_data=200) for seed in range(3)]
    bf.fit_replicas(elbos, batches(), epochs=EPOCHS)
    return [tensor for elbo in elbos for tensor in weights(elbo.bnn)]


def pruned() -> list[Tensor]:
    """A network that is trained, pruned and trained on."""
    bnn = module(network(), prior=bf.ScaleMixture())
    trained(bnn, "compiled", epochs=2)
    return trained(bf.prune(bnn, 0.6), "compiled", epochs=2)


_LOCAL = bf.LocalReparameterization
RUNS: dict[str, Callable[[], Iterable[Tensor]]] = {
    "compiled, weight sampling, Gaussian, Adam": lambda: trained(module(network()), "compiled"),
    "compiled, local reparametrisation, Laplace": lambda: trained(
        module(network(), _LOCAL(), prior=bf.Laplace(0.2)), "compiled"
    ),
    "compiled, antithetic pairs, scale mixture, geometric": lambda: trained(
        module(network(), bf.WeightSampling(antithetic=True), prior=bf.ScaleMixture()),
        "compiled",
        {"num_samples": 4, "kl_weighting": "geometric", "num_batches": 7},
    ),
    "closed-form, weight sampling, scale mixture, float64": lambda: trained(
        module(network(torch.float64), prior=bf.ScaleMixture()), "closed-form"
    ),
    "closed-form, Flipout, AdamW": lambda: trained(
        module(network(), bf.Flipout()), "closed-form", optimizer=torch.optim.AdamW
    ),
    "autograd, Student t": lambda: trained(module(network(), prior=bf.StudentT()), "autograd"),
    "autograd, prior by group, local reparametrisation": lambda: trained(
        module(
            network(), _LOCAL(), prior=bf.ByGroup({"*.bias": bf.Gaussian(1), "*": bf.Laplace(1)})
        ),
        "autograd",
    ),
    "auto, convolution": lambda: trained(
        module(convolution(), _LOCAL(per_position=True)), "auto", rho_lr_scale=2.0
    ),
    "pruned and trained on": pruned,
    "resumed, compiled, Flipout, SGD": resumed,
    "bandit": bandit,
    "replicas": replicas,
    "table, regression": lambda: table(
        "BayesianMLPRegressor",
        lambda rows: rows @ [1.0, -2.0, 0.0, 0.5],
        noise="input-dependent",
    ),
    "table, classes": lambda: table("BayesianMLPClassifier", lambda rows: rows[:, 0] > 0.3),
}


def digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 over the bytes of tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def machine() -> str:
    """What the rounding of a result depends on."""
    flags = [
        line
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith(("model name", "flags"))
    ]
    properties = hashlib.sha256("\n".join(sorted(set(flags))).encode()).hexdigest()[:12]
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{capability} CPU {properties}, torch {torch.__version__}"


def main() -> None:
    """Run everything; print a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="store the digests as JSON")
    parser.add_argument("--against", type=Path, help="compare with stored digests")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    wanted: dict[str, str] = {}
    if options.against:
        stored = json.loads(options.against.read_text())
        wanted = stored["weights"]
        if stored["machine"] != machine():
            raise SystemExit(
                f"{options.against} was made on another machine ({stored['machine']}) than this "
                f"({machine()}), which rounds differently; make it here with the older version"
            )
    for name, run in RUNS.items():
        with warnings.catch_warnings(action="ignore"):
            found[name] = digest(run())
        same = "" if name not in wanted else "same" if wanted[name] == found[name] else "DIFFERENT"
        print(f"{name:55s} {found[name][:16]} {same}", flush=True)
    if options.out:
        document = {"machine": machine(), "weights": found}
        options.out.write_text(json.dumps(document, indent=2) + "\n")
    if any(wanted.get(name, value) != value for name, value in found.items()):
        raise SystemExit("some runs end with other weights")


if __name__ == "__main__":
    main()
