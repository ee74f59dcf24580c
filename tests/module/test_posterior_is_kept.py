"""Predictions leave the trained posterior as it is, whatever a network does to its weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bayesify import ELBO, BayesianModule, fit
from bayesify.datasets import TensorLoader


class Limited(nn.Linear):
    """Scales its weights down where they are large, as a constraint on their norm does."""

    limit = 1e9

    def forward(self, x: Tensor) -> Tensor:
        norm = self.weight.data.norm()
        if norm > self.limit:
            self.weight.data.mul_(self.limit / norm)
        return super().forward(x)


def test_mean_predictions_of_a_network_that_begins_to_edit_its_weights() -> None:
    bnn, x = BayesianModule(Limited(3, 2), init_std=0.01), torch.ones(5, 3)
    bnn.predict_mean(x)  # by which its passes are known
    before = bnn.posterior.mean.detach().clone()
    Limited.limit, usual = 0.1, Limited.limit
    try:
        for _ in range(3):
            bnn.predict_mean(x)
            bnn.mean_outputs(x)
    finally:
        Limited.limit = usual
    assert torch.equal(bnn.posterior.mean.detach(), before)


@pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
def test_validation_does_not_change_what_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Limited, "limit", 0.5)
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    ends = []
    for validation in (None, TensorLoader(x, y, 20, shuffle=False)):
        torch.manual_seed(0)
        net = Limited(3, 2)
        with torch.no_grad():
            net.weight.mul_(0.3)  # below the limit at first
        elbo = ELBO(BayesianModule(net, init_std=0.01, seed=1), num_data=40)
        data = TensorLoader(x, y, 8, shuffle=False)
        fit(elbo, data, validation, epochs=8, lr=0.05, backend="autograd", progress=False)
        ends.append(elbo.bnn.posterior.mean.detach())
    assert ends[0].norm() > 0.7, "the limit was never reached"
    assert torch.equal(*ends)
