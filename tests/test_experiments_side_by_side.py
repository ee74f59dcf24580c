"""Many networks in one module: each is what it would be alone, and none sees another's data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from bayesify import (
    ELBO,
    BayesianModule,
    ByGroup,
    EmpiricalGaussian,
    Flipout,
    Gaussian,
    GaussianLikelihood,
    LocalReparameterization,
    Prior,
    fit,
)
from bayesify.datasets import Passes, TensorLoader
from bayesify.experiments.side_by_side import SideBySide
from bayesify.networks import mlp
from bayesify.perturbations import local
from bayesify.perturbations.operations import LinearCall
from bayesify.perturbations.perexample import Part

K, N, D = 3, 6, 4
DRAWS = 20_000


def nets() -> list[nn.Sequential]:
    return [mlp(D, (5,), 2, seed=seed).double() for seed in range(K)]


def rows(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def together(perturbation: object = None, prior: Prior | None = None) -> BayesianModule:
    return BayesianModule(
        SideBySide(nets()),
        likelihood=GaussianLikelihood(input_dependent=True),
        prior=prior or Gaussian(0.5),
        init_std=0.3,
        perturbation=perturbation or LocalReparameterization(),  # type: ignore[arg-type]
    )


def test_each_answers_as_alone() -> None:
    x = rows(0, N, K, D)
    said = SideBySide(nets())(x)
    for k, net in enumerate(nets()):
        torch.testing.assert_close(said[:, k], net(x[:, k]), rtol=1e-12, atol=1e-12)


def test_networks_must_be_alike() -> None:
    with pytest.raises(ValueError, match="must have one shape"):
        SideBySide([mlp(4, (5,), 2), mlp(4, (6,), 2)])
    with pytest.raises(ValueError, match="must have one shape"):
        SideBySide([])


def test_local_reparametrisation_is_exact_here() -> None:
    bnn = together()
    assert {row.treatment for row in bnn.coverage(rows(0, N, K, D))} == {"exact"}
    # As many data as networks: the two traced passes tell the axes apart.
    assert {row.treatment for row in bnn.coverage(rows(0, K, K, D))} == {"exact"}


def test_flipout_samples_such_weights_and_says_so() -> None:
    found = together(Flipout()).coverage(rows(0, N, K, D))
    assert {row.treatment for row in found} == {"sampled"}
    assert all("baddbmm, one of several matrices" in row.reason for row in found)


def test_data_on_another_axis_are_sampled() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 3))

        def forward(self, x: Tensor) -> Tensor:  # rows of one datum, of which each has a matrix
            many = self.weight.expand(len(x), 2, 3)
            return torch.baddbmm(torch.zeros(len(x), 1, 3), x, many)

    bnn = BayesianModule(Other(), perturbation=LocalReparameterization())
    assert [row.treatment for row in bnn.coverage(torch.zeros(5, 7, 2))] == ["sampled"]


def moments_agree(*random: str) -> None:
    """Mean and variance of the outputs of a layer of matrices, against the Jacobian's."""
    torch.manual_seed(0)
    layer = SideBySide([nn.Sequential(nn.Linear(D, 2)).double() for _ in range(K)])
    bnn = BayesianModule(
        layer, init_std=0.3, perturbation=LocalReparameterization(), include=random or ("*",)
    )
    x = rows(1, N, K, D)
    means = bnn.layout.unflatten(bnn.posterior.mean.detach())
    variances = bnn.layout.unflatten(bnn.posterior.std.detach().square())
    expected = torch.zeros(K, N, 2, dtype=torch.float64)
    if "bias_0" in variances:
        expected = expected + variances["bias_0"]
    if "weight_0" in variances:
        expected = expected + torch.einsum("nkd,kdo->kno", x.square(), variances["weight_0"])
    # Copies of the data in one minibatch: each row draws for itself.
    with torch.no_grad():
        outputs = torch.cat([bnn(x.repeat(DRAWS // 10, 1, 1)) for _ in range(10)])
    outputs = outputs.view(DRAWS, N, K, 2)
    centre = layer(x).detach()
    torch.testing.assert_close(centre, bnn.run_with_named(means, x))
    spread = expected.transpose(0, 1)
    # 36 means and 36 variances at a family-wise error rate of 1e-3: 4.35 standard errors.
    error = (outputs.mean(0) - centre) / (spread / DRAWS).sqrt()
    assert float(error.abs().max()) < 4.35
    ratio = outputs.var(0) / spread - 1.0
    assert float(ratio.abs().max()) < 4.35 * (2.0 / DRAWS) ** 0.5
    # Each datum, network and output has noise of its own.
    noise = ((outputs - centre) / spread.sqrt()).flatten(1)
    correlations = noise.T @ noise / len(noise) - torch.eye(noise.shape[1])
    off = correlations[~torch.eye(noise.shape[1], dtype=torch.bool)]
    assert float(off.abs().max()) < 5.0 * len(noise) ** -0.5


@pytest.mark.parametrize("random", [(), ("weight_0",), ("bias_0",)], ids=str)
def test_the_noise_has_its_exact_moments(random: tuple[str, ...]) -> None:
    moments_agree(*random)


def test_a_bias_without_noise_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = local.output_moments

    def without(call: LinearCall, weight: Part, bias: Part | None) -> tuple[Tensor, Tensor]:
        return whole(call, weight, bias)[0], whole(call, weight, None)[1]

    monkeypatch.setattr(local, "output_moments", without)
    with pytest.raises(AssertionError):
        moments_agree()


def trained(change: int | None, prior: Callable[[], Prior]) -> list[Tensor]:
    """The trained means by network, with one network's data changed."""
    x, y = rows(2, N, K, D), rows(3, N, K)
    if change is not None:
        x[:, change], y[:, change] = rows(4, N, D), rows(5, N)
    bnn = together(prior=prior())
    loader = Passes(TensorLoader(x, y, 4), 5)
    optimizer = partial(torch.optim.Adam, lr=0.05)
    fit(ELBO(bnn, num_data=N), loader, epochs=4, optimizer=optimizer, callback=Quiet())
    means = bnn.layout.unflatten(bnn.posterior.mean.detach())
    return [torch.cat([mean[k].flatten() for mean in means.values()]) for k in range(K)]


class Quiet:
    def on_start(self, **about: object) -> None: ...

    def on_step(self, **about: object) -> None: ...

    def on_epoch(self, row: object) -> None: ...


def check_apart(prior: Callable[[], Prior]) -> None:
    usual, changed = trained(None, prior), trained(1, prior)
    assert not torch.equal(usual[1], changed[1])
    for k in (0, 2):
        torch.testing.assert_close(usual[k], changed[k], rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_no_network_sees_anothers_data() -> None:
    check_apart(lambda: ByGroup({"weight_*": Gaussian(0.4), "*": Gaussian(1.0)}))


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_a_prior_that_all_share_is_caught() -> None:
    # Its width is learned from all networks, and so from the test parts of each other's splits.
    with pytest.raises(AssertionError):
        check_apart(lambda: EmpiricalGaussian(min_size=1))


def test_the_objective_is_the_sum_of_theirs() -> None:
    x, y = rows(6, N, K, D), rows(7, N, K)
    parts = []
    joint = ELBO(together(), num_data=N)
    silence(joint.bnn)
    for k, net in enumerate(nets()):
        shaped = nn.Sequential(net, nn.Unflatten(-1, (1, 2)))
        bnn = BayesianModule(
            shaped, likelihood=GaussianLikelihood(input_dependent=True), prior=Gaussian(0.5)
        )
        silence(bnn)
        parts.append(ELBO(bnn, num_data=N)(x[:, k], y[:, k : k + 1]))
    whole = joint(x, y)
    for name in ("loss", "nll", "kl"):
        expected = torch.stack([getattr(part, name) for part in parts]).sum()
        torch.testing.assert_close(getattr(whole, name), expected, rtol=1e-10, atol=1e-10)


def silence(bnn: BayesianModule) -> None:
    with torch.no_grad():
        bnn.posterior.rho.fill_(-40.0)


def test_passes_count_on() -> None:
    loader = Passes(TensorLoader(torch.arange(4.0), torch.arange(4), 2, seed=3), passes=2)
    assert len(loader) == 4
    assert loader.num_data == 4
    loader.set_epoch(1)
    second = [y.tolist() for _, y in loader]
    plain = TensorLoader(torch.arange(4.0), torch.arange(4), 2, seed=3)
    expected = []
    for epoch in (2, 3):
        plain.set_epoch(epoch)
        expected += [y.tolist() for _, y in plain]
    assert second == expected
    with pytest.raises(ValueError, match="passes must be at least 1"):
        Passes(plain, 0)
