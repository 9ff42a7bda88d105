"""Charts as SVG: the positions of curves, bars and cells, and what a browser must not read as markup."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import matplotlib.image
import numpy
import pytest
from flexact.observe.figures.axis import Axis
from flexact.observe.figures.description import SHADES, Bars, Event, Grid, Line, Panel
from flexact.observe.figures.picture import Picture
from flexact.observe.figures.raster import data_uri
from flexact.observe.figures.svg_backend import charts, panels
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import LinearSegmentedColormap, to_rgba


def _drawn(panel: Panel) -> ElementTree.Element:
    (chart,) = charts(Picture("p", "title", "sentence", [panel]))
    return ElementTree.fromstring(chart)


def _pixels(grid: Grid) -> Any:
    return matplotlib.image.imread(io.BytesIO(base64.b64decode(data_uri(grid).partition(",")[2])))


def _percent(text: str | None) -> float:
    assert text is not None
    return float(text.removesuffix("%"))


def test_a_curve_passes_through_its_points_and_has_a_gap_where_a_value_is_not_finite() -> None:
    line = Line("loss", [0, 10, 20, 40], [1.0, math.nan, 3.0, 2.0])
    chart = _drawn(Panel(x_label="step", lines=[line], value_range=(1.0, 3.0)))
    (path,) = [one for one in chart.iter("path") if one.get("class") == "line"]
    assert path.get("d") == "M0.00 1000.00M500.00 0.00L1000.00 500.00"


def test_a_single_point_is_a_dot() -> None:
    (dot,) = _drawn(Panel(lines=[Line("loss", [3], [2.0])], value_range=(0.0, 8.0))).iter("circle")
    assert (_percent(dot.get("cx")), _percent(dot.get("cy"))) == (50.0, 75.0)


def test_bars_and_whiskers_have_their_lengths() -> None:
    bars = [Bars("ours", [1.0, 2.0], "#0072b2", [0.5, 0.0]), Bars("theirs", [3.0, math.nan], "#e69f00")]
    chart = _drawn(Panel(x_label="error", rows=["a", "b"], bars=bars, value_range=(0.0, 4.0)))
    widths = [_percent(one.get("width")) for one in chart.iter("rect") if one.get("class") != "back"]
    assert widths == [25.0, 50.0, 75.0]
    (whisker,) = [one for one in chart.iter("line") if one.get("class") == "whisker"]
    assert (_percent(whisker.get("x1")), _percent(whisker.get("x2"))) == (12.5, 37.5)


def test_stacked_bars_begin_where_the_one_before_ends() -> None:
    bars = [Bars("a", [0.25], "#0072b2"), Bars("b", [0.75], "#e69f00")]
    chart = _drawn(Panel(x_label="p", rows=["x"], bars=bars, stacked=True, value_range=(0.0, 1.0)))
    spans = [(_percent(one.get("x")), _percent(one.get("width"))) for one in chart.iter("rect") if one.get("fill")]
    assert spans == [(0.0, 25.0), (25.0, 75.0)]


def test_an_event_is_a_line_at_its_step_and_one_outside_is_left_out() -> None:
    events = [Event(5, "drop", "elu", "elu at 2 sites"), Event(99, "drop", "tanh")]
    chart = _drawn(Panel(x_label="step", lines=[Line("loss", [0, 20], [0.0, 1.0])], events=events))
    (line,) = [one for one in chart.iter("line") if one.get("class") == "event"]
    assert _percent(line.get("x1")) == _percent(line.get("x2")) == 25.0
    assert [one.text for one in chart.iter("text") if one.get("class") == "event"] == ["elu"]


def test_a_heat_map_is_an_image_in_the_shades_of_matplotlibs_colour_map() -> None:
    values = [[0.0, 0.1, 0.5], [0.9, 1.0, math.nan]]
    pixels = _pixels(Grid([0, 1, 2], values))
    shades = LinearSegmentedColormap.from_list("flexact", SHADES, N=4096)
    assert pixels.shape == (2, 3, 4)
    for row in range(2):
        for column in range(3):
            if math.isnan(values[row][column]):
                assert pixels[row, column, 3] == 0
            else:
                assert pixels[row, column] == pytest.approx(shades(values[row][column]), abs=0.01)


def test_columns_of_a_heat_map_are_as_wide_as_their_distances() -> None:
    grid = Grid([0, 1, 9], [[0, 1, 0]], [("relu", "#0072b2"), ("tanh", "#cc79a7")])
    pixels = _pixels(grid)[0]
    tanh = numpy.isclose(pixels, to_rgba("#cc79a7")).all(axis=1)
    # The edges are −0.5, 0.5, 5 and 13.
    assert tanh.mean() == pytest.approx(4.5 / 13.5, abs=0.01)
    assert tanh.argmax() / len(tanh) == pytest.approx(1 / 13.5, abs=0.01)


def test_cells_with_texts_are_rectangles_with_their_opacity() -> None:
    grid = Grid(range(2), [[0.0, math.nan]], [("relu", "#0072b2")], [["first", ""]], [[0.4, 1.0]])
    (tile,) = [one for one in _drawn(Panel(rows=["stage"], grid=grid)).iter("rect") if one.get("class") == "tile"]
    assert (tile.get("fill"), tile.get("fill-opacity"), tile.get("width")) == ("#0072b2", "0.40", "50.000%")
    assert tile.findtext("title") == "first"


def test_names_are_text_and_never_markup() -> None:
    name = "<script>alert('1')</script>\"&%{x}"
    line = Line(name, [0, 1], [0, 1])
    picture = Picture(name, name, name, [Panel(name, name, name, [line], [Event(0.5, name, name, name)])] * 2)
    page = ElementTree.fromstring(f"<div>{panels(picture)}</div>")
    assert not list(page.iter("script"))
    (area, _) = [one for one in page.iter("svg") if one.get("class") == "area"]
    assert json.loads(area.get("data-axes") or "")["title"] == name
    assert {one.get("data-name") for one in page.iter("path") if one.get("class") == "line"} == {name}


def test_a_legend_and_its_curves_share_a_key() -> None:
    lines = [Line("relu", [0, 1], [0, 1]), Line("prelu", [0, 1], [1, 0], shown=False)]
    html = panels(Picture("p", "t", "s", [Panel("one", lines=lines)]))
    keys = dict(re.findall(r'<button[^>]*data-key="(\d)" aria-pressed="(\w+)"', html))
    assert keys == {"0": "true", "1": "false"}
    assert '<g data-key="1" class="off"><path' in html


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(3, 8))
def test_ticks_are_few_round_and_on_the_axis(low: float, length: float, most: int) -> None:
    axis = Axis(low, low + length)
    if axis.high - axis.low < 1e-9 * max(abs(axis.low), 1e-9):
        return  # a float cannot tell such ticks apart
    ticks = axis.ticks(most)
    assert len(ticks) <= most + 1
    steps = {float(f"{b - a:.3g}") for a, b in pairwise(ticks)}
    assert len(steps) <= 1
    assert all(f"{step:e}"[0] in "125" for step in steps)
    assert all(axis.low - 1e-6 * length <= tick <= axis.high + 1e-6 * length for tick in ticks)


@pytest.mark.parametrize(
    "values", [[], [math.nan], [2.0], [0.0, 0.0], [5.0, math.inf], [-1e308, 1e308], [1.0, 1 + 1e-15]]
)
def test_an_axis_of_nothing_or_of_one_value_has_a_length(values: list[float]) -> None:
    for room in (0.0, 0.04):
        axis = Axis.around(values, room)
        assert axis.high > axis.low
        assert all(0 <= axis.at(value) <= 1 for value in values if abs(value) < 1e300)
        assert axis.ticks()
