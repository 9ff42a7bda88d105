"""Tests of the figures of a Recorder's history."""

from __future__ import annotations

import math
import re
import sys
from statistics import NormalDist
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from flexact import FlexActError
from flexact.io.text_tables import cut
from flexact.observe.figures import drawing
from flexact.observe.figures import history as plots
from flexact.observe.figures.colours import GREY, INK, candidate_colours
from flexact.observe.figures.drawing import Picture
from flexact.observe.figures.network_map import MAX_PANELS, margins, network, stages
from flexact.observe.figures.outcomes import outcomes
from flexact.policy.evidence import Contest


def _panels(picture: Picture) -> list[Axes]:
    """Returns the panels of a figure without its colour bar."""
    return [ax for ax in picture.figure.axes if ax.get_label() != "<colorbar>"]


def _rows(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.get_yticklabels()]


def _titles(picture: Picture) -> list[str]:
    return [ax.get_title() for ax in _panels(picture)]


def _legend(picture: Picture) -> list[str]:
    return [text.get_text() for legend in picture.figure.legends for text in legend.get_texts()]


def _cells(ax: Axes) -> list[list[float]]:
    (image,) = ax.images
    return image.get_array().filled(math.nan).tolist()  # type: ignore[no-any-return, union-attr]


def _curves(ax: Axes) -> dict[str, list[tuple[float, float]]]:
    """Returns the points of each curve by its name in the legend, without the vertical lines of events."""
    lines = [line for line in ax.get_lines() if line.get_label() not in ("drop", "commitment")]
    return {str(line.get_label()): list(zip(*line.get_data(), strict=True)) for line in lines}


def _history(steps: int = 5, **numbers: float) -> list[dict[str, Any]]:
    """Two sites: the first picks tanh, the second keeps relu."""
    history = []
    for step in range(steps):
        p = step / max(1, steps - 1)
        sites = {"a": {"relu": 1 - p, "tanh": p}, "b": {"relu": 0.9, "tanh": 0.1}}
        history.append({"step": step * 10, "sites": sites, "picks": {"a": "", "b": ""}, **numbers})
    return history


def test_pick_map_shows_who_leads_at_each_site_and_step() -> None:
    picture = plots.picks(_history())
    (ax,) = _panels(picture)
    assert _rows(ax) == ["a", "b"]
    assert ax.get_xlim() == (-5, 45)
    names = _legend(picture)
    leaders = [[names[int(i)] for i in row] for row in _cells(ax)]
    assert leaders == [["relu", "relu", "undecided", "tanh", "tanh"], ["relu"] * 5]


def test_only_a_map_with_a_tie_has_undecided_in_its_legend() -> None:
    assert _legend(plots.picks(_history())) == ["relu", "tanh", "undecided"]
    assert _legend(plots.picks(_history(2))) == ["relu", "tanh"]


def test_a_number_that_a_record_lacks_is_not_plotted() -> None:
    with pytest.raises(FlexActError, match="'epoch'"):
        plots.picks(_history(), by="epoch")


def test_the_height_of_a_map_fits_its_sites() -> None:
    def inches(sites: int) -> float:
        history = [{"step": 0, "sites": {f"s{i}": {"relu": 1.0, "tanh": 0.0} for i in range(sites)}}]
        figure = plots.picks(history).figure
        return figure.axes[0].get_position().height * figure.get_figheight()

    assert inches(1) < 0.8
    assert 1.5 < inches(8) < 3.0


def test_probabilities_have_one_heat_map_a_candidate() -> None:
    picture = plots.probabilities(_history())
    assert _titles(picture) == ["relu", "tanh"]
    assert _cells(_panels(picture)[1]) == [[0.0, 0.25, 0.5, 0.75, 1.0], [0.1] * 5]


def test_columns_of_a_heat_map_are_as_wide_as_their_distances() -> None:
    history = [entry | {"step": step} for entry, step in zip(_history(3), (0, 1, 9), strict=True)]
    (ax,) = _panels(plots.picks(history))
    assert ax.get_xlim() == (-0.5, 13.0)
    last = _cells(ax)[0].index(1.0) / len(_cells(ax)[0])  # the edges are -0.5, 0.5, 5 and 13
    assert -0.5 + 13.5 * last == pytest.approx(5, abs=0.5)


def test_outcomes_show_the_last_record() -> None:
    first, second = outcomes(_history())
    assert (first.site, first.pick, first.probability, first.runner_up, first.margin) == ("a", "tanh", 1.0, None, 1.0)
    assert (second.site, second.pick, second.probability, second.runner_up) == ("b", "relu", 0.9, "tanh")
    assert second.margin == pytest.approx(0.8)
    assert (first.committed, first.decided, second.committed, second.decided) == (False,) * 4


def test_outcomes_have_the_evidence_of_drops_and_decisions_from_whichever_record_has_them() -> None:
    history = _history()
    drop = {"step": 9, "margin": 0.5, "standard_error": 0.25, "steps": 40}
    history[1] |= {"drops": {"a": {"relu": drop}}}
    history[3] |= {"decisions": {"a": {"runner_up": "relu", "decided": True}}}
    history[4] |= {
        "drops": {"b": {"tanh": dict.fromkeys(drop) | {"step": 9}}},
        "decisions": {"b": {"runner_up": "tanh", "decided": False}},
    }
    first, second = outcomes(history)
    assert (first.runner_up, first.lead, first.decided) == ("relu", Contest(0.5, 0.25, 40), True)
    assert (second.runner_up, second.lead, second.undecided) == ("tanh", None, True)
    assert "drops" not in [title for picture in plots.history_pictures(history) for title in _titles(picture)]


def test_candidate_that_a_site_does_not_have_is_an_empty_cell() -> None:
    history = [{"step": 0, "sites": {"a": {"relu": 1.0}, "b": {"gelu": 1.0}}}]
    gelu = _panels(plots.probabilities(history))[1]
    assert math.isnan(_cells(gelu)[0][0])


def test_long_history_is_thinned_but_keeps_its_ends() -> None:
    (ax,) = _panels(plots.picks(_history(5000)))
    assert len(_cells(ax)[0]) == pytest.approx(plots.MAX_COLUMNS, rel=0.1)
    assert ax.get_xlim() == pytest.approx((0, 49990), abs=100)


def test_numbers_have_curves_of_their_own() -> None:
    assert _titles(plots.numbers(_history(loss=1.0, accuracy=0.5))) == ["loss", "accuracy"]
    with pytest.raises(FlexActError, match="no numbers"):
        plots.numbers(_history())


def _decided() -> list[dict[str, Any]]:
    """Three sites of two stages. They drop two of three candidates: two sites together and surely, one alone and
    unsurely.
    """
    names = [f"stage.{i}.act" for i in range(2)] + ["head.0", "head.1"]
    history = [
        {"step": s, "sites": {name: dict.fromkeys(("relu", "tanh", "elu"), 1 / 3) for name in names}} for s in (0, 5)
    ]
    sure = {
        "elu": {"step": 3, "margin": 0.6, "standard_error": 0.2, "steps": 9},
        "relu": {"step": 7, "margin": 0.196, "standard_error": 0.1, "steps": 9},
    }
    unsure = {"elu": dict.fromkeys(sure["elu"]) | {"step": 3}, "relu": sure["relu"] | {"margin": -0.05}}
    drops = {name: unsure if name == "head.1" else sure for name in names}
    history[1]["drops"] = {name: {"elu": one["elu"]} for name, one in drops.items()}
    last = {
        "step": 10,
        "sites": {name: {"relu": 0.0, "tanh": 1.0, "elu": 0.0} for name in names},
        "drops": {name: {"relu": one["relu"]} for name, one in drops.items()},
        "decisions": {name: {"original": "tanh", "runner_up": "relu", "decided": name != "head.1"} for name in names},
    }
    return [*history, last]


def _tiles(ax: Axes) -> list[tuple[float, str, float]]:
    """Returns the row, colour and opacity of each tile of the map."""
    tiles = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    return [(tile.get_y() + 0.5, to_hex(tile.get_facecolor()), tile.get_facecolor()[3]) for tile in tiles]


def test_the_map_has_a_row_per_stage_and_its_opacity_shows_how_sure_the_evidence_is() -> None:
    picture = network(_decided())
    (ax,) = _panels(picture)
    assert _rows(ax) == ["stage", "head"]
    assert _legend(picture) == ["tanh", "undecided"]
    tanh = candidate_colours(["tanh"])["tanh"]
    assert [tile[:2] for tile in _tiles(ax)] == [(0, tanh), (0, tanh), (1, tanh), (1, GREY)]
    sure, unsure = (tile[2] for tile in _tiles(ax)[2:])
    assert sure == pytest.approx(0.2 + 0.8 * (2 * NormalDist().cdf(1.96) - 1))
    assert unsure == 0.2


def test_a_long_stage_continues_in_the_next_row() -> None:
    history = [{"step": 0, "sites": {f"blocks.{i}.act": {"relu": 0.75, "tanh": 0.25} for i in range(20)}}]
    (ax,) = _panels(network(history))
    assert _rows(ax) == ["blocks", ""]
    assert [line for line, _, _ in _tiles(ax)] == [0] * 16 + [1] * 4
    assert _tiles(ax)[0][2] == pytest.approx(0.2 + 0.8 * 0.5)


def test_a_site_without_a_leader_is_grey_on_the_map() -> None:
    history = [{"step": 0, "sites": {"a": {"relu": 0.5, "tanh": 0.5}, "b": {"relu": 0.4, "tanh": 0.6}}}]
    picture = network(history)
    assert _legend(picture) == ["undecided", "tanh"]
    assert _tiles(_panels(picture)[0])[0][1] == GREY


@pytest.mark.parametrize(
    ("sites", "names"),
    [
        (
            ["relu", "layer1.0.relu", "layer1.1.relu", "layer2.0.relu", "layer2.1.relu", "layer2.2.relu"],
            ["", "layer1", "layer2"],
        ),
        (
            [*(f"bert.encoder.layer.{i}.intermediate.act" for i in range(12)), "bert.pooler.act"],
            ["bert.encoder", "bert.pooler"],
        ),
        ([f"stages.{i}.blocks.{j}.act" for i in range(4) for j in range(3)], [f"stages.{i}" for i in range(4)]),
        (["1", "3", "5"], [""]),
        (["act"], [""]),
    ],
)
def test_stages_are_named_modules_of_the_model(sites: list[str], names: list[str]) -> None:
    found = stages(sites)
    assert [name for name, _ in found] == names
    assert [site for _, members in found for site in members] == sites


def test_margins_have_a_row_per_drop_and_sites_that_picked_together_share_a_panel() -> None:
    picture = margins(_decided())
    assert _titles(picture) == ["3 sites: tanh", "head.1: tanh (undecided)"]
    together, alone = _panels(picture)
    assert _rows(together) == ["elu at 3", "relu at 7"]
    assert _rows(alone) == ["elu at 3 (no evidence)", "relu at 7"]
    bars, dots = zip(*(ax.collections for ax in (together, alone)), strict=True)
    assert [one.get_offsets().tolist() for one in dots] == [[[0.6, 0], [0.196, 1]], [[-0.05, 1]]]
    (low, high), *_ = bars[0].get_segments()[0].tolist(), None
    assert [low[0], high[0]] == pytest.approx([0.4, 0.8])
    for one in (bars, dots):
        colours = [[to_hex(colour) for colour in marks.get_edgecolor()] for marks in one]
        assert colours == [list(candidate_colours(["elu", "relu"]).values()), [GREY]]


def test_sites_of_which_only_some_are_decided_have_panels_of_their_own() -> None:
    """Sites that share a pick have the same drops, but may have had different functions before."""
    history = _decided()
    history[2]["decisions"]["stage.1.act"]["decided"] = False
    titles = ["2 sites: tanh", "stage.1.act: tanh (undecided)", "head.1: tanh (undecided)"]
    assert _titles(margins(history)) == titles


def test_the_rows_of_the_map_have_the_names_of_stages_and_its_tiles_the_numbers_of_blocks() -> None:
    names = ["relu", *(f"layer1.{i}.relu" for i in range(20)), "layer2.0.act1", "layer2.act"]
    (ax,) = _panels(network([{"step": 1, "sites": {name: {"relu": 1.0} for name in names}}]))
    assert _rows(ax) == ["top level", "layer1", "", "layer2"]
    assert [text.get_text() for text in ax.texts] == [*map(str, range(20)), "0"]
    (ax,) = _panels(network([{"step": 1, "sites": {name: {"relu": 1.0} for name in ("1", "3")}}]))
    assert _rows(ax) == ["top level"]
    assert [text.get_text() for text in ax.texts] == ["1", "3"]


def test_in_a_trial_each_candidate_has_a_curve_of_its_own() -> None:
    sites = {"1": {"relu": 0.5, "gelu": 0.5}}
    trial = [
        {"step": i, "sites": sites, "loss": float(i), "trying": name}
        for i, name in enumerate(["relu"] * 2 + ["gelu"] * 2)
    ]
    (ax,) = _panels(plots.numbers([*trial, {"step": 9, "sites": sites, "loss": 9.0}]))
    relu, gelu, loss = ax.get_lines()
    assert [list(line.get_xdata()) for line in (relu, gelu, loss)] == [[0, 1], [2, 3], [9]]
    assert [relu.get_label(), gelu.get_label()] == ["relu", "gelu"]
    assert [line.get_color() for line in (relu, gelu, loss)] == [*candidate_colours(["relu", "gelu"]).values(), INK]


def test_a_panel_of_drops_without_any_evidence_says_so() -> None:
    history = _decided()
    for entry in history[1:]:
        entry["drops"]["head.1"] = {
            name: dict.fromkeys(drop) | {"step": drop["step"]} for name, drop in entry["drops"]["head.1"].items()
        }
    assert _rows(_panels(margins(history))[1]) == ["elu at 3 (no evidence)", "relu at 7 (no evidence)"]


def test_the_closest_of_many_margins_are_shown() -> None:
    sites = [f"s{i}" for i in range(60)]
    drops = {s: {"relu": {"step": 1, "margin": i / 10, "standard_error": 0.1, "steps": 9}} for i, s in enumerate(sites)}
    decisions = {site: {"original": "relu", "runner_up": "relu", "decided": True} for site in sites}
    pis = {site: {"relu": 0.0, "tanh": 1.0} for site in sites}
    picture = margins([{"step": 1, "sites": pis, "drops": drops, "decisions": decisions}])
    assert _titles(picture) == [f"s{i}: tanh" for i in range(MAX_PANELS)]
    assert f"{60 - MAX_PANELS} panels" in picture.sentence


def _events(picture: Picture) -> list[tuple[float, str, str]]:
    """Returns the step, kind and label of each vertical line in the first panel."""
    ax = _panels(picture)[0]
    lines = [line for line in ax.get_lines() if line.get_label() in ("drop", "commitment")]
    labels = {text.get_position()[0]: text.get_text() for text in ax.texts}
    return [(x := line.get_xdata()[0], str(line.get_label()), labels.get(x, "")) for line in lines]


def test_curves_over_steps_have_every_drop_and_the_commitment_marked() -> None:
    history = [entry | {"loss": 1.0} for entry in _decided()]
    for picture in (plots.numbers(history), plots.curves(history)):
        assert _events(picture) == [(3, "drop", "elu"), (7, "commitment", "relu")]
        assert {"drop", "commitment"} <= set(_legend(picture))
    assert [name for _, name, _ in _events(plots.numbers(history[:2]))] == ["drop"]


def test_a_curve_of_many_steps_is_short_on_the_page_and_keeps_its_spikes() -> None:
    history = [
        {"step": i, "sites": {"a": {"relu": 1.0}}, "loss": math.sin(i) + 50.0 * (i == 3333)} for i in range(20000)
    ]
    picture = plots.numbers(history)
    svg = picture.svg()
    assert len(svg) < 150_000
    points = re.findall(r"[ML] ([\d.]+) ([\d.]+)", svg)
    x, y = _panels(picture)[0].transData.transform((3333, history[3333]["loss"]))
    inch = picture.figure.dpi  # in an SVG of 72 units per inch
    spike = (72 * x / inch, 72 * (picture.figure.bbox.height - y) / inch)
    assert min(math.dist(spike, (float(u), float(v))) for u, v in points) < 1


def test_empty_history_says_what_to_do() -> None:
    with pytest.raises(FlexActError, match="history is empty"):
        plots.picks([])


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_every_figure_of_a_history_is_drawn(steps: int) -> None:
    for loss in (math.nan, math.inf, -math.inf):
        for picture in plots.history_pictures(_history(steps, loss=loss)):
            assert _panels(picture)
            assert ElementTree.fromstring(picture.svg()).get("role") == "img"


def test_names_are_drawn_verbatim() -> None:
    names = ["$x_1", "_hidden", "<b>", r"\frac{"]
    history = [{"step": i, "sites": {name: dict.fromkeys(names, 0.25) for name in names}} for i in range(2)]
    for picture in (plots.probabilities(history), plots.curves(history)):
        texts = {(element.text or "").strip("\u200b") for element in ElementTree.fromstring(picture.svg()).iter()}
        assert set(names) <= texts


def test_an_svg_has_a_title_and_is_the_same_each_time() -> None:
    first, second = (plots.picks(_history()).svg() for _ in range(2))
    assert first == second
    svg = ElementTree.fromstring(first)
    assert svg[0].text == "Pick by site and step"


def test_builtin_candidates_have_one_colour_each() -> None:
    from flexact.candidates.registry import known_names

    names = known_names()
    colours = candidate_colours([*names, "mine", "yours"])
    assert len(set(colours.values())) == len(colours)
    assert candidate_colours(["tanh"])["tanh"] == colours["tanh"]


def test_shortened_names_keep_the_part_that_distinguishes_them() -> None:
    assert cut(["x" * 40, "y" * 40], 18) == ["…" + "x" * 17, "…" + "y" * 17]


def test_sites_with_long_names_that_end_alike_can_be_distinguished() -> None:
    names = cut([f"roberta.encoder.layer.{i}.intermediate.intermediate_act_fn" for i in (9, 10)] + ["tanh"], 26)
    assert names == ["roberta.encoder.layer.9.i…", "roberta.encoder.layer.10.…", "tanh"]
    nested = [f"a.{i}.{'deep' * 8}.{j}.act" for i in range(2) for j in range(2)]
    assert cut(nested, 26) == nested


@pytest.mark.parametrize("across", [1, 2, 3])
def test_a_legend_of_many_long_names_stays_inside_the_figure(across: int) -> None:
    with drawing.style():
        figure, axes = drawing.panels(across, across)
        for number in range(8):
            drawing.line(axes[0], f"parametric ReLU (AReLU) {number}", [0, 1], [0, 1])
        box = drawing.finished(figure).legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1


def test_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(FlexActError, match=r"flexact\[plots\]"):
        plots.picks(_history())


def test_a_heat_map_of_few_steps_is_marked_at_whole_steps() -> None:
    history = [entry | {"step": step} for step, entry in enumerate(_history(20))]
    axes = plots.picks(history).figure.axes[0]
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
