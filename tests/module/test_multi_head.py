"""A network with a head for each task: each example is answered by its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import bayesify as bf
from bayesify.datasets import TensorLoader


def multi_head(num_heads: int = 3) -> bf.MultiHead:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    return bf.MultiHead(body, [nn.Linear(8, 2) for _ in range(num_heads)])


def examples() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 4, generator=generator)
    return x, torch.tensor([0, 2, 1, 1, 0, 2]), torch.tensor([0, 1, 0, 1, 0, 1])


def test_each_example_is_answered_by_its_own_head() -> None:
    net, (x, head, _) = multi_head(), examples()
    expected = torch.stack(
        [net.heads[int(h)](net.body(row)) for row, h in zip(x, head, strict=True)]
    )
    torch.testing.assert_close(net(x, head), expected)
    other = net(x, (head + 1) % 3)
    assert float((other - expected).detach().abs().min()) > 0.0  # another head is caught


def test_outputs_may_have_any_shape() -> None:
    net = bf.MultiHead(nn.Flatten(), [nn.Unflatten(1, (2, 2)), nn.Unflatten(1, (2, 2))])
    assert net(torch.zeros(5, 2, 2), torch.zeros(5, dtype=torch.int32)).shape == (5, 2, 2)


@pytest.mark.parametrize(
    "estimator", [bf.WeightSampling(), bf.LocalReparameterization(), bf.Flipout()]
)
def test_the_other_heads_have_no_gradient_from_the_examples(estimator: bf.Estimator) -> None:
    bnn = bf.BayesianModule(multi_head(), estimator=estimator)
    x, _, y = examples()
    elbo = bf.ELBO(bnn, num_data=6, temperature=0.0)
    elbo((x, torch.full((6,), 1)), y).loss.backward()
    grad = bnn.posterior.mean.grad
    assert grad is not None
    for name in bnn.layout.names:
        in_use = name.startswith(("body.", "heads.1."))
        assert bool((grad[bnn.layout.slice_of(name)] != 0).any()) == in_use, name


def test_local_reparametrisation_is_exact_in_every_head() -> None:
    bnn = bf.BayesianModule(multi_head(), estimator=bf.LocalReparameterization())
    x, head, _ = examples()
    assert {row.treatment for row in bnn.summary(x, head)} == {"exact"}


def test_it_trains_and_predicts_on_minibatches_of_several_tasks() -> None:
    x, head, y = examples()
    bnn = bf.BayesianModule(multi_head(), init_std=0.01)
    loader = TensorLoader((x, head), y, 4)
    bf.fit(
        bf.ELBO(bnn, num_data=6, temperature=0.0),
        loader,
        epochs=40,
        optimizer=lambda groups: torch.optim.Adam(groups, lr=0.05),
    )
    assert bool((bnn.predict((x, head), num_samples=8).mean.argmax(1) == y).all())


@pytest.mark.parametrize(
    ("head", "error", "message"),
    [
        (torch.zeros(6), TypeError, "head must hold integers, got torch.float32"),
        (torch.zeros(6, dtype=torch.bool), TypeError, "head must hold integers, got torch.bool"),
        (torch.zeros(5, dtype=torch.long), ValueError, r"head must have shape \(6,\)"),
        (torch.zeros(6, 1, dtype=torch.long), ValueError, r"head must have shape \(6,\)"),
        (torch.full((6,), 3), ValueError, "head must lie from 0 to 2, got 3 to 3"),
        (torch.full((6,), -1), ValueError, "head must lie from 0 to 2, got -1 to -1"),
    ],
)
def test_a_wrong_head_is_an_error(head: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        multi_head()(examples()[0], head)


def test_heads_must_fit_together() -> None:
    with pytest.raises(ValueError, match="heads must have at least 1 module, got 0"):
        bf.MultiHead(nn.Flatten(), [])
    net = bf.MultiHead(nn.Flatten(), [nn.Linear(4, 2), nn.Linear(4, 3)])
    with pytest.raises(ValueError, match=r"outputs of one shape, got \(6, 2\), \(6, 3\)"):
        net(examples()[0], examples()[1].clamp(max=1))


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(8),
        nn.BatchNorm1d(8, track_running_stats=False),
        nn.LazyBatchNorm1d(),
        nn.InstanceNorm1d(8, track_running_stats=True),
    ],
    ids=repr,
)
def test_a_head_must_not_depend_on_the_examples_of_other_tasks(layer: nn.Module) -> None:
    heads = [nn.Linear(8, 2), nn.Sequential(layer, nn.Linear(8, 2))]
    with pytest.raises(ValueError, match=r"but heads\.1\.0 is .*Norm1d; use nn\.LayerNorm"):
        bf.MultiHead(nn.Linear(4, 8), heads)
    for allowed in (nn.LayerNorm(8), nn.InstanceNorm1d(8), nn.GroupNorm(2, 8)):
        bf.MultiHead(nn.Linear(4, 8), [heads[0], nn.Sequential(allowed, nn.Linear(8, 2))])


def test_it_is_shrunk() -> None:
    net, (x, head, _) = multi_head(), examples()
    with torch.no_grad():
        net.body[0].weight[2:5] = 0.0  # type: ignore[index]
        for each in net.heads:
            each.weight[:, 6] = 0.0  # type: ignore[index]
    bnn = bf.BayesianModule(net)
    small = bf.shrink(bnn, (x, head))
    assert small.get_parameter("body.0.weight").shape == (4, 4)
    assert small.get_parameter("heads.2.weight").shape == (2, 4)
    torch.testing.assert_close(small(x, head), net(x, head))
