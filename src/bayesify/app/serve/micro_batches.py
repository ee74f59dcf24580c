"""Collect the examples of concurrent requests into one pass of the network."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from bayesify.app.serve.model import Batch, joined

__all__ = ["MicroBatcher"]

Answers = list[dict[str, Any]]
Predict = Callable[[Batch], Answers]


@dataclass(frozen=True)
class _Waiting:
    batch: Batch
    size: int
    answers: asyncio.Future[Answers]


class MicroBatcher:
    """Run a network in one thread, on the examples of several requests at a time.

    The first request waits for others, until there are enough examples or its time is over. While
    the network runs, further requests collect.

    Args:
        predict: returns an answer for each example of a batch.
        max_examples: examples in one pass; a request with more has a pass of its own.
        wait_s: time that the first request waits, in seconds.
        on_pass: called with the number of examples before each pass.
    """

    def __init__(
        self,
        predict: Predict,
        *,
        max_examples: int,
        wait_s: float,
        on_pass: Callable[[int], None],
    ) -> None:
        self._predict, self._on_pass = predict, on_pass
        self._max_examples, self._wait_s = max_examples, wait_s
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, "bayesify-network")

    async def run(self) -> None:
        """Serve requests until this task is cancelled."""
        left: _Waiting | None = None
        try:
            while True:
                some, left = await self._collect(left or await self._queue.get())
                await self._answer(some)
        finally:
            self._thread.shutdown(wait=False)

    async def submit(self, batch: Batch) -> Answers:
        """Return the answers for a batch.

        A request whose task is cancelled before its pass begins is not computed.
        """
        size = len(next(iter(batch.values())))
        future: asyncio.Future[Answers] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Waiting(batch, size, future))
        return await future

    async def _collect(self, first: _Waiting) -> tuple[list[_Waiting], _Waiting | None]:
        """Return requests for one pass, and the one that came next if it does not fit."""
        some, size = [first], first.size
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._wait_s):
                while size < self._max_examples:
                    following = await self._queue.get()
                    if size + following.size > self._max_examples:
                        return some, following
                    some.append(following)
                    size += following.size
        return some, None

    async def _answer(self, some: list[_Waiting]) -> None:
        some = [each for each in some if not each.answers.cancelled()]
        if not some:
            return
        try:
            answers = await self._pass([each.batch for each in some])
        except Exception as error:
            if len(some) == 1:
                if not some[0].answers.cancelled():
                    some[0].answers.set_exception(error)
                return
            for each in some:  # only the request that is at fault gets the error
                await self._answer([each])
            return
        start = 0
        for each in some:
            own = answers[start : start + each.size]
            start += each.size
            if not each.answers.cancelled():
                each.answers.set_result(own)

    async def _pass(self, batches: list[Batch]) -> Answers:
        batch = joined(batches)
        self._on_pass(len(next(iter(batch.values()))))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._predict, batch)
