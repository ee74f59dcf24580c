"""fit() by each backend: one history, one checkpoint, and the same training."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backend_cases import distance, has_compiler, needs_compiler, use_counter_noise
from tests.cases import Case
from tests.training import test_resume
from tests.training.test_fit import N
from tests.training.test_fit_random import with_dropout
from tests.training.test_resume import NAME, CrashError, Setup, Stop, crash, timeless
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from bayesify import ELBO, Gaussian, LocalReparameterization, fit
from bayesify.datasets import TensorLoader
from bayesify.io import read_tensors, write_tensors
from bayesify.training import NonFiniteLossError
from bayesify.training.history import History
from bayesify.training.kernel import compiler
from bayesify.training.schedules import cosine

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
EPOCHS, BATCH = 3, 8
each_backend = pytest.mark.parametrize(
    "backend", [pytest.param("compiled", marks=needs_compiler), "closed-form"]
)


class Watcher:
    """A callback that does something after one step, and keeps what it is told."""

    def __init__(self, change: Callable[[], object] = lambda: None, at: int = 4) -> None:
        self.change, self.left, self.said = change, at, ""

    def on_start(self, **_: Any) -> None: ...

    def on_note(self, text: str) -> None:
        self.said += text

    def on_step(self, **_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            self.change()

    def on_epoch(self, row: Any) -> None: ...


def objective(prior: str = "gaussian", **options: Any) -> ELBO:
    return ELBO(Case(prior, "mean-field", "categorical").bnn(**options), num_data=N)


def trained(backend: str, elbo: ELBO, **options: Any) -> tuple[dict[str, Tensor], History]:
    """By a backend, or by autograd on its noise."""
    loader = TensorLoader(*Case("gaussian", "mean-field", "categorical").data(N), BATCH, seed=2)
    options = {"callback": Watcher(), "optimizer": partial(Adam, lr=0.05), **options}
    if backend.startswith("autograd"):
        elbo = use_counter_noise(elbo) if backend == "autograd for compiled" else elbo
        backend = "autograd"
    rows = fit(elbo, loader, loader, epochs=EPOCHS, **{"backend": backend, **options})
    return {n: t.clone() for n, t in elbo.bnn.state_dict().items() if n.startswith("post")}, rows


# ----------------------------------------------------------------------------------- the backend


def test_a_backend_that_goes_on_in_another_way_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a graph could not be captured, which is known after a few steps."""
    module = sys.modules["bayesify.training.fit"]
    made = module.make_backend

    def changing(*arguments: Any, **options: Any) -> Any:
        backend = made(*arguments, **options)
        step = backend.step

        def changed(*args: Any, **more: Any) -> Any:
            backend.description = "as before, but not captured: a reason"
            return step(*args, **more)

        backend.step = changed
        return backend

    monkeypatch.setattr(module, "make_backend", changing)
    watcher = Watcher()
    trained("closed-form", objective(), callback=watcher)
    first, second = watcher.said.split("backend: ")[1:]
    assert first.startswith("closed-form (gaussian prior)")
    assert second.startswith("as before, but not captured: a reason")


# ---------------------------------------------------------------------------------- the history


@each_backend
@pytest.mark.parametrize("prior", ["gaussian", "scale-mixture"])
def test_the_history_is_autograds(backend: str, prior: str) -> None:
    rows = trained(backend, objective(prior))[1]
    expected = trained(f"autograd for {backend}", objective(prior))[1]
    for row, wanted in zip(rows, expected, strict=True):
        assert list(row) == list(wanted)
        # The KL of the last minibatch stands for those of the others.
        assert row["loss"] == pytest.approx(row["nll"] + row["kl"] / N)
        assert row["loss"] == pytest.approx(wanted["loss"], rel=0.1)
        others = {n for n in wanted if n not in ("loss", *test_resume.TIMES)}
        assert {n: row[n] for n in others} == pytest.approx({n: wanted[n] for n in others})


@needs_compiler
def test_compiled_noise_is_another_of_the_same_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    (compiled, one), (closed, two) = (
        trained(backend, objective()) for backend in ("compiled", "closed-form")
    )
    assert 1e-3 < distance(compiled, closed) < 2.0
    assert one[-1]["kl"] == pytest.approx(two[-1]["kl"], rel=0.2)


# ------------------------------------------------------------------------------------ resuming

SETUPS = {
    "adam": Setup(
        with_dropout,
        fit=(("scheduler", cosine), ("kl_warmup_epochs", 1.5), ("rho_lr_scale", 3.0)),
    ),
    "pruned, momentum": Setup(
        pruned=0.6,
        case=Case("scale-mixture", "mean-field", "gaussian-learned"),
        fit=(("optimizer", partial(SGD, lr=0.01, momentum=0.9)),),
    ),
    "local": Setup(
        case=Case("laplace", "mean-field", "categorical"),
        fit=(("estimator", LocalReparameterization()),),
    ),
    "two samples, dropout": Setup(
        with_dropout,
        Case("scale-mixture", "mean-field", "gaussian-learned"),
        elbo=(("num_samples", 2),),
        fit=(("scheduler", cosine), ("rho_lr_scale", 3.0)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "compiled") for name in SETUPS),
        *((name, "closed-form") for name in ("adam", "pruned, momentum", "two samples, dropout")),
    ],
)
def test_resumed_is_uninterrupted(backend: str, name: str, tmp_path: Path) -> None:
    if backend == "compiled" and not has_compiler:
        pytest.skip("there is no C++ compiler here")
    setup = SETUPS[name]
    setup = replace(setup, fit=(*setup.fit, ("backend", backend)))
    test_resume.test_resumed_is_uninterrupted(setup, tmp_path)


def begun(folder: Path, backend: str) -> Setup:
    """A run that crashed in its second epoch."""
    setup = SETUPS["adam"]
    with pytest.raises(CrashError):
        setup.run(folder, callback=Stop(crash, 1, 1), backend=backend)
    return setup


@needs_compiler
def test_without_a_compiler_a_compiled_run_goes_on_with_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elbos, watcher = [SETUPS["adam"].objective() for _ in range(2)], Watcher()
    for elbo, options in zip(elbos, ({}, {"callback": watcher}), strict=True):
        setup = begun(tmp_path / str(len(options)), "compiled")
        if options:
            compiler.compiled_library.cache_clear()
            monkeypatch.setattr(compiler, "find_compiler", lambda: None)
        setup.run(tmp_path / str(len(options)), elbo, **options)
    assert "not compiled, slow" in watcher.said
    one, two = (dict(elbo.bnn.state_dict()) for elbo in elbos)
    assert distance(one, two) < 1e-12


@pytest.mark.parametrize(
    ("backend", "other"),
    [pytest.param("compiled", "closed-form", marks=needs_compiler), ("closed-form", "compiled")],
)
def test_another_kind_of_noise_is_refused(backend: str, other: str, tmp_path: Path) -> None:
    setup = begun(tmp_path, backend)
    content = (tmp_path / NAME).read_bytes()
    with pytest.raises(
        ValueError, match=rf'this run began with the noise of .*"{backend}".*got backend="{other}"'
    ):
        setup.run(tmp_path, backend=other)
    assert (tmp_path / NAME).read_bytes() == content


def test_runs_from_before_go_on_with_the_generators_noise(tmp_path: Path) -> None:
    setup = begun(tmp_path / "old", "closed-form")
    tensors, meta = read_tensors(tmp_path / "old" / NAME)
    del meta["position"]["noise"]
    write_tensors(tmp_path / "old" / NAME, tensors, meta)
    watcher = Watcher()
    rows = setup.run(tmp_path / "old", callback=watcher)
    assert timeless(rows) == timeless(setup.run(tmp_path / "new", backend="closed-form"))
    test_resume.check_same_checkpoint(tmp_path / "old", tmp_path / "new")
    assert "closed-form" in watcher.said


@each_backend
def test_what_is_not_finite_is_not_learnt(backend: str, tmp_path: Path) -> None:
    setup = begun(tmp_path, backend)
    content = (tmp_path / NAME).read_bytes()
    inputs, targets = setup.case.data(N)
    inputs = inputs.index_fill(0, torch.tensor([N - 1]), torch.nan)
    elbo, steps = setup.objective(), Watcher()
    with pytest.raises(NonFiniteLossError, match=r"output at step \d+ \(epoch 2, minibatch 3\)"):
        fit(
            elbo,
            list(zip(inputs.split(BATCH), targets.split(BATCH), strict=True)),
            **{**dict(setup.fit), "epochs": EPOCHS, "resume": True, "checkpoint_dir": tmp_path},
            callback=steps,
        )
    assert steps.left == 2, "the two minibatches before it were learnt"
    assert all(bool(parameter.isfinite().all()) for parameter in elbo.parameters())
    assert (tmp_path / NAME).read_bytes() == content


# --------------------------------------------------------------------- what changes along the way


def one_cycle(optimizer: Optimizer, total: int) -> LRScheduler:
    """The rates, of which rho's is the last, and the momentum or Adam's first beta."""
    return OneCycleLR(optimizer, max_lr=[0.1, 0.2], total_steps=total)


@each_backend
@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [
        (partial(Adam, lr=0.05), cosine),
        (partial(Adam, lr=0.05), one_cycle),
        (partial(SGD, lr=0.05, momentum=0.9), one_cycle),
    ],
    ids=["adam, cosine", "adam, one cycle", "momentum, one cycle"],
)
def test_schedules_are_followed(
    backend: str,
    optimizer: Callable[..., Optimizer],
    schedule: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: Any = {"optimizer": optimizer, "scheduler": schedule, "rho_lr_scale": 2.0}
    found, rows = trained(backend, objective(), **options)
    expected, wanted = trained(f"autograd for {backend}", objective(), **options)
    assert distance(found, expected) < 1e-12
    assert [r["learning_rate"] for r in rows] == [r["learning_rate"] for r in wanted]


def scaled(elbo: ELBO) -> None:
    with torch.no_grad():
        elbo.bnn.posterior.mean.mul_(0.5)


def put_back(elbo: ELBO) -> None:
    elbo.bnn.load_state_dict(objective().bnn.state_dict())


def pruned(elbo: ELBO) -> None:
    posterior = elbo.bnn.posterior
    posterior.mask = torch.arange(posterior.num_weights) % 2 == 0
    with torch.no_grad():
        posterior.mean.masked_fill_(~posterior.mask, 0.0)


def cooled(elbo: ELBO) -> None:
    elbo.temperature = 0.3


def another_prior(elbo: ELBO) -> None:
    elbo.bnn.prior = Gaussian(0.1)


@each_backend
@pytest.mark.parametrize(
    "change", [scaled, put_back, pruned, cooled, another_prior], ids=lambda c: c.__name__
)
def test_what_a_callback_changes_is_heeded(
    backend: str, change: Callable[[ELBO], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for kind in (backend, f"autograd for {backend}"):
        elbo = objective()
        watcher = Watcher(partial(change, elbo))
        results.append(trained(kind, elbo, callback=watcher)[0])
    assert results[0].keys() == results[1].keys()
    assert distance(*({n: v.double() for n, v in state.items()} for state in results)) < 1e-12


@each_backend
def test_gradients_from_before_are_forgotten(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for before in (None, 100.0):
        elbo = objective()
        optimizer = SGD(elbo.parameters(), lr=0.1)
        for parameter in elbo.parameters():
            parameter.grad = None if before is None else torch.full_like(parameter, before)
        results.append(trained(backend, elbo, optimizer=optimizer)[0])
    assert distance(*results) == 0.0
