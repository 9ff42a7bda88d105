"""The meta device, torch.device contexts, model.half() and .to()."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flexact
from flexact import FlexConfig
from flexact.routing.sites import sites_of
from matrix.models import STEADY, Column, gradients_of, optimizer_of, scatter_logits


def stepped(model: nn.Module, column: Column, dtype: torch.dtype = torch.float32) -> None:
    """Makes one training step."""
    optimizer = optimizer_of(model)
    schedule = flexact.Schedule(model, 10, optimizer)
    inputs, wanted = column.batch()
    inputs = tuple(one.to(dtype) if one.is_floating_point() else one for one in inputs)
    (column.loss(model, (inputs, wanted)) + flexact.penalty(model)).backward()
    optimizer.step()
    schedule.step()


def test_a_model_on_the_meta_device_is_materialized_and_trained(column: Column) -> None:
    with torch.device("meta"):
        model = column.build(FlexConfig())
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    inputs, _ = column.batch()
    assert column.answer(model, (inputs[0].to("meta"),)).is_meta  # without BERT's mask, which transformers reads
    source = scatter_logits(column.build(FlexConfig()))
    model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    for name, buffer in source.named_buffers():
        model.get_buffer(name).copy_(buffer)  # including the buffers that no state_dict contains
    model.eval(), source.eval()
    with torch.no_grad():
        assert torch.equal(column.answer(model, inputs), column.answer(source, inputs))
    stepped(model.train(), column)
    stepped(source.train(), column)
    for name, tensor in source.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, equal_nan=name.endswith("evidence"))


def test_state_is_assigned_to_a_model_on_the_meta_device(column: Column) -> None:
    """A committed state is loaded with load_state_dict(assign=True)."""
    source = flexact.commit(scatter_logits(column.build(STEADY)))
    with torch.device("meta"):
        model = column.build(STEADY)
    model.load_state_dict(source.state_dict(), assign=True)
    assert [site.picks for site in sites_of(model)] == [site.picks for site in sites_of(source)]
    assert all(site.committed for site in sites_of(model))


def test_sites_are_created_on_the_device_of_the_context(column: Column) -> None:
    with torch.device("cpu"):
        model = column.build(FlexConfig.paper())
        stepped(model, column)
    with torch.device("meta"):  # a context around the training step must not move what the router creates
        stepped(model, Fixed(column))
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}


class Fixed(Column):
    """A column whose batches are created on the CPU under any context."""

    def __init__(self, column: Column) -> None:
        super().__init__(column.name, column.plain, column.batches)
        with torch.device("cpu"):
            made = column.batch()
        object.__setattr__(self, "made", made)

    def batch(self, *_: object) -> object:
        return self.made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_precisions_keep_the_logits_in_float32(column: Column, dtype: torch.dtype) -> None:
    model = column.build(FlexConfig())
    if dtype == torch.float16:
        model.half()
    else:
        model.to(dtype)
    with torch.backends.mkldnn.flags(enabled=False):
        stepped(model, column, dtype)
    sites = sites_of(model)
    for site in sites:
        assert {site.logits.dtype, site.temperature.dtype, site.router.p.dtype} == {torch.float32}
        assert site.router.sensitivity().dtype == torch.float32
    others = [p for name, p in model.named_parameters() if "logits" not in name]
    assert all(one.dtype == dtype for one in others)
    assert all(one.isfinite().all() for one in model.parameters())
    plain = flexact.extract(model, commit=True)
    assert all(one.dtype == dtype for one in plain.parameters())


def test_a_round_trip_with_to_changes_nothing(column: Column) -> None:
    """The routing is bit-identical after a round trip to another precision."""
    model = scatter_logits(column.build(STEADY))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.to(torch.float64).to("cpu", torch.float32)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0, equal_nan=True)
    column.loss(model, column.batch()).backward()
    assert all(gradient.isfinite().all() for gradient in gradients_of(model).values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_model_trains_on_a_gpu_and_comes_back(column: Column) -> None:
    model, duplicate = (scatter_logits(column.build(STEADY)) for _ in range(2))
    inputs, wanted = column.batch()
    losses = []
    for device, one in (("cuda", model.to("cuda")), ("cpu", duplicate)):
        loss = column.loss(one, (tuple(x.to(device) for x in inputs), wanted.to(device))) + flexact.penalty(one)
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    stepped(model.to("cpu"), column)
