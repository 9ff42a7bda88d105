"""Tests of a comparison with invalid functions, seeds and folders. One failing run does not stop the others."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import flexact
from flexact import FlexActError
from flexact.studies.compare.comparison import Compared

Comparing = Callable[..., Compared]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (None, "train returned None for seed 1. It must return the score as a number"),
        (float("nan"), "train returned nan for seed 1: the training diverged"),
        (float("-inf"), "train returned -inf for seed 1"),
        ("0.5", "train returned '0.5' for seed 1. It must return the score as a number"),
        (torch.ones(2), r"train returned tensor([1., 1.]) for seed 1"),
    ],
)
def test_a_run_without_a_score_fails_and_the_others_continue(
    comparing: Comparing, small: ModuleType, bad: Any, message: str
) -> None:
    def train(model: nn.Module, seed: int, make_schedule: Any) -> Any:
        return bad if seed == 1 and isinstance(model[1], nn.Tanh) else small.train(model, seed, make_schedule)

    found = comparing(train, methods=["original", "fixed"])
    rows = {(row.method, row.seed): row for row in found.runs}
    assert rows["fixed-tanh", 1].state == "failed"
    assert rows["fixed-tanh", 1].error.startswith(message)
    assert [row.state for key, row in rows.items() if key != ("fixed-tanh", 1)] == ["done"] * 8
    summary = next(one for one in found.summaries if one.method == "fixed-tanh")
    assert summary.failed == 1
    assert summary.scores.keys() == {0, 2}
    assert summary.against is not None
    assert summary.against.seeds == 2
    assert "2 (1 failed)" in str(found)
    assert f"- fixed-tanh-1: {message}" in str(found)


def test_a_generator_that_yields_nothing_fails(comparing: Comparing) -> None:
    def train(model: nn.Module, seed: int, make_schedule: Any) -> Any:
        yield from ()

    found = comparing(train, seeds=1, methods=["original"])
    assert found.runs[0].error == "train yielded no score. Yield one after each evaluation; the last one counts."
    assert "| original |" in " ".join(str(found).split())


def test_an_error_of_train_is_recorded_with_its_traceback_and_can_be_retried(
    comparing: Comparing, small: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"seeds": 2, "methods": ["original", "flexact-alone"]}
    found = comparing(small.fails_on_seed_1, **options)
    rows = {row.cell.name: row for row in found.runs}
    failed = rows["original-1"]
    assert failed.error.startswith("train raised RuntimeError: the disk of the user is missing. The traceback is in")
    trace = (tmp_path / "out" / "cells" / "original-1" / "traceback.txt").read_text()
    assert trace.startswith("Traceback (most recent call last)")
    assert "in fails_on_seed_1" in trace
    assert "Failed (try again with --retry-failed)" in str(found)
    assert rows["original-0"].state == rows["flexact-alone-0"].state == "done"
    assert rows["flexact-alone-1"].error.startswith("there are no picks to train: flexact-1 failed or did not commit.")

    again = {row.cell.name: row.state for row in comparing(small.fails_on_seed_1, **options).runs}
    assert again["original-1"] == "failed"  # failed runs are retried only on request
    (tmp_path / "corrected").touch()
    retried = comparing(small.fails_on_seed_1, **options, retry_failed=True)
    assert {row.state for row in retried.runs} == {"done"}
    assert not (tmp_path / "out" / "cells" / "original-1" / "traceback.txt").exists()
    whole = comparing(small.train, **options, out=tmp_path / "whole")
    assert [row.score for row in retried.runs] == [row.score for row in whole.runs]


def test_a_train_that_exits_fails_like_any_other_and_the_rest_continues(
    comparing: Comparing, small: ModuleType, tmp_path: Path
) -> None:
    def exiting(model: nn.Module, seed: int, make_schedule: Any) -> float:
        if seed == 0:
            sys.exit(3)
        return float(small.train(model, seed, make_schedule))

    found = comparing(exiting, seeds=2, methods=["original"])
    assert [row.state for row in found.runs] == ["failed", "done"]
    assert found.runs[0].error.startswith("train raised SystemExit: 3. The traceback is in ")
    assert "in exiting" in (tmp_path / "out" / "cells" / "original-0" / "traceback.txt").read_text()


def test_the_same_error_of_several_runs_is_reported_once(comparing: Comparing) -> None:
    def failing(model: nn.Module, seed: int, make_schedule: Any) -> float:
        raise RuntimeError("no data")

    found = str(comparing(failing, seeds=1, methods=["original", "fixed-tanh", "flexact"]))
    assert "- original-0, fixed-tanh-0, flexact-0: train raised RuntimeError: no data" in found
    assert found.count("no data") == 1


def test_a_train_that_ignores_the_schedule_leaves_sites_not_committed(comparing: Comparing, small: ModuleType) -> None:
    def ignoring(model: nn.Module, seed: int, make_schedule: Any) -> float:
        return float(small.train(model, seed, None))

    found = comparing(ignoring, seeds=1)
    rows = {row.method: row for row in found.runs}
    assert rows["flexact"].error.startswith(
        "2 of 2 sites are not committed: schedule.step() was called 0 times. Make the schedule from the third argument"
    )
    assert rows["flexact-alone"].state == "failed"
    assert rows["original"].state == rows["fixed-tanh"].state == "done"
    assert found.picks == {}


def test_a_schedule_stopped_before_its_commitment_leaves_sites_not_committed(comparing: Comparing) -> None:
    def short(model: nn.Module, seed: int, make_schedule: Any) -> float:
        if make_schedule is not None:
            optimizer = torch.optim.AdamW(flexact.param_groups(model))
            schedule = make_schedule(total_steps=1000, optimizer=optimizer)
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
            optimizer.step()
            schedule.step(loss)
        return 1.0

    (row,) = comparing(short, seeds=1, methods=["flexact"]).runs
    assert "schedule.step() was called 1 of 1,000 times" in row.error


def test_a_train_that_stops_after_the_commitment_has_a_note(comparing: Comparing) -> None:
    def early(model: nn.Module, seed: int, make_schedule: Any) -> float:
        if make_schedule is not None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            schedule = make_schedule(network_steps=5_000, optimizer=optimizer)
            while not schedule.committed:
                loss = model(torch.ones(1, 2)).square().sum()
                loss.backward()
                optimizer.step()
                schedule.step(loss)
        return 1.0

    found = comparing(early, seeds=2, methods=["flexact"])
    (note,) = {row.note for row in found.runs}
    assert re.fullmatch(r"schedule\.step\(\) was called [\d,]+ of [\d,]+ times", note)
    assert f"Note on flexact-0, flexact-1: {note}." in str(found)


def test_too_few_steps_are_a_note_and_the_warning_points_to_the_line_that_made_the_schedule(
    comparing: Comparing, small: ModuleType
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = comparing(seeds=1, methods=["original", "flexact"])
    (few,) = (one for one in caught if "steps are few" in str(one.message))
    assert few.filename == small.__file__
    assert [row.note for row in found.runs] == ["", str(few.message).removesuffix(".")]
    assert found.page is not None
    assert "Note on flexact-0: 90 steps are few for a pick from 3 candidates" in found.page.read_text()


def test_a_policy_that_never_commits_finishes_with_a_note(comparing: Comparing, small: ModuleType) -> None:
    config = flexact.FlexConfig(commit_at=None, eliminate="none", pick_by="blend")
    (row,) = comparing(config=config, seeds=1, methods=["flexact"]).runs
    assert (row.state, row.picks) == ("done", "")
    assert row.note == "the sites are not committed: this policy never commits"


def test_a_train_that_extracts_the_network_in_place_keeps_its_picks(comparing: Comparing, small: ModuleType) -> None:
    def extracting(model: nn.Module, seed: int, make_schedule: Any) -> float:
        score = float(small.train(model, seed, make_schedule))
        if make_schedule is not None:
            flexact.extract(model, inplace=True)
        return score

    options: dict[str, Any] = {"seeds": 1, "methods": ["flexact"]}
    picks = comparing(extracting, **options).picks
    assert picks == comparing(**options, overwrite=True).picks
    assert picks[0]


def test_a_build_with_a_different_architecture_each_time_is_refused(comparing: Comparing, tmp_path: Path) -> None:
    widths = itertools.count(4)

    def growing() -> nn.Module:
        return nn.Sequential(nn.Linear(2, next(widths)), nn.ReLU())

    def drawn() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 4), random.choice([nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU])())

    with pytest.raises(FlexActError, match="two different architectures"):
        comparing(build=growing)
    seeds = next([0, other] for other in range(1, 9) if _first(drawn, 0) is not _first(drawn, other))
    with pytest.raises(FlexActError, match="two different architectures"):
        comparing(build=drawn, seeds=seeds)
    assert not (tmp_path / "out").exists()


def _first(build: Callable[[], nn.Module], seed: int) -> type:
    random.seed(seed)
    return type(build()[1])  # type: ignore[index]


def test_a_build_that_returns_one_network_is_refused(comparing: Comparing, small: ModuleType) -> None:
    model = small.build()
    with pytest.raises(FlexActError, match=r"build\(\) returned the same network twice; make a new one in each call"):
        comparing(build=lambda: model)


def test_a_build_that_ignores_the_seed_gives_a_warning(comparing: Comparing, small: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)

    def drifting() -> nn.Module:
        model = small.build()
        nn.init.normal_(model[0].weight, generator=generator)
        return model

    with pytest.warns(UserWarning, match="different weights after the same seed"):
        comparing(build=drifting, seeds=1, methods=["original"])


def test_an_architecture_that_differs_in_a_run_fails_that_run(comparing: Comparing, small: ModuleType) -> None:
    built = itertools.count()

    def late() -> nn.Module:
        return small.build() if next(built) < 4 else nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))

    rows = comparing(build=late, seeds=2, methods=["original"]).runs
    assert [row.state for row in rows] == ["done", "failed"]
    assert rows[1].error.startswith("build() made another architecture than when the comparison began.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": [0, 3, 3]}, "a sequence of distinct seeds; got [0, 3, 3]"),
        ({"seeds": []}, "seeds must be a number of seeds or a sequence"),
        ({"seeds": 0}, "a sequence of distinct seeds; got 0"),
        (
            {"jobs": 2, "engine": "local", "address": "head:6379"},
            "--address is the address of a Ray cluster; give it with --engine ray",
        ),
        ({"seeds": [-1]}, "--first-seed must be a whole number from 0 to"),
        ({"methods": ["fixed-relo"]}, "unknown method 'fixed-relo'; did you mean 'fixed-relu'"),
        ({"methods": "flexact"}, "unknown method 'f'"),
        ({"candidates": ["relu", "tahn"]}, "unknown candidate 'tahn'; did you mean 'tanh'"),
        ({"engine": "slurm"}, "unknown engine 'slurm'"),
        ({"where": "nowhere"}, "nowhere"),
        ({"train": 3}, "got 3, which cannot be called as train(model, seed, make_schedule)"),
        ({"train": lambda model, seed: 0.0}, "cannot be called as train(model, seed, make_schedule)"),
        ({"build": nn.Linear}, "cannot be called as build()"),
        ({"build": lambda: 5}, "build() must return a torch.nn.Module; it returned 5"),
    ],
)
def test_invalid_arguments_are_refused_before_anything_is_trained(
    comparing: Comparing, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(FlexActError) as refused:
        comparing(**options)
    assert message in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_the_folder_of_another_comparison_is_refused(comparing: Comparing, small: ModuleType, tmp_path: Path) -> None:
    comparing(seeds=1, methods=["original"])
    before = (tmp_path / "out" / "results.csv").read_bytes()
    with pytest.raises(
        FlexActError, match=r"another configuration \(config.candidates: relu,tanh,gelu → relu,elu"
    ) as caught:
        comparing(seeds=1, candidates=("relu", "elu"))
    assert str(caught.value).endswith("Pass another folder to --out, or give --overwrite to start again.")
    with pytest.raises(FlexActError, match=r"train: small_training:train → small_training:slowly"):
        comparing(small.slowly, seeds=1)
    with pytest.raises(FlexActError, match="architecture: "):
        comparing(build=lambda: nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), seeds=1)
    assert (tmp_path / "out" / "results.csv").read_bytes() == before


def test_a_foreign_folder_is_refused_and_unchanged(comparing: Comparing, tmp_path: Path) -> None:
    other, theses = tmp_path / "picks", tmp_path / "theses"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"flexact_study": 1, "study": "picks"}))
    with pytest.raises(FlexActError, match="holds no grid of `flexact compare`"):
        comparing(out=other)
    with pytest.raises(FlexActError, match="holds a run of the study 'picks', not of 'compare'"):
        comparing(out=other, overwrite=True)
    theses.mkdir()
    (theses / "mine.txt").write_text("years of work")
    with pytest.raises(FlexActError, match=r"is not empty and holds no run of a study \(mine.txt\)"):
        comparing(out=theses, overwrite=True)
    assert [path.name for path in theses.iterdir()] == ["mine.txt"]


def test_functions_that_cannot_be_pickled_are_refused_with_the_engine_that_accepts_them(
    comparing: Comparing, small: ModuleType
) -> None:
    lock = threading.Lock()  # cannot be pickled

    def train(model: nn.Module, seed: int, make_schedule: Any) -> float:
        with lock:
            return float(small.train(model, seed, make_schedule))

    with pytest.raises(FlexActError, match=r"cannot be sent to another process.*or give engine='inline'"):
        comparing(train, seeds=1, methods=["original"], engine="local")
    assert comparing(train, seeds=1, methods=["original"]).runs[0].state == "done"


def test_a_script_without_a_main_guard_is_reported(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, flexact\n"
        "def build(): return torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU())\n"
        "def train(model, seed, make_schedule): return 1.0\n"
        "flexact.compare(build, train, ('relu', 'tanh'), ['original'], seeds=4, out='out', device='cpu')\n"
    )
    ended = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    output = ended.stderr.splitlines()[-1]
    assert f"a worker process could not import {script}; its error is printed above." in output
    assert "Put the call under if __name__ == '__main__':" in output
    assert ended.stderr.count("was called while a worker process imports your script") == 1  # not once per run
    assert len((tmp_path / "out" / "results.csv").read_text().splitlines()) == 1


def test_no_warning_of_convert_is_lost(comparing: Comparing) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comparing(candidates=("tanh", "gelu"), seeds=1, methods=["original", "flexact"])
    shown = [str(one.message) for one in caught if "not among the candidates" in str(one.message)]
    assert len(shown) == 1  # before the first run, and not again in each
