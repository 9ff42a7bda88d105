"""Tests of the draw and the policy as Triton kernels, against plain torch: under the interpreter, or on a GPU.

Both run on the same sites, with different numbers of candidates, by layer and by channel, some of them dropped.
"""

from __future__ import annotations

import functools
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import flexact
from configs import flat
from flexact import FlexAct, FlexConfig, Policy
from flexact.ops import dispatch, policy_kernels
from flexact.ops.triton import policy as triton_policy
from flexact.ops.triton.launch import CannotBuild, Launches
from flexact.policy import logit_updates as policy
from flexact.policy.evidence import RoundStatistics
from flexact.policy.optimizers import Step
from flexact.routing import call_statistics as gathering
from flexact.routing.sites import bind
from kernels import using

count = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "launches.py"))["count"]
pytestmark = [
    pytest.mark.usefixtures("triton_kernels"),
    pytest.mark.filterwarnings("ignore:.*(invalid value|overflow|All-NaN).*:RuntimeWarning"),  # the interpreter's
]

CANDIDATES = ("relu", "sigmoid", "tanh", "leaky_relu", "identity", "gelu", "silu", "elu")
SITES = ((3, 1), (2, 4), (5, 1), (8, 3), (5, 1))
"""Candidates and rows of each site: ten rows together, which take two programs."""

POLICIES: list[dict[str, Any]] = [
    {},
    {"kl_on": "p", "noise": 1.0},
    {"lam": "temperature"},
    {"lam": 1},
    {"correction": "clipped_norm_kl", "clip": 0.4},
    {"correction": "clipped_norm_kl", "clip": 0.4, "lam": "temperature", "kl_on": "p"},
    {"correction": "clip_logit_gradient", "clip": 0.5},
    {"correction": "none"},
    {"correction": "none", "lam": "temperature"},
    {"correction": "output_norm"},
    {"alpha_kind": "absolute"},
    {"alpha": 0.0},
]


plain_torch = functools.partial(using, "closed_form")


class Sites:
    """Builds a router's sites from a seed: the same seed gives identical sites."""

    def __init__(self, device: torch.device, seed: int = 0, sizes: tuple[tuple[int, int], ...] = SITES, **changes: Any):
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device
        self.sites = [site(k, rows, flat(**changes)).to(device) for k, rows in sizes]
        self.router = bind(nn.ModuleList(self.sites), self.sites)
        self.router.scheduled = True
        self.statistics = RoundStatistics(self.router.rows, self.router.k, device)
        self.step = Step(self.router, (1,) * len(self.sites))
        self.optimizer: Any = SimpleNamespace()
        with torch.no_grad():
            for one in self.sites:
                one.logits.copy_(self.normal(one.logits.numel()))
                one.temperature.fill_(float(0.2 + self.normal(1).abs()))
                one.width = 1 + int(10 * self.normal(1).abs())

    def normal(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator).to(self.device)

    def drop(self) -> None:
        """Drops random candidates of some sites, but never the first one."""
        for one in self.sites[1:4]:
            goes = self.normal(one.rows, one.k) > 0.7
            goes[:, 0] = False
            one.drop(goes, step=1)

    def draw(self, step: int) -> tuple[Tensor, Tensor]:
        self.router.go_to(step)
        self.router.refresh(training=True)
        return self.router.pi, self.router.p

    def call(self, *numbers: int, scale: float = 1.0) -> None:
        """Writes statistics of sites, as if they had been called in this order."""
        for number in numbers:
            one = self.sites[number]
            self.router.call_statistics.add(one.table_rows.start, scale * self.normal(one.rows, one.k).abs())

    def differentiate(self, *numbers: int, scale: float = 1.0) -> None:
        for number in numbers:
            one = self.sites[number]
            one.logits.grad = scale * self.normal(one.logits.numel())

    def act(self, step_size: float | Tensor = 0.05) -> None:
        step = torch.as_tensor(step_size, device=self.device)
        factors = self.step.factors(self.optimizer)
        policy.before_step(self.router, self.statistics, step, self.step, factors)

    def state(self) -> list[Tensor]:
        """Returns everything that a step changes, with zeros for missing gradients."""
        logits = [one.logits for one in self.sites]
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in logits]
        return [torch.cat(logits).detach(), torch.cat(gradients), *self.statistics.state_dict().values()]


def site(k: int, rows: int, config: FlexConfig) -> FlexAct:
    names = CANDIDATES[:k]
    if rows == 1:
        return FlexAct(names, config)
    by_channel = FlexConfig.from_dict(config.to_dict() | {"granularity": "channel"})
    return FlexAct(names, by_channel, channels=rows)


def assert_alike(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=2e-5, atol=1e-6, equal_nan=True)


# The draw


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_the_draw_equals_plain_torchs(noise: float, device: torch.device) -> None:
    ours, theirs = Sites(device, noise=noise), Sites(device, noise=noise)
    for step in range(2):
        fused = ours.draw(step)
        with plain_torch():
            plain = theirs.draw(step)
        assert_alike(list(fused), list(plain))
        assert all(torch.equal(table == 0, ~ours.router.alive()) for table in fused)
        ours.drop()
        theirs.drop()


@settings(max_examples=30)
@given(data=st.data())
def test_the_draw_equals_plain_torchs_for_any_logits(data: st.DataObject, device: torch.device) -> None:
    number = st.floats(-1e4, 1e4, width=32)
    logits = torch.tensor(data.draw(st.lists(st.lists(number, min_size=5, max_size=5), min_size=1, max_size=3)))
    rows, k = logits.shape
    alive = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows * k, max_size=rows * k))).view(rows, k)
    alive[:, data.draw(st.integers(0, k - 1))] = True
    temperature = data.draw(st.floats(1e-6, 100.0))
    own = FlexAct(CANDIDATES[:k], FlexConfig(granularity="channel", policy=Policy(noise=1.0)), channels=rows).to(device)
    with torch.no_grad():
        own.logits.copy_(logits.flatten())
        own.temperature.fill_(temperature)
    own.drop(~alive, step=0)
    own.router.scheduled = True
    own.router.refresh(training=True)
    pi, p = own.router.pi, own.router.p
    assert_alike([pi.sum(-1), p.sum(-1)], [torch.ones(rows, device=device)] * 2)
    with plain_torch():
        own.router.refresh(training=True)
    assert_alike([pi, p], [own.router.pi, own.router.p])


def test_a_nan_logit_affects_its_own_row_only(device: torch.device) -> None:
    ours, theirs = Sites(device), Sites(device)
    for one in (ours, theirs):
        with torch.no_grad():
            one.sites[2].logits[1] = torch.nan
    with plain_torch():
        plain = theirs.draw(0)
    assert_alike(list(ours.draw(0)), list(plain))
    assert ours.router.p.isnan().any(-1).sum() == 1


def test_a_forward_keeps_an_earlier_draw(device: torch.device) -> None:
    """Autograd still holds the earlier draw."""
    sites = Sites(device, noise=1.0)
    pi, p = sites.draw(0)
    before = p.clone()
    sites.draw(1)
    assert torch.equal(p, before)
    assert not torch.equal(p, sites.router.p)
    assert sites.router.pi.data_ptr() != pi.data_ptr()


# The policy


def one_step(sites: Sites, step: int) -> None:
    """Includes a site that is called twice and, in some steps, one that is not called or has no gradient."""
    sites.draw(step)
    sites.call(0, 1, 2, 4, 2, *([3] if step % 2 else []))
    sites.differentiate(0, 1, 3, 4, *([2] if step % 3 else []), scale=10.0**-step)
    sites.act()


@pytest.mark.parametrize(
    ("changes", "logit_step"), [*zip(POLICIES, ["schedule", "optimizer"] * 6, strict=True), ({}, "optimizer")], ids=str
)
def test_the_policy_equals_plain_torchs(changes: dict[str, Any], logit_step: str, device: torch.device) -> None:
    ours, theirs = (Sites(device, logit_step=logit_step, **changes) for _ in range(2))
    for step in range(4):
        one_step(ours, step)
        with plain_torch():
            one_step(theirs, step)
        assert_alike(ours.state(), theirs.state())
        assert [one.logits.grad is None for one in ours.sites] == [one.logits.grad is None for one in theirs.sites]
        if step == 1:
            ours.drop()
            theirs.drop()
        if step == 2:
            ours.statistics.reset()
            theirs.statistics.reset()


@pytest.mark.parametrize(
    ("scaled", "share", "logit_step"),
    [(False, "site", "schedule"), (True, "model", "schedule"), (True, "site", "optimizer")],
)
def test_the_step_of_an_optimizer_that_maximizes_or_holds_some_of_the_sites_equals_plain_torchs(
    scaled: bool, share: str, logit_step: str, device: torch.device
) -> None:
    ours, theirs = (Sites(device, logit_step=logit_step, share=share) for _ in range(2))
    for step, found_inf in enumerate((0.0, 1.0, 0.0)):
        infinite, scale = torch.tensor(found_inf, device=device), torch.tensor(1000.0, device=device)
        for sites in (ours, theirs):
            sites.step = Step(sites.router, (1, -1, 0, 1, -1))
            sites.optimizer = SimpleNamespace(found_inf=infinite, grad_scale=scale) if scaled else SimpleNamespace()
        one_step(ours, step)
        with plain_torch():
            one_step(theirs, step)
        assert_alike(ours.state(), theirs.state())
    assert ours.statistics.count.max() == (2 if scaled else 3)


@settings(max_examples=12)
@given(
    seed=st.integers(0, 1000),
    changes=st.sampled_from(POLICIES),
    logit_step=st.sampled_from(["schedule", "optimizer"]),
    gradient=st.sampled_from([0.0, 1e-30, 1e-12, 1.0, 1e15, torch.inf, torch.nan]),
    statistics=st.sampled_from([0.0, 1e-30, 1.0, 1e6, torch.nan]),
    called=st.lists(st.integers(0, 1), max_size=5),
)
def test_the_policy_equals_plain_torchs_for_any_input(
    seed: int,
    changes: dict[str, Any],
    logit_step: str,
    gradient: float,
    statistics: float,
    called: list[int],
    device: torch.device,
) -> None:
    states = []
    for forced in ("triton", "closed_form"):
        sites = Sites(device, seed, sizes=((4, 1), (3, 2)), logit_step=logit_step, **changes)
        with using(forced):
            for step in range(2):
                sites.draw(step)
                sites.call(*called, scale=statistics)
                sites.differentiate(0, scale=gradient)
                sites.differentiate(1)
                sites.act()
        states.append(sites.state())
    assert_alike(*states)


@pytest.mark.parametrize("changes", [{}, {"correction": "none"}], ids=str)
def test_statistics_are_averaged_over_ranks_once_a_step(
    changes: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def add_another_rank(total: Tensor) -> None:
        asked.append(total)
        total.add_(torch.linspace(0, 1, total.numel(), device=total.device).view_as(total))

    monkeypatch.setattr(torch.distributed, "all_reduce", add_another_rank)
    for module in (gathering, policy):
        monkeypatch.setattr(module, "rank_count", lambda: 2)
    ours, theirs = Sites(device, **changes), Sites(device, **changes)
    for step in range(2):
        one_step(ours, step)
        averaged = len(asked)
        with plain_torch():
            one_step(theirs, step)
        assert_alike(ours.state(), theirs.state())
        assert averaged == len(asked) - averaged == (changes.get("correction") != "none")
        asked.clear()


def test_a_saved_running_gradient_resumes(device: torch.device) -> None:
    ours, resumed = Sites(device), Sites(device)
    for sites in (ours, resumed):
        one_step(sites, 1)
    resumed.statistics = RoundStatistics(resumed.router.rows, resumed.router.k, device)
    for name, tensor in resumed.statistics.state_dict().items():
        tensor.copy_(ours.statistics.state_dict()[name])
    for sites in (ours, resumed):
        one_step(sites, 2)
    assert all(torch.equal(own, other) for own, other in zip(ours.state(), resumed.state(), strict=True))


def test_a_whole_training_equals_plain_torchs(device: torch.device) -> None:
    states = []
    x, y = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0)).to(device)
    for forced in ("triton", "closed_form"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).to(device)
        # A small step size: in so few steps, the default one would amplify the last bits of each step.
        config = FlexConfig(
            candidates=("relu", "tanh", "identity"),
            init="original",
            commit_at=0.8,
            policy=Policy(noise=1.0, logit_step_size=1),
        )
        model = flexact.convert(model, config=config, share="site")
        optimizer = torch.optim.SGD(flexact.param_groups(model, lr=0.05))
        schedule = flexact.Schedule(model, total_steps=8, optimizer=optimizer)
        with using(forced):
            for _ in range(8):
                ((model(x) - y).square().mean() + flexact.penalty(model)).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        assert schedule.committed
        states.append(list(model.state_dict().values()))
    off = 1e-4 if device.type == "cpu" else 1e-2  # rounding differences of each step reach the next
    for ours, theirs in zip(*states, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=off, atol=off, equal_nan=True)


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
    with using("triton"), broken, pytest.warns(UserWarning, match="failed to build .*no such instruction"):
        one_step(ours, 1)
        assert dispatch.active(device).name == "closed_form"
    assert_alike(ours.state(), theirs.state())


# Launches


def launched(device: torch.device, run: Callable[[], object]) -> int:
    """Counts kernels on a GPU; without one, torch's operators and the kernels that would be launched between them."""
    if device.type == "cuda":
        return count(run, device)
    counts_only = mock.patch.object(policy_kernels, "is_traced", return_value=False)  # the counting mode is no tracer
    with mock.patch.object(Launches, "__call__") as launch, counts_only:
        return count(run, device) + launch.call_count


@pytest.mark.parametrize("changes", [one for one in POLICIES if policy_kernels.has_kernel(Policy(**one))], ids=str)
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
    assert [policy_kernels.has_kernel(one) for one in supported + others] == [True] * 4 + [False] * 3


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
from flexact.ops.policy_kernels import Tables

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
