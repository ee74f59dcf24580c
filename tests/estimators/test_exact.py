"""The estimators' noise in every linear operation, against its exact meaning.

Local reparametrisation draws outputs from a Gaussian whose moments are known from the Jacobian of
the outputs in the weights; Flipout gives each example one weight of its own, of known shape.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests import faults
from tests.cases import normals
from tests.loops import loop_over
from torch import Tensor, nn
from torch.func import functional_call

from bayesify import BayesianModule, Flipout, LocalReparameterization
from bayesify.estimators import local_reparameterization as local
from bayesify.estimators.operations import LinearOperation
from bayesify.estimators.per_example import ParameterMoments, PassState
from bayesify.noise.keys import NoiseSource

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}
NUM_DATA = 3
#: Layers with the shape of one example.
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "linear, no bias": (lambda: nn.Linear(4, 3, bias=False), (4,)),
    "linear, positions": (lambda: nn.Linear(4, 3), (2, 5, 4)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3), (2, 7)),
    "conv1d, no bias, stride": (lambda: nn.Conv1d(2, 3, 3, stride=2, bias=False), (2, 7)),
    "conv1d, whole input": (lambda: nn.Conv1d(2, 3, 7), (2, 7)),
    "conv1d, same, even kernel": (lambda: nn.Conv1d(2, 3, 4, padding="same", dilation=2), (2, 6)),
    "conv1d, depthwise": (lambda: nn.Conv1d(3, 6, 3, groups=3, padding=1), (3, 5)),
    "conv2d, padding": (lambda: nn.Conv2d(2, 3, 3, stride=(2, 1), padding=(1, 2)), (2, 5, 4)),
    "conv2d, valid": (lambda: nn.Conv2d(2, 3, (2, 3), padding="valid"), (2, 3, 4)),
    "conv2d, same": (lambda: nn.Conv2d(2, 2, 3, padding="same", bias=False), (2, 4, 3)),
    "conv2d, groups": (lambda: nn.Conv2d(4, 6, 2, groups=2, dilation=(1, 2)), (4, 3, 4)),
    "conv2d, depthwise": (lambda: nn.Conv2d(3, 3, 2, groups=3, bias=False), (3, 3, 4)),
    "conv3d": (lambda: nn.Conv3d(2, 2, 2, stride=(1, 2, 1), padding=1), (2, 2, 3, 2)),
    "conv3d, groups, dilation": (
        lambda: nn.Conv3d(2, 4, 2, groups=2, dilation=(1, 2, 1), bias=False),
        (2, 3, 3, 2),
    ),
    **{
        f"conv{dims}d, {mode}": (
            lambda dims=dims, mode=mode: getattr(nn, f"Conv{dims}d")(
                2, 2, 3, padding=1, padding_mode=mode
            ),
            (2, *(4, 3, 3)[:dims]),
        )
        for dims in (1, 2, 3)
        for mode in ("circular", "reflect", "replicate")
    },
    "conv2d, same, circular": (
        lambda: nn.Conv2d(2, 2, (3, 2), padding="same", padding_mode="circular"),
        (2, 4, 3),
    ),
    "transposed 1d": (
        lambda: nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1),
        (2, 4),
    ),
    "transposed 1d, whole output": (lambda: nn.ConvTranspose1d(2, 3, 4), (2, 1)),
    "transposed 1d, groups": (lambda: nn.ConvTranspose1d(4, 6, 2, groups=2, bias=False), (4, 3)),
    "transposed 2d": (
        lambda: nn.ConvTranspose2d(3, 2, (2, 3), stride=2, output_padding=(1, 0), dilation=(2, 1)),
        (3, 3, 2),
    ),
    "transposed 2d, depthwise": (lambda: nn.ConvTranspose2d(3, 3, 2, groups=3), (3, 2, 3)),
    "transposed 3d": (
        lambda: nn.ConvTranspose3d(2, 2, 2, stride=2, groups=2, output_padding=1),
        (2, 2, 1, 2),
    ),
    "transposed 3d, no bias": (lambda: nn.ConvTranspose3d(1, 2, 2, bias=False), (1, 1, 2, 2)),
}
each_layer = loop_over("name", LAYERS)


def layer_and_data(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A layer in float64, data with an all-zero example, and a std for each weight."""
    make, shape = LAYERS[name]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layer = make().double()
    inputs = normals(NUM_DATA, *shape, seed=4)
    inputs[1] = 0.0
    size = sum(p.numel() for p in layer.parameters())
    return layer, inputs, normals(size, seed=5).exp()


def analytic_moments(layer: nn.Module, inputs: Tensor, stds: Tensor) -> tuple[Tensor, Tensor]:
    """J mean and J^2 std^2, with J the Jacobian of the outputs in all weights of the layer."""
    values = {name: p.detach() for name, p in layer.named_parameters()}
    jacobians = torch.func.jacrev(lambda v: functional_call(layer, v, inputs))(values)
    num_dims = layer(inputs).dim()
    flat = torch.cat([jacobians[name].flatten(num_dims) for name in values], -1)
    mean = torch.cat([value.flatten() for value in values.values()])
    return flat @ mean, flat.square() @ stds.square()


def check_moments(name: str, patch: pytest.MonkeyPatch, *, random: str = "*") -> None:
    """What a forward pass draws from, and what it makes of it."""
    layer, inputs, stds = layer_and_data(name)
    sizes = {name: p.numel() for name, p in layer.named_parameters()}
    is_random = torch.cat([torch.full((sizes[p],), random in ("*", p)) for p in sizes])
    moments, drawn = [], []
    right_moments, right_normals = local.output_moments, NoiseSource.normals

    def moments_seen(*args: object) -> tuple[Tensor, Tensor]:
        moments.append(right_moments(*args))
        return moments[-1]

    def normals_seen(*args: object) -> Tensor:
        drawn.append(right_normals(*args))
        return drawn[-1]

    patch.setattr(local, "output_moments", moments_seen)
    patch.setattr(NoiseSource, "normals", normals_seen)
    bnn = BayesianModule(
        layer,
        init_std=stds[is_random],
        include=(random,),
        estimator=LocalReparameterization(per_position=True),
    )
    outputs = bnn(inputs)
    ((mean, variance),) = moments
    expected_mean, expected_variance = analytic_moments(layer, inputs, stds * is_random)
    assert torch.allclose(mean, expected_mean, **TOLERANCE), "the mean is off"
    assert torch.allclose(variance, expected_variance, **TOLERANCE), "the variance is off"
    assert drawn[-1].unique().numel() == outputs.numel(), "noise is shared"
    expected = expected_mean + expected_variance.sqrt() * drawn[-1]
    assert torch.allclose(outputs, expected, **TOLERANCE), "the outputs are off"


@each_layer
def test_local_moments_are_the_analytic_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_moments(name, monkeypatch)


FOUR = ["linear", "conv2d, groups", "transposed 2d", "conv1d, circular"]


@loop_over("name", FOUR)
@loop_over("random", ["weight", "bias"])
def test_a_deterministic_weight_or_bias_adds_no_variance(
    name: str, random: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_moments(name, monkeypatch, random=random)


@loop_over("name", FOUR)
@loop_over(
    "fault",
    [
        faults.local_std_for_variance,
        faults.local_bias_without_variance,
        faults.local_variance_of_raw_inputs,
        faults.local_one_noise_for_all_data,
        faults.local_half_the_variance,
    ],
)
def test_wrong_local_moments_are_caught(
    name: str, fault: faults.Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=r"off|shared"):
        check_moments(name, monkeypatch)


def expanded_signs(weight: Tensor, out_signs: Tensor, in_signs: Tensor, axes: tuple[int, int],
                   groups: int) -> Tensor:  # fmt: skip
    """The sign of each element of a weight for one example: that of its output and of its input."""
    signs = torch.empty_like(weight)
    flat = signs.flatten(2) if signs.dim() > 2 else signs.unsqueeze(-1)
    for i in range(weight.shape[0]):
        for j in range(weight.shape[1]):
            if axes == (0, 1):  # (outputs, inputs of a group)
                group = i // (weight.shape[0] // groups)
                flat[i, j] = out_signs[i] * in_signs[group * weight.shape[1] + j]
            else:  # (inputs, outputs of a group)
                group = i // (weight.shape[0] // groups)
                flat[i, j] = in_signs[i] * out_signs[group * weight.shape[1] + j]
    return flat.view_as(weight)


def check_one_weight_for_each_datum(name: str, patch: pytest.MonkeyPatch) -> None:
    """An example's outputs under Flipout are the layer's with a weight of the stated form."""
    layer, inputs, stds = layer_and_data(name)
    passes: list[tuple[LinearOperation, ParameterMoments, ParameterMoments | None, PassState]] = []
    right = Flipout.noisy_output

    def seen(self: Flipout, *args: object) -> Tensor:
        passes.append(args)
        return right(self, *args)

    patch.setattr(Flipout, "noisy_output", seen)
    bnn = BayesianModule(layer, init_std=stds, estimator=Flipout())
    outputs = bnn(inputs)
    ((_, _, _, this),) = passes
    weight, bias = layer.weight.detach(), layer.bias
    std = bnn.layout.unflatten(stds)
    noise = this.drawn["weight noise"] / std["weight"]
    transposed = isinstance(layer, nn.modules.conv._ConvTransposeNd)
    for place in range(NUM_DATA):
        signs = expanded_signs(
            weight,
            this.drawn[f"weight axis {int(transposed)}"][place],
            this.drawn[f"weight axis {int(not transposed)}"][place],
            (1, 0) if transposed else (0, 1),
            getattr(layer, "groups", 1),
        )
        values = {"weight": weight + std["weight"] * noise * signs}
        if bias is not None:
            values["bias"] = (
                bias.detach() + this.drawn["bias noise"] * (this.drawn["bias axis 0"][place])
            )
        expected = functional_call(layer, values, inputs[place : place + 1])[0]
        assert torch.allclose(outputs[place], expected, rtol=1e-12, atol=1e-12), "not one weight"
    assert noise.abs().unique().numel() == noise.numel(), "the noise is repeated"


@each_layer
def test_flipout_gives_each_datum_one_weight(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_one_weight_for_each_datum(name, monkeypatch)


@loop_over(
    "name",
    ["linear, positions", "conv2d, padding", "conv2d, depthwise", "transposed 2d, depthwise"],
)
@loop_over(
    "fault",
    [faults.flipout_without_input_signs, faults.flipout_signs_at_each_position],
)
def test_flipout_with_wrong_signs_is_caught(
    name: str, fault: faults.Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError, match="not one weight"):
        check_one_weight_for_each_datum(name, monkeypatch)
