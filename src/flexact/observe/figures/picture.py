"""Pictures, which are drawn as figures by `matplotlib_backend` and for pages and notebooks by `svg_backend`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flexact.errors import missing_extra
from flexact.observe.figures.description import INK, Legend, Line, Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """Panels under one title, with one legend and a sentence that explains them."""

    slug: str
    title: str
    sentence: str
    panels: Sequence[Panel] = field(repr=False)
    across: int = 3
    """Maximum number of panels side by side. With 1, each panel is as wide as the page."""

    def figure(self) -> Figure:
        """Return the picture as a matplotlib figure."""
        try:
            from flexact.observe.figures.matplotlib_backend import drawn
        except ImportError:
            raise missing_extra("matplotlib", "plots") from None
        return drawn(self.title, self.panels, self.across, self.legend if self.needs_legend else {})

    @property
    def legend(self) -> Legend:
        """The legend's entries by name, in the order of appearance."""
        entries: Legend = {}
        for panel in self.panels:
            for line in panel.lines:
                if line.name != panel.title:  # the title names it already
                    entries.setdefault(line.name, line)
            if [bars.name for bars in panel.bars] != list(panel.rows):  # the rows name them already
                for bars in panel.bars:
                    entries.setdefault(bars.name, bars)
            for name, colour in panel.grid.categories if panel.grid else ():
                entries.setdefault(name, (name, colour))
            for event in panel.events:
                entries.setdefault(event.name, Line(event.name, [], [], INK, event.dash, 1.0))
        return entries

    @property
    def needs_legend(self) -> bool:
        """Whether there are several names, or colours that nothing else explains."""
        return len(self.legend) > 1 or any(panel.grid is not None and panel.grid.categories for panel in self.panels)

    @property
    def has_shades(self) -> bool:
        """Whether a panel is a heat map of probabilities."""
        return any(panel.grid is not None and not panel.grid.categories for panel in self.panels)
