"""The overhead study: what it compares, how it measures, and what it writes."""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flexact
from flexact.cli import main
from flexact.ops import kernels
from flexact.sites import sites_of
from flexact.studies.overhead import deadline as deadline_module
from flexact.studies.overhead import launches, steps, study, training
from flexact.studies.overhead import rows as files
from flexact.studies.overhead.deadline import Deadline, OutOfTime
from flexact.studies.overhead.figures import pictures, read_results
from flexact.studies.overhead.goals import goals
from flexact.studies.overhead.memory import Memory, saved_for_backward
from flexact.studies.overhead.networks import (
    BASELINE,
    PlainSite,
    build,
    extracted,
    kernels_of,
    logit_count,
    same_modules,
)
from flexact.studies.overhead.options import CANDIDATES, NETWORKS, Options, chosen
from flexact.studies.overhead.rows import Cell, LaunchRow, OperationRow, OverheadRow, SweepRow
from flexact.studies.overhead.steps import Batch, Inference, Training, captured
from flexact.studies.overhead.study import run
from flexact.studies.overhead.table import Results, written
from flexact.studies.overhead.timing import interleaved, ratios, spread
from flexact.studies.overhead.training import measure, planned
from flexact.studies.paper_tables import OVERHEAD

CPU = torch.device("cpu")
FIVE = CANDIDATES[:5]
SMALL = (1, 1)

TINY = Options(
    device="cpu",
    models=("resnet18",),
    modes=("eager", "graph"),
    ways=("plain", "closed_form", "fused_bn"),
    repeats=2,
    batch=2,
    width=2,
    minutes=5.0,
    burst_ms=1.0,
    elements=1 << 16,
    ks=(2, 5),
    depths=((1,), (1, 1)),
)


@pytest.fixture(autouse=True)
def _usual_kernels_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_forced", None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def small_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NETWORKS:
        monkeypatch.setitem(NETWORKS, name, SMALL)


def small(way: str = "closed_form", placement: str = "all") -> torch.nn.Module:
    return build(SMALL, 4, placement, way, FIVE, CPU)


def batch() -> Batch:
    return Batch(4, CPU, torch.float32)


# -- what is compared --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["resnet18", "resnet34"])
@pytest.mark.parametrize("placement", ["penultimate", "all"])
def test_the_networks_have_the_papers_extra_parameters(network: str, placement: str) -> None:
    built = build(NETWORKS[network], 2, placement, "closed_form", FIVE, CPU)
    assert logit_count(built) == OVERHEAD[network, placement][3]
    assert sites_of(built)[-1].name.startswith("layer4.")
    assert not isinstance(built.relu, flexact.FlexAct)


def test_the_plain_way_computes_what_the_closed_form_does() -> None:
    torch.manual_seed(0)
    plain, closed = small("plain"), small("closed_form")
    assert all(isinstance(site, PlainSite) for site in sites_of(plain))
    for network in (plain, closed):
        with torch.no_grad():
            for site in sites_of(network):
                site.logits.copy_(torch.linspace(-1, 1, 5))
        network.train()
    images = torch.randn(4, 3, 32, 32)
    for network in (plain, closed):
        network(images).square().mean().backward()
    torch.testing.assert_close(plain(images), closed(images))
    for one, other in zip(plain.parameters(), closed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5)
    for one, other in zip(
        sites_of(plain)[0].router.mean_statistics(), sites_of(closed)[0].router.mean_statistics(), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("placement", ["penultimate", "all"])
@pytest.mark.parametrize("fuse", [False, True])
def test_extraction_leaves_the_network_with_relu(placement: str, fuse: bool) -> None:
    where = {"penultimate": "penultimate", "all": "layer*"}[placement]
    routed = flexact.convert(small(BASELINE, BASELINE), where, fuse=fuse)
    before = [site.logits.clone() for site in sites_of(routed)]
    assert same_modules(extracted(routed), small(BASELINE, BASELINE))
    assert not same_modules(routed, small(BASELINE, BASELINE))
    for site, logits in zip(sites_of(routed), before, strict=True):
        assert torch.equal(site.logits, logits)
        assert not site.committed


def test_a_way_that_does_not_run_here_is_an_error() -> None:
    with pytest.raises(flexact.FlexActError, match="run on CUDA tensors"), kernels_of("fused", CPU):
        pass
    assert kernels.wanted() == "auto"


def test_cells_are_planned_with_the_baseline_first_and_once() -> None:
    cells = planned("resnet18", ["eager", "compiled"], ["plain", "fused"])
    assert cells[0] == Cell("resnet18", BASELINE, BASELINE, "eager")
    assert len(set(cells)) == len(cells)
    assert [c.way for c in cells if c.placement == "penultimate" and c.compiled] == ["fused"]


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [BASELINE, "plain", "closed_form"])
def test_a_step_trains(way: str) -> None:
    training = Training(small(way, BASELINE if way == BASELINE else "all"), way, batch(), compiled=False)
    first = training.loss.item()
    before = [site.logits.detach().clone() for site in sites_of(training.network)]
    for _ in range(8):
        training.step()
    assert training.loss.item() < first
    if training.schedule is not None:
        assert training.schedule.steps_done == 9
        assert all(site.logits.grad is None for site in sites_of(training.network))  # the policy took them
        moved = [site.logits.detach() for site in sites_of(training.network)]
        assert any(not torch.equal(one, other) for one, other in zip(before, moved, strict=True))


def test_a_compiled_step_is_the_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "COMPILER", "aot_eager")
    torch._dynamo.reset()
    losses = []
    for compiled in (False, True):
        training = Training(small(), "closed_form", batch(), compiled)
        training.warm_up()
        losses.append(training.loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_each_compiled_network_has_code_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "COMPILER", "eager")
    torch._dynamo.reset()
    networks = [torch.nn.Linear(3, n) for n in (1, 2, 3)]
    forwards = [steps.compiled_forward(network) for network in networks]
    x = torch.randn(2, 3)
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for _ in range(2):
            for network, forward in zip(networks, forwards, strict=True):
                assert torch.equal(forward(x), network(x))


def test_inference_leaves_no_graph() -> None:
    inference = Inference(extracted(small()), batch(), compiled=False)
    inference.step()
    assert not inference.network.training
    assert inference.output.grad_fn is None


def test_a_graph_needs_a_card() -> None:
    with pytest.raises(flexact.FlexActError, match="CUDA"):
        captured(lambda: None, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["plain", "closed_form", "fused", "fused_bn"])
def test_a_captured_step_trains_as_an_eager_one(way: str) -> None:
    device = torch.device("cuda")
    losses = []
    with steps.study_stream(device):
        for replayed in (False, True):
            network = build(SMALL, 16, "all", way, FIVE, device)
            training = Training(network, way, Batch(32, device, torch.float32), compiled=False)
            training.warm_up()
            if replayed:
                training.capture()
            for _ in range(5):
                (training.replay if replayed else training.step)()
            losses.append(training.loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


# -- measuring ---------------------------------------------------------------------------------------------------------


def test_spreads_and_ratios_are_taken_round_by_round() -> None:
    assert spread([1.0]) == spread([1.0, 1.0])
    slow_machine = [10.0, 20.0, 30.0]
    assert ratios([2 * value for value in slow_machine], slow_machine).high == 2.0


def test_a_contender_that_fails_does_not_stop_the_others() -> None:
    calls = {"good": 0, "late": 0}

    def good() -> None:
        calls["good"] += 1

    def late() -> None:
        calls["late"] += 1
        if calls["late"] > 10:
            raise RuntimeError("late")

    def bad() -> None:
        raise ValueError("bad")

    times, failed = interleaved({"good": good, "bad": bad, "late": late}, 4, CPU, 1.0, Deadline(60))
    assert list(times) == ["good"]
    assert len(times["good"]) == 4
    assert {key: str(error) for key, error in failed.items()} == {"bad": "bad", "late": "late"}


def test_past_the_deadline_few_rounds_are_left() -> None:
    times, _ = interleaved({0: lambda: None}, 50, CPU, 0.001, Deadline(-1.0))
    assert len(times[0]) == 3


def test_a_deadline_lets_nothing_begin_that_it_cannot_end() -> None:
    deadline = Deadline(60.0)
    deadline.check()
    deadline.took(100.0)
    with pytest.raises(OutOfTime):
        deadline.check()


def test_one_long_piece_does_not_end_what_takes_little() -> None:
    """The first network that needs a kernel waits for it to be built; those after it do not."""
    deadline = Deadline(60.0)
    for seconds in (1.0, 100.0):
        deadline.took(seconds)
    deadline.check()
    deadline.took(100.0)
    with pytest.raises(OutOfTime):
        deadline.check()


def test_memory_without_a_card_is_what_autograd_saves() -> None:
    h = torch.randn(1 << 18, requires_grad=True)
    assert Memory(CPU).of(lambda: h.tanh().sum().backward()) == 1.0
    assert saved_for_backward(lambda: (h * 2).sum().backward()) == 0


def test_the_closed_form_saves_less_than_the_plain_way() -> None:
    saved = {}
    for way in (BASELINE, "plain", "closed_form"):
        training = Training(small(way, BASELINE if way == BASELINE else "all"), way, batch(), compiled=False)
        saved[way] = Memory(CPU).of(training.step)
    assert saved[BASELINE] < saved["closed_form"] < saved["plain"]


def test_launches_of_draw_and_policy_do_not_depend_on_depth() -> None:
    counted = []
    for blocks in ((2,), (1, 2, 1)):
        training = Training(build(blocks, 2, "all", "closed_form", FIVE, CPU), "closed_form", batch(), compiled=False)
        assert training.schedule is not None
        router = sites_of(training.network)[0].router
        draw = launches.count(lambda router=router: router.refresh(True), CPU)
        training.network(training.batch.images).square().mean().backward()
        act = functools.partial(training.schedule.before_optimizer_step, training.optimizer)
        policy = launches.count(act, CPU)
        counted.append((draw, policy, launches.count(training.schedule.step, CPU)))
    assert counted[0] == counted[1]
    draw, policy, schedule = counted[0]
    assert min(draw, policy) > 0
    assert schedule == 0  # at a step that changes nothing


# -- rows, table, figures ----------------------------------------------------------------------------------------------


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    rows = [
        OverheadRow("resnet18", "all", "fused", "eager", 128, 64, "bfloat16", 8, 40, 1.5, 1.25, 2.0, same_modules=True),
        OverheadRow("resnet18", "all", "plain", "graph", 128, 64, "bfloat16", error='RuntimeError: a "quoted", one'),
    ]
    files.write(tmp_path / "rows.csv", rows, {"device": "card, fast", "date": "2026-01-01"})
    assert files.read(tmp_path / "rows.csv", OverheadRow) == rows
    with (tmp_path / "rows.csv").open(newline="") as file:
        assert [line["device"] for line in csv.DictReader(file)] == ["card, fast"] * 2
    (tmp_path / "rows.csv").write_text((tmp_path / "rows.csv").read_text().replace("128", "many"))
    with pytest.raises(flexact.FlexActError, match="line 2"):
        files.read(tmp_path / "rows.csv", OverheadRow)


def cell(placement: str, way: str, mode: str, **fields: float) -> OverheadRow:
    return OverheadRow("resnet18", placement, way, mode, 128, 64, "bfloat16", train_ms=1.0, **fields)


def test_a_goal_is_reached_by_the_fastest_way_of_the_library() -> None:
    in_graph = cell("all", "fused_bn", "graph", train_ratio=0.9, train_ratio_to_compiled_graph=1.05, memory_ratio=1.02)
    rows = [
        cell("all", "plain", "eager", train_ratio=1.0, memory_ratio=1.0),  # not the library's
        cell("all", "closed_form", "eager", train_ratio=1.3, memory_ratio=1.0),
        cell("all", "fused_bn", "eager", train_ratio=1.151, memory_ratio=1.03),
        in_graph,
    ]
    found = {(goal.figure, goal.network): goal for goal in goals(rows, [], [])}
    assert found["training step, eager", "resnet18"].value == 1.151
    assert found["training step, eager", "resnet18"].reached is False
    assert found["peak memory in training, eager", "resnet18"].reached is False
    assert found["peak memory in training, graph", "resnet18"].reached is True
    graph = found["training step, CUDA graph, to the compiled ReLU in one", "resnet18"]
    assert (graph.reached, graph.found_in) == (True, "fused_bn, graph")
    assert found["penultimate only, graph", "resnet18"].reached is None
    assert found["the operation alone, forward + backward, in a graph, to ReLU", ""].reached is None


def test_all_figures_of_a_network_and_mode_are_those_of_one_way() -> None:
    """The one with the least ratio to ReLU at all sites, though another took fewer milliseconds, or less elsewhere."""
    rows = [
        dataclasses.replace(cell("all", "fused", "eager", train_ratio=1.655, memory_ratio=1.314), train_ms=19.6),
        dataclasses.replace(cell("all", "fused_bn", "eager", train_ratio=1.58, memory_ratio=1.006), train_ms=20.7),
        dataclasses.replace(cell("penultimate", "fused", "eager", train_ratio=1.1), train_ms=13.0),
        dataclasses.replace(cell("penultimate", "fused_bn", "eager", train_ratio=1.2), train_ms=14.0),
    ]
    steps_of = [
        SweepRow("step", "resnet18", "fused", "eager", 14, 18, 8, ms=3.0, ratio=1.1, ratio_to_five=1.05),
        SweepRow("step", "resnet18", "fused_bn", "eager", 14, 18, 8, ms=3.1, ratio=1.2, ratio_to_five=1.2),
    ]
    found = {goal.figure: goal for goal in goals(rows, [], steps_of) if goal.value is not None}
    assert {goal.found_in for goal in found.values()} == {"fused_bn, eager"}
    assert found["peak memory in training, eager"].value == 1.006
    assert found["penultimate only, eager"].value == 1.2
    assert found["14 candidates to five, training step"].value == 1.2


def test_inference_counts_as_one_within_its_spread_for_the_same_modules() -> None:
    def reached(same: bool, low: float) -> bool | None:
        row = dataclasses.replace(
            cell("all", "fused", "eager"), inference_ratio=1.01, inference_ratio_p10=low, same_modules=same
        )
        return next(goal.reached for goal in goals([row], [], []) if goal.figure.startswith("inference"))

    assert reached(True, 0.99) is True
    assert reached(True, 1.008) is False
    assert reached(False, 0.99) is False


def test_goals_of_the_operation_and_of_fourteen_candidates() -> None:
    operation = OperationRow("fused", "both", "graph", 1 << 26, "bfloat16", ratio=1.14)
    step = SweepRow("step", "resnet18", "fused_bn", "graph", 14, 18, 8, ms=3.0, ratio_to_five=1.2)
    by_figure = {goal.figure: goal for goal in goals([], [operation], [step])}
    assert by_figure["the operation alone, forward + backward, in a graph, to ReLU"].reached is True
    assert by_figure["14 candidates to five, training step"].reached is False


def test_the_table_has_the_papers_ratios_beside_ours() -> None:
    row = cell("all", "fused", "eager", train_ms_p10=1.0, train_ms_p90=1.0)
    text = written(Results(overhead=[row]), {"device": "H200"})
    assert "| resnet18, all sites |" in text
    assert "1.80" in text  # 40.688 / 22.599
    assert "1.48" in text  # 1057 / 713
    assert "not measured" in text


def test_a_cpu_has_no_figures_to_reach() -> None:
    row = dataclasses.replace(cell("all", "closed_form", "eager"), dtype="float32", train_ms=None, error="no time")
    assert "Figures to reach" not in written(Results(overhead=[row]), {"device": "cpu"})


def test_later_rows_replace_earlier_ones_unless_they_failed() -> None:
    results = Results()
    results.add_overhead([cell("all", "fused", "graph", memory_mb=1.0)])
    results.add_overhead([dataclasses.replace(cell("all", "fused", "graph"), train_ms=None, error="out of time")])
    assert results.overhead[0].memory_mb == 1.0
    results.add_overhead([cell("all", "fused", "graph", memory_mb=2.0)])
    assert [row.memory_mb for row in results.overhead] == [2.0]


def test_inference_that_was_not_measured_again_is_kept() -> None:
    results = Results()
    results.add_overhead([cell("all", "fused", "graph", inference_ms=3.0, inference_ratio=1.0)])
    later = cell("all", "fused", "graph", memory_mb=2.0, inference_ms=None, inference_ratio=None)
    results.add_overhead([dataclasses.replace(later, error="inference: OutOfTime: left out")])
    (row,) = results.overhead
    assert (row.memory_mb, row.inference_ms, row.inference_ratio, row.error) == (2.0, 3.0, 1.0, "")
    results.add_overhead([dataclasses.replace(later, inference_ms=4.0)])
    assert results.overhead[0].inference_ms == 4.0


# -- the study ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_networks")
def test_the_study_writes_its_folder_and_goes_on_past_failures(tmp_path: Path) -> None:
    results = run(TINY, tmp_path / "run")
    folder = tmp_path / "run"
    for name in ("overhead.csv", "operation.csv", "candidates.csv", "depth.csv", "launches.csv", "table.md"):
        assert (folder / name).stat().st_size > 0
    assert json.loads((folder / "config.json").read_text())["study"] == "overhead"
    assert results.failures == {}
    by_cell = {row.cell: row for row in files.read(folder / "overhead.csv", OverheadRow)}
    assert len(by_cell) == 2 * (1 + 2 * 3)
    relu = by_cell[Cell("resnet18", BASELINE, BASELINE, "eager")]
    assert relu.train_ratio == relu.inference_ratio == relu.memory_ratio == 1.0
    closed = by_cell[Cell("resnet18", "all", "closed_form", "eager")]
    assert (closed.sites, closed.extra_parameters, closed.same_modules, closed.error) == (2, 10, True, "")
    assert closed.train_ms is not None
    assert closed.train_ratio is not None
    assert closed.train_ratio_p10 is not None
    assert closed.train_ratio_p90 is not None
    assert closed.train_ratio_p10 <= closed.train_ratio <= closed.train_ratio_p90
    assert closed.inference_ms is not None
    assert "CUDA graph needs a CUDA device" in by_cell[Cell("resnet18", "all", "closed_form", "graph")].error
    assert "triton does not run here" in by_cell[Cell("resnet18", "all", "fused_bn", "eager")].error
    with (folder / "overhead.csv").open(newline="") as file:
        assert {"device", "torch", "commit", "date"} <= set(next(csv.DictReader(file)))
    assert "## Not measured" in (folder / "table.md").read_text()
    assert {path.suffix for path in (folder / "figures").iterdir()} == {".png", ".svg"}

    assert read_results(folder).overhead == list(by_cell.values())
    with pytest.raises(flexact.FlexActError, match="--overwrite"):
        run(TINY, folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    with pytest.raises(flexact.FlexActError, match="no run"):
        run(TINY, tmp_path / "other", overwrite=True)


@pytest.mark.usefixtures("small_networks")
def test_what_does_not_fit_the_time_is_told() -> None:
    rows = measure("resnet18", ["eager"], TINY, Deadline(0.0))
    assert all("--minutes" in row.error for row in rows)


@pytest.mark.usefixtures("small_networks")
def test_a_network_that_may_be_late_is_measured_while_the_study_has_time() -> None:
    options = dataclasses.replace(TINY, ways=("plain", "closed_form"))
    rows = measure("resnet18", ["eager"], options, Deadline(600.0).share(0.0, late=True))
    assert all(row.train_ms is not None and row.inference_ms is not None for row in rows)
    assert {row.repeats for row in rows} == {2}
    rows = measure("resnet18", ["eager"], options, Deadline(0.0).share(1.0, late=True))
    assert all("--minutes" in row.error for row in rows)


@pytest.fixture
def table_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The study without its sweeps and figures, which take the longest."""
    for name in ("against_candidates", "against_depth"):
        monkeypatch.setattr(study.sweeps, name, lambda *_: [])
    monkeypatch.setattr(study, "pictures", lambda _: [])


@pytest.mark.usefixtures("small_networks", "table_alone")
def test_the_time_begins_when_the_kernels_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(deadline_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(study, "_wake", lambda _: now.__setitem__(0, 1e6))
    options = dataclasses.replace(TINY, modes=("eager",), ways=("closed_form",))
    assert all(row.error == "" for row in run(options, tmp_path / "run").overhead)


@pytest.mark.usefixtures("small_networks", "table_alone")
def test_a_run_without_a_routed_network_says_so_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--quick", "--batch", "2", "--width", "2", "--ways", "fused"]  # which needs a card
    with pytest.raises(SystemExit) as exit_:
        main(["reproduce", "overhead", "--out", str(tmp_path / "run"), "--quiet", *arguments])
    assert exit_.value.code == 1
    assert "no routed network was measured" in capsys.readouterr().err
    assert "triton does not run here" in (tmp_path / "run" / "table.md").read_text()


def test_a_cpu_is_measured_in_one_thread() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with steps.study_stream(CPU):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("small_networks")
def test_inference_is_measured_where_training_took_longer_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline, train = Deadline(120.0), training._train

    def too_long(*arguments: Any) -> None:
        train(*arguments)
        deadline._end = -math.inf

    monkeypatch.setattr(training, "_train", too_long)
    rows = measure("resnet18", ["eager"], dataclasses.replace(TINY, ways=("plain", "closed_form")), deadline)
    assert all(row.train_ms is not None and row.inference_ms is not None for row in rows)


@pytest.mark.usefixtures("small_networks")
def test_the_kernels_of_every_way_are_built_before_the_first_network_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[str] = []

    def noted(network: torch.nn.Module, way: str, *rest: Any, **options: Any) -> Training:
        begun.append(way)
        return Training(network, way, *rest, **options)

    monkeypatch.setattr(study, "Training", noted)
    study._wake(TINY)
    assert begun == [BASELINE, "plain", "closed_form"]  # the third one needs a card, and is told in its row


def test_a_figure_needs_data() -> None:
    assert pictures(Results()) == []
    counted = LaunchRow(4, 1, "fused", "kernels", 1, 2, 3, 50, 40)
    assert [picture.slug for picture in pictures(Results(launches=[counted]))] == ["overhead-launches"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "resnet50"], "unknown name 'resnet50' in --models; did you mean"),
        (["--modes", "eagre"], "did you mean 'eager'?"),
        (["--ways", ","], "--ways names nothing"),
        (["--ways", "plain,plain"], "may name each once"),
        (["--repeats", "0"], "--repeats must be a whole number from 1"),
        (["--minutes", "0"], "--minutes must be"),
        (["--device", "tpu"], "--device must be cuda or cpu"),
    ],
)
def test_bad_input_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["reproduce", "overhead", "--out", str(tmp_path / "run"), *arguments])
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("flexact: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert not (tmp_path / "run").exists()


def test_the_sizes_are_those_of_the_device() -> None:
    options = chosen("cpu", quick=False, batch=4)
    assert (options.batch, options.dtype, options.modes) == (4, torch.float32, ("eager",))
    quick = chosen("cpu", quick=True)
    assert (quick.models, quick.modes, quick.ways) == (("resnet18",), ("eager",), ("plain", "closed_form"))
    assert math.prod((options.elements // (64 * 32 * 32), 64, 32, 32)) == options.elements
    if not torch.cuda.is_available():
        with pytest.raises(flexact.FlexActError, match="no GPU"):
            chosen("cuda", quick=False)
