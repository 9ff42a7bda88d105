"""A drop runs no kernel on the model's device that earlier steps have not run: a GPU loads each of torch's kernels at
its first launch, so the drop would wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import flexact
from flexact import FlexConfig, Schedule
from flexact.routing.sites import sites_of

CONFIGS = {
    "layer": FlexConfig(pick_by="blend", eliminate="half"),
    "channel": FlexConfig(pick_by="blend", granularity="channel", rewind=False),
    "optimizer": FlexConfig.paper(eliminate="one"),
}
STEPS = 40
pytestmark = pytest.mark.filterwarnings("ignore:.*steps are few for a pick", "ignore:.*penalty")


def copied(tensor: Tensor) -> Tensor:
    """Stands in for `Tensor.cpu`, unseen by the mode."""
    with _disable_current_modes():
        return tensor.detach().clone()


class OnDevice(TorchDispatchMode):
    """Records the operations on some tensors, and on all that are computed from them until they are copied by `cpu`."""

    def __init__(self, tensors: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: set[str] = set()
        self._kept = list(tensors)  # so that no other tensor gets their memory
        self._storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        monkeypatch.setattr(Tensor, "cpu", copied)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operation(*args, **(kwargs or {}))
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if any(one.untyped_storage()._cdata in self._storages for one in given):
            made = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
            self._kept += made
            self._storages |= {one.untyped_storage()._cdata for one in made}
            if not operation.is_view:
                self.names.add(str(operation))
        return out


def run(config: FlexConfig, device: str, during: Callable[[Schedule, Callable[[], None]], None]) -> None:
    """Trains until the commitment. during: called with each `schedule.step`, to run it."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    x = torch.randn(2, 2, 8, 8, device=device)
    model = flexact.convert(nn.Sequential(*layers).to(device), config=config, example_inputs=x)
    optimizer = torch.optim.SGD(flexact.param_groups(model), lr=0.01)
    schedule = Schedule(model, STEPS, optimizer)
    while not schedule.committed:
        (model(x).square().mean() + flexact.penalty(model)).backward()
        optimizer.step()
        optimizer.zero_grad()
        during(schedule, schedule.step)


def drops_next(schedule: Schedule) -> bool:
    return schedule.steps_done + 1 in schedule._elimination.steps


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_drop_only_copies_and_fills_tensors_of_the_device(
    config: FlexConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: set[str] = set()

    def during(schedule: Schedule, step: Callable[[], None]) -> None:
        if not drops_next(schedule):
            step()
            return
        sites, statistics = sites_of(schedule._start._model), schedule._elimination.statistics
        own = [tensor for site in sites for tensor in (*site.parameters(False), *site.buffers(False))]
        with monkeypatch.context() as patch:
            patched = OnDevice([*own, *statistics.tensors, schedule.router.alive(), schedule.router.noise], patch)
            with patched:
                step()
        found.update(patched.names)

    run(config, "cpu", during)
    drawn = {
        "aten.cat.default",
        "aten.lt.Scalar",
        "aten.index.Tensor",
        "aten._to_copy.default",
    }  # the mask of the alive
    copies = {"aten.copy_.default", "aten._foreach_copy_.default", "aten._local_scalar_dense.default"}
    assert found & copies
    assert found <= drawn | copies | {"aten.zero_.default", "aten.fill_.Scalar", "aten.detach.default"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_drop_launches_no_kernel_of_torch_for_the_first_time() -> None:
    before: set[str] = set()
    new: set[str] = set()

    def during(schedule: Schedule, step: Callable[[], None]) -> None:
        drops = drops_next(schedule) and schedule.steps_done + 1 != schedule.commit_step
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            step()
            torch.cuda.synchronize()
        names = {event.key for event in profiled.key_averages() if not event.key.startswith(("Mem", "cuda"))}
        (new if drops else before).update(names)

    run(CONFIGS["layer"], "cuda", during)
    assert len(new - before) <= 6, new - before  # for the mask of the alive, and for clearing the statistics
