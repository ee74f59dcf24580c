"""Full disks, Ctrl-C, the help and real processes."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.text import Text
from tests.app.cli.test_cli import TINY, as_json, bayesify, contents, read_json
from tests.app.cli.test_errors import check_refused
from tests.training.test_resume import timeless
from typer.main import get_command

import bayesify as bf
from bayesify.app.cli import main
from bayesify.app.cli.commands import make_app
from bayesify.app.cli.epoch_table import EpochTable
from bayesify.app.runs import RunConfig
from bayesify.app.runs.environment import commit
from bayesify.datasets import known_datasets
from bayesify.training import NonFiniteLossError
from bayesify.training.kernel.compiler import compiled_library

MNIST = Path(__file__).parents[3] / "datasets" / "mnist"
COMMANDS = ("train", "evaluate", "prune", "inspect", "report", "data", "data list", "data get")

pytestmark = pytest.mark.usefixtures("quick")


# -------------------------------------------------------------------------- full disks and Ctrl-C


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_at_the_start_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", full)
    check_refused(bayesify("train", "mnist", "--out", tmp_path / "run", *TINY), "No space left")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def after_step(number: int, action: Callable[[], object], patch: pytest.MonkeyPatch) -> None:
    """Do something after so many minibatches of training."""
    right, seen = EpochTable.on_step, []

    def on_step(self: EpochTable, **where: int) -> None:
        right(self, **where)
        seen.append(where)
        if len(seen) == number:
            action()

    patch.setattr(EpochTable, "on_step", on_step)


def test_a_disk_that_fills_up_keeps_what_was_done(tmp_path: Path, finished: Path) -> None:
    place = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        after_step(5, lambda: patch.setattr(os, "fsync", full), patch)
        said = bayesify("train", "mnist", "--out", place, *TINY)
    assert said.code == 2
    last = f"bayesify: [Errno 28] No space left on device: '{place / 'checkpoint.safetensors'}'"
    assert said.err.splitlines()[-1] == last
    assert "Traceback" not in said.err
    names = {"config.json", "history.csv", "checkpoint.safetensors"}
    assert set(contents(place)) == names
    check_goes_on(place, ["train", "mnist", "--out", str(place), "--resume"], finished)


def check_goes_on(place: Path, command: list[str], whole: Path) -> None:
    metrics = as_json(*command)
    assert timeless(metrics) == timeless(read_json(whole / "metrics.json"))
    assert timeless(read_json(place / "metrics.json")) == timeless(metrics)


@pytest.mark.parametrize("step", [1, 6])
def test_ctrl_c_says_how_to_go_on_and_that_works(step: int, tmp_path: Path, finished: Path) -> None:
    place = tmp_path / "a [red]run :a:"  # Rich's markup and emoji, if it read them
    with pytest.MonkeyPatch.context() as patch:
        after_step(step, lambda: os.kill(os.getpid(), signal.SIGINT), patch)
        said = bayesify("train", "mnist", "--out", place, *TINY)
    assert said.code == 130
    assert said.out == ""
    assert "Traceback" not in said.err
    assert not (place / "metrics.json").exists()
    words = shlex.split(re.findall(r"^stopped; resume with: (.*)$", said.err, re.MULTILINE)[0])
    assert words[0] == "bayesify"
    assert words[-1] == "--resume"
    check_goes_on(place, words[1:], finished)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_before_there_is_a_folder_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bayesify.app.runs.Run.open", interrupted)
    assert bayesify("inspect", tmp_path) == (130, "", "bayesify: interrupted\n")


def test_ctrl_c_while_the_commands_are_loaded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = ModuleType("bayesify.app.cli.commands")
    loading.__getattr__ = interrupted  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, loading.__name__, loading)
    assert bayesify("inspect", "run") == (130, "", "bayesify: interrupted\n")


def test_ctrl_c_ends_also_where_pytorch_loses_it(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    os.getpid()\n"
        "except KeyboardInterrupt:\n    pass\n"
    )
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from bayesify.app.cli import main"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; main(['inspect', 'run'])"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "bayesify: interrupted\n")


def test_errors_do_not_go_to_the_output_where_there_is_no_place_for_them(tmp_path: Path) -> None:
    out = io.StringIO()
    with (
        contextlib.redirect_stderr(None),  # a shell's 2>&-
        contextlib.redirect_stdout(out),
        pytest.raises(SystemExit) as leaving,
    ):
        main(["inspect", str(tmp_path)])
    assert (leaving.value.code, out.getvalue()) == (2, "")


def test_a_finished_run_is_resumed_and_reported_without_change(run: Path) -> None:
    place, first = run, read_json(run / "metrics.json")
    before = contents(place)
    assert as_json("train", "mnist", "--out", place, "--resume", *TINY) == first
    assert contents(place) == before
    (place / "report.html").unlink()
    (place / "pruning.json").unlink()
    assert as_json("report", place) == {"report": str(place / "report.html")}
    assert contents(place) == before
    text = bayesify("report", place)
    assert (text.code, text.out) == (0, f"report: {place / 'report.html'}\n")


def test_ctrl_c_while_measuring_says_how_to_go_on(
    tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("bayesify.app.cli.train_command.finish", interrupted)
        said = bayesify("train", "mnist", "--out", place, *TINY)
    assert said.code == 130
    words = shlex.split(re.findall(r"^stopped; resume with: (.*)$", said.err, re.MULTILINE)[0])
    check_goes_on(place, words[1:], finished)


def test_divergence_is_one_line_and_not_success(tmp_path: Path, finished: Path) -> None:
    place = tmp_path / "run"
    said = bayesify("train", "mnist", "--out", place, *TINY, "--lr", "1e38")
    assert said.code == 1
    last = said.err.splitlines()[-1]
    assert re.match(r"bayesify: .* at step 2 \(epoch 1, minibatch 2\) is NaN or infinite", last)
    assert not place.exists()
    assert "delete" not in said.err
    check_goes_on(place, ["train", "mnist", "--out", str(place), *TINY], finished)


def test_divergence_after_a_checkpoint_keeps_it(tmp_path: Path) -> None:
    place = tmp_path / "run"

    def diverge() -> None:
        raise NonFiniteLossError("the loss at step 5 is NaN")

    with pytest.MonkeyPatch.context() as patch:
        after_step(5, diverge, patch)
        said = bayesify("train", "mnist", "--out", place, *TINY)
    assert said.code == 1
    assert f"begin anew in another folder, --out, or delete {place} first" in said.err
    assert {"config.json", "checkpoint.safetensors"} <= set(contents(place))


# ------------------------------------------------------------------------------ help, real process


def test_help_fits_the_terminal_and_names_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = {name: bayesify(*name.split(), "--help") for name in COMMANDS}
    said[""] = bayesify("--help")
    for name, (code, out, err) in said.items():
        assert (code, err) == (0, ""), name
        assert max(map(len, out.splitlines())) <= 80, name
        assert "…" not in out, f"{name}: something was cut off"
    options = "--out --hidden --prior --estimator --baseline --optimizer --lr --epochs --limit "
    wanted = {
        "": "train evaluate prune inspect report data",
        "train": options + "--seed --data-dir --resume --json mnist fashion-mnist laplace dropout",
        "evaluate": "DIR --json",
        "prune": "DIR --fractions --out --json",
        "inspect": "DIR --json",
        "report": "DIR --json",
        "data": "list get",
        "data list": "--json",
        "data get": "name --json",
    }
    for name, words in wanted.items():
        found = set(re.findall(r"[\w-]+", said[name].out))
        assert set(words.split()) <= found, name
    assert bayesify("--version").out == f"bayesify {bf.__version__}\n"


def parameters(command: Any) -> Iterator[Any]:
    """The parameters of a command and of all below it."""
    yield from command.params
    for below in getattr(command, "commands", {}).values():
        yield from parameters(below)


def test_no_help_is_lost_as_markup() -> None:
    """A bracket is a style of Rich's, which drops it, unless a backslash is before it."""
    helps = [
        each.help for each in parameters(get_command(make_app())) if getattr(each, "help", None)
    ]
    assert len(helps) > 100
    for text in helps:
        assert Text.from_markup(text).plain == text.replace("\\[", "["), text


def test_every_setting_of_a_run_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = bayesify("train", "--help").out
    for name in RunConfig.of("mnist").to_json().keys() - {"dataset"}:
        assert f"--{name.replace('_', '-')} " in shown, name


def test_the_help_tells_the_defaults_of_classes_from_those_of_numbers() -> None:
    command: Any = get_command(make_app())
    helps = {each.name: each.help for each in command.commands["train"].params}
    runs = [
        RunConfig.of("a.csv", target="y", task=task, num_rows=1_000)
        for task in ("classification", "regression")
    ]
    for name in ("prior_std", "lr", "kl_warmup"):
        classes, numbers = (f"{getattr(run, name):.3g}" for run in runs)
        assert f"tables {classes} (classes) or {numbers} (numbers)" in helps[name], name
    # No run has the default of the field.
    assert "[default: tables input-dependent]" in helps["noise"]
    assert "[default: folders last-layer]" in helps["random"]
    assert "[default: 0; sgd baseline 0.9;" in helps["momentum"]


def test_data_list_shows_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BAYESIFY_DATA", raising=False)
    rows = {row["name"]: row for row in as_json("data", "list")["datasets"]}
    assert rows.keys() == known_datasets().keys()
    assert rows["mnist"]["directories"] == [str(MNIST)]
    said = bayesify("data", "list")
    assert said.code == 0
    assert {"mnist", "fashion-mnist"} <= set(re.findall(r"[\w-]+", said.out))


def test_the_commit_is_that_of_the_checkout() -> None:
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        pytest.skip("no checkout")
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert str(commit()).removesuffix("-dirty") == head


@pytest.mark.slow
def test_a_real_process_keeps_the_promises(finished: Path) -> None:
    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-c", "from bayesify.app.cli import main; main()"]
        return subprocess.run(
            [*program, *map(str, arguments)], capture_output=True, text=True, timeout=120
        )

    done = call("inspect", finished, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == as_json("inspect", finished)
    with contextlib.redirect_stdout(None), pytest.raises(SystemExit) as leaving:  # a shell's >&-
        main(["inspect", str(finished), "--json"])
    assert leaving.value.code == 0


@pytest.mark.slow
def test_a_locale_of_ascii_writes_to_any_folder(tmp_path: Path) -> None:
    ascii_only = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    program = [sys.executable, "-m", "bayesify"]
    for options in (["train", "mnist", "--out", "café", *TINY], ["report", "café"]):
        subprocess.run(
            [*program, *options], cwd=tmp_path, env=os.environ | ascii_only, check=True, timeout=120
        )
        assert "café" in (tmp_path / "café" / "report.html").read_text(encoding="utf-8")


def test_without_a_compiler_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setattr(
        "bayesify.training.kernel.native.compiled_library", compiled_library.__wrapped__
    )
    arguments = ("train", "mnist", "--out", tmp_path / "run", *TINY, "--backend", "compiled")
    check_refused(bayesify(*arguments), "needs a C++ compiler, and none was found under CXX=/nowh")
    assert list(tmp_path.iterdir()) == []


def test_a_locale_without_the_characters_shows_others() -> None:
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "30"}
    code = "from bayesify.app.cli import main; main(['reproduce', '--list'])"
    shown = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **locale}, capture_output=True, check=True
    )
    text = shown.stdout.decode("ascii")
    assert "blundell-table1" in text
    assert "?" in text  # Rich's ellipsis


def test_the_version_is_told_without_pytorch() -> None:
    code = """if True:
        import sys
        from bayesify.app.cli import main
        try:
            main(["--version"])
        except SystemExit as end:
            sys.exit(end.code or "torch" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"bayesify {bf.__version__}\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_version_that_cannot_be_written_is_told() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "bayesify", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2
    assert re.fullmatch(r"bayesify: .*No space left on device\n", done.stderr)


def test_a_command_loads_what_it_uses_alone(tmp_path: Path) -> None:
    code = f"""if True:
        import sys
        from bayesify.app.cli import main
        try:
            main(["inspect", {str(tmp_path)!r}])
        except SystemExit:
            print(*sorted({{"bayesify.reproduce", "matplotlib", "pandas"}} & set(sys.modules)))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "holds no run" in done.stderr
    assert done.stdout == "\n"
