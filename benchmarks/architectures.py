"""Make networks of many libraries Bayesian: does it work, how are weights treated, at what price.

python benchmarks/architectures.py [NAME ...]   half a minute; writes results/architectures
python benchmarks/architectures.py --show       writes the table into docs/architectures.md

The networks have random weights and a hundred thousand to a few million parameters. Each is trained
for a few steps on random data: plain, under weight sampling, and under Flipout, in turn in one
process. A price is the median over rounds of the ratio to the plain step of the round. Needs
transformers; torch_geometric, diffusers and timm as far as they are installed. timm's networks
need nothing of torchvision, which it imports: without it (`pip install --no-deps timm`), a stand-in
takes its place.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from pages import insert
from records import RESULTS, commit, require_clean_tree
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import bayesify as bf
from bayesify.app.runs.environment import hardware, load_average, versions
from bayesify.io import atomic_write

FOLDER = RESULTS / "architectures"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "architectures.md"
ROUNDS, WARM = 9, 2
N, TOKENS, WORDS, CLASSES = 8, 16, 500, 4
ESTIMATORS: dict[str, bf.Estimator] = {"sampling": bf.WeightSampling(), "Flipout": bf.Flipout()}


@dataclass(frozen=True)
class Architecture:
    """A network, an input as a loader would give it, its targets, and what it has of interest.

    Args:
        package: where it is from.
        make: builds it.
        inputs: positional inputs, or a mapping.
        targets: classes, or numbers.
        has: what makes it unlike a multilayer perceptron.
        output: what of its result the likelihood sees.
    """

    package: str
    make: Callable[[], nn.Module]
    inputs: Any
    targets: Tensor
    has: str
    output: Any = None


def ids(*shape: int) -> Tensor:
    """Return random token ids."""
    return torch.randint(2, WORDS, shape, generator=torch.Generator().manual_seed(1))


def normals(*shape: int) -> Tensor:
    """Return random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def classes(*shape: int) -> Tensor:
    """Return random classes."""
    return torch.randint(0, CLASSES, shape, generator=torch.Generator().manual_seed(3))


def of_transformers(config: str, model: str, **options: Any) -> Callable[[], nn.Module]:
    """Return a function that builds a model of transformers by the names of its classes."""

    def make() -> nn.Module:
        import transformers

        made = getattr(transformers, config)(**options)
        net: nn.Module = getattr(transformers, model)(made)
        return net

    return make


def of_timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    """Return a function that builds a network of timm by its name."""

    def make() -> nn.Module:
        with without_torchvision():
            timm = importlib.import_module("timm")
        net: nn.Module = timm.create_model(name, num_classes=CLASSES, **options)
        return net

    return make


@contextmanager
def without_torchvision() -> Iterator[None]:
    """Let timm be imported within the block where torchvision is not installed.

    Its networks ask whether a layer is torchvision's frozen batch norm, which none of theirs is;
    all else that it imports reads images and is not called.
    """
    if find_spec("torchvision") is not None:
        yield
        return
    parts = ("datasets", "ops", "ops.misc", "transforms", "transforms.functional", "utils")
    stand_ins = {f"torchvision.{part}": MagicMock() for part in parts}
    stand_ins["torchvision.ops.misc"].FrozenBatchNorm2d = type("FrozenBatchNorm2d", (), {})
    sys.modules.update({"torchvision": MagicMock(), **stand_ins})
    try:
        yield
    finally:
        for name in ("torchvision", *stand_ins):
            del sys.modules[name]


SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SMALL, "intermediate_size": 128, "vocab_size": WORDS}
DECODER = {**TEXT, "num_key_value_heads": 2, "max_position_embeddings": 32}
BERT = of_transformers("BertConfig", "BertForSequenceClassification", **TEXT, num_labels=CLASSES)


def checkpointed() -> nn.Module:
    """Return BERT that computes its activations again in the backward pass."""
    net: Any = BERT()
    net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    made: nn.Module = net.train()
    return made


def unet() -> nn.Module:
    """Return a U-Net that predicts the noise in an image, given a time."""
    diffusers = importlib.import_module("diffusers")
    net: nn.Module = diffusers.UNet2DModel(
        sample_size=16,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(32, 64),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return net


class Graph(nn.Module):
    """Two layers of torch_geometric that classify nodes."""

    def __init__(self, layer: str, **options: Any) -> None:
        super().__init__()
        kind = getattr(importlib.import_module("torch_geometric.nn"), layer)
        self.first, self.last = kind(16, 32, **options), kind(32, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Return logits of each node."""
        logits: Tensor = self.last(torch.relu(self.first(x, edges)), edges)
        return logits


class Tagger(nn.Module):
    """An LSTM that tags each word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        self.lstm = nn.LSTM(32, 32, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits (N, T, K)."""
        logits: Tensor = self.head(self.lstm(self.words(words))[0])
        return logits


class Equilibrium(nn.Module):
    """A deep equilibrium model: one layer until its states stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.states = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        state, injected = torch.zeros_like(x), self.inputs(x)
        for _ in range(30):
            state, before = torch.tanh(0.3 * self.states(state) + injected), state
            if (state - before).abs().max() < 1e-4:
                break
        logits: Tensor = self.head(state)
        return logits


def hooked() -> nn.Module:
    """Return a network whose hooks change what its layers receive and return."""
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    net[0].register_forward_pre_hook(lambda _, args: (args[0] * 0.5,))
    net[2].register_forward_hook(lambda _, args, outputs: outputs + args[0].mean(-1, keepdim=True))
    return net


def normed() -> nn.Module:
    """Return a convolutional network with weight and spectral normalisation."""
    return nn.Sequential(
        parametrizations.weight_norm(nn.Conv2d(3, 32, 3, stride=2)),
        nn.ReLU(),
        parametrizations.spectral_norm(nn.Conv2d(32, 32, 3, stride=2)),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, CLASSES),
    )


def encoder() -> nn.Module:
    """Return PyTorch's transformer encoder with a head."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, CLASSES)
    )


PIXELS = normals(N, 3, 32, 32)
LABELS, TAGS = classes(N), classes(N, TOKENS)
#: The tokens that follow, after the last one the first.
NEXT = ids(N, TOKENS).roll(-1, dims=1)
TOKENS_IN = {"input_ids": ids(N, TOKENS)}
IMAGE = {"image_size": 32, "num_channels": 3, "num_labels": CLASSES}
NODES, EDGES = normals(100, 16), torch.randint(0, 100, (2, 400))

ARCHITECTURES: dict[str, Architecture] = {
    "BERT": Architecture("transformers", BERT, TOKENS_IN, LABELS, "attention", "logits"),
    "BERT, checkpointed": Architecture(
        "transformers", checkpointed, TOKENS_IN, LABELS, "activation checkpointing", "logits"
    ),
    "GPT-2": Architecture(
        "transformers",
        of_transformers(
            "GPT2Config", "GPT2LMHeadModel", vocab_size=WORDS, n_embd=64, n_layer=2, n_head=4
        ),
        TOKENS_IN, NEXT, "tied embeddings, addmm", "logits",
    ),
    "Llama": Architecture(
        "transformers",
        of_transformers("LlamaConfig", "LlamaForCausalLM", **DECODER),
        TOKENS_IN, NEXT, "RMS norm, rotary positions", "logits",
    ),
    "Mixtral": Architecture(
        "transformers",
        of_transformers("MixtralConfig", "MixtralForCausalLM", **DECODER, num_local_experts=4),
        TOKENS_IN, NEXT, "mixture of experts", "logits",
    ),
    "Mamba": Architecture(
        "transformers",
        of_transformers(
            "MambaConfig", "MambaForCausalLM",
            vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, state_size=8,
        ),
        TOKENS_IN, NEXT, "state space, tied embeddings", "logits",
    ),
    "T5": Architecture(
        "transformers",
        of_transformers(
            "T5Config", "T5ForConditionalGeneration",
            vocab_size=WORDS, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        ),
        {**TOKENS_IN, "decoder_input_ids": ids(N, TOKENS)}, NEXT, "encoder and decoder", "logits",
    ),
    "ViT": Architecture(
        "transformers",
        of_transformers(
            "ViTConfig", "ViTForImageClassification",
            **SMALL, **IMAGE, intermediate_size=128, patch_size=8,
        ),
        {"pixel_values": PIXELS}, LABELS, "patches", "logits",
    ),
    "Swin": Architecture(
        "transformers",
        of_transformers(
            "SwinConfig", "SwinForImageClassification",
            **IMAGE, patch_size=2, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4,
        ),
        {"pixel_values": PIXELS}, LABELS, "shifted windows", "logits",
    ),
    "ConvNeXt": Architecture(
        "transformers",
        of_transformers(
            "ConvNextConfig", "ConvNextForImageClassification",
            **IMAGE, hidden_sizes=[32, 64, 64, 64], depths=[1, 1, 1, 1],
        ),
        {"pixel_values": PIXELS}, LABELS, "layer scale, depthwise", "logits",
    ),
    "ResNet": Architecture(
        "transformers",
        of_transformers(
            "ResNetConfig", "ResNetForImageClassification",
            num_labels=CLASSES, embedding_size=32, hidden_sizes=[32, 64], depths=[2, 2],
            layer_type="basic",
        ),
        {"pixel_values": PIXELS}, LABELS, "batch norm", "logits",
    ),
    "MobileNet v2": Architecture(
        "transformers",
        of_transformers(
            "MobileNetV2Config", "MobileNetV2ForImageClassification",
            num_labels=CLASSES, image_size=32, depth_multiplier=0.35,
        ),
        {"pixel_values": PIXELS}, LABELS, "inverted residuals", "logits",
    ),
    "EfficientNet": Architecture(
        "timm", of_timm("test_efficientnet"), (PIXELS,), LABELS, "squeeze and excitation"
    ),
    "NFNet": Architecture(
        "timm", of_timm("test_nfnet"), (PIXELS,), LABELS, "standardised weights, no norms"
    ),
    "EVA-02": Architecture(
        "timm",
        of_timm(
            "eva02_tiny_patch14_224", img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=4
        ),
        (PIXELS,), LABELS, "rotary positions, SwiGLU",
    ),
    "MobileViT": Architecture(
        "timm", of_timm("mobilevit_xxs"), (normals(N, 3, 64, 64),), LABELS,
        "convolutions and attention",
    ),
    "XCiT": Architecture(
        "timm", of_timm("xcit_nano_12_p8_224", img_size=32, depth=2), (PIXELS,), LABELS,
        "attention over channels",
    ),
    "U-Net": Architecture(
        "diffusers", unet, (normals(N, 1, 16, 16), torch.arange(N)),
        normals(N, 1, 16, 16), "skips, time embedding", "sample",
    ),
    "GCN": Architecture(
        "torch_geometric", lambda: Graph("GCNConv"), (NODES, EDGES), classes(100), "a graph"
    ),
    "GAT": Architecture(
        "torch_geometric", lambda: Graph("GATConv"), (NODES, EDGES), classes(100),
        "attention on a graph",
    ),
    "LSTM": Architecture("torch", Tagger, (ids(N, TOKENS),), TAGS, "recurrence"),
    "Transformer encoder": Architecture(
        "torch", encoder, (normals(N, TOKENS, 64),), TAGS, "multi-head attention"
    ),
    "normalised weights": Architecture(
        "torch", normed, (PIXELS,), LABELS, "weight norm, spectral norm"
    ),
    "equilibrium": Architecture(
        "torch", Equilibrium, (normals(N, 64),), LABELS, "one layer in a loop"
    ),
    "hooks": Architecture("torch", hooked, (normals(N, 64),), LABELS, "forward hooks"),
}  # fmt: skip


def plain_step(it: Architecture, net: nn.Module) -> Callable[[], object]:
    """Return a training step of the plain network."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        result = net(**it.inputs) if isinstance(it.inputs, Mapping) else net(*it.inputs)
        outputs = getattr(result, it.output) if it.output else result
        if it.targets.is_floating_point():
            loss = nn.functional.mse_loss(outputs, it.targets)
        else:
            loss = nn.functional.cross_entropy(outputs.flatten(0, -2), it.targets.flatten())
        loss.backward()
        optimizer.step()

    return step


def bayesian_step(it: Architecture, bnn: bf.BayesianModule) -> Callable[[], object]:
    """Return a training step on the ELBO, in a loop of one's own."""
    elbo = bf.ELBO(bnn, num_data=1000)
    optimizer = torch.optim.SGD(bf.parameter_groups(elbo), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        elbo(it.inputs, it.targets).loss.backward()
        optimizer.step()

    return step


def measure(it: Architecture) -> dict[str, Any]:
    """Wrap a network, train it for a few steps, predict, save and load it."""
    torch.manual_seed(0)
    net = it.make().train()
    for module in net.modules():  # the price of noise, not that of dropout
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    likelihood = bf.GaussianLikelihood(std=1.0) if it.targets.is_floating_point() else None
    steps = {"plain": plain_step(it, copy.deepcopy(net))}
    made = {}
    for name, estimator in ESTIMATORS.items():
        made[name] = bf.BayesianModule(
            net, estimator=estimator, output=it.output, likelihood=likelihood, seed=1
        )
        steps[name] = bayesian_step(it, made[name])
    ratios: dict[str, list[float]] = {name: [] for name in ESTIMATORS}
    for number in range(WARM + ROUNDS):
        seconds = {}
        for name, step in steps.items():
            begun = time.perf_counter()
            step()
            seconds[name] = time.perf_counter() - begun
        if number >= WARM:
            for name, each in ratios.items():
                each.append(seconds[name] / seconds["plain"])
    bnn = made["Flipout"]
    arguments = ((), it.inputs) if isinstance(it.inputs, Mapping) else (it.inputs, {})
    summary = bnn.summary(*arguments[0], **arguments[1])
    whys = Counter(row.reason for row in summary if row.treatment == "sampled")
    predictive = bnn.eval().predict(it.inputs, 2, batch_size="all")
    assert bool(predictive.mean.isfinite().all())
    weights = sum(parameter.numel() for parameter in net.parameters())
    return {
        "weights": weights,
        "random": bnn.layout.num_weights,
        "treatments": dict(Counter(row.treatment for row in summary)),
        "sampled": dict(whys.most_common()),
        "price": {name: statistics.median(each) for name, each in ratios.items()},
        "plain_ms": 1000 * seconds["plain"],
    }


def main() -> None:
    """Measure the named architectures, all without a name, or show what was measured."""
    require_clean_tree()
    if sys.argv[1:] == ["--show"]:
        insert(PAGE, "architectures", table())
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or ARCHITECTURES:
        it = ARCHITECTURES[name]
        if find_spec(it.package) is None:
            print(f"{name}: {it.package} is not installed", file=sys.stderr)
            continue
        try:
            row = measure(it)
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        project = it.package.replace("_", "-")
        row |= {
            "name": name,
            "library": it.package,
            "has": it.has,
            "load": load_average(),
            "version": metadata.version(project),
            "commit": commit(),
            "hardware": hardware(),
            "versions": versions(),
        }
        path = FOLDER / f"{name.lower().replace(', ', '-').replace(' ', '-')}.json"
        atomic_write(path, json.dumps(row, indent=1) + "\n")
        print(name, row.get("error") or (row["treatments"], row["price"]), file=sys.stderr)


def table() -> str:
    """Return a row for each architecture in the order of the list."""
    stored = [json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.json")]
    by_name = {row["name"]: row for row in stored}
    rows = [by_name[name] for name in ARCHITECTURES if name in by_name]
    lines = [
        "| network | has | weights, random | exact under Flipout | sampled, for | price, sampling "
        "| price, Flipout |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        title = f"{row['name']} ({row['library']})"
        if "error" in row:
            lines.append(f"| {title} | {row['has']} | fails: {row['error']} | | | | |")
            continue
        treated = row["treatments"]
        count = sum(treated.values())
        reasons = "; ".join(
            f"{number} {reason}" for reason, number in list(row["sampled"].items())[:3]
        )
        lines.append(
            f"| {title} | {row['has']} | {row['weights']:,}, {row['random']:,} | "
            f"{treated.get('exact', 0)} of {count} | {reasons} | "
            f"{row['price']['sampling']:.2f} | {row['price']['Flipout']:.2f} |"
        )
    used = dict(sorted({row["library"]: row["version"] for row in rows}.items()))
    loads = statistics.mean(row["load"] for row in rows if row["load"] is not None)
    commits = sorted({f"commit `{row['commit'][:12]}`" for row in rows})
    if any(row["commit"].endswith("-dirty") for row in rows):
        commits.append("some of code that differs from it")
    note = (
        f"{', '.join(f'{name} {version}' for name, version in used.items())}; "
        f"{rows[0]['hardware']}, mean load {loads:.1f}; {', '.join(commits)}."
    )
    return "\n".join([*lines, "", note])


if __name__ == "__main__":
    main()
