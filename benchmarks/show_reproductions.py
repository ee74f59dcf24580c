"""Copy the stored tables and figures of ``bayesify reproduce`` into the documentation.

bayesify reproduce uci
python benchmarks/show_reproductions.py

The table of an experiment replaces the text between its two marks in a page of PAGES; its figures
are copied to docs/images. README shows the short table of blundell-comparison, which-prior.md a
part of that of blundell-bound and those of first_fit.py and sparsity_priors.py, and
which-posterior.md that of posterior_prices.py.
"""

from __future__ import annotations

import posterior_prices
from pages import DOCS, insert
from records import RESULTS

from bayesify.io import atomic_write
from bayesify.reproduce import EXPERIMENTS, read_results, results_of
from bayesify.reproduce.papers.blundell import bound, comparison

README = DOCS.parent / "README.md"


def main() -> None:
    """Write the pages and the figures."""
    for path in sorted(DOCS.rglob("*.md")):
        page = path.read_text(encoding="utf-8")
        if (filled := _filled(page)) != page:
            atomic_write(path, filled)
    if rows := read_results(RESULTS / comparison.EXPERIMENT.name):
        insert(README, comparison.EXPERIMENT.name, comparison.headline(rows))
    if rows := read_results(RESULTS / bound.EXPERIMENT.name):
        insert(DOCS / "which-prior.md", "widths", bound.widths(rows))
    for name in ("first-fit", "sparsity-priors"):
        path = RESULTS / name / "table.md"
        if path.exists():
            insert(DOCS / "which-prior.md", name, path.read_text(encoding="utf-8").strip())
    if (latency := RESULTS / "compression-latency" / "table.md").exists():
        text = latency.read_text(encoding="utf-8").strip()
        insert(DOCS / "small-networks.md", "compression-latency", text)
    # It shows distances of the referee's results, which may be new.
    insert(DOCS / "which-posterior.md", posterior_prices.NAME, posterior_prices.table())


def _filled(page: str) -> str:
    for name, experiment in EXPERIMENTS.items():
        rows = results_of(experiment, RESULTS / name)
        before, begin, rest = page.partition(f"<!-- {name}: begin -->")
        _, end, after = rest.partition(f"<!-- {name}: end -->")
        if not (rows and begin and end):
            continue
        # Made from the results, so that a change of the table's form needs no new run.
        table = experiment.table(rows).rstrip("\n") + "\n"
        atomic_write(RESULTS / name / "table.md", table)
        for title, text in experiment.files(rows).items():
            atomic_write(RESULTS / name / title, text)
        for title, figure in experiment.figures(rows).items():
            path = RESULTS / name / f"{title}.png"
            figure.savefig(path, format="png", dpi=150, metadata={"Software": None})
            (DOCS / "images" / path.name).write_bytes(path.read_bytes())
        page = f"{before}{begin}\n\n{table.strip()}\n\n{end}{after}"
    return page


if __name__ == "__main__":
    main()
