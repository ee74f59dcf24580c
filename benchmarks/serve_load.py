"""Load ``bayesify serve`` over loopback, and measure requests a second and latencies.

python benchmarks/serve_load.py RUN_OF_MNIST [FILE.onnx ...]      five minutes for each

Each client has one connection and sends the next request when it has the answer to the last: one
image of MNIST's test set in each. The service runs in another process. The results are in
results/serve: one file for each source, with a row for each number of clients.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
from records import RESULTS, commit, require_clean_tree

from bayesify.app.runs.environment import hardware, load_average, versions
from bayesify.datasets import load_images
from bayesify.io import atomic_write

#: Seconds before the measurement.
WARM_UP = 2.0


@contextmanager
def service(source: str) -> Iterator[dict[str, Any]]:
    """Run a service, and yield the JSON object that it prints."""
    program = "from bayesify.app.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", program, "serve", source, "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
        finally:
            process.terminate()


async def load(
    url: str, bodies: Sequence[bytes], clients: int, seconds: float
) -> tuple[list[float], Counter[int]]:
    """Return the latency of each request in seconds, and the number of each HTTP status.

    A request without a response counts as status 0.
    """
    latencies: list[float] = []
    statuses: Counter[int] = Counter()
    end = time.perf_counter() + seconds

    async def ask(first: int) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
            place = first
            while (started := time.perf_counter()) < end:
                try:
                    response = await client.post(
                        "/predict",
                        content=bodies[place % len(bodies)],
                        headers={"content-type": "application/json"},
                    )
                    statuses[response.status_code] += 1
                except httpx.HTTPError:
                    statuses[0] += 1
                latencies.append(time.perf_counter() - started)
                place += clients

    await asyncio.gather(*(ask(first) for first in range(clients)))
    return latencies, statuses


def row(url: str, bodies: Sequence[bytes], clients: int, seconds: float) -> dict[str, Any]:
    """Measure one number of clients."""
    started = time.perf_counter()
    latencies, statuses = asyncio.run(load(url, bodies, clients, seconds))
    elapsed = time.perf_counter() - started
    centiles = statistics.quantiles(latencies, n=100)
    return {
        "clients": clients,
        "examples_a_request": 1,
        "seconds": elapsed,
        "requests": len(latencies),
        "requests_a_second": len(latencies) / elapsed,
        "p50_ms": 1e3 * centiles[49],
        "p99_ms": 1e3 * centiles[98],
        "errors": len(latencies) - statuses[200],
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
    }


def main() -> None:
    """Measure each source with each number of clients."""
    require_clean_tree()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sources", nargs="+", help="folder of a run, or a file of bayesify export")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", default="1,4,16,32")
    chosen = parser.parse_args()
    images = load_images("mnist")
    pixels = (images.test_inputs[:1000] * images.pixel_scale).round().int().reshape(-1, 28, 28)
    bodies = [json.dumps({"examples": [each]}).encode() for each in pixels.tolist()]
    for source in chosen.sources:
        with service(source) as started:
            asyncio.run(load(started["url"], bodies, 1, WARM_UP))
            rows = []
            for clients in map(int, chosen.clients.split(",")):
                rows.append(row(started["url"], bodies, clients, chosen.seconds))
                print(json.dumps(rows[-1]))
        model = {key: started["model"][key] for key in ("name", "source", "num_samples")}
        document = {
            "experiment": "serve",
            "model": model,
            "rows": rows,
            "commit": commit(),
            "hardware": hardware(),
            "load_average": load_average(),
            "versions": versions(),
        }
        name = f"load-{model['source']}-{model['name']}.json"
        atomic_write(RESULTS / "serve" / name, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
