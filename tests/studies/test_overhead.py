"""Tests of the overhead study: what it compares, how it measures, and what it writes."""

from __future__ import annotations

import csv
import functools
import json
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import flexact
from flexact.cli.app import main
from flexact.io import csv_rows
from flexact.routing.sites import sites_of
from flexact.studies.cifar_resnets import BLOCKS
from flexact.studies.cuda_graph import study_stream
from flexact.studies.overhead import training as steps
from flexact.studies.overhead.options import BASELINE, PARAMETERS, TRAIN, Cell, Measurement, Options, chosen
from flexact.studies.overhead.study import PAPER, planned, run, written
from flexact.studies.overhead.timing import interleaved, ratios, spread
from flexact.studies.overhead.training import Batch, PlainSite, Training, build
from kernels import using

count = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "launches.py"))["count"]
RESULTS = Path(__file__).parents[2] / "results" / "overhead"
CPU = torch.device("cpu")
SMALL = (1, 1)

TINY = Options(
    device="cpu",
    models=("resnet18",),
    modes=("eager", "graph"),
    ways=("plain", "closed_form", "fused_bn"),
    repeats=2,
    batch=2,
    width=2,
)


@pytest.fixture(autouse=True)
def _usual_kernels_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with using("auto"):
        yield


@pytest.fixture
def small_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in BLOCKS:
        monkeypatch.setitem(BLOCKS, name, SMALL)


def small(way: str = "closed_form", placement: str = "all") -> torch.nn.Module:
    return build(SMALL, 4, placement, way, CPU)


def batch() -> Batch:
    return Batch(4, CPU, torch.float32)


# -- what is compared --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", ["resnet18", "resnet34"])
@pytest.mark.parametrize("placement", ["penultimate", "all"])
def test_the_networks_have_the_papers_extra_parameters(network: str, placement: str) -> None:
    built = build(BLOCKS[network], 2, placement, "closed_form", CPU)
    assert sum(site.logits.numel() for site in sites_of(built)) == PAPER[network, placement][2]
    assert sites_of(built)[-1].name.startswith("layer4.")
    assert not isinstance(built.relu, flexact.FlexAct)


def test_the_plain_implementation_computes_what_the_closed_form_does() -> None:
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
        sites_of(plain)[0].router.sensitivity(), sites_of(closed)[0].router.sensitivity(), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("where", ["penultimate", "layer*"])
@pytest.mark.parametrize("fuse", [False, True])
def test_extraction_leaves_the_network_with_relu(where: str, fuse: bool) -> None:
    """So inference after extraction costs what the network with ReLU costs."""
    plain = small(BASELINE, BASELINE)
    routed = flexact.convert(small(BASELINE, BASELINE), where, fuse=fuse)
    with torch.no_grad():
        for site in sites_of(routed):
            site.logits.view(site.rows, site.k)[:, site.keys.index("relu")] += 100.0
    extracted = flexact.extract(routed, commit=True)
    assert repr(extracted) == repr(plain) != repr(routed)
    assert extracted.state_dict().keys() == plain.state_dict().keys()


def test_an_implementation_that_does_not_run_here_is_an_error() -> None:
    with pytest.raises(flexact.FlexActError, match="run on CUDA tensors"):
        small("fused")


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
        assert all(site.logits.grad is None for site in sites_of(training.network))  # the policy used them
        moved = [site.logits.detach() for site in sites_of(training.network)]
        assert any(not torch.equal(one, other) for one, other in zip(before, moved, strict=True))


def test_a_compiled_step_equals_the_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "COMPILER", "aot_eager")
    torch._dynamo.reset()
    losses = []
    for compiled in (False, True):
        training = Training(small(), "closed_form", batch(), compiled)
        training.warm_up()
        losses.append(training.loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_each_compiled_network_has_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "COMPILER", "eager")
    torch._dynamo.reset()
    networks = [torch.nn.Linear(3, n) for n in (1, 2, 3)]
    forwards = [steps.compiled_forward(network) for network in networks]
    x = torch.randn(2, 3)
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for _ in range(2):
            for network, forward in zip(networks, forwards, strict=True):
                assert torch.equal(forward(x), network(x))


def test_a_graph_needs_a_gpu() -> None:
    with pytest.raises(flexact.FlexActError, match="CUDA"):
        Training(small(), "closed_form", batch(), compiled=False).capture()


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["plain", "closed_form", "fused", "fused_bn"])
def test_a_captured_step_trains_like_an_eager_one(way: str) -> None:
    device = torch.device("cuda")
    losses = []
    with study_stream(device):
        for replayed in (False, True):
            network = build(SMALL, 16, "all", way, device)
            training = Training(network, way, Batch(32, device, torch.float32), compiled=False)
            training.warm_up()
            if replayed:
                training.capture()
            for _ in range(5):
                training.step()
            losses.append(training.loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


# -- measuring ---------------------------------------------------------------------------------------------------------


def test_spreads_and_ratios_are_taken_round_by_round() -> None:
    assert spread([1.0]) == spread([1.0, 1.0])
    slow_machine = [10.0, 20.0, 30.0]
    assert ratios([2 * value for value in slow_machine], slow_machine).high == 2.0


def test_a_contender_that_fails_does_not_stop_the_others() -> None:
    def bad() -> None:
        raise ValueError("bad")

    times, failed = interleaved({"good": lambda: None, "bad": bad}, 4, CPU, 1.0)
    assert list(times) == ["good"]
    assert len(times["good"]) == 4
    assert {key: str(error) for key, error in failed.items()} == {"bad": "bad"}


def saved_for_backward(run: Callable[[], None]) -> int:
    """Returns the bytes that autograd keeps during a run. Each storage counts once."""
    kept: dict[int, torch.Tensor] = {}  # holds the tensors, so that no address is used twice

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_the_closed_form_saves_less_than_the_plain_implementation() -> None:
    saved = {}
    for way in (BASELINE, "plain", "closed_form"):
        training = Training(small(way, BASELINE if way == BASELINE else "all"), way, batch(), compiled=False)
        saved[way] = saved_for_backward(training.step)
    assert saved[BASELINE] < saved["closed_form"] < saved["plain"]


def test_launches_of_draw_and_policy_do_not_depend_on_depth() -> None:
    counted = []
    for blocks in ((2,), (1, 2, 1)):
        training = Training(build(blocks, 2, "all", "closed_form", CPU), "closed_form", batch(), compiled=False)
        assert training.schedule is not None
        router = sites_of(training.network)[0].router
        draw = count(lambda router=router: router.refresh(True), CPU)
        training.network(training.batch.images).square().mean().backward()
        act = training.schedule._action(training.optimizer)
        assert act is not None
        policy = count(functools.partial(act, False), CPU)
        counted.append((draw, policy, count(training.schedule.step, CPU)))
    assert counted[0] == counted[1]
    draw, policy, schedule = counted[0]
    assert min(draw, policy) > 0
    assert schedule == 0  # at a step that changes nothing


# -- rows and table ----------------------------------------------------------------------------------------------------


def test_rows_round_trip_through_the_csv(tmp_path: Path) -> None:
    rows = [
        Measurement("resnet18", "all", "fused", "eager", TRAIN, 1.5, 1.25, 2.0, repeats=20),
        Measurement("resnet18", "all", "plain", "graph", TRAIN, error='RuntimeError: a "quoted", one'),
    ]
    made = {"device": "card, fast", "date": "2026-01-01"}
    csv_rows.write(tmp_path / "rows.csv", Measurement, rows, made)
    assert csv_rows.read(tmp_path / "rows.csv", Measurement, made=list(made)) == rows
    with (tmp_path / "rows.csv").open(newline="") as file:
        assert [line["device"] for line in csv.DictReader(file)] == ["card, fast"] * 2
    (tmp_path / "rows.csv").write_text((tmp_path / "rows.csv").read_text().replace(",20,", ",many,"))
    with pytest.raises(flexact.FlexActError, match="line 2: repeats is 'many', not a whole number"):
        csv_rows.read(tmp_path / "rows.csv", Measurement, made=list(made))


def test_the_table_has_the_papers_ratios_next_to_ours() -> None:
    text = written([Measurement("resnet18", "all", "fused", "eager", TRAIN, 1.0, 1.0, 1.0)], {"device": "H200"})
    assert "| resnet18, all sites |" in text
    assert "1.80" in text  # 40.688 / 22.599
    assert "1.48" in text  # 1057 / 713
    assert "Not measured" not in text


def test_the_committed_table_matches_the_committed_rows() -> None:
    made = ("batch", "width", "dtype", "device", "torch", "commit", "date")
    with (RESULTS / "overhead.csv").open(newline="") as file:
        first = next(csv.DictReader(file))
    rows = csv_rows.read(RESULTS / "overhead.csv", Measurement, made=made)
    assert written(rows, {name: first[name] for name in made}) == (RESULTS / "table.md").read_text()


# -- the study ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_networks")
def test_the_study_writes_its_folder_and_continues_after_failures(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(TINY, folder)
    assert json.loads((folder / "config.json").read_text())["study"] == "overhead"
    with (folder / "overhead.csv").open(newline="") as file:
        made = list(next(csv.DictReader(file)))[len(Measurement._fields) :]
    assert {"batch", "dtype", "device", "torch", "commit", "date"} <= set(made)
    rows = csv_rows.read(folder / "overhead.csv", Measurement, made=made)
    by_key = {(row.cell, row.quantity): row for row in rows}
    assert len({row.cell for row in rows if row.quantity == TRAIN}) == 2 * (1 + 2 * 3)
    relu = Cell("resnet18", BASELINE, BASELINE, "eager")
    assert by_key[relu, TRAIN].ratio == 1.0
    closed = Cell("resnet18", "all", "closed_form", "eager")
    assert by_key[closed, PARAMETERS].value == 10
    train = by_key[closed, TRAIN]
    assert train.ratio_p10 is not None
    assert train.ratio is not None
    assert train.ratio_p90 is not None
    assert train.ratio_p10 <= train.ratio <= train.ratio_p90
    assert "CUDA graph needs a CUDA device" in by_key[closed._replace(mode="graph"), TRAIN].error
    assert "triton does not run here" in by_key[closed._replace(way="fused_bn"), TRAIN].error
    assert "## Not measured" in (folder / "table.md").read_text()
    with pytest.raises(flexact.FlexActError, match="--overwrite"):
        run(TINY, folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    with pytest.raises(flexact.FlexActError, match="no run of a study"):
        run(TINY, tmp_path / "other", overwrite=True)


@pytest.mark.usefixtures("small_networks")
def test_a_run_without_a_routed_network_fails_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--device",
        "cpu",
        "--models",
        "resnet18",
        "--batch",
        "2",
        "--width",
        "2",
        "--ways",
        "fused",
    ]  # which needs a GPU
    with pytest.raises(SystemExit) as exit_:
        main(["reproduce", "overhead", "--out", str(tmp_path / "run"), "--quiet", *arguments])
    assert exit_.value.code == 1
    assert "no routed network was measured" in capsys.readouterr().err
    assert "triton does not run here" in (tmp_path / "run" / "table.md").read_text()


def test_a_cpu_is_measured_in_one_thread() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with study_stream(CPU):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "resnet50"], "unknown model 'resnet50'; did you mean"),
        (["--modes", "eagre"], "did you mean 'eager'?"),
        (["--ways", ","], "--ways names nothing"),
        (["--ways", "plain,plain"], "names plain more than once"),
        (["--repeats", "0"], "--repeats must be a whole number from 1"),
        (["--device", "tpu"], "unknown device 'tpu'; give cpu"),
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
    options = chosen("cpu", batch=4)
    assert (options.batch, options.dtype, options.modes) == (4, torch.float32, ("eager",))
    assert options.ways == ("plain", "closed_form")
    if not torch.cuda.is_available():
        with pytest.raises(flexact.FlexActError, match="there is no cuda here"):
            chosen("cuda")
