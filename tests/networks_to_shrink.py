"""Networks with units and filters to remove, and what makes them sparse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tests.cases import normals
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from bayesify.module import networks
from bayesify.module.inputs import arguments_of


class Net(nn.Module):
    """Layers by name, and a function of them and the inputs."""

    def __init__(self, run: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def conv(inputs: int, outputs: int, size: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, **options)


def mlp(activation: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 12), activation, nn.Linear(12, 9), activation, nn.Linear(9, 4)
    )


def plain_conv(padding: Any, pool: nn.Module) -> nn.Module:
    return nn.Sequential(
        conv(2, 8, padding=padding),
        nn.ReLU(),
        pool,
        conv(8, 6, padding=padding),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.LazyLinear(7),
        nn.ReLU(),
        nn.Linear(7, 4),
    )


def normed_conv(**options: Any) -> nn.Module:
    return nn.Sequential(
        conv(2, 8, **options),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(2),
        conv(8, 6, 1),
        nn.BatchNorm2d(6, affine=False),
        nn.LeakyReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(6, 4),
    )


def conv1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 8, 3),
        nn.BatchNorm1d(8),
        nn.PReLU(8),
        nn.MaxPool1d(2),
        nn.Conv1d(8, 5, 2, padding=1, padding_mode="circular"),
        nn.PReLU(),
        nn.Flatten(),
        nn.LazyLinear(4),
    )


def residual(net: Any, x: Tensor) -> Tensor:
    x = F.relu(net.bn0(net.conv0(x)), inplace=True)
    for k in (1, 2):
        out = F.relu(net.get_submodule(f"bn{k}a")(net.get_submodule(f"conv{k}a")(x)))
        out = net.get_submodule(f"bn{k}b")(net.get_submodule(f"conv{k}b")(out))
        out += x
        x = F.relu(out, inplace=True)
    return net.out(x.mean((2, 3)))


def residual_net() -> nn.Module:
    blocks: dict[str, nn.Module] = {}
    for place in ("1a", "1b", "2a", "2b"):
        blocks[f"conv{place}"] = conv(7, 7, padding=1, bias=False)
        blocks[f"bn{place}"] = nn.BatchNorm2d(7)
    return Net(residual, conv0=conv(2, 7), bn0=nn.BatchNorm2d(7), **blocks, out=nn.Linear(7, 4))


def dense(net: Any, x: Tensor) -> Tensor:
    a = torch.relu(net.a(x))
    b = torch.relu(net.b(torch.cat([x, a], 1)))
    return net.out(torch.cat((a, b), dim=1).flatten(1))


def squeeze_excite(net: Any, x: Tensor) -> Tensor:
    x = F.relu(net.a(x))
    gate = torch.sigmoid(net.up(F.relu(net.down(F.adaptive_avg_pool2d(x, 1)))))
    return net.out((x * gate).flatten(1))


def depthwise() -> nn.Module:
    return nn.Sequential(
        conv(2, 6),
        nn.ReLU(),
        conv(6, 12, padding=1, groups=6),
        nn.BatchNorm2d(12),
        nn.ReLU6(),
        conv(12, 5, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(4),
    )


def viewed(net: Any, x: Tensor) -> Tensor:
    x = F.max_pool2d(F.relu(net.a(x)), 2)
    x = x.view(x.size(0), -1)
    return net.out(net.b(x).tanh())


def fixed_view(net: Any, x: Tensor) -> Tensor:
    return net.out(F.relu(net.a(x)).view(-1, 8 * 36))


def shortcut_of_zeros(net: Any, x: Tensor) -> Tensor:
    x = F.relu(net.a(x))
    wide = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 2))
    return net.out((wide + net.b(x)).relu().mean(dim=[2, 3]))


def tokens(net: Any, x: Tensor) -> Tensor:
    x = net.embed(x.flatten(2).transpose(1, 2))
    x = x + net.down(F.gelu(net.up(net.norm(x))))
    return net.out(x.mean(1))


def twice(net: Any, x: Tensor) -> Tensor:
    x = F.relu(net.a(x.flatten(1)))
    for _ in range(2):
        x = F.relu(net.same(x))
    return net.out(x)


def siamese(net: Any, x: Tensor) -> Tensor:
    a, b = (F.relu(net.b(F.relu(net.a(part)))) for part in (x, x + 1))
    return net.out((a - b).flatten(1))


def scaled_by_parameter(net: Any, x: Tensor) -> Tensor:
    return net.out(net.a(x.flatten(1)).relu() * net.norm.weight)


def autoencoder() -> nn.Module:
    return nn.Sequential(
        conv(2, 8, stride=2),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 6, 3, stride=2),
        nn.ReLU(),
        conv(6, 2, 1),
    )


def upsampled() -> nn.Module:
    return nn.Sequential(
        conv(2, 8, stride=2),
        nn.ReLU(),
        nn.Upsample(scale_factor=2),
        conv(8, 6),
        nn.ReLU(),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        conv(6, 2, 1),
    )


def border_of_zeros() -> nn.Module:
    return nn.Sequential(
        conv(2, 8),
        nn.ReLU(),
        nn.ZeroPad2d(1),
        conv(8, 5),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(4),
    )


def several_outputs(net: Any, x: Tensor) -> dict[str, Tensor]:
    h = F.relu(net.a(x.flatten(1)))
    return {"logits": net.out(h), "scale": F.softplus(net.scale(h))}


IMAGE, FLAT = (3, 2, 8, 8), (5, 6)
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "relu": (lambda: mlp(nn.ReLU()), FLAT),
    "tanh": (lambda: mlp(nn.Tanh()), FLAT),
    "sigmoid": (lambda: mlp(nn.Sigmoid()), FLAT),
    "gelu": (lambda: mlp(nn.GELU()), FLAT),
    "softplus": (lambda: mlp(nn.Softplus()), FLAT),
    "max pooling": (lambda: plain_conv(0, nn.MaxPool2d(2)), IMAGE),
    "average pooling, padded": (lambda: plain_conv(1, nn.AvgPool2d(2)), IMAGE),
    "same": (lambda: plain_conv("same", nn.AvgPool2d(3, padding=1)), IMAGE),
    "batch normalisation": (normed_conv, IMAGE),
    "batch normalisation, no bias": (lambda: normed_conv(bias=False, padding=1), IMAGE),
    "one dimension": (conv1d, (3, 2, 11)),
    "residual": (residual_net, IMAGE),
    "dense": (
        lambda: Net(dense, a=conv(2, 6, padding=1), b=conv(8, 5, padding=1), out=nn.LazyLinear(4)),
        IMAGE,
    ),
    "squeeze and excite": (
        lambda: Net(
            squeeze_excite,
            a=conv(2, 8),
            down=conv(8, 3, 1),
            up=conv(3, 8, 1),
            out=nn.LazyLinear(4),
        ),
        IMAGE,
    ),
    "depthwise": (depthwise, IMAGE),
    "view": (lambda: Net(viewed, a=conv(2, 8), b=nn.LazyLinear(9), out=nn.Linear(9, 4)), IMAGE),
    "fixed view": (lambda: Net(fixed_view, a=conv(2, 8), out=nn.LazyLinear(4)), IMAGE),
    "shortcut of zeros": (
        lambda: Net(
            shortcut_of_zeros,
            a=conv(2, 6, padding=1),
            b=conv(6, 9, padding=1, stride=2),
            out=nn.Linear(9, 4),
        ),
        IMAGE,
    ),
    "tokens": (
        lambda: Net(
            tokens,
            embed=nn.Linear(2, 8),
            norm=nn.LayerNorm(8),
            up=nn.Linear(8, 16),
            down=nn.Linear(16, 8),
            out=nn.Linear(8, 4),
        ),
        IMAGE,
    ),
    "twice": (
        lambda: Net(twice, a=nn.Linear(6, 9), same=nn.Linear(9, 9), out=nn.Linear(9, 4)),
        FLAT,
    ),
    "siamese": (
        lambda: Net(siamese, a=conv(2, 6), b=conv(6, 5), out=nn.LazyLinear(4)),
        IMAGE,
    ),
    "scaled by a parameter": (
        lambda: Net(
            scaled_by_parameter,
            a=nn.Linear(6, 9),
            norm=nn.LayerNorm(9),
            out=nn.Linear(9, 4),
        ),
        FLAT,
    ),
    "transposed": (autoencoder, IMAGE),
    "upsampled": (upsampled, IMAGE),
    "border of zeros": (border_of_zeros, IMAGE),
    "several outputs": (
        lambda: Net(several_outputs, a=nn.Linear(6, 9), out=nn.Linear(9, 4), scale=nn.Linear(9, 1)),
        FLAT,
    ),
    "weight norm": (
        lambda: nn.Sequential(
            parametrizations.weight_norm(nn.Linear(6, 9)), nn.ReLU(), nn.Linear(9, 4)
        ),
        FLAT,
    ),
    "lenet5": (networks.lenet5, (3, 784)),
    "resnet8": (lambda: networks.resnet8((1, 8, 8), 10), (3, 64)),
}


def make(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    """A network of the zoo with random statistics, and an example."""
    build, shape = NETS[name]
    with torch.random.fork_rng():
        torch.manual_seed(5)
        net = build().eval()
        with torch.no_grad():
            net(torch.zeros(shape))  # lazy layers learn their sizes
            for parameter in net.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.5 * torch.randn_like(parameter))
            for buffer in net.buffers():
                if buffer.is_floating_point():
                    buffer.uniform_(0.5, 1.5)
    return net.to(dtype), normals(*shape, seed=1).to(dtype)


#: Of the networks above, which have no other layer of so many units.
NUM_OUTPUTS = (1, 2, 4, 10)


@torch.no_grad()
def sparse(net: nn.Module, *, seed: int, rows: float, columns: float, single: float) -> nn.Module:
    """Zero parts of the rows, columns and single weights, but no rows of the outputs."""
    generator = torch.Generator().manual_seed(seed)

    def chosen(count: int, fraction: float) -> Tensor:
        return torch.rand(count, generator=generator) < fraction

    for name, weight in net.named_parameters():
        if weight.dim() > 1 and "parametrizations" not in name:
            if len(weight) not in NUM_OUTPUTS:
                weight[chosen(weight.shape[0], rows)] = 0.0
            weight[:, chosen(weight.shape[1], columns)] = 0.0
            weight[chosen(weight.numel(), single).view_as(weight)] = 0.0
        elif "bias" in name:
            weight[chosen(len(weight), 0.3)] = 0.0
    return net


def size(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def outputs_of(net: nn.Module, x: Any) -> list[Tensor]:
    args, kwargs = arguments_of(x)
    with torch.no_grad():
        found = net(*args, **kwargs)
    leaves, _ = torch.utils._pytree.tree_flatten(found)
    return leaves


def check_same_outputs(net: nn.Module, small: nn.Module, x: Any, tolerance: float = 1e-11) -> None:
    for one, two in zip(outputs_of(net, x), outputs_of(small, x), strict=True):
        limit = tolerance * max(1e-3, float(one.abs().max().nan_to_num()))
        torch.testing.assert_close(two, one, rtol=0.0, atol=limit, equal_nan=True)
