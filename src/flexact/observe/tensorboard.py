"""TensorBoard output of a Recorder: curves and histograms per site, and heat maps of the history."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from flexact.errors import missing_extra
from flexact.io.json_input import path_of
from flexact.observe.figures import history as plots
from flexact.observe.figures.drawing import can_draw
from flexact.observe.history import Records, number_names
from flexact.observe.selection import Selection
from flexact.routing.sites import sites_of


class Board:
    """Writes a Recorder's data to TensorBoard.

    where: a folder, or the user's own `torch.utils.tensorboard.SummaryWriter`, which `close` leaves open.
    """

    def __init__(self, where: Any, model: nn.Module) -> None:
        self._model = model
        self._owns_writer = not hasattr(where, "add_scalar")
        if self._owns_writer:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise missing_extra("tensorboard", "tensorboard") from None
            where = SummaryWriter(path_of(where, "the TensorBoard folder"))
        self._writer = where

    def show(self, history: Records, now: Selection) -> None:
        """Write the last record.

        The curve of a site that picks per channel is the mean over its channels. The histogram of the logits leaves out
        dropped candidates.
        """
        last = history[-1]
        step = last["step"]
        for site, (name, probabilities) in zip(sites_of(self._model), last["sites"].items(), strict=True):
            for candidate, p in probabilities.items():
                self._writer.add_scalar(f"flexact/{name}/{candidate}", p, step)
            logits = site.logits.detach().view(site.rows, site.k)[site.dropped_at < 0]
            for kind, values in (("logits", logits), ("probabilities", site.pi())):
                finite = values[values.isfinite()]
                if finite.numel():  # a diverged run has none; its curves show the NaN
                    self._writer.add_histogram(f"flexact_{kind}/{name}", finite, step)
        for name in number_names([last]):
            self._writer.add_scalar(name, last[name], step)

    def close(self, history: Records) -> None:
        """Write the heat maps of the whole history, and close the writer if this Board opened it."""
        if history and can_draw():
            for name, picture in (("picks", plots.picks(history)), ("probabilities", plots.probabilities(history))):
                self._writer.add_figure(f"flexact_heat_maps/{name}", picture.figure, history[-1]["step"])
        elif history:
            reason = missing_extra("matplotlib", "plots")
            warnings.warn(f"no heat maps were written to TensorBoard: {reason}", stacklevel=3)
        if self._owns_writer:
            self._writer.close()
        else:
            self._writer.flush()
