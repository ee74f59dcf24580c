"""Measure training on a table larger than memory, and predicting it: time and resident memory.

python benchmarks/large_tables.py --rows 20000000          # stores results/large-tables
python benchmarks/large_tables.py --rows 200000 --compare  # the same result as in memory
python benchmarks/large_tables.py --show                   # writes the numbers into docs/

The table has 20 columns in Parquet: a target, 18 numbers, of which one is skewed and one has
missing values, and a category. It is made in a temporary folder. Training and prediction are
commands in processes of their own, whose largest resident memory the kernel measures. With
--compare the table is also trained on in memory, and both networks predict the same new rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import records
from pages import insert
from pyarrow import parquet
from records import require_clean_tree

PAGE = Path(__file__).resolve().parents[1] / "docs" / "large-tables.md"
CAP = "2GB"
_MAIN = "from bayesify.app.cli import main; main()"
_GROUP = 250_000
_CITIES = ("Rome", "Oslo", "Pau", "Ulm", "Kyoto")
#: With --compare: rows to predict with both networks.
_NEW_ROWS = 50_000


def made(generator: np.random.Generator, rows: int) -> pa.Table:
    """Make some rows of the table."""
    x = generator.normal(size=(rows, 18))
    x[:, 1] = np.exp(x[:, 1])
    x[generator.random(rows) < 0.05, 2] = np.nan
    city = generator.integers(len(_CITIES), size=rows)
    mean = np.sin(2.0 * x[:, 0]) + 0.5 * np.log(x[:, 1]) + 0.3 * x[:, 3] * x[:, 4] + 0.4 * city
    y = mean + (0.2 + 0.2 * (x[:, 5] > 0.0)) * generator.normal(size=rows)
    names = [f"x{place}" for place in range(18)]
    columns = {name: pa.array(x[:, place], from_pandas=True) for place, name in enumerate(names)}
    levels = pa.DictionaryArray.from_arrays(pa.array(city, pa.int8()), pa.array(_CITIES))
    return pa.table({**columns, "city": levels, "y": pa.array(y)})


def write(path: Path, rows: int, seed: int, *, new: Path | None = None) -> int:
    """Write a table, and without its target a new one; return the bytes that it has in memory."""
    generator = np.random.default_rng(seed)
    size = 0
    with ExitStack() as writers:
        opened: dict[Path, parquet.ParquetWriter] = {}
        for start in range(0, rows, _GROUP):
            table = made(generator, min(_GROUP, rows - start))
            size += table.nbytes
            parts = {path: table} if new is None else {path: table, new: table.drop_columns("y")}
            for place, part in parts.items():
                if place not in opened:
                    writer = parquet.ParquetWriter(place, part.schema, use_dictionary=["city"])
                    opened[place] = writers.enter_context(writer)
                opened[place].write_table(part)
    return size


def command(*words: object) -> dict[str, Any]:
    """Run a command of bayesify; return its JSON, its seconds and its largest resident memory."""
    begun = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-c", _MAIN, *map(str, words), "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    answer = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"bayesify {words[0]} ended with exit code {child.returncode}")
    return {
        "answer": json.loads(answer),
        "seconds": time.perf_counter() - begun,
        "peak_bytes": 1024 * usage.ru_maxrss,
    }


def measured(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train on the table and predict it; yield a row for each command."""
    path, new, run = folder / "table.parquet", folder / "new.parquet", folder / "run"
    in_memory = write(path, options.rows, 0, new=new)
    size = {"rows": options.rows, "columns": 20, "bytes_in_memory": in_memory}
    size["bytes_on_disk"] = path.stat().st_size
    settings = ["--target", "y", "--epochs", 1, "--passes", 1]
    settings += ["--batch-size", options.batch_size, "--max-memory", CAP]
    trained = command("train", path, *settings, "--out", run)
    test = {key: trained["answer"]["test"][key] for key in ("rmse", "nll")}
    epoch = {"seconds_epoch": trained["answer"]["seconds_train"]}
    yield {"step": "train, one epoch", **size, **_cost(trained), **test, **epoch}
    # The same rows without their target, whose metrics would take longer than the predictions.
    out = folder / "predictions.parquet"
    settings = ["--max-memory", CAP, "--samples", options.samples]
    predicted = command("predict", run, new, "--out", out, *settings)
    assert predicted["answer"]["rows"] == options.rows
    step = f"predict, {options.samples} samples"
    yield {"step": step, **size, **_cost(predicted), "out_bytes": out.stat().st_size}


def compared(folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train streamed and in memory; yield the metrics of each on the same new rows."""
    path, new = folder / "table.parquet", folder / "new.parquet"
    write(path, options.rows, 0)
    write(new, _NEW_ROWS, 1)
    for seed in range(options.seeds):
        for name, more in (("streamed", ["--max-memory", CAP]), ("in memory", [])):
            run = folder / f"{name}-{seed}"
            settings = ["--target", "y", "--epochs", options.epochs, "--passes", 1]
            trained = command("train", path, *settings, *more, "--seed", seed, "--out", run)
            found = command("evaluate", run, new)["answer"]["metrics"]
            row = {"step": name, "rows": options.rows, "seed": seed, **_cost(trained)}
            yield {**row, **{key: found[key] for key in ("rmse", "nll", "crps")}}


def _cost(found: dict[str, Any]) -> dict[str, float]:
    return {"seconds": round(found["seconds"], 1), "peak_bytes": found["peak_bytes"]}


def table() -> str:
    """Return the stored rows as Markdown."""
    stored = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((records.RESULTS / "large-tables").glob("*.json"))
    ]
    lines = []
    for document in (each for each in stored if "samples" in each["config"]):
        first = document["metrics"]["rows"][0]
        lines += [
            f"{first['rows']:,} rows x {first['columns']} columns, "
            f"{first['bytes_in_memory'] / 1e9:.2f} GB in memory, --max-memory "
            f"{document['config']['max_memory']} --batch-size {document['config']['batch_size']}, "
            f"one thread, on {document['hardware'].partition(',')[0]}, shared with other work:",
            "",
            "| command | seconds | largest resident memory, GB | RMSE, held-out rows | nll |",
            "|---|---|---|---|---|",
            *(
                f"| {row['step']} | {row['seconds']:,.0f} | {row['peak_bytes'] / 1e9:.2f} | "
                + (f"{row['rmse']:.4f} | {row['nll']:.4f} |" if "rmse" in row else " | |")
                for row in document["metrics"]["rows"]
            ),
            "",
        ]
    for document in (each for each in stored if "epochs" in each["config"]):
        rows = document["metrics"]["rows"]
        lines += [
            f"{rows[0]['rows']:,} such rows, {document['config']['epochs']} epochs, streamed and "
            f"in memory; both predict the same {_NEW_ROWS:,} new rows:",
            "",
            "| | seed | RMSE | nll | CRPS | seconds | largest resident memory, GB |",
            "|---|---|---|---|---|---|---|",
            *(
                f"| {row['step']} | {row['seed']} | {row['rmse']:.4f} | {row['nll']:.4f} | "
                f"{row['crps']:.4f} | {row['seconds']:,.0f} | {row['peak_bytes'] / 1e9:.2f} |"
                for row in rows
            ),
            "",
        ]
    return "\n".join(lines).strip()


def main() -> None:
    """Measure, and store the rows."""
    if sys.argv[1:] == ["--show"]:
        insert(PAGE, "large-tables", table())
        return
    require_clean_tree()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--batch-size", type=int, default=4096, help="but for --compare")
    parser.add_argument("--samples", type=int, default=10, help="weight samples of predict")
    parser.add_argument("--compare", action="store_true", help="train in memory too")
    parser.add_argument("--epochs", type=int, default=10, help="epochs of --compare")
    parser.add_argument("--seeds", type=int, default=3, help="runs of --compare")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    options = parser.parse_args()
    name = f"{'compare-' if options.compare else ''}{options.rows}"
    config = {
        "max_memory": CAP,
        "threads": 1,
        "nice": os.nice(0),
        "load_before": os.getloadavg()[0],
        **(
            {"epochs": options.epochs}
            if options.compare
            else {"samples": options.samples, "batch_size": options.batch_size}
        ),
    }
    document = records.resumed("large-tables", name, config)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for row in (compared if options.compare else measured)(Path(folder), options):
            print(row, flush=True)
            records.store_rows(document, [row], time.perf_counter() - begun)
            begun = time.perf_counter()


if __name__ == "__main__":
    main()
