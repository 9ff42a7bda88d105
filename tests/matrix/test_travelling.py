"""Copies and files of a model keep the temperature, the alive masks and the commitment."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import flexact
from flexact import FlexConfig, Policy
from flexact.routing.sites import sites_of
from matrix.models import STEADY, Column, optimizer_of, scatter_logits

safetensors = pytest.importorskip("safetensors.torch")

CONFIG = FlexConfig(policy=Policy(final_temperature=0.2))


@functools.cache
def trained(column: Column, steps: int, total: int = 20) -> nn.Module:
    """A model in the middle of its run, with some candidates dropped, or at its end. Tests must not change it."""
    model = scatter_logits(column.build(CONFIG))
    optimizer = optimizer_of(model)
    schedule = flexact.Schedule(model, total, optimizer)
    for step in range(steps):
        loss = column.loss(model, column.batch(step)) + flexact.penalty(model)
        if loss.requires_grad:  # a committed FlexAct by itself has nothing to train
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


def by_torch_save(model: nn.Module, folder: Path, fresh: Callable[[], nn.Module]) -> nn.Module:
    torch.save(model.state_dict(), folder / "state.pt")
    other = fresh()
    other.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
    return other


def by_safetensors(model: nn.Module, folder: Path, fresh: Callable[[], nn.Module]) -> nn.Module:
    safetensors.save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder / "state.safetensors")
    other = fresh()
    other.load_state_dict(safetensors.load_file(folder / "state.safetensors"))
    return other


def by_average(model: nn.Module, folder: Path, fresh: Callable[[], nn.Module]) -> nn.Module:
    """An averaged model that has seen the start of the run, and then this model until it is close to it."""
    average = AveragedModel(fresh(), multi_avg_fn=get_ema_multi_avg_fn(0.1))
    average.train(model.training)
    for _ in range(12):
        average.update_parameters(model)
    return average.module


WAYS: dict[str, Callable[..., nn.Module]] = {
    "deepcopy": lambda model, *_: copy.deepcopy(model),
    "pickle": lambda model, *_: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model, *_: torch.load(_saved(model), weights_only=False),
    "state_dict": by_torch_save,
    "safetensors": by_safetensors,
    "EMA": by_average,
}


def _saved(model: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("steps", [9, 20], ids=["half-way", "committed"])
@pytest.mark.parametrize("way", WAYS)
def test_copies_keep_temperature_masks_and_commitment(column: Column, way: str, steps: int, tmp_path: Path) -> None:
    model = trained(column, steps).eval()
    other = WAYS[way](model, tmp_path, lambda: column.build(CONFIG).eval()).eval()
    inputs, _ = column.batch(50)
    with torch.no_grad():
        torch.testing.assert_close(column.answer(other, inputs), column.answer(model, inputs), rtol=1e-5, atol=1e-6)
    committed = steps == 20
    for ours, theirs in zip(sites_of(other), sites_of(model), strict=True):
        assert float(ours.temperature) == float(theirs.temperature) < 1
        assert torch.equal(ours.dropped_at, theirs.dropped_at)
        assert ours.alive == theirs.alive
        assert (ours.committed, ours.picks) == (theirs.committed, theirs.picks)
        assert ours.committed == committed
        assert 1 <= len(ours.alive) < 5
    if committed:
        plain = flexact.extract(other)
        with torch.no_grad():
            assert torch.equal(column.answer(plain, inputs), column.answer(other, inputs))


def test_an_averaged_model_follows_the_run_to_the_commitment(column: Column) -> None:
    model = column.build(CONFIG)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = optimizer_of(model)
    schedule = flexact.Schedule(model, 12, optimizer)
    inputs, _ = column.batch(50)
    for step in range(12):
        loss = column.loss(model, column.batch(step)) + flexact.penalty(model)
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        average.update_parameters(model)
        with torch.no_grad():
            assert column.answer(average.eval(), inputs).isfinite().all()
        assert [site.alive for site in sites_of(average)] == [site.alive for site in sites_of(model)]
    plain = flexact.extract(average.module)
    with torch.no_grad():
        assert torch.equal(column.answer(plain.eval(), inputs), column.answer(average, inputs))


def test_averaged_buffers_are_refused(column: Column) -> None:
    """An averaged mask is no mask, but torch has an option for it."""
    average = AveragedModel(column.build(STEADY), multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    model = trained(column, 9)
    for _ in range(2):
        average.update_parameters(model)
    with pytest.raises(flexact.FlexActError, match="use_buffers=False"):
        column.answer(average, column.batch()[0])
    with pytest.raises(flexact.FlexActError, match="use_buffers=False"):
        flexact.extract(average.module, commit=True)
