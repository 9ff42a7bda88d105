"""The command `flexact`, which prints each error on one line and names missing extras."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from flexact.errors import FlexActError, missing_extra


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. Exits with 0, 1 if a run failed, 2 after bad input, 130 after Ctrl-C, and 143 if
    SIGTERM stopped a grid."""
    for package in ("typer", "rich"):
        try:
            importlib.import_module(package)
        except ImportError:
            sys.exit(_print_error(missing_extra(package, "cli")))
    try:
        from flexact.cli.commands import app

        app(args=list(sys.argv[1:] if arguments is None else arguments), prog_name="flexact")
    except FlexActError as error:
        sys.exit(_print_error(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _print_error(error: FlexActError) -> int:
    """Print an error on one line, and return the exit code."""
    print(f"flexact: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2
