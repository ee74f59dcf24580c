"""What ``bayesify bench`` measures, against planted times and sizes, and what fails in it."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bayesify.app.bench import (
    CASES,
    Case,
    Contestant,
    Group,
    contestants_of,
    estimated_seconds,
    find_cases,
    measure,
    measuring,
    timing,
)
from bayesify.app.bench.cases import perceptron
from bayesify.app.bench.contestants import Step
from bayesify.app.bench.floor import floor_contestants
from bayesify.app.bench.step_memory import built_with_peak, can_measure, resident_bytes
from bayesify.training.kernel.compiler import find_compiler

TINY = perceptron("mlp-400", 8, inputs=4, batches=(16,))
#: Of two contestants.
ASKED = perceptron("predict", 8, inputs=4, batches=(16,), work="predict")
NEEDS_COMPILER = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")


class Clock:
    """Time that passes only where a step says so, in milliseconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now / 1e3

    def contestant(self, path: str, *costs: float, **others: Any) -> Contestant:
        """One whose steps take these times in turn, again and again."""

        def build() -> Step:
            calls = 0

            def step() -> None:
                nonlocal calls
                self.now += costs[calls % len(costs)]
                calls += 1

            return step

        return Contestant(path, "none", "adam", build, **others)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    monkeypatch.setattr(measuring, "time", made)
    return made


def rows_by_path(group: Group, rounds: int = 5) -> dict[str, dict[str, Any]]:
    return {row["path"]: row for row in measure([group], rounds=rounds).rows}


# ---- numbers ----------------------------------------------------------------------------------


def test_a_slow_step_shows_as_so_many_times_the_plain_net(clock: Clock) -> None:
    group = Group(TINY, 16, [clock.contestant("plain-net", 2.0), clock.contestant("slow", 7.0)])
    rows = rows_by_path(group)
    assert math.isclose(rows["plain-net"]["ms_median"], 2.0)
    assert math.isclose(rows["slow"]["ms_median"], 7.0)
    assert math.isclose(rows["slow"]["ratio"], 3.5)
    assert math.isclose(rows["slow"]["ratio_paired"], 3.5)
    assert math.isclose(rows["slow"]["ms_iqr"], 0.0, abs_tol=1e-9)
    assert rows["slow"]["rounds"] == 5


def test_a_ratio_is_that_of_the_medians(clock: Clock) -> None:
    # Long steps: one a turn, after three of warm-up, and for the plain net two more.
    plain = clock.contestant("plain-net", 100.0, 100.0, 900.0, 100.0, 200.0)
    slow = clock.contestant("slow", 2700.0, 400.0, 600.0, 400.0, 300.0)
    rows = rows_by_path(Group(TINY, 16, [plain, slow]))
    assert math.isclose(rows["plain-net"]["ms_median"], 100.0)
    assert math.isclose(rows["plain-net"]["ms_iqr"], 100.0)
    assert math.isclose(rows["slow"]["ms_median"], 400.0)
    assert math.isclose(rows["slow"]["ratio"], 4.0)
    # In the rounds: 100, 100, 900, 100, 200 against 400, 300, 2700, 400, 600.
    assert math.isclose(rows["slow"]["ratio_paired"], 3.0)


def test_a_turn_begins_with_a_step_that_is_not_timed(clock: Clock) -> None:
    # Of five short steps a turn the first is cold, and does not count.
    turn = timing.Turn.for_steps_of(0.01)
    step = clock.contestant("cold", 90.0, 1.0, 1.0, 1.0, 1.0).build()
    assert [turn.take(step) for _ in range(3)] == pytest.approx([1.0, 1.0, 1.0])


def test_all_have_as_many_turns_in_changing_order_without_collector() -> None:
    orders: list[list[str]] = [[]]

    def entrant(name: str) -> timing.Entrant:
        def step() -> None:
            assert not gc.isenabled()
            if len(orders[-1]) == 3:
                orders.append([])
            orders[-1].append(name)

        return timing.Entrant(Contestant(name, "none", "none", lambda: step), step)

    entrants = [entrant(name) for name in "abc"]
    timing.take_turns(entrants, rounds=10, turn=timing.Turn(0, 1))
    assert gc.isenabled()
    assert {tuple(sorted(order)) for order in orders} == {("a", "b", "c")}
    assert len({tuple(order) for order in orders}) > 1
    assert [len(each.times) for each in entrants] == [10, 10, 10]


def test_the_estimate_grows_with_rounds_and_contestants(clock: Clock) -> None:
    plain, slow = clock.contestant("plain-net", 100.0), clock.contestant("slow", 250.0)
    group = Group(TINY, 16, [plain, slow])
    # Ten rounds and three steps of warm-up, of 0.1 s and of 2.5 times that.
    assert math.isclose(estimated_seconds([group], rounds=10), 13 * 0.35)


def test_every_case_has_a_plain_net_for_each_optimiser() -> None:
    for case in CASES.values():
        entered = contestants_of(case, 1)
        plain = {each.optimizer for each in entered if each.path == "plain-net"}
        assert entered[0].path == "plain-net"
        assert {each.baseline for each in entered} == plain
        assert len({each.label for each in entered}) == len(entered)


def test_a_large_case_is_measured_where_it_is_named_without_floor_and_peers() -> None:
    large = find_cases(["mlp-9600"])
    assert [case.hidden for case in large] == [9600]
    assert large[0] not in find_cases([])
    group = Group(large[0], 16, contestants_of(large[0], 16))
    assert [each.label for each in group.entered] == [
        "plain-net, adam",
        "compiled, sampling, adam",
        "own-loop, sampling, adam",
    ]


# ---- memory -----------------------------------------------------------------------------------


def weights_of(case: Case) -> int:
    return sum(parameter.numel() for parameter in case.make_net().parameters())


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_the_plain_nets_memory_is_a_hand_count(optimizer: str) -> None:
    case, batch = perceptron("small", 64, inputs=50), 16
    moments, counters = {"adam": (2, 6), "sgd": (1, 0)}[optimizer]
    # At the end of the backward pass: parameters, moments and gradients, the gradient that comes
    # down to the first layer, the loss and its gradient, and Adam's counter of each parameter.
    floats = (2 + moments) * weights_of(case) + batch * 64 + 2 + counters
    data = 4 * batch * 50 + 8 * batch
    (contestant,) = [
        each
        for each in contestants_of(case, batch)
        if (each.path, each.optimizer) == ("plain-net", optimizer)
    ]
    assert built_with_peak(contestant.build, warmup=2)[1] == 4 * floats + data


@pytest.mark.slow
@NEEDS_COMPILER
@pytest.mark.parametrize(("hidden", "kept"), [(64, 1), (1024, 0)])
def test_vectors_that_a_compiled_step_needs_more_than_the_plain_net(hidden: int, kept: int) -> None:
    case = perceptron("net", hidden, inputs=50)
    contestants = [
        each
        for each in contestants_of(case, 16)
        if (each.path, each.estimator) == ("compiled", "sampling") or each.path == "plain-net"
    ]
    found = measure([Group(case, 16, contestants, with_floor=False)], rounds=1)
    vectors = {
        # A step returns its outputs: 16 examples of 10 numbers.
        row["optimizer"]: row["vectors"] - 16 * 10 / row["num_weights"]
        for row in found.rows
        if row["path"] == "compiled"
    }
    # rho, its moments, and the weights that the network runs on; of IVON, which is compared with
    # Adam, rho and the weights. Networks of up to a million weights keep their stds too.
    assert vectors == {
        "adam": pytest.approx(4 + kept, abs=0.01),
        "sgd": pytest.approx(3 + kept, abs=0.01),
        "ivon": pytest.approx(2 + kept, abs=0.01),
    }


def test_a_vector_that_a_step_keeps_shows(clock: Clock) -> None:
    size = 4 * weights_of(TINY)

    def build() -> Step:
        kept = [torch.zeros(size)]
        return lambda: kept.append(kept.pop().clone())

    kept = Contestant("keeps", "none", "adam", build)
    rows = rows_by_path(Group(TINY, 16, [clock.contestant("plain-net", 1.0), kept]))
    # Four vectors' size, and in the step twice.
    assert rows["keeps"]["vectors"] == 8.0
    assert rows["keeps"]["peak_mb"] == 8 * size / 1e6


TWO_VECTORS = """
import torch
from bayesify.app.bench.step_memory import grown_by

def build():
    kept = torch.ones(10_000_000)
    return lambda: (kept + 1).sum()

print(grown_by(build))
"""


@pytest.mark.slow
@pytest.mark.skipif(not can_measure(), reason="needs Linux")
def test_the_memory_of_a_process() -> None:
    # A vector of 40 MB that the step keeps, and another that it makes.
    done = subprocess.run([sys.executable, "-c", TWO_VECTORS], capture_output=True, check=True)
    assert 75e6 < int(done.stdout) < 100e6
    case = CASES["predict-mean"]
    own = resident_bytes(case, 2, contestants_of(case, 2)[1])
    # The mean and rho of 478,410 weights, at least; and not much more.
    assert 3.8e6 < own < 40e6
    unknown = Contestant("nobody", "none", "none", lambda: lambda: None)
    with pytest.raises(RuntimeError, match="nobody"):
        resident_bytes(case, 2, unknown)


# ---- what fails -------------------------------------------------------------------------------


def failing(after: int) -> Callable[[], Step]:
    def build() -> Step:
        calls = 0

        def step() -> None:
            nonlocal calls
            calls += 1
            if calls > after:
                raise AttributeError("no such layer\nany more")

        return step

    return build


@pytest.mark.parametrize("after", [0, 5])
def test_a_peer_that_fails_is_left_out_with_a_line(clock: Clock, after: int) -> None:
    peer = Contestant("brittle", "sampling", "adam", failing(after), is_peer=True)
    found = measure([Group(TINY, 16, [clock.contestant("plain-net", 1.0), peer])], rounds=4)
    assert [row["path"] for row in found.rows] == ["plain-net"]
    (note,) = found.notes
    assert note == (
        "mlp-400, batch 16: brittle, sampling, adam was left out: "
        "AttributeError: no such layer any more"
    )


@pytest.mark.parametrize("after", [0, 5])
def test_a_step_of_ours_that_fails_is_an_error(clock: Clock, after: int) -> None:
    ours = Contestant("compiled", "local", "adam", failing(after))
    with pytest.raises(AttributeError):
        measure([Group(TINY, 16, [clock.contestant("plain-net", 1.0), ours])], rounds=4)
    assert gc.isenabled()


@pytest.mark.slow
def test_without_a_compiler_its_steps_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    from bayesify.training.kernel import compiler

    compiler.compiled_library.cache_clear()
    found = measure([Group(TINY, 16, contestants_of(TINY, 16))], rounds=1)
    assert {row["path"] for row in found.rows} == {"plain-net", "closed-form", "own-loop"}
    assert any(
        "compiled, sampling, adam was left out: CompilerError" in note for note in found.notes
    )


def test_ctrl_c_keeps_what_is_there(clock: Clock) -> None:
    calls = 0

    def build() -> Step:
        def step() -> None:
            nonlocal calls
            calls += 1
            clock.now += 30.0
            if calls == 3 + 2 * 5 + 1:
                raise KeyboardInterrupt

        return step

    slow = Contestant("slow", "none", "adam", build)
    group = Group(TINY, 16, [clock.contestant("plain-net", 10.0), slow])
    found = measure([group, group], rounds=50)
    assert found.interrupted
    assert [row["path"] for row in found.rows] == ["plain-net", "slow"]
    assert math.isclose(found.rows[1]["ratio"], 3.0)
    assert found.rows[1]["rounds"] == 2


def test_the_update_of_a_loop_of_ones_own_is_of_mean_and_rho() -> None:
    weights = (4 * 8 + 8) + (8 * 8 + 8) + (8 * 10 + 10)
    vectors = {"adam": 8, "sgd": 6}  # values, gradients and moments, of each two
    found = {
        part.optimizer: built_with_peak(part.build, warmup=1)[1] / (4 * weights)
        for part in floor_contestants(TINY, 16)
        if part.estimator == "update"
    }
    # Adam also counts its steps.
    assert found == pytest.approx(vectors, abs=0.1)


def test_what_a_group_held_is_free_when_the_next_one_is_timed() -> None:
    class Held:
        itself: Held

    held, is_alive = list[weakref.ref[Held]](), list[bool]()

    def first() -> Callable[[], object]:
        made = Held()
        made.itself = made  # only the garbage collector frees it
        held.append(weakref.ref(made))
        return lambda: made

    def second() -> Callable[[], object]:
        return lambda: is_alive.append(held[-1]() is not None)

    groups = [
        Group(TINY, 16, [Contestant("plain", "none", "none", build)], with_floor=False)
        for build in (first, second)
    ]
    measure(groups, rounds=2)
    assert is_alive
    assert not any(is_alive)
