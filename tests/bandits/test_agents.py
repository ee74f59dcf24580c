"""Agents: how often each action is taken, and what is learnt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from tests.loops import loop_over
from torch import nn

import bayesify as bf
from bayesify.bandits import EpsilonGreedy, Learning, ThompsonSampler
from bayesify.bandits.learning import RewardModel
from bayesify.distributions.softplus import inverse_softplus
from bayesify.noise.keys import Stream, derived_seed, kept_generators

ACTS = 1500
MEANS, STDS = (0.0, 0.3, -0.5), (1.0, 0.5, 2.0)
CONTEXT = torch.ones(1)
#: Ten p-values, each of which may be as low as this: a false alarm has at most 1e-3 in all.
LEAST = 1e-3 / 10


def known(
    *,
    estimator: bf.Estimator | None = None,
    shared_std: float = 5.0,
    seed: int = 0,
) -> bf.BayesianModule:
    """A linear network whose posterior of each arm's reward is known.

    Its first weight, the context's, is the same for all arms: it must make no difference.
    """
    bnn = bf.BayesianModule(
        nn.Linear(1 + 3, 1, bias=False),
        likelihood=bf.GaussianLikelihood(),
        estimator=estimator,
        seed=seed,
    )
    assert isinstance(bnn.posterior, bf.MeanFieldGaussian)
    with torch.no_grad():
        bnn.posterior.mean.copy_(torch.tensor([7.0, *MEANS]))
        bnn.posterior.rho.copy_(inverse_softplus(torch.tensor([shared_std, *STDS])))
    return bnn


def probability_of_being_best(shrunk: float = 1.0) -> list[float]:
    """Of independent normals, by quadrature; their deviations divided by ``shrunk``."""
    arms = [stats.norm(m, s / shrunk) for m, s in zip(MEANS, STDS, strict=True)]

    def density(x: float, best: int) -> float:
        below = [arm.cdf(x) for k, arm in enumerate(arms) if k != best]
        return float(arms[best].pdf(x) * np.prod(below))

    return [integrate.quad(density, -15.0, 15.0, (k,), limit=200)[0] for k in range(3)]


def p_values(agent: Any, *shares: Sequence[float]) -> list[float]:
    """Return the p-value of the same acts under each of the expected shares."""
    acts = [agent.act(CONTEXT) for _ in range(ACTS)]
    counts = [acts.count(action) for action in range(len(shares[0]))]
    return [float(stats.chisquare(counts, [ACTS * p for p in each]).pvalue) for each in shares]


def p_value(agent: Any, expected: Sequence[float]) -> float:
    return p_values(agent, expected)[0]


def test_two_arms_are_best_as_often_as_the_normal_distribution_says() -> None:
    # Of the difference of two independent normals: what the quadrature must give.
    phi = stats.norm.cdf((MEANS[1] - MEANS[0]) / math.hypot(STDS[0], STDS[1]))
    arms = probability_of_being_best()
    assert sum(arms) == pytest.approx(1.0, abs=1e-6)
    bnn = known(seed=7)
    bnn.posterior.mean.data[3] = -1e4  # the third is never best
    assert p_value(ThompsonSampler(bnn, 3), [1.0 - phi, phi, 1e-12]) > LEAST


def test_each_action_is_taken_as_often_as_it_is_likely_to_be_the_best() -> None:
    assert p_value(ThompsonSampler(known(), 3), probability_of_being_best()) > LEAST


@pytest.mark.slow
@loop_over("estimator", [bf.LocalReparameterization(), bf.Flipout()])
def test_the_estimator_makes_no_difference(estimator: bf.Estimator) -> None:
    agent = ThompsonSampler(known(estimator=estimator), 3)
    assert p_value(agent, probability_of_being_best()) > LEAST


@pytest.mark.slow
def test_an_average_of_two_draws_explores_as_if_it_were_surer() -> None:
    agent = ThompsonSampler(known(seed=1), 3, num_samples=2)
    shares = probability_of_being_best(math.sqrt(2.0)), probability_of_being_best()
    surer, as_sure = p_values(agent, *shares)
    assert surer > LEAST
    assert as_sure < LEAST


def test_draws_that_are_used_again_are_caught() -> None:
    agent = ThompsonSampler(known(), 3)
    acts = []
    for act in range(ACTS):
        agent.acts = act // 100  # each draw serves a hundred times
        acts.append(agent.act(CONTEXT))
    expected = [ACTS * p for p in probability_of_being_best()]
    assert stats.chisquare([acts.count(k) for k in range(3)], expected).pvalue < LEAST


@pytest.mark.slow
def test_noise_of_each_actions_own_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def expected(self: RewardModel, context: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = [whole(self, context, weights + self.bnn.posterior.std * torch.randn(4))[k : k + 1]
                for k in range(3)]  # fmt: skip
        return torch.cat(rows)

    whole = RewardModel.expected
    monkeypatch.setattr(RewardModel, "expected", expected)
    torch.manual_seed(0)
    assert p_value(ThompsonSampler(known(), 3), probability_of_being_best()) < LEAST


def test_acts_are_a_function_of_the_seed_and_of_nothing_else() -> None:
    one, other = (ThompsonSampler(known(seed=3), 3) for _ in range(2))
    for _ in range(20):
        torch.randn(3)
        assert one.act(CONTEXT) == other.act(CONTEXT.numpy().astype(np.float64))
    assert [one.act(CONTEXT) for _ in range(30)] != [
        ThompsonSampler(known(seed=4), 3).act(CONTEXT) for _ in range(30)
    ]


# --------------------------------------------------------------------------------- epsilon and ties


@loop_over("epsilon", [0.05, 0.5, 1.0])
def test_epsilon_is_the_share_of_random_actions(epsilon: float) -> None:
    agent = EpsilonGreedy(known(seed=2), 3, epsilon=epsilon)
    rest = epsilon / 3.0
    assert p_value(agent, [rest, 1.0 - 2.0 * rest, rest]) > LEAST


def test_without_epsilon_the_mean_weights_decide() -> None:
    agent = EpsilonGreedy(known(), 3, epsilon=0.0)
    assert {agent.act(CONTEXT) for _ in range(100)} == {1}


def test_ties_are_broken_at_random() -> None:
    net = nn.Linear(1 + 3, 1)
    nn.init.zeros_(net.weight)
    assert p_value(EpsilonGreedy(net, 3, epsilon=0.0), [1.0 / 3.0] * 3) > LEAST


# ----------------------------------------------------------------------------------------- learning


def one_arm(updates: int, count: int, **options: Any) -> RewardModel:
    """One weight, of an arm that was tried ``count`` times and gave 2 each time."""
    bnn = bf.BayesianModule(
        nn.Linear(1 + 1, 1, bias=False),
        likelihood=bf.GaussianLikelihood(std=1.0),
        prior=bf.Gaussian(1.0),
        init_std=0.7,
    )
    adam = partial(torch.optim.Adam, lr=0.01)
    learning = Learning(updates=updates, num_samples=4, optimizer=adam, reward_scale=2.0, **options)
    rewards = RewardModel(bnn, 1, learning)
    for _ in range(count):
        rewards.observe(torch.zeros(1), 0, 4.0)
    return rewards


def check_conjugate(rewards: RewardModel, count: int) -> None:
    """Of a standard normal prior and ``count`` data of variance 1: precision 1 + count."""
    rewards.learn()
    posterior = rewards.bnn.posterior
    mean, std = (float(part[1].detach()) for part in (posterior.mean, posterior.std))
    assert mean == pytest.approx(2.0 * count / (1.0 + count), abs=0.15)
    assert std == pytest.approx((1.0 + count) ** -0.5, rel=0.1)
    assert float(posterior.std[0].detach()) == pytest.approx(1.0, rel=0.1)  # a prior's, unused


@pytest.mark.slow
@loop_over("count", [1, 3, 12])
def test_the_objective_is_that_of_the_data_in_the_buffer(count: int) -> None:
    check_conjugate(one_arm(800, count), count)


@pytest.mark.slow
def test_the_kl_can_be_that_of_more_data() -> None:
    check_conjugate(one_arm(800, 3, least_data=12), 12)
    check_conjugate(one_arm(800, 3, least_data=2), 3)


def test_a_kl_that_is_weighted_by_the_capacity_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_conjugate(one_arm(800, 3, least_data=Learning().buffer_size), 3)


@loop_over("bayesian", [True, False])
@loop_over("flat", [True, False])
def test_any_network_learns_which_action_is_better(bayesian: bool, flat: bool) -> None:
    parts: list[nn.Module] = [nn.Linear(2 + 2, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)]
    net: nn.Module = nn.Sequential(*parts, *([nn.Flatten(0)] if flat else []))
    learning = Learning(
        updates=lambda seen: 300 if seen == 60 else 0,
        optimizer=partial(torch.optim.Adam, lr=0.02),
        reward_scale=3.0,
    )
    if bayesian:
        net = bf.BayesianModule(net, likelihood=bf.GaussianLikelihood(std=0.1))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    agent: Any = (
        ThompsonSampler(net, 2, learning=learning)
        if bayesian
        else EpsilonGreedy(net, 2, epsilon=0.1, learning=learning)
    )
    for number in range(60):
        context = np.eye(2)[number % 2]
        agent.observe(context, number // 2 % 2, 3.0 if number % 2 == number // 2 % 2 else -3.0)
        agent.learn()
    right = [agent.act(np.eye(2)[number % 2]) == number % 2 for number in range(100)]
    assert sum(right) >= 85  # of which at most 5 in 100 act at random
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])  # what was given is as it was


def test_labels_of_success_are_rewards_too() -> None:
    bnn = bf.BayesianModule(nn.Linear(1 + 2, 1), likelihood=bf.BernoulliLikelihood())
    agent = ThompsonSampler(bnn, 2, learning=Learning(updates=1))
    agent.observe(CONTEXT, 1, 1.0)
    agent.learn()
    chances = agent.rewards.expected(CONTEXT, agent.rewards.mean_weights())
    assert chances.shape == (2,)
    assert bool(((chances > 0.0) & (chances < 1.0)).all())


def test_double_precision_is_kept() -> None:
    agent = EpsilonGreedy(nn.Linear(1 + 2, 1).double(), 2, epsilon=0.0)
    agent.observe(np.array([1], dtype=np.int32), 0, 1.0)
    agent.learn()
    assert agent.rewards.buffer.interactions.rewards.dtype == torch.float64
    assert agent.act(np.ones(1, dtype=np.float32)) in (0, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_network_of_half_precision_keeps_rewards_and_contexts(dtype: torch.dtype) -> None:
    # With a smaller noise the gradient of such a context would overflow float16.
    bnn = bf.BayesianModule(nn.Linear(1 + 2, 1), likelihood=bf.GaussianLikelihood(5.0)).to(dtype)
    agent = ThompsonSampler(bnn, 2, learning=Learning(updates=2, reward_scale=1e4))
    assert agent.act(np.array([1234.5])) in (0, 1)
    agent.observe(np.array([1234.5]), 0, 70_003.0)
    kept = agent.rewards.buffer.interactions
    assert (kept.contexts.item(), kept.rewards.item()) == (1234.5, 70_003.0)
    agent.learn()
    if dtype == torch.float16:
        with pytest.raises(ValueError, match=r"of finite numbers, .* got NaN or infinity"):
            agent.observe(np.array([1e6]), 0, 1.0)


# ------------------------------------------------------------------------------------------- errors


@loop_over(
    ("act", "error", "message"),
    [
        (lambda: ThompsonSampler(nn.Linear(3, 1), 2), ValueError, "use EpsilonGreedy for these"),
        (lambda: ThompsonSampler(known(), 3, num_samples=0), ValueError, "num_samples .* got 0"),
        (lambda: ThompsonSampler("net", 2), TypeError, "or another network, got str"),  # type: ignore[arg-type]
        (lambda: ThompsonSampler(known(), 0), ValueError, "num_actions must be at least 1"),
        (lambda: EpsilonGreedy(known(), 3, epsilon=1.5), ValueError, "from 0 to 1, got 1.5"),
        (lambda: EpsilonGreedy(known(), 3, epsilon=math.nan), ValueError, "from 0 to 1, got nan"),
        (lambda: Learning(updates=0), ValueError, "updates must be at least 1, got 0"),
        (lambda: Learning(buffer_size=0), ValueError, "buffer_size must be at least 1"),
        (lambda: Learning(reward_scale=0.0), ValueError, "reward_scale must be positive"),
        (lambda: agent().learn(), ValueError, r"observe\(\) an interaction first"),
        (lambda: agent().act(torch.zeros(1, 1)), ValueError, r"shape \(d,\), got shape \(1, 1\)"),
        (lambda: agent().act(torch.tensor([math.nan])), ValueError, "got NaN or infinity"),
        (lambda: agent().observe(torch.ones(1), 3, 0.0), ValueError, "from 0 to 2, got 3"),
        (
            lambda: agent().observe(torch.ones(1), 0, math.inf),
            ValueError,
            "finite in float32, got inf",
        ),
        (lambda: agent().observe(torch.ones(1), 0, 1e39), ValueError, "finite in float32, got 1e"),
        (
            lambda: EpsilonGreedy(nn.Linear(4, 2), 3, epsilon=0.0).act(CONTEXT),
            ValueError,
            r"one number for each context and action.*got shape \(3, 2\)",
        ),
    ],
)
def test_errors_say_what_must_hold(act: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        act()


def agent() -> ThompsonSampler:
    return ThompsonSampler(known(), 3)


def test_a_diverged_network_is_named() -> None:
    learning = Learning(updates=50, optimizer=partial(torch.optim.SGD, lr=1e30))
    diverging = EpsilonGreedy(nn.Linear(1 + 2, 1), 2, epsilon=0.0, learning=learning)
    diverging.observe(CONTEXT, 0, 5.0)
    with pytest.raises(bf.training.NonFiniteLossError, match="the nll at step"):
        diverging.learn()


def masks_of(seed: int) -> torch.Tensor:
    """The dropout mask of an agent's first step of learning."""
    bnn = bf.BayesianModule(nn.Linear(2, 1), likelihood=bf.GaussianLikelihood(), seed=seed)
    rewards = RewardModel(bnn, 1, Learning(updates=1))
    rewards.observe(torch.zeros(1), 0, 1.0)
    rewards.expected(torch.zeros(1), rewards.mean_weights())  # reads the shape of the outputs
    with kept_generators():
        next(rewards._minibatches(1))
        return nn.functional.dropout(torch.ones(100))


def test_agents_of_two_seeds_share_no_dropout_masks() -> None:
    """PyTorch keeps 32 bits of a seed on the CPU, in which the seeds of these agents agree."""
    seeds = (33049, 67802)
    assert len({derived_seed(seed, Stream.DROPOUT, 0) % 2**32 for seed in seeds}) == 1
    one, other = map(masks_of, seeds)
    assert not torch.equal(one, other)
    assert torch.equal(masks_of(seeds[0]), one)
