"""Exported networks agree with PyTorch's, or are not written."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.cases import normals
from tests.zoo import ZOO
from torch import Tensor, nn

import bayesify as bf
from bayesify.export import (
    ExportError,
    ExportMetadata,
    export_onnx,
    export_program,
    onnx_session,
    read_metadata,
)
from bayesify.export import onnx as onnx_export
from bayesify.export.report import largest_difference
from bayesify.export.tracing import TracedNetwork

X = normals(5, 4, seed=1).float()
EXPORTS = {".onnx": export_onnx, ".pt2": export_program}
SAMPLING = bf.WeightSampling()
#: Networks of the zoo that cannot be exported, by format, with the cause.
CANNOT = {
    (".onnx", "branch-and-loop"): "Could not guard on data-dependent expression",
    (".pt2", "branch-and-loop"): "Could not guard on data-dependent expression",
    (".onnx", "lstm-projected"): "ONNX Runtime cannot load the network",
}


def make_bnn(outputs: int = 3, **options: Any) -> bf.BayesianModule:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, outputs))
    return bf.BayesianModule(net, init_std=0.2, seed=5, **options)


def run_file(path: Path, inputs: Tensor, name: str = "input") -> dict[str, Tensor]:
    if path.suffix == ".pt2":
        found: dict[str, Tensor] = torch.export.load(path).module()(inputs)
        return found
    session = onnx_session(path)
    names = [output.name for output in session.get_outputs()]
    values = session.run(names, {name: inputs.numpy()})
    return {each: torch.from_numpy(value) for each, value in zip(names, values, strict=True)}


@pytest.mark.parametrize("suffix", EXPORTS)
@pytest.mark.parametrize(
    "estimator", [pytest.param(SAMPLING, marks=pytest.mark.slow), bf.LocalReparameterization()]
)
def test_classes_with_their_uncertainty(
    suffix: str, estimator: bf.Estimator, tmp_path: Path
) -> None:
    path = tmp_path / f"net{suffix}"
    frozen = bf.freeze(make_bnn(), 4, estimator=estimator)
    report = EXPORTS[suffix](frozen, path, X)
    assert report.path == path
    assert report.bytes == path.stat().st_size
    assert report.outputs == ("mean", "total", "epistemic")
    assert report.largest_difference < 1e-5
    other = normals(11, 4, seed=2).float()  # another number of examples
    for name, value in run_file(path, other).items():
        torch.testing.assert_close(value, getattr(frozen(other), name), atol=1e-5, rtol=1e-5)
    assert read_metadata(path) == ExportMetadata("classification", 4)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", EXPORTS)
def test_numbers_with_their_quantiles(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"net{suffix}"
    bnn = make_bnn(1, likelihood=bf.GaussianLikelihood(std=0.3))
    report = EXPORTS[suffix](bf.freeze(bnn, 4, estimator=SAMPLING), path, X)
    assert report.outputs == ("mean", "std", "quantiles", "epistemic")
    found, expected = run_file(path, X), bnn.predict(X, num_samples=4)
    assert torch.allclose(found["mean"], expected.mean, atol=1e-5)
    quantiles = torch.stack([expected.quantile(q) for q in (0.025, 0.5, 0.975)], -1)
    assert torch.allclose(found["quantiles"], quantiles, atol=1e-5)
    assert read_metadata(path).quantiles == (0.025, 0.5, 0.975)


def test_a_plain_network_and_its_description(tmp_path: Path) -> None:
    pruned = bf.prune(make_bnn(), 0.5)
    small = bf.shrink(pruned, X)
    described = ExportMetadata("classification", 0, classes=("a", "b", "c"))
    path = tmp_path / "net.onnx"
    assert export_onnx(small, path, X, metadata=described).outputs == ("output",)
    assert torch.allclose(run_file(path, X)["output"], pruned.mean_outputs(X), atol=1e-5)
    assert read_metadata(path) == described
    assert export_onnx(nn.Linear(4, 3).train(), path, X).outputs == ("output",)


def test_the_threads_of_a_session_sleep_between_passes(tmp_path: Path) -> None:
    report = export_onnx(nn.Linear(3, 2), tmp_path / "net.onnx", torch.zeros(5, 3))
    options = onnx_session(report.path).get_session_options()
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


@pytest.mark.slow
def test_int8_is_smaller_and_says_what_it_costs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 200), nn.ReLU(), nn.Linear(200, 200), nn.Linear(200, 3))
    frozen = bf.freeze(bf.BayesianModule(net), 0)
    path = tmp_path / "net.onnx"
    report = export_onnx(frozen, path, X, int8=True)
    assert report.float_bytes is not None
    assert report.bytes < 0.4 * report.float_bytes
    assert 1e-5 < report.largest_difference < 0.05
    found = run_file(path, X)["mean"]
    assert float((found - frozen(X).mean).abs().max()) <= report.largest_difference + 1e-7
    assert read_metadata(path).kind == "classification"


def test_other_outputs_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.onnx"
    path.write_text("before")
    encoded = onnx_export.encoded

    def of_another(traced: TracedNetwork, metadata: ExportMetadata | None) -> bytes:
        return encoded(TracedNetwork.of(bf.freeze(make_bnn(), 4, seed=6), X), metadata)

    monkeypatch.setattr(onnx_export, "encoded", of_another)
    with pytest.raises(ExportError, match=r"within 1e-05 of PyTorch's, got a difference of"):
        export_onnx(bf.freeze(make_bnn(), 4), path, X)
    assert path.read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["net.onnx"]


def test_differences_of_shape_and_nan_are_errors() -> None:
    own = {"mean": torch.tensor([1.0, float("inf")])}
    assert largest_difference([torch.tensor([1.0, float("inf")])], own) == 0.0
    with pytest.raises(ExportError, match=r"mean must have shape \(2,\)"):
        largest_difference([torch.zeros(2, 1)], own)
    with pytest.raises(ExportError, match="mean is not finite"):
        largest_difference([torch.tensor([float("nan"), 0.0])], own)


class Texts(nn.Module):
    def forward(self, x: Tensor) -> str:
        return str(len(x))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((nn.Linear(4, 3), "net.txt", X), ValueError, "must end in"),
        ((make_bnn(), "net{}", X), TypeError, "draws new weights at each call; export bf.freeze"),
        (
            (bf.DeepEnsemble([make_bnn()]), "net{}", X),
            TypeError,
            "of an ensemble export each member",
        ),
        ((nn.Linear(4, 3), "net{}", X[:0]), ValueError, "N > 0"),
        ((nn.Linear(4, 3), "net{}", np.zeros((2, 4))), TypeError, "inputs must be tensors"),
        (
            (nn.Linear(9, 3), "net{}", X),
            ExportError,
            "fails on the example: mat1 and mat2",
        ),
        ((Texts(), "net{}", X), ExportError, "must return a tensor, or tensors by name, got str"),
        ((nn.Linear(4, 3), "none/net{}", X), OSError, "No such file"),
    ],
)
@pytest.mark.parametrize("suffix", EXPORTS)
def test_wrong_arguments(
    suffix: str, arguments: tuple[Any, ...], error: type, message: str, tmp_path: Path
) -> None:
    net, name, example = arguments
    with pytest.raises(error, match=message):
        EXPORTS[suffix](net, tmp_path / name.format(suffix), example)
    assert not list(tmp_path.iterdir())


class Halved(nn.Linear):
    """Halves its inputs in place, and may square its outputs."""

    def forward(
        self, x: Tensor, *, squared: bool = True, mask: Tensor | None = None, power: int = 2
    ) -> Tensor:
        outputs = super().forward(x.div_(2.0))
        outputs = outputs if mask is None else outputs * mask
        return outputs**power if squared else outputs


@pytest.mark.parametrize("suffix", EXPORTS)
@pytest.mark.parametrize("estimator", [None, SAMPLING])
def test_a_network_may_edit_its_inputs(suffix: str, estimator: Any, tmp_path: Path) -> None:
    net: nn.Module = Halved(4, 3)
    if estimator is not None:
        net = bf.freeze(bf.BayesianModule(net), 3, estimator=estimator)
    path, example = tmp_path / f"net{suffix}", X.clone()
    report = EXPORTS[suffix](net, path, example)
    assert torch.equal(example, X), "the caller's example is changed"
    found = run_file(path, normals(7, 4, seed=3).float())
    expected = net(normals(7, 4, seed=3).float())
    expected = expected if estimator is None else expected.mean
    torch.testing.assert_close(found[report.outputs[0]], expected)


@pytest.mark.parametrize("suffix", EXPORTS)
def test_arguments_that_are_no_tensors_have_one_value(suffix: str, tmp_path: Path) -> None:
    net, path = Halved(4, 3), tmp_path / f"net{suffix}"
    example = {"squared": False, "x": X, "mask": None, "power": 3}
    report = EXPORTS[suffix](net, path, example)
    assert report.inputs == ("x",)
    found = run_file(path, X.clone(), "x")["output"]
    torch.testing.assert_close(found, net(X.clone(), squared=False))


def test_an_input_that_has_the_name_of_an_output(tmp_path: Path) -> None:
    class Centred(nn.Linear):
        def forward(self, x: Tensor, *, mean: Tensor) -> Tensor:
            return super().forward(x - mean)

    frozen = bf.freeze(bf.BayesianModule(Centred(4, 3)), 3)
    with pytest.raises(ExportError, match=r"got mean for both; .* or export to \.pt2"):
        export_onnx(frozen, tmp_path / "net.onnx", {"x": X, "mean": X})
    assert export_program(frozen, tmp_path / "net.pt2", {"x": X, "mean": X}).inputs == ("x", "mean")


class Limited(nn.Module):
    """A network for at most 16 examples, which are places in a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(normals(16, 4).float())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table[: x.shape[0]]


def test_a_network_for_few_examples_is_written(tmp_path: Path) -> None:
    net = Limited().eval()
    report = EXPORTS[".pt2"](net, tmp_path / "net.pt2", normals(10, 4).float())
    assert report.largest_difference < 1e-5


class Branching(nn.Linear):
    """Another function of larger batches."""

    most = 8

    def forward(self, x: Tensor) -> Tensor:
        outputs = super().forward(x)
        return outputs if x.shape[0] <= self.most else outputs + 1.0


@pytest.mark.parametrize("suffix", EXPORTS)
def test_a_branch_on_the_number_of_examples_is_not_written(suffix: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"another branch, .* from 9 on|fails on 11 examples"):
        EXPORTS[suffix](Branching(4, 3), tmp_path / f"net{suffix}", X)
    assert not list(tmp_path.iterdir())


def test_a_branch_beyond_the_examples_that_are_compared_is_found(tmp_path: Path) -> None:
    """A program in PyTorch's format raises there; an ONNX file would answer otherwise."""
    net = Branching(4, 3)
    net.most = 64
    with pytest.raises(ExportError, match=r"another branch, or fails, from 65 on; .* to \.pt2"):
        export_onnx(net, tmp_path / "net.onnx", X)
    assert not list(tmp_path.iterdir())
    assert export_program(net, tmp_path / "net.pt2", X).largest_difference < 1e-5


class Rows(nn.Linear):
    """A network that makes a number of its examples' count."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(len(x), -1)


@pytest.mark.parametrize("suffix", EXPORTS)
def test_a_fixed_number_of_examples_is_named(suffix: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"fixes the number of examples, as len\(x\)"):
        EXPORTS[suffix](Rows(4, 3), tmp_path / f"net{suffix}", X)


@pytest.mark.filterwarnings("ignore")  # of PyTorch's own decompositions
@pytest.mark.parametrize("suffix", EXPORTS)
def test_a_network_with_heads_is_written(suffix: str, tmp_path: Path) -> None:
    net = bf.MultiHead(nn.Linear(4, 5), [nn.Linear(5, 3) for _ in range(2)])
    frozen = bf.freeze(bf.BayesianModule(net), 2)
    report = EXPORTS[suffix](frozen, tmp_path / f"net{suffix}", (X, torch.arange(len(X)) % 2))
    assert report.largest_difference < 1e-5


class Values(nn.Linear):
    """Outputs with the names that values within a graph have elsewhere."""

    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x).relu()
        return {"value_0": hidden.square(), "value_1": hidden}


def test_outputs_may_have_the_names_of_values(tmp_path: Path) -> None:
    report = EXPORTS[".onnx"](Values(4, 3), tmp_path / "net.onnx", X)
    assert report.outputs == ("value_0", "value_1")


def test_half_precision_is_refused_with_the_mend(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).half()
    frozen = bf.freeze(bf.BayesianModule(net, seed=1), 4)
    with pytest.raises(ExportError, match=r"export the network after \.float\(\), not in torch.fl"):
        EXPORTS[".pt2"](frozen, tmp_path / "net.pt2", X.half())


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs onnxruntime; pip install 'bayesify\[onn"):
        export_onnx(nn.Linear(4, 3), tmp_path / "net.onnx", X)


@pytest.mark.filterwarnings("ignore")  # of PyTorch's own decompositions
@pytest.mark.parametrize("suffix", EXPORTS)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "inputs-by-name" else pytest.mark.slow)
        for name in ZOO
    ],
)
def test_the_zoo(name: str, suffix: str, tmp_path: Path) -> None:
    specimen = ZOO[name]
    reads: dict[str, Any] = {} if specimen.reads is None else {"output": specimen.reads}
    options = {**specimen.options, **reads}
    bnn = bf.BayesianModule(specimen.plain().float(), init_std=0.2, seed=3, **options)
    example = specimen.changed(lambda t: t.float() if t.is_floating_point() else t)
    frozen = bf.freeze(bnn, 2, estimator=SAMPLING)
    path = tmp_path / f"net{suffix}"
    cause = CANNOT.get((suffix, name))
    if cause is None:
        assert EXPORTS[suffix](frozen, path, example).largest_difference < 1e-5
    else:
        with pytest.raises(ExportError, match=cause):
            EXPORTS[suffix](frozen, path, example)
        assert not path.exists()


def test_infinite_and_undefined_outputs_are_compared() -> None:
    inf, nan = math.inf, math.nan
    expected = {"m": torch.tensor([-inf, nan, 2.0])}
    assert largest_difference([torch.tensor([-inf, nan, 2.5])], expected) == 0.25
    none = torch.tensor([-inf, nan])  # no finite value
    assert largest_difference([none], {"m": none}) == 0.0
    for wrong in ([0.0, nan, 2.0], [-inf, 0.0, 2.0], [-inf, nan, inf], [inf, nan, 2.0]):
        with pytest.raises(ExportError, match="is not finite as PyTorch's is"):
            largest_difference([torch.tensor(wrong)], expected)


def test_a_network_of_one_whole_is_told_that_the_number_must_vary(tmp_path: Path) -> None:
    class Nodes(nn.Module):
        def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
            return adjacency @ x

    with pytest.raises(ExportError, match="fails on 3 of the examples, and an exported one takes"):
        export_program(Nodes(), tmp_path / "net.pt2", (torch.ones(6, 4), torch.eye(6)))
