"""Tests of what a Recorder writes for TensorBoard, read from the event file."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import flexact
from configs import flat

accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
NAMES = ("relu", "sigmoid", "tanh", "leaky_relu", "identity")


def network(**choices: Any) -> nn.Module:
    layers = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.Tanh())
    config = flat(candidates=NAMES, **choices)
    return flexact.convert(layers, "*", config=config, example_inputs=torch.randn(4, 2))


def favour(model: nn.Module, candidate: str, by: float = 4.0) -> None:
    with torch.no_grad():
        for site in (model[1], model[3]):
            site.logits.view(site.rows, site.k)[:, site.candidates.index(candidate)] += by


def read(folder: Path) -> Any:
    events = accumulator.EventAccumulator(str(folder), size_guidance={"images": 0, "histograms": 0})
    events.Reload()
    return events


def area(image: Any, colour: str) -> int:
    """Returns the number of pixels of an image that have a colour."""
    from PIL import Image

    pixels = numpy.asarray(Image.open(io.BytesIO(image.encoded_image_string)).convert("RGB"))
    return int((pixels == numpy.frombuffer(bytes.fromhex(colour[1:]), dtype=numpy.uint8)).all(-1).sum())


def test_a_site_has_a_curve_per_candidate_and_two_histograms(tmp_path: Path) -> None:
    model = network()
    with torch.no_grad():
        model[1].logits.copy_(torch.tensor([2.0, 1.0, 0.0, 0.0, 0.0]))
    with flexact.Recorder(model, tensorboard=tmp_path) as recorder:
        recorder.record(0, loss=1.5)
        model[1].drop(torch.tensor([[False, False, True, True, True]]), step=1)
        recorder.record(1, loss=1.0)
    events = read(tmp_path)
    assert set(events.Tags()["scalars"]) == {"loss", *(f"flexact/{site}/{name}" for site in (1, 3) for name in NAMES)}
    kinds = ("logits", "probabilities")
    assert set(events.Tags()["histograms"]) == {f"flexact_{kind}/{site}" for kind in kinds for site in (1, 3)}
    total = math.exp(2) + math.exp(1) + 3
    first, second = events.Scalars("flexact/1/relu")
    assert first.value == pytest.approx(math.exp(2) / total)
    assert second.value == pytest.approx(math.exp(2) / (math.exp(2) + math.exp(1)))
    before, after = (event.histogram_value for event in events.Histograms("flexact_logits/1"))
    assert (before.min, before.max, before.num, before.sum) == (0.0, 2.0, 5, 3.0)
    assert (after.min, after.max, after.num, after.sum) == (1.0, 2.0, 2, 3.0)  # dropped candidates have no point
    before, after = (event.histogram_value for event in events.Histograms("flexact_probabilities/1"))
    assert before.sum == pytest.approx(1)
    assert before.max == pytest.approx(math.exp(2) / total)
    assert after.min == 0


def test_the_heat_maps_show_the_leader_of_each_step(tmp_path: Path) -> None:
    from flexact.observe.figures.colours import candidate_colours

    model = network()
    favour(model, "relu")
    with flexact.Recorder(model, tensorboard=tmp_path) as recorder:
        for step in range(40):
            if step == 20:
                favour(model, "tanh", by=8.0)
            recorder.record(10 * step)
    events = read(tmp_path)
    assert set(events.Tags()["images"]) == {"flexact_heat_maps/picks", "flexact_heat_maps/probabilities"}
    images = events.Images("flexact_heat_maps/picks")
    assert [image.step for image in images] == [390]
    colour = candidate_colours(["relu", "tanh"])
    relu, tanh = (area(images[-1], colour[name]) for name in ("relu", "tanh"))
    assert tanh == pytest.approx(relu, rel=0.1)  # half of the steps each
    shown = events.Images("flexact_heat_maps/probabilities")[-1]
    assert shown.width > images[-1].width  # a map per candidate


def test_channels_are_averaged_in_curves_and_all_in_histograms(tmp_path: Path) -> None:
    model = network(granularity="channel")
    with torch.no_grad():
        model[1].logits.view(3, 5)[0, 2] = 50.0  # one of three channels is sure of tanh, the others are undecided
    with flexact.Recorder(model, tensorboard=tmp_path) as recorder:
        recorder.record(0)
    events = read(tmp_path)
    assert len(events.Tags()["scalars"]) == 10
    assert events.Scalars("flexact/1/tanh")[0].value == pytest.approx((1 + 0.2 + 0.2) / 3)
    assert events.Histograms("flexact_probabilities/1")[0].histogram_value.num == 15


def test_a_users_own_writer_stays_open(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    recorder = flexact.Recorder(network(), tensorboard=writer)
    recorder.record(3, loss=0.5)
    recorder.close()
    writer.add_scalar("mine", 7.0, 4)
    writer.close()
    events = read(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("mine")] == [(4, 7.0)]
    assert events.Scalars("flexact/3/relu")[0].step == 3
    assert [image.step for image in events.Images("flexact_heat_maps/picks")] == [3]


def test_a_run_that_diverged_is_still_recorded(tmp_path: Path) -> None:
    model = network()
    with torch.no_grad():
        model[1].logits.fill_(math.nan)
    with flexact.Recorder(model, tensorboard=tmp_path) as recorder:
        recorder.record(0, loss=math.nan)
    events = read(tmp_path)
    assert math.isnan(events.Scalars("flexact/1/relu")[0].value)
    assert set(events.Tags()["histograms"]) == {"flexact_logits/3", "flexact_probabilities/3"}


def test_without_matplotlib_curves_are_written_and_a_warning_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    recorder = flexact.Recorder(network(), tensorboard=tmp_path)
    recorder.record(0)
    with pytest.warns(UserWarning, match=r"flexact\[plots\]"):
        recorder.close()
    events = read(tmp_path)
    assert len(events.Tags()["scalars"]) == 10
    assert events.Tags()["images"] == []


def test_an_invalid_folder() -> None:
    with pytest.raises(flexact.FlexActError, match=r"got 3 .*pathlib\.Path"):
        flexact.Recorder(network(), tensorboard=3)
