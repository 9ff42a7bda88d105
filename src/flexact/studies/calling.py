"""The command line of this run, for messages that say how to resume it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def again() -> str:
    """The command that resumes this run."""
    program = Path(sys.argv[0])
    called = [sys.executable, "-m", "flexact"] if program.name == "__main__.py" else [program.name]
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--overwrite", "--resume")]
    return shlex.join([*called, *arguments, "--resume"])
