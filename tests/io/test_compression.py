"""Compressed files: the weights within half a step, small, and never garbage."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bayesify as bf
from bayesify.io import StorageError, compression
from bayesify.io.compression import compressed, decompressed
from bayesify.module.description_length import kl_nats


def posterior(net: nn.Module, seed: int = 0, **settings: object) -> bf.BayesianModule:
    """A network whose means and stds are spread as those of a trained one."""
    bnn = bf.BayesianModule(net, seed=0, **settings)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        bnn.posterior.mean.normal_(0.0, 0.2, generator=generator)
        bnn.posterior.rho.uniform_(-4.0, -2.0, generator=generator)
    return bnn


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(49, 20), nn.ReLU(), nn.Linear(20, 3))


class Mixed(nn.Module):
    """Convolution, batch norm with buffers, a tied weight, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x)).mean(dim=(2, 3))
        out: Tensor = self.second(self.first(h).relu()) * self.scale
        return out


def check_within_half_a_step(bnn: bf.BayesianModule, net: nn.Module, step: float) -> None:
    weights, stds = (
        bnn.layout.unflatten(bnn.posterior.mean),
        bnn.layout.unflatten(bnn.posterior.std),
    )
    found = dict(net.named_parameters())
    for name, mean in weights.items():
        precision = (mean / stds[name]).square().sum() / mean.square().sum()
        # bfloat16 rounds the step by 1/256 at most.
        bound = step / precision.sqrt() / 2 * (1 + 2**-8)
        distance = (found[name] - mean).abs().max()
        assert distance <= bound, name
        assert distance > 0.8 * bound, f"{name} has a finer step than it should"


@pytest.mark.parametrize("step", [0.1, 1.0])
def test_weights_are_within_half_a_step(tmp_path: Path, step: float) -> None:
    bnn = posterior(nn.Linear(100, 20, bias=False))
    size = bf.compress(bnn, tmp_path / "net.bfz", step_size=step)
    net = bf.decompress(tmp_path / "net.bfz", nn.Linear(100, 20, bias=False))
    check_within_half_a_step(bnn, net, step)
    assert size.num_bytes == (tmp_path / "net.bfz").stat().st_size
    assert size.num_weights == 2000
    assert size.num_nonzero == int((net.weight != 0).sum())
    assert size.bits_per_weight == 8 * size.num_bytes / 2000
    assert size.kl_bytes is not None
    assert math.isclose(size.kl_bytes * 8 * math.log(2), kl_nats(bnn))


def test_an_improper_prior_has_no_description_length(tmp_path: Path) -> None:
    bnn = posterior(nn.Linear(20, 5), prior=bf.LogUniform())
    assert bf.compress(bnn, tmp_path / "net.bfz").kl_bytes is None


def test_rounding_down_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    bnn = posterior(nn.Linear(100, 20, bias=False))
    monkeypatch.setattr(np, "rint", np.floor)
    content, _ = compressed(bnn)
    with pytest.raises(AssertionError, match="weight"):
        check_within_half_a_step(bnn, decompressed(content, nn.Linear(100, 20, bias=False)), 1.0)


@pytest.mark.parametrize("fraction", [0.0, 0.9])
def test_a_normalised_row_keeps_its_direction(fraction: float) -> None:
    """Weight norm divides a row by its norm; one below half a step would round to zeros."""

    def make() -> nn.Module:
        return nn.utils.parametrizations.weight_norm(nn.Linear(6, 4, bias=False))

    net = make()
    with torch.no_grad():
        net.parametrizations.weight.original1[1:] *= 1e-4
    bnn = bf.prune(bf.BayesianModule(net, init_std=0.1), fraction)
    content, size = compressed(bnn)
    decoded = decompressed(content, make())
    assert decoded(torch.randn(3, 6)).isfinite().all()
    means, found = (
        each.get_parameter("parametrizations.weight.original1")[1:]
        for each in (bnn.to_module(), decoded)
    )
    assert (found != 0).sum(1).tolist() == [1, 1, 1]
    highest = means.abs().argmax(1, keepdim=True)
    assert torch.equal(found.gather(1, highest).sign(), means.gather(1, highest).sign())
    assert size.num_nonzero == sum(int((each != 0).sum()) for each in decoded.parameters())


def test_a_tensor_under_spectral_norm_keeps_a_weight() -> None:
    """Its norm is estimated from the weights; that of zeros is 0."""

    def make() -> nn.Module:
        return nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4))

    net = make()
    with torch.no_grad():
        net.parametrizations.weight.original *= 1e-4
    content, size = compressed(bf.BayesianModule(net, init_std=0.1))
    decoded = decompressed(content, make()).eval()
    assert decoded(torch.randn(3, 6)).isfinite().all()
    assert size.num_nonzero - int((decoded.bias != 0).sum()) == 1


def test_a_fine_step_gives_the_same_predictions() -> None:
    bnn = bf.prune(posterior(mlp()), 0.5)
    content, size = compressed(bnn, step_size=1e-3)
    net = decompressed(content, mlp())
    x = torch.randn(30, 49, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(net(x), bnn.mean_outputs(x), atol=1e-3, rtol=0)
    for name, parameter in bnn.to_module().named_parameters():
        assert bool((net.get_parameter(name)[parameter == 0] == 0).all())
    assert size.num_nonzero == int(bnn.posterior.mask.sum())  # type: ignore[union-attr]


def test_everything_else_is_stored_as_it_is() -> None:
    source = Mixed()
    with torch.no_grad():
        source.scale.fill_(3.0)
        source.norm.weight.normal_()
    bnn = posterior(source)
    bnn.net.norm.running_mean.normal_()  # type: ignore[union-attr, operator]
    given = Mixed()
    before = {name: tensor.clone() for name, tensor in given.state_dict().items()}
    net = decompressed(compressed(bnn, step_size=1e-3)[0], given)
    x = torch.randn(5, 2, 6, 6)
    expected = bnn.to_module().eval()
    torch.testing.assert_close(net.eval()(x), expected(x), atol=2e-3, rtol=0)
    assert net.second.weight is net.first.weight
    torch.testing.assert_close(net.state_dict()["norm.running_mean"], bnn.net.norm.running_mean)  # type: ignore[union-attr]
    for name, tensor in given.state_dict().items():
        assert bool((tensor == before[name]).all()), f"{name} of the given network was changed"


def test_the_dtype_is_that_of_the_given_network() -> None:
    content, _ = compressed(posterior(mlp()))
    one, other = decompressed(content, mlp()), decompressed(content, mlp().double())
    for name, parameter in other.named_parameters():
        assert parameter.dtype == torch.float64
        assert bool((parameter.float() == one.get_parameter(name)).all())


def test_a_pruned_network_takes_little_more_than_its_places_and_values() -> None:
    """200 of 20,100 weights: their places have 1,612 bits, their values about 3 each."""
    bnn = bf.prune(posterior(nn.Linear(200, 100)), 0.99)
    _, size = compressed(bnn, step_size=2.0)
    places = math.log2(math.comb(20_100, 201))
    assert size.num_nonzero == 201
    assert 8 * size.num_bytes < 1.1 * places + 4 * 201 + 8 * 40


#: Written by version 1 of the format, for the network of ``golden``.
GOLDEN = "62667a01f2a9d61b0225b66302c0bff213e80f3f80003f800000e7092893ab922226"


def golden() -> bf.BayesianModule:
    bnn = bf.BayesianModule(nn.Linear(4, 3))
    with torch.no_grad():
        bnn.posterior.mean.copy_(torch.arange(-7.0, 8.0))
        bnn.posterior.rho.fill_(0.5413248546129181)  # softplus is 1
    return bf.prune(bnn, 0.5)


def test_a_file_of_version_1_reads_and_writes_the_same() -> None:
    net = decompressed(bytes.fromhex(GOLDEN), nn.Linear(4, 3))
    expected = [[-7, -6, -5, -4], [0, 0, 0, 0], [0, 0, 0, 4]]
    assert net.get_parameter("weight").tolist() == expected
    assert net.get_parameter("bias").tolist() == [5, 6, 7]
    assert compressed(golden())[0].hex() == GOLDEN


def damaged(content: bytes) -> list[bytes]:
    flipped = [
        content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        for place in range(len(content))
    ]
    return [*flipped, *(content[:length] for length in range(len(content))), content + b"\0"]


def check_all_are_errors(damages: list[bytes], restore: Callable[[bytes], bytes]) -> None:
    for place, content in enumerate(damages):
        try:
            decompressed(restore(content), nn.Linear(3, 2))
        except StorageError:
            continue
        raise AssertionError(f"damage {place} is read as a network")


def test_a_damaged_file_is_an_error() -> None:
    content, _ = compressed(posterior(nn.Linear(3, 2)))
    check_all_are_errors(damaged(content), lambda each: each)


def test_without_the_digest_damages_would_be_networks() -> None:
    def forged(content: bytes) -> bytes:
        return content[:4] + hashlib.sha256(content[12:]).digest()[:8] + content[12:]

    content, _ = compressed(posterior(nn.Linear(3, 2)))
    whole = [each for each in damaged(content) if len(each) == len(content)][12:]
    with pytest.raises(AssertionError, match="is read as a network"):
        check_all_are_errors(whole, forged)
    for each in [content[:12], content[:20], content[:30]]:
        with pytest.raises(StorageError):
            decompressed(forged(each), nn.Linear(3, 2))


@pytest.mark.parametrize(
    "net",
    [
        nn.Linear(4, 2),
        nn.Linear(3, 2, bias=False),
        nn.Linear(2, 3),
        nn.Sequential(nn.Linear(3, 2)),
    ],
    ids=str,
)
def test_another_architecture_is_an_error(net: nn.Module, tmp_path: Path) -> None:
    bf.compress(posterior(nn.Linear(3, 2)), tmp_path / "net.bfz")
    with pytest.raises(StorageError, match=r"net\.bfz is of another architecture: .* 8 weights"):
        bf.decompress(tmp_path / "net.bfz", net)


def test_other_buffers_and_ties_are_an_error() -> None:
    content, _ = compressed(posterior(Mixed()))
    untied = Mixed()
    untied.second.weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(StorageError, match="another architecture"):
        decompressed(content, untied)
    without = Mixed()
    without.norm.register_buffer("running_mean", None)
    with pytest.raises(StorageError, match=r"'norm\.running_mean' has shape \(4,\), .* no such"):
        decompressed(content, without)


class Pair(nn.Module):
    """Parameters without a posterior, and buffers, that two layers may share."""

    shift: Tensor
    offset: Tensor

    def __init__(self, tied: str = "") -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.out = nn.Linear(3, 2)
        self.register_buffer("shift", torch.randn(3))
        self.register_buffer("offset", self.shift if tied == "buffers" else torch.randn(3))
        if tied == "parameters":
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.first(x * self.shift + self.offset)))


@pytest.mark.parametrize("tied", ["parameters", "buffers"])
def test_a_network_that_shares_what_the_file_holds_apart_is_refused(
    tied: str, tmp_path: Path
) -> None:
    bnn = bf.BayesianModule(Pair(), exclude=("first.*", "second.*"))
    bf.compress(bnn, tmp_path / "small.bfz")
    bf.save(bnn, tmp_path / "whole")
    for read, name in ((bf.decompress, "small.bfz"), (bf.load, "whole")):
        read(tmp_path / name, Pair())
        with pytest.raises(StorageError, match=r"shares .* with another parameter or buffer"):
            read(tmp_path / name, Pair(tied))
    with torch.no_grad():  # equal values may be shared
        bnn.net.second.weight.copy_(bnn.net.first.weight)
        bnn.net.offset.copy_(bnn.net.shift)
    bf.save(bnn, tmp_path / "equal")
    bf.load(tmp_path / "equal", Pair(tied))


def test_errors(tmp_path: Path) -> None:
    bnn = posterior(nn.Linear(3, 2))
    for step in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="step_size must be positive and finite"):
            bf.compress(bnn, tmp_path / "net.bfz", step_size=step)
    with pytest.raises(ValueError, match=r"below 2\^30 steps, .* larger step_size"):
        bf.compress(bnn, tmp_path / "net.bfz", step_size=1e-12)
    with pytest.raises(ValueError, match=r"finite float32, .* smaller step_size"):
        bf.compress(bnn, tmp_path / "net.bfz", step_size=1e300)
    with pytest.raises(TypeError, match=r"a BayesianModule is needed, .* got Linear"):
        bf.compress(nn.Linear(3, 2), tmp_path / "net.bfz")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="follow from the posterior's std, but got Delta"):
        bf.compress(bf.BayesianModule(nn.Linear(3, 2), posterior=bf.Delta), tmp_path / "net.bfz")
    with torch.no_grad():
        bnn.posterior.mean[0] = math.nan
    with pytest.raises(ValueError, match="weights must be finite"):
        bf.compress(bnn, tmp_path / "net.bfz")
    with pytest.raises(StorageError, match="there is no file"):
        bf.decompress(tmp_path / "net.bfz", nn.Linear(3, 2))
    bf.save(posterior(nn.Linear(3, 2)), tmp_path / "net.safetensors")
    with pytest.raises(StorageError, match="is not a compressed network"):
        bf.decompress(tmp_path / "net.safetensors", nn.Linear(3, 2))
    content = (tmp_path / "whole.bfz", posterior(nn.Linear(3, 2)))
    bf.compress(content[1], content[0])
    for empty in (nn.Linear(3, 2, device="meta"), nn.LazyLinear(2)):
        with pytest.raises(ValueError, match="has no values to replace, because it is lazy or on"):
            bf.decompress(content[0], empty)
    newer = compression._MAGIC + b"\x02" + bytes(20)
    with pytest.raises(StorageError, match="has format 02, this version of bayesify reads 01"):
        decompressed(newer, nn.Linear(3, 2))
    with pytest.raises(FileNotFoundError):
        bf.compress(posterior(nn.Linear(3, 2)), tmp_path / "none" / "net.bfz")


def test_the_extra_is_named_if_it_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bnn = posterior(nn.Linear(3, 2))
    bf.compress(bnn, tmp_path / "net.bfz")
    monkeypatch.setitem(sys.modules, "constriction", None)
    with pytest.raises(ImportError, match=r"pip install 'bayesify\[compress\]'"):
        bf.compress(bnn, tmp_path / "net.bfz")
    with pytest.raises(ImportError, match=r"pip install 'bayesify\[compress\]'"):
        bf.decompress(tmp_path / "net.bfz", nn.Linear(3, 2))


def test_a_network_of_zeros_is_a_few_bytes() -> None:
    content, size = compressed(bf.prune(posterior(nn.Linear(100, 100)), 1.0))
    assert size.num_nonzero == 0
    assert len(content) < 60
    assert not any(
        bool(each.any()) for each in decompressed(content, nn.Linear(100, 100)).parameters()
    )


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def test_a_parameter_without_axes(tmp_path: Path) -> None:
    bnn = bf.BayesianModule(Scaled())
    bf.compress(bnn, tmp_path / "net.bfz", step_size=0.1)
    found = bf.decompress(tmp_path / "net.bfz", Scaled())
    assert found.scale.item() == pytest.approx(2.0, abs=0.01)


def test_a_std_that_underflows_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    bnn = bf.BayesianModule(nn.Linear(4, 5))
    with torch.no_grad():
        bnn.posterior.rho[0] = -110.0
    with pytest.raises(ValueError, match="below 2\\^30 steps"):
        bf.compress(bnn, tmp_path / "net.bfz")
    assert not (tmp_path / "net.bfz").exists()


def test_arguments_that_are_no_number_and_no_file() -> None:
    bnn = bf.BayesianModule(nn.Linear(4, 5))
    with pytest.raises(TypeError, match="step_size must be a number, got '1'"):
        bf.compress(bnn, "net.bfz", step_size="1")  # type: ignore[arg-type]
    for path in ("", "."):
        with pytest.raises(OSError, match="Is a directory"):
            bf.compress(bnn, path)
    with pytest.raises(TypeError, match="from_epoch must be a number, got '0'"):
        bf.PruningSchedule(0.5, from_epoch="0", until_epoch=1)  # type: ignore[arg-type]


def test_a_network_with_more_than_the_file_is_refused(tmp_path: Path) -> None:
    bnn = bf.BayesianModule(nn.Sequential(nn.Linear(3, 8), nn.Identity(), nn.Linear(8, 2)))
    bf.compress(bnn, tmp_path / "net.bfz", step_size=0.01)
    norm = nn.BatchNorm1d(8, affine=False)
    with pytest.raises(StorageError, match=r"the given network has '1\.running_mean', which the"):
        bf.decompress(tmp_path / "net.bfz", nn.Sequential(nn.Linear(3, 8), norm, nn.Linear(8, 2)))


def test_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> int:
            return 5

        def set_extra_state(self, state: int) -> None:
            del state

    bnn = bf.BayesianModule(nn.Sequential(nn.Linear(3, 2), Counting(2, 2)))
    with pytest.raises(ValueError, match=r"got a network with 1\._extra_state"):
        bf.compress(bnn, tmp_path / "net.bfz", step_size=0.01)
    assert not list(tmp_path.iterdir())


def test_what_is_not_random_is_not_counted_as_bits_of_a_weight(tmp_path: Path) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        body = nn.Linear(50, 40).requires_grad_(False)
        return nn.Sequential(body, nn.ReLU(), nn.Linear(40, 5))

    alone = bf.compress(posterior(net()[2]), tmp_path / "alone.bfz")
    size = bf.compress(posterior(net()), tmp_path / "net.bfz")
    assert alone.num_other_bytes == 0
    assert size.num_bytes > size.num_other_bytes > 4 * 2040
    assert size.bits_per_weight == pytest.approx(alone.bits_per_weight, rel=0.2)


def test_what_no_writer_writes_is_refused_though_its_digest_fits() -> None:
    """The digest has no key: it tells damages, not forgeries."""
    net = nn.Sequential(nn.Linear(3, 2, bias=False))
    content, _ = compressed(posterior(net))
    start = 12 + 1 + 1 + 4 + 1  # count, flags, fingerprint, number of weights; then the unit
    assert content[12] == 1
    changed = {
        "a unit that is no number": (start, b"\x7f\xc0"),
        "one that is infinite": (start, b"\x7f\x80"),
        "a width of 1": (start + 2, bytes([2])),
        "a width of 2": (start + 2, bytes([4])),
        "a long count": (12, b"\xff" * 6000),
    }
    for what, (place, new) in changed.items():
        rest = content[place + len(new) :] if len(new) < 10 else content[place:]
        body = content[12:place] + new + rest
        forged = content[:4] + hashlib.sha256(body).digest()[:8] + body
        try:
            decompressed(forged, net)
        except StorageError:
            continue
        raise AssertionError(f"{what} is read as a network")
