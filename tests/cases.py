"""The components that contract tests run over, and small networks and data to run them on.

A new prior, posterior or likelihood is one more row here; the tests that take ``each_case`` then
hold it to the same laws as the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tests.loops import loop_over
from torch import Tensor, nn

from bayesify import (
    BayesianModule,
    CategoricalLikelihood,
    CensoredGaussianLikelihood,
    Delta,
    FullGaussian,
    Gaussian,
    GaussianLikelihood,
    Laplace,
    Likelihood,
    LowRankGaussian,
    MatrixGaussian,
    MeanFieldGaussian,
    NegativeBinomialLikelihood,
    OrdinalLikelihood,
    PoissonLikelihood,
    Posterior,
    PosteriorByGroup,
    PosteriorFamily,
    Prior,
    ScaleMixture,
    StudentT,
    StudentTLikelihood,
)

PRIORS: dict[str, Prior] = {
    "gaussian": Gaussian(std=0.7),
    "laplace": Laplace(scale=0.6),
    "scale-mixture": ScaleMixture(pi=0.6, std1=1.2, std2=0.05),
    "student-t": StudentT(df=4.0, scale=0.5),
}
POSTERIORS: dict[str, type[Posterior] | PosteriorFamily] = {
    "mean-field": MeanFieldGaussian,
    "delta": Delta,
    "low-rank": LowRankGaussian(rank=2),
    "matrix": MatrixGaussian(),
    "full": FullGaussian(),
    "by-group": PosteriorByGroup({"2.*": FullGaussian(), "*": MeanFieldGaussian}),
}
LIKELIHOODS: dict[str, Callable[[], Likelihood]] = {
    "categorical": CategoricalLikelihood,
    "gaussian": lambda: GaussianLikelihood(std=0.8),
    "gaussian-learned": lambda: GaussianLikelihood(std=0.5, learn_std=True),
    "student-t": lambda: StudentTLikelihood(0.5, df=4.0, learn_scale=False),
    "student-t-learned": lambda: StudentTLikelihood(0.5),
    "censored": lambda: CensoredGaussianLikelihood(0.5, learn_std=True),
    "poisson": PoissonLikelihood,
    "negative-binomial": lambda: NegativeBinomialLikelihood(0.5),
    "ordinal": lambda: OrdinalLikelihood(5),
}
#: The parameters of a likelihood that has any.
LIKELIHOOD_PARAMETERS = {
    "gaussian-learned": {"rho"},
    "student-t-learned": {"rho", "df_rho"},
    "censored": {"rho"},
    "negative-binomial": {"rho"},
    "ordinal": {"first", "gaps"},
}
#: The parameters of a posterior beyond ``mean`` and ``rho``.
CORRELATIONS = {
    "low-rank": {"0.factor"},
    "matrix": {"0.rows", "0.columns", "1.rows", "1.columns"},
    "full": {"0.factor"},
    "by-group": {"0.factor"},
}
#: Those of classes, whose predictive distributions do not keep the weight samples unasked.
OF_CLASSES = ("categorical", "ordinal")

NUM_FEATURES, NUM_OUTPUTS = 3, 4


def mlp(
    dtype: torch.dtype = torch.float64, *, seed: int = 0, num_outputs: int = NUM_OUTPUTS
) -> nn.Sequential:
    """3 inputs, 5 hidden units, 4 outputs: 44 weights, the same for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(NUM_FEATURES, 5), nn.Tanh(), nn.Linear(5, num_outputs))
    return net.to(dtype)


def normals(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normals from a generator of their own."""
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    """One choice of prior, posterior and likelihood, by their names above."""

    prior: str
    posterior: str
    likelihood: str

    def __str__(self) -> str:
        return f"{self.prior}-{self.posterior}-{self.likelihood}"

    @property
    def is_point(self) -> bool:
        """Whether the posterior is a point estimate."""
        return self.posterior == "delta"

    @property
    def num_outputs(self) -> int:
        """The number of outputs that the likelihood needs from ``net()``."""
        return 1 if self.likelihood == "ordinal" else NUM_OUTPUTS

    def net(self, dtype: torch.dtype = torch.float64, *, seed: int = 0) -> nn.Sequential:
        """``mlp`` with the outputs that the likelihood needs."""
        return mlp(dtype, seed=seed, num_outputs=self.num_outputs)

    def bnn(self, net: nn.Module | None = None, **options: Any) -> BayesianModule:
        """A network of these components, by default ``net()`` with std 0.3 where it has one."""
        options = {"seed": 11, "init_std": None if self.is_point else 0.3, **options}
        net = self.net() if net is None else net
        return BayesianModule(
            net,
            prior=PRIORS[self.prior],
            posterior=POSTERIORS[self.posterior],
            likelihood=LIKELIHOODS[self.likelihood]().to(next(net.parameters()).dtype),
            **options,
        )

    def data(self, num_data: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """Inputs (N, 3), and targets that fit the likelihood and ``net()``."""
        inputs = normals(num_data, NUM_FEATURES, seed=1, dtype=dtype)
        if self.likelihood == "categorical":
            return inputs, torch.arange(num_data) % NUM_OUTPUTS
        if self.likelihood == "ordinal":
            return inputs, torch.arange(num_data) % 5
        numbers = normals(num_data, NUM_OUTPUTS, seed=2, dtype=dtype)
        if self.likelihood == "censored":  # exact, from one side or two, by turns
            reach = torch.tensor([0.0, 0.5, torch.inf]).to(dtype)
            turn = torch.arange(num_data * NUM_OUTPUTS).reshape(num_data, NUM_OUTPUTS)
            return inputs, torch.stack([numbers - reach[turn % 2], numbers + reach[turn % 3]], -1)
        if self.likelihood in ("poisson", "negative-binomial"):
            return inputs, numbers.exp().floor()
        return inputs, numbers


#: Prior and likelihood never meet in one formula: some likelihoods meet every prior, all meet one.
CASES = [
    *(Case(*names) for names in itertools.product(PRIORS, POSTERIORS, [*LIKELIHOODS][:3])),
    *(Case("gaussian", *names) for names in itertools.product(POSTERIORS, [*LIKELIHOODS][3:])),
]
each_case = loop_over("case", CASES)
each_prior = loop_over("prior", PRIORS.values())
