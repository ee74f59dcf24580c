"""Bad usage and bad input: exit code 2, one clear line, no traceback, nothing written."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from tests.app.cli.test_cli import Said, Whole, bayesify, contents

from bayesify.app.runs import network

pytestmark = pytest.mark.usefixtures("quick")


def check_refused(said: Said, *parts: str, code: int = 2) -> None:
    assert said.code == code, said
    assert said.out == ""
    assert re.fullmatch(r"bayesify: [^\n]+\n", said.err), said.err
    assert "Traceback" not in said.err
    for part in parts:
        assert part in said.err


# ------------------------------------------------------------------------------------- arguments

# Not to train for minutes if one is not refused; of an option that is given twice the last counts.
SMALL = ["--hidden", "4", "--limit", "50", "--epochs", "1"]
BAD_OPTIONS = {
    "--hidden 0": "hidden must be positive numbers of units such as 400,400, got 0",
    "--hidden 16,-1": "hidden must be positive",
    "--hidden abc": "hidden must be positive numbers of units such as 400,400, got 'abc'",
    "--hidden ''": "got ''",
    "--hidden 16,": "got '16,'",
    f"--hidden {10**30}": "hidden must be",
    "--epochs -1": "epochs must be at least 1 and at most 2,147,483,647, got -1",
    "--epochs 0": "epochs must be at least 1 and",
    "--epochs x": "'--epochs'",
    "--epochs 2.5": "'--epochs'",
    "--lr nan": "lr must be positive and finite, got nan",
    "--lr 0": "lr must be positive and finite, got 0.0",
    "--lr -1": "lr must be positive and finite, got -1.0",
    "--lr inf": "lr must be positive and finite, got inf",
    "--lr x": "'--lr'",
    "--lr": "'--lr' requires an argument",
    "--prior foo": "log-uniform, got foo",
    "--prior ''": "prior must be one of",
    "--prior-std 0": "prior-std must be",
    "--prior-std 1e200": "std must lie between 1e-15 and 1e15, got 1e+200",
    "--prior-std 1 --pi 2": "pi would do nothing here: it applies only to --prior scale-mixture",
    "--pi 2": "pi must lie strictly between 0 and 1, got 2.0",
    "--prior scale-mixture --prior-std 1": "prior-std would do nothing here",
    "--prior scale-mixture --pi nan": "pi must lie strictly between 0 and 1, got nan",
    "--prior scale-mixture --std2 2": "std1 must be larger than std2",
    "--prior scale-mixture --std2 1e-200": "std2 must lie between 1e-15 and 1e15",
    "--prior scale-mixture --kl closed": "no closed-form KL; use --kl auto, or --prior gaussian",
    "--estimator foo": "estimator must be one of sampling, antithetic, local, local-per-position",
    "--estimator antithetic --train-samples 3": "must be even, got 3; use --train-samples 2",
    "--estimator local-per-position": "estimator local-per-position needs --net lenet5",
    "--baseline sgd --estimator flipout": "estimator would do nothing here",
    "--net resnet": "net must be one of mlp, lenet5, table, resnet8, got resnet",
    "--net lenet5 --hidden 16": "hidden would do nothing here: it applies only to --net mlp and",
    "--precision float16": "precision must be one of float32, bfloat16, got float16",
    "--kl foo": "kl must be one of auto, closed, monte-carlo, got foo",
    "--kl-weighting foo": "kl-weighting must be one of uniform, geometric, got foo",
    "--kl-warmup 1.5": "kl-warmup must be at least 0 and",
    "--kl-warmup nan": "kl-warmup must be at least 0 and",
    "--kl-warmup-power 0": "kl-warmup-power must be positive and finite, got 0.0",
    "--kl-warmup 0 --kl-warmup-power 2": "kl-warmup-power would do nothing here",
    "--optimizer lbfgs": "optimizer must be one of sgd, adam, ivon, got lbfgs",
    "--schedule foo": "schedule must be one of cosine, constant, got foo",
    "--baseline foo": "baseline must be one of sgd, dropout, got foo",
    "--baseline sgd --prior laplace": "prior would do nothing here",
    "--baseline sgd --test-samples 3": "test-samples would do nothing here",
    "--baseline sgd --dropout-hidden 0.1": "dropout-hidden would do nothing here",
    "--baseline dropout --dropout-hidden 1": "dropout-hidden must be at least 0 and below 1",
    "--prune-fraction 1": "prune-fraction must be at least 0 and below 1, got 1.0",
    "--prune-fraction nan": "prune-fraction must be at least 0 and below 1",
    "--prune-from 1": "prune-from would do nothing here: it applies only to --prune-fraction",
    "--prune-fraction 0.5 --prune-from -1": "prune-from must be at least 0 and finite, got -1.0",
    "--prune-fraction 0.5 --prune-until 0": "prune-until must be positive and finite, got 0.0",
    "--prune-fraction 0.5 --epochs 4 --prune-until 4": "prune-until 4 and epochs 4",
    "--prune-fraction 0.5 --epochs 4 --prune-from 3 --prune-until 2": "be below prune-until",
    "--baseline sgd --prune-fraction 0.5": "prune-fraction would do nothing here: it applies only",
    "--objective f-quad --prune-fraction 0.5": "prune-fraction would do nothing here",
    "--prune-fraction 0.5 --estimator local --backend compiled": "compiled prunes with --estimator",
    "--temperature -1": "temperature must be at least 0 and finite, got -1.0",
    "--temperature inf": "temperature must be at least 0 and finite, got inf",
    "--batch-size 0": "batch-size must be at least 1 and",
    f"--batch-size {10**30}": "batch-size must be at least 1 and at most 2,147,483,647, got 1",
    "--train-samples 0": "train-samples must be at least 1 and",
    "--threads 0": "threads must be at least 1 and at most 1,024, got 0",
    "--threads 5000": "threads must be at least 1 and at most 1,024, got 5000",
    "--init-std 0": "init-std must be positive and finite",
    "--limit 0": "limit must be at least 1 and at most 2,147,483,647, got 0",
    "--limit 1000000000": "limit must be at most 60000, the number of training images of mnist",
    "--momentum 0.5": "momentum would do nothing here",
    "--weight-decay 0.1": "weight-decay would do nothing here: it applies only to --baseline",
    "--baseline sgd --weight-decay -1": "weight-decay must be at least 0 and finite, got -1.0",
    "--momentum 1 --optimizer sgd": "momentum must be at least 0 and below 1, got 1.0",
    f"--seed {10**40}": "seed must have at most 128 bits",
    "--data-dir no/such/folder": "no such directory",
    "--bogus 1": "No such option: --bogus",
    "more": "unexpected extra argument",
}  # fmt: skip


@pytest.mark.parametrize("options", BAD_OPTIONS)
def test_bad_settings_are_refused_and_nothing_is_written(options: str, tmp_path: Path) -> None:
    words = shlex.split(options)
    said = bayesify("train", "mnist", "--out", tmp_path / "run", *SMALL, *words)
    check_refused(said, BAD_OPTIONS[options])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("train", "Missing argument"),
        ("train mnist --resume", "needs its folder; name it with --out"),
        ("train mnist --devices 2", "needs its folder; name it with --out"),
        (
            "train imagenet --out run",
            "no data set 'imagenet' and no folder of that name; known are mnist, fashion-mnist",
        ),
        ("train '' --out run", "no data set ''"),
        ("train ' ' --target y --out run", "no data set ' '; give a name, a file or a folder"),
        ("trian mnist", "No such command 'trian'"),
        ("--bogus", "No such option: --bogus"),
        ("evaluate", "Missing argument"),
        ("evaluate nowhere", "nowhere holds no run: there is no nowhere/config.json"),
        ("inspect file", "there is no file/config.json"),
        ("report .", "holds no run"),
        ("prune other", "other holds no run"),
        ("data get imagenet", "no data set 'imagenet'"),
        ("data lost", "No such command 'lost'"),
        ("train mnist --out other", "other holds other files; choose a new folder with --out"),
        ("train mnist --out file", "file must be a new or empty folder, but is a file"),
        ("train mnist --out /dev/null", "/dev/null must be a new or empty folder, but is a file"),
        ("train mnist --out link", "link must be a new or empty folder, but is a link to what is"),
        ("train mnist --out file/run", "file is a file; choose another folder with --out"),
        ("train mnist --out file/run/deeper", "file is a file; choose another folder with --out"),
        ("train mnist --out ''", ". holds other files"),
    ],
)
def test_bad_usage(
    arguments: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("precious")
    Path("other").mkdir()
    Path("other", "file").write_text("precious")
    Path("link").symlink_to("nowhere")
    words = shlex.split(arguments)
    check_refused(bayesify(*words, *(SMALL if words[:1] == ["train"] else [])), part)
    left = sorted(str(path) for path in Path().rglob("*"))
    assert left == ["file", "link", "other", "other/file"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("prune {run} --fractions abc", "fractions must be numbers from 0 to 1 such as 0.5,0.95"),
        ("prune {run} --fractions 2", "got '2'"),
        ("prune {run} --fractions -0.1", "got '-0.1'"),
        ("prune {run} --fractions nan", "got 'nan'"),
        ("prune {run} --fractions 0.5,", "got '0.5,'"),
        ("prune {run} --fractions ''", "got ''"),
        ("prune {run} --samples 0", "samples must be at least 1, got 0"),
        ("prune {run} --out {run}/config.json", "exists already; choose a new file with --out"),
        ("prune {run} --out {run}", "is a folder; choose a file with --out"),
        ("prune {run} --out {run}/no/file", "there is no folder"),
        ("evaluate {run} --samples 0", "samples must be at least 1, got 0"),
        ("evaluate {run} --samples x", "'--samples'"),
        ("evaluate {run} --data-dir nowhere", "no such directory"),
        ("report {run} --data-dir nowhere", "no such directory"),
        ("report {run} --compare nowhere", "nowhere holds no run"),
        (
            "train mnist --out {run}",
            "holds another run; choose a new folder with --out, or",
        ),
        ("train mnist --out {run} --resume --epochs 3", "whose epochs is 2, but 3 was asked for"),
        ("train mnist --out {run} --resume --hidden 17", "whose hidden is"),
        ("train mnist --out {run} --resume --lr 0.5", ", but 0.5 was asked for; leave it out"),
        ("train mnist --out {run} --resume --baseline sgd", "whose baseline is None, but sgd was"),
        ("train fashion-mnist --out {run} --resume", "whose dataset is mnist, but fashion-mnist"),
    ],
)
def test_what_a_run_refuses_leaves_it_unchanged(arguments: str, part: str, run: Path) -> None:
    before = contents(run)
    check_refused(bayesify(*shlex.split(arguments.format(run=run))), part)
    assert contents(run) == before


@pytest.mark.parametrize("out", ["locked", "locked/run", "locked/run/deeper"])
def test_a_folder_without_permission_is_found_before_the_data_are_read(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "locked").mkdir()
    allowed = os.access

    def access(path: Path, mode: int) -> bool:  # root may write anywhere
        return allowed(path, mode) and not (path == tmp_path / "locked" and mode & os.W_OK)

    monkeypatch.setattr(os, "access", access)
    monkeypatch.setattr("bayesify.app.runs.folder.load_images", None)
    said = bayesify("train", "mnist", "--out", tmp_path / out, *SMALL)
    check_refused(said, f"but {tmp_path / 'locked'} cannot; choose another folder with --out")
    assert list((tmp_path / "locked").iterdir()) == []


def test_a_baseline_cannot_be_pruned(baseline: Whole, tmp_path: Path) -> None:
    said = bayesify("prune", baseline.folder, "--out", tmp_path / "small")
    check_refused(said, f"holds a {baseline.folder.name} baseline, whose weights have no std")
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: ...")],
    ids=lambda error: type(error).__name__,
)
def test_a_network_too_large_for_the_machine(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(network, "mlp", too_large)
    said = bayesify("train", "mnist", "--out", tmp_path / "run", "--hidden", "2000000000")
    check_refused(said, "there is not enough memory; use fewer units, samples or a smaller batch")
    assert list(tmp_path.iterdir()) == []


def test_other_errors_of_torch_are_not_hidden(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug must be seen with its traceback; only what the user can mend becomes one line."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(network, "mlp", broken)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        bayesify("evaluate", run)
