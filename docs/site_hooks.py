"""Pages of the site that lie outside docs/, and links that leave it, for MkDocs."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
#: Files of the repository that are pages.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")


def on_startup(**_: object) -> None:
    """Let the tutorials import ``site_figures``, and show the warnings of their code."""
    sys.path.insert(0, str(ROOT / "docs"))
    import_module("site_warnings").show_in_pages()


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/."""
    for source, target in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=_relinked(text, ROOT)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Relink what leaves docs/."""
    if page.file.generated_by is not None:
        return markdown
    return _relinked(markdown, (ROOT / "docs" / page.file.src_uri).parent)


def _relinked(text: str, folder: Path) -> str:
    """Rewrite links from a page in ``folder``: those to no page become the path's name."""

    def relink(match: re.Match[str]) -> str:
        picture, label, target, anchor = match.groups()
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = (folder / target).resolve()
        if not path.is_relative_to(ROOT):
            return match[0]
        name = path.relative_to(ROOT).as_posix()
        if name in PAGES:
            inside = PAGES[name]
        elif path.is_dir() and path.is_relative_to(ROOT / "docs"):
            return label  # a folder of pages, which the menu lists
        elif path.is_relative_to(ROOT / "docs"):
            inside = path.relative_to(ROOT / "docs").as_posix()
        elif label.strip("`") in (name, f"{name}/"):
            return f"`{name}`"
        else:
            return f"{label} (`{name}` in the repository)"
        depth = 0 if folder == ROOT else len(folder.relative_to(ROOT / "docs").parts)
        return f"{picture}[{label}]({'../' * depth}{inside}{anchor or ''})"

    return _LINK.sub(relink, text)
