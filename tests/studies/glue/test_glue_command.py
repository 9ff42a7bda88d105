"""End-to-end tests of `flexact reproduce glue`, with a tiny encoder on small files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexact import FlexConfig
from flexact.cli.app import main
from flexact.studies.glue.protocol import Protocol
from flexact.studies.glue.study import Store


def command(data: Path, model: Path | str, out: Path, *more: str) -> list[str]:
    return [
        "reproduce",
        "glue",
        "--data",
        str(data),
        "--model",
        str(model),
        "--out",
        str(out),
        "--device",
        "cpu",
        *more,
    ]


def run(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


@pytest.mark.slow
def test_a_grid_runs_and_is_reported(
    glue_folder: Path, tiny_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    size = ("--seeds", "1", "--batch", "8", "--jobs", "1")
    arguments = command(glue_folder, tiny_encoder, out, *size, "--tasks", "rte,qnli")
    assert run([*arguments, "--methods", "fixed,flexact-all"]) == 0
    shown = capsys.readouterr().out
    assert "| Flex-Act (all layers) |" in shown
    assert "65.70" in shown  # the paper's
    assert run([*arguments, "--status"]) == 0
    assert "4 cells: 4 done." in capsys.readouterr().out
    splits = {(row.task, row.split) for row in Store(out).results().values()}
    assert splits == {("rte", "official"), ("qnli", "of dev.tsv")}
    page = (out / "report.html").read_text(encoding="utf-8")
    for words in ("Metrics by activation", "Selection by depth", "bert.pooler.activation"):
        assert words in page
    assert (out / "figures" / "selection-rte-flexact-all.svg").is_file()
    assert json.loads((out / "config.json").read_text())["protocol"]["sha256"]
    assert run([*arguments, "--resume", "--lr", "0.1"]) == 2
    assert "another configuration (lr: 5e-05 → 0.1)" in capsys.readouterr().err
    before, lines = Store(out).config(), (out / "results.csv").read_text().splitlines(keepends=True)
    (out / "results.csv").write_text("".join(lines[:-1]))
    here = ["--out", str(out), "--device", "cpu", "--jobs", "1"]
    assert run(["reproduce", "glue", *here, "--resume"]) == 0  # with the previous data, model and settings
    assert len(Store(out).results()) == 4
    assert Store(out).config() == before
    assert run(["reproduce", "glue", *here, "--resume", "--tasks", "rte", "--seeds", "2"]) == 0  # the previous methods
    assert sorted(cell.name for cell in Store(out).results())[2:] == [
        "rte-fixed-0", "rte-fixed-1", "rte-flexact-all-0", "rte-flexact-all-1",
    ]  # fmt: skip
    glue_folder = glue_folder.rename(tmp_path / "moved")
    assert run(["reproduce", "glue", *here, "--resume", "--seeds", "3"]) == 2
    assert f"there is no folder {tmp_path / 'glue'}" in capsys.readouterr().err
    arguments = command(glue_folder, tiny_encoder, out)  # new options override the grid's own
    assert run([*arguments, "--resume"]) == 0
    dev = glue_folder / "RTE" / "dev.tsv"
    dev.write_text(dev.read_text().replace("\tnot_entailment\n", "\tentailment\n", 1))
    assert run([*arguments, "--resume", "--first-seed", "2"]) == 2
    assert "sha256.rte: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "rtee"], "unknown task 'rtee'; did you mean 'rte'?"),
        (["--methods", "flexact-al"], "unknown method 'flexact-al'; did you mean 'flexact-all'?"),
        (["--tasks", ","], "--tasks names nothing"),
        (["--policy", "papr"], "unknown policy 'papr'"),
        (["--engine", "rey"], "unknown engine 'rey'; did you mean 'ray'?"),
        (["--status"], "holds no grid of `flexact reproduce glue`"),
        (["--resume"], "holds no grid of `flexact reproduce glue`"),
        (["--retry-failed", "--tasks", "rte"], "holds no grid of `flexact reproduce glue`"),
        (["--data", "nowhere"], "nowhere, and the package 'datasets' cannot read"),
        (["--model", "nowhere"], "there is no folder nowhere, and the model 'nowhere' cannot be downloaded"),
        (["--tasks", "stsb", "--limit", "1"], "it needs at least 1 and 2. Give --limit 2"),
        (["--length", "3"], "adds 3 tokens to a pair of sentences, and it has 128 positions. Give --length 4 to 128"),
        (["--length", "129"], "it has 128 positions. Give --length 4 to 128"),
    ],
)
def test_bad_input_is_one_line_with_what_to_do(
    arguments: list[str],
    message: str,
    glue_folder: Path,
    tiny_encoder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run(command(glue_folder, tiny_encoder, tmp_path / "out", *arguments)) == 2
    assert message in capsys.readouterr().err


def test_a_bad_file_stops_the_grid_before_any_cell(
    glue_folder: Path, tiny_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (glue_folder / "RTE" / "train.tsv").write_text("index\tsentence1\tsentence2\tlabel\n0\ta\tb\n")
    assert run(command(glue_folder, tiny_encoder, tmp_path / "out", "--tasks", "rte")) == 2
    assert "train.tsv, line 2: 3 fields, expected 4" in capsys.readouterr().err


@pytest.mark.slow
def test_from_scratch_the_shipped_policy_is_used_unchanged(
    glue_folder: Path, tiny_encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    size = ("--seeds", "1", "--batch", "8", "--epochs", "1", "--jobs", "1", "--tasks", "mrpc")
    arguments = command(glue_folder, tiny_encoder, out, *size, "--from-scratch")
    assert run([*arguments, "--methods", "flexact-all"]) == 0
    assert "# GLUE with a small encoder from random weights" in capsys.readouterr().out
    protocol = Protocol.from_dict(Store(out).config()["protocol"])
    assert (protocol.lr, protocol.epochs) == (5e-4, 1)
    assert protocol.config(seed=3) == FlexConfig(seed=3)
    (row,) = Store(out).results().values()
    assert len(row.picks.split()) == 5  # four layers and the pooler
