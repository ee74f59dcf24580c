"""Write what two_machines.py stored into docs/several-processes.md.

python benchmarks/two_machines_table.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import records
from pages import insert

PAGE = Path(__file__).resolve().parents[1] / "docs" / "several-processes.md"
_NAMES = {"plain": "plain network, DDP", "own": "own noise", "shared": "shared noise"}
Steps = dict[tuple[str, int, int], dict[str, Any]]


def table() -> str:
    """Return the stored numbers as Markdown."""
    stored = {
        path.stem: json.loads(path.read_text())
        for path in sorted((records.RESULTS / "two-machines").glob("*.json"))
    }
    parts = [_exchange(stored["exchange"]), _training(stored["training"]), _kill(stored["kill"])]
    return "\n\n".join(parts)


def _exchange(document: dict[str, Any]) -> str:
    rows = document["metrics"]["rows"]
    steps: Steps = {(r["noise"], r["processes"], r["minibatch"]): r for r in rows if "noise" in r}
    whole = max(minibatch for _, _, minibatch in steps)
    weights = rows[0]["weights"]
    lines = [
        f"A network for MNIST, {weights:,} weights, Adam, minibatches of {whole} for all processes "
        f"together, one thread each, {document['hardware']}; milliseconds, in brackets the range "
        "of the rounds:",
        "",
        f"| | 1 process, {whole} rows | 1 process, {whole // 2} rows | the exchange alone | "
        "2 processes | MB sent a step by each | in vectors of the weights |",
        "|---|---|---|---|---|---|---|",
    ]
    for mode, name in _NAMES.items():
        two = steps[mode, 2, whole]
        alone = [steps.get((mode, 1, minibatch)) for minibatch in (whole, whole // 2)]
        times = ["" if row is None else _timed(row) for row in alone]
        sent = two["bytes_sent_by_a_machine"]
        lines.append(
            f"| {name} | {times[0]} | {times[1]} | {two['ms_exchange_only']:.1f} | {_timed(two)} "
            f"| {sent / 1e6:.2f} | {sent / (4 * weights):.2f} |"
        )
    plain = steps["plain", 4, whole]["bytes_sent_by_a_machine"]
    times = [steps[mode, 4, whole]["bytes_sent_by_a_machine"] / plain for mode in ("own", "shared")]
    count = steps["own", 4, whole]["equal_after_steps"]
    assert count
    assert all(row["equal_after_steps"] for row in steps.values())
    ratio = next(row for row in rows if "variance_ratio_mean" in row)
    one, half, two = (steps["own", *case] for case in ((1, whole), (1, whole // 2), (2, whole)))
    rest = two["ms"] - half["ms"] - two["ms_exchange_only"]
    lines += [
        "",
        f"What limits own noise: half of the rows saves {one['ms'] - half['ms']:.1f} of "
        f"{one['ms']:.1f} ms, and the exchange alone takes {two['ms_exchange_only']:.1f} ms. The "
        f"remaining {rest:.1f} ms of the step are of neither: the update reads the exchanged sums, "
        "and two processes share the memory of one computer.",
        "",
        f"With two processes on each machine a machine sends {times[0]:.2f} times the bytes of "
        f"plain DDP with own noise, and {times[1]:.2f} times with shared noise. In every run all "
        f"parameters were equal in all processes after {count} steps, bit for bit.",
        "",
        "Variance of the gradients under shared noise with two processes, as a multiple of that "
        f"under own noise: {ratio['variance_ratio_mean']:.2f} in the means, "
        f"{ratio['variance_ratio_rho']:.2f} in rho.",
        "",
        *_on_paper(steps, whole, weights),
    ]
    return "\n".join(lines)


def _timed(row: dict[str, Any]) -> str:
    return f"{row['ms']:.1f} ({row['ms_spread']:.1f})"


def _on_paper(steps: Steps, whole: int, weights: int) -> list[str]:
    """What 64 processes would do, from the times and bytes that were measured."""
    one, half = steps["own", 1, whole]["ms"], steps["own", 1, whole // 2]["ms"]
    row = max(0.0, (one - half) / (whole - whole // 2))
    fixed = one - whole * row
    lines = [
        f"On paper: a step by one process takes {fixed:.1f} ms and {1e3 * row:.0f} us for each "
        "row, by the line through the two times above; R processes in a ring exchange "
        "2 (R - 1) / R times what two do, as fast, and have the same remaining time. The rows "
        "trained on in a second, as a multiple of one process's:",
        "",
        "| processes | own noise, the same minibatch | own noise, as many rows for each | "
        "shared noise, the same minibatch | shared noise, as many rows for each |",
        "|---|---|---|---|---|",
    ]
    for count in (2, 8, 64):
        cells = []
        for mode in ("own", "shared"):
            two = steps[mode, 2, whole]
            rest = two["ms"] - half - two["ms_exchange_only"]
            more_time = 2 * (count - 1) / count * two["ms_exchange_only"] + rest
            same = one / (fixed + row * whole / count + more_time)
            more = count * one / (one + more_time)
            cells += [f"{same:.2f}", f"{more:.1f}"]
        lines.append(f"| {count} | {' | '.join(cells)} |")
    large, rate = 100_000_000, 25e9
    told = []
    for mode in ("own", "shared"):
        vectors = steps[mode, 2, whole]["bytes_sent_by_a_machine"] / (4 * weights)
        sent = 2 * 63 / 64 * vectors * 4 * large
        ms = 1e3 * sent / rate
        told.append(
            f"{sent / 1e6:,.0f} MB with {_NAMES[mode]}, {ms:.0f} ms, so that a pass of "
            f"{4 * ms:.0f} ms keeps 80 % of the speed"
        )
    return [
        *lines,
        "",
        f"Of {large:,} weights each of 64 GPUs would send {'; or '.join(told)}, at "
        f"{rate / 1e9:.0f} GB a second and without overlap. The pass was not measured on GPUs; the "
        "update needs no exchange.",
    ]


def _training(document: dict[str, Any]) -> str:
    rows = document["metrics"]["rows"]
    words = {1: "1", 4: "2 on each machine"}
    lines = [
        "`bayesify train mnist`, by one process and by two on each of two machines, with the same "
        "minibatches:",
        "",
        "| processes | seed | error averaged, % | error at the means, % | nll, nats |",
        "|---|---|---|---|---|",
    ]
    for count, name in words.items():
        same = [row for row in rows if row["processes"] == count]
        for row in same:
            cells = [row["error_predictive"], row["error_mean_weights"]]
            errors = " | ".join(f"{cell:.2f}" for cell in cells)
            lines.append(f"| {name} | {row['seed']} | {errors} | {row['nll']:.4f} |")
        if len(same) > 1:
            means = [
                sum(row[key] for row in same) / len(same)
                for key in ("error_predictive", "error_mean_weights", "nll")
            ]
            lines.append(f"| {name} | mean | {means[0]:.2f} | {means[1]:.2f} | {means[2]:.4f} |")
    return "\n".join(lines)


def _kill(document: dict[str, Any]) -> str:
    rows = document["metrics"]["rows"]
    assert rows[-1]["same_checkpoint"]
    errors = " and ".join(f"{row['error_predictive']:.2f}" for row in rows[:-1])
    return (
        "A killed process, and then all processes of one machine, left the checkpoint of an "
        f"undisturbed run, bit for bit (10,000 images, 10 epochs; test errors {errors} %)."
    )


if __name__ == "__main__":
    insert(PAGE, "two-machines", table())
