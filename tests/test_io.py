"""Files of networks: they come back bit for bit, or not at all and with one clear message."""

from __future__ import annotations

import ast
import errno
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.cases import CASES, Case, each_case, mlp, normals
from tests.loops import loop_over
from torch import Tensor, nn

import bayesify
from bayesify import (
    ELBO,
    BayesianModule,
    CategoricalLikelihood,
    GaussianLikelihood,
    LocalReparameterization,
    Prior,
    compress,
    fit,
    load,
    prune,
    save,
)
from bayesify.io import StorageError, atomic_write, read_tensors, write_tensors
from bayesify.noise.keys import NoiseKey, Stream

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


@each_case
@loop_over("dtype", [torch.float64, torch.float32])
def test_a_network_comes_back_bit_for_bit(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    bnn = trained(case.bnn(case.net(dtype)))
    save(bnn, tmp_path / "a")
    net = case.net(torch.float32, seed=9)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    check_same(load(str(tmp_path / "a"), net), bnn, case.data(6, dtype)[0])
    assert all(map(torch.equal, net.state_dict().values(), before))


@loop_over("case", [case for case in CASES if not case.is_point])
def test_a_pruned_network_comes_back_smaller_and_zero(case: Case, tmp_path: Path) -> None:
    bnn = trained(case.bnn())
    small = prune(bnn, 0.75)
    for name, network in (("whole", bnn), ("small", small)):
        save(network, tmp_path / name)
    again = load(tmp_path / "small", case.net(seed=9))
    check_same(again, small, x := case.data(6)[0])
    gone = ~small.posterior.mask
    count = int(gone.sum())
    assert count == int(0.75 * len(gone))
    assert not again.posterior.mean[gone].any()
    noise = again.posterior.noise(NoiseKey(0, Stream.TRAINING, 0), range(5))
    samples = again.posterior.draw(noise).weights
    assert torch.equal(samples != 0, ~gone.expand(5, -1))
    # The file holds two numbers of 8 bytes fewer for each of these weights, and a bit for each;
    # under a MatrixGaussian one number, since a pruned weight's rho is part of the others' spread.
    size = 8 if case.posterior == "matrix" else 16
    whole, less = ((tmp_path / name).stat().st_size for name in ("whole", "small"))
    assert whole - less > count * size - 200
    twice = prune(again, 1.0)
    save(twice, tmp_path / "nothing")
    check_same(load(tmp_path / "nothing", case.net()), twice, x)


class Mixed(nn.Module):
    """Batch normalisation, a tied matrix, a frozen and a half-precision part, a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embed = nn.Embedding(4, 3)
            self.norm = nn.BatchNorm1d(3)
            self.out = nn.Linear(3, 4, bias=False)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.short = nn.Parameter(torch.randn(4).half())
            self.register_buffer("offset", torch.randn(4))
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embed(tokens).mean(1))
        return self.frozen(self.out(hidden)) * self.short.float() + self.offset


def test_buffers_ties_and_deterministic_parts_are_kept(tmp_path: Path) -> None:
    bnn = BayesianModule(Mixed(0), exclude=("norm.*", "short"), seed=3)
    tokens = torch.arange(12).view(6, 2) % 4
    for _ in range(3):
        bnn(tokens)
    bnn = trained(bnn)
    for network in (bnn, prune(bnn, 0.5)):
        save(network, tmp_path / "a")
        again = load(tmp_path / "a", Mixed(1))
        check_same(again, network, tokens)
        assert again.net.norm.num_batches_tracked == 3
        assert again.layout.ties == (("embed.weight", "out.weight"),)
        plain = again.to_module()
        assert plain.out.weight is plain.embed.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_one_element_with_any_stride(dtype: torch.dtype, tmp_path: Path) -> None:
    """They count as contiguous."""

    class Scaled(nn.Module):
        scale: Tensor

        def __init__(self, value: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([0.5]))
            self.register_buffer("scale", torch.full((2, 2), value, dtype=dtype)[:1, 0])

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight * self.scale.to(x.dtype)

    bnn = BayesianModule(Scaled(3.0), likelihood=GaussianLikelihood())
    path = tmp_path / "model.safetensors"
    save(bnn, path)
    loaded = load(path, Scaled(0.0))
    assert torch.equal(loaded.posterior.mean, bnn.posterior.mean)
    assert torch.equal(loaded.posterior.std, bnn.posterior.std)
    assert loaded.net.scale.tolist() == [3.0]


def test_a_network_turned_to_another_dtype_keeps_it(tmp_path: Path) -> None:
    bnn = trained(CASE.bnn(mlp(torch.float32)).to(torch.float64))
    save(bnn, tmp_path / "a")
    check_same(load(tmp_path / "a", mlp(torch.float32)), bnn, CASE.data(6)[0])


class Clock(nn.Module):
    """A linear layer of the time since a date, turned by angles, neither of which a file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)
        start = torch.tensor(1_700_000_123.0, dtype=torch.float64)
        self.register_buffer("start", start, persistent=False)
        self.register_buffer("turn", torch.polar(torch.ones(1), torch.ones(1)), persistent=False)
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, t: Tensor) -> Tensor:
        passed = (t - self.start).to(self.scale.dtype) * self.scale
        return torch.view_as_real(torch.view_as_complex(self.layer(passed)) * self.turn)


@loop_over("dtype", [torch.float64, torch.float32])
def test_buffers_that_a_file_does_not_hold_keep_their_kind(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    net = Clock()
    net.layer.to(dtype)
    net.scale, net.turn = (
        net.scale.to(dtype),
        net.turn.to(torch.promote_types(dtype, net.turn.dtype)),
    )
    bnn = trained(BayesianModule(net, likelihood=GaussianLikelihood(1.0)))
    save(bnn, tmp_path / "a")
    again = load(tmp_path / "a", Clock())
    check_same(again, bnn, torch.arange(3.0, dtype=torch.float64).unsqueeze(1) + 1_700_000_123)
    assert (again.net.start.dtype, again.net.turn.is_complex()) == (torch.float64, True)


class Stateful(nn.Linear):
    def get_extra_state(self) -> dict[str, float]:
        return {"scale": 2.0}

    def set_extra_state(self, state: dict[str, float]) -> None: ...


def test_state_that_is_no_tensor_is_refused_before_training(tmp_path: Path) -> None:
    bnn = BayesianModule(nn.Sequential(Stateful(3, 2)))
    message = r"holds tensors, got a network with a dict in net\.0\._extra_state; keep what"
    with pytest.raises(ValueError, match=message):
        save(bnn, tmp_path / "a")
    loader = [(torch.ones(1, 3), torch.tensor([0]))]
    with pytest.raises(ValueError, match=message):
        fit(ELBO(bnn, num_data=1), loader, checkpoint_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_that_the_format_lacks_is_named(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 2))
    net[0].register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    bnn = BayesianModule(net)
    message = r"dtype of safetensors, got torch\.complex128 for .*0\.phase; convert it"
    with pytest.raises(ValueError, match=message):
        save(bnn, tmp_path / "a")
    with pytest.raises(ValueError, match=message):
        compress(bnn, tmp_path / "a.bfz", step_size=0.01)
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True)
class Wide(Prior):
    """A prior that bayesify does not know, with a field that JSON does not know."""

    stds: Tensor

    def log_prob(self, weights: Tensor) -> Tensor:
        return torch.distributions.Normal(0.0, self.stds.max()).log_prob(weights)


@dataclass(frozen=True)
class Laplace(Wide):
    """Called as one of bayesify's own."""


class Own(CategoricalLikelihood):
    """A likelihood that bayesify does not know."""


@loop_over("kind", [Wide, Laplace])
def test_components_of_ones_own_are_passed_by_hand(kind: type[Wide], tmp_path: Path) -> None:
    prior, likelihood = kind(torch.tensor([2.0])), Own()
    bnn = BayesianModule(mlp(), prior=prior, likelihood=likelihood)
    save(bnn, tmp_path / "a")
    own = {"prior": prior, "likelihood": likelihood}
    check_same(load(tmp_path / "a", mlp(), **own), bnn, CASE.data(6)[0])
    for missing in own:
        with pytest.raises(StorageError, match=rf"has no {missing} named .*pass your own to load"):
            load(tmp_path / "a", mlp(), **{name: own[name] for name in own if name != missing})


def check_refused(path: Path, content: bytes, net: nn.Module | None = None) -> str:
    """Loading says one clear line that names the file."""
    path.write_bytes(content)
    with pytest.raises(StorageError) as caught:
        load(path, mlp() if net is None else net)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_option_of_numpy_is_stored_as_it_means(tmp_path: Path) -> None:
    """np.True_ is no bool, and JSON knows none but bools."""
    estimator = LocalReparameterization(antithetic=np.True_)  # type: ignore[arg-type]
    save(BayesianModule(nn.Linear(2, 1), estimator=estimator), tmp_path / "model")
    found = load(tmp_path / "model", nn.Linear(2, 1)).estimator
    assert found == LocalReparameterization(antithetic=True)
    assert found.antithetic is True


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    save(CASE.bnn(), tmp_path / "whole")
    return (tmp_path / "whole").read_bytes()


def test_a_file_cut_off_anywhere_is_refused(whole: bytes, tmp_path: Path) -> None:
    header = 8 + int.from_bytes(whole[:8], "little")
    assert header < len(whole) - 400
    for length in (*range(0, len(whole), 61), 1, 7, 8, 9, header - 1, header, len(whole) - 1):
        message = check_refused(tmp_path / "cut", whole[:length])
        assert "cut off or altered" in message
    check_refused(tmp_path / "longer", whole + b"\0")


def test_one_altered_byte_anywhere_is_noticed(whole: bytes, tmp_path: Path) -> None:
    header = 8 + int.from_bytes(whole[:8], "little")
    for place in (*range(header), *range(header, len(whole), 11), len(whole) - 1):
        altered = bytearray(whole)
        altered[place] ^= 1 << place % 8
        message = check_refused(tmp_path / "altered", bytes(altered))
        assert "altered" in message or "did not write it" in message, (place, message)


@loop_over(
    "net",
    [
        nn.Linear(3, 4),
        nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)),
        nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4, bias=False)),
        nn.Sequential(*mlp(), nn.Tanh(), nn.Linear(4, 4)),
        nn.Sequential(nn.BatchNorm1d(3), *mlp()),
        nn.Sequential(*mlp(), nn.BatchNorm1d(4)),
        nn.Sequential(*mlp().requires_grad_(False)),
        nn.LSTM(3, 5),
    ],
)
def test_another_architecture_is_refused(whole: bytes, net: nn.Module, tmp_path: Path) -> None:
    message = check_refused(tmp_path / "a", whole, net)
    assert (
        "another architecture" in message
        or "not describe a network that can be restored" in message
    )


def test_what_is_no_file_of_ours_is_refused(whole: bytes, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"there is no file .*missing"):
        load(tmp_path / "missing", mlp())
    with pytest.raises(StorageError, match="is a folder; name a file of it"):
        load(tmp_path, mlp())
    check_refused(tmp_path / "text", b"hello, this is a text and no network\n")
    torch.save(mlp().state_dict(), tmp_path / "pickle")
    check_refused(tmp_path / "pickle", (tmp_path / "pickle").read_bytes())
    tensors = {"posterior.mean": torch.zeros(44)}
    described = ["[]", "3", "{}", "null", "", "{", "[" * 100_000, '{"sha256": "0"}']
    for text in (None, *described):
        save_file(tensors, tmp_path / "foreign", None if text is None else {"bayesify": text})
        check_refused(tmp_path / "foreign", (tmp_path / "foreign").read_bytes())
    for meta in ({}, {"model": 3}, {"model": {"names": ["0.weight"], "shapes": []}}):
        write_tensors(tmp_path / "other", tensors, meta)
        check_refused(tmp_path / "other", (tmp_path / "other").read_bytes())
    stored, meta = read_tensors(tmp_path / "whole")
    for name, value in (("posterior", "Prior"), ("prior", {"type": "Delta"}), ("dtype", "int64")):
        write_tensors(tmp_path / "odd", stored, meta | {"model": meta["model"] | {name: value}})
        check_refused(tmp_path / "odd", (tmp_path / "odd").read_bytes())
    write_tensors(tmp_path / "next", stored, meta | {"format": 3})
    assert "has format 3" in check_refused(tmp_path / "next", (tmp_path / "next").read_bytes())


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The kernel ends longer writes in the middle, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_breaks_off_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save(CASE.bnn(), path)
    old = path.read_bytes()
    with files_of_at_most(1000), pytest.raises(OSError, match="File too large"):
        save(trained(CASE.bnn()), path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


@loop_over("call", ["os.fsync", "pathlib.Path.replace"])
def test_a_full_disk_at_the_last_moment_leaves_the_old_file(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "model"
    atomic_write(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(call, full)
        with pytest.raises(OSError, match="No space left"):
            atomic_write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


UNSAFE = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
UNSAFE |= {"torch.load", "torch.save", "numpy.load", "np.load"}


def unsafe_names(text: str) -> set[str]:
    """The names in a program that read or write pickles."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return names & UNSAFE


def test_there_is_no_pickle_in_the_library() -> None:
    for text in ("torch.load('a')", "from torch import save", "import pickle", "np.load('a')"):
        assert unsafe_names(text)
    files = sorted(Path(bayesify.__file__).parent.rglob("*.py"))
    assert len(files) > 30
    assert not {path: names for path in files if (names := unsafe_names(path.read_text()))}


# ---- without the frozen parameters --------------------------------------------------------------


def pretrained(seed: int = 0) -> nn.Module:
    """A body that is frozen, a normalisation with buffers, and a head."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 200), nn.BatchNorm1d(200), nn.ReLU(), nn.Linear(200, 2))
    net[0].requires_grad_(False)
    return net


def test_frozen_parameters_may_be_left_out(tmp_path: Path) -> None:
    x, whole, part = torch.randn(5, 3), tmp_path / "whole.safetensors", tmp_path / "part"
    bnn = BayesianModule(pretrained())
    bnn(torch.randn(50, 3))  # which changes the buffers
    save(bnn, whole)
    save(bnn, part, frozen=False)
    assert whole.stat().st_size - part.stat().st_size > 4 * 3 * 200
    again = load(part, pretrained())
    assert torch.equal(again.predict(x, 3).mean, bnn.predict(x, 3).mean)
    assert [p.requires_grad for p in again.net.parameters()] == [
        p.requires_grad for p in bnn.net.parameters()
    ]
    assert torch.equal(load(whole, pretrained(1)).predict(x, 3).mean, bnn.predict(x, 3).mean)


@pytest.mark.parametrize("change", ["others", "dtype", "one number"])
def test_other_frozen_parameters_are_refused(change: str, tmp_path: Path) -> None:
    path = tmp_path / "part.safetensors"
    save(BayesianModule(pretrained()), path, frozen=False)
    net = pretrained(1) if change == "others" else pretrained()
    if change == "dtype":
        net.double()
    if change == "one number":
        with torch.no_grad():
            net[0].bias[7] += 1e-6
    with pytest.raises(StorageError, match="pass the pretrained network that was made Bayesian"):
        load(path, net)


def test_a_network_that_is_frozen_by_now_is_refused_with_the_mend(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    save(BayesianModule(net), tmp_path / "net.safetensors")
    net[1].requires_grad_(False)
    with pytest.raises(StorageError, match=r"'1\.weight' is random, .* frozen; thaw it"):
        load(tmp_path / "net.safetensors", net)
    load(tmp_path / "net.safetensors", net.requires_grad_(True))


def test_without_frozen_parameters_the_file_is_whole(tmp_path: Path) -> None:
    bnn = BayesianModule(nn.Linear(3, 2))
    for frozen in (True, False):
        save(bnn, tmp_path / f"{frozen}", frozen=frozen)
    assert (tmp_path / "True").read_bytes() == (tmp_path / "False").read_bytes()


def test_a_tied_frozen_parameter(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
        net[1].weight = net[0].weight
        net[0].requires_grad_(False)
        return net

    path, bnn = tmp_path / "part.safetensors", BayesianModule(tied())
    save(bnn, path, frozen=False)
    again = load(path, tied())
    assert again.net[0].weight is again.net[1].weight
    assert torch.equal(
        again.predict(torch.ones(1, 3), 3).mean, bnn.predict(torch.ones(1, 3), 3).mean
    )


def test_load_names_what_is_no_file_and_no_network(tmp_path: Path) -> None:
    net, path = nn.Linear(3, 2), tmp_path / "model.safetensors"
    save(BayesianModule(net), path)
    calls: list[tuple[Any, Any]] = [(net, path), (path, nn.Linear)]
    for arguments in calls:
        with pytest.raises(TypeError, match=r"load needs a path and a network.*load\(path, net\)"):
            load(*arguments)
    with pytest.raises(TypeError, match=r"must be the plain network.*net\.to_module\(\)"):
        load(path, BayesianModule(net))


def test_text_may_hold_bytes_that_the_locale_could_not_decode(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    atomic_write(path, "caf" + "é".encode().decode("ascii", "surrogateescape"))
    assert path.read_bytes() == "café".encode()


def test_an_ordinary_network_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"needs a BayesianModule, got Linear; .*save_model"):
        save(nn.Linear(3, 2), tmp_path / "model.safetensors")  # type: ignore[arg-type]
    elbo: Any = ELBO(BayesianModule(nn.Linear(3, 2)), num_data=1)
    with pytest.raises(TypeError, match=r"got ELBO; .*save\(elbo\.bnn, path\)"):
        save(elbo, tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs names of any bytes")
def test_a_path_that_is_not_utf_8(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"r\xe9sultats")
    folder.mkdir()
    bnn = BayesianModule(nn.Linear(3, 2))
    save(bnn, folder / "m")
    assert torch.equal(load(folder / "m", nn.Linear(3, 2)).posterior.mean, bnn.posterior.mean)
    (folder / "m").write_bytes((folder / "m").read_bytes()[:-5])
    with pytest.raises(StorageError, match="is not a whole safetensors file"):
        load(folder / "m", nn.Linear(3, 2))


@pytest.mark.skipif(os.name != "posix", reason="needs the modes of POSIX")
def test_a_private_file_stays_private(tmp_path: Path) -> None:
    bnn = BayesianModule(nn.Linear(3, 2))
    save(bnn, tmp_path / "m")
    (tmp_path / "m").chmod(0o600)
    save(bnn, tmp_path / "m")
    assert (tmp_path / "m").stat().st_mode & 0o777 == 0o600
