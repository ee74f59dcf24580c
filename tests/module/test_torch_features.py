"""What else torch's users do: accumulation, clipping, copies, states, dtypes, averages, vmap."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from tests.cases import mlp, normals
from tests.loops import loop_over
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Adam, Optimizer, swa_utils

from bayesify import (
    ELBO,
    BayesianModule,
    Delta,
    Estimator,
    Flipout,
    LocalReparameterization,
    ScaleMixture,
    SharedNoiseWarning,
    WeightSampling,
    kl_divergence,
)

N = 64
ESTIMATORS = [WeightSampling(), LocalReparameterization(), Flipout()]
each_estimator = loop_over("estimator", ESTIMATORS)
pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")


def new_elbo(estimator: Estimator | None = None, **options: Any) -> ELBO:
    given: dict[str, Any] = {"init_std": 0.05, "seed": 3, "estimator": estimator, **options}
    return ELBO(BayesianModule(mlp(), **given), num_data=N)


def data() -> tuple[Tensor, Tensor]:
    """Four classes that a linear network can tell apart."""
    x = normals(N, 3, seed=1)
    return x, (x @ normals(3, 4, seed=2)).argmax(-1)


def flat(elbo: ELBO) -> Tensor:
    return torch.cat([parameter.detach() for parameter in elbo.parameters()])


def gradient(elbo: ELBO) -> Tensor:
    grads = [parameter.grad for parameter in elbo.parameters()]
    return torch.cat([grad for grad in grads if grad is not None])


def objective(elbo: ELBO) -> float:
    """The objective with the same noise for everyone, averaged over some."""
    twin = copy.deepcopy(elbo)
    losses = []
    for step in range(1000, 1020):
        twin.step = step
        losses.append(float(twin(*data()).loss.detach()))
    return sum(losses) / len(losses)


# ------------------------------------------------------------------ accumulation and clipping


@each_estimator
def test_accumulated_gradients_are_those_of_the_mean_of_elbos(estimator: Estimator) -> None:
    """Two halves with loss / 2 each: the mean of two ELBOs, each with noise of its own."""
    x, y = data()
    elbo = new_elbo(estimator)
    for part in (slice(0, N // 2), slice(N // 2, N)):
        (elbo(x[part], y[part]).loss / 2).backward()
    accumulated = gradient(elbo)

    def of(part: slice, step: int) -> Tensor:
        one = new_elbo(estimator)
        one.step = step
        one(x[part], y[part]).loss.backward()
        return gradient(one)

    halves = slice(0, N // 2), slice(N // 2, N)
    expected = (of(halves[0], 0) + of(halves[1], 1)) / 2
    torch.testing.assert_close(accumulated, expected, rtol=1e-12, atol=1e-14)
    # Noise that both halves share, or the KL counted twice, would show.
    assert (accumulated - (of(halves[0], 0) + of(halves[1], 0)) / 2).abs().max() > 1e-4
    kl = new_elbo(estimator)
    (kl_divergence(kl.bnn.posterior, kl.bnn.prior) / N).backward()
    assert gradient(kl).abs().max() > 1e-3


def test_with_the_same_weights_halves_accumulate_to_the_whole() -> None:
    """Weight sampling's noise is the weights': with the same step, the sum is the full batch's."""
    x, y = data()
    whole, halves = new_elbo(prior=ScaleMixture()), new_elbo(prior=ScaleMixture())
    whole(x, y).loss.backward()
    sizes = 40, N - 40
    for inputs, targets in zip(x.split(sizes), y.split(sizes), strict=True):
        halves.step = 0
        (halves(inputs, targets).loss * len(targets) / N).backward()
    torch.testing.assert_close(gradient(halves), gradient(whole), rtol=1e-10, atol=1e-14)
    other = new_elbo(prior=ScaleMixture())
    for inputs, targets in zip(x.split(sizes), y.split(sizes), strict=True):
        (other(inputs, targets).loss * len(targets) / N).backward()
    assert (gradient(other) - gradient(whole)).abs().max() > 1e-3


@each_estimator
def test_gradients_can_be_clipped(estimator: Estimator) -> None:
    elbo = new_elbo(estimator)
    elbo(*data()).loss.backward()
    free = gradient(elbo)
    norm = clip_grad_norm_(elbo.parameters(), 0.01)
    torch.testing.assert_close(norm, free.norm())
    assert float(norm) > 0.1
    torch.testing.assert_close(gradient(elbo), free * 0.01 / norm, rtol=1e-4, atol=0)
    bound = float(gradient(elbo).abs().median())
    clipped = gradient(elbo).clamp(-bound, bound)
    clip_grad_value_(elbo.parameters(), bound)
    assert torch.equal(gradient(elbo), clipped)


# ------------------------------------------------------------------------ copies, states, dtypes


@each_estimator
@pytest.mark.filterwarnings("ignore::bayesify.module.shared_noise.SharedNoiseWarning")
def test_a_copy_goes_on_with_the_same_noise(estimator: Estimator) -> None:
    elbo = new_elbo(estimator)
    terms = elbo(*data())
    terms.loss.backward()
    elbo.bnn(data()[0])
    by_copy = copy.deepcopy(elbo)
    by_state = new_elbo(estimator)
    by_state.load_state_dict(elbo.state_dict())
    expected = elbo(*data()).loss
    assert torch.equal(by_copy(*data()).loss, expected)
    assert torch.equal(by_state(*data()).loss, expected)
    assert by_copy.step == by_state.step == 2
    assert torch.equal(copy.deepcopy(by_copy.bnn)(data()[0]), elbo.bnn(data()[0]))
    # They share nothing: the copy's training is not the original's, and noise moves on.
    with torch.no_grad():
        by_copy.bnn.posterior.mean.zero_()
    assert float(elbo.bnn.posterior.mean.detach().abs().max()) > 0
    assert not torch.equal(new_elbo(estimator)(*data()).loss, expected)


@each_estimator
def test_training_resumes_from_state_dicts(estimator: Estimator) -> None:
    def steps(elbo: ELBO, optimizer: Optimizer, number: int) -> None:
        for _ in range(number):
            optimizer.zero_grad()
            elbo(*data()).loss.backward()
            optimizer.step()

    whole = new_elbo(estimator)
    steps(whole, Adam(whole.parameters(), lr=0.01), 10)
    first = new_elbo(estimator)
    optimizer = Adam(first.parameters(), lr=0.01)
    steps(first, optimizer, 4)
    second = new_elbo(estimator)
    resumed = Adam(second.parameters(), lr=0.01)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    forgetful, again = copy.deepcopy(second), copy.deepcopy(resumed.state_dict())
    steps(second, resumed, 6)
    assert torch.equal(flat(second), flat(whole))
    # Without the step counter the noise would begin anew.
    forgetful.step = 0
    resumed = Adam(forgetful.parameters(), lr=0.01)
    resumed.load_state_dict(again)
    steps(forgetful, resumed, 6)
    assert not torch.equal(flat(forgetful), flat(whole))


@loop_over("dtype", [torch.float64, torch.bfloat16, torch.float16])
@each_estimator
def test_modules_move_to_other_dtypes(estimator: Estimator, dtype: torch.dtype) -> None:
    x, y = data()
    elbo = ELBO(BayesianModule(mlp(torch.float32), estimator=estimator), num_data=N)
    elbo = elbo.to(dtype) if dtype != torch.float16 else elbo.half()
    wide = torch.promote_types(dtype, torch.float32)
    assert {parameter.dtype for parameter in elbo.parameters()} == {wide}
    optimizer = SGD(elbo.parameters(), lr=0.1)
    losses = []
    for _ in range(40):
        terms = elbo(x.to(dtype), y)
        optimizer.zero_grad()
        terms.loss.backward()
        optimizer.step()
        losses.append(float(terms.loss.detach()))
    assert terms.outputs.dtype == dtype
    # The sums over a network are in float32 at least.
    assert {part.dtype for part in (terms.loss, terms.nll, terms.kl)} == {wide}
    assert sum(losses[-5:]) < sum(losses[:5]) - 1.0
    assert elbo.bnn.predict(x.to(dtype), 3).mean.isfinite().all()
    assert elbo.bnn(x.to(dtype)).dtype == dtype


@each_estimator
def test_a_narrow_prior_is_finite_in_half_precision(estimator: Estimator) -> None:
    # For weights in the spike; 1 / std2^2 = exp(16) is more than float16 holds.
    bnn = BayesianModule(mlp(), prior=ScaleMixture(), estimator=estimator, init_std=3e-4)
    nn.init.zeros_(bnn.posterior.mean)
    wide, narrow = ELBO(bnn, num_data=N), ELBO(copy.deepcopy(bnn).half(), num_data=N)
    x, y = data()
    for elbo, dtype in ((wide, torch.float64), (narrow, torch.float16)):
        elbo(x.to(dtype), y).loss.backward()
    assert bool(gradient(narrow).isfinite().all())
    # The noise differs between dtypes, so only the size is the same.
    assert float(gradient(narrow).norm()) == pytest.approx(float(gradient(wide).norm()), rel=0.5)


# ------------------------------------------------------------------------- averages of the weights


def train(elbo: ELBO, average: swa_utils.AveragedModel, steps: int) -> list[Tensor]:
    """Train, and return the posterior's parameters after each step."""
    optimizer = Adam(elbo.parameters(), lr=0.02)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        elbo(*data()).loss.backward()
        optimizer.step()
        average.update_parameters(elbo.bnn)
        seen.append(flat(elbo))
    return seen


@each_estimator
def test_averages_over_the_run(estimator: Estimator) -> None:
    def by_decay(values: list[Tensor]) -> Tensor:
        result = values[0]
        for value in values[1:]:
            result = 0.9 * result + 0.1 * value
        return result

    ema = swa_utils.get_ema_multi_avg_fn(0.9)
    for multi_avg_fn, by_hand in (
        (ema, by_decay),
        (None, lambda values: torch.stack(values).mean(0)),
    ):
        elbo = new_elbo(estimator)
        average = swa_utils.AveragedModel(elbo.bnn, multi_avg_fn=multi_avg_fn)
        seen = train(elbo, average, 12)
        posterior = average.module.posterior
        flat_average = torch.cat([posterior.mean, posterior.rho]).detach()
        torch.testing.assert_close(flat_average, by_hand(seen), rtol=1e-12, atol=1e-14)
        assert (flat_average - seen[-1]).abs().max() > 1e-3
        # It predicts with the averages, and calls with its own noise.
        mean = by_hand(seen)[: elbo.bnn.layout.num_weights]
        expected = elbo.bnn.run_with(mean, data()[0]).softmax(-1)
        torch.testing.assert_close(average.module.predict_mean(data()[0]).mean, expected)
        assert average.module.predict(data()[0], 5).mean.shape == (N, 4)
        assert average(data()[0]).shape == (N, 4)


def test_batch_norm_is_updated_for_the_average() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)).double()
    elbo = ELBO(BayesianModule(net, init_std=0.05, seed=3), num_data=N)
    average = swa_utils.AveragedModel(elbo.bnn)
    train(elbo, average, 5)
    x, _ = data()
    swa_utils.update_bn(x.split(16), average)
    norm = average.module.net[1]
    assert int(norm.num_batches_tracked) == 4
    # The mean over four passes, each with weights of its own.
    twin = copy.deepcopy(average.module)
    expected = torch.zeros(5, dtype=torch.float64)
    for step, part in enumerate(x.split(16)):
        twin._calls.fill_(step)
        before = []
        handle = twin.net[1].register_forward_pre_hook(lambda _, args, b=before: b.append(args[0]))
        twin(part)
        handle.remove()
        expected += before[0].detach().mean(0) / 4
    torch.testing.assert_close(norm.running_mean, expected, rtol=1e-10, atol=1e-12)


def test_networks_that_share_their_noise_are_warned_of() -> None:
    def model(*seeds: int) -> nn.Module:
        return nn.Sequential(*[BayesianModule(nn.Linear(3, 3), seed=seed) for seed in seeds])

    x = torch.zeros(2, 3)
    with warnings.catch_warnings(action="error"):
        different, same = model(81, 82), model(83, 83)
        for _ in range(3):
            different(x)
        same(x)
        lonely = model(84)
        for _ in range(3):
            lonely(x)
        points = nn.Sequential(*[BayesianModule(nn.Linear(3, 3), posterior=Delta) for _ in "ab"])
        for _ in range(3):
            points(x)
    with pytest.warns(SharedNoiseWarning, match=r"with seed=83 .* such as .*seed=84"):
        same(x)
    three = model(85, 85, 85)
    three(x)
    with pytest.warns(SharedNoiseWarning, match=r"with seed=85"):
        three(x)


def test_each_example_has_a_gradient_of_its_own_under_one_draw() -> None:
    bnn, x = BayesianModule(mlp(), init_std=0.3, seed=3), normals(5, 3)
    values = {name: each.detach() for name, each in bnn.named_parameters()}
    twin = copy.deepcopy(bnn)  # whose first call has the same draw

    def loss(values: dict[str, Tensor], row: Tensor) -> Tensor:
        outputs: Tensor = torch.func.functional_call(bnn, values, (row.unsqueeze(0),))
        return outputs.square().sum()

    by_row = torch.vmap(torch.func.grad(loss), (None, 0), randomness="same")(values, x)
    twin(x).square().sum().backward()
    for name, parameter in twin.named_parameters():
        assert len(by_row[name]) == 5
        assert parameter.grad is not None
        assert torch.allclose(by_row[name].sum(0), parameter.grad)
