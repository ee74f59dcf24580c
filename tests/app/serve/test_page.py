"""The page of ``bayesify serve``: what it offers, its script in Node, and its use in Chromium.

Tests in Node are left out where it is missing; so are tests in Chromium, for which Playwright
(``pip install playwright``) is needed too.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from PIL import Image
from tests.app.cli.test_cli import bayesify

from bayesify.app.runs import Run
from bayesify.app.serve.model import ModelCard
from bayesify.app.serve.onnx_model import OnnxModel
from bayesify.app.serve.page import page
from bayesify.app.serve.run_model import RunModel
from bayesify.export import ExportMetadata

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
NOTHING = "\N{EN DASH}"
TRAINED = ["--hidden", "200", "--epochs", "8", "--threads", "1"]


def has_drawing(card: ModelCard) -> bool:
    """Whether one draws on the page; else it sends the file that one opens."""
    text, _ = page(card)
    drawing, file = ('id="drawing"' in text), ('id="opened"' in text)
    assert drawing != file
    return drawing


def test_one_draws_for_a_run_of_mnist_only(runs: dict[str, Path], tmp_path: Path) -> None:
    def card(folder: Path) -> ModelCard:
        run = Run.open(folder)
        return RunModel(run, run.load_module(), num_samples=2, level=0.9, coverage=0.9).card

    assert has_drawing(card(runs["digits"]))
    clothes = Path(shutil.copytree(runs["digits"], tmp_path / "clothes"))
    config = json.loads((clothes / "config.json").read_text())
    config["settings"]["dataset"] = "fashion-mnist"
    (clothes / "config.json").write_text(json.dumps(config))
    assert card(clothes).image_shape == [28, 28]
    assert not has_drawing(card(clothes))


def test_one_draws_for_a_file_of_mnist_only(tmp_path: Path) -> None:
    weights = helper.make_tensor("weights", TensorProto.FLOAT, [784, 10], np.full(7840, 0.1))
    uncertainty = {"axes": [1], "keepdims": 0}
    nodes = [
        helper.make_node("MatMul", ["pixels", "weights"], ["mean"]),
        helper.make_node("ReduceMean", ["mean"], ["total"], **uncertainty),
        helper.make_node("ReduceMean", ["mean"], ["epistemic"], **uncertainty),
    ]
    shapes = {"pixels": ["n", 784], "mean": ["n", 10], "total": ["n"], "epistemic": ["n"]}
    values = [helper.make_tensor_value_info(k, TensorProto.FLOAT, v) for k, v in shapes.items()]
    graph = helper.make_graph(nodes, "net", values[:1], values[1:], [weights])
    opset = helper.make_opsetid("", 17)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=10)
    digits = tuple("0123456789")

    def card(classes: tuple[str, ...], shift: float, *, height: int = 28) -> ModelCard:
        described = {
            "kind": "image",
            "image_shape": [1, height, 784 // height],
            "shape": [784],
            "pixels": [0, 255],
            "shift": [shift],
            "scale": [126.0],
        }
        about = ExportMetadata("classification", 2, classes=classes, input=described)
        del model.metadata_props[:]
        helper.set_model_props(model, {"bayesify": about.to_json()})
        onnx.save(model, tmp_path / "net.onnx")
        return OnnxModel(tmp_path / "net.onnx").card

    assert has_drawing(card(digits, 0.0))
    assert not has_drawing(card(tuple("abcdefghij"), 0.0))
    assert not has_drawing(card(digits, 200.0))  # a folder of digits, which may be on white
    assert not has_drawing(card(digits, 0.0, height=14))


def of_numbers(level: float) -> ModelCard:
    """The card of a regression whose intervals have a level."""
    return ModelCard(
        name="run",
        source="run",
        task="regression",
        input="rows",
        unit="1",
        num_samples=1,
        level=level,
        threshold=None,
        threshold_origin="",
    )


@pytest.mark.parametrize(
    ("level", "shown"),
    [(0.9, "90"), (0.905, "90.5"), (0.9505, "95.05"), (0.9005, "90.05"), (0.99999, "99.999")],
)
def test_the_heading_has_the_level_of_the_interval(level: float, shown: str) -> None:
    text, _ = page(of_numbers(level))
    assert f">{shown} % interval</h2>" in text
    assert "<p>Neural network with one set of weights, predicts" in text


def test_numbers_have_the_digits_that_their_uncertainty_needs() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node")
    card = of_numbers(0.9)
    text, _ = page(card)
    [function] = re.findall(r"^const digits = .*?^};$", text, re.MULTILINE | re.DOTALL)
    expected: dict[tuple[float, ...], str] = {
        (0.5871234,): "0.5871",
        (0.0,): "0",
        (101324.1936, 0.587): "101324.194",
        (62.123456, 10.6): "62.12",
        (-1700000005.25, 3600.0): "-1700000010",
        (1e-12, 5.0): "1e-12",
        (0.0, 2.0): "0",
        (0.0, 0.0): "0",
        (1234567.5, 0.0): "1234567.5",  # a column of one value
        (0.1, 1e-300): "0.1",
    }
    calls = ", ".join(f"digits({', '.join(map(repr, values))})" for values in expected)
    script = f"{function}\nconsole.log(JSON.stringify([{calls}]))"
    said = subprocess.run([node, "-e", script], capture_output=True, text=True, check=True)
    assert json.loads(said.stdout) == [*expected.values()]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program that uses the page in a browser."""
    pytest.importorskip("playwright", reason="needs Playwright")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    found = importlib.import_module("serve_page")
    if found.CHROMIUM is None:
        pytest.skip("needs Chromium")
    return found


@contextmanager
def opened(served: Any, run: Path) -> Iterator[Any]:
    """The page of a run in a browser, whose script must raise no error."""
    errors: list[str] = []
    with served.sync_playwright() as playwright, served.service(str(run)) as started:
        browser = playwright.chromium.launch(executable_path=served.CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(started["url"])
        yield page
        browser.close()
    assert not errors


@pytest.mark.slow
def test_a_field_holds_what_its_column_may_and_is_sent_as_it_is(
    served: Any, tmp_path: Path
) -> None:
    from playwright.sync_api import expect

    rows = [
        f"{'ab'[i % 2]};{i % 7};{i % 9 + 1}.234,5 EUR;{i * 37 % 11 or ''};"
        f"2024-05-{i % 28 + 1:02} {i % 24:02}:07;{i % 13}"
        for i in range(120)
    ]
    table = tmp_path / "t.csv"
    table.write_text("\n".join(["__proto__;value;price;v;ts;y", *rows]))
    options = ["--epochs", "2", "--passes", "2", "--hidden", "4", "--test-samples", "3"]
    assert bayesify("train", table, "--target", "y", "--out", tmp_path / "run", *options).code == 0
    with opened(served, tmp_path / "run") as page:
        answer, problem = page.locator("#answer"), page.locator("#problem")
        expect(answer).not_to_have_text(NOTHING)
        expect(page.locator("#row .field")).to_have_count(5)
        assert re.fullmatch(r"2024-05-\d\dT\d\d:\d\d", page.locator("[name=ts]").input_value())
        page.locator("[name=price]").fill("1.234")
        expect(problem).to_contain_text(
            "price: must be a number or null, or a text in the form of training"
        )
        expect(problem).to_contain_text("the unit 'EUR'")
        expect(answer).to_have_text(NOTHING)
        expect(page.locator("#total")).to_have_text(NOTHING)
        page.locator("[name=price]").fill("1.234 EUR")
        expect(problem).to_be_empty()
        expect(answer).not_to_have_text(NOTHING)
        page.locator("[name=v]").fill("")
        expect(answer).not_to_have_text(NOTHING)
        page.locator("[name=v]").press_sequentially("1e")
        expect(problem).to_have_text("v must be a number, or be left empty.")
        expect(answer).to_have_text(NOTHING)
        page.locator("#clear").click()
        expect(problem).to_be_empty()
        expect(answer).not_to_have_text(NOTHING)


@pytest.mark.slow
def test_an_answer_that_is_no_longer_asked_for_is_not_shown(
    served: Any, runs: dict[str, Path], tmp_path: Path
) -> None:
    from playwright.sync_api import expect

    held: list[Any] = []

    def hold(route: Any) -> None:
        held.append(route)

    def draw() -> None:
        page.locator("#drawing").click(position={"x": 90, "y": 90})

    nothing = tmp_path / "nothing.png"
    Image.new("LA", (28, 28), (0, 0)).save(nothing)
    with opened(served, runs["digits"]) as page:
        draw()
        expect(page.locator("#bars .name")).to_have_count(10)
        page.route("**/predict", hold)
        for status in (200, 422):
            with page.expect_request("**/predict"):
                draw()
            page.locator("#clear").click()
            if status == 200:
                held.pop().continue_()
            else:
                held.pop().fulfill(status=status, json={"detail": "late"})
            expect(page.locator("#results")).to_have_attribute("aria-busy", "false")
            for part in ("#answer", "#total", "#epistemic"):
                expect(page.locator(part)).to_have_text(NOTHING)
            expect(page.locator("#bars .name")).to_have_count(0)
            expect(page.locator("#votes")).to_be_empty()
            expect(page.locator("#problem")).to_be_empty()
        page.locator("#file").set_input_files(nothing)
        expect(page.locator("#problem")).to_contain_text("The image is empty")


@pytest.mark.slow
def test_the_page_answers_while_one_draws_and_types(
    served: Any, runs: dict[str, Path], tmp_path: Path
) -> None:
    digits = tmp_path / "digits"
    assert bayesify("train", "mnist", "--out", digits, *TRAINED).code == 0
    found = served.check([str(digits), str(runs["regression"])], tmp_path)
    assert set(found["images"]["digits"]) == set(served.DIGITS)
    names = ("serve-digit", "serve-scribble", "serve-row")
    assert {path.name for path in tmp_path.glob("*.png")} == {
        f"{name}-{width}.png" for name in names for width in served.WIDTHS
    }
