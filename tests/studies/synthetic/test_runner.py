"""Tests of whole small studies: the same bytes every time, with any number of processes and after kills."""

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flexact.io import csv_rows
from flexact.studies.synthetic.options import Options
from flexact.studies.synthetic.runner import run, train_model
from flexact.studies.synthetic.store import Result
from flexact.studies.synthetic.studies import ALPHA, CORRECTIONS, SYNTHETIC
from flexact.studies.synthetic.tables import table

MODELS = ("flexact-default", "flexact-a0.3", "relu", "tanh", "splash", "convex")
SMALL = Options(seeds=2, epochs=3, truths=("relu", "tanh"), models=MODELS)
FILES = ("results.csv", "lines.csv", "table.md")

SCRIPT = """
import sys
from pathlib import Path
from flexact.studies.synthetic.options import Options
from flexact.studies.synthetic.runner import run
from flexact.studies.synthetic.studies import SYNTHETIC
options = Options(seeds=2, epochs=3, truths=("relu", "tanh"), models={models})
run(SYNTHETIC, options, Path(sys.argv[1]), resume=True, jobs={jobs})
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


def rows(folder: Path, name: str = "results.csv") -> list[dict[str, str]]:
    with (folder / name).open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run(SYNTHETIC, SMALL, folder, jobs=1)
    return folder


def test_results_have_a_row_for_each_model_truth_and_seed_in_order(whole):
    found = rows(whole)
    wanted = [(model, truth, str(seed)) for model in MODELS for truth in ("relu", "tanh") for seed in (0, 1)]
    assert [(row["model"], row["truth"], row["seed"]) for row in found] == wanted
    assert (whole / "results.csv").read_text().startswith("study,model,truth,seed,pick,probability,mse")
    for row in found:
        if not row["model"].startswith("flexact"):
            assert (row["pick"], row["probability"]) == (row["model"], "1")
    assert {row["pick"] for row in found if row["model"] == "flexact-default"} <= set(SMALL.candidates)


def test_the_lines_contain_every_point(whole):
    lines = rows(whole, "lines.csv")
    curves = [row for row in lines if row["line"] in ("prediction", "target")]
    history = [row for row in lines if row not in curves]
    assert {row["model"] for row in history} == {"flexact-default", "flexact-a0.3"}
    assert len(history) == 2 * 2 * (1 + SMALL.epochs) * 5
    assert {float(row["y"]) for row in history if row["x"] == "0"} == {0.2}
    assert len(curves) == len(MODELS) * 2 * 2 * 81
    for row in curves:
        if (row["truth"], row["line"]) == ("relu", "target"):
            assert float(row["y"]) == pytest.approx(max(0.0, 5 * float(row["x"])), abs=1e-5)


def test_the_config_records_what_was_run_and_with_what(whole):
    config = json.loads((whole / "config.json").read_text())
    assert (config["flexact_study"], config["study"]) == (1, "synthetic")
    assert config["options"]["models"] == list(MODELS)
    assert {"versions", "device", "commit", "date"} <= set(config)
    assert set(config["policies"]) == {"flexact-default", "flexact-a0.3"}


def test_the_table_has_ours_the_counts_the_rates_and_the_papers_where_it_trains_as_long(whole):
    written = (whole / "table.md").read_text()
    assert "/4 |" in written
    assert "paper's |" not in written
    assert "at 0.01; the fixed activations and the baselines at 0.05, falling" in written
    compared = table("", replace(SMALL, epochs=100), csv_rows.read(whole / "results.csv", Result))
    assert "0.0004 ± 0.0007" not in compared  # LeakyReLU's column was not asked for
    assert "0.4328 ± 0.4287" in compared  # the paper's ReLU on Tanh


def test_two_layers_have_no_curve_over_seeds_since_each_seed_has_its_own_teacher(tmp_path):
    run(SYNTHETIC, Options(seeds=2, epochs=1, truths=("tanh",), models=("tanh",), hidden=4), tmp_path, jobs=1)
    assert rows(tmp_path, "lines.csv") == []
    assert len(rows(tmp_path)) == 2


def test_two_runs_give_the_same_bytes_in_one_process_and_in_two(whole, tmp_path):
    run(SYNTHETIC, SMALL, tmp_path / "again", jobs=1)
    run(SYNTHETIC, SMALL, tmp_path / "two", jobs=2)
    assert contents(tmp_path / "again") == contents(whole)
    assert contents(tmp_path / "two") == contents(whole)


def test_other_seeds_give_other_results(whole, tmp_path):
    run(SYNTHETIC, Options(seeds=2, first_seed=1000, epochs=3, truths=("relu",), models=("relu",)), tmp_path, jobs=1)
    assert {row["seed"] for row in rows(tmp_path)} == {"1000", "1001"}
    assert rows(tmp_path)[0]["mse"] != next(row["mse"] for row in rows(whole) if row["model"] == "relu")


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_killed_and_resumed_study_is_byte_identical(whole, tmp_path, jobs):
    command = [sys.executable, "-c", SCRIPT.format(models=MODELS, jobs=jobs), str(tmp_path)]
    moment = random.Random(os.getpid() + jobs).uniform(0.0, 1.0)
    process = subprocess.Popen(command)
    deadline = time.monotonic() + 120
    while not (tmp_path / "config.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(moment)
    process.send_signal(signal.SIGKILL)
    process.wait()
    run(SYNTHETIC, SMALL, tmp_path, resume=True, jobs=1)
    assert contents(tmp_path) == contents(whole), f"killed {moment:.3f} s in"


def test_a_killed_parent_leaves_no_workers_behind(tmp_path):
    models = ("flexact-a0.3", "flexact-a0", "flexact-a1")
    script = SCRIPT.format(models=models, jobs=2).replace("epochs=3", "epochs=2000")
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    children: set[str] = set()
    deadline = time.monotonic() + 60
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not path.exists():
        process.kill()
        pytest.skip("needs /proc")
    while len(children) < 3 and time.monotonic() < deadline:  # two workers, and Python's own resource tracker
        children |= set(path.read_text().split())
        time.sleep(0.05)
    time.sleep(0.5)
    process.kill()
    process.wait()
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [child for child in children if Path(f"/proc/{child}").exists()]


@pytest.mark.parametrize("study", [ALPHA, CORRECTIONS])
def test_the_other_studies_run_on_the_sigmoid_truth(study, tmp_path):
    options = replace(study.defaults, seeds=1, epochs=1)
    run(study, options, tmp_path, jobs=1)
    assert [row["model"] for row in rows(tmp_path)] == list(study.defaults.models)
    compared = table(study.title, replace(options, epochs=100), csv_rows.read(tmp_path / "results.csv", Result))
    assert ("0.00600" if study is ALPHA else "0.35629 ± 0.00938") in compared
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert not any("paper's |" in line for line in lines)
    assert len([line for line in lines if line.startswith("|")]) == len(study.defaults.models) + 2


@pytest.mark.parametrize(
    "changes",
    [
        {"slope": 3.0},
        {"label_noise": 0.05},
        {"distractors": 10},
        {"target_scale": 10.0},
        {"hidden": 4},
        {"candidates": ("relu", "gelu"), "truths": ("gelu",)},
        {"policy": "literal"},
        {"policy": "default"},
    ],
)
def test_every_option_changes_the_results(changes, tmp_path):
    plain = {"seeds": 1, "epochs": 1, "truths": ("tanh",), "models": ("flexact-a0.3",)}
    one, other = (
        train_model("synthetic", Options(**options), "flexact-a0.3", "cpu", lambda: False).figures
        for options in (plain, {**plain, **changes})
    )
    assert one.results[0].mse != other.results[0].mse
