"""The live table of a Recorder: rich in a terminal, HTML in a notebook."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from flexact.errors import missing_extra
from flexact.io.markdown_tables import counted
from flexact.io.text_tables import printable
from flexact.observe.figures.colours import candidate_colours
from flexact.observe.history import Records, number_names
from flexact.observe.notebook import recorder_html
from flexact.observe.selection import Selection
from flexact.observe.selection_rows import alike, columns_of

_BLOCKS = "▁▂▃▄▅▆▇█"
_MAX_BLOCKS = 40
_OTHER_LINES = 6
"""Lines of the terminal that the table's frame and the prompt take."""


class LiveTable:
    """Shows the picks, and replaces them at each record."""

    def __init__(self) -> None:
        self._cell: Any = None
        self._live: Any = None
        if _in_notebook():
            return
        try:
            from rich.console import Console
            from rich.live import Live
        except ImportError:
            raise missing_extra("rich", "cli") from None
        self._live = Live(console=Console(stderr=True), auto_refresh=False)

    def show(self, history: Records, now: Selection) -> None:
        """Show the last record."""
        if self._live is None:
            from IPython.display import HTML, display

            page = HTML(recorder_html(history, now.rows))
            if self._cell is None:
                self._cell = display(page, display_id=True)
            else:
                self._cell.update(page)
            return
        if not self._live.is_started:
            self._live.start()
        most = max(1, self._live.console.size.height - _OTHER_LINES)
        self._live.update(terminal_table(history, now, most), refresh=True)

    def close(self, history: Records) -> None:
        """Leave the last table where it is."""
        if self._live is not None:
            self._live.stop()


def terminal_table(history: Records, now: Selection, most: int) -> Any:
    """Return a rich table of at most `most` lines. Sites that pick together share a line."""
    from rich.table import Table
    from rich.text import Text

    groups = alike(now)
    rows = [row for _, row in groups[:most]]
    colours = candidate_colours(name for row in now for name in row.probabilities)
    columns = columns_of(rows)
    left = len(groups) - len(rows)
    table = Table(title=Text(_title(history)), caption=f"and {counted(left, 'more site')}" if left else None)
    for title in ("site", *columns):
        table.add_column(title)
    for (name, row), cells in zip(groups, zip(*columns.values(), strict=True), strict=False):
        pick = Text(cells[0], style="" if row.pick is None else colours[row.pick])
        style = "bright_black" if row.undecided else ""
        table.add_row(Text(printable(name)), pick, *map(Text, cells[1:]), style=style)
    return table


def _title(history: Records) -> str:
    """Return the step and the numbers of the last record; the first number also as a line of blocks."""
    last = history[-1]
    names = [name for name in number_names(history) if name in last]
    title = " · ".join([f"step {last['step']}", *(f"{printable(name)} {last[name]:.4g}" for name in names)])
    if names:
        title += "\n" + sparkline([entry[names[0]] for entry in history if names[0] in entry][-_MAX_BLOCKS:])
    return title


def sparkline(values: Sequence[float]) -> str:
    """Return values as blocks of eight heights; a space for what is not finite.

    >>> sparkline([0.0, 1.0, 7.0])
    '▁▂█'
    """
    finite = [value for value in values if math.isfinite(value)]
    low, span = min(finite, default=0.0), (max(finite, default=0.0) - min(finite, default=0.0)) or 1.0
    return "".join(_BLOCKS[round((v - low) / span * 7)] if math.isfinite(v) else " " for v in values)


def _in_notebook() -> bool:
    """Whether this runs in the kernel of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and hasattr(shell, "kernel")
