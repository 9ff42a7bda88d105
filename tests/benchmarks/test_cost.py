"""Tests benchmarks/cost.py: what is compared, the waits of a first run, errors, goals, and the rows on a GPU."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import flexact.ops.triton.extension  # noqa: F401  all of Triton is imported before the variable is deleted
from flexact.routing.sites import sites_of
from flexact.studies.cifar_resnets import BLOCKS
from flexact.studies.overhead import study
from flexact.studies.overhead.options import MODES, PEAK, TRAIN, WAYS, Measurement, Options
from kernels import using

CPU = torch.device("cpu")
Benchmark = Callable[[str], ModuleType]
Rows = list[dict[str, str]]


@pytest.fixture(autouse=True)
def _usual_kernels_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with using("auto"):
        yield


def gpu_options(device: str = "cuda", **given: Any) -> Options:
    """Returns the options of the overhead study on a GPU, also where there is none."""
    usual = {"models": ("resnet18",), "modes": tuple(MODES), "ways": tuple(WAYS)[1:], "repeats": 2}
    return Options(device=device, **usual | {"batch": 2, "width": 2} | given)


def read(path: Path) -> Rows:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# -- the steps that are compared ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "mlp-blend", "gpt-custom", "physics-trial", "physics-blend"])
def test_the_forms_have_the_same_weights_optimizer_and_batch(benchmark: Benchmark, name: str) -> None:
    case, form = benchmark("cost_rows.networks").CASES[name], benchmark("cost_rows.steps").Form
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forms = [form(case, one, CPU) for one in ("plain", "picking", "committed")]
        plain, *converted = forms
        for one in converted:
            assert torch.equal(one.x, plain.x)
            assert type(one.optimizer) is type(plain.optimizer)
            assert one.optimizer.defaults == plain.optimizer.defaults
            weights = {key: value for key, value in one.network.named_parameters() if not key.endswith("logits")}
            for (_, value), other in zip(weights.items(), plain.network.parameters(), strict=True):
                assert torch.equal(value, other)
        for one in forms:
            one.run(2)
    plain, _, committed = forms
    theirs = dict(committed.network.named_parameters())
    for key, value in plain.network.named_parameters():  # a committed network trains as the unconverted one
        torch.testing.assert_close(theirs[key], value)


def test_no_candidate_is_dropped_while_a_blend_is_measured(benchmark: Benchmark) -> None:
    steps = benchmark("cost_rows.steps")
    form = steps.Form(benchmark("cost_rows.networks").CASES["mlp-blend"], "picking", CPU)
    form.run(400)  # the first round has 350 steps by default
    (site, *_) = sites_of(form.network)
    assert len(site.alive) == site.k


def test_a_run_of_a_trial_trains_every_candidate_once(benchmark: Benchmark) -> None:
    networks, steps = benchmark("cost_rows.networks"), benchmark("cost_rows.steps")
    form = steps.Form(networks.CASES["physics-trial"], "picking", CPU)
    ran: list[str] = []
    (site, *_) = sites_of(form.network)
    site.register_forward_pre_hook(lambda site, _: ran.append(site.candidates[site.only_candidate]))
    form.run(len(form.tried))
    assert ran == list(networks.PHYSICS_TRIAL.candidates)


def test_the_steps_of_picking_are_those_of_the_default_schedule(benchmark: Benchmark) -> None:
    networks, steps = benchmark("cost_rows.networks"), benchmark("cost_rows.steps")
    assert steps.picking_steps(networks.CASES["mlp-blend"]) == 3 * 350  # 5 candidates, then 3, 2 and 1
    # The winner keeps the weights of the 420 steps that it was trained for.
    assert steps.picking_steps(networks.CASES["mlp"]) == 5 * 105 + 3 * 105 + 2 * 210 - 420


# -- first runs --------------------------------------------------------------------------------------------------------


def test_waits_are_the_seconds_beyond_the_usual_step_of_a_round(benchmark: Benchmark) -> None:
    first_run = benchmark("cost_rows.first_run")
    steps = [0.5] * 20 + [0.4] * 20 + [0.2] * 20
    candidates = [3] * 20 + [2] * 20 + [1] * 20
    steps[0] += 4.0
    steps[1] += 1.0
    steps[10] += 0.3
    steps[19] += 0.05  # drops a candidate
    steps[20] += 0.7  # the first step without it
    steps[41] += 0.2
    steps[23:30] = [0.5] * 7  # slowed by builds in the background
    found = first_run.waits(steps, candidates, [0.1, 0.1, 0.4])
    expected = {"first": 5.0, "drops, s": 0.75, "commitment, s": 0.2, "evaluations, s": 0.3}
    assert found == pytest.approx(expected | {"all other steps, s": 1.0, "longest other step, s": 0.3})


def test_a_first_run_trains_through_all_rounds_with_a_hundred_steps_between_them(
    benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_times = benchmark("cost_rows.step_times")
    monkeypatch.setitem(BLOCKS, "resnet18", (1,))
    monkeypatch.setitem(step_times.SIZES, "cpu", (2, 1))
    found = step_times.measured(CPU, fuse=True)
    left = found["candidates"]
    assert len(found["steps"]) == len(left)
    assert [left.count(k) for k in (5, 3, 2, 1)] == [120, 120, 120, 60]
    assert len(found["evaluations"]) == len(left) // 40
    assert set(benchmark("cost_rows.first_run").waits(**found)) >= {"first", "drops, s", "commitment, s"}


def test_a_process_of_a_first_run_has_empty_caches(benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    first_run = benchmark("cost_rows.first_run")

    def run(command: list[str], env: Mapping[str, str], **_: Any) -> Any:
        for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME"):
            assert not Path(env[name]).exists()
            assert Path(env[name]).parent.exists()
        assert Path(command[1]).is_file()
        return SimpleNamespace(returncode=1, stdout="", stderr="no compiler")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(RuntimeError, match="no compiler"):
        list(first_run.rows(CPU))


def test_every_round_with_a_custom_candidate_is_timed(benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    first_run = benchmark("cost_rows.first_run")
    times = iter([0.0, 1.0, 10.0, 13.0])
    monkeypatch.setattr(first_run.time, "perf_counter", lambda: next(times))
    (row,) = first_run.custom_candidate(CPU)
    assert row.value == 3.0
    assert not list(times)


# -- the rows on a GPU -------------------------------------------------------------------------------------------------


def test_14_candidates_are_timed_relative_to_five_and_to_relu(
    benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BLOCKS, "resnet18", (1,))
    resnets = benchmark("cost_rows.resnets")
    rows = list(resnets.candidates(gpu_options("cpu"), way="closed_form", mode="eager"))
    assert [row.case.partition("eager, ")[2] for row in rows] == ["5 candidates", "14 candidates", "14 candidates"]
    assert all(row.low <= row.value <= row.high and row.plain_ms > 0 for row in rows)
    assert rows[2].quantity == "train_ms, ratio to 5 candidates"


def test_a_way_that_fails_is_a_row_with_its_error(benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BLOCKS, "resnet18", (1,))
    options = gpu_options("cpu", modes=("eager",), ways=("closed_form", "fused_bn"))
    rows = {(row.case, row.quantity): row for row in benchmark("cost_rows.resnets").rows("resnet18", options)}
    assert rows["resnet18, all, closed_form, eager", "train_ms, ratio"].value > 0
    failed = rows["resnet18, all, fused_bn, eager", "train_ms, ratio"]
    assert math.isnan(failed.value)
    assert "triton does not run here" in failed.error


def planned_rows(network: str, options: Options) -> list[Measurement]:
    """Returns the rows that the overhead study has of a network if everything runs."""
    groups = [[mode for mode in modes if mode in options.modes] for modes in study.TIMED_TOGETHER]
    cells = [cell for modes in groups for cell in study.planned(network, modes, options.ways)]
    memory = [Measurement(*cell, PEAK, 1.0, ratio=1.0) for cell in cells]
    return memory + [Measurement(*cell, TRAIN, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0) for cell in cells]


def test_every_line_of_the_table_has_its_rows(benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    cost, steps, first_run = benchmark("cost"), benchmark("cost_rows.steps"), benchmark("cost_rows.first_run")
    resnets, sites, lines = (benchmark(f"cost_rows.{name}") for name in ("resnets", "sites", "lines"))
    monkeypatch.setattr(cost, "chosen", gpu_options)
    monkeypatch.setattr(resnets, "study_stream", lambda _: torch.no_grad())
    monkeypatch.setattr(resnets, "step", lambda *_: None)
    monkeypatch.setattr(resnets, "release", lambda _: None)
    monkeypatch.setattr(resnets.study, "measure", planned_rows)
    monkeypatch.setattr(steps, "Form", lambda *_: SimpleNamespace(tried=[], run=print))
    monkeypatch.setattr(steps, "picking_steps", lambda _: 1)
    monkeypatch.setattr(sites, "_training", lambda _: lambda: 1.0)
    monkeypatch.setattr(first_run, "custom_candidate", lambda _: [first_run.Row(*first_run.STALL, 1.0)])
    for module in (steps, sites, resnets):
        monkeypatch.setattr(module, "interleaved", lambda runs, *_, **__: ({key: [1.0] for key in runs}, {}))
    times = {"steps": [0.1] * 20, "candidates": [3] * 8 + [2] * 6 + [1] * 6, "evaluations": [0.1]}
    done = SimpleNamespace(returncode=0, stdout=json.dumps(times))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    written = set()
    for device in ("cpu", "cuda"):
        for part in cost.parts(torch.device(device), 1).values():
            written |= {(row.case, row.quantity) for row in part()}
    expected = {entry.key for line in lines.LINES for entry in line.entries}
    assert expected <= written
    assert len(expected) == sum(len(line.entries) for line in lines.LINES)  # each row is in one line


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_parts(benchmark: Benchmark) -> Callable[[], dict[str, Any]]:
    """Returns a function that makes two parts, of which one fails after its first row."""
    row = benchmark("cost_rows.row").Row
    case, quantity = "resnet18, all, {}, eager", "train_ms, ratio"

    def failing() -> Iterator[Any]:
        yield row(case.format("plain"), quantity, 3.5)
        raise OSError("no space left")

    return lambda: {
        "broken": failing,
        "resnet18": lambda: iter(
            [row(case.format("measured"), quantity, 3.6), row(case.format("fused_bn"), quantity, 1.1)]
        ),
    }


def test_a_part_that_fails_leaves_a_row_and_the_other_parts(
    benchmark: Benchmark, two_parts: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    benchmark("cost").measure(two_parts(), tmp_path / "cpu.csv", CPU)
    rows = read(tmp_path / "cpu.csv")
    assert [row["part"] for row in rows] == ["broken", "broken", "resnet18", "resnet18"]
    assert rows[1]["error"] == "OSError: no space left"
    assert rows[1]["value"] == "nan"
    assert [row["reached"] for row in rows] == ["", "", "False", "True"]
    assert rows[2]["goal"] == "3.5"  # the value of plain torch
    assert all(row["device"] and row["torch"] and row["commit"] and row["date"] for row in rows)


def test_join_gives_the_file_of_a_single_run(
    benchmark: Benchmark, two_parts: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    cost = benchmark("cost")
    cost.measure(two_parts(), tmp_path / "whole.csv", CPU)
    files = [tmp_path / f"{name}.csv" for name in two_parts()]
    for path, (name, part) in zip(files, two_parts().items(), strict=True):
        cost.measure({name: part}, path, CPU)
    cost.join(files, tmp_path / "joined.csv")
    timeless = [[row | {"took_s": ""} for row in read(tmp_path / name)] for name in ("joined.csv", "whole.csv")]
    assert timeless[0] == timeless[1]
    with pytest.raises(ValueError, match="measured broken again"):
        cost.join([files[0], tmp_path / "whole.csv"], tmp_path / "joined.csv")
    files[1].write_text(files[1].read_text().replace(torch.__version__, "2.0"))
    with pytest.raises(ValueError, match="different values of torch"):
        cost.join(files, tmp_path / "joined.csv")


def test_only_does_not_overwrite_the_complete_file(
    benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = benchmark("cost")
    for given, message in (("--only mlp", "need --out"), ("--only nlp --out x", "unknown parts nlp; there are mlp")):
        monkeypatch.setattr("sys.argv", ["cost.py", "--device", "cpu", *given.split()])
        with pytest.raises(SystemExit):
            cost.main()
        assert message in capsys.readouterr().err


def test_the_table_shows_no_negative_zero(benchmark: Benchmark) -> None:
    key = ("first run", "drops, s")
    assert benchmark("cost_table")._value(key, 2, {key: -0.003}) == "0.00"
    assert benchmark("cost_table")._value(key, 2, {key: 0.3}) == "**0.30**"


def test_the_table_marks_what_misses_its_goal(
    benchmark: Benchmark, two_parts: Callable[[], dict[str, Any]], tmp_path: Path
) -> None:
    cost, table = benchmark("cost"), benchmark("cost_table").table
    for name in ("cpu.csv", "cuda.csv"):
        cost.measure(two_parts(), tmp_path / name, CPU)
    cells = [[cell.strip() for cell in line.split("|")] for line in table(tmp_path).splitlines() if "|" in line]
    lines = {title: own for _, title, *own, _ in cells}
    assert lines["ResNet-18 / -34, eager, without Triton, all sites"] == ["≤ plain torch", *["**3.60** / –"] * 2]
    assert lines["ResNet-18 / -34, eager, all sites, `fuse=True`"] == ["≤ 1.15", *["1.10 / –"] * 2]
    assert lines["GPT, 4 blocks: step / run"] == ["≤ 1.3", "–", "–"]
