"""The command `flexact`: errors in one line, and the name of the extra where that is missing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from flexact.errors import FlexActError, missing_extra


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process with 0, 2 for bad input, 130 after Ctrl-C."""
    for package in ("typer", "rich"):
        try:
            importlib.import_module(package)
        except ImportError:
            sys.exit(_told(missing_extra(package, "cli")))
    try:
        from flexact.cli.commands import app

        app(args=list(sys.argv[1:] if arguments is None else arguments), prog_name="flexact")
    except FlexActError as error:
        sys.exit(_told(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _told(error: FlexActError) -> int:
    print(f"flexact: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2
