r"""Write the tables and the figure of a stored ``bayesify bench`` into the documentation.

bayesify bench --peers --out results/bench/cpu.json
python benchmarks/bench_table.py results/bench/cpu.json docs/benchmarks.md docs/images/step-time.png
bayesify bench --case predict --case predict-once --case predict-mean \
    --out results/bench/predict.json
python benchmarks/bench_table.py results/bench/predict.json docs/prediction.md

The text outside the page's two marks stays.
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measurement", type=Path, help="the file written by bayesify bench --out")
    parser.add_argument("page", type=Path, help="the page with the two marks")
    parser.add_argument("figure", type=Path, nargs="?", help="the PNG to draw, of steps")
    options = parser.parse_args()
    document = json.loads(options.measurement.read_text())
    picture = ""
    if options.figure is not None:
        drawn = step_times(document["metrics"]["rows"])
        drawn.savefig(options.figure, format="png", dpi=150, metadata={"Software": None})
        shown = Path(os.path.relpath(options.figure, options.page.parent)).as_posix()
        picture = f"![Time of a step, relative to the plain network]({shown})\n\n"
    text = (
        f"{picture}{markdown(document)}\n"
        f"`{options.measurement.as_posix()}` has every number; `benchmarks/bench_table.py` wrote "
        "what stands here.\n"
    )
    options.page.write_text(replaced(options.page.read_text(), text))


if __name__ == "__main__":
    main()
