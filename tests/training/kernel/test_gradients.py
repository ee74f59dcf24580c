"""One step of a kernel on its own: gradients, optimisers and the next weights, weight by weight."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.backend_cases import PRIORS, each_compiled_kind, needs_compiler
from tests.cases import normals as numbers
from torch import Tensor

from bayesify import MeanFieldGaussian, kl_divergence
from bayesify.distributions.kl import has_closed_form
from bayesify.distributions.softplus import softplus, softplus_ratio
from bayesify.noise.threefry import normals
from bayesify.training.convergence import StdResidual, grouped
from bayesify.training.kernel.formulas import LeafKind, OptimizerRule, Rates, prior_blocks
from bayesify.training.kernel.interface import Kernel, Recipe, Vectors
from bayesify.training.kernel.native import NativeKernel
from bayesify.training.kernel.tensors import TensorKernel

KEY, STEP, KL_FACTOR = (-123, 456), 7, 0.03
#: Two roundings of each term that a gradient is a sum of, and some.
TOLERANCE = {torch.float32: 3e-6, torch.float64: 1e-12}
#: A momentum of 0 before: the moment after one step is the gradient itself, to the last bit.
ALL_OF_IT = Rates(lr=1.0, beta1=0.5)
each_prior = pytest.mark.parametrize("prior", PRIORS)
each_leaf = pytest.mark.parametrize("leaf", ["weights", "stds", "variances"])


@dataclass(frozen=True)
class Case:
    """What a kernel is given."""

    prior: str
    leaf: LeafKind
    mean: Tensor
    rho: Tensor
    in_mean: Tensor
    in_spread: Tensor
    starts: tuple[int, ...]
    prior_mean: Tensor | None = None
    mask: Tensor | None = None

    @classmethod
    def of(cls, prior: str, size: int, *, leaf: LeafKind = "weights", **given: Any) -> Case:
        parts = given.pop("starts", (0, size))
        drawn = [numbers(size, seed=seed) for seed in range(4)]
        fields = dict(zip(("mean", "rho", "in_mean", "in_spread"), drawn, strict=True))
        fields |= {"mean": 0.3 * drawn[0], "rho": drawn[1] - 2.0, **given}
        return cls(prior, leaf, starts=parts, **fields)

    def vectors(self, dtype: torch.dtype, rule: OptimizerRule) -> Vectors:
        count = {"sgd": 0, "momentum": 1, "adam": 2}[rule]
        mean, rho = (vector.to(dtype, copy=True) for vector in (self.mean, self.rho))
        moments = [tuple(torch.zeros_like(mean) for _ in range(count)) for _ in range(2)]
        prior_mean = None if self.prior_mean is None else self.prior_mean.to(dtype)
        leaf = torch.full_like(mean, math.nan)
        return Vectors(mean, rho, leaf, *moments, self.starts, prior_mean, self.mask)

    def parts(self, vector: Tensor, dtype: torch.dtype) -> list[Tensor]:
        sizes = [stop - start for start, stop in zip(self.starts, self.starts[1:], strict=False)]
        return [part.clone() for part in vector.to(dtype).split(sizes)]


def make(kind: str, case: Case, vectors: Vectors, rule: OptimizerRule) -> Kernel:
    form = prior_blocks(*PRIORS[case.prior][:2])
    assert form is not None
    recipe = Recipe(form, rule, case.leaf, vectors.mean.dtype)
    if kind == "kernel":
        return NativeKernel(recipe, vectors, KEY)
    return TensorKernel(recipe, vectors, KEY, compiled=False)


def updated(
    kind: str,
    case: Case,
    dtype: torch.dtype = torch.float64,
    rule: OptimizerRule = "momentum",
    rates: Rates = ALL_OF_IT,
    *,
    none: bool = False,
    **wrong: Any,
) -> tuple[Vectors, Tensor, StdResidual]:
    """The vectors after one step, the leaf that it had, and what it returned.

    With ``none`` no parameter has a gradient.
    """
    vectors = case.vectors(dtype, rule)
    kernel = make(kind, case, vectors, rule)
    kernel.refresh(STEP)
    leaf = vectors.leaf.clone()
    in_mean: list[Tensor | None] = [*case.parts(case.in_mean, dtype)]
    in_spread: list[Tensor | None] = [*case.parts(case.in_spread, dtype)]
    in_spread = [] if case.leaf == "weights" else in_spread
    if none:
        in_mean, in_spread = [None] * len(in_mean), [None] * len(in_spread)
    given = {"step": STEP, "kl_factor": KL_FACTOR, "rates": (rates, rates), **wrong}
    given["with_residual"] = True
    residual = kernel.update(in_mean, in_spread, **given)
    assert residual is not None
    return vectors, leaf, residual


def noise(step: int, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return normals(*KEY, step, size, dtype=dtype, device="cpu")


def expected(case: Case, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients by autograd in float64."""
    q = MeanFieldGaussian(case.mean, std=1.0)
    q.rho.data.copy_(case.rho)
    q.mask = case.mask
    draw = q.draw(drawn.unsqueeze(0))
    prior, kl, _ = PRIORS[case.prior]
    if case.leaf == "weights":
        loss = (draw.weights[0] * case.in_mean).sum()
    else:
        spread = q.std if case.leaf == "stds" else q.std.square()
        loss = (q.masked_mean * case.in_mean).sum() + (spread * case.in_spread).sum()
    loss = loss + KL_FACTOR * kl_divergence(q, prior, draw, method=kl, prior_mean=case.prior_mean)
    loss.backward()
    assert q.mean.grad is not None
    assert q.rho.grad is not None
    return q.mean.grad, q.rho.grad


def curvature(case: Case, drawn: Tensor) -> Tensor:
    """|d2 log p / dw2| at the sampled weights, where the KL is estimated at these."""
    prior, kl, _ = PRIORS[case.prior]
    if has_closed_form(MeanFieldGaussian(case.mean, 1.0), prior) and kl == "auto":
        return torch.zeros_like(drawn)
    centre = 0.0 if case.prior_mean is None else case.prior_mean
    weights = case.mean + softplus(case.rho) * drawn - centre
    ends = torch.stack([weights - 1e-6, weights + 1e-6]).requires_grad_()
    (slopes,) = torch.autograd.grad(prior.log_prob(ends).sum(), ends)
    return (slopes[1] - slopes[0]).abs() / 2e-6


def check_gradients(kind: str, case: Case, dtype: torch.dtype, **wrong: Any) -> None:
    """Against autograd, relative to the terms that each gradient is a sum of."""
    # What the numbers are in this precision.
    exact = {
        name: getattr(case, name).to(dtype).double()
        for name in ("mean", "rho", "in_mean", "in_spread", "prior_mean")
        if getattr(case, name) is not None
    }
    case = replace(case, **exact)
    vectors, leaf, residual = updated(kind, case, dtype, **wrong)
    std = softplus(case.rho)
    drawn = noise(STEP, len(std))
    if case.leaf == "weights" and case.mask is None:
        # At the very weights that the network had, where a prior may be steep.
        drawn = torch.where(std > 1e-30, (leaf.double() - case.mean) / std, drawn)
    in_mean, in_rho = expected(case, drawn)
    ratio = softplus_ratio(std)
    in_log_std = in_rho / ratio
    found_mean, found_rho = (m[0].double() for m in (vectors.of_mean, vectors.of_rho))
    # A weight is uncertain by a rounding of what it is a sum of: so is what it is read by.
    size = case.mean.abs() + std + (0.0 if case.prior_mean is None else case.prior_mean.abs())
    of_mean = case.in_mean.abs() + (in_mean - case.in_mean).abs()
    of_mean = of_mean + KL_FACTOR * size * curvature(case, drawn)
    through = {
        "weights": case.in_mean * size,
        "stds": case.in_spread * std,
        "variances": 2.0 * case.in_spread * std.square(),
    }[case.leaf]
    of_log_std = through.abs() + in_log_std.abs() + KL_FACTOR + of_mean * size
    by_snr, counts = grouped(in_log_std, case.mean, std, case.mask)
    assert residual.counts == tuple(counts.int().tolist())
    largest, _ = grouped(of_log_std, case.mean, std, case.mask)
    for what, found, wanted, terms in (
        ("mean", found_mean, in_mean, of_mean),
        ("rho", found_rho, in_rho, ratio * of_log_std),
        ("log std", torch.tensor(residual.sums, dtype=torch.float64), by_snr, largest + 1e-300),
    ):
        assert bool(found.isfinite().all()), f"a gradient in {what} is not finite"
        error = ((found - wanted).abs() / terms).max()
        assert bool(error <= TOLERANCE[dtype]), f"the gradient in {what} is {float(error):.1e} off"


each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])
SIZES = [1, 255, 256, 257, 8191, 8192, 8193, 20_000]


@each_compiled_kind
@each_prior
@each_leaf
@each_dtype
def test_gradients_are_autograds(kind: str, prior: str, leaf: LeafKind, dtype: torch.dtype) -> None:
    case = Case.of(prior, 700, leaf=leaf, prior_mean=0.2 * numbers(700, seed=9))
    check_gradients(kind, case, dtype)


@each_compiled_kind
@each_prior
@each_leaf
@each_dtype
def test_gradients_at_extremes(kind: str, prior: str, leaf: LeafKind, dtype: torch.dtype) -> None:
    # In both tails of the mixture, at its peak, and with a std of nothing.
    means = torch.tensor([0.0, 1e-8, -1e-8, 3e-4, -0.02, 1.0, 50.0, -50.0], dtype=torch.float64)
    rhos = torch.tensor([-100.0, -30.0, -8.0, 0.0, 30.0, 100.0], dtype=torch.float64)
    mean, rho = torch.cartesian_prod(means, rhos).unbind(1)
    if PRIORS[prior][1] == "monte-carlo" and "laplace" in prior:
        # Where float32 has no std, the weight is 0, and its slope any between those next to it.
        mean = torch.where(rho == -100.0, mean + 0.01, mean)
    check_gradients(kind, Case.of(prior, len(mean), leaf=leaf, mean=mean, rho=rho), dtype)


@each_compiled_kind
@each_leaf
@each_dtype
def test_gradients_where_every_std_is_small(kind: str, leaf: LeafKind, dtype: torch.dtype) -> None:
    # For blocks of stds below 1/2 the kernel has a shorter formula.
    rho = torch.linspace(-30.0, -0.44, 700, dtype=torch.float64)
    check_gradients(kind, Case.of("scale-mixture", 700, leaf=leaf, rho=rho), dtype)


@each_compiled_kind
@each_leaf
@each_dtype
def test_laplaces_score_is_zero_at_its_mean(kind: str, leaf: LeafKind, dtype: torch.dtype) -> None:
    # A std of exactly 0: each sampled weight is its mean, which is the prior's.
    mean, rho = numbers(9), torch.full((9,), -1000.0, dtype=torch.float64)
    case = Case.of("laplace-monte-carlo", 9, leaf=leaf, mean=mean, prior_mean=mean, rho=rho)
    vectors, _, _ = updated(kind, case, dtype)
    assert torch.equal(vectors.of_mean[0], case.in_mean.to(dtype))


@each_compiled_kind
@pytest.mark.parametrize("size", SIZES)
def test_any_number_of_weights(kind: str, size: int) -> None:
    # Parameters of one element and of none, and borders within blocks and chunks.
    inner = [at for at in (0, 1, 1, 2, 100, 256, 300, 8190, 8192) if at < size]
    starts = (0, *inner, size)
    case = Case.of("laplace", size, starts=starts)
    check_gradients(kind, case, torch.float64)
    vectors, leaf, _ = updated(kind, case)
    for found, mean, rho, step in (
        (leaf, case.mean, case.rho, STEP),
        (vectors.leaf, vectors.mean, vectors.rho, STEP + 1),
    ):
        assert torch.allclose(found, mean + softplus(rho) * noise(step, size), rtol=0, atol=1e-14)


@needs_compiler
@each_leaf
@each_dtype
def test_a_million_weights(leaf: LeafKind, dtype: torch.dtype) -> None:
    size = 2**20 + 300  # from 2^20 on blocks are fetched ahead
    case = Case.of("scale-mixture", size, leaf=leaf, starts=(0, 5000, 5000, 900_001, size))
    check_gradients("kernel", case, dtype)
    missing = replace(case, in_mean=torch.zeros(size), in_spread=torch.zeros(size))
    rates = Rates(0.1, 0.9, 0.99, 1e-8, 0.1, 0.01)
    found = updated("kernel", missing, dtype, "adam", rates, none=True)[0]
    wanted = updated("kernel", missing, dtype, "adam", rates)[0]
    assert torch.equal(found.mean, wanted.mean)
    assert torch.equal(found.rho, wanted.rho)


@each_compiled_kind
@each_prior
def test_a_pruned_weight_stays(kind: str, prior: str) -> None:
    kept = numbers(700, seed=5) > 0.3
    mean = torch.where(kept, 0.3 * numbers(700), 0.0)
    case = Case.of(prior, 700, mask=kept, mean=mean)
    vectors, leaf, _ = updated(kind, case)
    found = torch.stack([vectors.of_mean[0], vectors.of_rho[0]])
    wanted = torch.stack(expected(case, noise(STEP, 700)))
    assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-13)
    assert not bool(found[:, ~kept].any())
    assert not bool(leaf[~kept].any())
    assert not bool(vectors.leaf[~kept].any())
    assert torch.equal(vectors.rho[~kept], case.rho[~kept])


@each_compiled_kind
@each_dtype
def test_the_optimisers_are_torchs(kind: str, dtype: torch.dtype) -> None:
    made: dict[str, Any] = {
        "sgd": (torch.optim.SGD, {"lr": 0.1}),
        "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        "adam": (torch.optim.Adam, {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-3}),
    }
    case = Case.of("gaussian", 300, leaf="stds")
    gradient = updated(kind, case)[0].of_mean[0]
    for rule, (optimizer, settings) in made.items():
        beta1, beta2 = settings.get("betas", (settings.get("momentum", 0.0), 0.0))
        corrections = (1.0 - beta1, 1.0 - beta2) if rule == "adam" else (1.0, 1.0)
        rates = Rates(settings["lr"], beta1, beta2, settings.get("eps", 0.0), *corrections)
        found = updated(kind, case, dtype, rule, rates)[0]
        parameter = torch.nn.Parameter(case.mean.clone())
        parameter.grad = gradient.clone()
        torchs = optimizer([parameter], **settings)
        torchs.step()
        state = torchs.state[parameter]
        wanted = [parameter.detach(), *(state[n] for n in STATE[rule])]
        for one, two in zip((found.mean, *found.of_mean), wanted, strict=True):
            assert float((one - two).norm() / two.norm()) < TOLERANCE[dtype]


@each_compiled_kind
@each_dtype
def test_adam_of_gradients_of_every_size(kind: str, dtype: torch.dtype) -> None:
    # Those of mean and rho are divided together: neither may spoil the other, at the least eps.
    sizes = torch.tensor([0.0, 1e-17, 1e-12, 1e-6, 1.0, 1e6, 1e12], dtype=torch.float64)
    in_mean, in_spread = torch.cartesian_prod(sizes, -sizes).unbind(1)
    zeros = torch.zeros_like(in_mean)
    case = Case.of("gaussian", len(in_mean), leaf="stds", in_mean=in_mean, in_spread=in_spread)
    case = replace(case, mean=zeros, rho=zeros)
    once = updated(kind, case, kl_factor=0.0)[0]
    gradients = once.of_mean[0], once.of_rho[0]
    for steps_before, eps in ((0, 1e-12), (0, 1e-8), (10_000, 1e-12)):
        corrections = (1.0 - beta ** (steps_before + 1) for beta in (0.9, 0.999))
        rates = Rates(1.0, 0.9, 0.999, eps, *corrections)
        found = updated(kind, case, dtype, "adam", rates, kl_factor=0.0)[0]
        for value, gradient in zip((found.mean, found.rho), gradients, strict=True):
            first = 0.1 * gradient / rates.correction1
            wanted = -first / ((0.001 * gradient**2 / rates.correction2).sqrt() + eps)
            assert torch.allclose(value.double(), wanted, rtol=TOLERANCE[dtype], atol=1e-12)


@each_compiled_kind
def test_a_square_that_overflows_stops_its_number_alone(kind: str) -> None:
    # In float32 the square of 1e22 is infinite, as PyTorch's Adam has it too.
    huge, one = torch.tensor([1e22, 1.0]), torch.tensor([1.0, 1e22])
    case = Case.of("gaussian", 2, leaf="stds", in_mean=huge, in_spread=one)
    case = replace(case, mean=torch.zeros(2), rho=torch.zeros(2))
    rates = Rates(1.0, 0.9, 0.999, 1e-8, 0.1, 0.001)
    found = updated(kind, case, torch.float32, "adam", rates, kl_factor=0.0)[0]
    assert found.mean.tolist() == pytest.approx([0.0, -1.0], abs=1e-6)
    assert found.rho.tolist() == pytest.approx([-1.0, 0.0], abs=1e-6)


@each_compiled_kind
@pytest.mark.parametrize("gradient", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_no_number_is_not_lost(kind: str, gradient: float) -> None:
    # As in PyTorch's Adam the value is then no number either, which the next loss shows.
    wrong, one = torch.tensor([gradient, 1.0]), torch.ones(2)
    rates = Rates(1.0, 0.9, 0.999, 1e-8, 0.1, 0.001)
    for in_mean, in_spread in ((wrong, one), (one, wrong)):
        case = Case.of("gaussian", 2, leaf="stds", in_mean=in_mean, in_spread=in_spread)
        found = updated(kind, case, torch.float32, "adam", rates, kl_factor=0.0)[0]
        assert bool(found.mean[0].isnan()) == (in_mean is wrong)
        assert bool(found.rho[0].isnan()) == (in_spread is wrong)
        assert bool(found.mean[1].isfinite() and found.rho[1].isfinite())


STATE = {"sgd": (), "momentum": ("momentum_buffer",), "adam": ("exp_avg", "exp_avg_sq")}


@needs_compiler
@pytest.mark.parametrize("rule", STATE)
def test_any_number_of_threads_gives_the_same_bits(rule: OptimizerRule) -> None:
    case = Case.of("scale-mixture", 5 * 8192 + 17, starts=(0, 9000, 30_000, 5 * 8192 + 17))
    rates = Rates(0.1, 0.9, 0.99, 1e-8, 0.1, 0.01)
    results = []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(updated("kernel", case, torch.float32, rule, rates)[0])
    finally:
        torch.set_num_threads(1)
    for other in results[1:]:
        for name in ("mean", "rho", "leaf"):
            assert torch.equal(getattr(other, name), getattr(results[0], name))


WRONG: Sequence[tuple[str, dict[str, Any]]] = [
    ("scale-mixture-wide", {"kl_factor": 1.001 * KL_FACTOR}),
    ("gaussian", {"kl_factor": 0.0}),
    ("laplace-monte-carlo", {"step": STEP + 1}),
]


@each_compiled_kind
@pytest.mark.parametrize(("prior", "wrong"), WRONG, ids=["kl", "no kl", "noise"])
def test_a_planted_fault_is_caught(kind: str, prior: str, wrong: dict[str, Any]) -> None:
    case = Case.of(prior, 700, leaf="stds")
    for dtype in TOLERANCE:
        check_gradients(kind, case, dtype)
        with pytest.raises(AssertionError, match="off"):
            check_gradients(kind, case, dtype, **wrong)
