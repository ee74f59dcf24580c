"""Equal targets and classes are held whatever the rounding of the network that predicts them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bayesify as bf
from bayesify.prediction.conformal import smallest_sets


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_targets_are_held_by_the_end_that_one_of_them_set(dtype: torch.dtype) -> None:
    """As grades and counts are; without a margin one interval in ten leaves out its own target."""
    generator = torch.Generator().manual_seed(0)
    mean, y = (torch.randn(2000, generator=generator, dtype=dtype) for _ in range(2))
    std = torch.rand(2000, generator=generator, dtype=dtype) + 0.1
    left_out = (mean + (y - mean).abs() / std * std < y) & (y > mean)
    assert left_out.sum() > 50
    for joined in (False, True):
        for m, s, target in zip(mean.split(1)[:300], std.split(1), y.split(1), strict=False):
            found = bf.ConformalIntervals.of(m.expand(99), s.expand(99), target.expand(99))
            if joined:
                found = bf.ConformalIntervals.joined([found, found])
                m, s = m.expand(2, 1), s.expand(2, 1)
            lower, upper = found.interval(m, s, level=0.9)
            assert lower <= target <= upper
            assert upper - lower < 2.0 * (target - m[..., 0]).abs().max() + 1e-4


def test_equal_scores_count_as_equal_in_spite_of_rounding() -> None:
    """Rows of categories are the same again and again; their scores differ by the last bits."""
    p = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64)
    found = bf.ConformalSets.of(p.expand(19, 3), torch.tensor([0] * 14 + [1] * 5))
    for shift in (-1e-16, 0.0, 1e-16, 2e-16):
        moved = p + torch.tensor([[shift, 0.0, -shift]], dtype=torch.float64)
        assert found.sets(moved, 0.9).tolist() == [[True, True, False]]


@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 0.01), (torch.bfloat16, 0.06)])
def test_sets_in_half_precision_are_hardly_larger(dtype: torch.dtype, most: float) -> None:
    generator = torch.Generator().manual_seed(0)
    p = (2.0 * torch.randn(2000, 10, generator=generator)).softmax(-1)
    y = torch.multinomial(p, 1, generator=generator).squeeze(1)
    sizes = [
        float(bf.ConformalSets.of(q[:1000], y[:1000]).sets(q[1000:], 0.8).double().sum(1).mean())
        for q in (p, p.to(dtype))
    ]
    assert sizes[0] < 3.0
    assert sizes[1] == pytest.approx(sizes[0], rel=most)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rows_of_a_table_are_held_in_batches_of_any_size(dtype: torch.dtype) -> None:
    """A network in float32 predicts other last digits for one row, also once they are widened."""
    level, shares = 0.7, []
    for seed in range(40):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(40, 200), nn.ReLU(), nn.Linear(200, 1))
        row = torch.randn(1, 40)
        with torch.no_grad():
            many = net(row.repeat(1000, 1)).squeeze(1).to(dtype)
            alone = net(row).squeeze(1).to(dtype)
        grades = torch.randint(0, 5, (3000,)).to(dtype) - 2.0
        std = torch.ones(1000, dtype=dtype)
        found = bf.ConformalIntervals.of(many, std, grades[:1000])
        low, high = found.interval(alone, std[:1], level)
        shares.append(float(((low <= grades[1000:]) & (grades[1000:] <= high)).double().mean()))
    # Without the margin a sixth to a fifth of the targets is lost in two of five networks.
    assert min(shares) > level - 0.06


def test_probabilities_may_be_widened_after_the_calibration() -> None:
    level, shares = 0.8, []
    for seed in range(100):
        torch.manual_seed(seed)
        p = torch.rand(6).softmax(-1)
        rows = p.expand(1000, 6)
        found = bf.ConformalSets.of(rows, p.multinomial(1000, replacement=True))
        shares.append(float(p[found.sets(p[None].double(), level)[0]].sum()))
    assert min(shares) > level - 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [5, 10])
def test_the_smallest_set_of_equal_classes(classes: int, dtype: torch.dtype) -> None:
    p = torch.full((1, classes), 1.0 / classes, dtype=dtype)
    for held in range(1, classes):
        assert int(smallest_sets(p, held / classes).sum()) == held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_most_probable_class_is_always_in_the_set(dtype: torch.dtype) -> None:
    assert smallest_sets(torch.tensor([[0.6, 0.4]], dtype=dtype), 1e-6).tolist() == [[True, False]]


def test_the_smallest_sets_are_of_probabilities() -> None:
    with pytest.raises(ValueError, match="must be finite, got nan"):
        smallest_sets(torch.full((1, 3), torch.nan), 0.9)
    with pytest.raises(ValueError, match="turn logits into probabilities"):
        smallest_sets(torch.tensor([[3.0, 1.0, -2.0]]), 0.9)
    with pytest.raises(ValueError, match=r"shape \(N, K\)"):
        smallest_sets(torch.tensor([0.5, 0.5]), 0.9)
