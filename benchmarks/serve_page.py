"""Use the page of ``bayesify serve`` in a browser: draw digits and a scribble, change a row.

python benchmarks/serve_page.py RUN_OF_MNIST RUN_OF_A_TABLE      about a minute

It starts the service on each run, opens the page in headless Chromium by Playwright, and checks
that the predicted digit and both uncertainties change while one draws, that a scribble has more
epistemic uncertainty than every digit, that another row has another interval, and that the page
asks no other host. The screenshots, at 400 and 1280 pixels, are written to docs/images, what the
page showed to results/serve/page.json. Playwright is not in an extra: pip install playwright.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright
from records import RESULTS, commit, require_clean_tree

from bayesify.app.runs.environment import hardware, versions
from bayesify.io import atomic_write

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
#: The browser; Playwright's own if there is none.
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
WIDTHS = (400, 1280)
Stroke = list[tuple[float, float]]


def arc(x: float, y: float, wide: float, high: float, start: float, end: float) -> Stroke:
    """Return a part of an ellipse, its angles in degrees from the right, clockwise."""
    angles = [math.radians(start + (end - start) * step / 16) for step in range(17)]
    return [(x + wide * math.cos(angle), y + high * math.sin(angle)) for angle in angles]


def scribble(seed: int) -> list[Stroke]:
    """Return a line through places at random."""
    drawn = random.Random(seed)
    return [[(drawn.uniform(0.15, 0.85), drawn.uniform(0.15, 0.85)) for _ in range(9)]]


#: Strokes in units of the canvas, from its upper left corner.
DIGITS: dict[str, list[Stroke]] = {
    "0": [arc(0.5, 0.5, 0.2, 0.32, -90, 270)],
    "1": [[(0.52, 0.15), (0.48, 0.85)]],
    "2": [[*arc(0.5, 0.33, 0.2, 0.17, -160, 30), (0.3, 0.82), (0.74, 0.82)]],
    "3": [[*arc(0.48, 0.33, 0.18, 0.16, -150, 80), *arc(0.48, 0.66, 0.21, 0.18, -80, 150)]],
    "4": [[(0.36, 0.18), (0.3, 0.52), (0.7, 0.52)], [(0.66, 0.2), (0.6, 0.85)]],
    "7": [[(0.28, 0.2), (0.72, 0.2), (0.44, 0.85)]],
}
SCRIBBLES = [scribble(seed) for seed in range(5)]


@contextmanager
def service(run: str) -> Iterator[dict[str, Any]]:
    """Run a service, and yield the JSON object that it prints."""
    command = [sys.executable, "-c", "from bayesify.app.cli import main; main()"]
    with subprocess.Popen(
        [*command, "serve", run, "--port", "0", "--json"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
        finally:
            process.terminate()


def draw(page: Page, strokes: Sequence[Stroke]) -> list[dict[str, Any]]:
    """Draw on an empty canvas, and return what the page shows on the way."""
    page.click("#clear")
    page.locator("#drawing").scroll_into_view_if_needed()
    box = page.locator("#drawing").bounding_box()
    assert box is not None
    seen = []
    for stroke in strokes:
        places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in stroke]
        page.mouse.move(*places[0])
        page.mouse.down()
        for (from_x, from_y), (to_x, to_y) in pairwise(places):
            steps = 1 if len(places) > 9 else 4  # a curve has many places already
            for part in (step / steps for step in range(1, steps + 1)):
                page.mouse.move(from_x + part * (to_x - from_x), from_y + part * (to_y - from_y))
                settle(page)
                seen.append(shown(page))
        page.mouse.up()
    return seen


def settle(page: Page) -> None:
    """Wait until the page has the answer for its newest example."""
    page.wait_for_timeout(20)
    page.wait_for_selector('#results[aria-busy="false"]')


def shown(page: Page) -> dict[str, Any]:
    """Return the prediction and the uncertainties that the page shows."""
    assert not page.inner_text("#problem"), page.inner_text("#problem")
    votes = page.inner_text("#votes-text") if page.query_selector("#votes-text") else ""
    return {
        "answer": page.inner_text("#answer"),
        "reason": page.inner_text("#reason"),
        "total": _number(page.inner_text("#total")),
        "epistemic": _number(page.inner_text("#epistemic")),
        "votes": votes,
    }


def _number(text: str) -> float:
    return float(text.replace("±", "").split()[0])


def screenshots(page: Page, name: str, schemes: dict[int, str], images: Path) -> None:
    """Write the page at each width, in full, into the folder ``images``."""
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=schemes[width])  # type: ignore[arg-type]
        settle(page)
        wide = page.locator("html").evaluate("page => page.scrollWidth")
        assert wide <= width, f"the page is {wide} pixels wide on a screen of {width}"
        page.screenshot(path=images / f"{name}-{width}.png", full_page=True)


def check_images(page: Page, images: Path) -> dict[str, Any]:
    """Draw digits and scribbles."""
    found: dict[str, Any] = {"digits": {}, "scribbles": []}
    for digit, strokes in DIGITS.items():
        steps = draw(page, strokes)
        last = steps[-1]
        found["digits"][digit] = last
        assert last["answer"] == digit or f"would be {digit}." in last["reason"], (digit, last)
        if digit in "347":
            for name in ("total", "epistemic", "votes"):
                assert len({step[name] for step in steps}) > 1, f"{name} stays while one draws"
            assert len({step["answer"] + step["reason"] for step in steps}) > 1
    draw(page, DIGITS["3"])
    screenshots(page, "serve-digit", {400: "light", 1280: "light"}, images)
    for strokes in SCRIBBLES:
        found["scribbles"].append(draw(page, strokes)[-1])
    screenshots(page, "serve-scribble", {400: "dark", 1280: "dark"}, images)
    most = max(each["epistemic"] for each in found["digits"].values())
    least = min(each["epistemic"] for each in found["scribbles"])
    assert least > most, f"a scribble has {least} nats, a digit {most}"
    return found


def check_rows(page: Page, card: dict[str, Any], images: Path) -> dict[str, Any]:
    """Change the first column of numbers, to within and far outside the training data."""
    settle(page)
    column = next(each for each in card["columns"] if each["kind"] == "number")
    field = page.locator("#row input[type=number]").first
    typical = shown(page)
    field.fill(str(column["high"]))
    settle(page)
    within = shown(page)
    assert within != typical
    screenshots(page, "serve-row", {400: "light", 1280: "light"}, images)
    field.fill(str(column["high"] + 100 * (column["high"] - column["low"])))
    settle(page)
    outside = shown(page)
    assert f"Outside the training data in {column['name']}" in outside["reason"]
    assert outside["epistemic"] > within["epistemic"]
    return {"typical": typical, "within": within, "outside": outside}


def check(runs: Sequence[str], images: Path) -> dict[str, Any]:
    """Check the page of a run of MNIST and that of a run of a table, and return what they showed.

    Args:
        runs: their folders.
        images: an existing folder for the screenshots.
    """
    found: dict[str, Any] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name, run in zip(("images", "rows"), runs, strict=True):
            with service(run) as started:
                page = browser.new_page(viewport={"width": 1280, "height": 800})
                asked: list[str] = []
                problems: list[str] = []
                page.on("request", lambda request, to=asked: to.append(request.url))
                page.on("console", lambda message, to=problems: to.append(message.text))
                page.on("pageerror", lambda error, to=problems: to.append(str(error)))
                page.goto(started["url"])
                found[name] = (
                    check_images(page, images)
                    if name == "images"
                    else check_rows(page, started["model"], images)
                )
                local = (started["url"], "data:", "blob:")
                assert not [url for url in asked if not url.startswith(local)], asked
                assert not problems, problems
                page.close()
        found["browser"] = browser.version
        browser.close()
    return found


def main(runs: Sequence[str]) -> None:
    """Check both pages, and write screenshots and results."""
    found = check(runs, IMAGES)
    atomic_write(
        RESULTS / "serve" / "page.json",
        json.dumps(
            {**found, "commit": commit(), "hardware": hardware(), "versions": versions()}, indent=1
        )
        + "\n",
    )
    digits, scribbles = found["images"]["digits"].values(), found["images"]["scribbles"]
    print("epistemic of digits", sorted(each["epistemic"] for each in digits))
    print("epistemic of scribbles", sorted(each["epistemic"] for each in scribbles))


if __name__ == "__main__":
    require_clean_tree()
    main(sys.argv[1:])
