"""Files of other networks, whose random weights fit and whose other parts do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from bayesify import BayesianModule, load, save
from bayesify.io import StorageError


def network(width: int, *, norm: bool = False) -> nn.Module:
    """Only the last layer is random in the tests."""
    first = nn.Sequential(nn.Linear(width, 4), nn.LayerNorm(4) if norm else nn.ReLU())
    return nn.Sequential(first, nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("other", "part"),
    [
        (network(5), "its '0.0.weight' has shape (4, 3), that of the given network (4, 5)"),
        (network(3, norm=True), "it lacks '0.1."),
    ],
)
def test_other_parts_that_are_not_random_are_named(
    other: nn.Module, part: str, tmp_path: Path
) -> None:
    path = tmp_path / "net.safetensors"
    save(BayesianModule(network(3), include=["1.*"]), path)
    with pytest.raises(StorageError) as raised:
        load(path, other)
    assert f"{path} is of another architecture: {part}" in str(raised.value)
    assert "state_dict" not in str(raised.value)
