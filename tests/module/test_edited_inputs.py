"""Networks that edit their inputs in place: every pass sees the inputs as they were."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.loops import loop_over
from torch import Tensor, nn

from bayesify import (
    ELBO,
    BayesianModule,
    Delta,
    Flipout,
    GaussianLikelihood,
    LocalReparameterization,
    MCDropout,
    WeightSampling,
    fit,
    make_step,
)
from bayesify.bandits import ThompsonSampler
from bayesify.datasets import TensorLoader
from bayesify.noise.keys import NoiseKey, Stream
from bayesify.referee.density import PosteriorDensity


class Scaled(nn.Module):
    """Divides its input by 255 in place; a linear function of weight 1 then."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.linear.weight)

    def forward(self, x: Tensor, *, half: Tensor | None = None) -> Tensor:
        if half is not None:
            x = x.add_(half.div_(2.0))
        outputs: Tensor = self.linear(x.div_(255.0))
        return outputs


def bayesian(estimator: Any = None, **options: Any) -> BayesianModule:
    noise = GaussianLikelihood(std=1.0)
    estimator = WeightSampling() if estimator is None else estimator
    return BayesianModule(Scaled(), likelihood=noise, init_std=1e-6, estimator=estimator, **options)


@pytest.mark.parametrize("net", [Scaled(), nn.Sequential(nn.ELU(inplace=True), nn.Linear(1, 1))])
def test_the_mean_weights_leave_the_callers_inputs(net: nn.Module) -> None:
    bnn = BayesianModule(net, likelihood=GaussianLikelihood(std=1.0))
    inputs = torch.full((8, 1), -255.0)
    first = bnn.predict_mean(inputs).mean
    assert torch.equal(inputs, torch.full((8, 1), -255.0))
    assert torch.equal(bnn.mean_outputs(inputs), first)
    assert torch.equal(inputs, torch.full((8, 1), -255.0))


class Moved(nn.Module):
    """Subtracts 3 from its input, in place or not, before a linear layer."""

    def __init__(self, size: int, *, in_place: bool) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.linear, self.in_place = nn.Linear(size, 1), in_place

    def forward(self, x: Tensor) -> Tensor:
        x = x.sub_(3.0) if self.in_place else x - 3.0
        outputs: Tensor = self.linear(x)
        return outputs


def test_each_weight_sample_of_an_agent_sees_the_context() -> None:
    found = []
    for in_place in (True, False):
        net = Moved(5, in_place=in_place)
        bnn = BayesianModule(net, likelihood=GaussianLikelihood(), init_std=0.5)
        rewards = ThompsonSampler(bnn, 2, num_samples=3).rewards
        noise = bnn.posterior.noise(NoiseKey(0, Stream.ACTING, 0), range(3))
        found.append(rewards.expected(torch.ones(3), bnn.posterior.draw(noise).weights.detach()))
    assert torch.equal(*found)


def test_the_exact_posterior_leaves_the_data() -> None:
    x, found = torch.arange(8.0, dtype=torch.float64).reshape(4, 2), []
    for in_place in (True, False):
        bnn = BayesianModule(Moved(2, in_place=in_place), likelihood=GaussianLikelihood())
        inputs = x.clone()
        density = PosteriorDensity(bnn.double(), inputs, torch.ones(4, 1), temperature=1.0)
        found += [density(torch.ones(3, dtype=torch.float64)).detach() for _ in range(2)]
        assert torch.equal(inputs, x)
    assert torch.stack(found).unique().numel() == 1


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_a_loader_that_does_not_shuffle_keeps_its_examples() -> None:
    x, y = torch.full((8, 1), 255.0), torch.zeros(8, 1)
    loader = TensorLoader(x, y, 4, shuffle=False)
    fit(ELBO(bayesian(), num_data=8), loader, loader, epochs=3, progress=False)
    assert torch.equal(x, torch.full((8, 1), 255.0))


@loop_over("rows", [8, 5000])
def test_predictions_see_the_inputs_as_they_were(rows: int) -> None:
    for inputs in (torch.full((rows, 1), 255.0), torch.full((rows, 1), 255.0)[:, :]):
        mean = bayesian().predict(inputs, 100).mean
        torch.testing.assert_close(mean, torch.ones(rows, 1), atol=1e-4, rtol=0.0)
        assert torch.equal(inputs, torch.full((rows, 1), 255.0)), "the caller's inputs are changed"
    named = {"x": torch.full((rows, 1), 205.0), "half": torch.full((rows, 1), 100.0)}
    mean = bayesian().predict(named, 10).mean
    torch.testing.assert_close(mean, torch.ones(rows, 1), atol=1e-4, rtol=0.0)
    with torch.inference_mode():  # whose tensors do not count their edits
        inputs = torch.full((rows, 1), 255.0)
        mean = bayesian().predict(inputs, 100).mean
    torch.testing.assert_close(mean, torch.ones(rows, 1), atol=1e-4, rtol=0.0)


@loop_over("estimator", [WeightSampling(), LocalReparameterization(), Flipout()])
@loop_over("backend", ["auto", "closed-form", "autograd"])
def test_every_sample_of_a_step_sees_them(estimator: Any, backend: Any) -> None:
    for samples in (1, 2, 3):
        elbo = ELBO(bayesian(estimator), num_data=8, num_samples=samples)
        step = make_step(elbo, torch.optim.SGD(elbo.parameters(), lr=1e-9), backend=backend)
        for _ in range(2):
            terms = step(torch.full((8, 1), 255.0), torch.ones(8, 1))
            expected = torch.ones(samples, 8, 1)
            torch.testing.assert_close(terms.outputs, expected, atol=1e-4, rtol=0.0)


@loop_over("estimator", [LocalReparameterization(), Flipout()])
def test_the_pass_after_a_traced_one_sees_them(estimator: Any) -> None:
    bnn = bayesian(estimator)
    bnn.summary(shown := torch.full((4, 1), 255.0))
    assert torch.equal(shown, torch.full((4, 1), 255.0))
    outputs = bayesian(estimator)(torch.full((4, 1), 255.0))
    torch.testing.assert_close(outputs, torch.ones(4, 1), atol=1e-4, rtol=0.0)


@loop_over("samples", [1, 2, 3])
@loop_over("fused", [True, False])
def test_every_sample_of_an_own_loop_sees_them(samples: int, fused: bool) -> None:
    elbo = ELBO(bayesian(), num_data=8, num_samples=samples, fused=fused)
    inputs = torch.full((8, 1), 255.0)
    terms = elbo(inputs, torch.ones(8, 1))
    torch.testing.assert_close(terms.outputs, torch.ones(samples, 8, 1), atol=1e-4, rtol=0.0)
    terms.loss.backward()
    # That of the KL of 8 examples from a prior of std 0.3: the targets are at the minimum.
    gradient = elbo.bnn.posterior.mean.grad
    torch.testing.assert_close(gradient, torch.tensor([1.0 / 0.3**2 / 8]), atol=1e-3, rtol=0.0)


class ScaledOnce(nn.Module):
    """Divides a batch by 255 in place, if it has a value above 1."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.linear.weight)

    def forward(self, x: Tensor, *, twice: float = 0.0) -> Tensor:
        if x.max() > 1.0:
            x.div_(255.0)
        outputs: Tensor = self.linear(x)
        return outputs + twice * self.linear(x * 1.0) if twice else outputs


@loop_over("kind", ["variational", "dropout"])
def test_later_batches_see_them_where_the_first_is_not_edited(kind: str) -> None:
    inputs = torch.cat([torch.ones(4, 1), torch.full((4, 1), 510.0)])
    expected = torch.tensor([1.0, 2.0]).repeat_interleave(4).unsqueeze(1)
    noise = GaussianLikelihood(std=1.0)
    given = inputs.clone()
    if kind == "dropout":
        dropout = nn.Sequential(ScaledOnce(), nn.Dropout(1e-9))
        found = MCDropout(dropout, noise).predict(given, 3, batch_size=4, keep_samples=True).means
    else:
        bnn = BayesianModule(ScaledOnce(), likelihood=noise, init_std=1e-6)
        found = bnn.predict(given, 3, batch_size=4, keep_samples=True).means
    torch.testing.assert_close(found, expected.expand(3, -1, -1), atol=1e-4, rtol=0.0)
    assert torch.equal(given, inputs), "the caller's inputs are changed"


@loop_over("estimator", [LocalReparameterization(), Flipout()])
def test_a_pass_that_is_run_again_sees_them(estimator: Any) -> None:
    """A number decides over the uses, which no trace knows."""
    noise = GaussianLikelihood(std=1.0)
    bnn = BayesianModule(ScaledOnce(), likelihood=noise, init_std=1e-6, estimator=estimator)
    inputs = torch.full((4, 1), 300.0 * 255.0)
    for twice, samples in ((0.0, 2), (1.0, 2), (1.0, 1)):
        elbo = ELBO(bnn, num_data=4, num_samples=samples)
        outputs = elbo({"x": inputs.clone(), "twice": twice}, torch.ones(4, 1)).outputs
        expected = torch.full((samples, 4, 1), 300.0 * (1.0 + twice))
        torch.testing.assert_close(outputs, expected, atol=0.1, rtol=0.0)


def test_a_single_pass_that_cannot_see_them_again_is_an_error() -> None:
    """They are not copied for a case that hardly occurs, nor edited twice."""
    options = {"likelihood": GaussianLikelihood(std=1.0), "estimator": LocalReparameterization()}
    bnn = BayesianModule(ScaledOnce(), init_std=1e-6, **options)
    bnn(torch.full((4, 1), 0.5), twice=0.0)
    with pytest.raises(RuntimeError, match=r"begin its forward with x = x\.clone\(\)"):
        bnn(torch.full((4, 1), 300.0 * 255.0), twice=1.0)
    outputs = bnn(torch.full((4, 1), 300.0 * 255.0), twice=1.0)
    torch.testing.assert_close(outputs, torch.full((4, 1), 600.0), atol=0.1, rtol=0.0)


def test_dropout_in_place_on_the_inputs() -> None:
    linear = nn.Linear(50, 1, bias=False)
    nn.init.ones_(linear.weight)
    net = nn.Sequential(nn.Dropout(0.2, inplace=True), linear)
    plain = BayesianModule(net, posterior=Delta, likelihood=GaussianLikelihood(std=1.0))
    inputs = torch.full((5, 50), 0.08)
    mean = MCDropout(plain).predict(inputs, 100).mean
    assert bool(((mean - 4.0).abs() < 0.5).all())
    assert torch.equal(inputs, torch.full((5, 50), 0.08))


def test_what_is_run_once_sees_them() -> None:
    first, last = nn.Linear(1, 1), nn.Linear(1, 1, bias=False)
    net = nn.Sequential(nn.ReLU(inplace=True), first, last)
    options: dict[str, Any] = {"likelihood": GaussianLikelihood(std=1.0), "init_std": 0.5}
    bnn = BayesianModule(net, include=("2.*",), seed=3, **options)
    inputs = torch.tensor([[-1.0], [2.0]])
    predict = partial(bnn.predict, inputs, 40, keep_samples=True)
    torch.testing.assert_close(predict().samples, predict(max_memory="1 GB").samples)
    assert torch.equal(inputs, torch.tensor([[-1.0], [2.0]]))
