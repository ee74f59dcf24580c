"""Run one test over many values, where a test of its own for each would say no more."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

Test = Callable[..., None]


def loop_over(names: str | Sequence[str], values: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test with each of the values: ``pytest.mark.parametrize`` within one test.

    A failure names the values that it happened with. Each round has an empty ``tmp_path`` and a
    ``monkeypatch`` that is undone after it.

    Args:
        names: the arguments that are given, as for ``parametrize``.
        values: the value of each round, or a tuple of values where there are several names.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    values = list(values)
    rounds = [
        dict(zip(keys, value if len(keys) > 1 else (value,), strict=True)) for value in values
    ]
    assert rounds, f"there are no values of {names}"
    assert not any(isinstance(value, type(pytest.param())) for value in values), "write tuples"

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def looped(**fixtures: Any) -> None:
            for number, given in enumerate(rounds):
                with _fresh(fixtures, number) as own, noted(**given):
                    test(**own, **given)

        left = [p for name, p in signature.parameters.items() if name not in keys]
        assert len(left) + len(keys) == len(signature.parameters), f"the test takes no {names}"
        looped.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return looped

    return decorate


@contextmanager
def noted(**values: object) -> Iterator[None]:
    """Name the values in the message of whatever fails within."""
    try:
        yield
    except Exception as error:
        error.add_note(f"with {values}")
        raise


@contextmanager
def _fresh(fixtures: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """The fixtures of one round."""
    own = dict(fixtures)
    if "tmp_path" in own:
        own["tmp_path"] = own["tmp_path"] / f"round-{number}"
        own["tmp_path"].mkdir()
    if "monkeypatch" not in own:
        yield own
        return
    with own["monkeypatch"].context() as patch:
        yield own | {"monkeypatch": patch}
