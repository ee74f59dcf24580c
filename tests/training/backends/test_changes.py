"""What changes between the steps of a run is noticed, and trained or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.backend_cases import has_compiler, needs_compiler
from tests.cases import mlp, normals
from tests.loops import loop_over
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import bayesify as bf
from bayesify.module.pruning import prune_in_place
from bayesify.training.backends import AutogradBackend, Backend, StepOptions, make_backend

N = 22
X, Y = normals(N, 3, seed=1), torch.arange(N) % 4
EACH = ["compiled", "closed-form", "auto"] if has_compiler else ["closed-form", "auto"]
Change = Callable[[bf.ELBO, Optimizer], object]


def elbo(**options: Any) -> bf.ELBO:
    torch.manual_seed(0)
    bnn = bf.BayesianModule(mlp(torch.float64), **{"init_std": 0.1, "seed": 5, **options})
    return bf.ELBO(bnn, num_data=N)


def run(backend: Backend, steps: int = 2) -> None:
    for _ in range(steps):
        backend.step(X, Y, StepOptions(batch_index=0))


def state(each: bf.ELBO) -> Tensor:
    return torch.cat([p.detach().clone() for p in each.bnn.parameters()])


@loop_over("backend", EACH)
def test_another_prior_in_the_place_of_the_old_one_is_noticed(backend: Any) -> None:
    """Python gives the memory of a prior to the next one as soon as nothing holds it."""

    def train(*, same_place: bool) -> Tensor:
        each = elbo(prior=bf.Gaussian(1.0))
        made = make_backend(each, SGD(each.parameters(), lr=0.1), backend)
        run(made)
        place, held = id(each.bnn.weight_prior), []
        for _ in range(100):
            each.bnn.prior = bf.Gaussian(0.05)
            if not same_place:
                held.append(each.bnn.prior)
            elif id(each.bnn.weight_prior) == place:
                break
        run(made)
        return state(each)

    assert torch.equal(train(same_place=True), train(same_place=False))


def hook(*_: Any) -> None: ...


HOOKS: dict[str, Change] = {
    "before a step": lambda _, o: o.register_step_pre_hook(hook),
    "after a step": lambda _, o: o.register_step_post_hook(hook),
    "of the mean": lambda e, _: e.bnn.posterior.mean.register_hook(hook),
    "of rho": lambda e, _: e.bnn.posterior.get_parameter("rho").register_hook(hook),
    "accumulated": lambda e, _: e.bnn.posterior.mean.register_post_accumulate_grad_hook(hook),
    "of the objective": lambda e, _: e.register_forward_hook(hook),
    "of the network": lambda e, _: e.bnn.register_forward_pre_hook(hook),
    "of the posterior": lambda e, _: e.bnn.posterior.register_forward_hook(hook),
}


@needs_compiler
@loop_over("name", HOOKS)
def test_hooks_added_between_steps_are_not_passed_over(name: str) -> None:
    each = elbo()
    sgd = SGD(each.parameters(), lr=0.1)
    backend = make_backend(each, sgd, "compiled")
    run(backend)
    HOOKS[name](each, sgd)
    with pytest.raises(ValueError, match=r'backend="compiled" does not .* has hooks; use'):
        run(backend)


@needs_compiler
def test_hooks_of_all_optimizers_are_not_passed_over() -> None:
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        called: list[object] = []
        each = elbo()
        backend = make_backend(each, SGD(each.parameters(), lr=0.1))
        run(backend)
        handle = register(lambda *_, called=called: called.append(None))
        try:
            run(backend)
            run(make_backend(each, SGD(each.parameters(), lr=0.1)))
        finally:
            handle.remove()
        assert len(called) == 4


@needs_compiler
def test_hooks_of_gradients_added_in_a_run_are_called() -> None:
    each, called = elbo(), []
    backend = make_backend(each, SGD(each.parameters(), lr=0.1))
    run(backend)
    each.bnn.posterior.mean.register_hook(lambda gradient: called.append(gradient))
    run(backend)
    assert len(called) == 2
    assert backend.description == "fused objective (mean has hooks)"


def frozen(each: bf.ELBO, _: Optimizer) -> None:
    each.bnn.posterior.get_parameter("rho").requires_grad_(False)


def decayed(_: bf.ELBO, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.1


def student_t(each: bf.ELBO, _: Optimizer) -> None:
    each.bnn.prior = bf.StudentT()


def amsgrad(_: bf.ELBO, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["amsgrad"] = True


def pruned(each: bf.ELBO, _: Optimizer) -> None:
    prune_in_place(each.bnn, 0.5)


@needs_compiler
@loop_over(
    "change, reason", [(frozen, "mean or rho is not trained"), (decayed, "the optimizer has")]
)
def test_a_change_with_a_fused_objective_is_trained_by_it(change: Change, reason: str) -> None:
    found, expected = elbo(), elbo()
    adam, other = (Adam(e.parameters(), lr=0.01, foreach=False) for e in (found, expected))
    auto, fused = make_backend(found, adam), AutogradBackend(expected, other, fused=True)
    for each, optimizer, backend in ((found, adam, auto), (expected, other, fused)):
        run(backend)
        change(each, optimizer)
        run(backend)
    assert auto.description.startswith(f"fused objective ({reason}")
    assert auto.noise == "counter"
    assert torch.allclose(state(found), state(expected), rtol=1e-9, atol=1e-12)


@needs_compiler
@loop_over(
    "change, estimator, reason",
    [
        (student_t, None, "the prior is StudentT"),
        (amsgrad, None, "the optimizer has amsgrad True"),
        (
            pruned,
            bf.LocalReparameterization(),
            "weights are pruned, or are an embedding's padding row",
        ),
    ],
)
def test_any_other_change_is_one_error_that_names_it(
    change: Change, estimator: Any, reason: str
) -> None:
    each = elbo(estimator=estimator)
    adam = Adam(each.parameters())
    backend = make_backend(each, adam)
    run(backend)
    change(each, adam)
    before = state(each)
    with pytest.raises(ValueError, match=f"cannot go on after this change .*: {reason}; undo"):
        run(backend)
    assert torch.equal(state(each), before)


@loop_over("change", [student_t, frozen, pruned])
def test_a_run_with_pytorchs_noise_goes_on_by_autograd(change: Change) -> None:
    found, expected = elbo(), elbo()
    sgd, other = (SGD(e.parameters(), lr=0.1) for e in (found, expected))
    auto, plain = make_backend(found, sgd, noise="generator"), AutogradBackend(expected, other)
    for each, optimizer, backend in ((found, sgd, auto), (expected, other, plain)):
        run(backend)
        change(each, optimizer)
        run(backend)
    assert auto.noise == "generator"
    assert torch.allclose(state(found), state(expected), rtol=1e-9, atol=1e-12)


@loop_over("backend", EACH)
def test_a_mask_edited_in_place_holds_from_the_next_step_on(backend: Any) -> None:
    seen: list[Tensor] = []

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.weight.detach().clone())
            return super().forward(x)

    each = bf.ELBO(bf.prune(bf.BayesianModule(Net(3, 4).double()), 0.2), num_data=N)
    made = make_backend(each, SGD(each.parameters(), lr=0.1), backend)
    run(made)
    assert each.bnn.posterior.mask is not None
    each.bnn.posterior.mask[:] = False
    run(made, 1)
    assert bool((seen[-2] != 0.0).any())
    assert bool((seen[-1] == 0.0).all())


@loop_over("backend", EACH)
def test_autograd_notices_a_step_between_a_graph_and_its_backward_pass(backend: Any) -> None:
    each = elbo()
    q = each.bnn.posterior
    made = make_backend(each, SGD(each.parameters(), lr=0.1), backend)
    run(made)
    losses = q.mean.square().sum(), q.get_parameter("rho").square().sum()
    run(made, 1)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@loop_over("num_samples", [1, 3])
def test_gradients_that_are_kept_stay_as_they_are(num_samples: int) -> None:
    """As by an optimiser that compares the gradients of two steps."""
    kept: list[Tensor] = []
    copies: list[Tensor] = []

    class Keeping(SGD):
        def step(self, *_: Any) -> None:  # type: ignore[override]
            (mean, rho) = (p.grad for p in self.param_groups[0]["params"])
            kept.extend((mean, rho.view(-1), rho.detach()))
            copies.extend((mean.clone(), rho.clone(), rho.clone()))

    each = elbo()
    each.num_samples = num_samples
    q = each.bnn.posterior
    run(make_backend(each, Keeping([q.mean, q.get_parameter("rho")], lr=0.1), "closed-form"), 3)
    assert all(map(torch.equal, kept, copies))
    assert not torch.equal(kept[0], kept[3])
