"""Tables: scaling, weights of rows, rows in parts, and the recipe."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import bayesify as bf
from bayesify.distributions.posteriors import MeanFieldGaussian
from bayesify.distributions.softplus import inverse_softplus
from bayesify.noise.keys import NoiseKey, Stream
from bayesify.tabular import (
    Noise,
    Scaling,
    TableNet,
    TableRecipe,
    WeightedLikelihood,
)
from bayesify.training.progress import NoProgress

D = torch.float64


def table(num_rows: int = 12, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, numbers and classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, 3, generator=generator, dtype=D)
    y = x[:, :1] + 0.1 * torch.randn(num_rows, 1, generator=generator, dtype=D)
    return x, y, (y[:, 0] > 0).long()


def test_scaling_gives_mean_0_and_std_1_and_leaves_constant_columns() -> None:
    x = torch.tensor([[1.0, 7.0, -1e200, 1e-300], [2.0, 7.0, 1e200, 3e-300]], dtype=D)
    scaled = Scaling.of(x).standardised(x)
    expected = torch.tensor([[-1.0, 0.0, -1.0, -1.0], [1.0, 0.0, 1.0, 1.0]], dtype=D)
    torch.testing.assert_close(scaled, expected)


def test_scaling_of_a_large_offset_keeps_its_digits() -> None:
    x = 1e9 + torch.arange(100.0, dtype=D).unsqueeze(-1)
    scaled = Scaling.of(x).standardised(x)
    torch.testing.assert_close(scaled.std(correction=0), torch.ones((), dtype=D))


def test_scaling_sees_what_varies_little_far_from_0() -> None:
    x = 1e9 + 1e-6 * torch.arange(1000.0, dtype=D).unsqueeze(-1)
    scaled = Scaling.of(x).standardised(x)
    torch.testing.assert_close(scaled.std(correction=0).item(), 1.0, rtol=1e-3, atol=0.0)


def test_a_constant_column_far_from_0_is_constant() -> None:
    x = torch.full((7, 1), 0.1 + 1e8, dtype=D)
    assert Scaling.of(x).scale.item() == 1.0


def test_scaling_counts_a_row_of_weight_2_twice() -> None:
    x, _, _ = table()
    counts = torch.arange(1, 13)
    weighted, repeated = Scaling.of(x, counts), Scaling.of(x.repeat_interleave(counts, 0))
    torch.testing.assert_close(weighted.shift, repeated.shift, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(weighted.scale, repeated.scale, rtol=1e-13, atol=1e-13)


def free_energies(*, classes: bool, power: float = 1.0) -> tuple[float, float]:
    """Of a weighted table, and of the table with its rows repeated, at the same weights."""
    x, y, labels = table()
    targets = labels if classes else y
    counts = torch.arange(1, 13)
    recipe = TableRecipe(hidden=(4,))
    values = []
    for weighted in (True, False):
        bnn = recipe.module(3, 2 if classes else 1, noise=None if classes else "learned", seed=0)
        bnn.estimator = bf.WeightSampling()  # one draw for all rows, however many there are
        inputs, goal = x, targets
        if weighted:
            goal = WeightedLikelihood.packed(targets, counts.to(D) ** power)
            bnn.likelihood = WeightedLikelihood(bnn.likelihood)
        else:
            inputs, goal = (part.repeat_interleave(counts, 0) for part in (x, targets))
        loss = bf.ELBO(bnn, num_data=len(inputs))(inputs, goal).loss
        values.append(len(inputs) * float(loss.detach()))
    return values[0], values[1]


@pytest.mark.parametrize("classes", [False, True])
def test_the_free_energy_with_weights_is_that_of_repeated_rows(classes: bool) -> None:
    weighted, repeated = free_energies(classes=classes)
    assert weighted == pytest.approx(repeated, rel=1e-12)


def test_a_wrong_weight_is_caught() -> None:
    weighted, repeated = free_energies(classes=True, power=1.01)
    assert weighted != pytest.approx(repeated, rel=1e-6)


@pytest.mark.parametrize("weights", [[1.0, 0.0], [1.0, math.nan], [1.0, -1.0]])
def test_weights_that_are_not_positive_are_an_error(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="positive and finite; leave out the rows of weight 0"):
        WeightedLikelihood.packed(torch.zeros(2), torch.tensor(weights))
    with pytest.raises(ValueError, match=r"shape \(2,\), got shape \(1,\)"):
        WeightedLikelihood.packed(torch.zeros(2), torch.ones(1))


#: Weights that learn the same at once, each with noise of its own.
COPIES = 9


def weights(std: float) -> bf.BayesianModule:
    """y = w x + noise of std 1, with a prior N(0, 1): the mean field is exact."""
    net = nn.Linear(1, COPIES, bias=False, dtype=D)
    nn.init.zeros_(net.weight)
    return bf.BayesianModule(
        net,
        likelihood=bf.GaussianLikelihood(std=1.0),
        prior=bf.Gaussian(1.0),
        init_std=std,
        estimator=bf.LocalReparameterization(),
    )


def streamed(parts: int, *, plain: bool = False) -> tuple[Tensor, Tensor]:
    """Mean and std of each weight, learned from 40 examples in this number of parts."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 1, generator=generator, dtype=D)
    y = 0.7 * x + torch.randn(40, 1, generator=generator, dtype=D)
    bnn = weights(std=0.5)
    recipe = TableRecipe(steps=500, lr=0.03)
    for number, (a, b) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
        before = 0.0 if plain else float(number * len(a))
        recipe.fit(bnn, a, b.repeat(1, COPIES), num_before=before, callback=NoProgress())
    q = bnn.posterior
    assert isinstance(q, MeanFieldGaussian)
    mean, std = q.mean.detach(), q.std.detach()
    precision = float(1.0 + x.square().sum())
    exact_mean, exact_std = float((x * y).sum()) / precision, precision**-0.5
    return (mean - exact_mean) / exact_std, std / exact_std - 1.0


@pytest.mark.slow
def test_data_in_parts_give_the_exact_posterior_of_all() -> None:
    # The noise of the steps moves one weight's by some .08 and .04.
    shifts, growths = streamed(2)
    assert len(set(shifts.tolist())) == COPIES
    assert abs(shifts.mean()) < 0.1
    assert abs(growths.mean()) < 0.05


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_forgetting_the_parts_before_is_caught() -> None:
    shifts, growths = streamed(2, plain=True)
    assert abs(growths.mean()) > 0.3 or abs(shifts.mean()) > 1.0


@pytest.mark.parametrize("noise", ["learned", "input-dependent"])
def test_the_noise_starts_at_that_of_a_standardised_target(noise: str) -> None:
    net = TableNet(3, (4,), 2, noise=noise)  # type: ignore[arg-type]
    outputs = net(torch.randn(5, 3, generator=torch.Generator().manual_seed(0)))
    assert outputs.shape == (5, 2, 2)
    torch.testing.assert_close(nn.functional.softplus(outputs[..., 1]), torch.ones(5, 2))


@pytest.mark.parametrize("noise", [None, "learned", "input-dependent"])
def test_every_random_weight_gets_exact_noise_of_its_own(noise: str | None) -> None:
    bnn = TableRecipe(hidden=(4, 3)).module(3, 2, noise=noise, seed=0)  # type: ignore[arg-type]
    rows = bnn.summary(torch.zeros(5, 3, dtype=D))
    assert {row.treatment for row in rows} == {"exact"}
    points = {"log_relevance"} if noise is None else {"noise", "log_relevance"}
    assert set(dict(bnn.net.named_parameters())) == points


def test_learned_noise_is_found_for_each_target() -> None:
    x, _, _ = table(400)
    spread = torch.tensor([0.1, 0.5], dtype=D)
    y = x[:, :2] + spread * torch.randn(400, 2, generator=torch.Generator().manual_seed(5), dtype=D)
    recipe = TableRecipe(hidden=(8,), steps=600)
    bnn = recipe.module(3, 2, noise="learned", seed=0)
    recipe.fit(bnn, x, y, callback=NoProgress())
    found = bnn.predict(x[:1]).aleatoric[0].sqrt()
    torch.testing.assert_close(found, spread, rtol=0.25, atol=0.0)


def test_a_trained_net_can_be_saved_and_loaded(tmp_path) -> None:  # type: ignore[no-untyped-def]
    x, y, _ = table()
    recipe = TableRecipe(hidden=(4,), steps=5)
    bnn = recipe.module(3, 1, noise="learned", seed=0)
    with pytest.warns(bf.training.ConvergenceWarning):
        recipe.fit(bnn, x, y, weights=torch.full((12,), 2.0), callback=NoProgress())
    bf.save(bnn, tmp_path / "model.safetensors")
    again = bf.load(
        tmp_path / "model.safetensors", TableNet(3, (4,), 1, noise="learned", relevance=True)
    )
    assert torch.equal(again.predict(x).mean, bnn.predict(x).mean)


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_minibatches_go_round_the_table() -> None:
    x, y, _ = table(100)
    seen: list[int] = []

    class Watch(NoProgress):
        def on_start(self, *, epochs: int, batches: int, history: object) -> None:  # noqa: ARG002
            seen.extend([epochs, batches])

    recipe = TableRecipe(hidden=(4,), steps=60, batch_size=30)
    bnn = recipe.module(3, 1, noise="learned", seed=0)
    recipe.fit(bnn, x, y, callback=Watch())
    assert seen == [2, 48]


def test_recipes_for_many_rows_take_more_steps() -> None:
    assert TableRecipe.for_rows(100) == TableRecipe()
    assert TableRecipe().steps == 3000
    assert TableRecipe.for_rows(10**6).steps == 20 * math.ceil(10**6 / TableRecipe.batch_size)
    assert TableRecipe.for_rows(10**6, steps=7, lr=None).steps == 7
    assert TableRecipe.for_rows(100, has_classes=True, lr=0.5).lr == 0.5


def test_an_input_that_matters_is_found_relevant() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 12, generator=generator, dtype=D)
    y = torch.sin(2.0 * x[:, :1]) + 0.1 * torch.randn(300, 1, generator=generator, dtype=D)
    recipe = TableRecipe(hidden=(20,), steps=400)
    bnn = recipe.module(12, 1, noise="learned", seed=0)
    recipe.fit(bnn, x, y, callback=NoProgress())
    factors = bnn.net.log_relevance.exp()
    assert factors[0] > 3.0 * factors[1:].max()
    # Without factors all inputs have one prior.
    assert TableNet(3, (4,), 1, noise="learned").log_relevance is None


def test_a_factor_acts_as_the_width_of_the_prior_on_its_input() -> None:
    net = TableNet(2, (4,), 1, relevance=True)
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    before = net(x * torch.tensor([3.0, 1.0]))
    with torch.no_grad():
        net.log_relevance[0] = math.log(3.0)
    torch.testing.assert_close(net(x), before)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hidden": ()}, "hidden must be positive numbers of units"),
        ({"hidden": (5, 0)}, "hidden must be positive numbers of units"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"lr": math.nan}, "lr must be positive and finite, got nan"),
        ({"kl_warmup": 1.0}, "kl_warmup must be at least 0 and below 1"),
    ],
)
def test_a_wrong_setting_is_an_error(given: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TableRecipe(**given)  # type: ignore[arg-type]


def test_an_unknown_noise_is_an_error() -> None:
    with pytest.raises(ValueError, match='noise must be "learned", "input-dependent" or None'):
        TableRecipe().module(3, 1, noise="loud", seed=0)  # type: ignore[arg-type]


def test_the_key_of_noise_is_of_the_seed() -> None:
    x, _, _ = table()
    one, other = (TableRecipe(hidden=(4,)).module(3, 2, noise=None, seed=s) for s in (0, 1))
    assert not torch.equal(one.posterior.mean, other.posterior.mean)
    key = NoiseKey(one.seed, Stream.PREDICTION, 0)
    assert torch.equal(one.posterior.noise(key, range(2)), one.posterior.noise(key, range(2)))
    assert torch.equal(one.predict(x).mean, one.predict(x).mean)


def spread_of_the_prior(recipe: TableRecipe, num_inputs: int, noise: Noise) -> float:
    """Standard deviation of the mean of a row under the prior, over functions and rows."""
    x = torch.randn(300, num_inputs, dtype=D, generator=torch.Generator().manual_seed(0))
    bnn = recipe.module(num_inputs, 1, noise=noise, seed=0)
    with torch.no_grad():  # the posterior becomes the prior
        bnn.posterior.mean.zero_()
        scales = bnn.layout.unflatten(bnn.posterior.rho)
        priors = dict(bnn.prior.groups)
        for name, part in scales.items():
            std = priors.get(name, priors["*"]).std
            part.copy_(inverse_softplus(torch.tensor(std, dtype=D)))
    return bnn.predict(x, 400).epistemic.mean().sqrt().item()


def test_functions_of_the_prior_vary_as_standardised_targets_do() -> None:
    """With standard deviations of 1 / root F, as long as there is one hidden layer."""
    for hidden in ((20,), (500,)):
        recipe = TableRecipe(hidden=hidden, prior_std=1.0)
        assert 1.0 < spread_of_the_prior(recipe, 40, "learned") < 2.5


@pytest.mark.parametrize("num_inputs", [1, 40, 400])
@pytest.mark.parametrize("hidden", [None, (200, 200)])
def test_functions_of_the_default_prior_vary_three_to_four_times_as_much(
    num_inputs: int, hidden: tuple[int, ...] | None
) -> None:
    """As docs/scikit-learn.md says, whatever the number of inputs and of units."""
    recipe = TableRecipe() if hidden is None else TableRecipe(hidden=hidden)
    assert 3.0 < spread_of_the_prior(recipe, num_inputs, "input-dependent") < 4.0


def test_a_refused_fit_leaves_the_likelihood_as_it_was() -> None:
    x, y, _ = table()
    recipe = TableRecipe.for_rows(12, hidden=(4,), steps=2)
    bnn = recipe.module(3, 1, noise="learned", seed=0)
    before = bnn.likelihood
    with pytest.raises(ValueError, match=r"same|as many|10"):
        recipe.fit(bnn, x[:10], y, weights=torch.ones(12, dtype=D), callback=NoProgress())
    assert bnn.likelihood is before


@pytest.mark.parametrize("name", ["lr", "rho_lr_scale", "init_std", "prior_std"])
def test_settings_that_are_no_positive_numbers_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a number, got '0.1'"):
        TableRecipe(**{name: "0.1"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"{name} must be positive and finite, got 0.0"):
        TableRecipe(**{name: 0.0})  # type: ignore[arg-type]
