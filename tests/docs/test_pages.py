"""All pages: their links, names, options and words; README's order and length."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer.main

import bayesify as bf
from bayesify.app.cli.commands import make_app

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
}
each_page = pytest.mark.parametrize("name", PAGES)
#: CHANGELOG also has the names and options of earlier versions.
each_current_page = pytest.mark.parametrize("name", sorted(set(PAGES) - {"CHANGELOG.md"}))
OLD = re.compile(
    r"perturbation|footprint|trainee|fused-step|\bstep=\"|--step(?![-\w])|\.coverage\((?!level)"
    r"|\bbeside\b|\bgoes on\b|\bis refused\b|processor time",
    re.I,
)


def heading_anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in headings}


def broken_links(name: str, pages: Mapping[str, str]) -> list[str]:
    """The links of a page that lead nowhere within the repository."""
    broken = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", pages[name]):
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        text = pages[name] if not path else pages.get(_relative(target), "")
        if not target.exists() or (anchor and anchor not in heading_anchors(text)):
            broken.append(link)
    return broken


def _relative(path: Path) -> str:
    path = path.resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""


def snippets(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def unknown_names(code: str) -> list[str]:
    """The ``bf.NAME`` of a snippet that bayesify does not have."""
    used = {
        node.attr
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "bf"
    }
    return sorted(used - set(dir(bf)))


def commands(text: str) -> Iterator[list[str]]:
    """The words of every ``bayesify ...`` in the code of a page."""
    code = [*snippets(text, r"\w*"), *re.findall(r"`(bayesify [^`]+)`", text)]
    for line in "\n".join(code).replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|#|\|\|", line.removeprefix("$ ")):
            words = part.split()
            if words and words[0] == "bayesify":
                yield words[1:]


def unknown_options(words: list[str]) -> list[str]:
    """The options of a command line that its command does not have."""
    command: Any = typer.main.get_command(make_app())
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    known = {option for each in command.params for option in each.opts} | {"--help"}
    return [word for word in words if word.startswith("--") and word not in known]


@each_page
def test_links_lead_somewhere(name: str) -> None:
    assert not broken_links(name, PAGES)


def test_a_broken_link_is_caught() -> None:
    text = "[a](nowhere.md), [b](CHANGELOG.md#no-such-heading), [c](https://example.org)"
    assert broken_links("README.md", PAGES | {"README.md": text}) == [
        "nowhere.md",
        "CHANGELOG.md#no-such-heading",
    ]


@each_page
def test_python_code_has_names_that_exist(name: str) -> None:
    for code in snippets(PAGES[name], "python"):
        assert not unknown_names(code)


def test_an_unknown_name_is_caught() -> None:
    assert unknown_names("bf.fit(bf.ELBO(bf.Nothing()))") == ["Nothing"]


@each_current_page
def test_commands_have_the_options_that_are_shown(name: str) -> None:
    for words in commands(PAGES[name]):
        assert not unknown_options(words), " ".join(words)


def test_an_unknown_option_is_caught() -> None:
    (words,) = commands("```\n$ bayesify train mnist --out runs/a --nothing 3\n```")
    assert unknown_options(words) == ["--nothing"]


@each_current_page
def test_no_page_has_an_old_name(name: str) -> None:
    assert not OLD.search(PAGES[name])


def test_an_old_name_is_caught() -> None:
    assert OLD.search("BayesianModule(net, perturbation=bf.Flipout())")
    assert OLD.search("a table that cannot be read is refused")
    assert not OLD.search("the coverage of intervals; fit(backend='auto')")


def test_the_first_run_has_its_stored_error() -> None:
    stored = json.loads((ROOT / "results" / "first-run" / "first.json").read_text(encoding="utf-8"))
    error = stored["metrics"]["test"]["error_predictive"]
    assert f"of seed 0, has {error:.2f} % over a hundred" in PAGES["docs/first-run.md"]


def answers_without_link(text: str) -> list[str]:
    """The questions of docs/questions.md whose answers lead to no page."""
    found = re.findall(r"^\*\*(.+?)\*\*(.+?)(?=\n\n|\Z)", text, re.M | re.S)
    assert len(found) == len(re.findall(r"^\*\*", text, re.M))
    return [question for question, answer in found if not re.search(r"\]\([\w/.#-]+\)", answer)]


def test_each_answer_has_a_link() -> None:
    text = PAGES["docs/questions.md"]
    assert text.count("\n**") > 20
    assert answers_without_link(text) == []


def test_an_answer_without_a_link_is_caught() -> None:
    text = (
        "**Why?** So: [there](training.md).\n\n**How?** `fit` does\nthat.\n\n**Who?** [We](a.md)."
    )
    assert answers_without_link(text) == ["How?"]


def terms_without_link(text: str) -> list[str]:
    """The terms of docs/glossary.md whose meanings lead to no page."""
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", text, re.M)
    return [term for term, meaning in rows[1:] if not re.search(r"\]\([\w/.#-]+\)", meaning)]


def test_each_term_of_the_glossary_has_a_link_and_its_place() -> None:
    text = PAGES["docs/glossary.md"]
    terms = re.findall(r"^\| (.+?) \|", text, re.M)[1:]
    assert len(terms) > 30
    assert terms == sorted(terms, key=str.lower)
    assert terms_without_link(text) == []


def test_a_term_without_a_link_is_caught() -> None:
    text = "| term | meaning |\n|---|---|\n| a | [b](c.md) |\n| nat | a unit |\n"
    assert terms_without_link(text) == ["nat"]


def test_readme_is_short_and_begins_with_how_to_use_it() -> None:
    assert len(README.splitlines()) < 160
    places = [
        README.index(text)
        for text in (
            "pip install -c constraints.txt -e '.[cli]' && bayesify train mnist --out runs/first",
            "pip install -c constraints.txt -e '.[cli,test]' && pytest",
            "```python",
            "<!-- blundell-comparison: begin -->",
        )
    ]
    assert places == sorted(places)


STORED = sorted((ROOT / "results").glob("*/table.md"))
#: Tables that no page shows, but for a link.
LINKED_ONLY = {"fused-seeds", "mutations"}


@pytest.mark.parametrize("stored", STORED, ids=lambda path: path.parent.name)
def test_a_table_of_a_page_is_the_stored_one(stored: Path) -> None:
    begin, end = (f"<!-- {stored.parent.name}: {mark} -->" for mark in ("begin", "end"))
    rows = [line for line in stored.read_text().splitlines() if line.startswith("|")]
    pages = [PAGES[name] for name in PAGES if name != "README.md"]  # which shows parts
    shown = [text.partition(begin)[2].partition(end)[0] for text in pages if begin in text]
    assert rows
    assert shown or stored.parent.name in LINKED_ONLY
    for text in shown:
        assert [row for row in rows if row not in text] == []
