"""Export every network of the tests' zoo, and compare the exported networks with PyTorch.

PYTHONPATH=. python benchmarks/export_parity.py

Each network is frozen at its mean weights and with 4 weight samples, exported to ONNX and to a
PyTorch program, and compared on 5 examples and on one. A failure is stored with its cause. The
script resumes, stores every number in results/export, and writes the table of docs/export.md.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pages import DOCS, insert
from records import require_clean_tree, resumed, store_rows, stored
from rich.progress import track
from tests.zoo import ZOO, Specimen
from torch import Tensor

import bayesify as bf
from bayesify.export import ExportError, ExportReport, export_onnx, export_program

NAME, SET = "export", "zoo"
SAMPLES = 4
FORMATS: dict[str, Callable[..., ExportReport]] = {"onnx": export_onnx, "pt2": export_program}
WEIGHTS = {"mean weights": 0, f"{SAMPLES} samples": SAMPLES}
TITLES = {"onnx": "ONNX", "pt2": "PyTorch program"}


def measure(name: str, specimen: Specimen) -> list[dict[str, Any]]:
    """Export one network in all forms."""
    reads: dict[str, Any] = {} if specimen.reads is None else {"output": specimen.reads}
    net = specimen.plain().float()
    bnn = bf.BayesianModule(net, init_std=0.2, seed=3, **{**specimen.options, **reads})
    example = specimen.changed(_as_float32)
    rows = []
    for weights, count in WEIGHTS.items():
        frozen = bf.freeze(bnn, count, estimator=bf.WeightSampling())
        for suffix, export in FORMATS.items():
            row: dict[str, Any] = {"network": name, "weights": weights, "format": suffix}
            with tempfile.TemporaryDirectory() as folder:
                try:
                    report = export(frozen, Path(folder) / f"net.{suffix}", example)
                    row |= {"difference": report.largest_difference, "bytes": report.bytes}
                except ExportError as error:
                    row |= {"cause": str(error)}
            rows.append(row)
    return rows


def _as_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def table() -> str:
    """Format how many networks export, and why the others do not."""
    rows = stored(NAME, SET, {})["metrics"]["rows"]
    lines = ["| | " + " | ".join(TITLES.values()) + " |", "|---" * (1 + len(TITLES)) + "|"]
    for weights in WEIGHTS:
        cells = [weights]
        for suffix in TITLES:
            own = [row for row in rows if (row["weights"], row["format"]) == (weights, suffix)]
            passed = [row for row in own if "cause" not in row]
            worst = max((row["difference"] for row in passed), default=0.0)
            cells.append(f"{len(passed)} of {len(own)}, largest difference {worst:.1e}")
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| network | weights | format | cause |", "|---|---|---|---|"]
    for row in rows:
        if "cause" in row:
            cause = row["cause"].replace("|", "\\|")
            cause = cause if len(cause) < 200 else f"{cause[:200]} ..."
            title = TITLES[row["format"]]
            lines.append(f"| `{row['network']}` | {row['weights']} | {title} | {cause} |")
    return "\n".join(lines)


def main() -> None:
    """Measure what is missing, and write the table."""
    require_clean_tree()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    document = resumed(NAME, SET, {"num_samples": SAMPLES})
    done = {row["network"] for row in document["metrics"]["rows"]}
    for name, specimen in track(ZOO.items(), "networks"):
        if name not in done:
            started = time.perf_counter()
            rows = measure(name, specimen)
            store_rows(document, rows, time.perf_counter() - started)
    insert(DOCS / "export.md", NAME, table())


if __name__ == "__main__":
    main()
