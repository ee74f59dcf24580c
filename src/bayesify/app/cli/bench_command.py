"""``bayesify bench``."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import TimeRemainingColumn
from rich.text import Text

from bayesify.app.bench import (
    Case,
    Group,
    Measurement,
    Peer,
    contestants_of,
    estimated_seconds,
    find_cases,
    installed_peers,
    measure,
    peer_contestants,
)
from bayesify.app.bench.disturbance import Watch
from bayesify.app.bench.step_memory import can_measure
from bayesify.app.bench.tables import by_group, cells_of, headings_of
from bayesify.app.cli.formatting import plain_table
from bayesify.app.cli.progress_bar import progress_bar
from bayesify.app.launch import requested_device
from bayesify.app.runs import ConfigError, RunError
from bayesify.app.runs.environment import check_committed, commit, hardware, versions
from bayesify.app.runs.out_file import check_can_be_written
from bayesify.io import atomic_write
from bayesify.module.threads import num_threads

__all__ = ["bench"]

_ROUNDS, _QUICK_ROUNDS = 30, 5
_THREADS = 2
#: More threads end the process; of the other numbers, 32 bits are enough.
_MOST_THREADS, _MOST = 1024, 2**31 - 1


def bench(
    case: Annotated[
        list[str] | None,
        typer.Option(
            help="mlp-400, mlp-1200, mlp-2900, mlp-9600, resnet-20, predict, predict-once or "
            r"predict-mean; may be repeated. \[default: all but mlp-9600, whose 100 million "
            "weights take 9 GB of memory]",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            help=r"Examples at once; may be repeated. \[default: by case, 128 and 1024 first]",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            help=rf"Rounds, in each of which every contestant is timed. "
            rf"\[default: {_ROUNDS}; with --quick {_QUICK_ROUNDS}]",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few rounds, for a first impression.")
    ] = False,
    peers: Annotated[
        bool,
        typer.Option("--peers", help="Measure other libraries too, if they are installed."),
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(
            help=rf"CPU threads. \[default: {_THREADS}, or the number of cores if smaller]",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(help="Where the networks are: cpu, cuda, or auto for a GPU if there is one."),
    ] = "cpu",
    resident: Annotated[
        bool,
        typer.Option(
            "--resident",
            help="Measure also by how much each one's memory grows, in a process of its own "
            "(Linux); some 3 s each.",
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write all results to this JSON file.", show_default=False)
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Draw the ratios to this PNG file.", show_default=False)
    ] = None,
    store_disturbed: Annotated[
        bool,
        typer.Option(
            "--store-disturbed", help="Store rows that other processes disturbed too, marked."
        ),
    ] = False,
    uncommitted: Annotated[
        bool,
        typer.Option("--uncommitted", help="Store rows although the code differs from its commit."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure time and memory of a step, relative to the plain network in the same run.

    Ratios are to the plain network with the same optimizer, and of IVON with Adam. "closed-form"
    and "compiled" are the backends of training; "floor" is an estimate of the least time of a step
    with weight sampling, from its forward and backward pass, memory traffic and noise, and in a
    loop of one's own the optimizer's step on mean and rho. On a GPU there is no floor, but
    "plain-net-graph" is the plain network whose step is a CUDA graph, as a compiled step is.
    Ctrl-C shows the results so far.

    Rounds in which other processes use the CPU are taken again. Rows that stay disturbed are
    marked, and --out and --figure refuse them. So does --out where the code of the checkout differs
    from the commit that the file names, without --uncommitted.
    """
    cases = find_cases(case or [])
    rounds = steps if steps is not None else _QUICK_ROUNDS if quick else _ROUNDS
    count = min(_THREADS, os.cpu_count() or 1) if threads is None else threads
    for name, values in (("batch", batch or [1]), ("steps", [rounds]), ("threads", [count])):
        most = _MOST_THREADS if name == "threads" else _MOST
        if min(values) < 1:
            raise ConfigError(f"{name} must be at least 1, got {min(values)}")
        if max(values) > most:
            raise ConfigError(f"{name} must be at most {most:,}, got {max(values)}")
    on_gpu = requested_device(device) == "cuda"
    for name, asked in (("peers", peers), ("resident", resident)):
        if on_gpu and asked:
            raise ConfigError(f"{name} is measured on the CPU only; leave it out with a GPU")
    cases = [replace(each, device="cuda" if on_gpu else "cpu") for each in cases]
    if resident and not can_measure():
        raise ConfigError(
            "resident needs Linux, which reports the peak memory of a process; leave it out"
        )
    for option, path in (("--out", out), ("--figure", figure)):
        if path is not None:
            check_can_be_written(path, overwrite=True, option=option)
    if figure is not None and figure.suffix != ".png":
        raise ConfigError(f"figure must end in .png, got {figure.name}")
    if out is not None and not uncommitted:
        check_committed(commit())
    found, missing = installed_peers() if peers else ([], [])
    groups = _groups(cases, batch, found)
    console = Console(stderr=True)
    started = time.perf_counter()
    with num_threads(count):
        watch = Watch()
        about = estimated_seconds(groups, rounds=rounds)
        is_busy = watch.is_disturbed
        console.print(
            f"{len(groups)} x {rounds} rounds on {hardware(cases[0].device)}: about "
            + (f"{about:.0f} s" if about < 90 else f"{about / 60:.0f} min"),
            highlight=False,
            soft_wrap=True,
        )
        if is_busy:
            console.print(
                "other programs use the CPU: rounds will be taken again, and rows marked",
                style="yellow",
                soft_wrap=True,
            )
        turns = rounds * sum(len(group.entered) for group in groups)
        with _bar(console, turns) as on_turn:
            measured = measure(groups, rounds=rounds, resident=resident, on_turn=on_turn)
        document = {
            "experiment": "bench",
            "quick": quick,
            "config": {
                "cases": [each.name for each in cases],
                "batches": batch or None,
                "rounds": rounds,
                "threads": torch.get_num_threads(),
                "device": cases[0].device,
                "peers": peers,
            },
            "seed": 0,
            "commit": commit(),
            "hardware": hardware(cases[0].device),
            "versions": {**versions(), **{peer.name: str(peer.version) for peer in found}},
            "metrics": {"rows": measured.rows},
            "seconds": time.perf_counter() - started,
        }
    if missing:
        measured.notes.append(f"not installed: {', '.join(missing)}")
    disturbed = [row for row in measured.rows if row["disturbed"]]
    if disturbed:
        measured.notes.append(
            f"{len(disturbed)} of {len(measured.rows)} rows were disturbed: others used the "
            "CPU, or the plain network's times vary by more than a quarter"
        )
    document["notes"] = measured.notes
    refused = bool(disturbed and (out or figure) and not store_disturbed)
    if as_json:
        shown = {key: value for key, value in document.items() if key != "metrics"}
        typer.echo(json.dumps({"rows": measured.rows, **shown}))
    else:
        _show(measured)
    if measured.interrupted:
        raise KeyboardInterrupt
    if refused:
        raise RunError(
            "nothing was stored: rows were disturbed; end other programs and run again, or add "
            "--store-disturbed, which marks them"
        )
    _store(document, out, figure)


def _groups(cases: list[Case], batches: list[int] | None, peers: list[Peer]) -> list[Group]:
    return [
        Group(case, batch, [*contestants_of(case, batch), *peer_contestants(peers, case, batch)])
        for case in cases
        for batch in dict.fromkeys(batches or case.batches)
    ]


@contextmanager
def _bar(console: Console, turns: int) -> Iterator[Any]:
    # No thread must draw while a step is timed.
    label = "{task.description:<20}"
    bar = progress_bar(console, TimeRemainingColumn(), label=label, auto_refresh=False)
    task = bar.add_task("", total=turns)

    def on_turn(name: str) -> None:
        bar.update(task, advance=1, description=name, refresh=True)

    with bar:
        yield on_turn


def _store(document: dict[str, Any], out: Path | None, figure: Path | None) -> None:
    if out is not None:
        atomic_write(out, json.dumps(document, indent=2) + "\n")
    if figure is not None:
        from bayesify.app.bench.figure import step_times

        drawn = step_times(document["metrics"]["rows"])
        image = io.BytesIO()
        drawn.savefig(image, format="png", dpi=150, metadata={"Software": None})
        atomic_write(figure, image.getvalue())


def _show(measured: Measurement) -> None:
    console = Console()
    for name, rows in by_group(measured.rows).items():
        table = plain_table(*headings_of(rows))
        table.title, table.title_justify = Text(name), "left"
        for row in rows:
            table.add_row(*cells_of(row))
        console.print(table, "")
    for note in measured.notes:
        console.print(Text(note), soft_wrap=True)
    if measured.interrupted:
        console.print("stopped early: nothing was stored", soft_wrap=True)
