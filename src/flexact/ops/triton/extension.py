"""Compiles chain.cpp in the background, at the first use of the Triton kernels, and loads it.

Training continues meanwhile; the kernels are the same with and without it, and so are the results. Without a C++
compiler or Python's headers, the kernels are launched from Python, which takes the host longer.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import sysconfig
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flexact.ops.native import library
from flexact.ops.triton import driver
from flexact.ops.triton.pass_operators import first_run

SOURCE = Path(__file__).with_name("chain.cpp")
HEADERS = tuple(
    SOURCE.with_name(name) for name in ("passes.h", "pass_operators.h", "batch_norm_source.h", "site_node.h")
)
VARIABLE = "FLEXACT_EXTENSION"
"""The environment variable that disables the extension if it is 0."""

TIMEOUT = 600
"""Maximum duration of the compilation in seconds. It takes about ten, in the background."""

_log = logging.getLogger(__name__)

_module: ModuleType | None = None


def ready() -> Any:
    """Return the extension module; None as long as it is not compiled. The first call starts the compilation."""
    if _module is None:
        _start()
    return _module


def wait() -> None:
    """Wait until the extension is compiled, if it can be; for measurements."""
    thread = _start()
    if thread is not None:
        thread.join()


@functools.cache
def why_missing() -> str:
    """Return why the extension cannot be compiled here; empty if it can."""
    if os.environ.get(VARIABLE) == "0":
        return f"{VARIABLE} is 0"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if not compiler():
        return "there is no C++ compiler"
    headers = Path(sysconfig.get_paths()["include"], "Python.h"), Path(torch.__file__).parent / "include"
    missing = [path for path in headers if not path.exists()]
    if missing:
        return f"{missing[0]} is missing"
    return "" if _current_stream() else "this PyTorch does not export the function for the current stream"


@functools.cache
def _start() -> threading.Thread | None:
    reason = why_missing()
    if reason:
        _log.info("the kernels are launched from Python, which takes longer: %s.", reason)
        return None
    thread = threading.Thread(target=_load, name="flexact-extension", daemon=True)
    thread.start()
    return thread


def _load() -> None:
    global _module
    try:
        module = compiled()
    except Exception as error:  # in a thread, where no one would see it
        _log.warning("flexact's extension cannot be compiled, so kernels are launched from Python: %s", error)
        return
    launcher = driver.load()
    if launcher is not None:
        functions = (launcher.launch_kernels, launcher.check_alignment, launcher.error_text, _current_stream())
        module.connect(*[0 if one is None else ctypes.cast(one, ctypes.c_void_p).value for one in functions])
        _module = module


def compiled() -> Any:
    """Return the extension module, which is compiled if it is not in the cache. Raise CannotBuild if that fails."""
    return library.loaded(_build(), _imported)


def _build() -> library.Build:
    torch_folder = Path(torch.__file__).parent
    paths = [torch_folder / "include", torch_folder / "include/torch/csrc/api/include"]
    paths.append(Path(sysconfig.get_paths()["include"]))
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    flags = ("-std=c++17", "-O2", "-fPIC", "-shared", abi, *[f"-isystem{path}" for path in paths])
    libraries = (f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python")
    versions = (torch.__version__, str(sysconfig.get_config_var("SOABI")), platform.machine())
    depends_on = (*versions, *(header.read_text() for header in HEADERS))
    return library.Build((SOURCE,), compiler(), (flags,), libraries, depends_on, TIMEOUT)


def compiler() -> tuple[str, ...]:
    """Return the command of the C++ compiler: the variable CXX, or the first of c++, g++ and clang++; () if none."""
    commands = [tuple(shlex.split(given))] if (given := os.environ.get("CXX")) else [("c++",), ("g++",), ("clang++",)]
    return next((command for command in commands if command and shutil.which(command[0])), ())


def _imported(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader("chain", str(path))
    spec = importlib.util.spec_from_loader("chain", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    module.set_first_run(first_run)
    return module


def _current_stream() -> Any:
    """Return the function of PyTorch that returns a device's current stream; None without CUDA."""
    path = Path(torch.__file__).parent / "lib/libtorch_cuda.so"
    if not path.exists():
        return None
    return getattr(ctypes.CDLL(str(path)), "aoti_torch_get_current_cuda_stream", None)
