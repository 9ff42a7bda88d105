"""How a study was called, for messages that name its options."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flexact.errors import FlexActError


def again() -> str:
    """The command that resumes this run."""
    program = Path(sys.argv[0])
    called = [sys.executable, "-m", "flexact"] if program.name == "__main__.py" else [program.name]
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--overwrite", "--resume")]
    return shlex.join([*called, *arguments, "--resume"])


def in_python(message: str) -> str:
    """A message about the options of a command, for those who call its function.

    >>> in_python("--seeds must be at least 1; give --engine ray, or --overwrite. Continue with --resume.")
    "seeds= must be at least 1; give engine='ray', or overwrite=True. Continue with the same call."
    """
    message = message.replace("--resume", "the same call")
    message = re.sub(r"--(engine|device|address) (ray|local|inline|cpu|HOST:PORT)\b", r"\1='\2'", message)
    message = re.sub(r"--(overwrite|retry-failed)\b", lambda flag: flag[1].replace("-", "_") + "=True", message)
    return re.sub(r"--(out|seeds|methods|candidates|engine|jobs|device|address)\b", r"\1=", message)


@contextmanager
def called_from_python() -> Iterator[None]:
    """Errors of the body name the arguments of a function instead of the options of a command."""
    try:
        yield
    except FlexActError as error:
        error.args = (in_python(str(error)),)
        raise
