r"""Write the tables and the figure of stored ``bayesify bench`` runs into the documentation.

bayesify bench --peers --case mlp-400 --case mlp-1200 --batch 128 --out results/bench/steps.json
bayesify bench --peers --case mlp-400 --case mlp-1200 --batch 128 --steps 25 \
    --out results/bench/steps-avx512.json
bayesify bench --case mlp-400 --case mlp-1200 --case mlp-2900 --case resnet-20 --steps 12 \
    --out results/bench/cpu.json
bayesify bench --case mlp-9600 --steps 20 --out results/bench/steps-100m.json
bayesify bench --threads 1 --case mlp-400 --case mlp-1200 --batch 128 \
    --out results/bench/steps-one-thread.json
python benchmarks/bench_table.py docs/benchmarks.md results/bench/steps-avx512.json \
    results/bench/steps-one-thread.json results/bench/cpu.json results/bench/steps-100m.json \
    results/bench/steps.json \
    --figure docs/images/step-time.png
bayesify bench --case predict --case predict-once --case predict-mean \
    --out results/bench/predict.json
python benchmarks/bench_table.py docs/prediction.md results/bench/predict.json
bayesify bench --device cuda --case mlp-400 --case mlp-1200 --batch 128 --steps 10 \
    --store-disturbed --out results/bench/gpu.json
bayesify bench --device cuda --case predict --case predict-once --case predict-mean \
    --batch 128 --batch 1024 --steps 5 --store-disturbed --out results/bench/gpu-predict.json
python benchmarks/bench_table.py docs/gpu.md results/bench/gpu.json results/bench/gpu-predict.json

The text outside the page's two marks stays. The figure is of the first file.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from bayesify.app.bench.figure import step_times
from bayesify.app.bench.tables import markdown, replaced


def main() -> None:
    """Write the page and the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path, help="the page with the two marks")
    parser.add_argument(
        "measurements", type=Path, nargs="+", help="files written by bayesify bench --out"
    )
    parser.add_argument("--figure", type=Path, help="the PNG to draw, of steps")
    options = parser.parse_args()
    documents = [json.loads(path.read_text()) for path in options.measurements]
    picture = ""
    if options.figure is not None:
        drawn = step_times(documents[0]["metrics"]["rows"])
        drawn.savefig(options.figure, format="png", dpi=150, metadata={"Software": None})
        shown = Path(os.path.relpath(options.figure, options.page.parent)).as_posix()
        picture = f"![Time of a step, relative to the plain network]({shown})\n\n"
    tables = "\n".join(map(markdown, documents))
    names = " and ".join(f"`{path.as_posix()}`" for path in options.measurements)
    verb = "has" if len(documents) == 1 else "have"
    text = (
        f"{picture}{tables}\n"
        f"{names} {verb} every number; `benchmarks/bench_table.py` wrote what stands here.\n"
    )
    options.page.write_text(replaced(options.page.read_text(), text))


if __name__ == "__main__":
    main()
