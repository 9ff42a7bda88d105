"""What TensorBoard shows of a run: curves and histograms by site, and the heat maps of its history."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from statistics import fmean
from typing import Any

from torch import Tensor, nn

from flexact.errors import missing_extra
from flexact.io.json_input import path_of
from flexact.observe.figures import history as plots
from flexact.observe.selection import Row, selection
from flexact.routing.sites import sites_of

_FEWEST = 16
"""The first heat maps come with so many records; a few columns show nothing."""

History = Sequence[Mapping[str, Any]]


class Board:
    """Where a Recorder writes for TensorBoard.

    where: a folder, or a `torch.utils.tensorboard.SummaryWriter` of the user's own, which is left open.
    """

    def __init__(self, where: Any) -> None:
        self._is_own = not hasattr(where, "add_scalar")
        self._writer = _opened(where) if self._is_own else where

    def write(self, model: nn.Module, history: History, numbers: Mapping[str, float]) -> None:
        """Write the last record, and the user's numbers with it. Heat maps come when the records have doubled."""
        step = history[-1]["step"]
        _write_sites(self._writer, model, step)
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        if len(history) >= _FEWEST and len(history).bit_count() == 1 and _can_draw():
            _write_heat_maps(self._writer, history)

    def close(self, history: History) -> None:
        """Write the heat maps of the whole history, and close what was opened here."""
        if history and _can_draw():
            _write_heat_maps(self._writer, history)
        elif history:
            warnings.warn("TensorBoard gets no heat maps: pip install 'flexact[plots]' for them.", stacklevel=3)
        if self._is_own:
            self._writer.close()
        else:
            self._writer.flush()


def _opened(folder: Any) -> Any:
    path = path_of(folder, "TensorBoard's folder")
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise missing_extra("tensorboard", "tensorboard") from None
    return SummaryWriter(str(path))


def _write_sites(writer: Any, model: nn.Module, step: int) -> None:
    """Each candidate's probability as a curve, the mean over channels where a site has several; a site's logits and
    probabilities as histograms, the logits of the candidates still in."""
    by_name: dict[str, list[Row]] = {}
    for row in selection(model):
        by_name.setdefault(row.site, []).append(row)
    for site, (name, rows) in zip(sites_of(model), by_name.items(), strict=True):
        for candidate in site.candidates:
            mean = fmean(row.probabilities[candidate] for row in rows)
            writer.add_scalar(f"flexact/{name}/{candidate}", mean, step)
        logits = site.logits.detach().view(site.rows, site.k)[site.dropped_at < 0]
        _write_histogram(writer, f"flexact_logits/{name}", logits, step)
        _write_histogram(writer, f"flexact_probabilities/{name}", site.pi(), step)


def _write_histogram(writer: Any, tag: str, values: Tensor, step: int) -> None:
    finite = values[values.isfinite()]
    if finite.numel():  # a run that diverged has none, and its curves say so
        writer.add_histogram(tag, finite, step)


def _write_heat_maps(writer: Any, history: History) -> None:
    for name, picture in (("picks", plots.picks(history)), ("probabilities", plots.probabilities(history))):
        writer.add_figure(f"flexact_heat_maps/{name}", picture.figure(), history[-1]["step"])


def _can_draw() -> bool:
    return find_spec("matplotlib") is not None
