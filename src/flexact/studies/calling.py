"""How this command was called, for messages that say how to go on."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def again() -> str:
    """The command that goes on with this run, called as this one was."""
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--overwrite", "--resume")]
    return shlex.join([*_called(), *arguments, "--resume"])


def _called() -> list[str]:
    """How this program was called: by name where that finds it, else by its path, or as a module of an interpreter."""
    program = sys.argv[0]
    module = Path(program).name == "__main__.py"
    path = sys.executable if module else program
    found = shutil.which(Path(path).name)
    known = found is not None and Path(found).absolute() == Path(path).absolute()
    name = Path(path).name if known else path
    return [name, "-m", "flexact"] if module else [name]
