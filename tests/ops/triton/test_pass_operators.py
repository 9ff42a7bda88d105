"""A compiled model contains its passes as operators, with the results of the eager model.

`test_nodes` runs the same operators in the extension.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import flexact
from flexact.ops.blending import Blending
from flexact.ops.triton import pass_operators, routed
from flexact.ops.triton.launch import Launches
from kernels import using

CANDIDATES = ("relu", "sigmoid", "tanh", "leaky_relu", "identity")
pytestmark = [
    pytest.mark.usefixtures("triton_kernels"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]


class Block(nn.Module):
    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.first, self.second, self.third, self.other = (nn.BatchNorm2d(channels) for _ in range(4))
        self.act1, self.act2, self.act3, self.act4 = (nn.ReLU() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.act1(self.first(x))
        h = self.act2(self.second(h) + x)
        return self.act4(2 * self.act3(self.third(h) + self.other(x)))


def trained(network: nn.Module, x: Tensor, compiler: str | None) -> list[Tensor]:
    """Return everything that two steps of training compute."""
    torch._dynamo.reset()
    own = copy.deepcopy(network)
    run = own if compiler is None else torch.compile(own, backend=compiler, fullgraph=True)
    optimizer = torch.optim.SGD(flexact.param_groups(own), lr=0.1)
    schedule = flexact.Schedule(own, 10_000, optimizer)
    found = []
    for _ in range(2):
        inputs = x.clone().requires_grad_()
        out = run(inputs)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        found += [out, inputs.grad, *[p.grad.clone() for p in own.parameters() if p.grad is not None]]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return [*found, *own.state_dict().values()]


@pytest.mark.parametrize("granularity", ["layer", "channel"])
@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format], ids=["last", "first"])
def test_training_equals_that_of_the_eager_model(granularity: Any, memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    config = flexact.FlexConfig(candidates=CANDIDATES, granularity=granularity)
    network = flexact.convert(Block(), config=config, fuse=True, example_inputs=torch.randn(2, 3, 3, 3))
    x = torch.randn(3, 3, 4, 5).to(memory_format=memory_format)
    expected, found = (trained(network, x, compiler) for compiler in (None, "aot_eager"))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_an_operator_needs_no_more_than_its_plan() -> None:
    """A graph from a cache runs in a process that has not traced it."""
    h, p = torch.randn(4, 6), torch.softmax(torch.randn(1, 5), -1)
    plan = pass_operators.plan_of("forward", h.stride(), (h, p), CANDIDATES, tuple(range(5)), 1, True, (False, (1, 0)))
    x, sensitivities = torch.ops.flexact.triton_pass(plan, h, p)
    values = torch.stack([h.relu(), h.sigmoid(), h.tanh(), nn.functional.leaky_relu(h), h])
    torch.testing.assert_close(x, torch.einsum("k,kab->ab", p[0], values))
    slopes = [(h > 0).float(), h.sigmoid() * (1 - h.sigmoid()), 1 - h.tanh() ** 2, torch.where(h > 0, 1, 0.01)]
    torch.testing.assert_close(sensitivities[0], torch.stack([s.mean() for s in [*slopes, torch.ones(())]]))
    with using("triton"):
        torch.library.opcheck(torch.ops.flexact.triton_pass.default, (plan, h, p))


@pytest.mark.parametrize("shape", [(), (4, 6)], ids=str)
@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_with_symbolic_sizes_a_graph_contains_the_kernels(
    shape: tuple[int, ...], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number has no symbolic sizes, but the table of its weights has."""
    monkeypatch.setattr(Launches, "__call__", lambda *_: None)  # the interpreter cannot run on symbolic sizes

    def run(h: Tensor, p: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
        blending = Blending(p, p, temperature, CANDIDATES, tuple(range(5)), 1, True)
        return (*routed.forward(h, blending), *routed.backward(h, h, blending, True))

    h, p = torch.randn(shape), torch.softmax(torch.randn(1, 5), -1)
    graph = make_fx(run, tracing_mode=mode)(h, p, torch.tensor(0.5)).graph
    passes = graph.find_nodes(op="call_function", target=torch.ops.flexact.triton_pass.default)
    assert len(passes) == (2 if mode == "real" else 0)
