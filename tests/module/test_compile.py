"""torch.compile: one graph, the same noise and so the same loss and gradients as eager code."""

from __future__ import annotations

import copy
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from tests.cases import mlp, normals
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from bayesify import (
    ELBO,
    BayesianModule,
    ByGroup,
    ClosedFormLastLayer,
    EmpiricalGaussian,
    Estimator,
    Flipout,
    Gaussian,
    Laplace,
    LocalReparameterization,
    ScaleMixture,
    StudentT,
    WeightSampling,
    fit,
)
from bayesify.datasets import TensorLoader

NUM_DATA = 22
pytestmark = [
    # torch's own, where it traces an autograd.Function.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning"),
]


@pytest.fixture(autouse=True)
def _nothing_compiled_before(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    # Else pytest keeps the compiler's whole diary, and shows it where a test fails.
    caplog.set_level(logging.WARNING, logger="torch.__trace")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def conv() -> nn.Sequential:
    """Images of 6 x 6 pixels, 4 classes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 4)
    return nn.Sequential(*parts).double()


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (3,)),
    "conv": (conv, (1, 6, 6)),
}


def new_elbo(
    net: str,
    estimator: Estimator,
    *,
    prior: Any = None,
    prior_mean: Any = None,
    **options: Any,
) -> ELBO:
    bnn = BayesianModule(
        NETS[net][0](),
        prior=prior,
        prior_mean=prior_mean,
        init_std=0.3,
        estimator=estimator,
        seed=5,
    )
    # Compiled code has PyTorch's noise, not the kernel's.
    return ELBO(bnn, num_data=NUM_DATA, fused=False, **options)


def data(net: str, size: int = 8) -> tuple[Tensor, Tensor]:
    return normals(size, *NETS[net][1], seed=1), torch.arange(size) % 4


def values(model: nn.Module, elbo: ELBO, x: Tensor, y: Tensor, **options: Any) -> list[Tensor]:
    """Loss, nll, KL, outputs and gradients of one step."""
    elbo.zero_grad()
    terms = model(x, y, **options)
    terms.loss.backward()
    gradients = [p.grad for p in elbo.parameters() if p.grad is not None]
    assert len(gradients) == 2
    return [terms.loss.detach(), terms.nll.detach(), terms.kl.detach(), terms.outputs, *gradients]


def distance(some: list[Tensor], others: list[Tensor]) -> float:
    """The largest difference, relative to the largest number of each tensor."""
    pairs = zip(some, others, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


# -------------------------------------------------------------------------------- the objective


EMPIRICAL = EmpiricalGaussian(min_size=6)
GEOMETRIC: dict[str, Any] = {"kl_weighting": "geometric", "num_batches": 12}
GROUPS = ByGroup({"*.bias": Laplace(0.5), "*": Gaussian(0.3)})
MIXTURE = ScaleMixture(pi=0.5, std1=1.0, std2=0.1)
PER_POSITION = LocalReparameterization(per_position=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("net", "estimator", "options"),
    [
        ("mlp", WeightSampling(), {}),
        ("mlp", Flipout(), GEOMETRIC),
        ("conv", LocalReparameterization(), {"prior": EMPIRICAL}),
    ],
)
def test_a_run_with_warm_up_and_a_smaller_last_batch(
    net: str, estimator: Estimator, options: dict[str, Any]
) -> None:
    torch._dynamo.reset()
    elbo = new_elbo(net, estimator, **options)
    twin = copy.deepcopy(elbo)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(elbo, fullgraph=True, backend=counter)
    seen = []
    for step in range(12):
        size = 6 if step % 4 == 3 else 8
        given = {"kl_scale": min(1.0, (step + 1) / 9), "batch_index": step}
        # Once for the first call, for other numbers than the first, and for another size.
        with torch._dynamo.config.patch(error_on_recompile=step > 3):
            seen.append(values(compiled, elbo, *data(net, size), **given))
        expected = values(twin, twin, *data(net, size), **given)
        assert distance(seen[-1], expected) < 1e-12
        assert elbo.step == twin.step == step + 1
    assert counter.frame_count <= 3
    # Noise of a neighbouring step is caught, and no two steps share theirs.
    twin.step = 0
    assert distance(seen[1], values(twin, twin, *data(net), kl_scale=2 / 9, batch_index=1)) > 1e-3
    outputs = [step[3][0, :6] for step in seen]
    assert all((a - b).abs().max() > 1e-3 for a in outputs for b in outputs if a is not b)


PARTS: list[tuple[str, Estimator, dict[str, Any]]] = [
    ("mlp", LocalReparameterization(), {"prior": MIXTURE}),
    ("mlp", WeightSampling(), {"prior": MIXTURE}),
    ("mlp", WeightSampling(antithetic=True), {"prior": Laplace(0.5), "num_samples": 2}),
    ("mlp", PER_POSITION, {"prior_mean": "initial"}),
    ("mlp", Flipout(), {"prior": GROUPS}),
    ("conv", WeightSampling(), {"prior": StudentT()}),
    ("conv", WeightSampling(antithetic=True), {"prior": EMPIRICAL, "num_samples": 2}),
    ("conv", PER_POSITION, {"prior": ByGroup({"0.*": EMPIRICAL, "*": StudentT()})}),
    ("conv", Flipout(), {"prior": MIXTURE, "prior_mean": "initial"}),
]


def check_compiles_once(net: str, estimator: Estimator, options: dict[str, Any]) -> None:
    elbo = new_elbo(net, estimator, **options)
    twin = copy.deepcopy(elbo)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(elbo, fullgraph=True, backend=counter)
    for _ in range(3):
        seen = values(compiled, elbo, *data(net))
        expected = values(twin, twin, *data(net))
        assert distance(seen, expected) < 1e-12
    assert counter.frame_count == 1
    assert elbo.step == 3
    # The step is an argument of the code, not a part of it; and other noise is caught.
    elbo.step = 2
    assert distance(values(compiled, elbo, *data(net)), expected) < 1e-12
    assert distance(values(compiled, elbo, *data(net)), expected) > 1e-3
    assert counter.frame_count == 1


def test_an_objective_compiles_once() -> None:
    check_compiles_once(*PARTS[0])


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS[1:])
def test_every_part_compiles_once(part: tuple[str, Estimator, dict[str, Any]]) -> None:
    torch._dynamo.reset()
    check_compiles_once(*part)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [WeightSampling(), LocalReparameterization()])
def test_one_graph_serves_every_size_of_the_minibatch(estimator: Estimator) -> None:
    torch._dynamo.reset()
    elbo = new_elbo("mlp", estimator)
    twin = copy.deepcopy(elbo)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(elbo, fullgraph=True, backend=counter)
    for size in (8, 6, 5, 9, 12, 7):
        seen = values(compiled, elbo, *data("mlp", size))
        assert distance(seen, values(twin, twin, *data("mlp", size))) < 1e-12
    assert counter.frame_count == 2


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where torch keeps the headers that it compiled, and the code."""
    return tmp_path_factory.mktemp("inductor")


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))),
    reason="torch's default compiler needs a C++ compiler",
)
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("net", "estimator"), [("mlp", WeightSampling()), ("conv", LocalReparameterization())]
)
def test_the_default_backend(
    net: str, estimator: Estimator, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._inductor.config

    torch._dynamo.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    elbo = new_elbo(net, estimator)
    twin = copy.deepcopy(elbo)
    compiled = torch.compile(elbo, fullgraph=True)
    # No vector instructions: looking for them would take longer than all else.
    with torch._inductor.config.patch({"compile_threads": 1, "cpp.simdlen": 1}):
        for _ in range(3):
            seen = values(compiled, elbo, *data(net))
            expected = values(twin, twin, *data(net))
            assert distance(seen, expected) < 1e-10
    assert elbo.step == 3
    assert distance(values(compiled, elbo, *data(net)), expected) > 1e-3


# ---------------------------------------------------------------- the module, and what users write


@pytest.mark.slow
@pytest.mark.parametrize(
    ("net", "estimator"), [("mlp", WeightSampling()), ("conv", PER_POSITION), ("mlp", Flipout())]
)
def test_a_compiled_module_draws_what_it_would(net: str, estimator: Estimator) -> None:
    torch._dynamo.reset()
    bnn = new_elbo(net, estimator).bnn
    twin = copy.deepcopy(bnn)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(bnn, fullgraph=True, backend=counter)
    x, _ = data(net)
    seen = [compiled(x).detach() for _ in range(3)]
    expected = [twin(x).detach() for _ in range(3)]
    assert distance(seen, expected) < 1e-12
    assert distance(seen, expected[::-1]) > 1e-3
    assert counter.frame_count == 1
    assert torch.equal(compiled.predict(x, 3).mean, twin.predict(x, 3).mean)


@pytest.mark.slow
def test_fit_trains_an_objective_compiled_in_place() -> None:
    x, y = data("mlp", NUM_DATA)
    counter = CompileCounterWithBackend("aot_eager")
    elbo = new_elbo("mlp", WeightSampling())
    twin = copy.deepcopy(elbo)
    elbo.compile(fullgraph=True, backend=counter)
    for each in (elbo, twin):
        fit(each, TensorLoader(x, y, 8, seed=0), epochs=3, kl_warmup_epochs=2, backend="autograd")
    assert 1 <= counter.frame_count <= 4
    torch.testing.assert_close(elbo.bnn.posterior.mean, twin.bnn.posterior.mean, rtol=1e-12, atol=0)
    # A copy, and one that takes over its state, go on as it does.
    again = copy.deepcopy(elbo)
    twin.load_state_dict(elbo.state_dict())
    expected = values(elbo, elbo, x, y)
    assert distance(values(again, again, x, y), expected) < 1e-12
    assert distance(values(twin, twin, x, y), expected) < 1e-12


def test_compiling_the_wrong_thing_is_said_or_harmless() -> None:
    x, y = data("mlp", NUM_DATA)
    elbo = new_elbo("mlp", WeightSampling())
    twin = copy.deepcopy(elbo)
    with pytest.raises(TypeError, match="fit needs an ELBO, got OptimizedModule"):
        fit(torch.compile(elbo, backend="eager"), TensorLoader(x, y, 8), epochs=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be a BayesianModule, got OptimizedModule"):
        ELBO(torch.compile(elbo.bnn, backend="eager"), num_data=NUM_DATA)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be Tensor, not NoneType"):
        torch.compile(elbo.bnn.net, backend="eager")(x)  # it has no weights of its own
    elbo.bnn.net.compile(backend="eager")
    assert distance(values(elbo, elbo, x, y), values(twin, twin, x, y)) < 1e-12


@pytest.mark.parametrize(
    "estimator", [LocalReparameterization(), Flipout(), ClosedFormLastLayer(PER_POSITION)]
)
@pytest.mark.parametrize("whole", [True, False])
def test_a_network_with_compiled_parts_is_itself(estimator: Estimator, whole: bool) -> None:
    net, x = mlp(), normals(NUM_DATA, 3)
    if whole:
        compiled: Any = torch.compile(net, backend="eager")
    else:
        compiled = nn.Sequential(torch.compile(net[0], backend="eager"), *net[1:])
    some, others = (
        ELBO(BayesianModule(each, estimator=estimator, init_std=0.3), num_data=NUM_DATA)
        for each in (net, compiled)
    )
    y = torch.arange(NUM_DATA) % 4
    for _ in range(2):  # each step has noise of its own
        assert distance(values(some, some, x, y), values(others, others, x, y)) < 1e-6


def test_threads_that_overlap_leave_the_compiler_as_it_was() -> None:
    first_is_in, second_is_in = threading.Event(), threading.Event()

    class First(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            first_is_in.set()
            assert second_is_in.wait(60.0)
            return super().forward(x)

    class Second(nn.Linear):  # begins within the first, and ends after it
        def forward(self, x: Tensor) -> Tensor:
            second_is_in.set()
            thread.join(60.0)
            return super().forward(x)

    x, estimator = torch.zeros(2, 3), LocalReparameterization()
    first, second = (BayesianModule(kind(3, 2), estimator=estimator) for kind in (First, Second))
    thread = threading.Thread(target=first, args=(x,))
    thread.start()
    assert first_is_in.wait(60.0)
    second(x)
    assert not thread.is_alive()
    counter = CompileCounterWithBackend("eager")
    torch.compile(nn.Linear(3, 2), backend=counter)(x)
    assert counter.frame_count == 1


def test_a_frozen_body_that_is_trained_later_is_the_networks_own() -> None:
    net = mlp()
    net[0].requires_grad_(False)
    before = net[0].weight.clone()
    elbo = ELBO(BayesianModule(net), num_data=NUM_DATA)
    optimizer = torch.optim.SGD(elbo.parameters(), lr=0.5)
    objective = torch.compile(elbo, backend="eager")
    for trained in (False, True):
        elbo.bnn.net[0].requires_grad_(trained)
        optimizer.zero_grad()
        objective(normals(8, 3), torch.arange(8) % 4).loss.backward()
        optimizer.step()
    assert not torch.equal(elbo.bnn.net[0].weight, before)
    assert torch.equal(net[0].weight, before)
