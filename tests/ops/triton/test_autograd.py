"""Tests of the Triton operators under autograd and torch.compile, and of the fallback where a kernel cannot be
built.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flexact
from flexact import FlexAct, FlexActError, FlexConfig, Policy
from flexact.candidates.registry import lookup
from flexact.ops import _routed, dispatch, routed_activation
from flexact.ops.blending import Blending
from flexact.ops.dispatch import CannotBuild
from flexact.ops.triton import autograd as triton_autograd
from flexact.ops.triton import moments, routed
from flexact.surgery.fused_site import normalised_site
from kernels import using

NAMES = ("relu", "tanh", "gelu")
KEYS = "\n".join(NAMES)
FLEXACT = torch.ops.flexact

LAYOUTS = {
    "contiguous": lambda: torch.randn(3, 4, 2, 3),
    "channels last": lambda: torch.randn(3, 4, 2, 3).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(3, 4, 2).transpose(0, 2),
    "slice": lambda: torch.randn(3, 4, 6)[:, :, ::2],
    "one number": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 4, 2),
}


# Operators


def routed_arguments(h: Tensor, rows: int) -> tuple[Any, ...]:
    logits = torch.randn(rows * 3, device=h.device, requires_grad=True)
    p = torch.softmax(logits.detach().view(rows, 3), -1)
    half = torch.tensor(0.5, device=h.device)
    return h.requires_grad_(), logits, p, p, half, KEYS, [0, 1, 2], 1, True


def normalised_arguments(residual: str, device: torch.device) -> tuple[Any, ...]:
    """Returns all arguments of the operator: a batch norm, a residual, its batch norm, the routing."""
    y, other = (torch.randn(4, 3, 2, 2, device=device).requires_grad_() for _ in range(2))
    weights, biases = ([torch.rand(3, device=device).requires_grad_() for _ in range(2)] for _ in range(2))
    own, others = (
        (moments.moments(x.detach(), None, 0.1, 1e-5), weights[i], biases[i]) for i, x in enumerate((y, other))
    )
    added = {"none": (None,) * 4, "plain": (other, *(None,) * 3), "normalised": (other, *others)}[residual]
    _, logits, *routing = routed_arguments(y, 1)
    return y, logits, *own, *added, True, *routing


def check_operator(operator: Any, arguments: tuple[Any, ...], device: torch.device) -> None:
    """torch's own checks. With symbolic sizes they need kernels that Triton compiles rather than interprets."""
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static"]
    if device.type == "cuda":
        checks += ["test_aot_dispatch_dynamic"]
    torch.library.opcheck(operator, arguments, test_utils=checks)


@pytest.mark.parametrize("per_channel", [False, True], ids=["layer", "channel"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck_of_the_routed_activation(layout: str, per_channel: bool, device: torch.device) -> None:
    h = LAYOUTS[layout]()
    if layout == "slice":
        h = torch.randn(3, 4, 6).to(device)[:, :, ::2]
    if per_channel and h.dim() == 0:
        pytest.skip("a number has no channels")
    h = h.to(device)
    check_operator(FLEXACT.routed_activation_triton.default, routed_arguments(h, 4 if per_channel else 1), device)


@pytest.mark.parametrize("need_logits", [False, True])
def test_opcheck_of_its_backward(need_logits: bool, device: torch.device) -> None:
    h = torch.randn(3, 4, 2, device=device)
    _, _, *routing, _ = routed_arguments(h.clone(), 1)
    arguments = (torch.randn_like(h), h, *routing, need_logits)
    check_operator(FLEXACT.routed_activation_triton_backward.default, arguments, device)


@pytest.mark.parametrize("residual", ["none", "plain", "normalised"])
def test_opcheck_with_batch_norm(residual: str, device: torch.device) -> None:
    check_operator(FLEXACT.normalised_activation.default, normalised_arguments(residual, device), device)


@pytest.mark.parametrize("track", [False, True])
def test_opcheck_of_the_moments(track: bool, device: torch.device) -> None:
    tracked = (torch.zeros(3), torch.ones(3), torch.tensor(2))
    running = [one.to(device) for one in tracked] if track else (None, None, None)
    arguments = (torch.randn(4, 3, 2, 2, device=device), *running, 0.1, 1e-5)
    check_operator(FLEXACT.batch_moments.default, arguments, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("per_channel", [False, True], ids=["layer", "channel"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck_of_the_closed_form_on_a_gpu(layout: str, per_channel: bool) -> None:
    h = LAYOUTS[layout]().to("cuda")
    if per_channel and h.dim() == 0:
        pytest.skip("a number has no channels")
    torch.library.opcheck(_routed.operator, routed_arguments(h, 4 if per_channel else 1))


@pytest.mark.parametrize("rows", [1, 4], ids=["layer", "channel"])
def test_the_operator_equals_the_autograd_function(rows: int, device: torch.device) -> None:
    h, logits, *rest = routed_arguments(torch.randn(3, 4, 2).to(device), rows)
    _, alive, channel_dim, statistics = rest[3:]
    blending = Blending(*rest[:3], NAMES, tuple(alive), channel_dim, statistics)
    results = []
    for x, gathered in (
        FLEXACT.routed_activation_triton(h, logits, *rest),
        triton_autograd.routed(h, logits, blending),
    ):
        results.append((x, gathered, *torch.autograd.grad(x.square().sum(), (h, logits))))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


def test_a_second_derivative_equals_that_of_the_plain_blend(device: torch.device) -> None:
    h, logits, *rest = routed_arguments(torch.randn(6).to(device), 1)
    x, _ = triton_autograd.routed(h, logits, Blending(*rest[:3], NAMES, (0, 1, 2), 1, False))
    plain = sum(rest[0][0, k] * lookup(name).function(h) for k, name in enumerate(NAMES))
    second = []
    for one in (x, plain):
        (slope,) = torch.autograd.grad(one.square().sum(), h, create_graph=True)
        second += torch.autograd.grad(slope.square().sum(), h)
    torch.testing.assert_close(*second, rtol=1e-4, atol=1e-5)


# torch.compile

COMPILED = """
import os, torch, triton, flexact.ops.triton.policy, flexact.ops.triton.autograd, flexact.ops.triton.moments
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from triton.backends.compiler import GPUTarget

class FakeGPU:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

triton.runtime.driver.set_active(FakeGPU())
os.environ["TRITON_INTERPRET"] = "1"  # what was imported is compiled all the same; CPU tensors may go there now
flexact.ops.dispatch.use("triton")
# The policy is not compiled, and there is no GPU to run it on.
def zero_buffers(steps, values, others):
    found = [torch.zeros(one) if isinstance(one, tuple) else torch.zeros_like(others[one - 1]) for one in steps.buffers]
    return tuple(found)

flexact.ops.triton.policy._run = zero_buffers

graphs, kernels = [], set()

def number(size):
    return size.node.hint if isinstance(size, torch.SymInt) else size

def zeros(node):
    value = node.meta["val"] if isinstance(node, torch.fx.Node) else node
    if not isinstance(value, torch.Tensor):
        return value if value is None else number(value)
    shape, stride = ([number(size) for size in sizes] for sizes in (value.shape, value.stride()))
    return torch.empty_strided(shape, stride, dtype=value.dtype).zero_()

def compiler(graph, inputs):
    called = [node for node in graph.graph.nodes if node.op == "call_function"]
    graphs.append([str(node.target) for node in called])
    kernels.update(kernel_side_table.get_kernel(node.kwargs["kernel_idx"]) for node in called
                   if "triton_kernel_wrapper" in str(node.target))
    outputs = graph.graph.find_nodes(op="output")[0].args[0]
    return make_boxed_func(lambda *_: [zeros(node) for node in outputs])

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.other = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(self.norm(self.conv(x)) + self.other(x))

# One site that is fused with its batch norm, and one that is not.
policy = flexact.FlexConfig(commit_at=None, policy=flexact.Policy(final_temperature=0.1))
model = flexact.convert(nn.Sequential(Block(), nn.Conv2d(3, 3, 1), nn.ReLU()), config=policy, fuse=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = flexact.Schedule(model, 10, optimizer)
compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=compiler, bw_compiler=compiler))
counts = []
for batch in (64, 64, 64, 64, 64, 65, 66):
    compiled(torch.randn(batch, 3, 8, 8)).sum().backward()
    optimizer.step()
    schedule.step()
    counts.append(len(graphs))
assert model[2].temperature < 0.3
assert counts[1] == counts[4], f"the temperature makes it compile again: {counts}"
assert counts[5] == counts[6], f"every size of a batch makes it compile again: {counts}"
static, dynamic = ({target for graph in some for target in graph if "flexact" in target}
                   for some in (graphs[:counts[0]], graphs[counts[0]:]))
names = {kernel.fn.__name__ for kernel in kernels}
fused = {"_sweep", "_finish", "backward_through_norm"}
assert names == {"forward", "finish_forward", "backward", "finish_backward"} | fused, names
assert static == {"flexact.triton_pass.default"}, static
assert not dynamic, f"with symbolic sizes, the compiler cannot look into {dynamic}"
"""


@pytest.mark.parametrize("residual", ["", " + x", " + self.other(x)"], ids=["none", "plain", "normalised"])
def test_the_compiler_sees_passes_and_kernels_and_does_not_recompile_as_the_temperature_anneals(
    residual: str, tmp_path: Path
) -> None:
    """Without a GPU, Triton compiles for one as far as torch requires, and the results of the graphs are made up."""
    program = tmp_path / "program.py"  # a file, because `convert` reads the source of the forward that it fuses
    program.write_text(COMPILED.replace(" + self.other(x)", residual), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-W", "ignore", str(program)], env=environment, check=True)


@pytest.mark.usefixtures("triton_kernels")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_candidate_without_a_triton_form_compiles_without_graph_breaks(device: torch.device) -> None:
    flexact.register_candidate("wave", lambda h: torch.sin(h.double()).to(h.dtype))
    torch._dynamo.reset()
    model = flexact.convert(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), config=FlexConfig(candidates=("relu", "wave")))
    model = model.to(device)
    schedule = flexact.Schedule(model, 10)
    h = torch.randn(2, 3, device=device)
    compiled = torch.compile(model, fullgraph=True, backend="eager")(h)
    torch.testing.assert_close(compiled, model(h))
    assert not schedule.committed


# The fallback

NO_COMPILER = CannotBuild("_forward: OSError: no compiler")


@pytest.fixture
def breaking(
    monkeypatch: pytest.MonkeyPatch, launches_from_python: None
) -> Iterator[Callable[[object, str, Exception], None]]:
    """Returns a function that makes a function of a module raise. Triton is disabled for this test only."""

    def set_up(module: object, name: str, error: Exception) -> None:
        def fail(*_: Any, **__: Any) -> Any:
            raise error

        monkeypatch.setattr(module, name, fail)

    with using("triton"):
        yield set_up


def routed_results(h: Tensor, rows: int) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    h, logits, *rest = routed_arguments(h.detach().clone(), rows)
    x, gathered = routed_activation(h, logits, *rest[:3], NAMES, range(3), statistics=True)
    return x.detach(), gathered, *torch.autograd.grad(x.square().sum(), (h, logits))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_closed_form_is_the_fallback_and_warns_once(
    direction: str, breaking: Callable, device: torch.device
) -> None:
    h = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).to(device)
    with using("closed_form"):
        expected = routed_results(h, 4)
    breaking(routed, direction, NO_COMPILER)
    with pytest.warns(UserWarning, match="OSError: no compiler.*torch operations") as said:
        ours = routed_results(h, 4)
    assert sum(warning.category is UserWarning for warning in said) == 1
    for left, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
    assert dispatch.active(device).name == "closed_form"
    assert "no compiler" in dispatch.active(device).reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = routed_results(h, 4)
    for left, right in zip(again, expected, strict=True):
        assert torch.equal(left, right)


def block(device: torch.device, residual: str) -> tuple[FlexAct, nn.BatchNorm2d, nn.BatchNorm2d | None, list[Tensor]]:
    torch.manual_seed(0)
    site = FlexAct(config=FlexConfig(policy=Policy(noise=0.0))).to(device)
    nn.init.normal_(site.logits)
    norms = [nn.BatchNorm2d(3).to(device) for _ in range(2)]
    for parameter in (parameter for norm in norms for parameter in norm.parameters()):
        nn.init.uniform_(parameter, 0.5, 1.5)
    inputs = [torch.randn(4, 3, 2, 2).to(device).requires_grad_() for _ in range(1 if residual == "none" else 2)]
    return site, norms[0], norms[1] if residual == "normalised" else None, inputs


def block_results(device: torch.device, residual: str) -> dict[str, Tensor]:
    """Makes one training step of a site after a batch norm. Returns output, gradients and running statistics."""
    site, norm, other, inputs = block(device, residual)
    x = normalised_site(site, norm, *inputs, *([] if other is None else [other]))
    x.square().sum().backward()
    found = {"x": x.detach(), "statistics": site.router.sensitivity()}
    found |= {f"to input {i}": tensor.grad for i, tensor in enumerate(inputs)}
    for name, module in {"site": site, "norm": norm, **({} if other is None else {"other": other})}.items():
        found |= {f"to {name}.{key}": parameter.grad for key, parameter in module.named_parameters()}
        found |= {f"{name}.{key}": buffer.clone() for key, buffer in module.named_buffers()}
    return found


@pytest.mark.parametrize(("which", "residual"), [("moments", "none"), ("moments", "normalised"), ("forward", "plain")])
def test_the_separate_modules_are_the_fallback_of_a_fused_site_and_it_warns_once(
    which: str, residual: str, breaking: Callable, device: torch.device
) -> None:
    with using("closed_form"):
        expected = block_results(device, residual)
    breaking(moments if which == "moments" else routed, which, NO_COMPILER)
    with pytest.warns(UserWarning, match="failed to build") as said:
        ours = block_results(device, residual)
    assert sum(warning.category is UserWarning for warning in said) == 1
    assert ours.keys() == expected.keys()
    for name, value in ours.items():
        if which == "forward" and ("running" in name or "batches" in name):
            continue  # the moments were computed before the forward failed, so this batch counts twice
        torch.testing.assert_close(
            value,
            expected[name],
            rtol=1e-5,
            atol=1e-5,
            equal_nan=name.endswith("evidence"),
            msg=lambda text, name=name: f"{name}: {text}",
        )


def test_a_fused_site_whose_backward_cannot_be_compiled_says_what_to_do(
    breaking: Callable, device: torch.device
) -> None:
    breaking(routed, "backward", NO_COMPILER)
    with pytest.raises(FlexActError, match=r"backward of .* no compiler.*FLEXACT_KERNELS=closed_form"):
        block_results(device, "normalised")


def test_other_errors_are_not_hidden(breaking: Callable, device: torch.device) -> None:
    breaking(routed, "forward", ValueError("a mistake"))
    with pytest.raises(ValueError, match="a mistake"):
        routed_results(torch.randn(4, device=device), 1)
    assert not dispatch._broken


def test_a_model_continues_training_when_triton_fails_in_the_middle(breaking: Callable, device: torch.device) -> None:
    site, norm, _, (y,) = block(device, "none")
    duplicate, duplicate_norm = copy.deepcopy((site, norm))
    normalised_site(site, norm, y).sum().backward()
    breaking(moments, "moments", NO_COMPILER)
    with pytest.warns(UserWarning, match="failed to build"):
        x = normalised_site(site, norm, y)
    duplicate(duplicate_norm(y))
    torch.testing.assert_close(x, duplicate(duplicate_norm(y)), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm.running_var, duplicate_norm.running_var)
