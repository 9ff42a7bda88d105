"""Tests of examples/accelerate_loop.py: a run with Accelerator equals the run without it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import flexact
import forked
from flexact.routing.sites import sites_of

pytest.importorskip("accelerate")
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "accelerate_loop.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("accelerate_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.EPOCHS = 10
    return module


@pytest.fixture(autouse=True)
def _fresh_state() -> None:
    """Resets the shared state that an earlier Accelerator of this process (such as a Trainer's) has left."""
    state = importlib.import_module("accelerate.state")
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


@pytest.fixture
def data() -> TensorDataset:
    """160 rows: five batches per epoch, so that the last step of an epoch has a single micro-batch."""
    x = torch.rand(160, 64, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (10 * x[:, 0]).long())


def test_a_resumed_run_ends_as_an_uninterrupted_one(example: ModuleType, data: Any, tmp_path: Path) -> None:
    whole = example.Run(data)
    whole.train(range(10))
    for cut in (2, 9):  # before and after the commitment
        first = example.Run(data)
        first.train(range(cut))
        first.accelerator.save_state(str(tmp_path / str(cut)))
        second = example.Run(data)
        second.accelerator.load_state(str(tmp_path / str(cut)))
        assert second.schedule.steps_done == 3 * cut
        assert second.schedule.committed == (cut == 9)
        second.train(range(cut, 10))
        assert second.schedule.committed
        ours, theirs = (dict(run.network.state_dict()) for run in (second, whole))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_the_run_equals_a_loop_without_accelerate(example: ModuleType, data: Any) -> None:
    run = example.Run(data)
    batches: list[Any] = []
    run.model.register_forward_pre_hook(lambda module, inputs: batches.append(inputs[0]))
    run.train(range(10))
    assert run.schedule.steps_done == run.schedule.total_steps == 30

    labels = {tuple(x.tolist()): y for x, y in data}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model = flexact.convert(model).train()
    optimizer = torch.optim.AdamW(flexact.param_groups(model, weight_decay=0.01), lr=3e-3)
    schedule = flexact.Schedule(model, total_steps=30)
    for number, x in enumerate(batches):
        y = torch.stack([labels[tuple(row.tolist())] for row in x])
        loss = nn.functional.cross_entropy(model(x), y)
        (loss / 2).backward()
        if number % 5 in (1, 3, 4):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(loss)
    ours, theirs = dict(run.network.state_dict()), dict(model.state_dict())
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert sites_of(flexact.extract(run.network)) == []


def test_the_schedule_accepts_the_prepared_optimizer() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    torch.manual_seed(0)
    network = flexact.convert(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    model, optimizer = accelerator.prepare(network, torch.optim.SGD(flexact.param_groups(network), lr=0.1))
    schedule = flexact.Schedule(network, total_steps=10, optimizer=optimizer)
    start = network[1].logits.clone()
    for micro_batch in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(16, 4)).square().mean())
            optimizer.step()
        assert torch.equal(network[1].logits, start) == (micro_batch == 0)
    schedule.step()


@pytest.mark.slow
def test_two_ranks_stop_resume_and_print_one_table(tmp_path: Path) -> None:
    started = forked.ranks(2, EXAMPLE, settings={"ACCELERATE_USE_CPU": "true"}, folder=tmp_path)
    printed = "".join(forked.outputs(*started, timeout=400))
    assert printed.count("dropped (at step)") == 1
    accuracy = float(printed.rpartition("digits: ")[2].partition(" ")[0])
    assert accuracy > 85
