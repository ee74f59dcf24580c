"""What is counted of a pass, and which operations run under several weight vectors at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from tests.cases import normals
from torch import Tensor
from torch.nn import functional as F

from bayesify.module.pass_memory import _VECTORISED, MemoryTracker, UnfusedAttention

IMAGE, ROW = normals(1, 2, 4, 4, seed=5), normals(3, 4, seed=6)
OPERATIONS: list[Callable[[Tensor], Tensor]] = [
    lambda w: F.linear(ROW, w, w[:, 0]),
    lambda w: F.linear(ROW[:, None], w),
    lambda w: F.linear(ROW, w).log_softmax(-1) + F.linear(ROW, w).softmax(-1),
    lambda w: F.conv2d(IMAGE, w.view(4, 2, 1, 2)),
    lambda w: F.max_pool2d(F.conv2d(IMAGE, w.view(4, 2, 1, 2)), 2),
    lambda w: F.avg_pool2d(F.conv2d(IMAGE, w.view(4, 2, 1, 2)), 2),
    lambda w: F.adaptive_avg_pool2d(F.conv2d(IMAGE, w.view(4, 2, 1, 2)), 2),
    lambda w: F.batch_norm(ROW @ w, torch.zeros(4).double(), torch.ones(4).double()),
    lambda w: F.group_norm(ROW @ w, 2),
    lambda w: F.layer_norm(ROW @ w, (4,)),
    lambda w: F.prelu(ROW @ w, w[0, :1]),
    lambda w: F.embedding(torch.tensor([2, 0]), w),
    lambda w: torch.baddbmm(ROW @ w[None], ROW[None], w[None]) + torch.bmm(ROW[None], w[None]),
    lambda w: F.elu(w) + F.gelu(w) + F.hardtanh(w) + F.leaky_relu(w) + F.silu(w) + F.softplus(w),
    lambda w: F.relu(w.clone(), inplace=True) + w.relu() + w.sigmoid() + w.tanh() + w.sin(),
    lambda w: w.cos() + w.exp() + w.abs().log() + w.abs().sqrt() + w.pow(2) + w.clamp(-1, 1) - w,
    lambda w: 1.0 - w.neg() / 3.0 + w.masked_fill(torch.eye(4) > 0, 2.0) * w + w.float().double(),
    lambda w: w.clone().add_(1.0).mul_(w).sub_(2.0).div_(3.0),
    lambda w: torch.cat([w.sum(0, keepdim=True), w.mean(0, keepdim=True), w[1:2]]),
    lambda w: torch.stack([part.squeeze(0) for part in w.split(1)]).permute(1, 0).transpose(0, 1),
    lambda w: w[torch.tensor([0, 2])] + w[:, torch.tensor([0, 1, 2, 3])][torch.ones(4) > 0][:2],
    lambda w: torch.cat(w.split([1, 3])).unsqueeze(0).expand(2, 4, 4).contiguous().view(-1).t(),
]


def seen_in_operations() -> set[str]:
    """What a pass through each runs, having compared vmap with a loop over weights."""
    weights, seen = normals(5, 4, 4, seed=7), set()
    for operation in OPERATIONS:
        looped = torch.stack([operation(w.clone()) for w in weights])
        with MemoryTracker() as tracker, UnfusedAttention():
            operation(weights[0].clone())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            shared = torch.vmap(operation)(weights.clone())
        assert torch.allclose(shared, looped, rtol=1e-12, atol=1e-13)
        seen |= tracker.operations
    return seen


def test_every_operation_that_is_said_to_vectorise_does() -> None:
    names = _VECTORISED | {"detach", "arange", "ones", "eye", "zeros", "gt", "lift_fresh"}
    assert seen_in_operations() >= _VECTORISED
    assert seen_in_operations() <= names


def test_a_tracker_counts_what_is_alive() -> None:
    with MemoryTracker() as tracker:
        x = torch.ones(100)
        view, y = x[:50], x.double()
        assert (tracker.live, tracker.peak) == (1200, 1200)
        del x
        assert tracker.live == 1200, "the view holds it"
        del view
        assert tracker.live == 800
        y += 1.0
        torch.mul(y, y, out=y)
    assert (tracker.live, tracker.peak) == (800, 1200)
    del y
    assert tracker.live == 0
