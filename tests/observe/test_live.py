"""Tests of the live table of a Recorder in a terminal, and of the HTML of Recorder and Selection for notebooks."""

from __future__ import annotations

import io
import sys
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

from flexact import FlexActError, FlexConfig, Recorder, Schedule, convert, selection
from flexact.observe.live import terminal_text

CONFIG = FlexConfig(candidates=("relu", "tanh", "gelu"), share="site", pick_by="blend", rewind=False)


def network(depth: int = 2) -> nn.Sequential:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(2, 2), nn.ReLU())]
    return convert(nn.Sequential(*layers, nn.Linear(2, 2)), config=CONFIG)


def nudge(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[1].logits[1] += 2.0


def shown(recorder: Recorder) -> str:
    return terminal_text(recorder.history, selection(recorder.model))


class Cells(HTMLParser):
    """Collects the texts of a table's cells by row, and the number of each tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: dict[str, int] = {}
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        if tag == "tr":
            self.rows.append([])
        self._in_cell = tag in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1].append(data)

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = False


def test_the_table_has_the_step_the_numbers_and_the_picks() -> None:
    model = network()
    nudge(model)
    recorder = Recorder(model)
    recorder.record(10, loss=0.5, accuracy=0.25)
    title, *text = shown(recorder).splitlines()
    assert title == "step 10 · loss 0.5 · accuracy 0.25"
    assert text == str(selection(model)).splitlines()


def test_sites_that_are_alike_share_a_line() -> None:
    recorder = Recorder(network(depth=30))
    recorder.record(0)
    assert "30 sites" in shown(recorder)
    nudge(recorder.model)
    assert [line.split("  ")[0] for line in shown(recorder).splitlines()[3:5]] == ["1", "29 sites"]


def test_a_live_recorder_draws_at_each_record_and_leaves_the_last_table(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Recorder(network(), live=True) as recorder:
        for step in range(3):
            recorder.record(step, loss=1.0 / (step + 1))
            assert f"step {step}" in screen.getvalue()
    assert screen.getvalue().count("step 2") >= 1
    assert screen.getvalue().endswith("\x1b[?25h")  # the cursor is visible again


def test_without_rich_the_error_names_the_extra_when_the_recorder_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rich.console", "rich.live"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(FlexActError, match=r"flexact\[cli\]"):
        Recorder(network(), live=True)


def test_a_notebook_shows_a_selection_as_a_table() -> None:
    model = network()
    nudge(model)
    found = Cells(selection(model)._repr_html_())
    row = selection(model)[0]
    assert found.rows[0][:4] == ["site", "pick", "probability", "margin"]
    assert found.rows[1][:4] == ["1", "tanh ?", f"{row.probability:.3f}", f"{row.margin:.3f}"]


def test_a_notebook_shows_the_curves_of_a_recorder() -> None:
    recorder = Recorder(network())
    assert "No records yet" in recorder._repr_html_()
    for step in range(3):
        recorder.record(step, accuracy=0.1, loss=1.0)
    text = recorder._repr_html_()
    assert "3 records, the last at step 2" in text
    for title in ("Recorded numbers", "Probability by step"):
        assert f"<title>{title}</title>" in text


def test_a_notebook_without_matplotlib_shows_the_table_and_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(network())
    recorder.record(0, loss=1.0)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = recorder._repr_html_()
    assert "pip install 'flexact[plots]'" in text
    assert [row[0] for row in Cells(text).rows] == ["site", "1", "3"]


def test_names_of_modules_are_escaped_in_a_notebook() -> None:
    model = nn.Sequential()
    model.add_module("<b>bold</b>", nn.ReLU())
    recorder = Recorder(convert(model, "*", config=CONFIG))
    recorder.record(0)
    assert "<b>" not in recorder._repr_html_()


def test_an_unfinished_trial_shows_and_records_the_candidate_that_it_tries() -> None:
    config = FlexConfig(candidates=("relu", "tanh"), pick_by="trial", trial_steps=4, init="original")
    model = convert(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), config=config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = Schedule(model, total_steps=40, optimizer=optimizer)
    recorder = Recorder(model)
    for _ in range(6):
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        optimizer.step()
        schedule.step(loss)
        recorder.record(schedule.steps_done)
    assert [entry["trying"] for entry in recorder.history] == ["relu"] * 4 + ["tanh"] * 2
    assert "trying tanh" in shown(recorder)
    now = selection(model)
    assert "trying tanh" in str(now)
    assert "trying: the candidate that the trial trains now" in str(now)
