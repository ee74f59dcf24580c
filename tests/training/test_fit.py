"""fit(): what it optimises, what it reports, and what its randomness depends on."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tests.cases import Case, normals
from tests.loops import loop_over
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from bayesify import (
    ELBO,
    BayesianModule,
    Callback,
    CategoricalLikelihood,
    fit,
    fit_replicas,
    kl_divergence,
)
from bayesify.datasets import TensorLoader
from bayesify.distributions.posteriors import MeanFieldGaussian
from bayesify.training.history import EpochRow
from bayesify.training.minibatches import pair_of
from bayesify.training.schedules import constant, cosine

CASE = Case("gaussian", "mean-field", "categorical")
N = 22
pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")


class Recorder(ELBO):
    """An ELBO that remembers what it was asked, and is silent."""

    def __init__(self, bnn: BayesianModule, **options: Any) -> None:
        super().__init__(bnn, **{"num_data": N, **options})
        self.inputs: list[Tensor] = []
        self.scales: list[float] = []
        self.kls: list[float] = []
        self.outputs: list[Tensor] = []

    def forward(self, inputs: Tensor, targets: Tensor, **options: Any) -> Any:
        self.inputs.append(inputs)
        self.scales.append(options["kl_scale"])
        if isinstance(self.bnn.posterior, MeanFieldGaussian):
            self.kls.append(float(kl_divergence(self.bnn.posterior, self.bnn.prior).detach()))
        terms = super().forward(inputs, targets, **options)
        self.outputs.append(terms.outputs)
        return terms


class Rates:
    """A callback that notes the learning rates after every step."""

    def __init__(self, lr: float | Tensor = 0.5) -> None:
        self.lr = lr
        self.made: list[Optimizer] = []
        self.rates: list[list[float]] = []

    def factory(self, groups: list[dict[str, Any]]) -> Optimizer:
        self.made.append(SGD(groups, lr=self.lr, foreach=False))
        return self.made[0]

    def on_start(self, **_: Any) -> None: ...

    def on_step(self, **_: Any) -> None:
        self.rates.append([float(group["lr"]) for group in self.made[0].param_groups])

    def on_epoch(self, row: Any) -> None: ...


def loader(batch_size: int = 8, *, shuffle: bool = False) -> TensorLoader:
    return TensorLoader(*CASE.data(N), batch_size, shuffle=shuffle, seed=CASE.bnn().seed)


# ---------------------------------------------------------------------------------- the history


def test_a_row_is_what_the_epoch_came_to() -> None:
    x, y = CASE.data(N)
    test_x, test_y = normals(9, 3, seed=8), torch.arange(9) % 4
    elbo = Recorder(CASE.bnn())
    by_hand = copy.deepcopy(elbo)
    by_hand.fused = False
    test = TensorLoader(test_x, test_y, 4, shuffle=False)
    rows = fit(elbo, loader(), test, epochs=3, optimizer=partial(SGD, lr=0.3))
    optimizer = SGD(by_hand.parameters(), lr=0.3)
    for epoch, row in enumerate(rows):
        loss = nll = wrong = 0.0
        for index in torch.arange(N).split(8):  # 8, 8 and 6 data: means are over the data
            terms = by_hand(x[index], y[index], kl_scale=1.0)
            optimizer.zero_grad()
            terms.loss.backward()
            optimizer.step()
            said = terms.outputs[0]
            nll += float(nn.functional.cross_entropy(said, y[index], reduction="sum"))
            loss += float(terms.loss.detach()) * len(index)
            wrong += int((said.argmax(-1) != y[index]).sum())
        plain = by_hand.bnn.to_module()
        expected = {
            "epoch": epoch + 1,
            "loss": loss / N,
            "nll": nll / N,
            "kl": by_hand.kls[-1],
            "penalty": 0.0,
            "train_error": 100 * wrong / N,
            "validation_error": 100 * int((plain(test_x).argmax(-1) != test_y).sum()) / 9,
            "validation_nll": float(nn.functional.cross_entropy(plain(test_x), test_y).detach()),
            "std_median": float(by_hand.bnn.posterior.std.detach().median()),
            "learning_rate": 0.3,
        }
        assert expected == pytest.approx({name: row[name] for name in expected}, rel=1e-12)
        assert row["seconds"] > 0
        assert row["data_per_second"] * (
            row["seconds"] - (epoch and rows[epoch - 1]["seconds"])
        ) == (pytest.approx(N))
    assert elbo.step == 9
    assert torch.equal(elbo.bnn.posterior.mean, by_hand.bnn.posterior.mean)
    assert [row["train_error"] for row in rows] != [row["validation_error"] for row in rows]


def test_at_the_end_the_loss_is_nll_plus_kl_over_n() -> None:
    for temperature, samples in ((1.0, 1), (0.5, 3)):
        elbo = Recorder(CASE.bnn(), temperature=temperature, num_samples=samples)
        row = fit(elbo, loader(N), epochs=3, kl_warmup_epochs=2)[-1]
        assert row["loss"] == pytest.approx(row["nll"] + temperature * row["kl"] / N, rel=1e-12)
        assert row["kl"] == pytest.approx(elbo.kls[-1], rel=1e-12)
        assert row["validation_error"] is row["validation_nll"] is None
        wrong = elbo.outputs[-1].argmax(-1) != CASE.data(N)[1]
        assert wrong.shape == (samples, N)
        assert row["train_error"] == pytest.approx(100 * float(wrong.double().mean()))


def test_progress_is_a_line_an_epoch_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    rows = fit(Recorder(CASE.bnn()), loader(), epochs=2)
    out, err = capsys.readouterr()
    assert out == ""
    step, *lines = err.splitlines()
    assert step.startswith("backend: autograd (the objective is a Recorder)")
    assert [line.split()[:2] for line in lines] == [["epoch", "1/2"], ["epoch", "2/2"]]
    for line, row in zip(lines, rows, strict=True):
        assert f"loss {row['loss']:.4f}  nll {row['nll']:.4f}  kl {row['kl']:,.0f}" in line
        assert f"train error {row['train_error']:.2f}" in line


def test_without_progress_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(fit(Recorder(CASE.bnn()), loader(), epochs=2, progress=False)) == 2
    assert capsys.readouterr() == ("", "")


class Epochs(Callback):
    """Notes the epochs; the other methods are those of the base class."""

    def __init__(self) -> None:
        self.seen: list[float | None] = []

    def on_epoch(self, row: EpochRow) -> None:
        self.seen.append(row["epoch"])


def test_a_callback_overrides_what_it_needs() -> None:
    callback = Epochs()
    fit(Recorder(CASE.bnn()), loader(), epochs=2, callback=callback)
    assert callback.seen == [1, 2]


def test_a_misspelt_method_of_a_callback_is_refused() -> None:
    with pytest.raises(TypeError, match=r"the methods on_start, .*, and not on_epochs of Stop"):
        type("Stop", (Callback,), {"on_epochs": lambda self, row: None})  # noqa: ARG005
    with pytest.raises(TypeError, match="and not on_step_end of Stop"):
        type("Stop", (Epochs,), {"on_step_end": lambda self: None})  # noqa: ARG005
    own = {"on_best": lambda self: None, "on_steps": 7}  # noqa: ARG005
    assert type("Own", (Epochs,), own)().seen == []  # called by the class itself; no method
    others = type("Others", (), {"on_train_end": lambda self: None})  # noqa: ARG005
    both = {"on_train_end": lambda self: None, "on_note": lambda self, text: None}  # noqa: ARG005
    assert type("Both", (Epochs, others), both)().seen == []


@loop_over("bad", [print, Epochs, object()])
def test_what_is_no_callback(bad: Any) -> None:
    elbo = Recorder(CASE.bnn())
    with pytest.raises(TypeError, match=r"must be an object with the methods.*bayesify\.Callback"):
        fit(elbo, loader(), callback=bad)
    with pytest.raises(TypeError, match=r"must be an object with the methods"):
        fit_replicas([elbo], loader(), callback=bad)
    assert not elbo.inputs


def test_a_callback_is_of_a_class_of_its_own_and_alone() -> None:
    with pytest.raises(TypeError, match=r"got Callback\(\); derive a class from bayesify"):
        Callback()  # type: ignore[abstract]
    with pytest.raises(TypeError, match=r"must be one object, got a list of 2; pass one whose"):
        fit(Recorder(CASE.bnn()), loader(), callback=[Epochs(), Epochs()])  # type: ignore[arg-type]


def test_progress_is_a_bool() -> None:
    bar: Any = "bar"
    for train in (
        lambda: fit(Recorder(CASE.bnn()), loader(), progress=bar),
        lambda: fit_replicas([Recorder(CASE.bnn())], loader(), progress=bar),
    ):
        with pytest.raises(TypeError, match=r"progress must be True.*got 'bar'; .*callback"):
            train()


def test_replicas_have_a_rate_and_may_be_silent(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {}
    for lr in (1e-3, 1e-2):
        elbos = [ELBO(CASE.bnn(), num_data=N)]
        [[row]] = fit_replicas(elbos, loader(), epochs=1, lr=lr, progress=False)
        rows[lr] = row["learning_rate"]
    assert rows == {1e-3: 1e-3, 1e-2: 1e-2}
    assert capsys.readouterr() == ("", "")


def test_a_minibatch_on_the_cpu_goes_to_the_device() -> None:
    meta = torch.device("meta")
    for minibatch in (
        (torch.ones(2, 3), torch.ones(2)),
        {"x": torch.ones(2), "labels": torch.ones(2)},
    ):
        inputs, targets = pair_of(minibatch, meta)
        [first] = inputs.values() if isinstance(inputs, dict) else [inputs]
        assert first.device == targets.device == meta


# ------------------------------------------------------------- warm-up, learning rates, optimisers


@loop_over(("warmup", "full_from"), [(0, 0), (1, 3), (1.5, 5), (2, 6), (9, 99)])
def test_the_warm_up_rises_and_then_the_objective_is_the_elbo(
    warmup: float, full_from: int
) -> None:
    elbo = Recorder(CASE.bnn())
    fit(elbo, loader(), epochs=4, kl_warmup_epochs=warmup)
    scales = elbo.scales
    assert len(scales) == 12
    assert scales[full_from:] == [1.0] * len(scales[full_from:])
    rising = [0.0, *scales[:full_from]]
    assert rising == sorted(set(rising))
    assert max(rising) < 1.0
    steps = [b - a for a, b in itertools.pairwise(rising)]
    assert steps == pytest.approx([1 / (3 * warmup + 1)] * len(steps))
    curved = Recorder(CASE.bnn())
    fit(curved, loader(), epochs=4, kl_warmup_epochs=warmup, kl_warmup_power=3.0)
    assert curved.scales == pytest.approx([scale**3 for scale in scales])


def test_rho_has_a_learning_rate_of_its_own() -> None:
    moved = {}
    for scale in (1.0, 7.0):
        elbo = Recorder(CASE.bnn())
        before = copy.deepcopy(elbo.bnn.posterior)
        fit(elbo, loader(N), epochs=1, optimizer=partial(SGD, lr=0.1), rho_lr_scale=scale)
        q = elbo.bnn.posterior
        moved[scale] = (q.mean - before.mean).detach(), (q.rho - before.rho).detach()
    assert torch.equal(moved[1.0][0], moved[7.0][0])
    assert moved[1.0][1].abs().min() > 0
    torch.testing.assert_close(moved[7.0][1], 7.0 * moved[1.0][1], rtol=1e-9, atol=1e-12)


@loop_over("lr", [0.5, torch.tensor(0.5, dtype=torch.float64)])
def test_rates_fall_by_the_minibatch_as_the_schedule_says(lr: Any) -> None:
    half_cosine = [0.25 * (1 + math.cos(math.pi * step / 6)) for step in range(1, 7)]
    by_schedule: dict[Any, list[float]] = {
        None: [0.5] * 6,
        constant: [0.5] * 6,
        cosine: half_cosine,
        (lambda optimizer, _: ExponentialLR(optimizer, 0.5)): [2.0**-i for i in range(2, 8)],
    }
    for schedule, expected in by_schedule.items():
        watch = Rates(copy.deepcopy(lr))
        rows = fit(
            Recorder(CASE.bnn()), loader(), epochs=2, optimizer=watch.factory, callback=watch,
            scheduler=schedule, rho_lr_scale=3.0,
        )  # fmt: skip
        assert [mean for mean, _ in watch.rates] == pytest.approx(expected, abs=1e-15)
        assert [rho for _, rho in watch.rates] == pytest.approx(
            [3 * e for e in expected], abs=1e-14
        )
        assert [row["learning_rate"] for row in rows] == pytest.approx([0.5, expected[2]])
    assert half_cosine[-1] == 0.0


def test_an_optimiser_is_an_instance_a_class_or_a_function() -> None:
    results = []
    for kind in ("instance", "class", "partial", "function", "default", "instances of both"):
        elbo = Recorder(CASE.bnn())
        instance = Adam(elbo.parameters(), lr=1e-3)
        options: dict[str, Any] = {
            "instance": {"optimizer": instance},
            "class": {"optimizer": Adam},
            "partial": {"optimizer": partial(Adam, lr=1e-3)},
            "function": {
                "optimizer": lambda groups: Adam([p for g in groups for p in g["params"]])
            },
            "default": {},
            "rate": {"lr": 1e-3},
            "instances of both": {"optimizer": instance, "scheduler": ExponentialLR(instance, 1.0)},
        }[kind]
        fit(elbo, loader(), epochs=2, **options)
        results.append(torch.cat([p.detach() for p in elbo.parameters()]))
    start = torch.cat([p.detach() for p in CASE.bnn().parameters()])
    assert (results[0] - start).abs().min() > 0
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-12, atol=1e-12)


def flat_sgd(groups: list[dict[str, Any]]) -> Optimizer:
    return SGD([p for group in groups for p in group["params"]])


@loop_over("several", [fit_replicas, fit])
def test_another_call_goes_on_with_other_orders_and_masks(several: Any) -> None:
    """Three epochs in three calls see the minibatches of three epochs in one."""

    class Recording(TensorLoader):
        def __iter__(self) -> Iterator[Any]:
            for pair in super().__iter__():
                seen.append(pair[0])
                yield pair

    def inputs_of(calls: int) -> list[Tensor]:
        seen.clear()
        elbo = ELBO(CASE.bnn(), num_data=N)
        data = Recording(*CASE.data(N), 8, seed=1)
        for _ in range(calls):
            several([elbo] if several is fit_replicas else elbo, data, epochs=3 // calls)
        return [*seen]

    seen: list[Tensor] = []

    one, three = inputs_of(1), inputs_of(3)
    assert len(one) == len(three) == 9
    assert all(map(torch.equal, one, three))
    assert not torch.equal(one[0], one[3])


@loop_over("when", ["on_epoch", "on_step"])
def test_a_callback_that_leaves_evaluation_mode_on_changes_nothing(when: str) -> None:
    class Measuring(Callback):
        def __init__(self, bnn: BayesianModule) -> None:
            setattr(self, when, lambda *_, **__: bnn.eval())

    modes: list[bool] = []
    bnn = CASE.bnn()
    bnn.net.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    fit(ELBO(bnn, num_data=N), loader(), epochs=3, callback=Measuring(bnn), backend="autograd")
    assert all(modes[:9])  # of the steps; a measurement follows


def test_a_body_that_is_trained_later_is_the_networks_own() -> None:
    net = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.ReLU(), nn.Linear(4, 3))
    one, two = (BayesianModule(net, seed=seed) for seed in (0, 1))
    before = net[0].weight.clone()
    x, y = torch.randn(32, 4), torch.randint(3, (32,))
    for bnn, own_loop in ((one, False), (two, True)):
        assert bnn.net[0].weight.data_ptr() == net[0].weight.data_ptr()
        bnn.net[0].requires_grad_(True)
        elbo = ELBO(bnn, num_data=32)
        if own_loop:
            optimizer = SGD(elbo.parameters(), lr=0.5)
            elbo(x, y).loss.backward()
            optimizer.step()
        else:
            fit(elbo, TensorLoader(x, y, 16), epochs=2, lr=0.1)
        assert not torch.equal(bnn.net[0].weight, before)
        assert torch.equal(net[0].weight, before)
    assert not torch.equal(one.net[0].weight, two.net[0].weight)


def test_errors_are_averaged_over_the_positions_that_have_a_class() -> None:
    texts = torch.full((8, 4), -100)
    texts[:6, :] = 1
    texts[6, 0] = 0  # 25 positions in all, one of them wrong, and a text of padding alone
    inputs = torch.zeros(8, 4, 3)

    class Ones(nn.Module):
        """Says class 1 of every position."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * 0.0 + torch.tensor([0.0, 5.0])

    for size in (1, 4, 8):
        likelihood = CategoricalLikelihood(ignore_index=-100)
        elbo = ELBO(BayesianModule(Ones(), likelihood=likelihood), num_data=8)
        data = TensorLoader(inputs, texts, size, shuffle=False)
        [row] = fit(elbo, data, data, epochs=1, lr=1e-9)
        assert row["train_error"] == row["validation_error"] == pytest.approx(4.0)
