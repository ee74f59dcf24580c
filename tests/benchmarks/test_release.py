"""The check of a release catches what is missing from an archive."""

from __future__ import annotations

import importlib
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
METADATA = "Name: bayesify\n" + "".join(
    f"Requires-Dist: {line}\n" for line in ("numpy>=2.0", "safetensors>=0.5", "torch>=2.11")
)
EXTRA = "Requires-Dist: typer>=0.15; extra == 'cli'\n"


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("release")


@pytest.fixture
def wheel(tmp_path: Path) -> Callable[..., Path]:
    def make(names: Iterable[str], metadata: str = METADATA + EXTRA) -> Path:
        path, about = tmp_path / "bayesify-1.0-py3-none-any.whl", "bayesify-1.0.dist-info"
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.write(ROOT / "src" / name, name)
            for name in ("RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"):
                archive.writestr(f"{about}/{name}", "")
            archive.writestr(f"{about}/METADATA", metadata)
        return path

    return make


def test_a_complete_wheel_passes(release: Any, wheel: Callable[..., Path]) -> None:
    release.check_wheel(wheel(release.package_files()))


@pytest.mark.parametrize(
    "name", ["app/report/template.html", "app/serve/page.html", "training/kernel/cpp/score.h"]
)
def test_a_missing_file_is_named(release: Any, wheel: Callable[..., Path], name: str) -> None:
    path = wheel(release.package_files() - {f"bayesify/{name}"})
    with pytest.raises(SystemExit, match=rf"lacks \['bayesify/{name}'\] and has besides \[\]"):
        release.check_wheel(path)


def test_a_further_requirement_is_named(release: Any, wheel: Callable[..., Path]) -> None:
    path = wheel(release.package_files(), METADATA + "Requires-Dist: pandas>=2.2\n" + EXTRA)
    with pytest.raises(SystemExit, match=r"torch alone, got .*'pandas>=2.2'\]"):
        release.check_wheel(path)


def test_a_file_that_the_sdist_lacks_is_named(release: Any, tmp_path: Path) -> None:
    def make(names: Iterable[str]) -> Path:
        path = tmp_path / "bayesify-1.0.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name in names:
                archive.add(ROOT / "LICENSE", f"bayesify-1.0/{name}")
        return path

    names = {f"src/{name}" for name in release.package_files()} | release.DOCUMENTS
    release.check_sdist(make(names))
    with pytest.raises(SystemExit, match=r"lacks \['CITATION.cff'\]"):
        release.check_sdist(make(names - {"CITATION.cff"}))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("sys.exit(0)", "must end with exit code 2, got 0"),
        ("sys.exit(2)", "must name --data-dir"),
        ("print('Traceback: --data-dir', file=sys.stderr); sys.exit(2)", "must name --data-dir"),
        (
            "open('part', 'w').close(); print('give --data-dir', file=sys.stderr); sys.exit(2)",
            r"nothing must be left behind, got \['part'\]",
        ),
    ],
)
def test_a_message_that_does_not_help_is_caught(
    release: Any, tmp_path: Path, code: str, message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        release.check_without_data([sys.executable, "-c", f"import sys; {code}"], tmp_path)


@pytest.mark.slow
def test_an_unpacked_wheel_trains_only_with_its_template(
    release: Any, wheel: Callable[..., Path], tmp_path: Path
) -> None:
    package = tmp_path / "package"
    with zipfile.ZipFile(wheel(release.package_files())) as archive:
        archive.extractall(package)
    main = f"import sys; sys.path.insert(0, {str(package)!r}); "
    main += "from bayesify.app.cli import main; main()"
    command = [sys.executable, "-c", main]
    without, home = tmp_path / "without", tmp_path / "home"
    without.mkdir()
    home.mkdir()
    assert "--data-dir" in release.check_without_data(command, without)
    release.check_training(command, ROOT / "datasets", home)
    shutil.rmtree(home / "run")
    (package / "bayesify/app/report/template.html").unlink()
    with pytest.raises(SystemExit, match=r"template\.html"):
        release.check_training(command, ROOT / "datasets", home)
