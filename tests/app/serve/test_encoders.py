"""The service of runs whose texts or images a pretrained encoder reads."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from tests.app.cli.test_cli import as_json, bayesify, quick_runs, rows_of
from tests.app.cli.test_errors import check_refused
from tests.app.cli.test_folders import CLASSES, write_images
from tests.app.cli.test_image_tables import write_rows
from tests.app.cli.test_texts import write_table
from tests.app.serve.conftest import Client
from tests.app.serve.test_serve_command import serving
from tests.app.serve.test_service import post, refused
from tests.encoders import save_encoder, save_image_encoder

from bayesify.app.runs import Run
from bayesify.app.serve.limits import ServiceLimits
from bayesify.app.serve.run_model import RunModel
from bayesify.app.serve.service import make_app
from bayesify.tabular.image_encoder import ImageEncoder
from bayesify.tabular.text_encoder import TextEncoder

pytestmark = pytest.mark.filterwarnings("ignore:.*SwigPy|.*swigvarlink:DeprecationWarning")
QUICK = ("--epochs", "3", "--hidden", "8", "--batch-size", "16")
KINDS = ("texts", "adapter", "folder", "pictures")
LONG = " ".join(["word1"] * 300)
#: Rows with a text that is longer than what is read, and one that is missing.
TEXTS: list[dict[str, Any]] = [
    {"query": "word1 word30 word35", "hour": 3, "device": "car"},
    {"query": LONG, "hour": 5, "device": "phone"},
    {"query": None, "hour": 900, "device": "car"},
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of texts, of an adapter, of a folder of images and of a table with images."""
    place = tmp_path_factory.mktemp("encoders")
    save_encoder(place / "words")
    save_image_encoder(place / "eyes")
    write_table(place / "texts.csv")
    write_images(place / "photos", 12)
    rows = [
        [f"photos/{name}/{number}.png", str(10 * kind + number)]
        for kind, name in enumerate(CLASSES)
        for number in range(12)
        if number not in (3, 4)
    ]
    write_rows(place / "photos.csv", [["", "4"], *rows], "path,weight")
    texts = ("texts.csv", "--target", "intent", "--text", "query", "--encoder", place / "words")
    data: dict[str, tuple[Any, ...]] = {
        "texts": texts,
        "adapter": (*texts, "--adapter", "--adapter-rank", "2"),
        "folder": ("photos", "--encoder", place / "eyes"),
        "pictures": (
            "photos.csv",
            "--target",
            "weight",
            "--task",
            "regression",
            "--image",
            "path",
            "--encoder",
            place / "eyes",
        ),
    }
    with quick_runs():
        for kind, (source, *more) in data.items():
            said = bayesify("train", place / source, *more, *QUICK, "--out", place / kind)
            assert said.code == 0, said.err
    return place


@pytest.fixture(scope="module")
def models(place: Path) -> dict[str, RunModel]:
    runs = {kind: Run.open(place / kind) for kind in KINDS}
    options: dict[str, Any] = {"num_samples": 16, "level": 0.9, "coverage": 0.95}
    return {kind: RunModel(run, run.load_module(), **options) for kind, run in runs.items()}


def in_base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def new_examples(kind: str, place: Path, tmp_path: Path) -> tuple[Path, list[Any]]:
    """New examples as a file for ``bayesify predict`` and as JSON for the service."""
    checks = np.indices((16, 16)).sum(0) % 2 * 255
    photos = place / "photos"
    if kind == "folder":
        folder = tmp_path / "new"
        folder.mkdir()
        Image.fromarray(checks.astype(np.uint8)).save(folder / "a.png")
        shutil.copy(photos / "dots" / "4.JPG", folder / "b.jpg")
        Image.open(photos / "bars" / "1.png").resize((50, 30)).save(folder / "c.png")
        return folder, [in_base64(each) for each in sorted(folder.iterdir())]
    if kind == "pictures":
        Image.fromarray(checks.astype(np.uint8)).save(tmp_path / "checks.png")
        paths = [photos / "dots" / "0.png", None, tmp_path / "checks.png", photos / "bars/4.JPG"]
        rows = [["" if path is None else str(path), str(3 * n)] for n, path in enumerate(paths)]
        table = write_rows(tmp_path / "new.csv", rows, "path,weight")
        return table, [{"path": None if path is None else in_base64(path)} for path in paths]
    rows = [["" if cell is None else str(cell) for cell in row.values()] for row in TEXTS]
    return write_rows(tmp_path / "new.csv", rows, "query,hour,device"), TEXTS


# --------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_predict(
    kind: str, place: Path, client: Client, tmp_path: Path
) -> None:
    source, examples = new_examples(kind, place, tmp_path)
    level = ("--level", "0.9") if kind == "pictures" else ()
    options = ("--samples", "16", *level, "--out", tmp_path / "p.csv")
    as_json("predict", place / kind, source, *options)
    expected = rows_of(tmp_path / "p.csv")
    response = post(client(kind), {"examples": examples})
    assert response.status_code == 200, response.text
    answers = response.json()["answers"]
    assert len(answers) == len(expected) == len(examples)
    for answer, row in zip(answers, expected, strict=True):
        numbers = {name: answer[name] for name in ("total", "epistemic")}
        if kind == "pictures":
            numbers |= {name: answer[name] for name in ("std",)}
            numbers["mean"] = answer["prediction"]
            numbers |= {f"{end}_90": answer[end] for end in ("lower", "upper")}
        else:
            numbers |= {f"p({name})": p for name, p in answer["probabilities"].items()}
            assert answer["prediction"] == row["prediction"]
        for name, value in numbers.items():
            assert value == pytest.approx(float(row[name]), rel=1e-5, abs=1e-5), name
        assert answer["outside"] == row["outside_column"]
    # What is compared differs from example to example.
    assert len({answer["total"] for answer in answers}) == len(answers)
    assert any(answer["outside"] for answer in answers)


@pytest.mark.parametrize("kind", KINDS)
def test_an_example_alone_is_answered_as_among_others(
    kind: str, place: Path, client: Client, tmp_path: Path
) -> None:
    _, examples = new_examples(kind, place, tmp_path)
    service = client(kind)
    together = post(service, {"examples": examples}).json()["answers"]
    for example, answer in zip(examples, together, strict=True):
        (alone,) = post(service, {"examples": [example]}).json()["answers"]
        assert alone["total"] == pytest.approx(answer["total"], rel=1e-5, abs=1e-5)
        assert alone["outside"] == answer["outside"]


@pytest.mark.parametrize("kind", ["texts", "adapter"])
def test_a_long_text_is_cut_off_as_in_training(kind: str, client: Client) -> None:
    service = client(kind)
    longest = {"texts": 256, "adapter": 5}[kind]  # the longest training text and its two ends
    (column,) = (
        each for each in service.get("/model").json()["columns"] if each["name"] == "query"
    )
    assert (column["kind"], column["longest"]) == ("text", longest)
    spec = service.get("/openapi.json").json()["paths"]["/predict"]["post"]["requestBody"]
    row = spec["content"]["application/json"]["schema"]["properties"]["examples"]["items"]
    assert f"Its first {longest} tokens are read" in row["properties"]["query"]["description"]
    words = ["word1"] * (longest - 2)
    texts = [words, [*words, "word11"], [*words[:-1], "word11"]]
    rows = [{**TEXTS[0], "query": " ".join(text)} for text in texts]
    cut, long, other = (
        answer["probabilities"] for answer in post(service, {"examples": rows}).json()["answers"]
    )
    assert long == pytest.approx(cut, abs=1e-6)
    assert other != pytest.approx(cut, abs=1e-6)


def test_texts_of_several_requests_are_encoded_together(
    models: dict[str, RunModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    features = TextEncoder.features

    def counted(self: TextEncoder, texts: list[str]) -> Any:
        asked.append(len(texts))
        return features(self, texts)

    monkeypatch.setattr(TextEncoder, "features", counted)

    async def ask() -> list[httpx.Response]:
        app = make_app(models["texts"], ServiceLimits(batch_wait_ms=200))
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://service") as client,
        ):
            bodies = [
                {"examples": [{**TEXTS[0], "query": f"word1 word{30 + n}"}]} for n in range(4)
            ]
            return await asyncio.gather(*(client.post("/predict", json=body) for body in bodies))

    responses = asyncio.run(ask())
    assert [each.status_code for each in responses] == [200] * 4
    assert asked == [4]


# --------------------------------------------------------------------------------- endpoints, page


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_of_openapi_is_answered(client: Client, kind: str) -> None:
    service = client(kind)
    spec = service.get("/openapi.json").json()["paths"]["/predict"]["post"]["requestBody"]
    body = spec["content"]["application/json"]["examples"]["one"]["value"]
    response = post(service, body)
    assert response.status_code == 200, response.text
    (answer,) = response.json()["answers"]
    assert answer["abstain"] == (answer["total"] > response.json()["threshold"])
    assert "bayesify_examples_total 1.0" in service.get("/metrics").text


def test_a_folder_takes_images_and_a_table_takes_rows(client: Client) -> None:
    cards = {kind: client(kind).get("/model").json() for kind in KINDS}
    assert {kind: card["input"] for kind, card in cards.items()} == {
        "texts": "rows",
        "adapter": "rows",
        "folder": "images",
        "pictures": "rows",
    }
    assert (cards["folder"]["columns"], cards["folder"]["any_size"]) == ([], True)
    assert [(c["name"], c["kind"]) for c in cards["pictures"]["columns"]] == [("path", "image")]
    spec = client("folder").get("/openapi.json").json()["paths"]["/predict"]["post"]
    schema = spec["requestBody"]["content"]["application/json"]["schema"]
    assert set(schema["properties"]) == {"examples"}  # no range of pixels in nested lists


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_is_for_its_inputs(client: Client, kind: str) -> None:
    text = client(kind).get("/").text
    assert ('<h2 id="input-heading">Open an image</h2>' in text) == (kind == "folder")
    assert ('<form id="row"' in text) == (kind != "folder")


# ------------------------------------------------------------------------------------ wrong input


def test_wrong_texts_are_named(client: Client) -> None:
    service = client("texts")
    for value in (3, True, ["word1"], {}):
        body = {"examples": [TEXTS[0], {**TEXTS[0], "query": value}]}
        problem = refused(post(service, body), 422, "examples[1].query: must be a text or null")
        assert problem["path"] == ["examples", 1, "query"]
    row = {"hour": 3, "device": "car"}
    refused(post(service, {"examples": [row]}), 422, "examples[0].query: is missing; add it")
    # A half of a character that JSON cannot write.
    body = json.dumps({"examples": [{**TEXTS[0], "query": "word1 \ud83d"}]}).encode()
    refused(post(service, body), 422)
    for text in ("\x00", "\u202e", "\U0001f600" * 500, " " * 5000):
        response = post(service, {"examples": [{**TEXTS[0], "query": text}]})
        assert response.status_code == 200, response.text


def test_wrong_images_are_named(client: Client, place: Path) -> None:
    fine = in_base64(place / "photos" / "dots" / "0.png")
    grey = io.BytesIO()
    Image.new("L", (6000, 6000)).save(grey, "PNG")
    gif = io.BytesIO()
    Image.new("L", (8, 8)).save(gif, "GIF")
    wrong = {
        3: "must be an image file in base64, got 3",
        str(place / "photos" / "dots" / "0.png"): "must be an image file in base64",
        "aGVsbG8=": "must be an image as PNG or JPEG in base64",
        base64.b64encode(gif.getvalue()).decode(): "must be an image as PNG or JPEG in base64",
        fine[: 4 * (len(fine) // 8)]: "cannot be read as an image",
        base64.b64encode(grey.getvalue()).decode(): "at most 16,777,216 pixels",
    }
    folder, table = client("folder"), client("pictures")
    for value, message in wrong.items():
        problem = refused(post(folder, {"examples": [fine, value]}), 422, message)
        assert problem["path"] == ["examples", 1]
        body = {"examples": [{"path": fine}, {"path": value}]}
        problem = refused(post(table, body), 422, message)
        assert problem["path"] == ["examples", 1, "path"]
    refused(post(folder, {"examples": [None]}), 422, "must be an image file in base64, got null")
    pixels = np.zeros((16, 16)).tolist()
    refused(post(folder, {"examples": [pixels]}), 422, "in base64, got a list of 16")


def test_many_large_images_are_not_held_at_once(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.BytesIO()
    Image.new("L", (4000, 4000)).save(file, "PNG")
    seen: list[int] = []
    features = ImageEncoder.features

    def counted(self: ImageEncoder, images: list[Any]) -> Any:
        seen.append(len(images))
        return features(self, images)

    monkeypatch.setattr(ImageEncoder, "features", counted)
    large = base64.b64encode(file.getvalue()).decode()
    small = io.BytesIO()
    Image.new("L", (9, 9)).save(small, "PNG")
    some = base64.b64encode(small.getvalue()).decode()
    response = post(client("folder"), {"examples": [large, large, *[some] * 20]})
    assert response.status_code == 200, response.text
    assert seen == [1, 16, 5]


# -------------------------------------------------------------------------------------- at start


@pytest.mark.parametrize("kind", KINDS)
def test_an_encoder_that_is_gone_or_changed_is_one_line(
    kind: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A service that starts all the same ends at once.
    monkeypatch.setattr("bayesify.app.serve.running.run", lambda *_, **__: None)
    run = Path(shutil.copytree(place / kind, tmp_path / "run"))
    own = place / ("words" if kind in ("texts", "adapter") else "eyes")
    stored = {name: (run / name).read_text() for name in ("config.json", "table.json")}

    def use(other: Path) -> None:
        for name, text in stored.items():
            (run / name).write_text(text.replace(str(own), str(other)))

    use(tmp_path / "gone")
    said = bayesify("serve", run, "--port", "0")
    check_refused(said, f"the encoder {tmp_path / 'gone'} must be the folder", "no such folder")
    save = save_encoder if own.name == "words" else save_image_encoder
    use(save(tmp_path / "other", seed=1))
    said = bayesify("serve", run, "--port", "0")
    check_refused(said, f"the encoder {tmp_path / 'other'} must have the weights of the training")


@pytest.mark.parametrize(("kind", "samples"), [("texts", 32), ("adapter", 10)])
def test_an_adapter_has_as_many_weight_samples_as_in_training(
    kind: str, samples: int, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(app: object, listening: object, *, timeout_s: float, on_start: Any) -> None:
        del app, listening, timeout_s
        on_start()

    monkeypatch.setattr("bayesify.app.serve.running.run", run)
    assert as_json("serve", place / kind, "--port", "0")["model"]["num_samples"] == samples


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_process_answers_as_the_application_does(
    kind: str, client: Client, place: Path, tmp_path: Path
) -> None:
    _, examples = new_examples(kind, place, tmp_path)
    wanted = post(client(kind), {"examples": examples}).json()
    level = ("--level", "0.9") if kind == "pictures" else ()
    options = ("--samples", "16", *level, "--coverage", "0.95")
    with serving(place / kind, *options) as service:
        assert service.ask(examples).json() == wanted
