"""The page in a real browser: everything is there, nothing complains, and it fits narrow and wide windows."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flexact import Recorder
from flexact.report import build as report

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="the page is opened in Debian's chromium; install it with: apt-get install chromium chromium-driver",
)


def _folders() -> ModuleType:
    spec = importlib.util.spec_from_file_location("report_folders", Path(__file__).with_name("report_folders.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


folders = _folders()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Headless chromium with a profile of its own."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


# What each page must hold: figures, charts and tables (the configuration's two among them).
PAGES = {
    "synthetic": (2, 8, 4),
    "alpha": (3, 3, 3),
    "corrections": (2, 6, 3),
    "recorder": (5, 10, 3),
    "evidence": (6, 15, 3),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One page of each kind of folder; test_report.py draws the figures, and the page shows none."""
    made = {name: getattr(folders, f"{name}_folder")(tmp_path_factory.mktemp(name)) for name in PAGES}
    return {name: report.read(folder).write_page() for name, folder in made.items()}


EMPTY = (
    "[...document.querySelectorAll('.chart')]"
    ".filter((c) => !c.querySelector('path, image, rect:not(.back)')).map((c) => c.ariaLabel)"
)
"""The charts without anything drawn in them."""


def _open(browser: Any, path: Path, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(path.as_uri())


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("name", PAGES)
def test_page_is_complete_and_fits(browser: Any, pages: dict[str, Path], name: str, width: int) -> None:
    assert pages[name].stat().st_size < 2_000_000
    _open(browser, pages[name], width)
    assert browser.get_log("browser") == []
    found = browser.execute_script(
        f"const empty = {EMPTY};"
        """
        const charts = [...document.querySelectorAll('.chart')];
        const parts = '.chart, .chart text, .chart path, .chart image, .legend, .scroll, h1, h2, h3, h4, p, li';
        const boxes = [...document.querySelectorAll(parts)];
        return {
          counts: ['figure', '.chart', 'table'].map((kind) => document.querySelectorAll(kind).length),
          empty: empty,
          low: charts.filter((c) => c.clientHeight < 30 || c.clientWidth < 250).map((c) => c.ariaLabel),
          scrolls: document.documentElement.scrollWidth > document.documentElement.clientWidth,
          outside: boxes.filter((b) => b.getBoundingClientRect().right > innerWidth + 1).map((b) => b.outerHTML),
          small: [...document.querySelectorAll('p, td, th, li, .chip, .chart text')]
            .filter((e) => parseFloat(getComputedStyle(e).fontSize) < 9).length,
        };
        """
    )
    assert found == {"counts": list(PAGES[name]), "empty": [], "low": [], "scrolls": False, "outside": [], "small": 0}


def test_wide_table_scrolls_in_its_own_box(browser: Any, tmp_path: Path) -> None:
    header = "|" + "a long title |" * 20
    table = f"{header}\n{'|---' * 20}|\n{'| 1.0000 ± 0.0000 ' * 20}|\n"
    path = report.build(folders.study_folder(tmp_path, "other", ["relu"], ["relu"], table))
    _open(browser, path, 400)
    inner, outer = browser.execute_script(
        "const box = document.querySelector('.scroll'); return [box.scrollWidth, box.clientWidth];"
    )
    assert inner > outer
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 400


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_cut_off_or_runs_into_its_neighbour_on_a_narrow_page(
    browser: Any, pages: dict[str, Path], name: str
) -> None:
    _open(browser, pages[name], 400)
    found = browser.execute_script(
        """
        const cut = [...document.querySelectorAll('td, th')].filter((e) => e.scrollWidth > e.clientWidth + 1);
        const touching = [];
        for (const chart of document.querySelectorAll('.chart')) {
          const labels = [...chart.querySelectorAll('.x.tick')];
          const boxes = labels.map((e) => e.getBoundingClientRect()).sort((a, b) => a.left - b.left);
          boxes.slice(1).forEach((box, i) => { if (box.left < boxes[i].right + 2) touching.push(chart.ariaLabel); });
        }
        const rows = [...document.querySelectorAll('#errors .y.tick')];
        return [cut.map((e) => e.textContent), touching, rows.filter((e) => e.textContent.includes('…')).length];
        """
    )
    assert found == [[], [], 0]


def test_names_from_files_show_as_text(browser: Any, pages: dict[str, Path]) -> None:
    _open(browser, pages["recorder"], 1400)
    site = folders.HOSTILE + ".1"
    cells = browser.execute_script(
        "return [...document.querySelectorAll('section td:first-child')].map((e) => e.textContent)"
    )
    assert cells == ["1", "3", site, "head $x_1$ %{x}.0"]
    labels = browser.execute_script(
        "return [...document.querySelectorAll('#history-picks .y.tick')].map((e) => e.textContent)"
    )
    assert labels == ["1", "3", "…" + site[-17:], "head $x_1$ %{x}.0"]


@pytest.mark.parametrize(
    ("name", "figure", "at", "shows"),
    [
        ("recorder", "#history-picks", (0.99, 0.9), ["head $x_1$ %{x}.0", "step: 11", "tanh"]),
        ("recorder", "#history-probabilities", (0.99, 0.6), [folders.HOSTILE + ".1", "step: 11", "probability: "]),
        (
            "synthetic",
            "#selection",
            (0.98, 0.03),
            ["relu", "truth: relu", "epoch: 100", "probability: 1"],
        ),
    ],
)
def test_hovering_shows_site_time_and_probability(
    browser: Any, pages: dict[str, Path], name: str, figure: str, at: tuple[float, float], shows: list[str]
) -> None:
    _open(browser, pages[name], 1400)
    x, y = browser.execute_script(
        """
        const area = document.querySelector(arguments[0] + ' .back');
        area.scrollIntoView({ block: 'center' });
        const box = area.getBoundingClientRect();
        return [box.left + box.width * arguments[1], box.top + box.height * arguments[2]];
        """,
        figure,
        *at,
    )
    read = "return document.querySelector('.tip').textContent"
    shown = ""
    for attempt in range(50):
        mouse = {"type": "mouseMoved", "x": x - attempt % 2, "y": y}
        browser.execute_cdp_cmd("Input.dispatchMouseEvent", mouse)
        if shown := browser.execute_script(read):
            break
        time.sleep(0.1)
    assert [part for part in shows if part not in shown] == [], shown


def test_the_evidence_of_a_run_is_drawn(browser: Any, pages: dict[str, Path]) -> None:
    history = Recorder.load(pages["evidence"].with_name("history.jsonl"))
    drops = [drop for entry in history for own in entry.get("drops", {}).values() for drop in own.values()]
    steps = {drop["step"] for drop in drops}
    _open(browser, pages["evidence"], 1400)
    found = browser.execute_script(
        """
        const count = (what) => document.querySelectorAll(what).length;
        return {
          tiles: count('#history-network rect.tile'), stages: count('#history-network .y.tick'),
          drops: count('#history-numbers line.event'),
          commitments: count('#history-numbers line.event[stroke-dasharray=""]'),
          marks: count('#history-margins g path'), whiskers: count('#history-margins .whisker'),
          grey: count('tr.muted'), undecided: [...document.querySelectorAll('#history-margins h4')]
            .filter((e) => e.textContent.endsWith('(undecided)')).length,
        };
        """
    )
    undecided = sum(not one["decided"] for entry in history for one in entry.get("decisions", {}).values())
    measured = sum(drop["standard_error"] is not None for drop in drops)
    assert 0 < undecided < 7, "a run that shows both"
    assert found == {
        "tiles": 7,
        "stages": 3,
        "drops": len(steps),
        "commitments": 1,
        "marks": measured,
        "whiskers": measured,
        "grey": undecided,
        "undecided": undecided,
    }


def test_legend_switches_a_curve_on_and_off(browser: Any, pages: dict[str, Path]) -> None:
    _open(browser, pages["synthetic"], 1400)
    count = "return document.querySelectorAll('#curves g[data-key]:not(.off) path.line').length"
    chip = "return [...document.querySelectorAll('#curves button.chip')].find((b) => b.textContent === 'prelu')"
    before = browser.execute_script(count)
    for after in (before + 2, before):  # two panels
        browser.execute_script(chip).click()
        assert browser.execute_script(count) == after


def test_dark_page_has_light_text(browser: Any, pages: dict[str, Path]) -> None:
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    try:
        _open(browser, pages["alpha"], 1400)
        colours = browser.execute_script(
            "const text = [document.body, document.querySelector('.x.tick')].map((e) => getComputedStyle(e));"
            "return [text[0].color, text[1].fill];"
        )
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    for colour in colours:
        assert min(int(part) for part in colour[4:-1].split(",")) > 140
