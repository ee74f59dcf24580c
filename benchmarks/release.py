"""Build the wheel and the sdist, and try them in empty environments outside the repository.

python benchmarks/release.py           # stores results/release, and writes the numbers into docs/
python benchmarks/release.py --check   # the same checks; stores nothing
python benchmarks/release.py --show    # writes the stored numbers into docs/

The interpreters are the one that runs this program, and those of python3.11, python3.12 and
python3.13 on PATH that start. An environment into which pip would bring a CUDA build of PyTorch,
several gigabytes, is made for the running interpreter and with --cuda only; elsewhere the wheel is
installed without what it requires, and its modules are compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from email.parser import Parser
from pathlib import Path
from typing import Any

import records
from pages import insert
from records import require_clean_tree

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "release.md"
VERSIONS = ("3.11", "3.12", "3.13")
#: What the wheel requires without extras.
BASE = ("numpy", "safetensors", "torch")
TRAIN = ("train", "mnist", "--limit", "2000", "--epochs", "1")
#: Files of the sdist next to the package.
DOCUMENTS = {
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "PKG-INFO",
    "README.md",
    "SECURITY.md",
    "constraints.txt",
    "pyproject.toml",
}
_METADATA = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
_CONSTRAINTS = ("-c", str(ROOT / "constraints.txt"))
_FIRST_FIT = """
import sys, torch, bayesify as bf
assert bf.__file__.startswith(sys.prefix), bf.__file__
net = torch.nn.Linear(2, 3)
bnn = bf.BayesianModule(net)
data = torch.utils.data.TensorDataset(torch.randn(64, 2), torch.randint(3, (64,)))
bf.fit(bf.ELBO(bnn, num_data=64), torch.utils.data.DataLoader(data, batch_size=16), epochs=1)
assert bnn.predict(torch.randn(5, 2), num_samples=4).mean.shape == (5, 3)
"""


# ---------------------------------------------------------------------------------------- contents


def package_files() -> set[str]:
    """Return the committed files of the package, as the wheel names them."""
    found = _run(["git", "-C", ROOT, "ls-files", "-z", "src/bayesify"]).stdout
    return {name.removeprefix("src/") for name in found.split("\0") if name}


def check_wheel(wheel: Path) -> None:
    """Check that a wheel has the package's files and no others, and requires BASE alone."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    about = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
    _same_files(wheel, names, package_files() | {f"{about}/{name}" for name in _METADATA})
    found = requirements(wheel)
    if tuple(sorted(line.partition(">=")[0] for line in found)) != BASE:
        raise SystemExit(f"{wheel.name} must require {', '.join(BASE)} alone, got {found}")


def check_sdist(sdist: Path) -> None:
    """Check that an sdist has the package's files and DOCUMENTS."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {f"src/{name}" for name in package_files()} | DOCUMENTS
    _same_files(sdist, names - {".gitignore"}, expected)  # hatchling adds it


def _same_files(path: Path, names: set[str], expected: set[str]) -> None:
    if names != expected:
        raise SystemExit(
            f"{path.name} must have the committed files, but lacks {sorted(expected - names)} and "
            f"has besides {sorted(names - expected)}; see [tool.hatch.build] in pyproject.toml"
        )


def requirements(wheel: Path) -> list[str]:
    """Return what a wheel requires without extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    return [line for line in lines if "extra ==" not in line]


def contents(wheel: Path, sdist: Path) -> Iterator[dict[str, Any]]:
    """Yield the sizes of both files, then files and bytes of each folder of the wheel."""
    with tarfile.open(sdist) as archive:
        count = sum(member.isfile() for member in archive.getmembers())
    yield {"archive": sdist.name, "bytes": sdist.stat().st_size, "files": count}
    folders: dict[str, list[int]] = defaultdict(list)
    with zipfile.ZipFile(wheel) as archive:
        for each in archive.infolist():
            first, *rest = each.filename.split("/")
            in_folder = first == "bayesify" and len(rest) > 1
            folders[f"bayesify/{rest[0]}" if in_folder else first].append(each.file_size)
        count = len(archive.infolist())
    yield {"archive": wheel.name, "bytes": wheel.stat().st_size, "files": count}
    for folder, sizes in sorted(folders.items()):
        yield {"folder": folder, "bytes": sum(sizes), "files": len(sizes)}


# ---------------------------------------------------------------------------------------- commands


def check_training(command: Sequence[str], data: Path, folder: Path) -> dict[str, Any]:
    """Train on MNIST in an empty folder by a command of bayesify; return its metrics.

    Raises:
        SystemExit: the command fails, or its run lacks a file.
    """
    out = folder / "run"
    words = [*command, *TRAIN, "--data-dir", str(data), "--out", str(out), "--json"]
    answer: dict[str, Any] = json.loads(_run(words, folder=folder).stdout)
    if not answer["test"]["error_predictive"] < 85.0:  # 90 % by chance; 8 steps are few
        raise SystemExit(f"the network must have learned from the digits, got {answer['test']}")
    made = {path.name for path in out.iterdir()}
    for name in ("config.json", "history.csv", "checkpoint.safetensors", "report.html"):
        if name not in made:
            raise SystemExit(f"{' '.join(TRAIN)} must write {name}, got {sorted(made)}")
    return answer


def check_without_data(command: Sequence[str], folder: Path) -> str:
    """Train without data and network in an empty folder; return the message that is shown.

    Raises:
        SystemExit: the exit code is not 2, the message does not help, or a file is left behind.
    """
    words = [*command, *TRAIN, "--out", str(folder / "run")]
    ended = _run(words, folder=folder, code=2)
    message = ended.stderr.strip()
    if "Traceback" in message or "--data-dir" not in message:
        raise SystemExit(f"without data the message must name --data-dir, got: {message}")
    left = sorted(path.name for path in folder.rglob("*") if path.is_file())
    left = [name for name in left if not name.startswith("fontlist-")]  # matplotlib's cache
    if left:
        raise SystemExit(f"without data nothing must be left behind, got {left}")
    return message.replace(str(folder), "~")


def _run(
    words: Sequence[object], *, folder: Path | None = None, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a command; with a folder, in there and with nothing of the user's but that folder.

    Raises:
        SystemExit: it ends with another exit code.
    """
    hidden = ("PYTHON", "BAYESIFY", "VIRTUAL_ENV")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    if folder is not None:
        environment |= {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
        for name in ("http_proxy", "https_proxy"):  # a port that nobody listens on: no network
            environment |= dict.fromkeys((name, name.upper()), "http://127.0.0.1:9")
        environment |= {"no_proxy": "", "NO_PROXY": ""}
    words = [str(word) for word in words]
    ended = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    if ended.returncode != code:
        raise SystemExit(
            f"{' '.join(words)} must end with exit code {code}, got {ended.returncode}:\n"
            f"{ended.stdout[-2000:]}{ended.stderr[-4000:]}"
        )
    return ended


# ------------------------------------------------------------------------------------ environments


def interpreters() -> dict[str, str]:
    """Return the interpreters by version: the running one, and those on PATH that start."""
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = {running: sys.executable}
    for version in VERSIONS:
        words = [f"python{version}", "-c", "import sys; print(sys.executable)"]
        try:
            ended = subprocess.run(words, capture_output=True, text=True)
        except FileNotFoundError:
            continue
        if ended.returncode == 0:  # that of a version manager may only say what it would run
            found.setdefault(version, ended.stdout.strip())
    return found


class Environment:
    """An empty virtual environment.

    Args:
        folder: where it is made.
        python: its interpreter.
        tools: the environment whose pip installs into it; its own by default.
    """

    def __init__(self, folder: Path, python: str, tools: Environment | None = None) -> None:
        _run([python, "-m", "venv", folder])
        self.python, self.bayesify = folder / "bin" / "python", folder / "bin" / "bayesify"
        self._pip = [self.python if tools is None else tools.python, "-m", "pip", "-q"]
        self._pip += ["--disable-pip-version-check", "--python", self.python]

    def install(self, *words: object) -> None:
        """Install with the constraints of the repository."""
        _run([*self._pip, "install", *_CONSTRAINTS, *words])

    def resolved(self, target: Path) -> dict[str, str]:
        """Return the versions that pip would install for a file, without a download of them."""
        report = self.python.parent / "report.json"
        words = [*_CONSTRAINTS, "--dry-run", "--report", report, target]
        _run([*self._pip, "install", *words])
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
        return {each["metadata"]["name"]: each["metadata"]["version"] for each in found}


def build(folder: Path, tools: Environment) -> tuple[Path, Path]:
    """Build both archives; return the paths of the wheel and of the sdist."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tools.install(*settings["build-system"]["requires"])
    made = [tools.python, "-m", "hatchling", "build", "-d", folder]
    ended = subprocess.run([str(word) for word in made], cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"the archives cannot be built:\n{ended.stderr}")
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def tried(
    folder: Path, wheel: Path, sdist: Path, tools: Environment, *, cuda: bool
) -> Iterator[dict[str, Any]]:
    """Install both archives for each interpreter and use them; yield a row for each."""
    for version, python in interpreters().items():
        empty = Environment(folder / f"wheel-{version}", python, tools)
        begun, pulled = time.perf_counter(), empty.resolved(wheel)
        exact = _run([python, "-c", "import platform; print(platform.python_version())"])
        row = {"python": exact.stdout.strip(), "resolved": pulled}
        has_cuda = any(name.startswith("nvidia-") for name in pulled)
        if has_cuda and not (cuda or python == sys.executable):
            empty.install("--no-deps", wheel)
            home = _fresh(folder / f"compiled-{version}")
            inside = _run([empty.python, "-c", "import bayesify; print(bayesify.__path__[0])"])
            _run([empty.python, "-m", "compileall", "-q", "-f", inside.stdout.strip()])
            _run([empty.bayesify, "--version"], folder=home)
            yield {**row, "archive": wheel.name, "used": False, "seconds": _since(begun)}
            continue
        empty.install(wheel)
        _run([empty.python, "-c", _FIRST_FIT], folder=_fresh(folder / f"base-{version}"))
        home = _fresh(folder / f"no-extra-{version}")
        _run([empty.bayesify, *TRAIN, "--out", "run"], folder=home, code=2)
        for kind, archive in (("wheel", wheel), ("sdist", sdist)):
            if kind == "sdist":
                begun = time.perf_counter()
                empty = Environment(folder / f"sdist-{version}", python, tools)
            empty.install(f"{archive}[cli]")
            command = [str(empty.bayesify)]
            message = check_without_data(command, _fresh(folder / f"{kind}-{version}-without"))
            home = _fresh(folder / f"{kind}-{version}-with")
            answer = check_training(command, ROOT / "datasets", home)
            found = {"test_error": answer["test"]["error_predictive"], "message": message}
            yield {**row, "archive": archive.name, "used": True, **found, "seconds": _since(begun)}


def _fresh(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _since(begun: float) -> float:
    return round(time.perf_counter() - begun, 1)


# ------------------------------------------------------------------------------------- the results


def table() -> str:
    """Return the stored rows as Markdown."""
    folder = records.RESULTS / "release"
    stored = {
        name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("contents", "environments")
    }
    rows = stored["contents"]["metrics"]["rows"]
    lines = ["| archive | size, MB | files |", "|---|---|---|"]
    lines += [_sizes(f"`{row['archive']}`", row, 1e6) for row in rows if "archive" in row]
    lines += ["", "The wheel by folder, unpacked:", "", "| folder | size, kB | files |"]
    lines += ["|---|---|---|"]
    lines += [_sizes(f"`{row['folder']}`", row, 1e3) for row in rows if "folder" in row]
    required = ", ".join(f"`{line}`" for line in stored["contents"]["config"]["requires"])
    lines += ["", f"Without extras the wheel requires {required}.", ""]
    lines += ["| Python | archive | torch | numpy | safetensors | packages in all | tried |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in stored["environments"]["metrics"]["rows"]:
        pulled = row["resolved"]
        used = "installed and trained" if row["used"] else "installed and compiled, not trained"
        versions = " | ".join(pulled[name] for name in ("torch", "numpy", "safetensors"))
        kind = "wheel" if row["archive"].endswith(".whl") else "sdist"
        lines += [f"| {row['python']} | {kind} | {versions} | {len(pulled) - 1} | {used} |"]
    return "\n".join(lines)


def _sizes(name: str, row: dict[str, Any], unit: float) -> str:
    return f"| {name} | {row['bytes'] / unit:.{2 if unit > 1e3 else 0}f} | {row['files']} |"


def _store(name: str, config: dict[str, Any], rows: list[dict[str, Any]], seconds: float) -> None:
    (records.RESULTS / "release" / f"{name}.json").unlink(missing_ok=True)
    records.store_rows(records.resumed("release", name, config), rows, seconds)


def main() -> None:
    """Build and try the archives, and store what was found."""
    if sys.argv[1:] == ["--show"]:
        insert(PAGE, "release", table())
        return
    require_clean_tree()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="store nothing")
    parser.add_argument("--cuda", action="store_true", help="install CUDA builds too, gigabytes")
    options = parser.parse_args()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tools = Environment(folder / "tools", sys.executable)
        tools.install("--upgrade", "pip")  # an old one downloads what it only resolves
        wheel, sdist = build(folder / "dist", tools)
        check_wheel(wheel)
        check_sdist(sdist)
        found = list(contents(wheel, sdist))
        print(f"{wheel.name} and {sdist.name} have the committed files", flush=True)
        rows = []
        for row in tried(folder, wheel, sdist, tools, cuda=options.cuda):
            print(json.dumps(row), flush=True)
            rows.append(row)
        requires = requirements(wheel)
    if not options.check:
        seconds = time.perf_counter() - begun
        _store("contents", {"requires": requires}, found, 0.0)
        _store("environments", {"command": ["bayesify", *TRAIN]}, rows, seconds)
        insert(PAGE, "release", table())


if __name__ == "__main__":
    main()
