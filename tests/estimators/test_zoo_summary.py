"""What summary() says is true, and what an estimator does to one linear operation is exact."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.cases import normals
from tests.estimators.test_zoo import ROUNDING, differ
from tests.loops import loop_over, noted
from tests.zoo import (
    ESTIMATORS,
    NO_NOISE,
    N,
    Specimen,
    each_specimen,
    set_rho,
)
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify import BayesianModule, Estimator, Flipout, LocalReparameterization
from bayesify.distributions.softplus import inverse_softplus
from bayesify.noise.keys import NoiseSource

LOCAL, PER_POSITION = LocalReparameterization(), LocalReparameterization(per_position=True)
each_local = loop_over("estimator", [LOCAL, PER_POSITION, Flipout()])


def check_summary(specimen: Specimen, estimator: Estimator) -> None:
    """Of equal data, noise in one parameter makes different outputs where it is not sampled."""
    bnn = specimen.bnn(estimator, std=None)
    before = [torch.get_rng_state(), *(buffer.clone() for buffer in bnn.buffers())]
    specimen.summary(bnn)
    after = [torch.get_rng_state(), *bnn.buffers()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    # Dropout masks and the statistics of a minibatch would tell equal data apart.
    bnn.eval()
    inputs = specimen.changed(lambda x: x[:1].expand(x.shape).clone())
    rows = specimen.summary(bnn, inputs)
    assert [(row.name, row.shape) for row in rows] == [
        (name, tuple(shape))
        for name, shape in zip(bnn.layout.names, bnn.layout.shapes, strict=True)
    ]
    assert {row.treatment for row in rows} <= {"exact", "per-position", "sampled"}
    assert all(row.reason for row in rows)

    def all_equal() -> bool:
        outputs = specimen.run(bnn, inputs)
        return not differ(outputs, outputs[:1])

    for row in rows:
        set_rho(bnn, row.name, 0.0)
        assert all_equal() == (row.treatment == "sampled"), row
        set_rho(bnn, row.name, NO_NOISE)
    for row in rows:
        if row.treatment == "sampled":
            set_rho(bnn, row.name, 0.0)
    assert all_equal()
    assert specimen.summary(bnn, inputs) == rows, "a pass used no parameter otherwise than foreseen"


def check_one_example(specimen: Specimen, estimator: Estimator) -> None:
    """A batch of one example gives the plain network's output, and so does a batch after it."""
    plain, bnn = specimen.plain().eval(), specimen.bnn(estimator, std=None).eval()
    one = specimen.changed(lambda x: x[:1])
    for inputs in (one, None):
        expected = specimen.run(plain, inputs)
        assert torch.allclose(specimen.run(bnn, inputs), expected, rtol=0.0, atol=ROUNDING)


@each_specimen
def test_summary(specimen: Specimen, names: list[str]) -> None:
    for name in names:
        with noted(estimator=name):
            check_summary(specimen, ESTIMATORS[name])
            check_one_example(specimen, ESTIMATORS[name])


class Several(nn.Module):
    """What one layer makes of several inputs, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layer(part) for part in x.unbind(1)], 1)


class Function(nn.Module):
    """``F.linear`` with a weight and a bias of any shapes."""

    def __init__(self, weight: tuple[int, ...], bias: tuple[int, ...] | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(weight))
        self.bias = None if bias is None else nn.Parameter(torch.zeros(bias))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Product(nn.Module):
    """A product of the inputs and one weight."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight)


class Conv1D(nn.Module):
    """As GPT-2's: a linear layer on folded rows, whose weight has the inputs first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 2))
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight)
        return rows.view(*x.shape[:-1], 2)


PRODUCTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "matmul": (lambda: Product(lambda x, w: x @ w, 3, 2), (3,)),
    "matmul-sequence": (lambda: Product(torch.matmul, 3, 2), (4, 3)),
    "matmul-transposed": (lambda: Product(lambda x, w: x.matmul(w.T), 2, 3), (3,)),
    "matmul-t": (lambda: Product(lambda x, w: x @ w.t(), 2, 3), (3,)),
    "matmul-vector": (lambda: Product(lambda x, w: x @ w, 3), (4, 3)),
    "matmul-from-the-left": (lambda: Product(lambda x, w: w @ x, 2, 3), (3, 4)),
    "matmul-columns": (lambda: Product(lambda x, w: (w @ x.T).T, 2, 3), (3,)),
    "mm": (lambda: Product(lambda x, w: x.mm(w), 3, 2), (3,)),
    "mv": (lambda: Product(lambda x, w: x.mv(w), 3), (3,)),
    "addmm": (Conv1D, (4, 3)),
    "reshaped": (
        lambda: Product(lambda x, w: (x.flatten(0, 1) @ w).view(*x.shape[:2], 2), 3, 2), (4, 3),
    ),
    "einsum-heads": (
        lambda: Product(lambda x, w: torch.einsum("nti,ihd->nhtd", x, w), 3, 2, 2), (4, 3),
    ),
    "einsum-of-heads": (
        lambda: Product(lambda x, w: torch.einsum("nhtd,hdo->nto", x, w), 2, 1, 2), (2, 4, 1),
    ),
    "einsum-ellipsis": (
        lambda: Product(lambda x, w: torch.einsum("oi,...i->...o", w, x), 2, 3), (4, 3),
    ),
    "einsum-of-a-list": (
        lambda: Product(lambda x, w: torch.einsum("ni,io->no", [x, w]), 3, 2), (3,),
    ),
}  # fmt: skip


def test_products_are_linear_layers() -> None:
    for name, (make, shape) in PRODUCTS.items():
        bnn = BayesianModule(make().double(), estimator=Flipout())
        found = [row.treatment for row in bnn.summary(normals(N, *shape, seed=3))]
        assert set(found) == {"exact"}, name


@pytest.mark.slow
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_in_compiled_code(name: str) -> None:
    """They are finite, and but for attributes, which compiled code does not show, the same."""
    make, shape = PRODUCTS[name]
    for estimator in (Flipout(), LocalReparameterization(per_position=True)):
        bnn = BayesianModule(make().double(), estimator=estimator, init_std=0.3, seed=4)
        inputs = normals(N, *shape, seed=3)
        torch.compiler.reset()  # which compiles one forward only so often
        with torch.random.fork_rng():
            compiled = torch.compile(copy.deepcopy(bnn), backend="aot_eager", fullgraph=True)
            found, expected = compiled(inputs), bnn(inputs)
        assert found.isfinite().all()
        assert name == "matmul-transposed" or torch.equal(found, expected)


def test_a_weight_used_two_ways_in_compiled_code() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(F.linear(x, self.weight.t()))
            return F.linear(hidden, self.weight)

    bnn = BayesianModule(Tied(), estimator=Flipout(), init_std=0.3, seed=4)
    inputs = normals(N, 5, seed=3)
    assert [row.treatment for row in bnn.summary(inputs)] == ["exact"]
    torch.compiler.reset()
    compiled = torch.compile(copy.deepcopy(bnn), backend="eager", fullgraph=True)
    assert torch.equal(compiled(inputs), bnn(inputs))


@loop_over(
    "call",
    [
        lambda x, w: torch.einsum("ni,ni->n", x, w.expand(len(x), 3)),
        lambda x, w: torch.einsum("ni,io->no", x, torch.outer(w, w)),
        lambda x, w: torch.einsum("ni,i->ni", x, w),
        lambda x, w: torch.einsum("ni,o->no", x, w),
        lambda x, w: torch.einsum("ni,i->", x, w).expand(len(x)),
        lambda x, w: torch.addmm(x, x, torch.diag(w), alpha=2),
        lambda x, w: x @ (w.view(3, 1) @ w.view(1, 3)),
        lambda x, w: x @ w.view(3, 1),
        lambda x, w: x.to_sparse() @ w,
    ],
)
def test_other_products_are_sampled(call: Callable[[Tensor, Tensor], Tensor]) -> None:
    bnn = BayesianModule(Product(call, 3).double(), estimator=LocalReparameterization(), seed=3)
    inputs = normals(N, 3, seed=3)
    (row,) = bnn.summary(inputs)
    assert row.treatment == "sampled"
    with torch.no_grad():
        assert torch.isfinite(bnn(inputs)).all()


#: One linear operation each, and the shape of one example.
OPERATIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 2), (3,)),
    "sequence": (lambda: nn.Linear(3, 2), (4, 3)),
    "grid": (lambda: nn.Linear(3, 2, bias=False), (2, 4, 3)),
    "vector": (lambda: Function((3,), None), (3,)),
    "one-bias": (lambda: Function((2, 3), (1,)), (3,)),
    "several-inputs": (Several, (5, 3)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=2, dilation=2), (2, 15)),
    "conv1d-whole": (lambda: nn.Conv1d(2, 3, 4), (2, 4)),
    "conv2d-groups": (lambda: nn.Conv2d(4, 6, 2, groups=2), (4, 4, 4)),
    "conv2d-circular": (
        lambda: nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), (1, 4, 4),
    ),
    "conv1d-depthwise": (lambda: nn.Conv1d(3, 6, 2, groups=3), (3, 6)),
    "conv3d": (lambda: nn.Conv3d(1, 2, 2), (1, 4, 3, 3)),
    "transposed1d": (lambda: nn.ConvTranspose1d(2, 3, 3, stride=2, output_padding=1), (2, 4)),
    "transposed1d-from-one": (lambda: nn.ConvTranspose1d(2, 3, 4), (2, 1)),
    "transposed2d-groups": (lambda: nn.ConvTranspose2d(4, 6, 2, groups=2, dilation=2), (4, 3, 3)),
    "transposed3d": (lambda: nn.ConvTranspose3d(1, 2, 2), (1, 2, 2, 2)),
    **PRODUCTS,
}  # fmt: skip
each_operation = loop_over("name", OPERATIONS)


def operation(name: str, estimator: Estimator) -> tuple[BayesianModule, Tensor, Tensor]:
    """A network of one operation, an example, and what each weight adds to its outputs."""
    make, shape = OPERATIONS[name]
    bnn = BayesianModule(make().double(), estimator=estimator, init_std=0.5, seed=4)
    single = normals(1, *shape, seed=8)
    unit = torch.eye(bnn.layout.num_weights, dtype=torch.float64)
    effects = torch.stack([bnn.run_with(row, single).flatten() for row in unit])
    return bnn, single, effects


def check_one_weight(name: str, estimator: Estimator) -> None:
    """One weight explains all outputs of an example, but for noise of its own at each position."""
    bnn, single, effects = operation(name, estimator)
    inputs = single.expand(N, *single.shape[1:])
    mean = bnn.run_with(bnn.posterior.mean, inputs).reshape(N, -1)
    for row in bnn.summary(inputs):
        part = bnn.layout.slice_of(row.name)
        alone = copy.deepcopy(bnn)
        set_rho(alone, slice(None), NO_NOISE)
        set_rho(alone, part, 0.0)
        shift = (alone(inputs).reshape(N, -1) - mean).detach().T
        # Outputs that any weights could have made lie in the span of these.
        span = effects[part].T
        nearest = span @ torch.linalg.lstsq(span, shift, driver="gelsd").solution
        assert differ(shift, torch.zeros_like(shift)), row
        assert differ(nearest, shift) == (row.treatment == "per-position"), row


@each_local
@each_operation
def test_a_datum_meets_one_weight(name: str, estimator: Estimator) -> None:
    check_one_weight(name, estimator)


def check_size(name: str, estimator: Estimator, patch: pytest.MonkeyPatch) -> None:
    """Noise of size 1 in one weight moves the outputs by its std, in one direction or the other."""
    patch.setattr(NoiseSource, "normals", NoiseSource.signs)
    bnn, single, effects = operation(name, estimator)
    std = float(bnn.posterior.std.detach()[0])
    inputs = single.expand(N, *single.shape[1:])
    mean = bnn.run_with(bnn.posterior.mean, inputs)
    for index, effect in enumerate(effects):
        set_rho(bnn, slice(None), NO_NOISE)
        set_rho(bnn, index, float(inverse_softplus(torch.tensor(std, dtype=torch.float64))))
        shift = (bnn(inputs) - mean).reshape(N, -1)
        assert torch.allclose(shift.abs(), std * effect.abs(), rtol=0.0, atol=1e-9)


@each_local
@each_operation
def test_size(name: str, estimator: Estimator, monkeypatch: pytest.MonkeyPatch) -> None:
    check_size(name, estimator, monkeypatch)
