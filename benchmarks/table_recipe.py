"""What each part of the recipe for tables brings, on validation rows of the development sets.

python benchmarks/table_recipe.py [--only SET ...] [--splits N]    an hour; resumes where it stopped
python benchmarks/table_recipe.py --show                           writes the table in docs/adr/0008

Each candidate changes one thing of the defaults. It is trained on 80 % of the training rows of a
split of ``bayesify reproduce tables``, and measured on the others; test rows are not read.
Results go to ``results/table-recipe/SET.json``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any

from pages import DOCS, insert
from records import require_clean_tree, resumed, store_rows, stored

from bayesify.reproduce.papers.tables.evaluation import evaluate
from bayesify.reproduce.papers.tables.sets import SETS
from bayesify.sklearn import BayesianMLPClassifier, BayesianMLPRegressor
from bayesify.tabular import TableRecipe

PAGE = DOCS / "adr" / "0008-recipe-for-tables.md"
CONFIG = {"part": "validation"}
NAMES = tuple(name for name, each in SETS.items() if each.group == "development")
#: The recipe before, for numbers and for classes.
BEFORE = TableRecipe(
    hidden=(50,),
    steps=500,
    lr=0.05,
    init_std=0.05,
    prior_std=1.0,
    relevance=False,
    kl_warmup=0.2,
)
#: A change of the recipe by candidate.
CANDIDATES: dict[str, Callable[[TableRecipe], TableRecipe]] = {
    "chosen": lambda recipe: recipe,
    "before": lambda recipe: replace(BEFORE, steps=BEFORE.steps_for(0)),  # noqa: ARG005
    "no relevance": lambda recipe: replace(recipe, relevance=False),
    "one hidden layer": lambda recipe: replace(recipe, hidden=(50,)),
    "a third of the steps": lambda recipe: replace(recipe, steps=recipe.steps // 3),
    "one std for all rows": lambda recipe: recipe,
}
#: Candidates whose noise does not depend on the row.
COMMON_NOISE = ("before", "one std for all rows")


def make(name: str, candidate: str, seed: int) -> Any:
    """Return the estimator of a candidate."""
    change = CANDIDATES[candidate]
    numbers = SETS[name].kind == "numbers"
    kind: Any = BayesianMLPRegressor if numbers else BayesianMLPClassifier

    class Candidate(kind):  # type: ignore[misc]
        def _recipe(self, num_rows: int, *, has_classes: bool) -> TableRecipe:
            return change(super()._recipe(num_rows, has_classes=has_classes))

    options = {"noise": "learned"} if numbers and candidate in COMMON_NOISE else {}
    return Candidate(random_state=seed, **options)


def run(name: str, splits: int) -> None:
    """Measure the candidates on a set that are not stored yet."""
    document = resumed("table-recipe", name, CONFIG, seed="the split")
    there = {(row["candidate"], row["split"]) for row in document["metrics"]["rows"]}
    for split in range(splits):
        for candidate in CANDIDATES:
            if (candidate, split) in there or not applies(name, candidate):
                continue
            started = time.perf_counter()
            found = evaluate(lambda seed: make(name, candidate, seed), name, split, "validation")  # noqa: B023
            row = {"candidate": candidate, "split": split, **found}
            store_rows(document, [row], time.perf_counter() - started)
            print(f"{name}: {candidate}, split {split}: nll {found['nll']:.3f}", flush=True)


def applies(name: str, candidate: str) -> bool:
    """Return whether a candidate differs from the chosen one on a set."""
    return SETS[name].kind == "numbers" or candidate != "one std for all rows"


def table() -> str:
    """Return the nll in nats a row of each candidate, the mean over the splits, by set."""
    lines = [f"| set | {' | '.join(CANDIDATES)} |", f"|---|{'---|' * len(CANDIDATES)}"]
    machines = set()
    for name in NAMES:
        document = stored("table-recipe", name, CONFIG)
        rows = document["metrics"]["rows"]
        if not rows:
            continue
        machines.add(document["hardware"])
        by_candidate = {
            candidate: [row["nll"] for row in rows if row["candidate"] == candidate]
            for candidate in CANDIDATES
        }
        best = min(fmean(values) for values in by_candidate.values() if values)
        cells = []
        for values in by_candidate.values():
            text = f"{fmean(values):.3f}" if values else ""
            cells.append(f"**{text}**" if values and fmean(values) == best else text)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"On {'; '.join(sorted(machines))}."])


def main() -> None:
    """Measure, or show what was measured."""
    require_clean_tree()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=NAMES)
    parser.add_argument("--splits", type=int, default=2, choices=range(1, 6))
    parser.add_argument("--show", action="store_true", help="only write the table")
    options = parser.parse_args()
    if options.show:
        insert(PAGE, "table-recipe", table())
        return
    for name in options.only or NAMES:
        run(name, options.splits)


if __name__ == "__main__":
    main()
