"""Picture: a description that can be drawn with matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexact.observe.figures.description import PictureDescription

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Picture(PictureDescription):
    """Panels under one title; `figure` draws them."""

    def figure(self) -> Figure:
        """Return the picture as a matplotlib figure."""
        from flexact.observe.figures.matplotlib_backend import drawn

        return drawn(self)
