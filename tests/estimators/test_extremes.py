"""The estimators at the edges of their numbers, and the Monte Carlo KL next to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from tests import faults
from tests.cases import normals
from tests.loops import loop_over
from tests.training.test_statistics import check_mean, exact_kl
from torch import Tensor, nn

from bayesify import (
    ELBO,
    BayesianModule,
    Flipout,
    LocalReparameterization,
    ScaleMixture,
    WeightSampling,
    fit,
)
from bayesify.datasets import TensorLoader
from bayesify.distributions.posteriors import MeanFieldGaussian, WeightDraw
from bayesify.estimators import Estimator, moments
from bayesify.noise.keys import NoiseKey, NoiseSource, Stream
from bayesify.training import elbo

ESTIMATORS: dict[str, Estimator] = {
    "local": LocalReparameterization(per_position=True),
    "flipout": Flipout(),
    "sampling": WeightSampling(),
}
each_estimator = loop_over("estimator", ESTIMATORS)


class ConvNet(nn.Module):
    """A convolution, a transposed one and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.back = nn.ConvTranspose2d(3, 2, 2, stride=2, bias=False)
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.back(self.conv(x).relu()).relu().mean((2, 3)))


def gradients(bnn: BayesianModule, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, and the gradients of their sum of squares in means and rhos; all finite."""
    outputs = bnn(inputs)
    found = torch.autograd.grad(
        outputs.float().square().sum(),
        (bnn.posterior.mean, bnn.posterior.rho),
        materialize_grads=True,
    )
    for what in (outputs, *found):
        assert bool(what.isfinite().all()), "not finite"
    return outputs, *found


def tiny_std(bnn: BayesianModule, how: str) -> None:
    with torch.no_grad():
        bnn.posterior.rho.fill_(math.log(1e-30) if how == "std 1e-30" else -100.0)


def check_tiny_std(how: str, estimator: str, scale: float) -> None:
    bnn = BayesianModule(ConvNet(), estimator=ESTIMATORS[estimator])
    tiny_std(bnn, how)
    inputs = scale * normals(4, 1, 5, 5, dtype=torch.float32)
    outputs, _, _ = gradients(bnn, inputs)
    plain = bnn.run_with(bnn.posterior.mean, inputs)
    assert torch.allclose(outputs, plain, rtol=1e-5, atol=1e-12), "not the plain network"


@each_estimator
@loop_over("how", ["std 1e-30", "rho -100"])
@loop_over("scale", [0.0, 1e-20, 1.0, 1e4])
def test_a_tiny_std_gives_the_plain_network(how: str, estimator: str, scale: float) -> None:
    check_tiny_std(how, estimator, scale)


@loop_over("how", ["std 1e-30", "rho -100"])
@loop_over(("least", "message"), [(0.0, "not finite"), (1e-6, "not the plain")])
def test_a_variance_with_another_floor_is_caught(
    how: str, least: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments, "MIN_VARIANCE", least)
    with pytest.raises(AssertionError, match=message):
        check_tiny_std(how, "local", 0.0)


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_sampled_weights_train_where_their_variance_underflows() -> None:
    net = nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 2), nn.Flatten())
    bnn = BayesianModule(net, init_std=1e-30, estimator=LocalReparameterization())
    before = bnn.posterior.mean.detach().clone()
    loader = TensorLoader(normals(6, 3).float(), torch.arange(6), 3)
    history = fit(ELBO(bnn, num_data=6), loader, epochs=1, backend="closed-form")
    assert len(history) == 1
    assert bool((bnn.posterior.mean != before).all())


def check_inputs_of_zero(estimator: str) -> None:
    """The noise of an all-zero example is the bias's; the weight has no part in it."""
    net = nn.Linear(4, 2000)
    bnn = BayesianModule(net, init_std=0.5, estimator=ESTIMATORS[estimator])
    outputs, _, in_rho = gradients(bnn, torch.zeros(2, 4))
    noise = (outputs[0] - net.bias).detach()
    check_mean(noise.square(), 0.25, 3)
    rho = bnn.layout.unflatten(in_rho)
    assert not rho["weight"].any()
    assert rho["bias"].all()


@each_estimator
def test_inputs_of_zero_leave_the_noise_to_the_bias(
    estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_inputs_of_zero(estimator)
    faults.weaker_noise(monkeypatch)
    with pytest.raises(AssertionError, match="beyond"):
        check_inputs_of_zero(estimator)


def check_pruned(estimator: str, *, mask: bool = True) -> None:
    """A pruned weight adds neither mean nor noise, and has no gradient."""
    bnn = BayesianModule(nn.Linear(4, 3), init_std=0.5, estimator=ESTIMATORS[estimator])
    kept = torch.ones(15, dtype=torch.bool)
    kept[4:8] = kept[13] = False  # the second output: its weights and its bias
    kept[0] = False  # and one weight of the first
    bnn.posterior.mask = kept if mask else None
    x = torch.zeros(5, 4)
    x[:, 0] = 1e4
    outputs, in_mean, in_rho = gradients(bnn, x)
    assert outputs[:, 1].abs().max() < 1e-12, "a pruned output is not 0"
    bias_noise = outputs[:, 0] - bnn.layout.unflatten(bnn.posterior.mean)["bias"][0]
    assert bias_noise.abs().max() < 5.0, "a pruned weight adds noise"
    assert not in_mean[~kept].any()
    assert not in_rho[~kept].any()


@each_estimator
def test_a_pruned_weight_adds_no_noise(estimator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_pruned(estimator)
    monkeypatch.setattr(MeanFieldGaussian, "std", MeanFieldGaussian.full_std)
    monkeypatch.setattr(
        MeanFieldGaussian, "draw", lambda q, e: WeightDraw(q.masked_mean + q.full_std * e, e)
    )
    with pytest.raises(AssertionError, match="pruned"):
        check_pruned(estimator)


def check_autocast(estimator: str, make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """Under bfloat16 the noise's size is that of float32, at inputs of 1e4 and stds of 1e-4."""
    net = make()
    bnn = BayesianModule(net, init_std=1e-4, estimator=ESTIMATORS[estimator], seed=5)
    twin = BayesianModule(net, init_std=1e-4, estimator=ESTIMATORS[estimator], seed=5)
    with torch.no_grad():
        for module in (bnn, twin):
            module.posterior.mean.zero_()
    inputs = 1e4 * normals(8, *shape, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs, in_mean, in_rho = gradients(bnn, inputs)
    expected, mean_expected, rho_expected = gradients(twin, inputs)
    assert outputs.dtype is torch.bfloat16
    # bfloat16 has 8 bits; the terms of a sum are rounded one by one.
    assert (outputs - expected).norm() < 0.02 * expected.norm(), "other noise than in float32"
    for got, exact in ((in_mean, mean_expected), (in_rho, rho_expected)):
        assert got.dtype is torch.float32
        assert (got - exact).norm() < 0.05 * exact.norm(), "another gradient than in float32"


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(20, 6), (20,)),
    "conv": (lambda: nn.Conv2d(2, 4, 3), (2, 6, 6)),
    "transposed": (lambda: nn.ConvTranspose1d(2, 4, 3), (2, 6)),
}


@each_estimator
@loop_over("name", NETS)
def test_large_inputs_under_autocast(name: str, estimator: str) -> None:
    check_autocast(estimator, *NETS[name])


@loop_over("name", NETS)
def test_a_variance_in_half_precision_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    half = SimpleNamespace(
        autocast=lambda device, **_: torch.autocast(device, dtype=torch.float16),
        promote_types=torch.promote_types,
        float32=torch.float32,
        is_grad_enabled=torch.is_grad_enabled,
    )
    monkeypatch.setattr(moments, "torch", half)
    with pytest.raises(AssertionError, match=r"not finite|than in float32"):
        check_autocast("local", *NETS[name])


MIXTURE = ScaleMixture(pi=0.6, std1=1.2, std2=0.05)
COPIES = 400


def mixture_elbo(estimator: str, *, seed: int = 3, num_samples: int = 1) -> ELBO:
    """The ELBO of 2 x 400 weights of one mean and one std, under a prior without closed form."""
    net = nn.Linear(1, COPIES).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.5)
    bnn = BayesianModule(
        net, prior=MIXTURE, init_std=0.8, estimator=ESTIMATORS[estimator], seed=seed
    )
    return ELBO(bnn, num_data=4, num_samples=num_samples)


DATA = (torch.ones(4, 1, dtype=torch.float64), torch.zeros(4, dtype=torch.int64))
each_local = loop_over("estimator", ["local", "flipout"])


def check_kl(estimator: str, num_samples: int = 1) -> None:
    objective = mixture_elbo(estimator, num_samples=num_samples)
    values = torch.stack([objective(*DATA).kl.detach() for _ in range(100)])
    check_mean(values, 2 * COPIES * exact_kl(0.5, 0.8, MIXTURE), 4, estimator)


@each_local
@loop_over("num_samples", [1, 2])
def test_the_monte_carlo_kl_is_unbiased(estimator: str, num_samples: int) -> None:
    check_kl(estimator, num_samples)


@each_local
@loop_over("fault", [faults.wider_draws, faults.density_off_by_a_constant])
def test_a_biased_monte_carlo_kl_is_caught(
    estimator: str, fault: faults.Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="beyond"):
        check_kl(estimator)


def check_draw_of_its_own(estimator: str, patch: pytest.MonkeyPatch) -> None:
    """The KL's noise is that of its own stream, whatever the likelihood's pass drew."""
    objective = mixture_elbo(estimator, num_samples=2)
    passes: list[Tensor] = []
    draws: list[Tensor] = []
    right_normals, right_kl = NoiseSource.normals, elbo.kl_divergence

    def normals_seen(*args: object) -> Tensor:
        passes.append(right_normals(*args))
        return passes[-1]

    def kl_seen(q: object, p: object, draw: WeightDraw, **options: object) -> Tensor:
        draws.append(draw.noise)
        return right_kl(q, p, draw, **options)

    with patch.context() as patched:
        patched.setattr(NoiseSource, "normals", normals_seen)
        patched.setattr(elbo, "kl_divergence", kl_seen)
        first, second = (objective(*DATA).kl for _ in range(2))
    for step, noise in enumerate(draws):
        key = NoiseKey(3, Stream.DIVERGENCE, step)
        expected = key.normals(range(2), 2 * COPIES, dtype=torch.float64)
        assert torch.equal(noise, expected), "not of its own stream"
    numbers = torch.cat([part.flatten() for part in (*passes, *draws)]).abs()
    # Of numbers with the steps of float32 a few are equal by chance, but no two neighbours.
    pairs = numbers.unfold(0, 2, 1)
    assert len(pairs.unique(dim=0)) == len(pairs), "shared with the pass"
    own = torch.cat([noise.flatten() for noise in draws]).abs()
    assert own.unique().numel() == own.numel(), "shared by two draws"
    again = mixture_elbo(estimator, num_samples=2)
    again.step = 1
    assert torch.equal(again(*DATA).kl, second), "not a function of seed and step"
    assert not torch.equal(first, second)
    assert not torch.equal(mixture_elbo(estimator, seed=4, num_samples=2)(*DATA).kl, first)


@each_local
def test_the_monte_carlo_kl_has_a_draw_of_its_own(
    estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_draw_of_its_own(estimator, monkeypatch)


@each_local
def test_a_kl_on_the_noise_of_the_pass_is_caught(
    estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(q: MeanFieldGaussian, key: NoiseKey, samples: range) -> Tensor:
        training = NoiseKey(key.seed, Stream.TRAINING, key.step)
        return torch.stack(
            [NoiseSource(training, s).normals((2 * COPIES,), q.mean.dtype, "cpu") for s in samples]
        )

    monkeypatch.setattr(MeanFieldGaussian, "noise", wrong)
    with pytest.raises(AssertionError, match=r"of its own stream|shared"):
        check_draw_of_its_own(estimator, monkeypatch)


def test_float16_weights_and_inputs_of_zero() -> None:
    bnn = BayesianModule(
        nn.Linear(3, 2, bias=False), estimator=LocalReparameterization(), init_std=0.1
    ).half()
    bnn(torch.zeros(4, 3, dtype=torch.float16)).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in bnn.parameters())
