"""The free energy, next to that of a network whose means are untrained."""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.test_resume import Stop, ctrl_c
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.optim import Adam

import bayesify as bf
from bayesify.datasets import TensorLoader
from bayesify.noise.keys import NoiseKey, Stream
from bayesify.training.free_energy import (
    FirstExamples,
    UntrainedFreeEnergy,
    is_above_untrained,
    untrained_free_energy,
)

N = 2000


def wide_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 50), nn.ReLU(), nn.Linear(50, 3))


def examples(count: int = 256) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 6, generator=generator)
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 1).long()


def untrained(elbo: bf.ELBO) -> float:
    found = untrained_free_energy(elbo, [examples()])
    assert found is not None
    assert 0.0 <= found.error < 0.2
    return found.value


@torch.no_grad()
def by_hand(elbo: bf.ELBO, std: Tensor) -> float:
    """The free energy of means 0 with these stds, over many samples."""
    bnn = elbo.bnn
    q = bf.MeanFieldGaussian(torch.zeros_like(std), std)
    noise = torch.randn(100, len(std), generator=torch.Generator().manual_seed(2))
    draw = q.draw(noise)
    kl = bf.kl_divergence(q, bnn.weight_prior, draw)
    inputs, targets = examples()
    nlls = [elbo.nll(bnn.run_with(w, inputs).unsqueeze(0), targets) for w in draw.weights]
    return float(torch.stack(nlls).mean() + kl / elbo.num_data)


PRIORS: list[tuple[bf.Prior, float]] = [  # and the std of the least KL
    (bf.Gaussian(1.0), 1.0),
    (bf.Laplace(0.5), 0.56),
    (bf.ScaleMixture(0.2, 1.0, 0.05), 0.055),
    (bf.ScaleMixture(0.75, 1.0, math.exp(-7)), 0.95),  # the KL has two minima
]


@pytest.mark.parametrize(("prior", "cheapest"), PRIORS, ids=str)
def test_no_std_of_a_grid_is_better(prior: bf.Prior, cheapest: float) -> None:
    elbo = bf.ELBO(bf.BayesianModule(wide_net(), prior=prior), num_data=N)
    stds = torch.cat([torch.logspace(-4, 0.5, 12), torch.tensor([cheapest])])
    best = math.inf
    for of_last in stds:
        for of_others in (of_last, torch.tensor(cheapest)):
            std = of_others.repeat(503)
            std[-153:] = of_last
            best = min(best, by_hand(elbo, std))
    assert untrained(elbo) == pytest.approx(best, abs=0.06)


def test_many_weights_for_few_examples_cost_no_kl() -> None:
    net = nn.Sequential(nn.Linear(6, 3000), nn.ReLU(), nn.Linear(3000, 3))
    elbo = bf.ELBO(bf.BayesianModule(net, prior=bf.Gaussian(0.02)), num_data=10)
    draws = bf.BayesianModule(net, prior=bf.Gaussian(0.02), init_std=0.02)
    with torch.no_grad():
        draws.posterior.mean.zero_()
    inputs, targets = examples()
    outputs, _ = draws.sample_outputs(inputs, NoiseKey(1, Stream.PREDICTION, 0), range(200))
    nll = -bf.CategoricalLikelihood().log_prob(outputs.detach(), targets).mean()
    assert untrained(elbo) < float(nll) + 0.02


def test_of_very_many_weights_it_is_not_searched() -> None:
    net = nn.Linear(10_000_001, 1, bias=False)
    elbo = bf.ELBO(bf.BayesianModule(net, likelihood=bf.GaussianLikelihood()), num_data=N)
    assert untrained_free_energy(elbo, [(torch.zeros(1, 10_000_001), torch.zeros(1, 1))]) is None


WIDTH = 256


def one_layer(prior: bf.Prior, mask: Tensor | None = None) -> UntrainedFreeEnergy:
    """That of a linear layer whose every example meets one weight, at 10 w."""
    net = nn.Linear(WIDTH, 1, bias=False)
    bnn = bf.BayesianModule(net, prior=prior, likelihood=bf.GaussianLikelihood(1.0))
    bnn.posterior.mask = mask
    elbo = bf.ELBO(bnn, num_data=WIDTH)
    found = untrained_free_energy(elbo, [(10.0 * torch.eye(WIDTH), torch.zeros(WIDTH, 1))])
    assert found is not None
    return found


@pytest.mark.parametrize("kept", [1.0, 0.5])
def test_a_linear_layer_has_the_free_energy_of_the_formula(kept: float) -> None:
    """std^2 = 1 / 101 is exact: half of the KL, in the search too, leads to .1 more or to less."""
    mask = None if kept == 1.0 else torch.arange(WIDTH) < kept * WIDTH
    found = one_layer(bf.Gaussian(1.0), mask)
    exact = 0.5 * math.log(2.0 * math.pi) + kept * 0.5 * math.log(101.0)
    assert found.value == pytest.approx(exact, abs=0.04)
    # The nll of a sample is half a sum of squares; its expectation is half of the kept weights'.
    deviation = 0.5 * kept * 100 / 101 * math.sqrt(2.0 / (kept * WIDTH))
    assert found.error == pytest.approx(deviation / math.sqrt(8.0), rel=0.5)


def test_quadrature_is_the_closed_form() -> None:
    mixture = bf.ScaleMixture(0.5, 1.0, 1.0 - 1e-9)  # a Gaussian, without a closed form
    assert one_layer(mixture).value == pytest.approx(one_layer(bf.Gaussian(1.0)).value, abs=3e-4)


def test_each_group_has_what_its_prior_asks_for() -> None:
    narrow = bf.ByGroup({"2.*": bf.Gaussian(0.02), "*": bf.Gaussian(1.0)})
    elbo = bf.ELBO(bf.BayesianModule(wide_net(), prior=narrow), num_data=N)
    std = torch.ones(503)
    std[-153:] = 0.02
    assert untrained(elbo) == pytest.approx(by_hand(elbo, std), abs=0.02)


def test_only_the_last_layer_has_a_number_of_its_own() -> None:
    torch.manual_seed(0)
    deep = nn.Sequential(*wide_net()[:2], nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 3))
    narrow = bf.ByGroup({"2.*": bf.Gaussian(0.02), "*": bf.Gaussian(1.0)})
    elbo = bf.ELBO(bf.BayesianModule(deep, prior=narrow), num_data=N)
    std = torch.ones(350 + 2550 + 153)
    std[350:2900] = 0.02
    best = math.inf
    for of_last in torch.logspace(-2, 0.5, 11):
        std[2900:] = of_last
        best = min(best, by_hand(elbo, std))
    assert untrained(elbo) == pytest.approx(best, abs=0.1)  # two samples hardly know the best std


@pytest.mark.parametrize("options", [{"min_size": 2}, {"min_size": 400, "per_parameter": False}])
def test_a_learned_width_costs_nothing(options: dict[str, Any]) -> None:
    # The prior's width follows that of the posterior, which may then be as narrow as it likes.
    bnn = bf.BayesianModule(wide_net(), prior=bf.EmpiricalGaussian(**options))
    assert untrained(bf.ELBO(bnn, num_data=N)) == pytest.approx(math.log(3), abs=0.02)


def test_the_network_stays_as_it_is() -> None:
    net = nn.Sequential(
        nn.Linear(6, 5), nn.BatchNorm1d(5, affine=False), nn.Dropout(), nn.Linear(5, 3)
    )
    bnn = bf.BayesianModule(net).train()
    before = {name: value.clone() for name, value in bnn.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    untrained(bf.ELBO(bnn, num_data=N))
    assert bnn.net.training
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in bnn.state_dict().items():
        assert torch.equal(value, before[name]), name


class Editing(nn.Module):
    """A network that edits its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mul_(0.5))


def test_inputs_that_a_network_edits_are_the_same_again() -> None:
    inputs, targets = examples()
    elbo = bf.ELBO(bf.BayesianModule(Editing()), num_data=N)
    kept = inputs.clone()
    assert untrained_free_energy(elbo, [(inputs, targets)]) is not None
    assert torch.equal(inputs, kept)


class Scaled(nn.Module):
    """A network with arguments that are no rows of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(
        self, x: Tensor, shift: Tensor | None = None, scale: float | None = None, mask: Any = None
    ) -> Tensor:
        assert mask is None
        x = x if shift is None else x + shift  # (1, 6): the same for all rows
        return self.layer(x if scale is None else scale * x)


class Packed(nn.Module):
    """A network of packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(6, 4), nn.Linear(4, 3)

    def forward(self, sequences: PackedSequence) -> Tensor:
        return self.head(self.cells(sequences)[1][0][0])


def of_lengths(x: Tensor) -> PackedSequence:
    return pack_sequence([row.expand(1 + place % 3, 6) for place, row in enumerate(x)], False)


INPUTS: dict[str, tuple[type[nn.Module], Any]] = {
    "None and a number": (Scaled, lambda x: {"x": x, "scale": 2.0, "mask": None}),
    "one row for all": (Scaled, lambda x: (x, torch.ones(1, 6))),
    "packed sequences": (Packed, lambda x: (of_lengths(x),)),
}


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_of_every_kind_are_measured(kind: str) -> None:
    """300 examples in a minibatch, more than are needed: some inputs cannot be cut."""
    net, made = INPUTS[kind]
    x, y = (torch.cat([part, part[:44]]) for part in examples())
    elbo = bf.ELBO(bf.BayesianModule(net()), num_data=300)
    [row] = bf.fit(elbo, [(made(x), y)], epochs=1)
    assert row["free_energy_untrained"] is not None
    first = FirstExamples()
    first.add(made(x), y)
    assert first.are_enough
    assert [len(targets) for _, targets in first.minibatches] == [300]


class OfFixedSize(nn.Module):
    """A network that needs minibatches of 100 examples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.view(100, 6))


class OnlyTrained(OfFixedSize):
    """A network without an evaluation mode."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            raise NotImplementedError("training only")
        return self.layer(x)


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
@pytest.mark.parametrize("net", [OfFixedSize, OnlyTrained])
def test_training_is_not_lost_where_a_network_cannot_be_measured(
    net: type[nn.Module], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = TensorLoader(*examples(300), 100)
    elbo = bf.ELBO(bf.BayesianModule(net()), num_data=300)
    [row] = bf.fit(elbo, loader, epochs=1, checkpoint_dir=tmp_path)
    assert row["free_energy"] is not None
    assert row["free_energy_untrained"] is None
    assert (tmp_path / "checkpoint.safetensors").exists()
    assert "free energy with untrained means could not be measured" in capsys.readouterr().err
    assert elbo.bnn.net.training
    elbos = [bf.ELBO(bf.BayesianModule(net(), seed=k), num_data=300) for k in (0, 1)]
    bf.fit_replicas(elbos, [loader, loader], epochs=1)
    assert "network 1: the free energy with untrained means" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_examples_are_copied_before_a_network_edits_them() -> None:
    inputs, targets = examples()
    elbo = bf.ELBO(bf.BayesianModule(Editing()), num_data=256)
    [row] = bf.fit(elbo, [(inputs.clone(), targets)], epochs=1)
    found = untrained_free_energy(elbo, [(inputs, targets)])
    assert found is not None
    assert row["free_energy_untrained"] == found.value


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_a_run_resumed_in_its_last_epoch_measures_the_same(tmp_path: Path) -> None:
    def trained_in(folder: str, **options: Any) -> bf.training.History:
        elbo = bf.ELBO(bf.BayesianModule(wide_net()), num_data=240)
        loader = TensorLoader(*examples(240), 80)
        return bf.fit(elbo, loader, epochs=1, checkpoint_dir=tmp_path / folder, **options)

    with pytest.raises(KeyboardInterrupt):
        trained_in("stopped", callback=Stop(ctrl_c, 0, 1))
    [resumed], [whole] = trained_in("stopped", resume=True), trained_in("whole")
    assert whole["free_energy_untrained"] is not None
    assert resumed["free_energy_untrained"] == whole["free_energy_untrained"]


@pytest.mark.parametrize("targets", [torch.tensor(1), [0] * 8], ids=str)
def test_wrong_targets_reach_the_step_which_explains_them(targets: Any) -> None:
    FirstExamples().add(torch.ones(8, 6), targets)  # no error


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "made",
    [
        lambda x: {"x": x, "scale": 3},
        lambda x: (x, None),
        lambda x: (x, x[:1]),
        lambda x: (x, torch.tensor(2.0)),
        lambda x: x.to_sparse(),
        lambda x: torch.nested.nested_tensor(list(x)),
        lambda x: UserDict(x=x),
    ],
)
def test_only_rows_are_cut(made: Callable[[Tensor], Any]) -> None:
    first = FirstExamples()
    for _ in range(2):
        first.add(made(torch.ones(200, 6)), torch.ones(200))
    assert [len(targets) for _, targets in first.minibatches] == [200, 200]
    assert first.are_enough
    first.add(made(torch.ones(200, 6)), torch.ones(200))
    assert len(first.minibatches) == 2


class Own(bf.Prior):
    """A prior with a scale for each weight."""

    def __init__(self, size: int) -> None:
        self.scale = torch.ones(size)

    def log_prob(self, weights: Tensor) -> Tensor:
        return -0.5 * (weights / self.scale).square()


class OwnELBO(bf.ELBO):
    """An objective of its own."""


def test_where_it_would_be_no_comparison_there_is_none() -> None:
    learned = bf.GaussianLikelihood(1.0, learn_std=True)
    made = {
        "no examples": (bf.ELBO(bf.BayesianModule(wide_net()), num_data=N), []),
        **{
            name: (bf.ELBO(bf.BayesianModule(wide_net(), **options), num_data=N), [examples()])
            for name, options in {
                "point estimate": {"posterior": bf.Delta},
                "other means": {"prior_mean": "initial"},
                "own prior": {"prior": Own(503)},
                "learned noise": {"likelihood": learned},
                "other parameters": {"exclude": ["2.*"]},
            }.items()
        },
        "own objective": (OwnELBO(bf.BayesianModule(wide_net()), num_data=N), [examples()]),
    }
    for name, (elbo, minibatches) in made.items():
        assert untrained_free_energy(elbo, minibatches) is None, name


def test_only_what_is_above_it_is_above_it() -> None:
    for own, above in ((2.0, False), (2.5, False), (2.6, True), (None, False)):
        row = {"free_energy": own, "free_energy_untrained": 2.5}
        assert is_above_untrained(row) is above
        assert not is_above_untrained({**row, "free_energy_untrained_error": 0.06})


def trained(capsys: pytest.CaptureFixture[str], **options: Any) -> tuple[bf.training.History, str]:
    bnn = bf.BayesianModule(wide_net(), prior=bf.Gaussian(1.0), init_std=options.pop("init_std"))
    inputs, targets = examples(N)
    elbo = bf.ELBO(bnn, num_data=N, temperature=options.pop("temperature", 1.0))
    loader = TensorLoader(inputs, targets, 250)
    rows = bf.fit(elbo, loader, optimizer=partial(Adam, lr=0.02), **options)
    return rows, capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_a_run_above_it_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    # The KL is hardly weighed, so that narrow weights stay narrow: a good fit at a great price.
    rows, printed = trained(capsys, epochs=10, init_std=1e-4, temperature=1e-3)
    last = rows[-1]
    assert last["free_energy"] == pytest.approx(last["nll"] + last["kl"] / N)
    assert last["nll"] < 0.3
    assert is_above_untrained(last)
    assert "worth less than no training" in printed
    assert all(row["free_energy_untrained"] is None for row in rows[:-1])


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_a_run_below_it_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    rows, printed = trained(capsys, epochs=60, init_std=0.3)
    assert not is_above_untrained(rows[-1])
    assert "free energy" in printed
    assert "worth less" not in printed


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_the_line_names_the_network_of_several(capsys: pytest.CaptureFixture[str]) -> None:
    made = [bf.BayesianModule(wide_net(), init_std=std, seed=7) for std in (0.3, 1e-4)]
    elbos = [bf.ELBO(bnn, num_data=256) for bnn in made]
    histories = bf.fit_replicas(elbos, TensorLoader(*examples(), 64), epochs=1)
    assert all(is_above_untrained(rows[-1]) for rows in histories)
    lines = capsys.readouterr().err.splitlines()
    one, two = [line for line in lines if "free energy" in line]
    assert one.startswith("network 0: free energy")
    assert two.startswith("network 1: free energy")
    assert f" {histories[1][-1]['free_energy']:.2f} nats" in two


def test_the_search_takes_about_as_many_examples_as_an_epoch_of_fifteen_thousand() -> None:
    """So that a short training is not followed by a longer search."""
    seen: list[int] = []

    class Counting(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            seen.append(len(inputs))
            return super().forward(inputs)

    untrained(bf.ELBO(bf.BayesianModule(Counting(6, 3)), num_data=N))
    assert sum(seen) < 16_000
    assert seen[-8:] == [256] * 8, "the result takes all examples"
    seen.clear()
    inputs, targets = examples()
    elbo = bf.ELBO(bf.BayesianModule(Counting(6, 3)), num_data=N)
    untrained_free_energy(elbo, [([inputs], targets)])
    assert sum(seen) < 16_000, "inputs in a list are cut too"
