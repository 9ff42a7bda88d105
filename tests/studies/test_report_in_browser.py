"""Tests of the report in a real browser: it is complete, without console errors, and fits narrow and wide windows."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

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
    """Headless Chromium with a profile of its own."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


# What each page must contain: figures and tables.
PAGES = {"synthetic": (2, 2), "alpha": (3, 1), "corrections": (3, 1), "recorder": (5, 1), "evidence": (6, 1)}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One page of each kind of folder."""
    made = {name: getattr(folders, f"{name}_folder")(tmp_path_factory.mktemp(name)) for name in PAGES}
    return {name: report.build(folder) for name, folder in made.items()}


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
        """
        const drawings = [...document.querySelectorAll('figure .drawing > svg')];
        const boxes = [...document.querySelectorAll('.scroll, h1, h2, h3, h4, p, li')];
        const size = (e) => parseFloat(getComputedStyle(e).fontSize);
        const scale = (svg) => svg.clientWidth / svg.viewBox.baseVal.width;
        return {
          counts: ['figure', 'table'].map((kind) => document.querySelectorAll(kind).length),
          drawings: drawings.length,
          untitled: drawings.filter((d) => d.getAttribute('role') !== 'img' || !d.querySelector('title')).length,
          empty: drawings.filter((d) => !d.querySelector('image, path[clip-path]')).length,
          scrolls: document.documentElement.scrollWidth > document.documentElement.clientWidth,
          outside: boxes.filter((b) => b.getBoundingClientRect().right > innerWidth + 1).map((b) => b.outerHTML),
          small: [...document.querySelectorAll('p, td, th, li')].filter((e) => size(e) < 9).length,
          unreadable: drawings.filter((d) => 9 * scale(d) < 8).length,
        };
        """
    )
    expected = {"counts": list(PAGES[name]), "drawings": PAGES[name][0], "untitled": 0, "empty": 0}
    assert found == expected | {"scrolls": False, "outside": [], "small": 0, "unreadable": 0}


def test_a_wide_table_scrolls_in_its_own_box(browser: Any, tmp_path: Path) -> None:
    header = "|" + "a long title |" * 20
    table = f"{header}\n{'|---' * 20}|\n{'| 1.0000 ± 0.0000 ' * 20}|\n"
    path = report.build(folders.study_folder(tmp_path, "other", ["relu"], ["relu"], table))
    _open(browser, path, 400)
    inner, outer = browser.execute_script(
        "const box = document.querySelector('.scroll'); return [box.scrollWidth, box.clientWidth];"
    )
    assert inner > outer
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 400


def test_names_from_files_show_as_text(browser: Any, pages: dict[str, Path]) -> None:
    _open(browser, pages["recorder"], 1400)
    site = folders.HOSTILE + ".1"
    cells = browser.execute_script(
        "return [...document.querySelectorAll('section td:first-child')].map((e) => e.textContent)"
    )
    assert cells == ["1", "3", site, "head $x_1$ %{x}.0"]
    texts = browser.execute_script(
        "return [...document.querySelectorAll('#history-picks svg text')].map((e) => e.textContent)"
    )
    assert {"1", "3", "…" + site[-25:], "head $x_1$ %{x}.0"} <= set(texts)


def test_dark_page_has_light_text_and_its_figures_a_light_ground(browser: Any, pages: dict[str, Path]) -> None:
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    try:
        _open(browser, pages["alpha"], 1400)
        colours = browser.execute_script(
            "return [getComputedStyle(document.body).color,"
            "getComputedStyle(document.querySelector('.drawing')).backgroundColor];"
        )
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    for colour in colours:
        assert min(int(part) for part in colour[4:-1].split(",")) > 140
