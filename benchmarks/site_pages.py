"""Open every page of a built site in a browser, at the width of a phone and of a desktop.

python benchmarks/site_pages.py [SITE]      SITE: build/site; some minutes

It starts headless Chromium by Playwright, opens the HTML files of the folder without a server, as a
reader does who built the site, and prints each page that is wider than the window, reports an error
on its console, or asks for a file that is missing or on another host. The exit status is 1 if there
is one. Playwright is not in an extra: pip install playwright.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

WIDTHS = (400, 1280)
#: The widest elements of a page that stick out of it; those that scroll in their own box do not.
_WIDEST = """() => {
    const width = document.scrollingElement.clientWidth
    const inside = element => {
        for (let each = element.parentElement; each; each = each.parentElement)
            if (getComputedStyle(each).overflowX !== "visible" && each !== document.body
                && each !== document.documentElement) return true
        return false
    }
    return [...document.body.querySelectorAll("*")]
        .filter(each => each.getBoundingClientRect().right > width + 1 && !inside(each))
        .slice(0, 3).map(each => each.outerHTML.slice(0, 100))
}"""


def problems_of(browser: Browser, page_file: Path, width: int) -> Iterator[str]:
    """Yield what is wrong with a page in a window of ``width`` pixels."""
    found: list[str] = []
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.on("console", lambda said: said.type == "error" and found.append(said.text))
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("requestfailed", lambda request: found.append(f"{request.url} cannot be read"))
    page.on(
        "request",
        lambda request: request.url.startswith("http") and found.append(f"asks {request.url}"),
    )
    page.goto(page_file.resolve().as_uri())
    wide = page.evaluate("document.scrollingElement.scrollWidth")
    inner = page.evaluate("document.scrollingElement.clientWidth")
    if wide > inner:
        found.append(f"is {wide} pixels wide, by {page.evaluate(_WIDEST)}")
    page.close()
    yield from found


def main(arguments: Sequence[str]) -> int:
    """Print the problems of all pages, and return the exit status."""
    site = Path(arguments[0] if arguments else "build/site")
    # A server shows 404.html in place of any page, so that its links begin at the root.
    pages = sorted(set(site.rglob("*.html")) - {site / "404.html"})
    if not pages:
        sys.exit(f"{site} must hold the pages of a site; build it by mkdocs build --strict")
    count = 0
    with sync_playwright() as playwright:
        chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for page in pages:
            for width in WIDTHS:
                for problem in problems_of(browser, page, width):
                    count += 1
                    print(f"{page.relative_to(site)} at {width}: {problem}", flush=True)
        browser.close()
    print(f"{len(pages)} pages at {WIDTHS[0]} and {WIDTHS[1]} pixels: {count or 'no'} problems")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
