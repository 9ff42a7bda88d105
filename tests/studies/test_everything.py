"""Tests of `flexact reproduce all`: its plan, its estimates, and its sequence of runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from flexact.cli.app import main
from flexact.studies import everything
from flexact.studies.commands import reproduce
from flexact.studies.estimates import device_name
from flexact.studies.everything import Stage, _call, stages

TINY = ("--seeds", "1", "--epochs", "1", "--truths", "relu", "--models", "relu", "--jobs", "1")


def called(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", "all", *arguments])
    return int(ended.value.code or 0)


@pytest.mark.parametrize("budget", ["short", "paper"])
def test_the_plan_has_every_study_and_the_command_for_a_cluster(
    budget: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called("--budget", budget, "--plan", "--out", str(tmp_path / "run")) == 0
    text = capsys.readouterr().out
    for study in ("synthetic", "alpha", "corrections", "overhead", "cifar", "glue", "picks"):
        assert f"flexact reproduce {study} " in text
    folders = f"--data data --glue-data data/glue --out {tmp_path / 'run'}"
    assert f"flexact reproduce all --budget {budget} {folders} --engine ray --address HOST:PORT" in text
    assert f"on this device ({device_name()})" in text
    assert re.search(r"multiplied by [\d.e+]+ \(cifar\), [\d.e+]+ \(glue\), [\d.e+]+ \(picks\)", text)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("budget", ["short", "paper"])
def test_every_command_of_the_plan_is_accepted_by_its_study(budget: str) -> None:
    commands = typer.main.get_command(reproduce)
    for stage in stages(budget):
        _, study, *arguments = _call(stage, Path("out"), Path("data"), Path("glue"), {"--engine": "ray"})
        command = commands.get_command(None, study)  # type: ignore[attr-defined]
        assert command.make_context(study, arguments).params["out"] == Path("out", stage.place)


def test_the_short_budget_has_ten_fresh_seeds_of_the_main_methods_and_a_row_for_every_method() -> None:
    cells = [cell for stage in stages("short") if stage.place == "cifar" for cell in stage.cells]
    assert len(cells) == len(set(cells))
    own = [cell for cell in cells if (cell.dataset, cell.model) == ("cifar100", "resnet18")]
    for method in everything.MAIN:
        assert [cell.seed for cell in own if cell.method == method] == list(range(200, 210))
    assert {cell.method for cell in own} == set(everything.USUAL)


def test_the_studies_run_one_after_the_other_and_an_unfinished_one_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    good, bad = Stage("synthetic", arguments=TINY), Stage("alpha", arguments=("--seeds", "0"))
    monkeypatch.setattr(everything, "stages", lambda budget: [bad, good])
    assert called("--out", str(tmp_path)) == 1
    output = capfd.readouterr()
    assert "flexact: incomplete: alpha; run the command again." in output.err
    assert (tmp_path / "synthetic" / "table.md").is_file()
    monkeypatch.setattr(everything, "stages", lambda budget: [good])
    assert called("--out", str(tmp_path)) == 0  # resumes finished studies


@pytest.mark.parametrize(("option", "value"), [("--budget", "long"), ("--engine", "streams")])
def test_an_unknown_budget_or_engine_is_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(option, value) == 2
    assert f"unknown {option[2:]} '{value}'" in capsys.readouterr().err
