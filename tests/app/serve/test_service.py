"""The service: its endpoints, its answers, and requests that it must not answer."""

from __future__ import annotations

import asyncio
import base64
import codecs
import gzip
import io
import json
import math
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image
from tests.app.cli.test_cli import bayesify
from tests.app.cli.test_tables import QUICK
from tests.app.serve.conftest import Client
from torch import Tensor

from bayesify.app.runs import Run, RunError
from bayesify.app.runs.measure import in_units, predict_rows
from bayesify.app.serve.answers import ClassAnswers, NumberAnswers
from bayesify.app.serve.limits import ServiceLimits
from bayesify.app.serve.model import ModelCard
from bayesify.app.serve.openapi import example_request
from bayesify.app.serve.page import page
from bayesify.app.serve.requests import Examples, InputError, RequestError, read_limited
from bayesify.app.serve.run_model import RunModel
from bayesify.prediction import PoissonPredictive, Predictive
from bayesify.tabular.new_table import NewTable
from bayesify.tabular.outside import widened

KINDS = ("digits", "folder", "regression", "classification")
JSON = {"content-type": "application/json"}


def post(client: TestClient, body: Any) -> httpx.Response:
    """Post a body, which may hold what JSON has not: NaN."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post("/predict", content=content, headers=JSON)


def refused(response: httpx.Response, status: int, *parts: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    problem: dict[str, Any] = response.json()
    assert set(problem) == {"detail", "path"}
    assert "\n" not in problem["detail"]
    for part in parts:
        assert part in problem["detail"]
    return problem


# ------------------------------------------------------------------------------------- endpoints


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_of_openapi_is_answered(client: Client, kind: str) -> None:
    service = client(kind)
    spec = service.get("/openapi.json").json()
    operation = spec["paths"]["/predict"]["post"]
    body = operation["requestBody"]["content"]["application/json"]["examples"]["one"]["value"]
    response = post(service, body)
    assert response.status_code == 200, response.text
    card = service.get("/model").json()
    model = ClassAnswers if card["task"] == "classification" else NumberAnswers
    found = model.model_validate(response.json())
    assert set(response.json()) == set(model.model_fields)
    answer: Any = found.answers[0]
    assert 0.0 <= answer.epistemic <= answer.total + 1e-6
    assert answer.abstain == (answer.total > 1.0001 * card["threshold"])
    if isinstance(found, ClassAnswers):
        assert sum(answer.probabilities.values()) == pytest.approx(1.0, abs=1e-5)
        assert answer.prediction == max(answer.probabilities, key=answer.probabilities.get)
        assert sum(answer.votes.values()) == found.num_samples == 16
        assert answer.total <= math.log(len(card["classes"])) + 1e-6
    else:
        assert answer.lower < answer.prediction < answer.upper
        assert answer.std**2 == pytest.approx(answer.total)
        assert len(answer.votes) == 16
        assert found.level == 0.9


def test_probes_without_a_body_are_answered(client: Client) -> None:
    for path in ("/", "/health", "/model", "/metrics", "/openapi.json"):
        assert client("digits").head(path).status_code == 200
    assert client("digits").post("/health").headers["allow"] == "GET"


def test_rows_with_the_total_of_the_threshold_are_answered_in_any_number(tmp_path: Path) -> None:
    """Of three groups of equal rows, the totals differ by rounding with the size of a pass."""
    lines = [f"{'ABC'[i % 3]},{i % 3 + 0.01 * (i % 7)}" for i in range(300)]
    (tmp_path / "t.csv").write_text("\n".join(["k,y", *lines]))
    said = bayesify("train", tmp_path / "t.csv", "--target", "y", "--out", tmp_path / "r", *QUICK)
    assert said.code == 0, said.err
    run = Run.open(tmp_path / "r")
    rows = [{"k": each} for each in "ABC"]
    for coverage in (0.3, 0.6, 0.95):
        options = {"num_samples": 16, "level": 0.9, "coverage": coverage}
        served = RunModel(run, run.load_module(), **options)
        found = {
            bool(answer["abstain"])
            for size in (1, 2, 3, 64)
            for row in rows
            for answer in served.predict(served.read(Examples([row] * size)))
            if math.isclose(answer["total"], served.card.threshold or 0.0, rel_tol=1e-5)
        }
        assert found == {False}


def test_health_metrics_and_no_page_of_others(client: Client) -> None:
    service = client("digits")
    assert service.get("/health").json()["status"] == "ok"
    assert service.get("/docs").status_code == service.get("/redoc").status_code == 404
    assert service.get("/predict").status_code == 405
    post(service, {"examples": []})
    post(service, example_request(ModelCard(**service.get("/model").json())))
    metrics = service.get("/metrics").text
    for line in (
        'bayesify_requests_total{status="200"} 1.0',
        'bayesify_requests_total{status="422"} 1.0',
        "bayesify_examples_total 1.0",
        "bayesify_pass_examples_count 1.0",
        "bayesify_requests_in_progress 0.0",
        "process_resident_memory_bytes",
    ):
        assert line in metrics


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_needs_no_other_host(client: Client, kind: str) -> None:
    response = client(kind).get("/")
    assert response.headers["content-type"].startswith("text/html")
    links = re.findall(r"\b(?:src|href|action)=[\"']?([^\"'\s>]+)|url\(", response.text)
    assert set(links) == {"data:,", "openapi.json", "model", "health", "metrics"}
    assert re.findall(r"https?://[^\"'\s]+", response.text) == ["http://www.w3.org/2000/svg"]
    policy = response.headers["content-security-policy"]
    (nonce,) = re.findall(r"script-src 'nonce-([^']+)'", policy)
    assert response.text.count(f'nonce="{nonce}"') == 2
    assert policy.startswith("default-src 'none'")
    assert ('id="drawing"' in response.text) == (kind == "digits")


def test_a_name_cannot_leave_its_place_in_the_page(models: dict[str, RunModel]) -> None:
    text, _ = page(models["digits"].card.model_copy(update={"name": "</script><b>&"}))
    assert "<b>" not in text
    assert "&lt;b&gt;" in text


# --------------------------------------------------------------------------------------- answers


def expected_of(run: Run, rows: list[dict[str, Any]], tmp_path: Path) -> Predictive:
    """The predictions of the library for rows of a table, from many weight samples."""
    assert run.table is not None
    table = tmp_path / "new.csv"
    lines = [",".join(rows[0])]
    lines += [",".join("" if v is None else str(v) for v in row.values()) for row in rows]
    table.write_text("\n".join(lines) + "\n")
    (new,) = NewTable.open(table, run.table, lenient=True)
    target = run.table.target
    found = predict_rows(run.load_module(), new.inputs, new.distances, 2000, target.marginal)
    return in_units(found, target.shift, target.scale)


ROWS = [
    {"city": "Rome", "size": 0.3, "sold": "yes", "when": "2024-05-05"},
    {"city": "Nowhere", "size": None, "sold": "no", "when": "2024-03-07"},
    {"city": "Ulm", "size": 50.0, "sold": "no", "when": "2024-09-01"},
]


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_rows_are_answered_as_the_library_predicts(
    runs: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    run = Run.open(runs[kind])
    model = RunModel(run, run.load_module(), num_samples=2000, level=0.9, coverage=0.95)
    expected = expected_of(run, ROWS, tmp_path)

    def error(rows: list[dict[str, Any]]) -> float:
        """The largest difference of means, in standard deviations or as a probability."""
        answers = model.predict(model.read(Examples(rows)))
        if kind == "classification":
            found = torch.tensor([list(each["probabilities"].values()) for each in answers])
            return float((found - expected.mean).abs().max())
        means = torch.tensor([each["prediction"] for each in answers], dtype=torch.float64)
        stds = torch.tensor([each["std"] for each in answers], dtype=torch.float64)
        scale = expected.total.sqrt().flatten()
        differences = (means - expected.mean.flatten()).abs() / scale
        return float(torch.maximum(differences, (stds / scale - 1.0).abs()).max())

    assert error(ROWS) < 0.05
    assert error(ROWS[1:] + ROWS[:1]) > 0.05  # the answers of other rows
    answers = model.predict(model.read(Examples(ROWS)))
    assert [each["outside"] for each in answers] == ["", "city", "size"]


def test_images_are_answered_as_the_library_predicts(runs: dict[str, Path]) -> None:
    run = Run.open(runs["digits"])
    bnn = run.load_module()
    model = RunModel(run, bnn, num_samples=500, level=0.9, coverage=0.95)
    inputs = run.load_data().test_inputs[:3]
    pixels = (126.0 * inputs).round().reshape(3, 28, 28).numpy()
    expected = bnn.predict(inputs, 500)

    def error(images: Any, **more: str) -> float:
        answers = model.predict(model.read(Examples(images, **more)))
        found = torch.tensor([list(each["probabilities"].values()) for each in answers])
        totals = torch.tensor([each["total"] for each in answers])
        differences = (found - expected.mean).abs().amax(-1)
        return float(torch.maximum(differences, (totals - expected.total).abs()).max())

    files = []
    for each in pixels:
        file = io.BytesIO()
        Image.fromarray(each.astype(np.uint8)).save(file, "PNG")
        files.append(base64.b64encode(file.getvalue()).decode())
    assert error(pixels.tolist()) < 0.02
    assert error((pixels / 255.0).tolist(), pixels="0-1") < 0.02
    assert error(files) < 0.02
    assert error([f"data:image/png;base64,{each}" for each in files]) < 0.02
    deep = []
    for each in pixels:
        file = io.BytesIO()
        Image.fromarray(each.astype(np.uint16) * 257).save(file, "PNG")
        deep.append(base64.b64encode(file.getvalue()).decode())
    of_bytes, of_words = (model.read(Examples(each)) for each in (files, deep))
    for name in of_bytes:  # of 16 bits
        np.testing.assert_array_equal(of_words[name], of_bytes[name])
    assert error(pixels[::-1].tolist()) > 0.02  # other images


def test_a_palette_that_is_missing_is_told(client: Client) -> None:
    file = io.BytesIO()
    Image.new("P", (28, 28)).save(file, "PNG")
    content = file.getvalue()
    start = content.index(b"PLTE") - 4
    length = int.from_bytes(content[start : start + 4], "big")
    without = content[:start] + content[start + 12 + length :]
    example = base64.b64encode(without).decode()
    refused(post(client("digits"), {"examples": [example]}), 422, "the image cannot be read")


def test_a_folder_of_images_takes_files_of_any_size(client: Client) -> None:
    file = io.BytesIO()
    Image.new("RGB", (50, 30), "red").save(file, "JPEG")
    response = post(client("folder"), {"examples": [base64.b64encode(file.getvalue()).decode()]})
    assert response.status_code == 200, response.text
    assert set(response.json()["answers"][0]["probabilities"]) == {"bars", "dots", "grey"}


def test_the_threshold_is_that_of_held_out_examples(runs: dict[str, Path]) -> None:
    run = Run.open(runs["digits"])
    bnn = run.load_module()

    def answered(coverage: float) -> float:
        model = RunModel(run, bnn, num_samples=16, level=0.9, coverage=coverage)
        images = (run.load_data().test_inputs[:500] * 126.0).reshape(-1, 28, 28)
        answers = model.predict(model.read(Examples(images.round().tolist())))
        return 1.0 - float(np.mean([each["abstain"] for each in answers]))

    assert answered(0.9) == pytest.approx(0.9, abs=0.05)
    assert answered(0.5) == pytest.approx(0.5, abs=0.05)


def test_without_held_out_data_nothing_is_abstained_from(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(self: Run) -> None:
        raise RunError("the table is gone")

    monkeypatch.setattr(Run, "load_data", missing)
    run = Run.open(runs["digits"])
    model = RunModel(run, run.load_module(), num_samples=2, level=0.9, coverage=0.9)
    assert model.card.threshold is None
    assert "the table is gone" in model.card.threshold_origin
    answers = model.predict(model.read(Examples([np.zeros((28, 28)).tolist()])))
    assert answers[0]["abstain"] is None


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"level": 1.0}, "level must lie strictly between 0 and 1"),
        ({"coverage": math.nan}, "coverage must lie strictly between 0 and 1"),
        ({"num_samples": 0}, "samples must be at least 1"),
    ],
)
def test_numbers_out_of_range(runs: dict[str, Path], numbers: dict[str, Any], message: str) -> None:
    run = Run.open(runs["digits"])
    usual = {"num_samples": 2, "level": 0.9, "coverage": 0.9}
    with pytest.raises(RunError, match=message):
        RunModel(run, run.load_module(), **(usual | numbers))


# ------------------------------------------------------------------------------------ wrong input

BLANK = np.zeros((28, 28)).tolist()


def with_pixel(value: Any) -> list[Any]:
    return [[value if (r, c) == (2, 3) else 0 for c in range(28)] for r in range(28)]


WRONG_BODIES = {
    b"": "the body must be JSON",
    b"{": "the body must be JSON",
    b"\xff\xfe": "the body must be JSON",
    b"[" * 100_000: "the body must be JSON",
    b"[]": "the body must be an object, got an empty list",
    b"NaN": "the body must be an object, got NaN",
    b"{}": "examples: is missing",
    b'{"examples": []}': "examples: must be a list of at least one example, got an empty list",
    b'{"examples": {}}': "got an object",
    b'{"examples": null}': "got null",
    b'{"examples": [1], "seed": 1}': "seed: is unknown",
    b'{"examples": [1], "pixels": "0-2"}': 'pixels: must be "0-255" or "0-1", got "0-2"',
}
WRONG_IMAGES = {
    "number": (3, "examples[0]: must be a list of 28 x 28 pixels, got 3"),
    "rows": (BLANK[1:], "must be a list of 28 x 28 pixels, got a list of 27"),
    "columns": ([*BLANK[1:], [0]], "examples[0][27]: must be a list of 28 pixels, got a list of 1"),
    "nan": (with_pixel(math.nan), "examples[0][2][3]: a pixel must be a finite number, got NaN"),
    "inf": (with_pixel(math.inf), "examples[0][2][3]"),
    "huge": (with_pixel(10**400), "examples[0][2][3]"),
    "text": (with_pixel("7"), 'examples[0][2][3]: must be a number, got "7"'),
    "true": (with_pixel(True), "got true"),
    "null": (with_pixel(None), "got null"),
    "negative": (with_pixel(-1), "a pixel must lie from 0 to 255, got -1"),
    "large": (with_pixel(256), "a pixel must lie from 0 to 255, got 256"),
    "0 to 1": (with_pixel(0.5), 'for pixels from 0 to 1 add "pixels": "0-1"'),
    "no base64": ("!", "must be an image file in base64"),
    "no image": ("aGVsbG8=", "must be an image as PNG or JPEG in base64"),
}


@pytest.mark.parametrize("body", WRONG_BODIES)
def test_wrong_bodies(client: Client, body: bytes) -> None:
    refused(post(client("digits"), body), 422, WRONG_BODIES[body])


@pytest.mark.parametrize("case", WRONG_IMAGES)
def test_wrong_images(client: Client, case: str) -> None:
    image, message = WRONG_IMAGES[case]
    problem = refused(post(client("digits"), {"examples": [image]}), 422, message)
    assert problem["path"][:2] == ["examples", 0]


def test_almost_black_images_of_named_pixels_are_read(models: dict[str, RunModel]) -> None:
    named = models["digits"].read(Examples([with_pixel(1)], "0-255"))["inputs"]
    assert named.max() == pytest.approx(1.0 / 126.0)
    bright = models["digits"].read(Examples([with_pixel(1)], "0-1"))["inputs"]
    assert bright.max() == pytest.approx(255.0 / 126.0)
    with pytest.raises(InputError, match='for almost black images "pixels": "0-255"'):
        models["digits"].read(Examples([with_pixel(1)]))


def encoded(size: tuple[int, int], kind: str) -> str:
    file = io.BytesIO()
    Image.new("1", size).save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


def test_wrong_image_files(client: Client) -> None:
    service = client("digits")
    refused(post(service, {"examples": [encoded((27, 28), "PNG")]}), 422, "28 x 28 pixels, got 27")
    refused(post(service, {"examples": [encoded((28, 28), "BMP")]}), 422, "PNG or JPEG")
    cut = encoded((28, 28), "PNG")[:-40] + "="
    refused(post(service, {"examples": [cut]}), 422)
    seen_through = io.BytesIO()
    Image.new("LA", (28, 28), (255, 100)).save(seen_through, "PNG")
    example = base64.b64encode(seen_through.getvalue()).decode()
    refused(post(service, {"examples": [example]}), 422, "must not be transparent")
    # 36 million pixels in a few kilobytes.
    bomb = encoded((6000, 6000), "PNG")
    refused(post(client("folder"), {"examples": [bomb]}), 422, "at most 16,777,216 pixels")


def test_the_images_of_a_request_have_a_limit_together(client: Client) -> None:
    large = encoded((4096, 4096), "PNG")
    service = client("folder", max_body_mb=4.0)
    problem = refused(post(service, {"examples": [large] * 5}), 422, "67,108,864 pixels together")
    assert problem["path"] == ["examples", 4]
    assert post(service, {"examples": [encoded((2048, 2048), "PNG")] * 2}).status_code == 200


WRONG_CELLS = {
    "size": ["much", True, [1], {}, math.nan, math.inf, 10**400, "inf"],
    "sold": ["perhaps", 2, [1], math.nan],
    "when": ["soon", 20240101, True, "2024-13-01"],
    "city": [["Rome"], {}, math.nan],
}


@pytest.mark.parametrize("name", WRONG_CELLS)
def test_wrong_cells_are_named(client: Client, name: str) -> None:
    service = client("regression")
    for value in WRONG_CELLS[name]:
        body = {"examples": [ROWS[0], {**ROWS[0], name: value}]}
        problem = refused(post(service, body), 422, f"examples[1].{name}: must be")
        assert problem["path"] == ["examples", 1, name]


def test_missing_and_unknown_columns_are_named(client: Client) -> None:
    service = client("regression")
    row = {name: value for name, value in ROWS[0].items() if name != "size"}
    refused(post(service, {"examples": [row]}), 422, "examples[0].size: is missing; add it")
    refused(post(service, {"examples": [{**ROWS[0], "x": 1}]}), 422, "examples[0].x: the training")
    refused(post(service, {"examples": [[1, 2]]}), 422, "examples[0]: must be an object")
    refused(post(service, {"examples": ROWS, "pixels": "0-1"}), 422, "pixels: is for images")
    # Columns that are not used may be there.
    assert post(service, {"examples": [{**ROWS[0], "price": 3, "id": None}]}).status_code == 200
    problem = refused(post(service, {"examples": [{**ROWS[0], "a\nb" + 99 * "c": 1}]}), 422)
    assert problem["path"] == ["examples", 0, "a\nb" + 99 * "c"]
    assert problem["detail"].startswith(f"examples[0].a b{37 * 'c'}...: the training table had no")
    problem = refused(post(service, {"examples": [{**ROWS[0], "\n": 1}]}), 422)
    assert "\n" not in problem["detail"]


def test_forms_of_a_cell_that_mean_the_same(models: dict[str, RunModel]) -> None:
    def answers(**cells: Any) -> list[dict[str, Any]]:
        model = models["regression"]
        return model.predict(model.read(Examples([{**ROWS[0], **cells}])))

    usual = answers()
    for cells in (
        {"size": "0.3"},
        {"sold": True},
        {"sold": " YES "},
        {"sold": "true"},
        {"sold": 1},
    ):
        assert answers(**cells) == usual
    assert answers(size=None) == answers(size="") == answers(size="NA") != usual
    assert answers(sold=False) == answers(sold="no") != usual


# ----------------------------------------------------------------------------------------- limits


def test_too_large_bodies(client: Client) -> None:
    service = client("regression", max_body_mb=0.01, max_examples=5)
    # 1 GB that is only announced is not read.
    headers = {**JSON, "content-length": "1000000000"}
    response = service.post("/predict", content=b"{}", headers=headers)
    refused(response, 413, "at most 10,000 bytes", "--max-body-mb")
    assert response.headers["connection"] == "close"
    chunks = (b" " * 1000 for _ in range(100))  # of no announced length
    refused(service.post("/predict", content=chunks, headers=JSON), 413)
    refused(post(service, {"examples": ROWS * 2}), 422, "at most 5 examples, got 6")


def test_a_body_without_a_length_is_read_up_to_the_limit() -> None:
    read = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 1
            yield b" " * 1000

    with pytest.raises(RequestError, match="at most 10,000 bytes"):
        asyncio.run(read_limited(chunks(), None, 10_000))
    assert read == 11


def test_a_million_rows(client: Client) -> None:
    body = b'{"examples": [' + b"{}," * 999_999 + b"{}]}"
    refused(post(client("regression"), body), 422, "at most 1,000 examples, got 1,000,000")
    refused(post(client("regression", max_body_mb=1), body), 413)


def test_other_types_of_content(client: Client) -> None:
    service = client("digits")
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        response = service.post("/predict", content=b"{}", headers={"content-type": kind})
        refused(response, 415, "Content-Type must be application/json")
    compressed = {**JSON, "content-encoding": "gzip"}
    response = service.post("/predict", content=gzip.compress(b"{}"), headers=compressed)
    refused(response, 415, 'must not be compressed, got the header Content-Encoding with "gzip"')


def test_a_body_may_begin_with_the_mark_of_utf_8(client: Client) -> None:
    service = client("regression")
    body = example_request(ModelCard(**service.get("/model").json()))
    assert post(service, codecs.BOM_UTF8 + json.dumps(body).encode()).status_code == 200
    refused(post(service, json.dumps(body).encode("utf-16")), 422, "the body must be JSON in UTF-8")


def test_a_number_is_as_large_in_json_as_in_a_text(client: Client) -> None:
    service = client("regression")
    card = ModelCard(**service.get("/model").json())
    [name] = [column.name for column in card.columns if column.kind == "number"]
    row = example_request(card)["examples"][0]
    bodies = [{"examples": [row | {name: value}]} for value in (1e305, "1e305", 10**309)]
    number, text, larger = (post(service, body) for body in bodies)
    assert number.json() == text.json()
    assert number.status_code == text.status_code
    refused(larger, 422, "must be a finite number, got infinity or a number too large")


@pytest.mark.parametrize("name", ["max_batch", "max_examples", "max_body_mb", "queue", "timeout_s"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_limits_must_be_positive(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name.replace('_', '-')} must be at least"):
        ServiceLimits(**{name: value})


def test_a_count_that_is_nan_is_an_error_of_its_example() -> None:
    class OfCounts(RunModel):
        def __init__(self) -> None:
            self._table, self._level, self.card = None, 0.9, Mock(threshold=None)
            self._num_samples = 1

        def _predictive(self, inputs: Tensor, distances: Tensor | None) -> Predictive:
            assert distances is None
            return PoissonPredictive(inputs.unsqueeze(0))

    (answer,) = OfCounts().predict({"inputs": np.zeros((1, 1))})
    assert answer["prediction"] == 1.0
    with pytest.raises(InputError, match="a prediction must be finite") as caught:
        OfCounts().predict({"inputs": np.array([[0.0], [np.nan]])})
    assert caught.value.path == ("examples", 1)


def test_the_votes_of_a_count_do_not_depend_on_other_rows() -> None:
    class OfCounts(RunModel):
        """Four weight samples of rows that lie as far outside as their number tells."""

        def __init__(self) -> None:
            self._level, self._num_samples, self.card = 0.9, 4, Mock(threshold=None)
            self._table = Mock(
                encode=lambda batch: (batch["x"], batch["x"], [""] * len(batch["x"]))
            )

        def _predictive(self, inputs: Tensor, distances: Tensor | None) -> Predictive:
            assert distances is not None
            rates = torch.tensor([0.1, 0.4, 0.2, 0.3]).reshape(4, 1, 1).expand(4, len(inputs), 1)
            return widened(PoissonPredictive(rates), distances, torch.tensor(0.5))

    (alone,) = OfCounts().predict({"x": torch.tensor([0.0])})
    near, far = OfCounts().predict({"x": torch.tensor([0.0, 9.0])})
    assert near["votes"] == alone["votes"]
    assert np.mean(far["votes"]) == pytest.approx(far["prediction"], rel=1e-5)
    assert len(near["votes"]) == len(far["votes"]) == 4
    assert far["votes"] != near["votes"]
    for name in ("prediction", "total", "epistemic", "lower", "upper"):
        assert near[name] == pytest.approx(alone[name], rel=1e-5)
