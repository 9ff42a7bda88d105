"""Tests of hostile files: pickles, links, absurd numbers and scripts only cause an error or are shown as text."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import pickle
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import flexact
from flexact import FlexActError, Recorder
from flexact.cli.app import main
from flexact.io.atomic_files import write_whole
from flexact.report import build as report
from flexact.studies.cifar.protocol import Cell, Protocol
from flexact.studies.cifar.study import Store as ImagesStore
from flexact.studies.cifar.train import train_cell
from flexact.studies.cifar_data.data import Images


def _folders() -> ModuleType:
    path = Path(__file__).parents[1] / "studies" / "report_folders.py"
    spec = importlib.util.spec_from_file_location("faults_report_folders", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


folders = _folders()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


# Code in files


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


def payloads(canary: Path) -> dict[str, bytes]:
    saved = io.BytesIO()
    torch.save({"weight": Payload(canary)}, saved)
    return {
        "a pickle": pickle.dumps(Payload(canary)),
        "an old pickle": pickle.dumps(Payload(canary), protocol=0),
        "a checkpoint of torch": saved.getvalue(),
    }


def _checkpoint(folder: Path) -> object:
    images = Images("cifar10", *(torch.zeros(1),) * 4, 10, torch.ones(3), torch.ones(3), "")
    protocol = Protocol(epochs=1, batch=1, width=4)
    return train_cell(Cell("cifar10", "resnet18", "relu", 0), protocol, images, folder, torch.device("cpu"))


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a checkpoint": ("checkpoint.pt", _checkpoint),
    "a history": ("history.jsonl", lambda folder: Recorder.load(folder / "history.jsonl")),
    "a history to go on with": (
        "history.jsonl",
        lambda folder: Recorder(network(), folder / "history.jsonl", resume=True),
    ),
    "picks": ("picks.json", lambda folder: flexact.load_picks(network(), folder / "picks.json")),
    "picks in a configuration": ("config.json", lambda folder: flexact.load_picks(network(), folder)),
    "a report of a study": ("config.json", report.build),
    "a report of a history": ("history.jsonl", report.build),
    "a grid": ("config.json", lambda folder: ImagesStore(folder).config()),
}
"""The name of the file, and the function that reads it."""


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["a pickle", "an old pickle", "a checkpoint of torch"])
def test_a_payload_is_never_run(reader: str, kind: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    folder, canary = tmp_path / "given", tmp_path / "ran"
    folder.mkdir()
    (folder / name).write_bytes(payloads(canary)[kind])
    with pytest.raises(FlexActError):
        read(folder)
    assert not canary.exists()
    pickle.loads(payloads(canary)["a pickle"])  # otherwise the file would exist
    assert canary.exists()


# Absurd JSON

ABSURD = {
    "deep": "[" * 200_000,
    "deep objects": '{"a":' * 200_000,
    "a long number": "9" * 10_000,
    "nothing": "",
    "null": "null",
    "a number": "NaN",
    "a list": "[1, 2]",
    "no text": "\udcff",
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ABSURD)
def test_absurd_files_are_refused(reader: str, kind: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    content = ABSURD[kind].encode("utf-8", "surrogateescape")
    (tmp_path / name).write_bytes(content)
    if reader == "a history to go on with" and not content:
        return  # a run that was killed before its first line leaves an empty file
    with pytest.raises(FlexActError):
        read(tmp_path)


OPENINGS = {
    "picks.json": {"flexact_picks": 1, "committed": True, "picks": {"1": "relu"}, "original": {}},
    "config.json": {"flexact_study": 1, "study": "synthetic", "options": {"seeds": 1}},
}
NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "-1", "9" * 4000, "true", '"1"', "[]", "{}", "null", "0.5"]


@pytest.mark.parametrize("name", OPENINGS)
def test_any_field_may_have_an_absurd_value(name: str, tmp_path: Path) -> None:
    readers = [read for file, read in READERS.values() if file == name]
    for field in OPENINGS[name]:
        for number in NUMBERS:
            text = json.dumps(OPENINGS[name] | {field: "HERE"}).replace('"HERE"', number)
            (tmp_path / name).write_text(text)
            for read in readers:
                with suppress(FlexActError):  # some absurd values are no worse than the usual ones
                    read(tmp_path)
    for number in NUMBERS:  # the requested settings of a study
        (tmp_path / "config.json").write_text(
            '{"flexact_study": 1, "study": "synthetic", "options": {"seeds": %s}}' % number  # noqa: UP031
        )
        with pytest.raises(FlexActError):
            report.build(tmp_path)


DRAWN = {("NaN", "probability"), ("NaN", "loss"), ("-1e999", "loss")}
"""Numbers that a diverged run may have recorded."""


@pytest.mark.parametrize("number", ["NaN", "-1e999", "9" * 4000, "-" + "9" * 400])
@pytest.mark.parametrize("place", ["step", "probability", "loss"])
def test_a_history_with_absurd_numbers_is_reported_or_refused(number: str, place: str, tmp_path: Path) -> None:
    record = {"step": 3, "sites": {"a": {"relu": 0.5, "tanh": 0.5}}, "picks": {"a": "relu"}, "loss": 1.0}
    lines = [json.dumps({"flexact_history": 1}), json.dumps(record | {"step": 1})]
    wrong = {
        "step": record | {"step": "HERE"},
        "probability": record | {"sites": {"a": {"relu": "HERE", "tanh": 0.5}}},
        "loss": record | {"loss": "HERE"},
    }[place]
    lines.append(json.dumps(wrong).replace('"HERE"', number))
    (tmp_path / "history.jsonl").write_text("\n".join(lines) + "\n")
    if (number, place) in DRAWN:
        assert "</html>" in report.build(tmp_path).read_text(encoding="utf-8")
    else:
        with pytest.raises(FlexActError, match=r"history\.jsonl, line 3"):
            report.build(tmp_path)


# Links and paths


def test_nothing_is_written_through_a_symlink(tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("kept")
    outside = tmp_path / "outside"
    outside.mkdir()
    folder = folders.recorder_folder(_made(tmp_path / "run"), steps=2)
    for name in ("report.html", "report.html.new"):
        (folder / name).symlink_to(precious)
    report.build(folder)
    assert precious.read_text() == "kept"
    assert not (folder / "report.html").is_symlink()
    shutil.rmtree(folder / "figures")
    (folder / "figures").symlink_to(outside)
    with pytest.raises(FlexActError, match=r"figures .* link .*outside"):
        report.build(folder)
    assert not list(outside.iterdir())
    (tmp_path / "file.new").symlink_to(precious)
    write_whole(tmp_path / "file", "new")
    assert (precious.read_text(), (tmp_path / "file").read_text()) == ("kept", "new")


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize("name", ["../../escaped", "/tmp/escaped\x00"])
def test_names_in_a_folder_cannot_traverse_paths(name: str, tmp_path: Path) -> None:
    """A study's figures are named after its models, and a grid's folders after its cells."""
    study = _made(tmp_path / "study")
    folders.synthetic_folder(study)
    for file in ("config.json", "results.csv", "lines.csv"):
        text = (study / file).read_text()
        shown = json.dumps(name)[1:-1] if file == "config.json" else name
        (study / file).write_text(text.replace("flexact-default", shown))
    before = {path for path in tmp_path.rglob("*") if not path.is_relative_to(study)}
    with suppress(FlexActError):
        report.build(study)
    assert {path for path in tmp_path.rglob("*") if not path.is_relative_to(study)} == before
    assert not Path("/tmp/escaped").exists()


def test_a_symlink_in_the_data_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "cifar-10-batches-bin"
    place.mkdir()
    secret = tmp_path / "secret"
    secret.write_text("a password")
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        (place / name).symlink_to(secret)
    with pytest.raises(SystemExit) as ended:
        main(["data", "cifar10", "--data", str(tmp_path)])
    output = capsys.readouterr()
    assert ended.value.code == 2
    assert "data_batch_1.bin" in output.err
    assert "password" not in output.err + output.out


# Scripts

SCRIPTS = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror=window.hacked=1>",
    "</script><script>window.hacked = 1</script>",
    '"><svg onload=window.hacked=1>',
    "<!--<script>",
    "]]><script>window.hacked = 1</script>",
    "javascript:window.hacked=1",
    "{{constructor.constructor('window.hacked=1')()}}",
    '<a href="javascript:window.hacked=1">x</a>',
    "' onmouseover='window.hacked=1",
]


def hostile_folder(folder: Path) -> Path:
    """Builds a history and a study's configuration and table, with a script in every text field."""
    sites = {script: {other: 1 / len(SCRIPTS) for other in SCRIPTS} for script in SCRIPTS}
    header = {"flexact_history": 1, **{script: {script: script} for script in SCRIPTS}}
    lines: list[Any] = [header]
    for step in range(3):
        values = {script: float(step) for script in SCRIPTS}
        lines.append({"step": step, "sites": sites, "picks": dict(zip(SCRIPTS, SCRIPTS, strict=True)), **values})
    (folder / "<svg onload=window.hacked=1>.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    every = "\n\n".join(SCRIPTS)
    config = {"flexact_study": 1, "study": SCRIPTS[0], "title": every, "device": every, "commit": every, "date": every}
    config |= {script: {script: [script]} for script in SCRIPTS}
    (folder / "config.json").write_text(json.dumps(config))
    table = "".join(f"| {script} | [x]({script}) | ![x]({script}) |\n" for script in SCRIPTS)
    (folder / "table.md").write_text(f"# {every}\n\n| a | b | c |\n|---|---|---|\n{table}\n{every}\n")
    return folder


CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


@pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="the page is opened in Debian's chromium; install it with: apt-get install chromium chromium-driver",
)
def test_no_script_of_a_folder_runs_in_its_report(tmp_path: Path) -> None:
    from selenium import webdriver

    page = report.build(hostile_folder(_made(tmp_path / "run")))
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        browser.get(page.as_uri())
        until = time.monotonic() + 30
        while not browser.execute_script("return document.querySelectorAll('.drawing path').length"):
            assert time.monotonic() < until
            time.sleep(0.1)
        browser.execute_script("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        found = browser.execute_script(
            """
            for (const e of document.querySelectorAll('*')) e.dispatchEvent(new MouseEvent('mouseover'));
            const own = [...document.querySelectorAll('*')];
            return {
              hacked: window.hacked === undefined ? 0 : window.hacked,
              handlers: own.filter((e) => [...e.attributes].some((a) => a.name.startsWith('on')))
                .map((e) => e.outerHTML),
              links: [...document.querySelectorAll('[href], [src]')]
                .map((e) => e.getAttribute('href') || e.getAttribute('src'))
                .filter((a) => /^\\s*javascript:/i.test(a)),
              images: document.querySelectorAll('img').length,
              shown: document.body.textContent.includes('<script>window.hacked = 1</script>'),
            };
            """
        )
    finally:
        browser.quit()
    assert found == {"hacked": 0, "handlers": [], "links": [], "images": 0, "shown": True}


def test_a_script_in_a_layer_name_stays_text_in_the_figures(tmp_path: Path) -> None:
    report.build(hostile_folder(_made(tmp_path / "run")))
    figures = sorted((tmp_path / "run" / "figures").glob("*.svg"))
    assert figures
    for figure in figures:
        for element in ElementTree.parse(figure).iter():
            assert not element.tag.endswith("script")
            assert not any(name.lower().startswith("on") or "javascript" in value for name, value in element.items())
    assert os.listdir(tmp_path) == ["run"]


def test_a_script_in_a_layer_name_is_one_line_in_a_printed_selection() -> None:
    model = nn.Sequential()
    model.add_module("<script>\x1b[2J\nwindow", nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    model = flexact.convert(model)
    printed = str(flexact.selection(model))
    assert "\x1b" not in printed
    assert len(printed.splitlines()) == 4
