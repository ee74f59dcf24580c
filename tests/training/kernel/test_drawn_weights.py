"""Loops of one's own: the kernel within ``ELBO.forward`` is the objective by autograd."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tests.backend_cases import (
    CLASSES,
    INPUTS,
    PRIORS,
    Outcome,
    Task,
    distance,
    needs_compiler,
    specified,
    trained,
    use_counter_noise,
)
from torch import Tensor, nn

import bayesify as bf

pytestmark = needs_compiler

X, Y = torch.linspace(-1.0, 1.0, 6 * INPUTS).view(6, INPUTS), torch.arange(6) % CLASSES


def train_by_hand(task: Task) -> tuple[Mapping[str, Tensor], list[float]]:
    elbo, kls = task.objective(), []
    optimizer = task.optimizer_of(elbo)
    for number, (x, y, told) in enumerate(task.minibatches()):
        terms = elbo(x, y, **told)
        optimizer.zero_grad()
        terms.loss.backward()
        optimizer.step()
        if number % 10 == 0:
            kls.append(float(terms.kl.detach()))
    return Outcome().keep(elbo).state, kls


SEVERAL = (("num_samples", 4),)
PAIRS = (("estimator", bf.WeightSampling(antithetic=True)),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"elbo": SEVERAL}, {"pruned": 0.4}])
@pytest.mark.parametrize("prior", PRIORS)
def test_fifty_steps_are_the_specification(
    prior: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    task = Task(prior, dtype=dtype, **options)
    expected = specified(task, counter=True)
    found, kls = train_by_hand(task)
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-9}[dtype]
    assert distance(found, expected.state) <= tolerance
    assert kls == pytest.approx(expected.kl, rel=tolerance)


@pytest.mark.parametrize("prior", PRIORS)
def test_a_loop_trains_as_fit_does(prior: str) -> None:
    """Bit for bit it is not: the optimiser here is PyTorch's, there the kernel's."""
    task = Task(prior)
    assert distance(train_by_hand(task)[0], trained("kernel", task).state) <= 1e-9


BY_GROUP = bf.ByGroup({"0.*": bf.Gaussian(0.2), "*": bf.Gaussian(0.6)})


@pytest.mark.parametrize(
    "options",
    [
        {"bnn": PAIRS, "elbo": SEVERAL},
        {"bnn": (("prior", BY_GROUP),)},
        {"bnn": (("prior", BY_GROUP),), "pruned": 0.4},
        {"bnn": (("prior_mean", "initial"),)},
        {"kl_scale": lambda number: number / 50},
        {"elbo": (("temperature", 0.0),)},
    ],
)
def test_other_objectives_are_the_specification(options: dict[str, Any]) -> None:
    task = Task(**options)
    elbo, wanted = task.objective(), task.objective()
    wanted.fused = False
    if "estimator" in dict(task.bnn):  # pairs of the counter's noise, as ``fit`` draws them
        assert distance(train_by_hand(task)[0], trained("kernel", task).state) <= 1e-9
        return
    use_counter_noise(wanted)
    for each in (elbo, wanted):
        optimizer = task.optimizer_of(each)
        for x, y, told in task.minibatches()[:10]:
            optimizer.zero_grad()
            each(x, y, **told).loss.backward()
            optimizer.step()
    assert distance(*(Outcome().keep(each).state for each in (elbo, wanted))) <= 1e-9


def pair(net: nn.Module | None = None, **options: Any) -> tuple[bf.ELBO, bf.ELBO]:
    """An objective, and its specification with the same noise."""
    torch.manual_seed(0)
    if net is None:
        net = nn.Sequential(nn.Linear(INPUTS, 9), nn.Tanh(), nn.Linear(9, CLASSES))
    made = [bf.ELBO(bf.BayesianModule(copy.deepcopy(net), **options), num_data=6) for _ in "12"]
    return made[0], use_counter_noise(made[1])


def gradients(elbo: bf.ELBO) -> list[Tensor]:
    posterior = elbo.bnn.posterior
    found = [posterior.mean.grad, posterior.get_parameter("rho").grad]
    assert found[0] is not None
    assert found[1] is not None
    return [each.clone() for each in found if each is not None]


def check_same(one: bf.ELBO, two: bf.ELBO, back: Callable[[bf.ELBO], object]) -> None:
    for each in (one, two):
        back(each)
    for found, expected in zip(gradients(one), gradients(two), strict=True):
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


def two_graphs(elbo: bf.ELBO) -> None:
    first, second = elbo(X, Y).loss, elbo(X, Y).loss
    (first + 2.0 * second).backward()


def twice(elbo: bf.ELBO) -> None:
    loss = elbo(X, Y).loss
    loss.backward(retain_graph=True)
    loss.backward()


def accumulated(elbo: bf.ELBO) -> None:
    for _ in range(3):
        elbo(X, Y).loss.backward()


def only_nll(elbo: bf.ELBO) -> None:
    elbo(X, Y).nll.backward()


def only_kl(elbo: bf.ELBO) -> None:
    elbo(X, Y).kl.backward()


def penalised(elbo: bf.ELBO) -> None:
    """Second derivatives."""
    loss = elbo(X, Y).loss
    posterior = elbo.bnn.posterior
    found = torch.autograd.grad(loss, list(posterior.parameters()), create_graph=True)
    (loss + sum(each.square().sum() for each in found)).backward()


def through_hooks(elbo: bf.ELBO) -> None:
    with torch.autograd.graph.save_on_cpu():
        elbo(X, Y).loss.backward()


def autocast(elbo: bf.ELBO) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = elbo(X, Y).loss
    loss.backward()


def batched(elbo: bf.ELBO) -> None:
    terms, parameters = elbo(X, Y), list(elbo.bnn.posterior.parameters())
    factors = torch.tensor([0.5, 2.0])
    found = torch.autograd.grad(terms.loss, parameters, factors, is_grads_batched=True)
    for parameter, each in zip(parameters, found, strict=True):
        parameter.grad = each.sum(0)


WAYS = [
    two_graphs,
    twice,
    accumulated,
    only_nll,
    only_kl,
    penalised,
    through_hooks,
    batched,
    pytest.param(autocast, id="autocast"),
]


@pytest.mark.parametrize("back", WAYS)
def test_every_way_back_gives_the_specified_gradients(back: Callable[[bf.ELBO], object]) -> None:
    check_same(*pair(), back)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("largest", [-3.0, 20.0, 1000.0])
@pytest.mark.parametrize(
    "prior", [bf.Gaussian(0.3), bf.Laplace(0.3), bf.ScaleMixture(0.25, 1.0, 0.002)]
)
def test_the_kl_of_standard_deviations_of_any_size(
    prior: bf.Prior, largest: float, dtype: torch.dtype
) -> None:
    # Where logarithms would be added up, the kernel multiplies 256 numbers.
    elbo, wanted = pair(nn.Linear(INPUTS, 600 // INPUTS, bias=False).to(dtype), prior=prior)
    size = elbo.bnn.layout.num_weights
    assert size > 512
    for each in (elbo, wanted):
        rho = torch.full((size,), largest, dtype=dtype)
        rho[300:] = torch.linspace(-200.0, largest, size - 300, dtype=dtype)
        each.bnn.posterior.get_parameter("rho").data = rho
    found, expected = (each(X.to(dtype), Y).kl.item() for each in (elbo, wanted))
    assert found == pytest.approx(expected, rel=3e-6 if dtype == torch.float32 else 1e-13)


def test_half_precision_networks() -> None:
    elbo, expected = pair()
    for each in (elbo, expected):
        each.bnn.bfloat16()
    x = X.bfloat16()
    for each in (elbo, expected):
        each(x, Y).loss.backward()
    for found, wanted in zip(gradients(elbo), gradients(expected), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-2, atol=1e-3)


def test_a_posterior_that_changed_before_the_backward_pass_is_refused() -> None:
    elbo, _ = pair()
    loss = elbo(X, Y).loss
    with torch.no_grad():
        elbo.bnn.posterior.mean.add_(1.0)
    with pytest.raises(RuntimeError, match="must not change between the objective and its"):
        loss.backward()


@pytest.mark.parametrize("name", ["mean", "rho"])
@pytest.mark.parametrize("back", [1, 2])
@pytest.mark.parametrize("edit", [lambda x: x.add_(1.0), lambda x: x.copy_(x.flip(0).clone())])
def test_an_edit_of_data_before_the_backward_pass_raises(
    edit: Callable[[Tensor], Tensor], back: int, name: str
) -> None:
    elbo, _ = pair()
    for each in elbo.bnn.posterior.parameters():
        each.data += torch.linspace(0.0, 0.1, each.numel())
    loss = elbo(X, Y).nll
    if back == 2:
        loss.backward(retain_graph=True)
    edit(elbo.bnn.posterior.get_parameter(name).data)
    with pytest.raises(RuntimeError, match="must not change between the objective and its"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_number_of_threads_may_change_before_the_backward_pass(dtype: torch.dtype) -> None:
    num_threads = torch.get_num_threads()

    def back(elbo: bf.ELBO) -> None:
        torch.set_num_threads(1)
        loss = elbo(X.to(dtype), Y).loss
        torch.set_num_threads(3)
        loss.backward()

    try:
        check_same(*pair(nn.Linear(INPUTS, 20_000).to(dtype)), back)
    finally:
        torch.set_num_threads(num_threads)


def test_hooks_run_once_with_a_graph_of_the_gradients() -> None:
    for elbo in pair():
        mean, calls = elbo.bnn.posterior.mean, []
        mean.register_hook(calls.append)
        torch.autograd.grad(elbo(X, Y).kl, [mean], create_graph=True)
        assert len(calls) == 1


def test_a_graph_of_the_gradients_is_that_of_the_parameters_of_the_forward_pass() -> None:
    found = []
    for elbo in pair():
        others = [3.0 * each.detach() for each in elbo.parameters()]
        values = [nn.Parameter(each) for each in others]
        named = dict(zip(dict(elbo.named_parameters()), values, strict=True))
        loss = torch.func.functional_call(elbo, named, (X, Y)).loss
        first = torch.autograd.grad(loss, values, create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in first), values)
        found.append((*first, *second))
    for one, two in zip(*found, strict=True):
        assert torch.allclose(one, two, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize(("frozen", "trained"), [("mean", "rho"), ("rho", "mean")])
def test_one_of_mean_and_rho_may_be_frozen(frozen: str, trained: str, create_graph: bool) -> None:
    found = []
    for elbo in pair():
        q = elbo.bnn.posterior
        q.get_parameter(frozen).requires_grad_(False)
        loss, parameter = elbo(X, Y).loss, q.get_parameter(trained)
        found += torch.autograd.grad(loss, parameter, create_graph=create_graph)
    assert torch.allclose(*found, rtol=1e-4, atol=1e-6)


class NoGradient(torch.autograd.Function):
    """The identity, without a gradient."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(*_: Any) -> None:
        return None


@pytest.mark.parametrize("create_graph", [False, True])
def test_without_an_incoming_gradient_there_is_none(create_graph: bool) -> None:
    elbo, _ = pair()
    values, parameters = NoGradient.apply(elbo(X, Y).kl), list(elbo.parameters())
    options = {"create_graph": create_graph, "allow_unused": True}
    assert torch.autograd.grad(values, parameters, **options) == (None, None)


class KeepingActivation(nn.Linear):
    """Holds its last output, and so the graph."""

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = super().forward(x)
        return self.hidden


def test_a_network_that_keeps_an_activation_is_freed() -> None:
    elbo, _ = pair(KeepingActivation(INPUTS, CLASSES))
    elbo(X, Y).loss.backward()
    net = weakref.ref(elbo.bnn.net)
    del elbo
    gc.collect()
    assert net() is None


def test_memory_is_used_again_and_never_while_it_is_in_use() -> None:
    elbo, _ = pair()
    places = set()
    for _ in range(5):
        elbo.zero_grad()
        elbo(X, Y).loss.backward()
        places.add(tuple(p.grad.data_ptr() for p in elbo.bnn.posterior.parameters()))
    assert len(places) == 1
    kept = gradients(elbo)
    held = [parameter.grad for parameter in elbo.bnn.posterior.parameters()]
    elbo.zero_grad()
    elbo(X, Y).loss.backward()
    for one, two in zip(held, kept, strict=True):
        assert one is not None
        assert torch.equal(one, two)


def test_threads_have_their_own_memory() -> None:
    elbos = [pair()[0] for _ in range(4)]
    expected = pair()[0]
    accumulated(expected)
    threads = [threading.Thread(target=accumulated, args=(elbo,)) for elbo in elbos]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for elbo in elbos:
        for one, two in zip(gradients(elbo), gradients(expected), strict=True):
            assert torch.equal(one, two)


def test_copies_and_pickles_train_on_alike() -> None:
    elbo, _ = pair()
    elbo(X, Y).loss.backward()
    copies = [copy.deepcopy(elbo), pickle.loads(pickle.dumps(elbo))]
    for each in (elbo, *copies):
        each.zero_grad()
        each(X, Y).loss.backward()
    for each in copies:
        for one, two in zip(gradients(each), gradients(elbo), strict=True):
            assert torch.equal(one, two)
