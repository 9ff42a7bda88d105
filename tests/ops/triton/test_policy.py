"""Tests of the policy's Triton kernels: their launches, where they run, and that Triton's compiler accepts them."""

from __future__ import annotations

import functools
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import interpreted_extension
from flexact import Policy
from flexact.ops import dispatch, policy_kernels, policy_tables
from flexact.ops.triton import extension
from flexact.ops.triton import policy as triton_policy
from flexact.ops.triton.launch import CannotBuild, Launches
from flexact.policy import logit_updates as policy
from kernels import using
from policy_sites import POLICIES, SITES, Sites, assert_alike, one_step, plain_torch

count = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "launches.py"))["count"]
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("triton_kernels")


# When the kernels run


def test_kernels_are_used_for_float32_logits_with_up_to_16_candidates_outside_of_tracing() -> None:
    logits = nn.Parameter(torch.zeros(5))
    assert policy_kernels.chosen(logits, 16) is triton_policy
    assert policy_kernels.chosen(logits, 17) is None
    assert policy_kernels.chosen(logits.double(), 5) is None
    with torch._subclasses.FakeTensorMode():
        assert policy_kernels.chosen(nn.Parameter(torch.zeros(5)), 5) is None


def test_under_the_compiler_plain_torch_is_used(device: torch.device) -> None:
    sites, launched = Sites(device, noise=1.0), mock.Mock()
    sites.draw(0)
    expected = sites.router.p

    @torch.compile(fullgraph=True, backend="eager")
    def drawn() -> Tensor:
        sites.router.refresh(training=True)
        return sites.router.p

    with mock.patch.object(Launches, "__call__", launched):
        assert_alike([drawn()], [expected])
    launched.assert_not_called()


@pytest.mark.parametrize("what", ["draw", "update"])
def test_plain_torch_is_the_fallback_where_a_kernel_cannot_be_built(what: str, device: torch.device) -> None:
    ours, theirs = Sites(device), Sites(device)
    with plain_torch():
        one_step(theirs, 1)
    broken = mock.patch.object(triton_policy, what, side_effect=CannotBuild("no such instruction"))
    with using("triton"), broken:
        with pytest.warns(UserWarning, match="failed to build .*no such instruction"):
            one_step(ours, 1)
        assert dispatch.active(device).name == "closed_form"
    assert_alike(ours.state(), theirs.state())


# In the extension


@pytest.mark.parametrize("sizes", [SITES, ((5, 1),)], ids=["several sites", "one site"])
def test_the_extension_moves_the_logits_as_python_does_to_the_bit(
    sizes: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = Sites(CPU, sizes=sizes), Sites(CPU, sizes=sizes)
    every = range(len(sizes))
    interpreted_extension.use(monkeypatch)
    for step in range(1, 4):
        for sites, enabled in ((ours, True), (theirs, False)):
            with monkeypatch.context() as patch:
                if enabled:
                    patch.setattr(triton_policy, "update", mock.Mock(side_effect=AssertionError("not in one call")))
                else:
                    patch.setattr(extension, "ready", lambda: None)
                sites.draw(step)
                sites.call(*every)
                sites.differentiate(*every)
                sites.act()
        assert all(one.logits.grad is None for one in ours.sites)
        assert all(torch.equal(own, other) for own, other in zip(ours.state(), theirs.state(), strict=True))
        assert [one.logits._version for one in ours.sites] == [one.logits._version for one in theirs.sites]


@pytest.mark.parametrize("without", ["no gradient", "double", "sparse"])
def test_the_extension_leaves_other_gradients_to_python(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = Sites(CPU)
    interpreted_extension.use(monkeypatch)
    sites.draw(1)
    sites.call(*range(len(SITES)))
    sites.differentiate(*range(len(SITES)))
    sites.act()  # the kernel is launched once, so that the extension could launch it now
    sites.differentiate(*range(len(SITES)))
    last = sites.sites[-1].logits
    other = {"no gradient": None, "double": torch.ones_like(last).double(), "sparse": torch.ones_like(last).to_sparse()}
    logits = [nn.Parameter(one.logits.detach().clone()) for one in sites.sites]
    for own, one in zip(logits, sites.sites, strict=True):
        own.grad = one.logits.grad
    if without == "double":
        logits[-1] = nn.Parameter(logits[-1].detach().double())
    logits[-1].grad = other[without]
    before = [own.detach().clone() for own in logits]
    update = policy._FusedUpdate(triton_policy, sites.router, sites.statistics, torch.tensor(0.05), None)
    assert not triton_policy.move(logits, update._called, *update._arguments)
    assert all(torch.equal(own, old) for own, old in zip(logits, before, strict=True))
    assert all(own.grad is not None for own in logits[:-1])


# Launches


def launched(device: torch.device, run: Callable[[], object]) -> int:
    """Counts kernels on a GPU; without one, torch's operators and the kernels that would be launched between them."""
    if device.type == "cuda":
        return count(run, device)
    counts_only = mock.patch.object(policy_kernels, "is_traced", return_value=False)  # the counting mode is no tracer
    with mock.patch.object(Launches, "__call__") as launch, counts_only:
        return count(run, device) + launch.call_count


@pytest.mark.parametrize("changes", [one for one in POLICIES if policy_tables.has_kernel(Policy(**one))], ids=str)
def test_a_draw_takes_two_launches_and_the_policy_three(changes: dict[str, Any], device: torch.device) -> None:
    sites, every = Sites(device, **changes), range(len(SITES))
    draw = functools.partial(sites.router.refresh, True)
    step_size = torch.tensor(0.1, device=device)  # before the counting: on a GPU it is a copy
    act = functools.partial(sites.act, step_size)
    for _ in range(2):  # the first call allocates the statistics and builds the kernels
        drawing = launched(device, draw)
        sites.call(*every, 0)
        sites.differentiate(*every)
        acting = launched(device, act)
    assert (drawing, acting) == (2, 3)


def test_the_kernel_of_the_logit_step_serves_the_default_policy_and_not_the_ablations() -> None:
    supported = [Policy(), Policy(correction="none"), Policy(correction="output_norm"), Policy(kl_on="p", noise=1.0)]
    others = [Policy(logit_step="optimizer"), Policy(correction="clipped_norm_kl"), Policy(lam="temperature")]
    assert [policy_tables.has_kernel(one) for one in supported + others] == [True] * 4 + [False] * 3


@pytest.mark.parametrize("share", ["model", "site"])
def test_the_launches_of_the_policy_do_not_depend_on_depth(share: str, device: torch.device) -> None:
    counted = set()
    for depth in (2, 40):
        sites = Sites(device, sizes=((5, 1),) * depth, share=share)
        for _ in range(2):  # the first call allocates the statistics and builds the kernels
            sites.router.refresh(True)
            sites.call(*range(depth))
            sites.differentiate(*range(depth))
            acting = launched(device, sites.act)
        counted.add(acting)
    assert len(counted) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("lam", [0.3, "temperature"])  # the latter has no kernel: its logit step is plain torch
def test_a_cuda_graph_of_both_reads_what_the_schedule_writes(lam: Any) -> None:
    device = torch.device("cuda")
    eager, captured = Sites(device, noise=1.0, lam=lam), Sites(device, noise=1.0, lam=lam)
    step_size = torch.tensor(0.1, device=device)
    statistics = [torch.rand(one.rows, one.k, device=device) for one in eager.sites]
    gradients = [torch.randn(one.logits.numel(), device=device) for one in eager.sites]

    def work(sites: Sites) -> None:
        sites.router.refresh(True)
        for one, own, gradient in zip(sites.sites, statistics, gradients, strict=True):
            sites.router.call_statistics.add(one.table_rows.start, own)
            one.logits.grad = gradient
        policy.before_step(sites.router, sites.statistics, step_size, sites.step, None)

    def write(sites: Sites, step: int) -> None:
        sites.router.go_to(step)
        sites.router.alpha.fill_(1.0 / step)
        step_size.fill_(0.1 * step)
        for one in sites.sites:
            one.temperature.fill_(1.0 / step)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for sites in (eager, captured):
            write(sites, 1)
            work(sites)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            work(captured)
        for step in range(2, 5):
            write(eager, step)
            work(eager)
            write(captured, step)
            graph.replay()
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(eager.state(), captured.state(), strict=True))


# With Triton's compiler, which is stricter than its interpreter


BUILD = """
import torch
from itertools import product
from flexact.ops.triton import driver, policy as policy_kernels
from flexact.ops.triton.launch import Launches
from flexact.config import Policy
from flexact.ops.policy_tables import Tables

built = []

def build(launches, *tensors):
    for launch, places in launches.steps:
        compiled = launch._compiled([tensors[i] for i in places])
        assert driver.parameters(compiled, (*places, *launch.arguments)) is not None
        built.append((launch.kernel.fn.__name__, len(compiled.asm["cubin"])))

Launches.__call__ = build
rows, k = 17, 5
table, numbers, one = torch.zeros(rows, k), torch.zeros(rows, 3, dtype=torch.long), torch.ones(())
square = torch.zeros(rows, 1, dtype=torch.float64)
statistics = (table, square, torch.zeros(rows, 2), torch.zeros(rows, 1), table, torch.zeros(rows, k, k))
policy_kernels.draw(torch.zeros(99), numbers, table > 0, table)
signs, order = torch.ones(rows, 1), torch.arange(rows)
for correction, calls, groups, factors in product(("none", "grad_norm_kl"), (1, 2), (1, 4, rows), (None, signs)):
    places = torch.zeros(rows, 2 + calls, dtype=torch.long)
    policy = Policy(correction=correction)
    starts = torch.linspace(0, rows, groups + 1).long()
    tables = Tables(numbers, places, order, starts, table > 0, table, table, one.expand(rows, 1), one, one, factors)
    policy_kernels.update(torch.zeros(999), rows * k, tables, statistics, (0.1, 0.01), policy)
assert {name for name, size in built if size} == {"_draw", "_update"}
assert all(size for _, size in built)
"""


@pytest.mark.slow
def test_both_build_for_a_gpu(output_with_fake_gpu: Callable[..., str]) -> None:
    output_with_fake_gpu(BUILD)
