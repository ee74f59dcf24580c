"""``bayesify bench``: the other libraries, the tables and the figure, and ResNet-20."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayesify.app.bench import PEERS, Peer, peer_contestants
from bayesify.app.bench.cases import CASES
from bayesify.app.bench.figure import step_times
from bayesify.app.bench.tables import headings_of, markdown
from bayesify.module.networks import resnet20

ROOT = Path(__file__).resolve().parents[3]
RATES = {"adam": 1e-2, "ivon": 0.1}


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every cross-entropy from now on."""
    seen: list[float] = []
    whole = F.cross_entropy

    def watched(*args: Any, **options: Any) -> Tensor:
        loss = whole(*args, **options)
        seen.append(float(loss.detach()))
        return loss

    monkeypatch.setattr(F, "cross_entropy", watched)
    return seen


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: f"{peer.name}-{peer.estimator}")
def test_a_peer_trains(peer: Peer, losses: list[float]) -> None:
    if peer.version is None:
        pytest.skip(f"{peer.distribution} is not installed")
    before = set(sys.modules)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        inputs = torch.randn(64, 20)
        targets = inputs[:, :10].argmax(1)
        (contestant,) = peer_contestants([peer], CASES["mlp-400"], 1)
        assert contestant.is_peer
        assert contestant.baseline == "adam"
        train = peer.make((20, 32, 32, 10), RATES[peer.optimizer])
        for _ in range(200):
            train(inputs, targets)
    assert len(losses) == 200, "one weight sample a step"
    assert losses[0] > 2.0
    assert max(losses[-20:]) < 0.5
    # Of torch-uncertainty parts were imported in an unusual way, of which nothing is left.
    assert not any(name.startswith("torch_uncertainty") for name in set(sys.modules) - before)


def test_peers_take_part_only_in_the_training_of_perceptrons() -> None:
    entered = {name: len(peer_contestants(PEERS, case, 1)) for name, case in CASES.items()}
    count = len(PEERS)
    others = {"mlp-9600": 0, "resnet-20": 0, "predict": 0, "predict-once": 0, "predict-mean": 0}
    assert entered == {"mlp-400": count, "mlp-1200": count, "mlp-2900": count, **others}


# ---- tables and figure ------------------------------------------------------------------------


def row(path: str, estimator: str, optimizer: str, ratio: float, **others: Any) -> dict[str, Any]:
    return {
        "case": "mlp-400",
        "batch": 128,
        "path": path,
        "estimator": estimator,
        "optimizer": optimizer,
        "ms_median": 2.0 * ratio,
        "ms_iqr": 0.125,
        "ratio": ratio,
        "ratio_paired": ratio + 0.25,
        "peak_mb": 8.25,
        "vectors": 4.0 * (ratio > 1.0),
        **others,
    }


# "fused" and "plain": stored by earlier versions.
ROWS = [
    row("plain-net", "none", "adam", 1.0),
    row("fused", "sampling", "adam", 1.5, ratio_floor=1.25),
    row("blitz", "sampling", "adam", 600.0),
    row("plain-net", "none", "none", 1.0, case="predict", batch=8),
    row("plain", "sampling", "none", 1.125, case="predict", batch=8, resident_mb=30.0),
]
DOCUMENT = {
    "config": {"rounds": 7},
    "hardware": "an abacus",
    "commit": "abc",
    "versions": {"torch": "2.13.0"},
    "notes": ["not installed: ivon-opt"],
    "metrics": {"rows": ROWS},
}


def test_the_tables_in_markdown() -> None:
    lines = markdown(DOCUMENT).splitlines()
    assert lines[0] == "Measured on an abacus, 7 rounds, commit `abc`; torch 2.13.0."
    assert lines[1] == "not installed: ivon-opt."
    assert lines[2:5] == ["", "**mlp-400, batch 128**", ""]
    assert lines[5] == "| step | ms | spread | ratio | paired | floor | MB | vectors |"
    assert lines[7] == "| plain-net, adam | 2 | 0.125 | 1.00 | 1.25 |  | 8.2 | +0.0 |"
    assert lines[8] == "| compiled, sampling, adam | 3 | 0.125 | 1.50 | 1.75 | 1.25 | 8.2 | +4.0 |"
    assert lines[9].startswith("| blitz, sampling, adam | 1,200 | 0.125 | 600.00 |")
    assert lines[13].endswith("| vectors | process, MB |")
    assert lines[-1].endswith("| +4.0 | 30.0 |")
    assert len(headings_of(ROWS)) == len(headings_of(ROWS[:2])) + 1


def test_the_script_writes_page_and_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, page, figure = (tmp_path / name for name in ("cpu.json", "page.md", "img/times.png"))
    figure.parent.mkdir()
    stored.write_text(json.dumps(DOCUMENT))
    shipped = (ROOT / "docs" / "benchmarks.md").read_text()
    page.write_text(shipped)
    script = ROOT / "benchmarks" / "bench_table.py"
    arguments = [script, page, stored, stored, "--figure", figure]
    monkeypatch.setattr(sys, "argv", [str(each) for each in arguments])
    for _ in range(2):  # a second time changes nothing
        runpy.run_path(str(script), run_name="__main__")
    written = page.read_text()
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert written.count("](img/times.png)") == 1
    assert written.count("Measured on an abacus") == 2
    begin, end = "<!-- bench: begin -->", "<!-- bench: end -->"
    assert written.partition(begin)[0] == shipped.partition(begin)[0]
    assert written.partition(end)[2] == shipped.partition(end)[2]

    page.write_text("no marks")
    with pytest.raises(ValueError, match="must have the marks"):
        runpy.run_path(str(script), run_name="__main__")
    assert page.read_text() == "no marks"


def test_the_figure_has_a_bar_for_each_ratio() -> None:
    training, predictions = step_times(ROWS).axes
    assert [bar.get_width() for bar in training.patches] == [1.5, 600.0]
    assert [label.get_text() for label in training.get_yticklabels()] == [
        "compiled, sampling, adam",
        "blitz, sampling, adam",
    ]
    assert training.get_title(loc="left") == "mlp-400, batch 128"
    assert predictions.get_title(loc="left") == "predictions"
    assert [label.get_text() for label in predictions.get_yticklabels()] == ["predict, batch 8"]
    (floor,) = training.collections
    assert float(floor.get_paths()[0].vertices[0, 0]) == 1.25
    with pytest.raises(ValueError, match="at least one row other than the plain"):
        step_times(ROWS[:1])


# ---- ResNet-20 --------------------------------------------------------------------------------


def test_resnet20_is_the_one_of_the_paper() -> None:
    net = resnet20(num_classes=7).eval()
    convolutions = [each for each in net.modules() if isinstance(each, nn.Conv2d)]
    assert len(convolutions) == 19  # and the linear layer
    assert [each.out_channels for each in convolutions] == [16] * 7 + [32] * 6 + [64] * 6
    sizes: list[tuple[int, ...]] = []
    for layer in net:
        layer.register_forward_hook(lambda _, __, outputs: sizes.append(tuple(outputs.shape[1:])))
    assert net(torch.randn(2, 3, 32, 32)).shape == (2, 7)
    blocks = sizes[3:12]
    assert blocks == [(16, 32, 32)] * 3 + [(32, 16, 16)] * 3 + [(64, 8, 8)] * 3
    state, again = net.state_dict(), resnet20(num_classes=7).state_dict()
    assert all(bool((state[name] == again[name]).all()) for name in state)


def test_a_shortcut_thins_out_pixels_and_adds_channels_of_zeros() -> None:
    block = resnet20().eval()[6]
    for part in block.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.zeros_(part.weight)  # the shortcut alone
    inputs = torch.rand(2, 16, 6, 6)
    outputs = block(inputs)
    assert torch.equal(outputs[:, 8:24], inputs[:, :, ::2, ::2])
    assert not outputs[:, :8].any()
    assert not outputs[:, 24:].any()
