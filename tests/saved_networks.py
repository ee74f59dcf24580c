"""A network with trained values, and checks of its files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.cases import Case, mlp, normals
from torch import Tensor, nn

from bayesify import BayesianModule, load
from bayesify.io import StorageError

CASE = Case("scale-mixture", "mean-field", "categorical")


def trained(bnn: BayesianModule) -> BayesianModule:
    """Away from its initial values, as training leaves it."""
    with torch.no_grad():
        for index, parameter in enumerate(bnn.parameters()):
            shift = normals(parameter.numel(), seed=20 + index, dtype=parameter.dtype)
            parameter.add_(0.3 * shift.view_as(parameter))
    return bnn


def check_same(again: BayesianModule, bnn: BayesianModule, *inputs: Tensor) -> None:
    """Every tensor, setting and answer is the same, bit for bit."""
    state, expected = again.state_dict(), bnn.state_dict()
    assert list(state) == list(expected)
    kept = bnn.posterior.mask
    for name, tensor in expected.items():
        found = state[name]
        by_weight = name in ("posterior.rho", "posterior.correlations.0.factor")
        if kept is not None and by_weight and len(found) == len(kept):  # no meaning where pruned
            found, tensor = found[kept], tensor[kept]
        assert found.dtype == tensor.dtype, name
        assert torch.equal(found, tensor), name
    for part in ("prior", "estimator", "seed"):
        assert getattr(again, part) == getattr(bnn, part)
    for part in ("prior", "posterior", "likelihood"):
        assert type(getattr(again, part)) is type(getattr(bnn, part))
    assert again.likelihood.config() == bnn.likelihood.config()
    for x in inputs:
        found, wanted = (b.predict(x, 3, keep_samples=True) for b in (again, bnn))
        assert torch.equal(found.samples, wanted.samples)
        assert torch.equal(again.predict_mean(x).mean, bnn.predict_mean(x).mean)


def check_refused(path: Path, content: bytes, net: nn.Module | None = None) -> str:
    """Loading says one clear line that names the file."""
    path.write_bytes(content)
    with pytest.raises(StorageError) as caught:
        load(path, mlp() if net is None else net)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)
