"""What a step of several weight samples keeps from one to the next, and what it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.backend_cases import (
    CLASSES,
    PRIORS,
    Task,
    backend_of,
    each_compiled_kind,
    each_kind,
    mlp,
    needs_compiler,
    use_counter_noise,
)
from tests.cases import normals as numbers
from tests.training.backends.test_agreement import options
from tests.training.backends.test_samples import PAIRS, several
from tests.training.kernel.test_gradients import KEY, KL_FACTOR, STEP, Case, noise
from torch import Tensor, nn

from bayesify import MeanFieldGaussian, kl_divergence
from bayesify.noise.threefry import normals
from bayesify.training import NonFiniteLossError
from bayesify.training.backends import GraphBackend, StepOptions
from bayesify.training.kernel.formulas import Rates, prior_blocks
from bayesify.training.kernel.interface import Kernel, Recipe, SampleNoise, Vectors
from bayesify.training.kernel.native import NativeKernel
from bayesify.training.kernel.tensors import TensorKernel


def outputs_of(kind: str, count: int, bnn: tuple[tuple[str, Any], ...] = ()) -> Tensor:
    task = several(Task(bnn=bnn), count)
    elbo = task.objective()
    step = backend_of(kind, elbo, task.optimizer_of(elbo))
    x, y, told = task.minibatches()[0]
    return step.step(x, y, StepOptions(**told)).outputs


@each_kind
def test_the_first_sample_is_that_of_a_backend_of_one(kind: str) -> None:
    one, three = outputs_of(kind, 1), outputs_of(kind, 3)
    assert torch.equal(one[0], three[0])
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert float((three[i] - three[j]).abs().min()) > 0.0


@each_kind
def test_a_step_that_broke_off_is_taken_anew(kind: str) -> None:
    """As after Ctrl-C or an error in the second pass; nothing of it is left behind."""
    task = several(Task("scale-mixture-wide"), 3)
    results = []
    for broken in (False, True):
        elbo = task.objective()
        step = backend_of(kind, elbo, task.optimizer_of(elbo))
        for number, (x, y, told) in enumerate(task.minibatches()[:4]):
            if broken and number == 2:
                passes = iter([None, RuntimeError("in the second pass")])
                hook = elbo.bnn.net.register_forward_pre_hook(lambda *_: throw(next(passes)))  # noqa: B023
                with pytest.raises(RuntimeError, match="second pass"):
                    step.step(x, y, StepOptions(**told))
                hook.remove()
                # Its number is the next one's, and once more where it was not learnt.
                with pytest.raises(NonFiniteLossError):
                    step.step(torch.full_like(x, torch.nan), y, StepOptions(**told))
                elbo.step -= 1
            step.step(x, y, StepOptions(**told))
        results.append(torch.cat([p.detach().flatten() for p in elbo.parameters()]))
    assert torch.equal(*results)


def throw(error: Exception | None) -> None:
    if error is not None:
        raise error


@each_kind
def test_the_number_of_samples_may_change(kind: str) -> None:
    task = Task("laplace-monte-carlo")
    elbo, specified = task.objective(), task.objective()
    specified.fused = False
    if kind != "closed-form":
        use_counter_noise(specified)
    step, optimizer = backend_of(kind, elbo, task.optimizer_of(elbo)), task.optimizer_of(specified)
    for number, (x, y, told) in enumerate(task.minibatches()[:9]):
        elbo.num_samples = specified.num_samples = 1 + number // 2
        step.step(x, y, StepOptions(**told))
        optimizer.zero_grad()
        specified(x, y, **told).loss.backward()
        optimizer.step()
    for one, two in zip(elbo.parameters(), specified.parameters(), strict=True):
        assert torch.allclose(one, two, rtol=1e-9, atol=1e-11)


@each_kind
def test_pairs_of_an_odd_number_are_refused(kind: str) -> None:
    task = replace(Task(bnn=PAIRS), elbo=options(num_samples=2))
    elbo = task.objective()
    step = backend_of(kind, elbo, task.optimizer_of(elbo))
    elbo.num_samples = 3
    x, y, told = task.minibatches()[0]
    for _ in range(2):  # as often as it is asked
        with pytest.raises(ValueError, match="even"):
            step.step(x, y, StepOptions(**told))


@each_kind
def test_under_autocast_each_sample_has_its_own_weights(kind: str) -> None:
    """Autocast keeps the cast of a leaf, which is written anew for each sample."""
    task = several(Task("scale-mixture-wide", dtype=torch.float32), 3)
    elbo, specified = task.objective(), task.objective()
    specified.fused = False
    if kind != "closed-form":
        use_counter_noise(specified)
    step = backend_of(kind, elbo, task.optimizer_of(elbo))
    x, y, told = task.minibatches()[0]
    with torch.autocast("cpu", torch.bfloat16):
        values = step.step(x, y, StepOptions(**told))
        torch.clear_autocast_cache()
        terms = specified(x, y, **told)
    one, two, three = values.outputs
    assert not torch.equal(one, two)
    assert not torch.equal(two, three)
    assert torch.allclose(values.outputs.float(), terms.outputs.float(), rtol=0.02, atol=0.02)


@needs_compiler
def test_any_number_of_threads_gives_the_same_bits() -> None:
    def wide() -> nn.Module:
        return nn.Sequential(*mlp()[:1], nn.Linear(33, 900), nn.Linear(900, CLASSES))

    task = several(Task("scale-mixture-wide", dtype=torch.float32, net=wide), 3)
    results = []
    try:
        for threads in (1, 2, 5):
            elbo = task.objective()
            step = backend_of("kernel", elbo, task.optimizer_of(elbo))
            x, y, told = task.minibatches()[0]
            torch.set_num_threads(1)
            step.step(x, y, StepOptions(**told))
            torch.set_num_threads(threads)
            step._posterior_update.accumulate([None] * 6, 1, 0.1)  # type: ignore[attr-defined]
            results.append(step._posterior_update._kernel._vectors)  # type: ignore[attr-defined]
    finally:
        torch.set_num_threads(1)
    for other in results[1:]:
        assert torch.equal(other.leaf, results[0].leaf)
        for one, two in zip(other.sums, results[0].sums, strict=True):
            assert torch.equal(one, two)


# --------------------------------------------------------------------------- the kernel on its own

#: Of the second and third sample: the first has that of ``KEY``.
NOISES = (SampleNoise((77, -8)), SampleNoise(KEY, opposite=True))
#: A momentum of 0 before: the moment after one step is the gradient itself.
RATES = Rates(lr=1.0, beta1=0.5)


def of_three(kind: str, case: Case, dtype: torch.dtype) -> tuple[Vectors, float, list[Tensor]]:
    """A kernel's vectors after a step of three samples, what it returned, and the samples."""
    form = prior_blocks(*PRIORS[case.prior][:2])
    assert form is not None
    vectors = case.vectors(dtype, "momentum")
    # Whatever memory holds before.
    sums = tuple(torch.full_like(vectors.mean, torch.nan) for _ in range(2))
    vectors = replace(vectors, sums=sums)
    recipe = Recipe(form, "momentum", "weights", dtype, num_samples=3)
    kernel: Kernel
    if kind == "kernel":
        kernel = NativeKernel(recipe, vectors, KEY)
    else:
        kernel = TensorKernel(recipe, vectors, KEY, compiled=False)
    kernel.refresh(STEP)
    leaves = []
    for sample, then in enumerate(NOISES):
        leaves.append(vectors.leaf.clone())
        given = case.parts((sample + 1) * case.in_mean, dtype)
        kernel.accumulate(given, step=STEP, kl_factor=KL_FACTOR, first=sample == 0, then=then)
    leaves.append(vectors.leaf.clone())
    last = case.parts(3 * case.in_mean, dtype)
    residual = kernel.update(
        last, [], step=STEP, kl_factor=KL_FACTOR, rates=(RATES, RATES), with_residual=True
    )
    assert residual is not None
    return vectors, sum(residual.sums), leaves


def cases(prior: str) -> list[Case]:
    mask, starts = numbers(700, seed=5) > 0.3, (0, 100, 100, 613, 700)
    mean = torch.where(mask, 0.3 * numbers(700), 0.0)
    return [
        Case.of(prior, 700, starts=starts, prior_mean=0.2 * numbers(700, seed=6)),
        Case.of(prior, 700, starts=starts, mask=mask, mean=mean),
    ]


@needs_compiler
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=["32", "64"]
)
def test_both_kernels_are_one(prior: str, dtype: torch.dtype, tolerance: float) -> None:
    # A rounding of a weight near the spike of precision 9e6 is one of its derivative.
    tolerance *= 1000 if prior == "scale-mixture" else 1
    for case in cases(prior):
        results = []
        for kind in ("kernel", "tensors"):
            vectors = of_three(kind, case, dtype)[0]
            made = (*vectors.of_mean, *vectors.of_rho)
            results.append((*made, *vectors.sums, vectors.leaf))
        for one, two in zip(*results, strict=True):
            assert float((one - two).norm() / two.norm()) < tolerance


@each_compiled_kind
@pytest.mark.parametrize("prior", PRIORS)
def test_a_kernels_gradients_are_autograds(kind: str, prior: str) -> None:
    for case in cases(prior):
        vectors, total, leaves = of_three(kind, case, torch.float64)
        drawn = torch.stack([noise(STEP, 700), other_noise(STEP, 700), -noise(STEP, 700)])
        q = MeanFieldGaussian(case.mean, std=1.0)
        q.rho.data.copy_(case.rho)
        q.mask = case.mask
        draw = q.draw(drawn)
        assert torch.allclose(torch.stack(leaves), draw.weights, rtol=0, atol=1e-14)
        density, kl, _ = PRIORS[prior]
        parts = torch.stack([(k + 1) * case.in_mean for k in range(3)])
        loss = (draw.weights * parts).sum() + KL_FACTOR * kl_divergence(
            q,
            density,
            draw,
            method=kl,
            prior_mean=case.prior_mean,  # type: ignore[arg-type]
        )
        loss.backward()
        assert q.mean.grad is not None
        assert q.rho.grad is not None
        found = torch.stack([vectors.of_mean[0], vectors.of_rho[0]])
        assert torch.allclose(found, torch.stack([q.mean.grad, q.rho.grad]), rtol=1e-9, atol=1e-12)
        expected = q.rho.grad / (torch.sigmoid(case.rho) / torch.nn.functional.softplus(case.rho))
        assert total == pytest.approx(float(expected.sum()), rel=1e-9, abs=1e-9)
        then = vectors.mean + torch.nn.functional.softplus(vectors.rho) * noise(STEP + 1, 700)
        then = then if case.mask is None else torch.where(case.mask, then, 0.0)
        assert torch.allclose(vectors.leaf, then, rtol=0, atol=1e-13)


def other_noise(step: int, size: int) -> Tensor:
    return normals(*NOISES[0].key, step, size, dtype=torch.float64, device="cpu")


@needs_compiler
def test_a_kernel_for_one_sample_takes_no_more() -> None:
    case = Case.of("gaussian", 30)
    form = prior_blocks(*PRIORS["gaussian"][:2])
    assert form is not None
    recipe = Recipe(form, "adam", "weights", torch.float64)
    kernel = NativeKernel(recipe, case.vectors(torch.float64, "adam"), KEY)
    with pytest.raises(ValueError, match="one weight sample"):
        kernel.accumulate(
            [case.in_mean], step=0, kl_factor=1.0, first=True, then=SampleNoise((1, 2))
        )


def test_several_samples_are_not_recorded() -> None:
    """One sample is; the number of samples may change on the way."""
    task, recorded = Task(), []

    def record(function: Any) -> Any:
        recorded.append(function)
        return function

    elbo = task.objective()
    backend = GraphBackend(elbo, task.optimizer_of(elbo), record, compiled=False)
    for number, (x, y, told) in enumerate(task.minibatches()):
        elbo.num_samples = 2 if number < 12 else 1
        assert len(backend.step(x, y, StepOptions(**told)).outputs) == elbo.num_samples
        assert len(recorded) == int(number >= 15), "after three steps to warm up"
