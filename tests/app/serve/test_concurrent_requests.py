"""Requests that come together: shared passes, a full queue, and time limits."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import numpy as np
import pytest
from tests.app.serve.test_service import JSON, refused

from bayesify.app.serve.limits import ServiceLimits
from bayesify.app.serve.model import Batch, ModelCard
from bayesify.app.serve.requests import Examples, InputError
from bayesify.app.serve.run_model import RunModel
from bayesify.app.serve.service import make_app


class Stub:
    """A model whose answers are its inputs, and whose passes wait to be let go."""

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self.passes: list[list[float]] = []
        self.seconds = 0.0

    def read(self, examples: Examples) -> Batch:
        return {"x": np.array(examples.items, np.float64)}

    def predict(self, batch: Batch) -> list[dict[str, Any]]:
        values = batch["x"].tolist()
        self.passes.append(values)
        time.sleep(self.seconds)
        if -1.0 in values:
            raise InputError(("examples",), "a prediction must be finite")
        if -2.0 in values:
            raise RuntimeError("a fault of the program")
        return [{"value": value, "abstain": False, "outside": None} for value in values]


@pytest.fixture
def stub(models: dict[str, RunModel]) -> Stub:
    return Stub(models["digits"].card)


def ask(stub: Stub, bodies: list[list[float]], **limits: Any) -> list[httpx.Response]:
    """Send requests at once."""

    async def all_of() -> list[httpx.Response]:
        app = make_app(stub, ServiceLimits(**limits))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://service") as client,
        ):
            asked = (client.post("/predict", json={"examples": body}) for body in bodies)
            return await asyncio.gather(*asked)

    return asyncio.run(all_of())


def values_of(response: httpx.Response) -> list[float]:
    assert response.status_code == 200, response.text
    return [each["value"] for each in response.json()["answers"]]


def test_requests_share_passes_and_get_their_own_answers(stub: Stub) -> None:
    bodies = [[float(place)] * (1 + place % 3) for place in range(30)]
    responses = ask(stub, bodies, max_batch=16, batch_wait_ms=50)
    assert [values_of(each) for each in responses] == bodies
    assert len(stub.passes) < 10
    assert max(map(len, stub.passes)) <= 16
    stub.passes.clear()
    responses = ask(stub, bodies, max_batch=1)
    assert [values_of(each) for each in responses] == bodies
    assert len(stub.passes) == 30


def test_a_large_request_has_a_pass_of_its_own(stub: Stub) -> None:
    (response, _) = ask(stub, [[1.0] * 40, [2.0]], max_batch=16, batch_wait_ms=50)
    assert values_of(response) == [1.0] * 40
    assert [1.0] * 40 in stub.passes


def test_only_the_request_at_fault_gets_the_error(stub: Stub) -> None:
    responses = ask(stub, [[1.0], [-1.0], [2.0], [-2.0]], batch_wait_ms=50)
    assert [each.status_code for each in responses] == [200, 422, 200, 500]
    assert values_of(responses[0]) == [1.0]
    refused(responses[1], 422, "a prediction must be finite")


def test_a_full_queue_is_told_to_come_again(stub: Stub) -> None:
    stub.seconds = 0.2
    responses = ask(stub, [[float(place)] for place in range(8)], queue=3)
    codes = [each.status_code for each in responses]
    assert sorted(codes) == [200] * 3 + [503] * 5
    late = responses[codes.index(503)]
    refused(late, 503, "3 requests are in progress", "--queue")
    assert late.headers["retry-after"] == "1"
    assert [each.status_code for each in ask(stub, [[1.0]], queue=3)] == [200]


def test_an_answer_that_takes_too_long(stub: Stub) -> None:
    stub.seconds = 0.3
    responses = ask(stub, [[1.0], [2.0]], timeout_s=0.05, max_batch=1)
    for each in responses:
        refused(each, 504, "within 0.05 s", "--timeout-s")
    assert len(stub.passes) == 1  # what nobody waits for any more is not computed


def test_a_body_that_does_not_arrive(stub: Stub) -> None:
    async def slow() -> Any:
        yield b'{"examples"'
        await asyncio.sleep(5.0)
        yield b": [1]}"

    async def one() -> httpx.Response:
        app = make_app(stub, ServiceLimits(timeout_s=0.05))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            return await client.post("/predict", content=slow(), headers=JSON)

    refused(asyncio.run(one()), 408, "the body must arrive within 0.05 s")
