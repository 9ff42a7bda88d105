"""Pictures of a Recorder's history, and how they are drawn."""

from __future__ import annotations

import builtins
import io
import math
import sys
from statistics import NormalDist
from typing import Any

import pytest
from flexact.observe.figures.description import Bars, Line, Panel, candidate_colours, short_names
from flexact.observe.figures.matplotlib_backend import STYLE
from flexact.observe.figures.picture import Picture
from flexact.observe.figures.svg_backend import charts
from matplotlib.figure import Figure

from flexact import FlexActError
from flexact.observe.figures import history as plots
from flexact.observe.figures.network_map import GREY, MAX_PANELS, margins, network, stages
from flexact.observe.figures.outcomes import outcomes
from flexact.policy.evidence import Contest


def _history(steps: int = 5, **numbers: float) -> list[dict[str, Any]]:
    """Two sites: the first goes to tanh, the second stays with relu."""
    history = []
    for step in range(steps):
        p = step / max(1, steps - 1)
        sites = {"a": {"relu": 1 - p, "tanh": p}, "b": {"relu": 0.9, "tanh": 0.1}}
        history.append({"step": step * 10, "sites": sites, "picks": {"a": "", "b": ""}, **numbers})
    return history


def test_pick_map_shows_who_leads_at_each_site_and_step() -> None:
    (panel,) = plots.picks(_history()).panels
    assert panel.rows == ["a", "b"]
    assert panel.grid is not None
    assert panel.grid.columns == [0, 10, 20, 30, 40]
    names = [name for name, _ in panel.grid.categories]
    leaders = [[names[int(i)] for i in row] for row in panel.grid.values]
    assert leaders == [["relu", "relu", "undecided", "tanh", "tanh"], ["relu"] * 5]


def test_only_a_map_with_a_tie_has_undecided_in_its_legend_and_it_is_white() -> None:
    assert plots.picks(_history()).legend["undecided"] == ("undecided", "#ffffff")
    assert list(plots.picks(_history(2)).legend) == ["relu", "tanh"]


def _committing(at: int, records: int) -> list[dict[str, Any]]:
    """One site that commits in the record of some epoch."""
    pis = [{"relu": 0.3, "tanh": 0.7}] * at + [{"relu": 0.0, "tanh": 1.0}] * (records - at)
    return [{"step": 10 * i, "epoch": float(i), "sites": {"a": pi}, "picks": {}} for i, pi in enumerate(pis)]


@pytest.mark.parametrize(
    ("at", "last", "label"),
    [
        (1, 4, "epoch (nothing changes after epoch 1)"),
        (4, 7, "epoch (nothing changes after epoch 4)"),
        (40, 60, "epoch (nothing changes after epoch 40)"),
        (120, 200, "epoch"),  # to end at 180 would save little
        (201, 200, "epoch"),
    ],
)
def test_a_map_ends_soon_after_the_last_site_has_committed_and_says_so(at: int, last: int, label: str) -> None:
    (panel,) = plots.picks(_committing(at, 201), by="epoch").panels
    assert panel.grid is not None
    assert panel.grid.columns[-1] == last
    assert (panel.x_label, panel.x_title) == ("epoch", label)


def test_a_number_that_a_record_lacks_is_no_axis() -> None:
    with pytest.raises(FlexActError, match="'epoch'"):
        plots.picks(_history(), by="epoch")


def test_maps_of_probabilities_end_there_too() -> None:
    panel = plots.probabilities(_committing(4, 201)).panels[0]
    assert panel.grid is not None
    assert panel.grid.columns[-1] == 70
    assert panel.x_title == "step (nothing changes after step 40)"


def test_a_map_is_as_high_as_its_sites_take() -> None:
    def inches(sites: int) -> float:
        history = [{"step": 0, "sites": {f"s{i}": {"relu": 1.0, "tanh": 0.0} for i in range(sites)}}]
        figure = plots.picks(history).figure()
        return figure.axes[0].get_position().height * figure.get_figheight()

    assert inches(1) < 0.8
    assert 1.5 < inches(8) < 3.0


def test_probabilities_have_one_heat_map_a_candidate() -> None:
    panels = plots.probabilities(_history()).panels
    assert [panel.title for panel in panels] == ["relu", "tanh"]
    assert panels[1].grid is not None
    assert panels[1].grid.values == [[0.0, 0.25, 0.5, 0.75, 1.0], [0.1] * 5]


def test_outcomes_are_the_last_record() -> None:
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
    assert "drops" not in [panel.title for picture in plots.history_pictures(history) for panel in picture.panels]


@pytest.mark.parametrize("undecided", [0, 1])
def test_a_site_that_picks_by_channel_is_decided_if_all_channels_are(undecided: int) -> None:
    sites = {f"a:{i}": {"relu": 1.0, "tanh": 0.0} for i in range(3)}
    decisions = {f"a:{i}": {"runner_up": "tanh", "decided": i >= undecided} for i in range(3)}
    (only,) = outcomes([{"step": 0, "sites": sites, "decisions": decisions}])
    assert (only.site, only.committed, only.decided, only.lead) == ("a", True, not undecided, None)


def test_channels_of_a_site_are_shown_as_their_mean() -> None:
    history = [{"step": 0, "sites": {"a:0": {"relu": 1.0, "tanh": 0.0}, "a:1": {"relu": 0.5, "tanh": 0.5}}}]
    assert [panel.rows for panel in plots.probabilities(history).panels] == [["a"], ["a"]]
    assert {line.name: list(line.y) for line in plots.curves(history).panels[0].lines} == {
        "relu": [0.75],
        "tanh": [0.25],
    }
    assert "mean over its channels" in plots.picks(history).sentence


def test_a_history_of_sites_that_pick_by_channel_has_no_empty_picture_of_margins() -> None:
    drop = {"step": 9, "margin": 0.5, "standard_error": 0.25, "steps": 40}
    sites = {f"a:{i}": {"relu": 0.0, "tanh": 1.0} for i in range(2)}
    pictures = plots.history_pictures([{"step": 9, "sites": sites, "drops": {site: {"relu": drop} for site in sites}}])
    assert "Margin at each drop" not in [picture.title for picture in pictures]
    assert all(picture.panels for picture in pictures)


def test_candidate_that_a_site_does_not_have_is_an_empty_cell() -> None:
    history = [{"step": 0, "sites": {"a": {"relu": 1.0}, "b": {"gelu": 1.0}}}]
    gelu = plots.probabilities(history).panels[1]
    assert gelu.grid is not None
    assert math.isnan(gelu.grid.values[0][0])
    plots.probabilities(history).figure()


def test_long_history_is_thinned_but_keeps_its_ends() -> None:
    (panel,) = plots.picks(_history(5000)).panels
    assert panel.grid is not None
    assert len(panel.grid.columns) == plots.MAX_COLUMNS
    assert (panel.grid.columns[0], panel.grid.columns[-1]) == (0, 49990)


def test_numbers_are_curves_of_their_own() -> None:
    assert [panel.title for panel in plots.numbers(_history(loss=1.0, accuracy=0.5)).panels] == ["loss", "accuracy"]
    with pytest.raises(FlexActError, match="no numbers"):
        plots.numbers(_history())


def _decided() -> list[dict[str, Any]]:
    """Three sites of two stages that drop two of three candidates: two together and surely, one alone and unsurely."""
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


def test_the_map_has_a_line_a_stage_and_is_as_opaque_as_the_evidence_is_sure() -> None:
    (panel,) = network(_decided()).panels
    assert panel.rows == ["stage", "head"]
    assert panel.grid is not None
    assert panel.grid.categories == [("tanh", candidate_colours(["tanh"])["tanh"]), ("undecided", GREY)]
    assert [[value for value in row if not math.isnan(value)] for row in panel.grid.values] == [[0.0, 0.0], [0.0, 1.0]]
    sure, unsure = panel.grid.opacity[1][:2]
    assert sure == pytest.approx(0.2 + 0.8 * (2 * NormalDist().cdf(1.96) - 1))
    assert unsure == 0.2
    assert panel.grid.notes[1][1].splitlines() == ["head.1", "tanh, lead -0.05 ± 0.10", "undecided, confidence 0.00"]


def test_a_long_stage_goes_on_in_the_next_line() -> None:
    history = [{"step": 0, "sites": {f"blocks.{i}.act": {"relu": 0.75, "tanh": 0.25} for i in range(20)}}]
    (panel,) = network(history).panels
    assert panel.rows == ["blocks", ""]
    assert panel.grid is not None
    assert [sum(not math.isnan(value) for value in row) for row in panel.grid.values] == [16, 4]
    assert panel.grid.opacity[0][0] == pytest.approx(0.2 + 0.8 * 0.5)


def test_a_site_without_a_leader_is_grey_on_the_map() -> None:
    history = [{"step": 0, "sites": {"a": {"relu": 0.5, "tanh": 0.5}, "b": {"relu": 0.4, "tanh": 0.6}}}]
    grid = network(history).panels[0].grid
    assert grid is not None
    assert [name for name, _ in grid.categories] == ["undecided", "tanh"]
    assert grid.categories[0][1] == GREY


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
def test_stages_are_the_parts_that_an_author_named(sites: list[str], names: list[str]) -> None:
    found = stages(sites)
    assert [name for name, _ in found] == names
    assert [site for _, members in found for site in members] == sites


def test_margins_have_a_row_a_drop_and_sites_that_picked_together_share_a_panel() -> None:
    together, alone = margins(_decided()).panels
    assert (together.title, alone.title) == ("3 sites: tanh", "head.1: tanh (undecided)")
    assert together.rows == ["elu at 3", "relu at 7"]
    assert alone.rows == ["elu at 3 (no evidence)", "relu at 7"]
    elu, relu = together.bars
    assert (elu.values[0], elu.errors) == (0.6, [0.2, 0.0])
    assert (relu.values[1], relu.errors) == (0.196, [0.0, 0.1])
    assert relu.colour == candidate_colours(["relu"])["relu"]
    assert [bars.colour for bars in alone.bars] == [GREY]


def test_the_legend_of_margins_has_the_colours_of_candidates_and_of_undecided_sites() -> None:
    history = _decided()
    for entry in history:  # the undecided site is the first one
        for part in ("sites", "drops", "decisions"):
            if part in entry:
                entry[part] = {key: entry[part][key] for key in sorted(entry[part], key=lambda key: key != "head.1")}
    legend = margins(history).legend
    colours = {name: item.colour for name, item in legend.items() if isinstance(item, Bars)}
    assert colours == {"undecided": GREY, **candidate_colours(["elu", "relu"])}


def test_the_tiles_of_the_map_and_its_first_stage_have_names() -> None:
    names = ["relu", *(f"layer1.{i}.relu" for i in range(3)), "layer2.0.relu", "layer2.a_long_module_name.relu"]
    (panel,) = network([{"step": 1, "sites": {name: {"relu": 1.0} for name in names}}]).panels
    assert panel.rows == ["relu", "layer1", "layer2"]
    assert panel.grid is not None
    assert [[label for label in row if label] for row in panel.grid.labels] == [["relu"], ["0", "1", "2"], ["0"]]
    (panel,) = network([{"step": 1, "sites": {name: {"relu": 1.0} for name in ("1", "3")}}]).panels
    assert panel.rows == ["top level"]
    figure = network([{"step": 1, "sites": {name: {"relu": 1.0} for name in ("1", "3")}}]).figure()
    assert {"1", "3"} <= {text.get_text() for text in figure.axes[0].texts}


def test_in_a_trial_each_candidate_has_a_line_of_its_own() -> None:
    sites = {"1": {"relu": 0.5, "gelu": 0.5}}
    trial = [
        {"step": i, "sites": sites, "loss": float(i), "trying": name}
        for i, name in enumerate(["relu"] * 2 + ["gelu"] * 2)
    ]
    (panel,) = plots.numbers([*trial, {"step": 9, "sites": sites, "loss": 9.0}]).panels
    assert [(line.name, list(line.x)) for line in panel.lines] == [("relu", [0, 1]), ("gelu", [2, 3]), ("loss", [9])]
    assert [line.colour for line in panel.lines] == [*candidate_colours(["relu", "gelu"]).values(), "ink"]


def test_a_panel_of_drops_without_any_evidence_says_so() -> None:
    history = _decided()
    for entry in history[1:]:
        entry["drops"]["head.1"] = {
            name: dict.fromkeys(drop) | {"step": drop["step"]} for name, drop in entry["drops"]["head.1"].items()
        }
    picture = margins(history)
    assert picture.panels[1].rows == ["elu at 3 (no evidence)", "relu at 7 (no evidence)"]
    assert len(charts(picture)) == len([ax for ax in picture.figure().axes if ax.axison]) == 2


def test_the_closest_of_many_margins_are_shown() -> None:
    sites = [f"s{i}" for i in range(60)]
    drops = {s: {"relu": {"step": 1, "margin": i / 10, "standard_error": 0.1, "steps": 9}} for i, s in enumerate(sites)}
    decisions = {site: {"original": "relu", "runner_up": "relu", "decided": True} for site in sites}
    pis = {site: {"relu": 0.0, "tanh": 1.0} for site in sites}
    picture = margins([{"step": 1, "sites": pis, "drops": drops, "decisions": decisions}])
    assert [panel.title for panel in picture.panels] == [f"s{i}: tanh" for i in range(MAX_PANELS)]
    assert "36 panels" in picture.sentence


def test_curves_over_steps_have_every_drop_and_the_commitment_marked() -> None:
    history = [entry | {"loss": 1.0} for entry in _decided()]
    for picture in (plots.numbers(history), plots.curves(history)):
        marked = [(event.x, event.name, event.label, event.note) for event in picture.panels[0].events]
        assert marked == [(3, "drop", "elu", "elu at 4 sites"), (7, "commitment", "relu", "relu at 4 sites")]
        assert {"drop", "commitment"} <= set(picture.legend)
    assert [event.name for event in plots.numbers(history[:2]).panels[0].events] == ["drop"]


def test_a_long_curve_is_thinned_and_keeps_its_spikes() -> None:
    history = [
        {"step": i, "sites": {"a": {"relu": 1.0}}, "loss": math.sin(i) + 50.0 * (i == 3333)} for i in range(20000)
    ]
    (line,) = plots.numbers(history).panels[0].lines
    assert len(line.x) <= plots.MAX_POINTS
    assert list(line.x) == sorted(line.x)
    assert (3333, history[3333]["loss"]) in zip(line.x, line.y, strict=True)


def test_empty_history_says_what_to_do() -> None:
    with pytest.raises(FlexActError, match="history is empty"):
        plots.picks([])


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_every_picture_of_a_history_is_drawn(steps: int) -> None:
    for picture in plots.history_pictures(_history(steps, loss=math.nan)):
        figure = picture.figure()
        assert isinstance(figure, Figure)
        assert len([ax for ax in figure.axes if ax.axison]) >= len(picture.panels)


def test_names_are_drawn_as_they_are() -> None:
    names = ["$x_1", "_hidden", "<b>", r"\frac{"]
    lines = [Line(name, [0, 1], [0, 1], "#0072b2") for name in names]
    figure = Picture("p", "$t$", "s", [Panel("$", "$x$", "$", lines)]).figure()
    import matplotlib

    with matplotlib.rc_context(STYLE):
        data = io.BytesIO()
        figure.savefig(data, format="svg")
    text = data.getvalue().decode()
    for shown in ("$x_1", "_hidden", "&lt;b&gt;", r"\frac{", "$t$"):
        assert shown in text


def test_whisker_that_reaches_zero_ends_at_the_edge_of_a_logarithmic_axis() -> None:
    panel = Panel(rows=["a"], bars=[Bars("ours", [0.01], "#0072b2", [0.02])], log_values=True)
    limits = panel.limits
    assert limits is not None
    assert 0 < limits[0] < 0.01 < 0.03 < limits[1]
    (axes,) = Picture("p", "t", "s", [panel]).figure().axes
    assert all("$" not in label.get_text() for label in axes.get_xticklabels(which="both"))


def test_builtin_candidates_have_one_colour_each() -> None:
    from flexact.candidates import known_names

    names = known_names()
    colours = candidate_colours([*names, "mine", "yours"])
    assert len(set(colours.values())) == len(colours)
    assert candidate_colours(["tanh"])["tanh"] == colours["tanh"]


def test_names_on_an_axis_keep_what_tells_them_apart() -> None:
    assert short_names(["net.0.act", "net.1.act"]) == ["0.act", "1.act"]
    assert short_names(["1"]) == ["1"]
    assert short_names(["a", "a.b"]) == ["a", "a.b"]
    assert [len(name) for name in short_names(["x" * 40, "y" * 40], most=18)] == [18, 18]


def test_sites_with_long_names_that_end_alike_can_be_told_apart() -> None:
    roberta = [f"roberta.encoder.layer.{i}.intermediate.intermediate_act_fn" for i in range(12)]
    names = short_names([*roberta, "classifier.tanh"])
    assert names[8:] == [
        "roberta.encoder.layer.8…",
        "roberta.encoder.layer.9…",
        "…berta.encoder.layer.10…",
        "…berta.encoder.layer.11…",
        "classifier.tanh",
    ]
    nested = [f"a.{i}.{'deep' * 8}.{j}.act" for i in range(2) for j in range(2)]
    assert len(set(short_names([*nested, "head"]))) == 5


@pytest.mark.parametrize("across", [1, 2, 3])
def test_a_legend_of_many_long_names_stays_inside_the_figure(across: int) -> None:
    lines = [Line(f"parametric ReLU (AReLU) {i}", [0, 1], [0, 1], "#0072b2") for i in range(8)]
    figure = Picture("p", "t", "s", [Panel(lines=lines) for _ in range(across)], across).figure()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1


def test_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    picture = plots.picks(_history())
    monkeypatch.delitem(sys.modules, "flexact.observe.figures.matplotlib_backend")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(FlexActError, match=r"flexact\[plots\]"):
        picture.figure()


def test_a_heat_map_of_few_steps_is_marked_at_whole_steps() -> None:
    history = [entry | {"step": step} for step, entry in enumerate(_history(20))]
    axes = plots.picks(history).figure().axes[0]
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
