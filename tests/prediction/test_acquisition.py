"""Acquisition functions: exact on tables that can be enumerated, and estimated beyond them."""

from __future__ import annotations

import itertools
import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayesify as bf
from bayesify.module.acquire import Acquisition
from bayesify.prediction import (
    BernoulliPredictive,
    CategoricalPredictive,
    GaussianPredictive,
    Predictive,
)
from bayesify.prediction.acquisition import batch_bald, epig, joint_information

D = torch.float64


def predictive(
    num_samples: int = 4, num: int = 5, classes: int = 3, *, seed: int = 0, scale: float = 2.0
) -> CategoricalPredictive:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(num_samples, num, classes, generator=generator, dtype=D)
    return CategoricalPredictive.from_logits(logits, keep_samples=True)


def enumerated(p: Predictive, batch: list[int]) -> float:
    """I(y_1..b; w) as the KL from each weight sample's joint probabilities to their mean, nats."""
    probs = p.samples
    assert probs is not None
    total = 0.0
    for labels in itertools.product(range(probs.shape[2]), repeat=len(batch)):
        given = [
            math.prod(float(s[i, y]) for i, y in zip(batch, labels, strict=True)) for s in probs
        ]
        mean = math.fsum(given) / len(given)
        total += math.fsum(g * math.log(g / mean) for g in given if g > 0.0) / len(given)
    return total


@pytest.mark.parametrize("batch", [[0], [3, 1], [2, 2], [0, 1, 4], [4, 3, 2, 1], [1, 1, 1]])
def test_joint_information_is_that_of_enumeration(batch: list[int]) -> None:
    p = predictive()
    found = joint_information(p, batch)
    assert float(found) == pytest.approx(enumerated(p, batch), abs=1e-10)
    of_other = enumerated(predictive(seed=1), batch)
    assert float(found) != pytest.approx(of_other, abs=1e-4)


def test_a_batch_of_one_is_bald() -> None:
    p = predictive(num_samples=20, num=30, classes=10)
    indices, gains = batch_bald(p, 1)
    assert indices.item() == int(p.epistemic.argmax())
    each = [float(joint_information(p, [i])) for i in range(30)]
    torch.testing.assert_close(torch.tensor(each, dtype=D), p.epistemic, atol=1e-10, rtol=0.0)
    assert float(gains[0]) == pytest.approx(float(p.epistemic.max()), abs=1e-10)


def test_each_choice_is_the_best_given_those_before() -> None:
    p = predictive(num_samples=6, num=7)
    indices, gains = batch_bald(p, 4)
    chosen: list[int] = []
    for index, gain in zip(indices.tolist(), gains.tolist(), strict=True):
        before = enumerated(p, chosen) if chosen else 0.0
        offered = {i: enumerated(p, [*chosen, i]) - before for i in range(7) if i not in chosen}
        assert gain == pytest.approx(max(offered.values()), abs=1e-10)
        assert index == max(offered, key=offered.__getitem__)
        chosen.append(index)
    assert len(set(chosen)) == 4


def test_a_certain_copy_adds_nothing_and_an_uncertain_one_what_is_left() -> None:
    certain = CategoricalPredictive.from_logits(
        1e4 * torch.eye(3, dtype=D)[torch.tensor([[0, 0], [1, 1], [1, 1], [2, 2]])],
        keep_samples=True,
    )
    one, two = joint_information(certain, [0]), joint_information(certain, [0, 1])
    torch.testing.assert_close(one, two, atol=1e-12, rtol=0.0)
    p = predictive()
    copies = float(joint_information(p, [2, 2]))
    assert float(p.epistemic[2]) < copies < 2 * float(p.epistemic[2])
    assert copies == pytest.approx(enumerated(p, [2, 2]), abs=1e-10)


def test_bald_takes_copies_where_batch_bald_takes_what_is_new() -> None:
    p = predictive(num_samples=50, num=20, scale=3.0)
    assert p.log_samples is not None
    best = int(p.epistemic.argmax())
    doubled = torch.cat([p.log_samples, p.log_samples[:, best : best + 1]], 1)
    both = CategoricalPredictive.from_logits(doubled, keep_samples=True)
    assert set(both.epistemic.topk(2).indices.tolist()) == {best, 20}
    assert set(batch_bald(both, 2)[0].tolist()) != {best, 20}


def spread_of_estimates(p: CategoricalPredictive, batch: list[int]) -> float:
    """Error of the mean estimate from drawn configurations, in standard errors."""
    found = torch.stack(
        [joint_information(p, batch, num_configurations=6, seed=s) for s in range(200)]
    )
    return float((found.mean() - enumerated(p, batch)) / (found.std() / len(found) ** 0.5))


def test_drawn_configurations_estimate_without_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    # |z| < 4.4 fails by chance once in 100,000; the seeds are fixed.
    p, batch = predictive(num_samples=3), [0, 1, 2, 3]
    assert abs(spread_of_estimates(p, batch)) < 4.4

    def uniform(probs: Tensor, _: int, generator: torch.Generator) -> Tensor:
        return torch.randint(probs.shape[1], (len(probs), 1), generator=generator)

    monkeypatch.setattr(torch, "multinomial", uniform)
    assert abs(spread_of_estimates(p, batch)) > 10.0


def test_drawn_configurations_agree_with_all_of_them() -> None:
    p = predictive(num_samples=10, num=8)
    exact, drawn = batch_bald(p, 6), batch_bald(p, 6, num_configurations=200, seed=1)
    assert exact[0][:4].tolist() == drawn[0][:4].tolist()
    assert float(drawn[1].sum()) == pytest.approx(float(exact[1].sum()), rel=0.05)
    assert float(exact[1].sum()) < math.log(10)
    again = batch_bald(p, 6, num_configurations=200, seed=1)
    assert torch.equal(again[1], drawn[1])


def test_parts_of_a_large_pool_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    p, targets = predictive(num=40), predictive(num=9, seed=3)
    whole = (*batch_bald(p, 3), epig(p, targets))
    monkeypatch.setattr("bayesify.prediction.acquisition._LARGEST", 64)
    for one, other in zip(whole, (*batch_bald(p, 3), epig(p, targets)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-13, rtol=0.0)


def test_epig_is_that_of_enumeration() -> None:
    p, targets = predictive(), predictive(num=3, seed=5)
    assert p.log_samples is not None
    assert targets.log_samples is not None
    every = CategoricalPredictive.from_logits(
        torch.cat([p.log_samples, targets.log_samples], 1), keep_samples=True
    )
    for i, found in enumerate(epig(p, targets).tolist()):
        # I(y; y*) = I(y; w) + I(y*; w) - I(y, y*; w), as labels are independent given w.
        expected = [
            enumerated(every, [i]) + enumerated(every, [j]) - enumerated(every, [i, j])
            for j in (5, 6, 7)
        ]
        assert found == pytest.approx(sum(expected) / 3, abs=1e-10)
        assert found != pytest.approx(expected[0], abs=1e-6)


def test_epig_is_symmetric_and_zero_where_predictions_are_independent() -> None:
    a, b = predictive(num=1), predictive(num=1, seed=1)
    torch.testing.assert_close(epig(a, b), epig(b, a), atol=1e-14, rtol=0.0)
    one, other = predictive(3, 1, 4), predictive(5, 1, 2, seed=1)
    assert one.log_samples is not None
    assert other.log_samples is not None
    # Each sample of the one with each of the other: independent.
    first = CategoricalPredictive.from_logits(
        one.log_samples.repeat_interleave(5, 0), keep_samples=True
    )
    second = CategoricalPredictive.from_logits(other.log_samples.repeat(3, 1, 1), keep_samples=True)
    assert float(first.epistemic) > 0.1
    assert float(epig(first, second)) < 1e-14
    mixed = CategoricalPredictive.from_logits(
        other.log_samples.repeat_interleave(3, 0), keep_samples=True
    )
    assert float(epig(first, mixed)) > 1e-3


def test_epig_of_probabilities_that_underflow_is_finite() -> None:
    logits = torch.zeros(20, 1, 2)
    logits[:, 0, 1] = -1000.0
    logits[0, 0, 1] = -370.0
    p = CategoricalPredictive.from_logits(logits, keep_samples=True)
    assert epig(p, p).tolist() == pytest.approx([0.0], abs=1e-300)
    wild = 1000.0 * torch.randn(20, 50, 3, generator=torch.Generator().manual_seed(0))
    p = CategoricalPredictive.from_logits(wild, keep_samples=True)
    found = epig(p, p)
    assert bool(((found >= 0.0) & (found <= math.log(3.0))).all())


def test_epig_of_certain_copies_is_the_entropy() -> None:
    logits = 1e4 * torch.eye(2, dtype=D)[torch.tensor([[0], [1], [1], [1]])]
    p = CategoricalPredictive.from_logits(logits, keep_samples=True)
    torch.testing.assert_close(epig(p, p), p.total, atol=1e-12, rtol=0.0)


def test_binary_labels_are_two_classes() -> None:
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=D)
    classes = torch.stack([torch.zeros_like(logits), logits], -1)
    two = CategoricalPredictive.from_logits(classes, keep_samples=True)
    for shaped in (logits, logits.unsqueeze(-1)):
        binary = BernoulliPredictive.from_logits(shaped, keep_samples=True)
        for one, other in zip(batch_bald(binary, 3), batch_bald(two, 3), strict=True):
            torch.testing.assert_close(one, other)


def test_wrong_arguments_are_errors() -> None:
    p = predictive()
    assert p.log_samples is not None
    thrown_away = CategoricalPredictive.from_logits(p.log_samples)
    with pytest.raises(ValueError, match="must have its weight samples; call predict"):
        batch_bald(thrown_away, 1)
    with pytest.raises(TypeError, match="classes or binary labels, got GaussianPredictive"):
        epig(GaussianPredictive(torch.zeros(2, 3), torch.tensor(1.0)), p)
    several = BernoulliPredictive.from_logits(torch.zeros(4, 5, 2), keep_samples=True)
    with pytest.raises(ValueError, match=r"one label an example, got samples of shape \(4, 5, 2, "):
        batch_bald(several, 1)
    for num in (0, 6):
        with pytest.raises(ValueError, match="num_examples must lie from 1 to 5"):
            batch_bald(p, num)
    with pytest.raises(ValueError, match="num_configurations must be at least 1, got 0"):
        batch_bald(p, 2, num_configurations=0)
    for wrong_number in (2.0, True):
        with pytest.raises(TypeError, match="num_examples must be a whole number, got"):
            batch_bald(p, wrong_number)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"num_configurations must be a whole number, got 2\.5"):
        joint_information(p, [0], num_configurations=2.5)  # type: ignore[arg-type]
    for wrong in ([], [5], [-1], [0.5]):
        with pytest.raises(ValueError, match="indices must be at least one integer from 0 to 4"):
            joint_information(p, wrong)  # type: ignore[arg-type]
    for alone in (0, torch.tensor(1)):
        with pytest.raises(ValueError, match=r"indices must be a sequence, got \d; write \["):
            joint_information(p, alone)  # type: ignore[arg-type]
    none = CategoricalPredictive.from_logits(torch.zeros(4, 0, 2), keep_samples=True)
    with pytest.raises(ValueError, match="the targets must be at least one example, got 0"):
        epig(p, none)
    with pytest.raises(ValueError, match="same weight samples, got 4 and 3 samples"):
        epig(p, predictive(num_samples=3))


def classifier() -> tuple[bf.BayesianModule, Tensor]:
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pool = torch.randn(50, 3)
        for parameter in net.parameters():
            nn.init.normal_(parameter)
    return bf.BayesianModule(net, init_std=0.5, seed=3), pool


@pytest.mark.parametrize("method", ["batch-bald", "bald", "epig", "entropy", "random"])
def test_acquire_chooses_what_the_function_says(method: str) -> None:
    bnn, pool = classifier()
    targets = pool[:7] if method == "epig" else None
    found = bf.acquire(bnn, pool, 5, method, target_inputs=targets, num_samples=30)  # type: ignore[arg-type]
    assert found.dtype == torch.int64
    assert len(set(found.tolist())) == 5
    assert torch.equal(
        found,
        bf.acquire(bnn, pool, 5, method, target_inputs=targets, num_samples=30),  # type: ignore[arg-type]
    )
    p = bnn.predict(pool, 30, keep_samples=True)
    expected = {
        "batch-bald": lambda: batch_bald(p, 5, seed=3)[0],
        "bald": lambda: p.epistemic.topk(5).indices,
        "epig": lambda: epig(p, bnn.predict(pool[:7], 30, keep_samples=True)).topk(5).indices,
        "entropy": lambda: p.total.topk(5).indices,
    }
    if method in expected:
        assert torch.equal(found, expected[method]())
    else:
        assert not torch.equal(found, bf.acquire(bnn, pool, 5, "random", seed=4))


@pytest.mark.parametrize("seed", [np.int64(3), -3, 2**64, -(2**70)])
def test_any_seed_of_a_network_draws_configurations(seed: int) -> None:
    bnn = bf.BayesianModule(nn.Linear(3, 10), init_std=1.0, seed=seed)
    pool = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    chosen = bf.acquire(bnn, pool, 5, num_samples=10)  # of 10^5 configurations 1000 are drawn
    assert torch.equal(chosen, bf.acquire(bnn, pool, 5, num_samples=10, seed=int(seed)))
    counts = bf.BayesianModule(nn.Linear(3, 1), likelihood=bf.PoissonLikelihood())
    p = counts.predict(pool, 4)
    assert torch.equal(p.simulate(3, seed=seed), p.simulate(3, seed=int(seed)))


def test_a_seed_is_a_whole_number() -> None:
    p = bf.BayesianModule(nn.Linear(3, 2)).predict(torch.zeros(2, 3), 4, keep_samples=True)
    for seed in (None, 1.5):
        with pytest.raises(TypeError, match="seed must be a whole number, got"):
            batch_bald(p, 1, seed=seed)


def test_acquire_refuses_what_it_cannot_rank() -> None:
    bnn, pool = classifier()
    with pytest.raises(ValueError, match=r"method must be one of batch-bald, bald, .* got 'best'"):
        bf.acquire(bnn, pool, 1, "best")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="without target_inputs"):
        bf.acquire(bnn, pool, 1, "epig")
    with pytest.raises(ValueError, match="with target_inputs"):
        bf.acquire(bnn, pool, 1, "bald", target_inputs=pool)
    for num in (0, 51):
        with pytest.raises(ValueError, match="num_examples must lie from 1 to 50"):
            bf.acquire(bnn, pool, num)
    with pytest.raises(TypeError, match=r"num_examples must be a whole number, got 2\.5"):
        bf.acquire(bnn, pool, 2.5)  # type: ignore[arg-type]
    numbers = bf.BayesianModule(nn.Linear(3, 1), likelihood=bf.GaussianLikelihood(std=1.0))
    with pytest.raises(TypeError, match="got GaussianLikelihood"):
        bf.acquire(numbers, pool, 1, "bald")
    with pytest.raises(TypeError, match=r"got DeepEnsemble; rank its prediction: .*batch_bald\("):
        bf.acquire(bf.DeepEnsemble([bnn]), pool, 1)  # type: ignore[arg-type]
    several = bf.BayesianModule(nn.Linear(3, 2), likelihood=bf.BernoulliLikelihood())
    with pytest.raises(
        ValueError, match=r'"batch-bald" needs one label .* \(50, 2\); use method="b'
    ):
        bf.acquire(several, pool, 1)


@pytest.mark.parametrize("likelihood", [bf.BernoulliLikelihood(), bf.CategoricalLikelihood()])
@pytest.mark.parametrize("method", ["bald", "entropy"])
def test_the_labels_of_an_example_are_added_up(
    method: Acquisition, likelihood: bf.Likelihood[Any]
) -> None:
    pool = classifier()[1]
    net = nn.Sequential(nn.Linear(3, 12), nn.Unflatten(1, (4, 3)))
    bnn = bf.BayesianModule(net, likelihood=likelihood)
    p = bnn.predict(pool)
    scores = p.epistemic if method == "bald" else p.total
    assert scores.dim() > 1
    expected = scores.flatten(1).sum(1).topk(5).indices
    assert torch.equal(bf.acquire(bnn, pool, 5, method), expected)


def test_labels_of_which_some_are_padding_are_not_added_up() -> None:
    net = nn.Sequential(nn.Linear(3, 12), nn.Unflatten(1, (4, 3)))
    bnn = bf.BayesianModule(net, likelihood=bf.CategoricalLikelihood(ignore_index=-100))
    with pytest.raises(ValueError, match="does not know which of the pool's are padding; add up"):
        bf.acquire(bnn, classifier()[1], 2, "bald")


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        sent: Tensor = self.layer(nodes)
        return sent.index_add(0, edges[1], sent[edges[0]])


@pytest.mark.parametrize("method", get_args(Acquisition))
def test_the_nodes_of_a_graph_are_chosen(method: Acquisition) -> None:
    nodes = classifier()[1]
    edges = torch.stack([torch.arange(30), torch.arange(30).flip(0)])
    bnn = bf.BayesianModule(Graph(), init_std=0.5)
    targets = (nodes, edges) if method == "epig" else None
    with pytest.raises(ValueError, match='predict and acquire take them with batch_size="all"'):
        bf.acquire(bnn, (nodes, edges), 5, method, target_inputs=targets)
    chosen = bf.acquire(bnn, (nodes, edges), 5, method, target_inputs=targets, batch_size="all")
    assert len(set(chosen.tolist())) == 5
    p = bnn.predict((nodes, edges), batch_size="all", keep_samples=True)
    if method == "bald":
        assert torch.equal(chosen, p.epistemic.topk(5).indices)
    if method == "batch-bald":
        assert torch.equal(chosen, batch_bald(p, 5)[0])


@pytest.mark.parametrize("method", ["batch-bald", "bald", "epig"])
def test_one_weight_vector_has_no_information_to_rank_by(method: Acquisition) -> None:
    bnn, pool = classifier()
    point = bf.BayesianModule(bnn.to_module(), posterior=bf.Delta)
    targets = pool[:7] if method == "epig" else None
    with pytest.raises(ValueError, match=f'method="{method}" needs .* spread, .*got Delta'):
        bf.acquire(point, pool, 3, method, target_inputs=targets)
    with pytest.raises(ValueError, match=f'at least 2 for method="{method}", .*, got 1; use'):
        bf.acquire(bnn, pool, 3, method, target_inputs=targets, num_samples=1)
    found = bf.acquire(point, pool, 3, "entropy", num_samples=1)
    assert torch.equal(found, point.predict(pool, 1).total.topk(3).indices)


def test_the_members_of_an_ensemble_are_weight_samples() -> None:
    members = []
    for seed in range(3):
        bnn, pool = classifier()
        bnn.seed = seed
        members.append(bnn)
    p = bf.DeepEnsemble(members).predict(pool, 4, keep_samples=True)
    indices, gains = batch_bald(p, 3)
    assert float(gains.sum()) == pytest.approx(enumerated(p, indices.tolist()), abs=1e-5)


def test_examples_that_are_no_numbers_are_not_asked_for() -> None:
    pool = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    pool[3] = torch.nan
    bnn = bf.BayesianModule(torch.nn.Linear(4, 2))
    for method in ("bald", "entropy", "batch-bald"):
        with pytest.raises(ValueError, match=r"(?s)finite|numbers.*example 3"):
            bf.acquire(bnn, pool, 3, method=method)


def test_a_mask_is_no_list_of_examples() -> None:
    p = CategoricalPredictive.from_logits(torch.zeros(2, 3, 2), keep_samples=True)
    with pytest.raises(ValueError, match="indices must be at least one integer"):
        joint_information(p, torch.tensor([True, False, True]))
