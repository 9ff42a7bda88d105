"""Tests of the Recorder: the history in memory, as JSON lines, and in TensorBoard."""

from __future__ import annotations

import builtins
import json
import math
import sys
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from flexact import FlexActError, FlexConfig, Recorder, Schedule, convert, selection

FIVE = ("relu", "sigmoid", "tanh", "leaky_relu", "identity")
CONFIG = FlexConfig(candidates=FIVE, share="site", pick_by="blend", rewind=False)


def network() -> nn.Sequential:
    return convert(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Tanh()), "*", config=CONFIG)


def nudge(model: nn.Sequential, amount: float) -> None:
    with torch.no_grad():
        model[1].logits[2] += amount


def recorded(path: Path, steps: int) -> nn.Sequential:
    model = network()
    with Recorder(model, path) as recorder:
        for step in range(steps):
            recorder.record(step, loss=1 / (step + 1))
            nudge(model, 0.5)
    return model


def test_memory_keeps_probabilities_picks_and_the_users_numbers() -> None:
    model = network()
    recorder = Recorder(model)
    recorder.record(0, loss=1.5)
    nudge(model, 2.0)
    recorder.record(10, loss=torch.tensor(0.5, requires_grad=True), accuracy=1)
    first, second = recorder.history
    assert first == {
        "step": 0,
        "sites": {name: dict.fromkeys(first["sites"][name], pytest.approx(0.2)) for name in ("1", "3")},
        "picks": {},  # nothing leads before training
        "loss": 1.5,
    }
    assert second["sites"]["1"] == selection(model)[0].probabilities
    assert second["picks"] == {"1": "tanh"}
    assert (second["loss"], second["accuracy"]) == (0.5, 1.0)


def test_the_file_has_a_header_and_one_line_a_record_and_loads_back(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "history.jsonl"
    model = network()
    recorder = Recorder(model, path)
    for step in (0, 5, 9):
        recorder.record(step, loss=float(step))
        lines = path.read_text().splitlines()  # written immediately, not at the end
        assert json.loads(lines[-1])["step"] == step
        nudge(model, 1.0)
    recorder.close()
    header = json.loads(path.read_text().splitlines()[0])
    assert header["flexact_history"] == 2
    assert header["config"]["policy"]["alpha"] == FlexConfig().policy.alpha
    assert header["versions"]["torch"] == torch.__version__
    assert Recorder.load(path) == recorder.history
    assert len(Recorder.load(path)) == 3


def test_an_existing_file_is_appended_to_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    model = recorded(path, 3)
    with Recorder(model, path, resume=True) as recorder:
        assert [entry["step"] for entry in recorder.history] == [0, 1, 2]
        recorder.record(3)
    assert [entry["step"] for entry in Recorder.load(path)] == [0, 1, 2, 3]


def test_a_truncated_last_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    model = recorded(path, 3)
    text = path.read_text()
    path.write_text(text[:-25])
    assert [entry["step"] for entry in Recorder.load(path)] == [0, 1]
    with Recorder(model, path, resume=True) as recorder:
        assert [entry["step"] for entry in recorder.history] == [0, 1]
        recorder.record(2)
    assert [entry["step"] for entry in Recorder.load(path)] == [0, 1, 2]


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}])
def test_an_empty_file_is_started(tmp_path: Path, options: dict[str, bool]) -> None:
    path = tmp_path / "history.jsonl"
    path.touch()
    with Recorder(convert(nn.Sequential(nn.Linear(2, 2), nn.ReLU())), path, **options) as recorder:
        recorder.record(0)
    assert [record["step"] for record in Recorder.load(path)] == [0]


@pytest.mark.parametrize("line", ["{not json", '["a", "list"]', '{"step": "two", "sites": {}}', '{"step": 2}', ""])
def test_a_corrupt_line_is_reported_and_the_file_is_unchanged(tmp_path: Path, line: str) -> None:
    path = tmp_path / "history.jsonl"
    model = recorded(path, 3)
    lines = path.read_text().splitlines()
    lines[2] = line
    path.write_text("\n".join(lines) + "\n")
    before = path.read_text()
    for read in (Recorder.load, lambda path: Recorder(model, path, resume=True)):
        with pytest.raises(FlexActError, match=r"history\.jsonl, line 3"):
            read(path)
    assert path.read_text() == before


def test_a_newer_version_and_a_foreign_file_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text('{"flexact_history": 3}\n')
    with pytest.raises(FlexActError, match="version 3"):
        Recorder.load(path)
    path.write_text('{"other": 1}\n')
    with pytest.raises(FlexActError, match="not a history"):
        Recorder(network(), path)
    assert path.read_text() == '{"other": 1}\n'


def test_a_missing_file_is_an_error_on_loading(tmp_path: Path) -> None:
    with pytest.raises(FlexActError, match="No such file"):
        Recorder.load(tmp_path / "nowhere.jsonl")


def test_rewinding_forgets_what_came_after_a_step_in_memory_and_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    model = recorded(path, 5)
    with Recorder(model, path, resume=True) as recorder:
        recorder.rewind(2)
        assert [entry["step"] for entry in recorder.history] == [0, 1, 2]
        assert [entry["step"] for entry in Recorder.load(path)] == [0, 1, 2]
        recorder.record(3, loss=9.0)
    assert Recorder.load(path)[-1]["loss"] == 9.0
    assert [file.name for file in tmp_path.iterdir()] == ["history.jsonl"]


def test_drops_and_decisions_are_recorded_once_with_their_evidence(tmp_path: Path) -> None:
    path, model = tmp_path / "history.jsonl", network()
    nudge(model, 1.0)
    with Recorder(model, path) as recorder:
        recorder.record(0)
        goes = torch.tensor([[False, True, False, True, True]])
        evidence = torch.full((1, 5, 3), math.nan)
        evidence[0, 1] = torch.tensor([0.5, 0.125, 40.0])
        evidence[0, 3] = torch.tensor([math.inf, 0.0, 40.0])
        model[1].drop(goes, 7, evidence)
        recorder.record(7)
        recorder.record(8)
        model[1].drop(torch.tensor([[True, False, False, False, False]]), 9, torch.tensor([0.25, 0.25, 30.0]))
        recorder.record(9)
    text = path.read_text()
    assert not {"NaN", "Infinity"} & set(text.replace(",", " ").replace("}", " ").split())
    first, second, third, fourth = Recorder.load(path)
    assert not {"drops", "decisions"} & {*first, *third}
    assert second["drops"] == {
        "1": {
            "sigmoid": {"step": 7, "margin": 0.5, "standard_error": 0.125, "steps": 40},
            "leaky_relu": {"step": 7, "margin": None, "standard_error": 0.0, "steps": 40},
            "identity": {"step": 7, "margin": None, "standard_error": None, "steps": None},
        }
    }
    assert "decisions" not in second
    assert fourth["drops"] == {"1": {"relu": {"step": 9, "margin": 0.25, "standard_error": 0.25, "steps": 30}}}
    assert fourth["decisions"] == {"1": {"original": "relu", "runner_up": "relu", "decided": False}}
    with Recorder(model, path, resume=True) as recorder:
        recorder.record(10)
        assert not {"drops", "decisions"} & set(recorder.history[-1])
        recorder.rewind(8)
        recorder.record(9)
    assert Recorder.load(path)[-1] == fourth


def test_a_site_that_picks_per_channel_has_the_means_and_is_decided_if_all_channels_are() -> None:
    config = FlexConfig(candidates=("relu", "tanh"), granularity="channel")
    model = convert(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), config=config, example_inputs=torch.ones(1, 2))
    recorder = Recorder(model)
    drops = torch.tensor([[False, True], [False, False]]), torch.tensor([[False, False], [True, False]])
    evidence = torch.tensor([[[math.nan] * 3, [0.5, 0.125, 40.0]], [[0.5, 0.5, 40.0], [math.nan] * 3]])
    for step, goes in enumerate(drops):
        model[1].drop(goes, step, evidence)
        recorder.record(step)
    first, second = recorder.history
    assert first["sites"] == {"1": {"relu": 0.75, "tanh": 0.25}}
    assert second["sites"] == {"1": {"relu": 0.5, "tanh": 0.5}}
    assert [set(one["drops"]) for one in recorder.history] == [{"1:0"}, {"1:1"}]
    assert "decisions" not in first
    assert second["decisions"] == {"1": {"original": "relu", "runner_up": None, "decided": False}}


def test_steps_come_once_and_in_order() -> None:
    recorder = Recorder(network())
    recorder.record(5)
    for step in (5, 4):
        with pytest.raises(FlexActError, match=r"recorder.rewind\(step\)"):
            recorder.record(step)
    recorder.rewind(3)
    recorder.record(4)


@pytest.mark.parametrize(
    "values", [{"loss": "low"}, {"loss": torch.ones(2)}, {"loss": None}, {"sites": 1.0}, {"picks": 1}, {"drops": 1.0}]
)
def test_a_value_that_is_no_number_is_an_error_and_records_nothing(tmp_path: Path, values: dict[str, object]) -> None:
    path = tmp_path / "history.jsonl"
    with Recorder(network(), path) as recorder:
        with pytest.raises(FlexActError):
            recorder.record(0, **values)
        assert recorder.history == []
    assert Recorder.load(path) == []


def test_a_loss_that_is_not_finite_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with Recorder(network(), path) as recorder:
        recorder.record(0, loss=math.nan)
        recorder.record(1, loss=math.inf)
    loaded = Recorder.load(path)
    assert math.isnan(loaded[0]["loss"])
    assert loaded[1]["loss"] == math.inf


def test_tensorboard_gets_a_scalar_a_candidate_and_the_users_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = network()
    with Recorder(model, tensorboard=tmp_path / "events") as recorder:
        for step in range(3):
            recorder.record(step, loss=3.0 - step)
            nudge(model, 1.0)
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert set(tags) == {"loss", *(f"flexact/{site}/{name}" for site in (1, 3) for name in FIVE)}
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 3.0), (1, 2.0), (2, 1.0)]
    written = [event.value for event in events.Scalars("flexact/1/tanh")]
    assert written == pytest.approx([entry["sites"]["1"]["tanh"] for entry in recorder.history])


def test_without_tensorboard_the_error_names_the_extra_and_no_file_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without_tensorboard(name: str, *args: object, **kwargs: object) -> object:
        if name.partition(".")[0] == "tensorboard" or name == "torch.utils.tensorboard":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_tensorboard)
    with pytest.raises(FlexActError, match=r"flexact\[tensorboard\]"):
        Recorder(network(), tmp_path / "history.jsonl", tensorboard=tmp_path / "events")
    assert list(tmp_path.iterdir()) == []


def test_a_closed_recorder_keeps_its_history(tmp_path: Path) -> None:
    recorder = Recorder(network(), tmp_path / "history.jsonl")
    recorder.record(0)
    recorder.close()
    recorder.close()
    assert len(recorder.history) == 1


@pytest.mark.parametrize(
    "content",
    [
        b'{"my": "data"}',
        b"hello",
        b"\x89PNG\r\n\xff",
        b'{"flexact_history": 3}',
        b'{"flexact_history": 12',
        b"\n",
        b"a,b\n1,2\n",
    ],
)
def test_a_foreign_file_is_refused_and_unchanged(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(FlexActError, match=r"not a history|version 3"):
        Recorder(network(), path)
    with pytest.raises(FlexActError):
        Recorder.load(path)
    assert path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FlexActError, match="Is a directory"):
        Recorder(network(), tmp_path)


def test_steps_may_be_numpy_or_torch_integers(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with Recorder(network(), path) as recorder:
        recorder.record(numpy.int64(1))
        recorder.record(torch.tensor(2))
    assert [entry["step"] for entry in Recorder.load(path)] == [1, 2]


@pytest.mark.parametrize("step", [1.0, "a", None, torch.tensor(1.0), numpy.float32(1)])
def test_an_invalid_step_is_an_error_and_records_nothing(tmp_path: Path, step: object) -> None:
    path = tmp_path / "history.jsonl"
    with Recorder(network(), path) as recorder:
        with pytest.raises(FlexActError, match="step must be a whole number"):
            recorder.record(step)
        assert recorder.history == []
    assert Recorder.load(path) == []


def test_a_second_run_into_the_same_file_is_an_error_when_the_recorder_is_built(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    model = recorded(path, steps=3)
    before = path.read_text()
    with pytest.raises(FlexActError, match=r"3 records already, up to step 2\. Give resume=True .* overwrite=True"):
        Recorder(model, path)
    with pytest.raises(FlexActError, match="give only one of resume=True and overwrite=True"):
        Recorder(model, path, resume=True, overwrite=True)
    assert path.read_text() == before


def test_overwriting_replaces_a_history_even_of_another_network_or_with_a_corrupt_line(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    recorded(path, steps=3)
    path.write_text(path.read_text() + "corrupt\n")
    other = convert(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), config=CONFIG)
    with Recorder(other, path, overwrite=True) as recorder:
        assert recorder.history == []
        recorder.record(0)
    assert [list(entry["sites"]) for entry in Recorder.load(path)] == [["1"]]


def test_overwriting_leaves_a_file_alone_that_is_no_history(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine\n")
    with pytest.raises(FlexActError, match="not a history"):
        Recorder(network(), path, overwrite=True)
    assert path.read_text() == "mine\n"


def test_the_history_of_another_network_is_an_error_when_the_recorder_is_built(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    recorded(path, steps=3)
    before = path.read_text()
    other = convert(nn.Sequential(*(nn.ReLU() for _ in range(7))), config=CONFIG)
    with pytest.raises(FlexActError, match=r"another network, with 2 sites \(1, 3\); this model has 7 \(0, 1, 2"):
        Recorder(other, path, resume=True)
    assert path.read_text() == before


def test_an_invalid_argument_is_an_error_when_the_recorder_is_built(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FlexActError, match="cannot write"):
        Recorder(network(), tmp_path / "file" / "history.jsonl")
    with pytest.raises(FlexActError, match="no FlexAct sites"):
        Recorder(nn.Linear(2, 2))


def test_the_loss_is_the_schedules_unless_it_is_given() -> None:
    model = network()
    schedule = Schedule(model, total_steps=50)
    recorder = Recorder(model)
    recorder.record(0)
    for step, loss in ((1, torch.tensor(0.5, requires_grad=True)), (2, 0.25)):
        schedule.step(loss)
        recorder.record(step, accuracy=0.9)
    recorder.record(3, loss=7.0)
    schedule.step()
    recorder.record(4)
    assert [entry.get("loss") for entry in recorder.history] == [None, 0.5, 0.25, 7.0, None]
    assert recorder.history[1]["accuracy"] == 0.9


def test_a_step_that_could_not_be_loaded_is_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "history.jsonl", network()
    with Recorder(model, path) as recorder, pytest.raises(FlexActError, match="optimizer steps"):
        recorder.record(10**400, loss=1.0)
    with Recorder(model, path, resume=True) as recorder:
        assert recorder.history == []
