"""Tests of truncated files: each is refused with its name or read up to its last complete record, never half-loaded.

Files are truncated at every 1,000th byte, and short files at every byte. A history, to which lines are appended, is
read up to its last complete line, since a kill may truncate the next one.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import flexact
from flexact import FlexActError, Recorder
from flexact.io.result_folder import read_config, write_config
from flexact.studies.cifar.protocol import Cell, Protocol, Result
from flexact.studies.cifar.study import Store
from flexact.studies.cifar.train import Stopped, train_cell
from flexact.studies.cifar.training import Training
from flexact.studies.cifar_data import data
from flexact.studies.cifar_resnets import BLOCKS
from flexact.studies.synthetic.options import Options
from flexact.studies.synthetic.store import Part, Point, read_parts, write_parts
from flexact.studies.synthetic.store import Result as StudyResult
from flexact.surgery.picks_file import described, write_picks

PROTOCOL = Protocol(epochs=3, batch=8, lr=0.02, width=8)
CELL = Cell("cifar10", "resnet18", "flexact-all", 0)


def cuts(content: bytes) -> range:
    """Returns the truncation points of a file: every 1,000th byte, or every byte of a short file."""
    return range(0, len(content), 1000 if len(content) > 5000 else 1)


def refuses_every_cut(path: Path, read: Callable[[], Any], may_be_whole: int = 0, most: int = 10_000) -> None:
    """Truncates a file at every point and reads it. Reading must raise an error that names the file.

    may_be_whole: number of bytes at the end that may be missing without loss, such as a newline. most: maximum number
    of truncation points, where reading is slow.
    """
    content = path.read_bytes()
    read()
    tried = 0
    places = cuts(content)
    for length in places[:: -(-len(places) // most)]:
        if length >= len(content) - may_be_whole:
            continue
        path.write_bytes(content[:length])
        with pytest.raises(FlexActError, match=re.escape(path.name)):
            read()
        tried += 1
    path.write_bytes(content)
    read()
    assert tried > 3


# The image study


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> data.Images:
    layout = _file("studies/cifar_data/official_layout.py")
    return data.load(
        "cifar10",
        layout.write_cifar(tmp_path_factory.mktemp("data"), "cifar10", train=40, test=10).parent,
        partial=True,
    )


def _file(name: str) -> ModuleType:
    path = Path(__file__).parents[1] / name
    spec = importlib.util.spec_from_file_location(f"faults_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cell(images: data.Images, tmp_path: Path) -> Iterator[Callable[[int], Any]]:
    """Trains a cell in tmp_path up to a number of steps."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)

    def train(steps: int) -> Any:
        left = [steps]

        def stop() -> bool:
            left[0] -= 1
            return left[0] < 0

        with mock.patch.dict(BLOCKS, {"resnet18": (1, 1)}):
            return train_cell(CELL, PROTOCOL, images, tmp_path, torch.device("cpu"), stop=stop)

    yield train
    torch.set_num_threads(before)


def test_a_truncated_checkpoint_is_refused(
    cell: Callable[[int], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Stopped):
        cell(7)
    whole = Training.load_state_dict

    def loaded(training: Training, state: Any) -> None:
        whole(training, state)
        raise KeyboardInterrupt

    monkeypatch.setattr(Training, "load_state_dict", loaded)

    def read() -> None:
        with suppress(KeyboardInterrupt):
            cell(1000)

    refuses_every_cut(tmp_path / "checkpoint.pt", read, most=10)  # each read sets up a whole run


def test_truncated_histories_of_a_run_are_refused_or_hold_complete_records(tmp_path: Path) -> None:
    model = flexact.convert(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Tanh()), "*")
    path = tmp_path / "history.jsonl"
    with Recorder(model, path) as recorder:
        for step in range(40):
            recorder.record(step, loss=step / 7)
    whole, content = Recorder.load(path), path.read_bytes()
    for length in sorted({*range(0, len(content), 1000), *range(400), len(content) - 1}):
        path.write_bytes(content[:length])
        lines = content[:length].count(b"\n")
        if lines == 0:
            with pytest.raises(FlexActError, match=r"history\.jsonl"):
                Recorder.load(path)
        else:
            assert Recorder.load(path) == whole[: lines - 1]
        if lines == 0 and length > 0:  # the header is written atomically
            with pytest.raises(FlexActError, match=r"history\.jsonl"):
                Recorder(model, path, resume=True)
            continue
        again = Recorder(model, path, resume=True)  # resuming: a truncated last line was never a record
        again.close()
        assert again.history == whole[: max(lines - 1, 0)]  # an empty file is a new history


def test_truncated_results_of_a_grid_are_refused_or_hold_complete_lines(tmp_path: Path) -> None:
    store = Store(tmp_path)
    grid = {"datasets": ["cifar10"], "models": ["resnet18"], "methods": ["relu"], "seeds": 30, "first_seed": 0}
    config = {"flexact_study": 1, "study": "cifar", "grids": [grid], "protocol": Protocol().to_dict()}
    with store.held():
        store.open(config, resume=False, overwrite=False)
        for seed in range(30):
            figures = (77.5, 0.1, 200, 1000.0, 3.0, "layer1.0.relu=relu layer2.0.relu=tanh", "")
            store.add(Result("cifar10", "resnet18", "relu", seed, "done", *figures, "cpu", "2.13", "abc", "today"))
    path, whole = tmp_path / "results.csv", list(store.results().values())
    content = path.read_bytes()
    for length in [*range(0, len(content), 100), content.index(b"\n", 1000) + 1, len(content) - 1]:
        path.write_bytes(content[:length])
        if content[:length].endswith(b"\n"):
            assert list(store.results().values()) == whole[: content[:length].count(b"\n") - 1]
        else:
            with pytest.raises(FlexActError, match=r"results\.csv.* is cut off or missing"):
                store.results()
    path.write_bytes(content)
    refuses_every_cut(tmp_path / "config.json", store.config, may_be_whole=1)


# The synthetic studies


def test_a_truncated_study_folder_is_refused(tmp_path: Path) -> None:
    options = Options(candidates=("relu", "tanh"), seeds=30, truths=("relu",), epochs=3, models=("relu",))
    config = {"flexact_study": 1, "study": "synthetic", "options": options.to_dict()}
    write_config(tmp_path, config)
    results = [StudyResult("synthetic", "relu", "relu", seed, "relu", 1.0, 0.25, 0.5, 3) for seed in range(30)]
    points = [Point("relu", "relu", "target", x / 40, 0.5) for x in range(40)]
    write_parts(tmp_path, {"relu": Part(results, points)}, options.models)

    def read() -> None:
        read_config(tmp_path)
        read_parts(tmp_path, options)

    for name in ("results.csv", "lines.csv"):
        path = tmp_path / name
        content = path.read_bytes()
        for length in range(len(content)):
            path.write_bytes(content[:length])
            if content[:length].endswith(b"\n"):
                read()  # complete lines; a model without all of its lines in results.csv is not done, and runs again
            else:
                with pytest.raises(FlexActError, match=re.escape(name)):
                    read()
        path.write_bytes(content)
    whole = read_config(tmp_path)
    path = tmp_path / "config.json"
    content = path.read_bytes()
    for length in range(content.index(b","), len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(FlexActError, match=r"config\.json"):
            read_config(tmp_path)
    path.write_bytes(content)
    assert read_config(tmp_path) == whole


# Files of a transformers network


def test_a_truncated_picks_file_is_refused_and_the_network_is_unchanged(tmp_path: Path) -> None:
    write_picks(tmp_path, described({"1": "tanh", "3": "gelu"}, {}))
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU())
    before = repr(model)

    def read() -> None:
        try:
            flexact.load_picks(model, tmp_path)
        except FlexActError:
            assert repr(model) == before
            raise
        model[1], model[3] = nn.ReLU(), nn.ReLU()

    refuses_every_cut(tmp_path / "flexact.json", read, may_be_whole=1)


def test_a_truncated_callback_state_is_refused_and_the_schedule_is_unchanged(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from flexact.integrations.transformers_schedule import SCHEDULE, load_schedule

    model = flexact.convert(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Tanh()), "*")
    schedule = flexact.Schedule(model, total_steps=10)
    schedule.step()
    state = schedule.state_dict()
    torch.save(state | {"step": 3}, tmp_path / SCHEDULE)

    def read() -> None:
        schedule.load_state_dict(schedule.state_dict() | {"step": 1})
        try:
            load_schedule(tmp_path, schedule)
        except FlexActError:
            assert schedule.steps_done == 1
            raise
        assert schedule.steps_done == 3

    refuses_every_cut(tmp_path / SCHEDULE, read)
    for wrong in ([[1.0]], torch.zeros(3), {"a": 1}, None):
        torch.save(state | {"mean": wrong}, tmp_path / SCHEDULE)
        with pytest.raises(FlexActError, match=SCHEDULE):
            read()


def test_a_truncated_config_is_refused() -> None:
    text = flexact.FlexConfig(policy=flexact.Policy(noise=1.0)).to_json()
    for length in range(len(text)):
        with pytest.raises(FlexActError):
            flexact.FlexConfig.from_json(text[:length])
