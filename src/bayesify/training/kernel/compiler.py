"""Compile the C++ kernel on the user's machine, and cache the result."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

__all__ = ["CompilerError", "compiled_library", "find_compiler"]

_SOURCE = Path(__file__).parent / "cpp" / "step.cpp"
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
#: Tried in turn: for the CPU of this machine, with threads, then without what fails.
_TRIES = (
    ("-march=native", "-fopenmp"),
    ("-mcpu=native", "-fopenmp"),
    ("-march=native",),
    ("-mcpu=native",),
    (),
)
_TIMEOUT_S = 120
_PRIORS = ("gaussian", "laplace", "scale-mixture")
_LEAVES = ("weights", "stds", "variances")
_OPTIMIZERS = ("sgd", "momentum", "adam", "none", "ivon")


class CompilerError(RuntimeError):
    """There is no C++ compiler, or it failed."""


def find_compiler() -> str | None:
    """The C++ compiler: the one that ``$CXX`` names, else the first of c++, g++ and clang++."""
    chosen = _named_command()[:1]
    return next(filter(None, map(shutil.which, chosen or ["c++", "g++", "clang++"])), None)


def _named_command() -> list[str]:
    """Split ``$CXX`` into words."""
    command = os.environ.get("CXX", "")
    try:
        return shlex.split(command)
    except ValueError:  # a quotation mark without its partner: no program has this name
        return [command]


@cache
def compiled_library(
    prior: str,
    exact: bool,
    optimizer: str,
    leaf: str,
    dtype: torch.dtype,
    *,
    several: bool = False,
    blocks: bool = False,
) -> ctypes.CDLL:
    """Load the compiled kernel, from the user's cache if it is there.

    Raises:
        CompilerError: there is no working C++ compiler.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CompilerError(
            "the compiled backend needs a C++ compiler, and none was found"
            + (f" under CXX={os.environ['CXX']}" if os.environ.get("CXX") else "")
            + "; install one (such as g++), name it in CXX, or use the backend closed-form"
        )
    command = [compiler, *_named_command()[1:]]
    macros = (
        f"-DREAL={'double' if dtype == torch.float64 else 'float'}",
        f"-DPRIOR={_PRIORS.index(prior)}",
        f"-DEXACT={int(exact)}",
        f"-DOPTIMIZER={_OPTIMIZERS.index(optimizer)}",
        f"-DLEAF={_LEAVES.index(leaf)}",
        f"-DSEVERAL={int(several)}",
        f"-DBLOCKS={int(blocks)}",
    )
    sources = [path.read_text() for path in sorted(_SOURCE.parent.glob("*.[ch]*"))]
    identity = (*sources, *_FLAGS, *macros, _cpu_properties(), _version(command))
    digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:24]
    failure: OSError | None = None
    for make_folder in (_cache_folder, _scratch_folder):
        try:
            folder = make_folder()
            if folder is None:
                continue
            path = _kept(folder, digest) or _compile(command, macros, folder, digest)
            return ctypes.CDLL(str(path))
        except OSError as error:  # a full disk, no permission, a damaged file
            failure = error
    raise CompilerError(f"the compiled kernel can be neither stored nor loaded: {failure}")


def _kept(folder: Path, digest: str) -> Path | None:
    """The cached kernel, if it is whole: loading a part of one would end the process."""
    for path in sorted(folder.glob(f"step-{digest}-*.so")):
        if path.stem.endswith(_checksum(path)):
            return path
        path.unlink(missing_ok=True)
    return None


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _compile(compiler: Sequence[str], macros: Sequence[str], folder: Path, digest: str) -> Path:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / "step.so"
        error = ""
        for extra in _TRIES:
            command = [*compiler, *_FLAGS, *extra, *macros, str(_SOURCE), "-o", str(made)]
            try:
                done = subprocess.run(
                    command, capture_output=True, errors="replace", timeout=_TIMEOUT_S, check=False
                )
            except (OSError, subprocess.TimeoutExpired) as failure:
                raise CompilerError(f"{compiler[0]} could not be run: {failure}") from failure
            if done.returncode == 0 and made.exists():
                return made.replace(folder / f"step-{digest}-{_checksum(made)}.so")
            error = error or done.stderr
        raise CompilerError(f"{compiler[0]} failed on {_SOURCE.name}: {error.strip()[:500]}")


def _cache_folder() -> Path | None:
    """A lasting folder that only the user can write to, if there is one."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        folder = root / "bayesify" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Its files are executed, so no one else may be able to write there.
        found = folder.stat()
        ours = not hasattr(os, "getuid") or found.st_uid == os.getuid()
        if ours and not found.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
        pass
    return None


@cache
def _scratch_folder() -> Path:
    """A folder that this process removes at its end."""
    folder, owner = Path(tempfile.mkdtemp(prefix="bayesify-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not at the end of a fork
            shutil.rmtree(folder, ignore_errors=True)  # open libraries stay loaded

    atexit.register(remove)
    return folder


def _cpu_properties() -> str:
    """The properties of the CPU that compiled code depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = [line for line in lines if line.lower().startswith(("flags", "features"))]
    return " ".join([platform.platform(), platform.machine(), *features[:1]])


def _version(compiler: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            [*compiler, "--version"], capture_output=True, errors="replace", timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError(f"{compiler[0]} could not be run: {error}") from error
    return " ".join(compiler) + done.stdout
