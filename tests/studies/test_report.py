"""The report of a folder: what is read, what is written, and what is said about bad files."""

from __future__ import annotations

import builtins
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flexact import FlexActError
from flexact.studies.report import build
from flexact.studies.report_charts import plain
from flexact.studies.report_data import mean_and_spread, read_histories, read_study
from flexact.studies.report_page import markdown
from flexact.studies.report_pictures import alphas, study_pictures


def _folders() -> ModuleType:
    spec = importlib.util.spec_from_file_location("report_folders", Path(__file__).with_name("report_folders.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


folders = _folders()


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study's folder with its report."""
    folder = folders.synthetic_folder(tmp_path_factory.mktemp("synthetic"))
    build(folder)
    return Path(folder)


def _study(folder: Path) -> Any:
    study = read_study(folder)
    assert study is not None
    return study


def test_page_and_figures_are_written_whole(synthetic: Path) -> None:
    assert (synthetic / "report.html").read_text(encoding="utf-8").endswith("</html>\n")
    slugs = ["selection-flexact-default", "selection-flexact-a0.3", "curves", "regularisation"]
    expected = {f"{slug}.{kind}" for slug in slugs for kind in ("png", "svg")}
    assert {path.name for path in (synthetic / "figures").iterdir()} == expected
    assert (synthetic / "figures" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not list(synthetic.rglob("*.new"))


def test_page_needs_nothing_from_outside(synthetic: Path) -> None:
    page = (synthetic / "report.html").read_text(encoding="utf-8")
    own = re.sub(
        r"<script>/\*\*.*?</script>", "", page, flags=re.DOTALL
    )  # plotly.js names addresses that it never asks
    assert len(own) < len(page) / 2
    assert not re.search(r"https?://|<link[^>]+stylesheet|<script[^>]+src", own)
    assert page.count("plotly.js v") == 1
    assert "default-src 'none'" in own


def test_text_from_files_is_escaped(synthetic: Path) -> None:
    page = (synthetic / "report.html").read_text(encoding="utf-8")
    assert folders.HOSTILE not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_same_files_give_the_same_report(synthetic: Path) -> None:
    written = [synthetic / "report.html", *sorted((synthetic / "figures").iterdir())]
    before = [path.read_bytes() for path in written]
    build(synthetic)
    assert [path.read_bytes() for path in written] == before


def test_selection_is_the_mean_over_seeds_with_a_band(synthetic: Path) -> None:
    study = _study(synthetic)
    panel = study_pictures(study)[0].panels[0]
    assert panel.title == "truth: relu"
    line = next(line for line in panel.lines if line.name == "relu")
    seeds = study.history["flexact-default", "relu"]["relu"][5.0]
    mean, std = mean_and_spread(seeds)
    assert line.y[5] == pytest.approx(sum(seeds) / 2) == pytest.approx(mean)
    assert line.band is not None
    assert line.band[0][5] == pytest.approx(mean - std)


def test_curves_of_other_papers_units_are_off_at_first(synthetic: Path) -> None:
    curves = next(picture for picture in study_pictures(_study(synthetic)) if picture.slug == "curves")
    shown = {line.name: line.shown for line in curves.panels[0].lines}
    assert shown.pop("prelu") is False
    assert all(shown.values())


def test_alpha_pictures(tmp_path: Path) -> None:
    study = _study(folders.alpha_folder(tmp_path))
    assert list(alphas(study).values()) == [tenth / 10 for tenth in range(11)]
    pictures = {picture.slug: picture for picture in study_pictures(study)}
    assert list(pictures) == ["curves", "error", "probabilities", "grid"]
    assert len(pictures["curves"].panels[0].lines) == 12
    grid = pictures["probabilities"].panels[0].grid
    assert grid is not None
    assert len(grid.values) == 11
    assert all(sum(row) == pytest.approx(1, abs=1e-6) for row in grid.values)
    shown = ["0", "0.1", "0.3", "0.5", "0.7", "1"]  # as in the paper
    assert [panel.title for panel in pictures["grid"].panels] == [f"α = {a}, truth: sigmoid" for a in shown]
    error, star = pictures["error"].panels[0].lines
    assert star.y[0] == min(error.y)


def test_corrections_stand_beside_the_papers(tmp_path: Path) -> None:
    (panel,) = study_pictures(_study(folders.corrections_folder(tmp_path)))[0].panels
    ours, paper = panel.bars
    assert panel.log_values
    assert paper.values[panel.rows.index("output_norm")] == 0.35629
    assert ours.errors is not None
    assert len(ours.values) == len(panel.rows) == 5


def test_study_without_curves_or_history_still_has_a_page(tmp_path: Path) -> None:
    folders.synthetic_folder(tmp_path)
    for name in ("curves.csv", "history.csv", "table.md"):
        (tmp_path / name).unlink()
    assert "picked the true activation in 4 of 4 runs" in build(tmp_path).read_text(encoding="utf-8")


def test_study_of_another_kind_shows_its_table(tmp_path: Path) -> None:
    folders.study_folder(tmp_path, "cifar", ["relu"], ["relu"], "| a |\n|---|\n| shown |\n")
    assert "<td>shown</td>" in build(tmp_path).read_text(encoding="utf-8")


def test_recorders_folder_is_reported(tmp_path: Path) -> None:
    folder = folders.recorder_folder(tmp_path, steps=4)
    page = build(folder).read_text(encoding="utf-8")
    assert "4 records of 4 sites" in page
    assert folders.HOSTILE not in page
    assert (folder / "figures" / "history-probabilities.svg").exists()


def test_two_histories_are_two_sections_with_their_own_figures(tmp_path: Path) -> None:
    _write_history(tmp_path / "one.jsonl")
    _write_history(tmp_path / "two words.jsonl")
    (tmp_path / "other.jsonl").write_text('{"loss": 1}\n', encoding="utf-8")
    page = build(tmp_path).read_text(encoding="utf-8")
    assert page.count("<h2>Run: ") == 2
    assert {path.stem for path in (tmp_path / "figures").glob("*-picks.png")} == {"one-picks", "two_words-picks"}


def test_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    _write_history(tmp_path / "history.jsonl", tail='{"step": 2, "si')
    assert [entry["step"] for entry in read_histories(tmp_path)["history.jsonl"]] == [0, 1]


def test_corrupt_line_of_a_cut_history_is_named_with_its_own_path(tmp_path: Path) -> None:
    _write_history(tmp_path / "history.jsonl", tail='oops\n{"step": 2, "si')
    with pytest.raises(FlexActError, match=re.escape(f"{tmp_path / 'history.jsonl'}, line 4")):
        build(tmp_path)


def test_folder_with_neither_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello", encoding="utf-8")
    (tmp_path / "config.json").write_text("{ not ours", encoding="utf-8")
    with pytest.raises(FlexActError, match=r"config\.json of a study.*\*\.jsonl.*Found: config\.json, notes\.txt"):
        build(tmp_path)
    with pytest.raises(FlexActError, match="there is no folder"):
        build(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("results.csv", "model,truth\n", r"results\.csv, line 1: the columns must begin with study,model"),
        ("results.csv", "", r"results\.csv, line 1: .*found nothing"),
        (
            "results.csv",
            "study,model,truth,seed,pick,probability,mse\ns,m,t,0,p,0.5\n",
            r"results\.csv, line 2: 6 cells",
        ),
        ("results.csv", "study,model,truth,seed,pick,probability,mse\ns,m,t,0,p,x,1\n", r"line 2: probability is 'x'"),
        ("history.csv", "model,truth,seed,epoch,candidate,probability\nm,t,0,0,c,1\nm,t,0,one,c,1\n", r"line 3: epoch"),
        ("curves.csv", "x\n", r"curves\.csv, line 1"),
        ("config.json", '{"flexact_study": 1,\n oops}', r"config\.json, line 2: not valid JSON"),
        ("config.json", '{"flexact_study": 9, "study": "synthetic"}', "version 9"),
        ("config.json", '{"flexact_study": 1}', "does not name its study"),
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
    with pytest.raises(FlexActError, match=r"table\.md, line 3: not UTF-8"):
        build(tmp_path)


def test_missing_results_are_told(tmp_path: Path) -> None:
    folders.synthetic_folder(tmp_path)
    (tmp_path / "results.csv").unlink()
    with pytest.raises(FlexActError, match=r"no results\.csv"):
        build(tmp_path)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"step": 1, "sites": {"a": {"relu": "high"}}}, r"line 4: the probabilities of site 'a'"),
        ({"step": 1, "sites": {"a": 3}}, r"line 4: the probabilities of site 'a'"),
        ({"step": 1, "sites": {}, "loss": "low"}, r"line 4: loss is 'low'"),
        ({"step": 1}, "line 4: not a record"),
    ],
)
def test_corrupt_history_is_named_with_its_line(tmp_path: Path, record: dict[str, Any], says: str) -> None:
    _write_history(tmp_path / "history.jsonl", tail=json.dumps(record) + "\n")
    with pytest.raises(FlexActError, match=says):
        build(tmp_path)


@pytest.mark.parametrize("package", ["matplotlib", "plotly", "markdown_it"])
def test_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    folders.corrections_folder(tmp_path)
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(FlexActError, match=r"pip install 'flexact\[report\]'"):
        build(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_markdown_shows_html_as_text_and_loads_no_image() -> None:
    shown = markdown("# Title\n\n<img src=x onerror=alert(1)>\n\n![a](http://x/y.png) [b](javascript:alert(1))\n")
    assert "<h3>Title</h3>" in shown
    assert "<img" not in shown
    assert "href" not in shown.replace('href="http://x/y.png"', "")


def test_plotly_reads_no_tags_and_no_templates_in_names() -> None:
    assert plain("<b>%{x}") == "&lt;b&gt;%&#123;x}"


def _write_history(path: Path, tail: str = "") -> None:
    records = [{"flexact_history": 1}, *({"step": i, "sites": {"a": {"relu": 0.5, "tanh": 0.5}}} for i in range(2))]
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail, encoding="utf-8")
