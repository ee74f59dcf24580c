"""The citation names the version of the package, and no date of release before there is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import bayesify as bf

ROOT = Path(__file__).resolve().parents[2]
CITATION, CITE, CHANGELOG = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("CITATION.cff", "docs/cite.md", "CHANGELOG.md")
)


def inconsistent(citation: str, cite: str, changelog: str, version: str) -> list[str]:
    """What differs between the citation, the page that shows it, the changelog and a version."""
    found = []
    if re.findall(r"^version: (.+)$", citation, re.M) != [version]:
        found.append("CITATION.cff has another version")
    if re.search(r"version = \{(.+)\}", cite)[1] != version:  # type: ignore[index]
        found.append("docs/cite.md has another version")
    released = re.findall(rf"^## \[{re.escape(version)}\] - (\d{{4}}-\d\d-\d\d)$", changelog, re.M)
    if re.findall(r"^date-released: \"?([-\d]+)\"?$", citation, re.M) != released:
        found.append("CITATION.cff has another date of release than the changelog")
    year = re.search(r"year    = \{(\d{4})\}", cite)
    if year is None or (released and not released[0].startswith(year[1])):
        found.append("docs/cite.md has another year than the changelog")
    return found


def test_citation_and_version_agree() -> None:
    assert not inconsistent(CITATION, CITE, CHANGELOG, bf.__version__)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version: 0", "version: 9", "CITATION.cff has another version"),
        ("license:", "date-released: 2020-01-01\nlicense:", "another date of release"),
    ],
)
def test_a_difference_is_caught(old: str, new: str, message: str) -> None:
    (found,) = inconsistent(CITATION.replace(old, new), CITE, CHANGELOG, bf.__version__)
    assert message in found


def test_a_release_needs_its_date() -> None:
    changelog = CHANGELOG + f"\n## [{bf.__version__}] - 2031-02-03\n"
    assert inconsistent(CITATION, CITE, changelog, bf.__version__) == [
        "CITATION.cff has another date of release than the changelog",
        "docs/cite.md has another year than the changelog",
    ]
