"""Compiles the C files of this package at first use, in about a second, and loads the library.

The library is kept in `$XDG_CACHE_HOME/flexact` (`~/.cache/flexact` by default), under a name that depends on the
sources and on the processor, for whose vector units it is compiled. If that folder cannot be used, each process
compiles into a temporary folder. Nothing is compiled when flexact is installed or imported.

After a fork, the first parallel loop hangs if the parent has run one, as in torch itself, because GNU's OpenMP runtime
does not restart its threads. torch's DataLoader therefore sets its workers to one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path
from typing import NamedTuple, TypeVar

from flexact.ops import dispatch
from flexact.ops.dispatch import CannotBuild

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.c", "policy.c"))
HEADERS = tuple(Path(__file__).with_name(name) for name in ("elementary.h", "generated.h"))
Loaded = TypeVar("Loaded")
_COMMON = (
    *("-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared"),
    f"-I{HEADERS[0].parent}",
)
_VECTORS = ("-march=native", *(["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []))
FLAGS = ((*_COMMON, *_VECTORS, "-fopenmp"), (*_COMMON, *_VECTORS, "-fopenmp-simd"), _COMMON)
"""The compiler's flags, followed by those for a compiler that refuses them: without threads, as clang; without newer
vector units, as an old gcc."""
TIMEOUT = 60
"""Maximum duration of a compilation in seconds."""


def loads() -> bool:
    """Return whether the library can be loaded; otherwise disable it with a warning."""
    try:
        load()
    except CannotBuild as error:
        dispatch.give_up("native", "flexact's CPU kernels cannot be built", error)
        return False
    return True


def check(failed: int) -> None:
    """Raise a MemoryError if a function of kernels.c reports one."""
    if failed:
        raise MemoryError("flexact's CPU kernel could not allocate memory")


@functools.cache
def load() -> ctypes.CDLL:
    """Return the library with its functions; compile it if it is not in the cache. Raise CannotBuild if that fails."""
    library, pointer = compiled(SOURCES), c_void_p
    library.sweep.argtypes = [pointer] * 7 + [c_int64, c_int]
    library.gradients.argtypes = [pointer] * 8 + [c_int64, c_int]
    library.sweep.restype = library.gradients.restype = c_int
    library.means.argtypes = [pointer, c_int64, c_int, pointer]
    library.logit_gradient.argtypes = [pointer, pointer, pointer, c_int, pointer]
    library.draw.argtypes = [pointer] * 6 + [c_int64, c_int]
    library.update.argtypes = [pointer] * 2
    for function in (library.means, library.logit_gradient, library.draw, library.update):
        function.restype = None
    return library


class Build(NamedTuple):
    """How some source files are compiled to a shared library."""

    sources: tuple[Path, ...]
    compiler: tuple[str, ...]
    flags: tuple[tuple[str, ...], ...]
    """The compiler's flags; if it refuses them, the next ones are tried."""
    libraries: tuple[str, ...]
    depends_on: tuple[str, ...]
    """What else the library depends on."""
    timeout: int = TIMEOUT
    """Maximum duration of the compilation in seconds."""


def compiled(sources: tuple[Path, ...]) -> ctypes.CDLL:
    """Return the library of some C files; compile it if it is not in the cache. Raise CannotBuild if that fails."""
    depends_on = (*processor(), *(header.read_text() for header in HEADERS))
    build = Build(sources, dispatch.c_compiler(), FLAGS, ("-lm", "-ldl"), depends_on)
    return loaded(build, lambda library: ctypes.CDLL(str(library)))


def generated(code: str) -> ctypes.CDLL:
    """Return the library of generated code; see `compiled`."""
    with tempfile.TemporaryDirectory(prefix="flexact") as folder:
        source = Path(folder) / "generated.c"
        source.write_text(code)
        return compiled((source,))


def loaded(build: Build, load: Callable[[Path], Loaded]) -> Loaded:
    """Return what a function loads from a library; compile it if it is not in the cache. Raise CannotBuild if that
    fails."""
    if not build.compiler or sys.platform == "win32":
        raise CannotBuild("there is no compiler")
    folder, name = cache_folder(), _name(build)
    if folder and _is_trusted(folder / name):
        with contextlib.suppress(OSError, ImportError):  # the folder forbids machine code
            return load(folder / name)
    try:
        with tempfile.TemporaryDirectory(prefix="flexact") as temporary:
            library = Path(temporary) / name
            _compile(library, build)
            if folder:
                with contextlib.suppress(OSError):  # the folder is full or read-only
                    _keep(library, folder)
            try:
                return load(library)
            except (OSError, ImportError):  # the temporary folder forbids machine code
                if folder is None:
                    raise
                return load(folder / name)
    except (OSError, ImportError) as error:
        raise CannotBuild(f"the library cannot be loaded: {error}") from error


def cache_folder() -> Path | None:
    """Return the cache folder, created if it is missing. Return None if there is none, or if another user could put a
    library there."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flexact"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return None
    return folder if _is_trusted(folder) else None


def _is_trusted(path: Path) -> bool:
    """Return whether a file or folder exists, and only its owner, who is this user or root, can write to it. Windows
    protects the folders of a user by other means."""
    try:
        status = path.stat()
    except OSError:
        return False
    if sys.platform == "win32":
        return True
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022


def _name(build: Build) -> str:
    """Return the file name of a library, which depends on its sources and on everything else in its build."""
    identity = "\n".join([*(source.read_text() for source in build.sources), repr(build[1:])])
    return f"{build.sources[0].stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"


def _compile(library: Path, build: Build) -> None:
    for flags in build.flags:
        command = [*build.compiler, *flags, "-o", str(library), *map(str, build.sources), *build.libraries]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=build.timeout, check=False)
        except subprocess.TimeoutExpired as error:
            raise CannotBuild(f"{build.compiler[0]} did not finish within {build.timeout} s") from error
        except OSError as error:
            raise CannotBuild(str(error)) from error
        if done.returncode == 0:
            return
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    reason = next((line for line in lines if ": error: " in line and "collect2" not in line), lines[0])
    raise CannotBuild(f"{build.compiler[0]}: {reason}")


def _keep(library: Path, folder: Path) -> None:
    """Copy a library into a folder, where another process may keep the same one at the same time."""
    handle, unfinished = tempfile.mkstemp(dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(library.read_bytes())
        os.replace(unfinished, folder / library.name)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def processor() -> tuple[str, ...]:
    """Return what machine code depends on: the architecture, the C library and the processor's features."""
    found = [platform.machine(), *platform.libc_ver()]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        found += sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return tuple(found)
