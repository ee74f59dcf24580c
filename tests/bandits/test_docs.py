"""docs/bandits.md: its code runs, and the agent in it learns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from bayesify.bandits import EpsilonGreedy, play

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "bandits.md").read_text(encoding="utf-8")


def test_the_code_runs_and_the_agent_learns(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for snippet in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(snippet, "docs/bandits.md", "exec"), names)
    assert re.match(r"regret \d+ after 100 days, \d+ after 300", capsys.readouterr().out)
    regret = names["record"].regret
    random = EpsilonGreedy(names["net"](), 3, epsilon=1.0, learning=names["learning"])
    blind = float(play(random, names["Fishing"](), 100, seed=1).regret[-1])
    assert float(regret[-1] - regret[-101]) < 0.5 * blind


def test_the_programs_marks_are_there() -> None:
    assert PAGE.index("<!-- mushroom: begin -->") < PAGE.index("<!-- mushroom: end -->")
