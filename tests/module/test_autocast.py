"""torch.autocast: the network runs in half precision, the posterior and the objective do not."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from tests.cases import normals
from tests.loops import loop_over
from torch import nn
from torch.optim import Adam

from bayesify import (
    ELBO,
    BayesianModule,
    Estimator,
    Flipout,
    Laplace,
    LocalReparameterization,
    ScaleMixture,
    WeightSampling,
    fit,
)
from bayesify.datasets import TensorLoader, load_images
from bayesify.noise.keys import NoiseKey, Stream

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")


def works(dtype: torch.dtype) -> bool:
    try:
        with torch.autocast("cpu", dtype=dtype):
            return nn.Linear(2, 2)(torch.ones(1, 2)).dtype == dtype
    except RuntimeError:
        return False


each_dtype = loop_over("dtype", filter(works, [torch.bfloat16, torch.float16]))


def mlp(*sizes: int) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, second = nn.Linear(*sizes[:2]), nn.Linear(*sizes[1:])
    return nn.Sequential(first, nn.ReLU(), second)


@each_dtype
@loop_over(
    ("estimator", "prior"),
    [
        (WeightSampling(), None),
        (LocalReparameterization(), Laplace(0.5)),
        (Flipout(), ScaleMixture()),
    ],
)
def test_only_the_network_runs_in_half_precision(
    estimator: Estimator, prior: Any, dtype: torch.dtype
) -> None:
    x, y = normals(16, 3, seed=1, dtype=torch.float32), torch.arange(16) % 4
    elbo = ELBO(BayesianModule(mlp(3, 8, 4), prior=prior, estimator=estimator), num_data=16)
    twin = copy.deepcopy(elbo)
    optimizer = Adam(elbo.parameters(), lr=0.01)
    losses = []
    for _ in range(60):
        with torch.autocast("cpu", dtype=dtype):
            terms = elbo(x, y)
        optimizer.zero_grad()
        terms.loss.backward()
        optimizer.step()
        losses.append(float(terms.loss.detach()))
        assert terms.outputs.dtype == dtype
        assert {part.dtype for part in (terms.loss, terms.nll, terms.kl)} == {torch.float32}
    wide = twin(x, y)
    assert wide.outputs.dtype == torch.float32
    # The KL does not know of autocast; the likelihood does, but only just.
    with torch.autocast("cpu", dtype=dtype):
        narrow = copy.deepcopy(twin)
        narrow.step = 0
        terms = narrow(x, y)
    assert torch.equal(terms.kl, wide.kl)
    assert 0 < abs(float((terms.nll - wide.nll).detach())) < 0.02
    assert sum(losses[-10:]) < sum(losses[:10])
    assert all(bool(parameter.isfinite().all()) for parameter in elbo.parameters())
    held = [value for state in optimizer.state.values() for value in state.values()]
    kept = [*elbo.parameters(), *(p.grad for p in elbo.parameters()), *held]
    assert {tensor.dtype for tensor in kept if tensor is not None} == {torch.float32}


@each_dtype
def test_the_variance_of_outputs_is_computed_in_float32(dtype: torch.dtype) -> None:
    # In float16 squares of 300 overflow, and squares of 1e-4 vanish.
    net = nn.Linear(4, 500, bias=False)
    nn.init.zeros_(net.weight)
    bnn = BayesianModule(net, estimator=LocalReparameterization(), init_std=1e-4)
    x = torch.full((8, 4), 300.0)
    key = NoiseKey(0, Stream.TRAINING, 0)
    wide, _ = bnn.sample_outputs(x, key, range(1))
    with torch.autocast("cpu", dtype=dtype):
        narrow, _ = bnn.sample_outputs(x, key, range(1))
        naive = nn.functional.linear(x.square(), torch.full((1, 4), 1e-4).square())
    assert narrow.dtype == dtype
    # The same noise, scaled by sqrt(4 * 300^2 * 1e-8) = 0.06.
    precision = torch.finfo(dtype).eps
    torch.testing.assert_close(narrow.float(), wide, rtol=precision, atol=1e-6)
    assert float(wide.detach().std()) == pytest.approx(0.06, rel=0.05)
    if dtype == torch.float16:
        assert not bool((naive - 0.06**2).abs().max() < 1e-4)
    (gradient,) = torch.autograd.grad(narrow.square().sum(), bnn.posterior.get_parameter("rho"))
    assert gradient.dtype == torch.float32
    assert bool(gradient.isfinite().all())
    assert float(gradient.min()) > 0


def mnist_run(
    estimator: Estimator, dtype: torch.dtype | None, epochs: int = 4
) -> tuple[float, dict[str, Any]]:
    """The test error in percent of 2,000 images' training, and its last epoch."""
    data = load_images("mnist")
    loader = TensorLoader(data.train_inputs[:2000], data.train_targets[:2000], 100, seed=0)
    bnn = BayesianModule(mlp(784, 32, 10), estimator=estimator, seed=1)
    adam = partial(Adam, lr=3e-3)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        rows = fit(ELBO(bnn, num_data=2000), loader, epochs=epochs, optimizer=adam, progress=False)
    wrong = bnn.predict_mean(data.test_inputs).mean.argmax(-1) != data.test_targets
    return 100 * float(wrong.double().mean()), dict(rows[-1])


@pytest.mark.parametrize(
    "estimator",
    [
        LocalReparameterization(),
        pytest.param(WeightSampling(), marks=pytest.mark.slow),
        pytest.param(Flipout(), marks=pytest.mark.slow),
    ],
    ids=lambda estimator: type(estimator).__name__,
)
def test_fit_under_autocast_ends_where_float32_does(estimator: Estimator) -> None:
    error, row = mnist_run(estimator, None)
    narrow_error, narrow_row = mnist_run(estimator, torch.bfloat16)
    assert error < 20
    assert abs(narrow_error - error) < 1.0
    assert row["loss"] != narrow_row["loss"] == pytest.approx(row["loss"], rel=1e-3)
    assert narrow_row["nll"] == pytest.approx(row["nll"], rel=0.03)
    # The tolerance is no wider than what less training costs.
    assert mnist_run(estimator, None, epochs=2)[0] - error > 1.0
