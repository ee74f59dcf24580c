"""Compare a mean field's predictive distribution with the exact one.

``python benchmarks/uncertainty.py`` writes the tables of ``docs/uncertainty.md``. The model is
y = w_1 x_1 + w_2 x_2 + noise, noise std 0.5, prior w ~ N(0, 1), 20 examples whose two features have
a stated correlation. Both posteriors are known in closed form: the exact one has precision
P = x'x / 0.25 + 1, and the best mean field has the same mean and the variances 1 / diag(P).
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from scipy import stats
from torch import Tensor, nn

import bayesify as bf
from bayesify.distributions.softplus import inverse_softplus

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "uncertainty.md"
CORRELATIONS = (0.0, 0.5, 0.9, 0.99)
NOISE, NUM_DATA = 0.5, 20


def precision(correlation: float) -> Tensor:
    """Return the precision of the exact posterior for this exact correlation, shape (2, 2)."""
    second = torch.tensor([[1.0, correlation], [correlation, 1.0]], dtype=torch.float64)
    return NUM_DATA * second / NOISE**2 + torch.eye(2, dtype=torch.float64)


def network(correlation: float) -> bf.BayesianModule:
    """Make the best mean field, with mean 0."""
    net = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(net.weight)
    bnn = bf.BayesianModule(net, likelihood=bf.GaussianLikelihood(NOISE), prior=bf.Gaussian(1.0))
    with torch.no_grad():
        std = precision(correlation).diagonal().rsqrt()
        bnn.posterior.rho.copy_(inverse_softplus(std))
    return bnn


def correlation_table() -> str:
    """Format the epistemic std, exact and of the mean field, and the interval's coverage."""
    rows = [
        "| correlation | input | epistemic std, exact | mean field | 95 % interval holds |",
        "|---|---|---|---|---|",
    ]
    for correlation in CORRELATIONS:
        exact, bnn = torch.linalg.inv(precision(correlation)), network(correlation)
        for name, x in (("(1, 1)", [[1.0, 1.0]]), ("(1, -1)", [[1.0, -1.0]])):
            new = torch.tensor(x, dtype=torch.float64)
            p = bnn.predict(new, num_samples=30_000)
            truth = float((new @ exact @ new.T).squeeze())
            std = math.sqrt(truth + NOISE**2)
            high = float(p.interval(0.95)[1])
            holds = 200 * stats.norm.cdf(high / std) - 100
            rows.append(
                f"| {correlation} | {name} | {math.sqrt(truth):.3f} | "
                f"{float(p.epistemic.sqrt()):.3f} | {holds:.1f} % |"
            )
    return "\n".join(rows)


def samples_table() -> str:
    """Format the standard errors of one prediction by the number of weight samples."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Linear(50, 1)).double()
    bnn = bf.BayesianModule(net, likelihood=bf.GaussianLikelihood(0.3), init_std=0.1)
    x = torch.randn(50, 3, dtype=torch.float64)
    rows = [
        "| S | of the mean | of the epistemic variance | of the 0.975-quantile |",
        "|---|---|---|---|",
    ]
    for samples in (10, 30, 100, 300, 1000):
        p = bnn.predict(x, samples)
        mean = p.standard_error(lambda p: p.mean) / p.total.sqrt()
        epistemic = p.standard_error(lambda p: p.epistemic) / p.epistemic
        quantile = p.standard_error(lambda p: p.quantile(0.975)) / p.total.sqrt()
        cells = (f"{100 * float(part.mean()):.1f} %" for part in (mean, epistemic, quantile))
        rows.append(f"| {samples} | {' | '.join(cells)} |")
    return "\n".join(rows)


def filled(text: str, name: str, table: str) -> str:
    """Return the document with a table between its two marks."""
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, found, rest = text.partition(start)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"{DOCUMENT} lacks the marks {start.strip()} and {end}")
    return before + start + table + "\n" + end + after


def main() -> None:
    """Write the tables."""
    tables = {"correlations": correlation_table(), "samples": samples_table()}
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, table in tables.items():
        text = filled(text, name, table)
    DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
