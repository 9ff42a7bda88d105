"""Tests the built documentation: no warnings, no dead links, nothing loaded from other servers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import flexact
from flexact import baselines
from flexact.observe import figures

ROOT = Path(__file__).resolve().parents[2]

INTEGRATIONS = [
    path.stem
    for path in sorted((ROOT / "src" / "flexact" / "integrations").glob("*.py"))
    if "class FlexActCallback" in path.read_text(encoding="utf-8")
]

LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
    "object": "data",
}
"""Tags whose address a browser loads by itself, and the attribute that has it; `link` depends on its rel."""


class Page(HTMLParser):
    """Collects the links of a page, the resources it loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and given.get("rel") != "canonical":
            self.loads.append(given.get("href", ""))
        if tag in LOADED and LOADED[tag] in given:
            self.loads.append(given[LOADED[tag]])
        self.loads += re.findall(r"url\(['\"]?(.*?)['\"]?\)", given.get("style", ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_list_items_do_not_run_into_the_text_before_them(site: Path) -> None:
    for path in site.rglob("*.html"):
        paragraphs = re.findall(r"<p>(.*?)</p>", path.read_text(encoding="utf-8"), re.DOTALL)
        run_in = [text for text in paragraphs if re.search(r"\n\s*(\d+\.|[-*]) ", text)]
        assert run_in == [], path


def test_every_example_is_on_the_first_page() -> None:
    named = set(re.findall(r"`examples/(\w+\.py)`", (ROOT / "docs" / "index.md").read_text(encoding="utf-8")))
    assert named == {path.name for path in (ROOT / "examples").glob("*.py")}


def test_every_page_of_the_docs_is_built_and_in_the_menu(site: Path, pages: dict[Path, Page]) -> None:
    written = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert {path.relative_to(site.resolve()) for path in pages} == {*written, Path("404.html")}
    assert not list(site.rglob("*.py"))
    home = site.resolve() / "index.html"
    reached = {(home.parent / urlsplit(link).path).resolve() for link in pages[home].links}
    assert {site.resolve() / page for page in written} - reached <= {home}


def test_there_are_no_dead_links(site: Path, pages: dict[Path, Page]) -> None:
    missing = []
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or not link:
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            if path.name == "404.html":  # the page can be served at any address, so it links from the root
                target = (site / unquote(parts.path).lstrip("/")).resolve()
            target = target / "index.html" if target.is_dir() else target
            known = target.is_file() and (
                not parts.fragment or target not in pages or unquote(parts.fragment) in pages[target].anchors
            )
            if not known:
                missing.append(f"{path.name}: {link}")
    assert not missing


def test_nothing_is_loaded_from_other_servers(site: Path, pages: dict[Path, Page]) -> None:
    away = {load for page in pages.values() for load in page.loads if urlsplit(load).netloc}
    assert not away
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert not re.search(r"(url\(\s*['\"]?|@import\s+['\"]?)(https?:)?//", text), sheet


@pytest.mark.parametrize(
    "name",
    [
        *(f"flexact.{name}" for name in flexact.__all__),
        *(f"flexact.baselines.{name}" for name in baselines.__all__),
        *(f"flexact.observe.figures.{name}" for name in figures.__all__),
        *(f"flexact.integrations.{name}.FlexActCallback" for name in INTEGRATIONS),
    ],
)
def test_a_public_name_is_in_the_reference(name: str, pages: dict[Path, Page]) -> None:
    assert any(name in page.anchors for page in pages.values())


def test_examples_and_parameters_of_docstrings_are_readable(site: Path) -> None:
    text = (site / "api" / "model.html").read_text(encoding="utf-8")
    assert "<blockquote>" not in text  # how Markdown renders >>>
    assert re.search(r"<li>\s*(<p>)?<code>where</code>:", text)
    assert "layer4.*" in text


def test_result_files_named_on_a_page_are_in_the_repository() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    text = re.sub(r"<!-- .*? -->", "", text)  # the folder of a table that was not run may be missing
    named = {name.rstrip("./") for name in re.findall(r"results/[\w/.-]+(?![\w/.*-])", text)}
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    if shutil.which("git") and (ROOT / ".git").exists():
        ignored = subprocess.run(["git", "check-ignore", *named], cwd=ROOT, capture_output=True, text=True)
        assert ignored.stdout == ""
