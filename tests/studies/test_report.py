"""Tests of the report of a folder: what is read, what is written, and errors about bad files."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.lines import Line2D

from flexact import FlexActError
from flexact.candidates.registry import known_names
from flexact.io import csv_rows
from flexact.observe.figures.drawing import Picture
from flexact.report.build import build, read, read_histories
from flexact.report.page import markdown, page
from flexact.studies.synthetic.store import Point, Result


def _folders() -> ModuleType:
    spec = importlib.util.spec_from_file_location("report_folders", Path(__file__).with_name("report_folders.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


folders = _folders()

DROP = ("step", "margin", "standard_error", "steps")
RESULTS, LINES = ",".join(Result._fields), ",".join(Point._fields)


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study's folder with its report."""
    folder = folders.synthetic_folder(tmp_path_factory.mktemp("synthetic"))
    build(folder)
    return Path(folder)


def _pictures(folder: Path) -> list[Picture]:
    return [picture for section in read(folder).sections for picture in section.pictures]


def _line(ax: Axes, name: str) -> Line2D:
    (line,) = [line for line in ax.get_lines() if line.get_label() == name]
    return line


def _half_widths(ax: Axes, name: str) -> list[float]:
    """Returns the height of a band above its curve at each point."""
    lines = [line.get_label() for line in ax.get_lines()]
    around = ax.collections[lines.index(name)].get_paths()[0].vertices
    curve = dict(zip(*_line(ax, name).get_data(), strict=True))
    above = {x: max(v for u, v in around if u == x) - y for x, y in curve.items()}
    return list(above.values())


def test_page_and_figures_are_written_completely(synthetic: Path) -> None:
    assert (synthetic / "report.html").read_text(encoding="utf-8").endswith("</html>\n")
    slugs = ["selection", "curves"]
    expected = {f"{slug}.{kind}" for slug in slugs for kind in ("png", "svg")}
    assert {path.name for path in (synthetic / "figures").iterdir()} == expected
    assert (synthetic / "figures" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not list(synthetic.rglob("*.new"))


def test_page_loads_nothing_from_outside(synthetic: Path) -> None:
    page = (synthetic / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)=["']?(https?:)?//|url\(["']?(https?:)?//|<link[^>]+stylesheet|<script""", page)
    assert "default-src 'none'" in page


def test_text_from_files_is_escaped(synthetic: Path) -> None:
    page = (synthetic / "report.html").read_text(encoding="utf-8")
    assert folders.HOSTILE not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_same_files_give_the_same_report(synthetic: Path) -> None:
    written = [synthetic / "report.html", *sorted((synthetic / "figures").iterdir())]
    before = [path.read_bytes() for path in written]
    build(synthetic)
    assert [path.read_bytes() for path in written] == before


def test_selection_is_the_mean_over_seeds_with_a_band_until_the_picks_are_made(synthetic: Path) -> None:
    ax = _pictures(synthetic)[0].figure.axes[0]
    assert ax.get_title() == "flexact-default, truth: relu"
    line = _line(ax, "relu")
    points = csv_rows.read(synthetic / "lines.csv", Point)
    wanted = ("flexact-default", "relu", "relu", 25)
    (point,) = (one for one in points if (one.model, one.truth, one.line, one.x) == wanted)
    assert line.get_ydata()[5] == point.y
    assert _half_widths(ax, "relu")[5] == pytest.approx(point.deviation)
    assert line.get_ydata()[-1] == 1.0
    assert _half_widths(ax, "relu")[-1] == 0.0
    assert line.get_linewidth() > max(other.get_linewidth() for other in ax.get_lines() if other is not line)


def test_models_that_pick_are_side_by_side_for_each_truth(synthetic: Path) -> None:
    titles = [ax.get_title() for ax in _pictures(synthetic)[0].figure.axes]
    models = ("flexact-default", "flexact-a0.3", "flexact-a0")
    assert titles == [f"{model}, truth: {truth}" for truth in ("relu", "sigmoid") for model in models]


def test_alpha_figures(tmp_path: Path) -> None:
    pictures = {picture.slug: picture for picture in _pictures(folders.alpha_folder(tmp_path))}
    assert list(pictures) == ["selection", "curves", "errors"]
    assert len(pictures["curves"].figure.axes[0].get_lines()) == 12
    titles = [ax.get_title() for ax in pictures["selection"].figure.axes]
    assert titles == [f"flexact-a{tenth / 10:g}, truth: sigmoid" for tenth in range(11)]
    found = _bars(pictures["errors"].figure.axes[0])
    assert list(found) == ["ours", "paper"]
    assert found["paper"][0] == 60.0e-4


def _rows(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.get_yticklabels()]


def _bars(ax: Axes) -> dict[str, list[float]]:
    """Returns the lengths of the bars by name."""
    bars = [container for container in ax.containers if isinstance(container, BarContainer)]
    return {str(one.get_label()): [bar.get_width() for bar in one] for one in bars}


def test_corrections_are_next_to_the_papers(tmp_path: Path) -> None:
    selection, _, errors = _pictures(folders.corrections_folder(tmp_path))
    (ax,) = errors.figure.axes
    assert ax.get_xscale() == "log"
    assert all("$" not in label.get_text() for label in ax.get_xticklabels(which="both"))
    found = _bars(ax)
    assert found["paper"][_rows(ax).index("output_norm")] == 0.35629
    assert 0 < ax.get_xlim()[0] < min(found["ours"])
    assert len(found["ours"]) == len(_rows(ax)) == 5
    assert selection.figure.axes[0].get_title() == "none, truth: sigmoid"


def test_the_papers_bars_come_from_the_options_not_from_the_table(tmp_path: Path) -> None:
    folder = folders.corrections_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["options"]["slope"] = 3.0
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    errors = _pictures(folder)[-1]
    assert list(_bars(errors.figure.axes[0])) == ["ours"]


def test_study_without_lines_still_has_a_page(tmp_path: Path) -> None:
    folders.synthetic_folder(tmp_path)
    for name in ("lines.csv", "table.md"):
        (tmp_path / name).unlink()
    assert "<h2>Results</h2>" in build(tmp_path).read_text(encoding="utf-8")


def test_study_of_another_kind_shows_its_table(tmp_path: Path) -> None:
    folders.study_folder(tmp_path, "another", ["relu"], ["relu"], "| a |\n|---|\n| shown |\n")
    (tmp_path / "results.csv").write_text("columns,of,its,own\n", encoding="utf-8")
    assert "<td>shown</td>" in build(tmp_path).read_text(encoding="utf-8")


def test_a_recorders_folder_is_reported(tmp_path: Path) -> None:
    folder = folders.recorder_folder(tmp_path, steps=4)
    page = build(folder).read_text(encoding="utf-8")
    assert "4 records of 4 sites" in page
    assert " (undecided)</td>" in page  # four steps decide nothing
    assert f"&quot;torch&quot;: &quot;{torch.__version__}&quot;" in page
    assert folders.HOSTILE not in page
    assert (folder / "figures" / "history-probabilities.svg").exists()


def test_a_page_shows_how_sure_each_decision_was(tmp_path: Path) -> None:
    drop = {"step": 9, "margin": 0.5, "standard_error": 0.2, "steps": 40}
    last = {
        "step": 2,
        "sites": {"a": {"relu": 0.0, "tanh": 1.0}, "b": {"relu": 1.0, "tanh": 0.0}, "c": {"relu": 0.6, "tanh": 0.4}},
        "drops": {"a": {"relu": drop}, "b": {"tanh": drop | {"margin": -0.1}}},
        "decisions": {
            "a": {"runner_up": "relu", "decided": True},
            "b": {"runner_up": "tanh", "decided": False},
        },
    }
    _write_history(tmp_path / "history.jsonl", tail=json.dumps(last) + "\n")
    page = read(tmp_path).sections[0].body
    cells = "".join(
        f"<td>{cell}</td>" for cell in ("a", "tanh", "-", "-", "0.50 ± 0.20", "2.5", 40, "relu", "relu (9)")
    )
    assert f"<tr>{cells}</tr>" in page
    cells = "".join(
        f"<td>{cell}</td>"
        for cell in ("b", "relu (undecided)", "-", "-", "-0.10 ± 0.20", "-0.5", 40, "tanh", "tanh (9)")
    )
    assert f'<tr class="muted">{cells}</tr>' in page
    assert "<td>c</td><td>relu ?</td><td>0.600</td><td>0.200</td><td>-</td><td>-</td><td>-</td><td>tanh</td>" in page
    assert page.count("lead: the pick&#x27;s advantage over the runner-up") == 1


def test_a_site_that_drops_its_original_shows_the_margin(tmp_path: Path) -> None:
    drop = {"step": 9, "margin": 0.1, "standard_error": 0.2, "steps": 40}
    last = {
        "step": 9,
        "sites": {"a": {"relu": 0.0, "tanh": 1.0, "gelu": 0.0}},
        "drops": {"a": {"relu": drop | {"margin": 0.5, "step": 5}, "gelu": drop}},
        "decisions": {"a": {"original": "relu", "runner_up": "gelu", "decided": True}},
    }
    _write_history(tmp_path / "history.jsonl", tail=json.dumps(last) + "\n")
    body = read(tmp_path).sections[0].body
    assert "<th>z</th><th>steps</th><th>runner-up</th><th>z (original)</th>" in body
    assert "<td>0.10 ± 0.20</td><td>0.5</td><td>40</td><td>gelu</td><td>2.5</td><td>relu (5), gelu (9)</td>" in body


def test_a_single_history_next_to_a_study_is_reported(tmp_path: Path) -> None:
    _write_history(tmp_path / "one.jsonl")
    _write_history(tmp_path / "two.jsonl")
    subprocess.run([sys.executable, "-m", "flexact", "report", str(tmp_path / "two.jsonl")], check=True, timeout=60)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert re.findall("<h2>(.*?)</h2>", page) == ["Run: two.jsonl"]
    (tmp_path / "other.txt").write_text("hello", encoding="utf-8")
    with pytest.raises(FlexActError, match=r"other\.txt holds nothing to report"):
        build(tmp_path / "other.txt")


def test_page_of_a_deep_network_recorded_at_every_step_stays_under_2_mb(tmp_path: Path) -> None:
    draw = random.Random(0)
    names = known_names()
    sites = [f"encoder.stage.{i // 25}.blocks.{i % 25}.mlp.activation_function" for i in range(150)]
    drops = {
        site: {name: {"step": 7, "margin": 0.1, "standard_error": 0.1, "steps": 9} for name in names} for site in sites
    }
    with (tmp_path / "history.jsonl").open("w", encoding="utf-8") as file:
        file.write('{"flexact_history": 2}\n')
        for step in range(320):  # noise, which does not compress
            pis = {site: {name: draw.random() for name in names} for site in sites}
            entry = {"step": step, "sites": pis, "loss": draw.random(), "accuracy": draw.random()}
            file.write(json.dumps(entry | ({"drops": drops} if step == 9 else {})) + "\n")
    assert len(page(read(tmp_path)).encode()) < 2_000_000


def test_two_histories_are_two_sections_with_their_own_figures(tmp_path: Path) -> None:
    _write_history(tmp_path / "one.jsonl")
    _write_history(tmp_path / "two words.jsonl")
    (tmp_path / "other.jsonl").write_text('{"loss": 1}\n', encoding="utf-8")
    page = build(tmp_path).read_text(encoding="utf-8")
    assert page.count("<h2>Run: ") == 2
    assert {path.stem for path in (tmp_path / "figures").glob("*-picks.png")} == {"one-picks", "two words-picks"}


def test_histories_whose_names_differ_in_special_characters_only_have_figures_of_their_own(tmp_path: Path) -> None:
    for name in ("run 1.jsonl", "run_1.jsonl", "run:1.jsonl", "run_1_.jsonl"):
        _write_history(tmp_path / name)
    slugs = [picture.slug for section in read(tmp_path).sections for picture in section.pictures]
    assert len(set(slugs)) == len(slugs) == 4 * 4


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    _write_history(tmp_path / "history.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")  # opening it for reading would block until there is a writer
    (tmp_path / "folder.jsonl").mkdir()
    command = [sys.executable, "-m", "flexact", "report", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert list(read_histories(tmp_path)) == ["history.jsonl"]


def test_a_truncated_last_line_is_left_out(tmp_path: Path) -> None:
    _write_history(tmp_path / "history.jsonl", tail='{"step": 2, "si')
    assert [entry["step"] for entry in read_histories(tmp_path)["history.jsonl"].records] == [0, 1]


def test_a_corrupt_line_of_a_truncated_history_is_named_with_its_own_path(tmp_path: Path) -> None:
    _write_history(tmp_path / "history.jsonl", tail='oops\n{"step": 2, "si')
    with pytest.raises(FlexActError, match=re.escape(f"{tmp_path / 'history.jsonl'}, line 4")):
        build(tmp_path)


def test_a_folder_with_neither_names_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello", encoding="utf-8")
    (tmp_path / "config.json").write_text("{ not ours", encoding="utf-8")
    with pytest.raises(FlexActError, match=r"config\.json of a study.*\*\.jsonl.*Found: config\.json, notes\.txt"):
        build(tmp_path)
    with pytest.raises(FlexActError, match="nowhere holds nothing to report"):
        build(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("results.csv", "model,truth\n", r"results\.csv, line 1: expected the columns study,model"),
        ("results.csv", "", r"results\.csv, line 1: .*missing"),
        (
            "results.csv",
            f"{RESULTS}\nsynthetic,relu,relu,0,relu\n",
            r"results\.csv, line 2: expected 9 columns, found 5",
        ),
        ("results.csv", f"{RESULTS}\nsynthetic,relu,relu,0,relu,x,1,1,1\n", r"line 2: probability is 'x'"),
        ("results.csv", f"{RESULTS}\nsynthetic,relu,relu,0,relu,1,1,1,1", r"line 2: the line is cut off"),
        ("lines.csv", f"{LINES}\nrelu,relu,relu,0,1,0\nrelu,relu,relu,one,1,0\n", r"line 3: x is 'one'"),
        ("lines.csv", "x\n", r"lines\.csv, line 1"),
        ("config.json", '{"flexact_study": 1,\n oops}', r"config\.json, line 2: not valid JSON"),
        ("config.json", '{"flexact_study": 9, "study": "synthetic"}', "version 9"),
        ("config.json", '{"flexact_study": 1}', "does not name its study"),
        (
            "config.json",
            '{"flexact_study": 1, "study": "synthetic", "options": {"seeds": 0}}',
            "--seeds must be",
        ),
    ],
)
def test_corrupt_file_is_named_with_its_line(tmp_path: Path, name: str, text: str, says: str) -> None:
    folders.synthetic_folder(tmp_path)
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(FlexActError, match=says):
        build(tmp_path)


def test_bytes_that_are_not_text_are_named_with_their_line(tmp_path: Path) -> None:
    folders.synthetic_folder(tmp_path)
    with (tmp_path / "table.md").open("wb") as file:
        file.write(b"one\ntwo\n\xff\xfe")
    with pytest.raises(FlexActError, match=r"table\.md, line 3"):
        build(tmp_path)


def test_missing_results_are_reported(tmp_path: Path) -> None:
    folders.synthetic_folder(tmp_path)
    (tmp_path / "results.csv").unlink()
    assert "No results yet." in build(tmp_path).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"step": 1, "sites": {"a": {"relu": "high"}}}, "line 4: not a record"),
        ({"step": 1, "sites": {"a": {"relu": None}}}, "line 4: not a record"),
        ({"step": 1, "sites": {"a": 3}}, "line 4: not a record"),
        ({"step": 1, "sites": {}, "loss": "low"}, "line 4: not a record"),
        ({"step": 1}, "line 4: not a record"),
        ({"step": 1, "sites": {}, "drops": 3}, "line 4: not a record"),
        ({"step": 1, "sites": {}, "drops": {"a": {"relu": {"step": 3}}}}, "line 4: not a record"),
        ({"step": 1, "sites": {}, "drops": {"a": {"relu": dict.fromkeys(DROP)}}}, "line 4: not a record"),
        ({"step": 1, "sites": {}, "decisions": {"a": {"runner_up": "relu"}}}, "line 4: not a record"),
    ],
)
def test_corrupt_history_is_named_with_its_line(tmp_path: Path, record: dict[str, Any], says: str) -> None:
    _write_history(tmp_path / "history.jsonl", tail=json.dumps(record) + "\n")
    with pytest.raises(FlexActError, match=says):
        build(tmp_path)


@pytest.mark.parametrize("package", ["matplotlib", "markdown_it"])
def test_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    folders.corrections_folder(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(FlexActError, match=r"flexact\[report\]"):
        build(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_markdown_escapes_html_and_loads_no_image() -> None:
    shown = markdown("# Title\n\n<img src=x onerror=alert(1)>\n\n![a](http://x/y.png) [b](javascript:alert(1))\n")
    assert "<h3>Title</h3>" in shown
    assert "<img" not in shown
    assert "href" not in shown.replace('href="http://x/y.png"', "")


def test_rows_of_the_papers_numbers_are_muted(synthetic: Path) -> None:
    page = (synthetic / "report.html").read_text(encoding="utf-8")
    assert page.count('<tr class="muted">') == page.count("<td>- paper's</td>") == 9


def _write_history(path: Path, tail: str = "") -> None:
    records = [{"flexact_history": 1}, *({"step": i, "sites": {"a": {"relu": 0.5, "tanh": 0.5}}} for i in range(2))]
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail, encoding="utf-8")
