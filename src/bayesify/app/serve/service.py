"""The service as an ASGI application: predictions, health, metrics, and the page."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

import bayesify
from bayesify.app.serve.answers import ClassAnswers, NumberAnswers
from bayesify.app.serve.limits import ServiceLimits
from bayesify.app.serve.micro_batches import MicroBatcher
from bayesify.app.serve.model import Batch, ModelCard, ServedModel
from bayesify.app.serve.openapi import request_body
from bayesify.app.serve.page import page
from bayesify.app.serve.requests import (
    InputError,
    RequestError,
    described,
    parse_examples,
    read_limited,
)
from bayesify.app.serve.telemetry import CONTENT_TYPE, Telemetry

__all__ = ["make_app"]


class Health(BaseModel):
    """The state of the service."""

    status: str
    version: str


class Problem(BaseModel):
    """A request that is not answered, with one line on why."""

    detail: str
    #: Where the wrong value is, such as ["examples", 0, "age"].
    path: list[str | int] = []


#: A browser then takes no answer for a page or a script.
_NO_SNIFFING = {"X-Content-Type-Options": "nosniff"}
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": text}
    for status, text in {
        408: "The body did not arrive in time.",
        413: "The body is too large.",
        415: "The body is not JSON, or is compressed.",
        422: "A value is wrong; path tells which.",
        503: "Too many requests wait; Retry-After tells when to come again.",
        504: "The answer took too long.",
    }.items()
}


def make_app(model: ServedModel, limits: ServiceLimits) -> FastAPI:
    """Return the application that serves a model.

    Args:
        model: the model.
        limits: its limits.

    Example:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from fastapi.testclient import TestClient
        >>> from bayesify.app.serve.onnx_model import OnnxModel
        >>> from bayesify.export import ExportMetadata, export_onnx
        >>> bnn = bayesify.BayesianModule(torch.nn.Linear(4, 2), seed=0)
        >>> shape = {"kind": "image", "image_shape": [1, 2, 2], "shape": [4], "pixels": [0, 255]}
        >>> about = ExportMetadata(
        ...     "classification",
        ...     num_samples=8,
        ...     classes=("dark", "light"),
        ...     input={**shape, "shift": [0.0], "scale": [255.0]},
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "net.onnx")
        ...     _ = export_onnx(bayesify.freeze(bnn, 8), path, torch.zeros(2, 4), metadata=about)
        ...     with TestClient(make_app(OnnxModel(path), ServiceLimits())) as client:
        ...         answer = client.post("/predict", json={"examples": [[[0, 255], [9, 3]]]})
        >>> answer.status_code
        200
    """
    card = model.card
    telemetry = Telemetry()
    batcher = MicroBatcher(
        model.predict,
        max_examples=limits.max_batch,
        wait_s=limits.batch_wait_ms / 1e3,
        on_pass=telemetry.on_pass,
    )
    # One body at a time becomes Python objects, which need much more memory than its bytes.
    reader = ThreadPoolExecutor(1, "bayesify-reader")
    admission = _Admission(limits.queue, telemetry)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()
        reader.shutdown(wait=False)

    app = FastAPI(
        title=f"bayesify: {card.name}",
        version=bayesify.__version__,
        description="Predictions with uncertainty by a Bayesian neural network.",
        lifespan=lifespan,
        docs_url=None,  # Swagger's page loads scripts from another host
        redoc_url=None,
    )

    def batch_of(body: bytes) -> Batch:
        return model.read(parse_examples(body, most=limits.max_examples))

    async def answers_to(request: Request) -> list[dict[str, Any]]:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestError(415, "the header Content-Type must be application/json")
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise RequestError(
                415,
                "the body must not be compressed, got the header Content-Encoding with "
                f"{described(encoding)}; send it as it is",
            )
        stage = 408, "the body must arrive"
        try:
            async with asyncio.timeout(limits.timeout_s):
                length = request.headers.get("content-length")
                body = await read_limited(request.stream(), length, limits.max_body)
                stage = 504, "the answer must be ready"
                loop = asyncio.get_running_loop()
                batch = await loop.run_in_executor(reader, batch_of, body)
                return await batcher.submit(batch)
        except TimeoutError:
            raise RequestError(
                stage[0],
                f"{stage[1]} within {limits.timeout_s:g} s; send fewer examples, or start the "
                "service with a larger --timeout-s",
                {"Connection": "close"} if stage[0] == 408 else None,
            ) from None
        except ClientDisconnect as error:
            raise RequestError(400, "the body must be whole, but the connection ended") from error

    @app.post(
        "/predict",
        response_model=ClassAnswers if card.task == "classification" else NumberAnswers,
        responses=_PROBLEMS,
        openapi_extra={"requestBody": request_body(card, most=limits.max_examples)},
    )
    async def predict(request: Request) -> Response:
        """Predict examples, with total and epistemic uncertainty, and whether to abstain."""
        started = time.perf_counter()
        status = 500
        try:
            with admission.enter():
                answers = await answers_to(request)
            telemetry.on_answers(answers)
            content: dict[str, Any] = {
                "answers": answers,
                "unit": card.unit,
                "threshold": card.threshold,
                "num_samples": card.num_samples,
            }
            if card.task == "regression":
                content["level"] = card.level
            status = 200
            return Response(
                json.dumps(content, ensure_ascii=False, allow_nan=False),
                headers=_NO_SNIFFING,
                media_type="application/json",
            )
        except RequestError as error:
            status = error.status
            raise
        finally:
            telemetry.on_response(status, time.perf_counter() - started)

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Health:
        """Tell that the service runs."""
        return Health(status="ok", version=bayesify.__version__)

    @app.head("/model", include_in_schema=False)
    @app.get("/model")
    async def describe() -> ModelCard:
        """Describe the inputs, the classes and the threshold."""
        return card

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Return counters and histograms in Prometheus' text format."""
        return Response(telemetry.text(), media_type=CONTENT_TYPE)

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def root() -> HTMLResponse:
        text, policy = page(card)
        return HTMLResponse(text, headers=_NO_SNIFFING | {"Content-Security-Policy": policy})

    @app.exception_handler(RequestError)
    async def on_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        path = [*error.path] if isinstance(error, InputError) else []
        return Response(
            Problem(detail=str(error), path=path).model_dump_json(),
            error.status,
            _NO_SNIFFING | error.headers,
            media_type="application/json",
        )

    return app


class _Admission:
    """A limit of the requests in progress."""

    def __init__(self, most: int, telemetry: Telemetry) -> None:
        self._most, self._now, self._gauge = most, 0, telemetry.in_progress

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Count a request while it is in progress.

        Raises:
            RequestError: there are too many.
        """
        if self._now >= self._most:
            raise RequestError(
                503,
                f"{self._most} requests are in progress, as many as may be; try again later, or "
                "start the service with a larger --queue",
                {"Retry-After": "1"},
            )
        self._now += 1
        self._gauge.set(self._now)
        try:
            yield
        finally:
            self._now -= 1
            self._gauge.set(self._now)
