"""Priors that differ between parameters, and priors that are not centred at zero."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from scipy import integrate, stats
from tests.cases import PRIORS, mlp, normals
from tests.distributions.test_kl import TiedTwice
from tests.loops import loop_over
from torch import Tensor

from bayesify import (
    ByGroup,
    EmpiricalGaussian,
    Gaussian,
    Laplace,
    LogUniform,
    MeanFieldGaussian,
    ParameterLayout,
    Prior,
    ScaleMixture,
    StudentT,
    kl_divergence,
)
from bayesify.distributions import kl as divergence
from bayesify.distributions.kl import has_closed_form
from bayesify.distributions.priors import BlockPrior

MLP = ParameterLayout.of(mlp())  # sizes 15, 5, 20, 4
POOLED = EmpiricalGaussian(min_size=2, per_parameter=False)
NESTED: dict[str, Prior] = {
    "closed": ByGroup({"*.bias": Laplace(0.5), "*": Gaussian(0.3)}),
    "monte-carlo": ByGroup({"*.bias": StudentT(3.0, 0.4), "*": ScaleMixture(0.5, 1.0, 0.1)}),
    "mixed": ByGroup({"0.*": ScaleMixture(0.5, 1.0, 0.1), "2.bias": POOLED, "*": Gaussian(0.3)}),
    "empirical": EmpiricalGaussian(min_size=6, small_std=0.7),
    "empirical-pooled": ByGroup({"*.bias": Laplace(0.5), "*": POOLED}),
}
each_nested = loop_over("name", NESTED)


@loop_over("prior", PRIORS.values())
def test_one_density_for_all_weights_is_its_own_prior_of_every_layout(prior: Prior) -> None:
    assert prior.for_layout(MLP) is prior


GAUSSIAN, LAPLACE, FIXED = Gaussian(0.3), Laplace(0.5), Gaussian(1.0)
LEAF = dataclasses.replace(POOLED, min_size=6)
SMALL = dataclasses.replace(POOLED, min_size=40)
LAYOUTS: list[tuple[Prior, tuple[int, ...], tuple[Prior, ...], tuple[int, ...]]] = [
    (ByGroup({"*.bias": LAPLACE, "*": GAUSSIAN}), (15, 5, 20, 4), (GAUSSIAN, LAPLACE) * 2, ()),
    (ByGroup([("0.*", LAPLACE), ("*", GAUSSIAN)]), (20, 24), (LAPLACE, GAUSSIAN), ()),
    (
        ByGroup({"0.bias": FIXED, "*.bias": LAPLACE, "*": Gaussian(1.0)}),
        (40, 4),
        (FIXED, LAPLACE),
        (),
    ),
    (EmpiricalGaussian(6), (15, 5, 20, 4), (LEAF, FIXED) * 2, ()),
    (
        EmpiricalGaussian(16),
        (20, 20, 4),
        (FIXED, dataclasses.replace(LEAF, min_size=16), FIXED),
        (),
    ),
    (
        EmpiricalGaussian(5),
        (15, 5, 20, 4),
        (*[dataclasses.replace(LEAF, min_size=5)] * 3, FIXED),
        (),
    ),
    (
        ByGroup({"*.bias": LAPLACE, "*": LEAF}),
        (15, 5, 20, 4),
        (LEAF, LAPLACE, LAPLACE),
        (0, 1, 0, 2),
    ),
    (ByGroup({"0.*": LEAF, "*": LEAF}), (20, 24), (LEAF, LEAF), ()),
    (ByGroup({"*.bias": SMALL, "*": LAPLACE}), (15, 5, 20, 4), (LAPLACE, FIXED) * 2, ()),
    (ByGroup({"0.bias": FIXED, "2.*": SMALL, "*": LAPLACE}), (15, 29), (LAPLACE, FIXED), ()),
]


@loop_over(("prior", "sizes", "priors", "owners"), LAYOUTS)
def test_the_blocks_of_a_layout(
    prior: Prior, sizes: tuple[int, ...], priors: tuple[Prior, ...], owners: tuple[int, ...]
) -> None:
    assert prior.for_layout(MLP) == BlockPrior(sizes, priors, owners)


def test_a_single_block_is_its_prior_itself() -> None:
    assert ByGroup({"*.bias": GAUSSIAN, "*": GAUSSIAN}).for_layout(MLP) == GAUSSIAN
    assert EmpiricalGaussian(44, 0.6, per_parameter=False).for_layout(MLP).min_size == 44
    assert EmpiricalGaussian(45, 0.6, per_parameter=False).for_layout(MLP) == Gaussian(0.6)


def test_every_name_of_a_tied_parameter_counts() -> None:
    layout = ParameterLayout.of(TiedTwice())
    prior = ByGroup({"second.weight": LAPLACE, "*": GAUSSIAN}).for_layout(layout)
    assert prior == BlockPrior((9, 6), (LAPLACE, GAUSSIAN))


def test_equal_by_value_and_hashable() -> None:
    pairs = [("*.bias", Laplace(0.5)), ("*", Gaussian(0.3))]
    prior = ByGroup(dict(pairs))
    assert prior == ByGroup(pairs) == ByGroup(iter(pairs)) == NESTED["closed"]
    assert len({prior, ByGroup(pairs), ByGroup(pairs[::-1])}) == 2
    assert prior.groups == tuple(pairs)
    with pytest.raises(dataclasses.FrozenInstanceError):
        prior.groups = ()


class Elsewhere(Prior):
    """A prior from elsewhere whose equality has no truth value, as that of tensors."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("ambiguous")

    def log_prob(self, weights: Tensor) -> Tensor:
        return -weights.square()


def test_a_prior_from_elsewhere_need_not_be_comparable() -> None:
    one, other = Elsewhere(), Elsewhere()
    blocks = ByGroup({"0.*": one, "*": other}).for_layout(MLP)
    assert blocks.sizes == (20, 24)
    assert blocks.priors[0] is one
    assert blocks.priors[1] is other


def weights_of(name: str) -> slice:
    return MLP.slice_of(name)


@each_nested
def test_the_log_density_is_that_of_each_block(name: str) -> None:
    prior = NESTED[name].for_layout(MLP)
    weights = normals(2, 3, 44, seed=1)
    if any(isinstance(part, EmpiricalGaussian) for part in prior.priors):
        with pytest.raises(TypeError, match="no density"):
            prior.log_prob(weights)
        return
    got = prior.log_prob(weights)
    given = dict(NESTED[name].groups)
    for parameter in MLP.names:
        density = given["*.bias"] if parameter.endswith("bias") else given["*"]
        place = weights_of(parameter)
        assert torch.equal(got[..., place], density.log_prob(weights[..., place]))


def posterior(kept: bool = False) -> MeanFieldGaussian:
    q = MeanFieldGaussian(0.4 * normals(44), torch.linspace(0.05, 0.9, 44, dtype=torch.float64))
    if kept:
        q.mask = normals(44, seed=5) > -0.6
    return q


def part_of(q: MeanFieldGaussian, place: list[int], centre: Tensor | None) -> MeanFieldGaussian:
    """A posterior over some of the weights that are left, by hand."""
    left = [i for i in place if q.mask is None or q.mask[i]]
    mean = q.mean.detach() if centre is None else q.mean.detach() - centre
    return MeanFieldGaussian(mean[left], q.std.detach()[left])


def by_hand(
    q: MeanFieldGaussian, noise: Tensor, centre: Tensor | None, method: str
) -> dict[str, float]:
    """The KL of each nested prior, put together from those of separate posteriors."""

    def of(prior: Prior, *names: str, size: int | None = None) -> float:
        place = [i for name in names for i in range(44)[weights_of(name)]]
        part = part_of(q, place, centre)
        draw = part.draw(noise[:, [i for i in place if q.mask is None or q.mask[i]]])
        if isinstance(prior, EmpiricalGaussian):
            variance = part.mean.square().mean() + part.std.square().mean()
            prior = Gaussian(variance.sqrt().item())
        use = method if has_closed_form(part, prior) else "monte-carlo"
        return kl_divergence(part, prior, draw, method=use).item()

    weights, biases = ("0.weight", "2.weight"), ("0.bias", "2.bias")
    mixture, small = ScaleMixture(0.5, 1.0, 0.1), Gaussian(0.7)
    return {
        "closed": of(GAUSSIAN, *weights) + of(LAPLACE, *biases),
        "monte-carlo": of(mixture, *weights) + of(StudentT(3.0, 0.4), *biases),
        "mixed": of(mixture, "0.weight", "0.bias")
        + of(GAUSSIAN, "2.weight")
        + of(POOLED, "2.bias"),
        "empirical": sum(of(POOLED, name) for name in weights) + of(small, *biases),
        "empirical-pooled": of(LAPLACE, *biases) + of(POOLED, *weights),
    }


def check_sum_of_parts(name: str, method: str, kept: bool, centred: bool) -> None:
    """Of separate posteriors over the weights that are left, with priors of their own."""
    q, noise = posterior(kept), normals(3, 44, seed=2)
    centre = 0.3 * normals(44, seed=3) if centred else None
    prior = NESTED[name].for_layout(MLP)
    got = kl_divergence(q, prior, q.draw(noise), method=method, prior_mean=centre)
    assert got.item() == pytest.approx(by_hand(q, noise, centre, method)[name], rel=1e-11)
    got.backward()
    assert bool((q.mean.grad != 0.0).any())
    if kept:
        assert not q.mean.grad[~q.mask].any()
        assert not q.rho.grad[~q.mask].any()


@each_nested
@loop_over("method", ["auto", "monte-carlo"])
@loop_over("kept", [False, True])
@loop_over("centred", [False, True])
def test_the_kl_is_the_sum_of_its_parts(name: str, method: str, kept: bool, centred: bool) -> None:
    check_sum_of_parts(name, method, kept, centred)


def rotated(right: Callable[[BlockPrior, Tensor], list[Tensor]]) -> Callable[..., list[Tensor]]:
    return lambda self, vector: right(self, vector.roll(1, -1))


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "weights one place off": lambda patch: patch.setattr(
        BlockPrior, "parts", rotated(BlockPrior.parts)
    ),
    "pruned weights counted": lambda patch: patch.setattr(
        divergence, "_masked_sum", lambda _, per_weight: per_weight.sum()
    ),
    "prior mean forgotten": lambda patch: patch.setattr(
        divergence, "_centred", lambda q, _: q.mean
    ),
    "last block left out": lambda patch: patch.setattr(
        torch, "stack", lambda terms: torch.cat([term[None] for term in terms[:-1]])
    ),
}


@loop_over("name", ["closed", "mixed", "empirical", "empirical-pooled"])
@loop_over("fault", FAULTS)
def test_a_planted_fault_leaves_the_sum_of_parts(
    name: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[fault](monkeypatch)
    with pytest.raises(AssertionError):
        check_sum_of_parts(name, "auto", True, True)


def test_closed_forms_of_all_blocks_or_none() -> None:
    q = posterior()
    found = {name: has_closed_form(q, p.for_layout(MLP)) for name, p in NESTED.items()}
    assert [name for name, has in found.items() if not has] == ["monte-carlo", "mixed"]
    for name, has in found.items():
        prior = NESTED[name].for_layout(MLP)
        if has:
            assert torch.equal(kl_divergence(q, prior), kl_divergence(q, prior, method="closed"))
            continue
        for method, message in (("auto", "pass draw"), ("closed", "has no registered closed form")):
            with pytest.raises(ValueError, match=message):
                kl_divergence(q, prior, method=method)


@loop_over("prior", PRIORS.values())
def test_a_prior_mean_is_a_shift(prior: Prior) -> None:
    """KL(q || p(w - m)) is the KL of q moved by -m, in closed form and draw by draw."""
    q, noise, centre = posterior(), normals(3, 44, seed=2), normals(44, seed=3)
    moved = MeanFieldGaussian(q.mean.detach() - centre, q.std.detach())
    for method in ("closed", "monte-carlo") if has_closed_form(q, prior) else ("monte-carlo",):
        got = kl_divergence(q, prior, q.draw(noise), method=method, prior_mean=centre)
        expected = kl_divergence(moved, prior, moved.draw(noise), method=method)
        assert got.item() == pytest.approx(expected.item(), rel=1e-12)
        assert got.item() != pytest.approx(kl_divergence(q, prior, q.draw(noise)).item(), rel=1e-3)


def test_a_prior_mean_in_the_formula() -> None:
    for mean, std, centre in [(0.3, 0.2, 0.5), (-2.0, 1.5, 1.0), (7.0, 0.1, 7.0)]:
        q = MeanFieldGaussian(torch.tensor([mean], dtype=torch.float64), std)
        shift = torch.tensor([centre], dtype=torch.float64)
        exact = math.log(0.6 / std) + (std**2 + (mean - centre) ** 2) / (2 * 0.6**2) - 0.5
        got = kl_divergence(q, Gaussian(0.6), prior_mean=shift).item()
        assert got == pytest.approx(exact, rel=1e-12, abs=1e-12)
        kink = (centre - mean) / std
        exact, _ = integrate.quad(
            lambda z, m=mean - centre, s=std: (
                stats.norm.pdf(z) * (stats.norm.logpdf(z) - math.log(s) + abs(m + s * z) / 0.6)
            ),
            -14.0,
            14.0,
            points=[kink] if abs(kink) < 14.0 else None,
            epsabs=1e-12,
            epsrel=1e-12,
            limit=200,
        )
        got = kl_divergence(q, Laplace(0.6), prior_mean=shift).item()
        assert got == pytest.approx(exact + math.log(2 * 0.6), rel=1e-9)


def test_a_group_tells_whether_it_is_proper_and_learned() -> None:
    for prior in (Gaussian(0.3), LogUniform(), EmpiricalGaussian()):
        grouped = ByGroup({"*.bias": Laplace(0.5), "*": prior})
        assert grouped.is_proper == prior.is_proper
        assert grouped.is_learned == prior.is_learned


@dataclasses.dataclass
class NotFrozen(Prior):
    """A prior of a user's, which has no hash."""

    std: float = 1.0

    def log_prob(self, weights: Tensor) -> Tensor:
        return torch.distributions.Normal(0.0, self.std).log_prob(weights)


def test_a_prior_without_a_hash_may_be_in_a_group() -> None:
    prior = ByGroup({"0.weight": NotFrozen(0.5), "0.bias": NotFrozen(0.5), "*": NotFrozen(2.0)})
    weights = normals(44)
    sizes = [0.5] * 20 + [2.0] * 24
    expected = torch.distributions.Normal(0.0, torch.tensor(sizes).double()).log_prob(weights)
    torch.testing.assert_close(prior.for_layout(MLP).log_prob(weights), expected)
