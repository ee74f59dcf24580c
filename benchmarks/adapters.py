"""Measure a variational adapter against LoRA: a training step, its memory, predictions.

python benchmarks/adapters.py --threads 2 > results/adapters/cpu.json
python benchmarks/adapters.py --show         writes the stored tables into docs/adapters.md

An encoder of the size of MiniLM-L6 (6 layers of 384, random weights) with adapters of rank 8 on
queries and values and a head of 150 classes; 32 texts of 16 tokens. All is timed in turn in one
process; a ratio is the median over rounds of the ratio within a round.

Prints one JSON object, and its table on standard error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pages import insert
from peft import LoraConfig, get_peft_model
from records import RESULTS, commit, require_clean_tree
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import bayesify as bf
from bayesify.adapters import bayesian_adapter
from bayesify.app.bench.step_memory import built_with_peak
from bayesify.app.runs.environment import hardware, load_average, versions
from prediction import in_turn, ratio, table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "adapters.md"
TEXTS, TOKENS, CLASSES = 32, 16, 150
GENERATOR = torch.Generator().manual_seed(0)
INPUTS = {
    "input_ids": torch.randint(1, 30_000, (TEXTS, TOKENS), generator=GENERATOR),
    "attention_mask": torch.ones(TEXTS, TOKENS, dtype=torch.long),
}
TARGETS = torch.arange(TEXTS) % CLASSES


def base() -> nn.Module:
    """Return the encoder with a new head, without dropout."""
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(
            hidden_size=384,
            num_hidden_layers=6,
            num_attention_heads=12,
            intermediate_size=1536,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def adapted() -> Any:
    """Return it with adapters."""
    config = LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["query", "value"])
    return get_peft_model(base(), config)  # type: ignore[arg-type]


def lora_step() -> Callable[[], object]:
    """Return a training step of maximum likelihood."""
    net = adapted()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(**INPUTS).logits, TARGETS).backward()
        optimizer.step()

    return step


def variational_step(estimator: bf.Estimator) -> Callable[[], object]:
    """Return a training step on the ELBO, in a loop of one's own."""
    elbo = bf.ELBO(bayesian_adapter(adapted(), estimator=estimator), num_data=15_000)
    optimizer = torch.optim.AdamW(bf.parameter_groups(elbo), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        elbo(INPUTS, TARGETS).loss.backward()
        optimizer.step()

    return step


def training(rounds: int) -> list[dict[str, Any]]:
    """Compare training steps."""
    builds: dict[str, Callable[[], Callable[[], object]]] = {
        "LoRA": lora_step,
        "variational, Flipout": partial(variational_step, bf.Flipout()),
        "variational, weight sampling": partial(variational_step, bf.WeightSampling()),
    }
    steps, peaks = {}, {}
    for name, build in builds.items():
        steps[name], peaks[name] = built_with_peak(build, warmup=2)  # type: ignore[arg-type]
    times = in_turn(steps, rounds)
    return [
        {
            "training step": name,
            "ms": 1e3 * statistics.median(times[name]),
            "ratio": ratio(times[name], times["LoRA"]),
            "peak MB": peaks[name] / 1e6,
            "of LoRA": peaks[name] / peaks["LoRA"],
        }
        for name in builds
    ]


@torch.no_grad()
def prediction(rounds: int) -> list[dict[str, Any]]:
    """Compare predictions with passes of the network with LoRA at its means."""
    net = adapted().eval()
    adapter = bayesian_adapter(adapted())
    body = base()
    for parameter in body.base_model.parameters():
        parameter.requires_grad = False
    last = bf.BayesianModule(body, output="logits")
    calls: dict[str, Callable[[], object]] = {
        "one pass": lambda: net(**INPUTS),
        "adapter, 10 samples": lambda: adapter.predict(INPUTS, 10),
        "last layer, 100 samples": lambda: last.predict(INPUTS, 100),
    }
    times = in_turn(calls, rounds)
    return [
        {
            "prediction": name,
            "ms": 1e3 * statistics.median(times[name]),
            "passes": ratio(times[name], times["one pass"]),
        }
        for name in calls
    ]


def stored_tables() -> str:
    """Return the tables of the stored measurement."""
    document = json.loads((RESULTS / "adapters" / "cpu.json").read_text(encoding="utf-8"))
    tables = "\n".join(table(rows) for rows in document["metrics"].values())
    rounds = document["config"]["rounds"]
    return f"{tables}\nMedians of {rounds} rounds; {document['hardware']}."


def main() -> None:
    """Measure and print, or show what was stored."""
    require_clean_tree()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if options.show:
        insert(PAGE, "adapters", stored_tables())
        return
    torch.set_num_threads(options.threads)
    started, before = time.perf_counter(), load_average()
    metrics = {"training": training(options.rounds), "prediction": prediction(options.rounds)}
    for name, rows in metrics.items():
        print(f"{name}\n{table(rows)}", file=sys.stderr, flush=True)
    document = {
        "experiment": "adapters",
        "config": {"threads": options.threads, "rounds": options.rounds},
        "commit": commit(),
        "hardware": hardware(),
        "load_before": before,
        "versions": versions(),
        "metrics": metrics,
        "seconds": time.perf_counter() - started,
    }
    print(json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
