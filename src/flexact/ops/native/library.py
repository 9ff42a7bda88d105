"""Compiles the C files of this package at first use, in about a second, and loads the library.

The library is kept in `$XDG_CACHE_HOME/flexact` (`~/.cache/flexact` by default), under a name that depends on the
sources and on the processor, for whose vector units it is compiled. If that folder cannot be written to, the library
goes into a temporary folder of this process. Nothing is compiled when flexact is installed or imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path

from flexact.ops import dispatch

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.c", "policy.c"))
_COMMON = ("-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
_VECTORS = ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()
FLAGS = ((*_COMMON, "-march=native", *_VECTORS, "-fopenmp"), _COMMON)
"""The compiler's flags, and those for a compiler that refuses them: without threads and newer vector units."""
TIMEOUT = 60
"""Maximum duration of a compilation in seconds."""


def loads() -> bool:
    """Return whether the library can be loaded; otherwise disable it with a warning."""
    try:
        load()
    except (OSError, subprocess.SubprocessError) as error:
        dispatch.give_up("native", "flexact's CPU kernels cannot be built", error)
        return False
    return True


def check(failed: int) -> None:
    """Raise a MemoryError if a function of kernels.c reports one."""
    if failed:
        raise MemoryError("flexact's CPU kernel could not allocate memory")


@functools.cache
def load() -> ctypes.CDLL:
    """Return the library with its functions; compile it if it is not in the cache. Raise OSError or a
    SubprocessError if that fails."""
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


def compiled(sources: tuple[Path, ...]) -> ctypes.CDLL:
    """Return the library of some C files; compile it if it is not in the cache. Raise OSError or a SubprocessError if
    that fails."""
    try:
        return ctypes.CDLL(str(_built(_cache_folder(), sources)))
    except OSError:  # the folder cannot be written to, or forbids machine code
        with tempfile.TemporaryDirectory(prefix="flexact") as folder:
            return ctypes.CDLL(str(_built(Path(folder), sources)))


def _cache_folder() -> Path:
    """Return the cache folder, created if it is missing."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flexact"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _built(folder: Path, sources: tuple[Path, ...]) -> Path:
    """Return the library in a folder, compiled if it is missing."""
    identity = "\n".join(
        [*(source.read_text() for source in sources), repr(FLAGS), *_processor(), *dispatch.c_compiler()]
    )
    library = folder / f"{sources[0].stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        handle, unfinished = tempfile.mkstemp(suffix=".so", dir=folder)
        os.close(handle)
        try:
            _compile(unfinished, sources)
            os.replace(unfinished, library)  # another process may be compiling it as well
        finally:
            Path(unfinished).unlink(missing_ok=True)
    return library


def _compile(output: str, sources: tuple[Path, ...]) -> None:
    for flags in FLAGS:
        command = [*dispatch.c_compiler(), *flags, "-o", output, *map(str, sources), "-lm", "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        if done.returncode == 0:
            return
    raise OSError(f"{shlex.join(command)} failed: {done.stderr.strip()[-500:]}")


def _processor() -> list[str]:
    """Return what the machine code depends on: the architecture, the C library and the processor's features."""
    found = [platform.machine(), *platform.libc_ver()]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        found += sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return found
