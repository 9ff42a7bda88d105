"""The extension computes the same as the functions in Python, to the bit.

Without a GPU, the extension calls back into Python for every launch, which runs the kernel in Triton's interpreter.
"""

from __future__ import annotations

import copy
import ctypes
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import flexact
from flexact.ops.triton import extension, nodes
from flexact.ops.triton.launch import Dtypes, Launches

CANDIDATES = ("relu", "sigmoid", "tanh", "leaky_relu", "identity")
ELEMENTS = 2**9
"""Length of the views of the tensors; the kernels do not access more. The interpreter copies all of a view, so a long
one would reach beyond the memory of the process."""


class Kernels:
    """Stands in for compiled kernels: the extension gets its address, and calls `launch` with it."""

    by_address: ClassVar[dict[int, Kernels]] = {}
    launched = 0

    def __init__(self, launches: Launches, dtypes: Dtypes) -> None:
        self.launches, self.dtypes, self.count = launches, dtypes, len(launches.steps)
        self._own = ctypes.c_char()
        self.address = ctypes.addressof(self._own)
        Kernels.by_address[self.address] = self

    def launch(self, addresses: list[int]) -> None:
        Kernels.launched += 1
        tensors = []
        for address, dtype in zip(addresses, self.dtypes, strict=True):
            memory = (ctypes.c_char * (ELEMENTS * dtype.itemsize)).from_address(address)
            tensors.append(torch.frombuffer(memory, dtype=dtype))
        for launch, places in self.launches.steps:
            launch.run([tensors[i] for i in places])


def _launch(kernels: int, _count: int, addresses: Any, _device: int, _stream: int) -> int:
    own = Kernels.by_address[kernels]
    own.launch(addresses[: len(own.dtypes)])
    return 0


_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.c_int, ctypes.c_void_p
)(_launch)
_CHECK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(lambda *_: 0)


@pytest.fixture(scope="module")
def module() -> Any:
    if not extension.compiler():
        pytest.skip("there is no C++ compiler")
    module = extension.compiled()
    module.connect(*[ctypes.cast(function, ctypes.c_void_p).value for function in (_LAUNCH, _CHECK)], 0, 0)
    return module


@pytest.fixture(autouse=True)
def _with_extension(module: Any, triton_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "_module", module)
    monkeypatch.setattr(nodes, "_needs_python", set())
    monkeypatch.setattr(nodes, "_chains", {})
    prepared = {}

    def of(launches: Launches, device: int, dtypes: Dtypes) -> Kernels:
        return prepared.setdefault((launches, dtypes), Kernels(launches, dtypes))

    monkeypatch.setattr(Launches, "prepared", of)
    Kernels.launched = 0


class Block(nn.Module):
    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.first, self.second, self.third, self.other = (nn.BatchNorm2d(channels) for _ in range(4))
        self.act1, self.act2, self.act3 = nn.ReLU(), nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.act1(self.first(x))
        h = self.act2(self.second(h) + x)
        return self.act3(self.third(h) + self.other(x))


def trained(network: nn.Module, x: Tensor, enabled: bool, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return everything that two steps of training compute."""
    with monkeypatch.context() as patch:
        if not enabled:
            patch.setattr(extension, "ready", lambda: None)
        own = copy.deepcopy(network)
        optimizer = torch.optim.SGD(flexact.param_groups(own), lr=0.1)
        schedule = flexact.Schedule(own, 10_000, optimizer)
        found = []
        for _ in range(2):
            for sign in (1, -0.5):  # two micro-batches, whose gradients are accumulated
                inputs = (sign * x).requires_grad_()
                out = own(inputs)
                (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
                found += [out, inputs.grad]
            found += [p.grad.clone() for p in own.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return [*found, *own.state_dict().values()]


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("granularity", ["layer", "channel"])
def test_training_is_identical(
    fuse: bool, channels_last: bool, granularity: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    config = flexact.FlexConfig(candidates=CANDIDATES, granularity=granularity)
    network = flexact.convert(Block(), config=config, fuse=fuse, example_inputs=torch.randn(2, 3, 3, 3))
    x = torch.randn(3, 3, 4, 5).to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    expected = trained(network, x, False, monkeypatch)
    assert Kernels.launched == 0
    found = trained(network, x, True, monkeypatch)
    assert Kernels.launched > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_a_second_derivative_equals_that_of_the_functions_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    site = flexact.convert(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), config=flexact.FlexConfig(candidates=CANDIDATES))
    x = torch.randn(5, 3)

    def second() -> list[Tensor]:
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(site(inputs).square().sum(), inputs, create_graph=True)
        site.zero_grad()
        slope.square().sum().backward()
        return [slope.detach(), inputs.grad, *[p.grad for p in site.parameters()]]

    found = second()
    assert nodes._needs_python
    again = second()  # the second call runs in Python
    monkeypatch.setattr(extension, "ready", lambda: None)
    for one, other, expected in zip(found, again, second(), strict=True):
        torch.testing.assert_close(one, expected)
        torch.testing.assert_close(other, expected, rtol=0, atol=0)


def test_a_second_derivative_of_a_site_that_is_called_twice_counts_its_logits_once_per_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    act = nn.ReLU()
    site = flexact.convert(nn.Sequential(nn.Linear(3, 4), act, act), config=flexact.FlexConfig(candidates=CANDIDATES))
    x = torch.randn(5, 3)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(site(x).square().sum(), list(site.parameters()), create_graph=True)

    found = gradients()
    assert Kernels.launched > 0
    monkeypatch.setattr(extension, "ready", lambda: None)
    torch.testing.assert_close(found, gradients())


def test_a_fused_site_has_no_second_derivative() -> None:
    network = flexact.convert(Block(), config=flexact.FlexConfig(candidates=CANDIDATES), fuse=True)
    x = torch.randn(2, 3, 3, 3, requires_grad=True)
    out = network(x).sum()
    assert Kernels.launched > 0
    with pytest.raises(flexact.FlexActError, match="no second derivative"):
        torch.autograd.grad(out, x, create_graph=True)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_the_operators_of_a_compiled_model_run_in_the_extension() -> None:
    torch.manual_seed(0)
    model = flexact.convert(Block(), config=flexact.FlexConfig(candidates=CANDIDATES), fuse=True)
    models = [model, copy.deepcopy(model)]
    for one in models:
        one.kept = flexact.Schedule(one, 10_000)  # draws no noise in the graph
    compiled = torch.compile(models[0], backend="aot_eager", fullgraph=True)
    launched = []
    for step in range(3):  # the first step traces, and prepares the passes
        x = torch.randn(3, 3, 4, 5)
        inputs = [x.clone().requires_grad_() for _ in models]
        before = Kernels.launched
        out = compiled(inputs[0])
        out.square().sum().backward()
        launched.append(Kernels.launched - before)
        expected = models[1](inputs[1])
        expected.square().sum().backward()
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6, msg=f"step {step}")
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-5)
    # Four moments, three forwards and three backwards, each one pass of several kernels.
    assert launched[1:] == [10, 10]
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict(), equal_nan=True)
