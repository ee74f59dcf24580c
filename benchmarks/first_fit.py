"""Train what a new user trains first, and follow the warnings of ``fit``.

python benchmarks/first_fit.py [NAME ...]      about an hour on one core; it resumes

README's networks, the examples, and networks and tables with nothing but defaults. Each is trained
on all but the last sixth of its training data and measured on that part; no test example is used.
Where ``fit`` warns that the standard deviations have not converged, the same network is trained
again with each change that the warning names. The results are in results/first-fit.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import re
import runpy
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from records import RESULTS, commit, require_clean_tree
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.model_selection import train_test_split
from torch import nn

import bayesify as bf
from bayesify.app.runs.environment import hardware, load_average, versions
from bayesify.datasets import TensorLoader, load_images
from bayesify.io import atomic_write
from bayesify.sklearn import BayesianMLPClassifier, BayesianMLPRegressor
from bayesify.tabular import TableRecipe

ROOT = Path(__file__).resolve().parents[1]
FOLDER = RESULTS / "first-fit"
SAMPLES = 50


@dataclass(frozen=True)
class FirstFit:
    """A call of ``fit``: the objective before it, the training data, and its options."""

    elbo: bf.ELBO
    loader: TensorLoader
    options: Mapping[str, Any]

    def run(self) -> dict[str, Any]:
        """Train a copy of the network on five sixths of the data, and measure it on the rest."""
        inputs, targets = self.loader.inputs, self.loader.targets
        count = len(inputs) - len(inputs) // 6
        elbo = copy.deepcopy(self.elbo)
        elbo.num_data = count
        loader = TensorLoader(inputs[:count], targets[:count], self.loader.batch_size)
        history, notes = _warned(lambda: bf.fit(elbo, loader, **self.options))
        p = elbo.bnn.predict(inputs[count:], num_samples=SAMPLES)
        return {
            "nll": float(-p.log_prob(targets[count:]).mean()),
            "error": float(100.0 * (p.mean.argmax(-1) != targets[count:]).double().mean()),
            **_last(history[-1]),
            "warnings": notes,
        }

    def changed(self) -> dict[str, FirstFit]:
        """Return the fits with each change that the warning names."""
        epochs = self.options.get("epochs", 10)
        rate = self.options.get("rho_lr_scale", 1.0)
        narrow = copy.deepcopy(self.elbo)
        prior = narrow.bnn.prior
        assert isinstance(prior, bf.Gaussian)
        narrow.bnn.prior = bf.Gaussian(0.5 * prior.std)
        return {
            "twice the epochs": replace(self, options={**self.options, "epochs": 2 * epochs}),
            "rho three times as fast": replace(
                self, options={**self.options, "rho_lr_scale": 3.0 * rate}
            ),
            "half the prior's width": replace(self, elbo=narrow),
        }


class _CaughtError(Exception):
    """Ends a script at its call of ``fit``."""


def captured(run: Callable[[], object]) -> FirstFit:
    """Return the call of ``bf.fit`` that a script makes."""
    calls: list[FirstFit] = []

    def instead(elbo: bf.ELBO, loader: TensorLoader, *_: object, **options: Any) -> None:
        calls.append(FirstFit(elbo, loader, options))
        raise _CaughtError

    with (
        patch.object(bf, "fit", instead),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(_CaughtError),
    ):
        run()
    return calls[0]


def example(name: str) -> Callable[[], FirstFit]:
    """Return the fit of a script in ``examples``."""
    path = str(ROOT / "examples" / name)

    def run() -> object:
        with patch.object(sys, "argv", [path]):
            return runpy.run_path(path, run_name="__main__")

    return lambda: captured(run)


def readme() -> FirstFit:
    """Return the fit of README's Python block."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    [block] = [b for b in re.findall(r"```python\n(.*?)```", page, re.S) if "bf.fit(" in b]
    torch.manual_seed(0)
    return captured(lambda: exec(compile(block, "README.md", "exec"), {}))


def bare(net: Callable[[], nn.Module]) -> Callable[[], FirstFit]:
    """Return the fit of a network with nothing but defaults."""

    def made() -> FirstFit:
        data = load_images("mnist")
        loader = TensorLoader(data.train_inputs, data.train_targets, 128)
        torch.manual_seed(0)
        return FirstFit(bf.ELBO(bf.BayesianModule(net()), num_data=60_000), loader, {})

    return made


def _multilayer() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 10))


def _convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(-1, (1, 28, 28)),
        nn.Conv2d(1, 8, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


NETWORKS: dict[str, Callable[[], FirstFit]] = {
    "README": readme,
    **{
        f"examples/{name}": example(name)
        for name in ("conv_mnist.py", "lstm_rows.py", "transformer_patches.py", "last_layer.py")
    },
    "784-400-10, defaults": bare(_multilayer),
    "two convolutions, defaults": bare(_convolutional),
}
TABLES: dict[str, tuple[Callable[..., Any], type]] = {
    "diabetes, defaults": (load_diabetes, BayesianMLPRegressor),
    "breast cancer, defaults": (load_breast_cancer, BayesianMLPClassifier),
}


def of_table(name: str, factor: int) -> dict[str, Any]:
    """Train an estimator for ``factor`` times its default steps, and measure it."""
    load, estimator = TABLES[name]
    x, left, y, right = train_test_split(*load(return_X_y=True), test_size=1 / 6, random_state=0)
    steps = TableRecipe.for_rows(len(x)).steps
    model = estimator(random_state=0, **({"steps": factor * steps} if factor > 1 else {}))
    _, notes = _warned(lambda: model.fit(x, y))
    p, classes = model.predictive(left), getattr(model, "classes_", None)
    targets = torch.as_tensor(right) if classes is None else torch.as_tensor(right).long()
    if classes is None:
        targets = targets.view(p.mean.shape)
    return {
        "nll": float(-p.log_prob(targets).mean()),
        **_last(model.history_[-1]),
        "warnings": notes,
    }


def _last(row: Mapping[str, float | None]) -> dict[str, float | None]:
    names = ("free_energy", "free_energy_untrained", "std_residual", "std_residual_worst")
    return {name: row.get(name) for name in names}


def _warned(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.redirect_stdout(io.StringIO()):
            result = call()
    return result, [str(each.message) for each in caught]


def measured(name: str) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield the first fit of a case, then those that its warning asks for."""
    if name in TABLES:
        yield "as it is", lambda: of_table(name, 1)
        yield "twice the steps", lambda: of_table(name, 2)
        return
    first = NETWORKS[name]()
    yield "as it is", first.run
    for change, fit in first.changed().items():
        yield change, fit.run


def table(cases: list[dict[str, Any]]) -> str:
    """Format the held-out nll of each case, and what each change makes of it."""
    lines = [
        "| | fit | warning | held-out nll | held-out error, % | free energy | untrained | "
        "derivative, worst group |",
        "|---" * 8 + "|",
    ]
    for case in cases:
        for change, row in case["metrics"].items():
            numbers = [row[k] for k in ("free_energy", "free_energy_untrained")]
            worst = row["std_residual_worst"]
            cells = [
                case["name"] if change == "as it is" else "",
                change,
                "std not converged" if _not_converged(row) else "",
                f"{row['nll']:.4f}",
                f"{row['error']:.2f}" if "error" in row else "",
                *("" if number is None else f"{number:.3f}" for number in numbers),
                "" if worst is None else f"{worst:+.2f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _not_converged(row: Mapping[str, Any]) -> bool:
    return any("have not converged" in note for note in row["warnings"])


def main() -> None:
    """Run the cases that are not stored, and write the table of all."""
    require_clean_tree()
    order = [*NETWORKS, *TABLES]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(order)}")
    names = parser.parse_args().names
    if unknown := sorted(set(names) - set(order)):
        parser.error(f"NAME must be one of {', '.join(order)}, got {', '.join(unknown)}")
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names or order:
        path = FOLDER / (re.sub(r"[^\w-]+", "-", name) + ".json")
        if path.exists():
            continue
        started, rows = time.perf_counter(), {}
        for change, run in measured(name):
            rows[change] = run()
            print(f"{name}, {change}: {rows[change]}", flush=True)
            if not _not_converged(rows["as it is"]):
                break
        document = {
            "experiment": "first-fit",
            "quick": False,
            "config": {"samples": SAMPLES},
            "name": name,
            "seed": 0,
            "commit": commit(),
            "hardware": hardware(),
            "versions": versions(),
            "load": load_average(),
            "metrics": rows,
            "seconds": time.perf_counter() - started,
        }
        atomic_write(path, json.dumps(document, indent=2) + "\n")
    stored = [json.loads(path.read_text()) for path in FOLDER.glob("*.json")]
    text = table(sorted(stored, key=lambda case: order.index(case["name"])))
    atomic_write(FOLDER / "table.md", text)
    print(text)


if __name__ == "__main__":
    main()
