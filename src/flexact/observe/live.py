"""The live table of a Recorder: text in a terminal, HTML in a notebook."""

from __future__ import annotations

import sys
from typing import Any

from flexact.errors import missing_extra
from flexact.io.markdown_tables import counted
from flexact.io.text_tables import printable
from flexact.observe.figures import history as plots
from flexact.observe.figures.drawing import can_draw
from flexact.observe.history import Records, number_names
from flexact.observe.html_tables import outcome_table
from flexact.observe.selection import Selection
from flexact.observe.selection_rows import alike, table


class LiveTable:
    """Shows the current picks, and updates them at each record."""

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

            page = HTML(notebook_html(history, now))
            if self._cell is None:
                self._cell = display(page, display_id=True)
            else:
                self._cell.update(page)
            return
        from rich.text import Text

        self._live.start()
        self._live.update(Text(terminal_text(history, now), no_wrap=True, overflow="ellipsis"), refresh=True)

    def close(self, history: Records) -> None:
        """Stop updating the table, which stays visible."""
        if self._live is not None:
            self._live.stop()


def terminal_text(history: Records, now: Selection) -> str:
    """Return the step and the numbers of the last record, and the selection. Sites that pick together share a line."""
    last = history[-1]
    numbers = [f"{printable(name)} {last[name]:.4g}" for name in number_names([last])]
    names, rows = zip(*alike(now), strict=True)
    return " · ".join([f"step {last['step']}", *numbers]) + "\n" + table(rows, names)


def notebook_html(history: Records, now: Selection) -> str:
    """Return curves of the recorded numbers and of the probabilities, then the selection.

    Without matplotlib, a note takes the place of the curves.
    """
    if not history:
        return f"<p>No records yet.</p>{outcome_table(now.rows)}"
    last = f"{counted(len(history), 'record')}, the last at step {history[-1]['step']}."
    curves = "<p>Install matplotlib to see curves here: pip install 'flexact[plots]'.</p>"
    if can_draw():
        draw = [plots.numbers, plots.curves] if number_names(history) else [plots.curves]
        curves = "\n".join(function(history).svg() for function in draw)
    return f"<p>{last}</p>{curves}{outcome_table(now.rows)}"


def _in_notebook() -> bool:
    """Whether this runs in the kernel of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and hasattr(shell, "kernel")
