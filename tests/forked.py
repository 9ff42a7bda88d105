"""Starts test programs in processes forked from one that has already imported torch and transformers.

A fresh process spends six seconds on these imports and on reading BERT's source. conftest.py puts this folder on the
path, so the module can be imported as `forked`.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any


class Program:
    """A running program: a file, or a module by its name.

    settings: additional environment variables. folder: its working directory.
    """

    def __init__(
        self, program: str | Path, *arguments: object, settings: Mapping[str, object] = {}, folder: Path | None = None
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        _start_server()
        with tempfile.NamedTemporaryFile(delete=False) as out, tempfile.NamedTemporaryFile(delete=False) as err:
            self._files = Path(out.name), Path(err.name)
        environment = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
        environment.update({name: str(value) for name, value in settings.items()})
        words = [str(program), *map(str, arguments)]
        self.process: ForkServerProcess = context.Process(
            target=_run, args=(words, {**os.environ, **environment}, str(folder or Path.cwd()), *self._files)
        )
        self.process.start()

    @property
    def returncode(self) -> int | None:
        """The exit code: None while the program runs, -N after signal N."""
        return self.process.exitcode

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def output(self, timeout: float = 120.0) -> tuple[str, str]:
        """Waits for the program to end and returns its stdout and stderr."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.kill()
            raise TimeoutError("\n".join(path.read_text() for path in self._files))
        out, err = (path.read_text() for path in self._files)
        return out, err

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class Fresh:
    """Runs a program in a fresh process, for tests of how a process ends."""

    def __init__(self, module: str, *arguments: object, settings: Mapping[str, object]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in settings.items()}}
        command = [sys.executable, "-m", module, *map(str, arguments)]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.poll()

    def output(self, timeout: float = 120.0) -> tuple[str, str]:
        return self.process.communicate(timeout=timeout)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def outputs(*programs: Program, timeout: float = 120.0) -> list[str]:
    """Returns the stdout of programs, all of which must succeed."""
    until = time.monotonic() + timeout
    try:
        found = [one.output(until - time.monotonic()) for one in programs]
    finally:
        for one in programs:
            one.kill()
    for one, (_, err) in zip(programs, found, strict=True):
        assert one.returncode == 0, err[-3000:]
    return [out for out, _ in found]


def ranks(count: int, program: str | Path, *arguments: object, kind: Any = Program, **options: Any) -> list[Any]:
    """Starts a program once per rank, with the environment variables that torchrun sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1], "WORLD_SIZE": count}
    settings = {**meeting, "LOCAL_WORLD_SIZE": count, **options.pop("settings", {})}
    return [
        kind(program, *arguments, settings={**settings, "RANK": rank, "LOCAL_RANK": rank}, **options)
        for rank in range(count)
    ]


def _start_server() -> None:
    """Starts the process from which programs are forked, unless it is running."""
    forkserver.set_forkserver_preload(["forked_imports"])
    before = os.environ.get("PYTHONPATH")
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *([before] if before else [])])  # sys.path is not inherited
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _run(words: list[str], environment: dict[str, str], folder: str, out: Path, err: Path) -> None:
    """Runs the program in the forked process."""
    assert "forked_imports" in sys.modules, "what should have been imported before was not"
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_TRUNC), number)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = words
    code = 1
    try:
        if words[0].endswith(".py"):
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
        else:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # skips the destructor of the process group, which waits for the other ranks
