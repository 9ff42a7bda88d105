"""A site directly after a batch norm computes its input again in the backward, instead of saving it.

The oracles are torch's modules in float64, and the same site with its input saved.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import flexact
import interpreted_extension
from flexact import FlexAct, FlexConfig, Policy
from flexact.ops import dispatch, reference
from flexact.ops.dispatch import CannotBuild
from flexact.ops.triton import extension, restoring
from flexact.ops.triton.launch import Launches
from flexact.studies.cifar_resnets import BLOCKS, ResNet

NAMES = ("relu", "tanh", "gelu")
SHAPES = {
    "contiguous": lambda y: y.contiguous(),
    "channels last": lambda y: y.contiguous(memory_format=torch.channels_last),
    "three dimensions": lambda y: y.flatten(2),
    "two dimensions": lambda y: y.movedim(1, 3).reshape(-1, 3),
}

pytestmark = pytest.mark.usefixtures("triton_kernels")


@pytest.fixture(params=["python", "extension"])
def _runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test with the functions in Python, and in the extension."""
    if request.param == "python":
        monkeypatch.setattr(extension, "ready", lambda: None)
    elif not torch.cuda.is_available():
        interpreted_extension.use(monkeypatch)
    else:
        extension.wait()


both_runners = pytest.mark.usefixtures("_runner")


@pytest.fixture
def saving(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Returns a function that lets all sites save their inputs from now on."""
    return lambda: monkeypatch.setattr(restoring, "source_of", lambda *_: None)


class Pair(nn.Module):
    """A batch norm and a site."""

    def __init__(self, dims: int = 4, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = (nn.BatchNorm2d if dims == 4 else nn.BatchNorm1d)(3, **options)
        self.site = FlexAct(NAMES, FlexConfig(policy=Policy(noise=0.0)))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)

    def normal(self) -> Tensor:
        h: Tensor = self.norm(image())
        return h

    def forward(self, y: Tensor) -> Tensor:
        x: Tensor = self.site(self.norm(y))
        return x


def image(shape: str = "contiguous", dtype: torch.dtype = torch.float16, device: torch.device | None = None) -> Tensor:
    y = 3 + 2 * torch.randn(4, 3, 5, 6, generator=torch.Generator().manual_seed(1))
    return SHAPES[shape](y).to(device, dtype).requires_grad_()


def skip_if_truncated(device: torch.device, dtype: torch.dtype) -> None:
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter truncates to bfloat16, where a GPU rounds")


def gradients(x: Tensor, y: Tensor, pair: nn.Module, **options: Any) -> list[Tensor]:
    """Returns the gradients with respect to y and the parameters, for a δ that differs everywhere."""
    delta = torch.linspace(-1, 1, x.numel(), device=x.device).view(x.shape).to(x.dtype)
    return list(torch.autograd.grad(x, [y, *pair.parameters()], delta, **options))


class Rounded(torch.autograd.Function):
    """Adds a random relative error of at most eps / 2 to each element, and to each element of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        ctx.eps = eps
        return x * (1 + eps * (torch.rand_like(x) - 0.5))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * (1 + ctx.eps * (torch.rand_like(gradient) - 0.5)), None


def exact_gradients(pair: Pair, y: Tensor, eps: float = 0.0) -> tuple[Tensor, ...]:
    """Returns the result of `gradients` in float64, with h and its gradient rounded at random if eps is not 0."""
    norm, exact_y = copy.deepcopy(pair.norm).double(), y.detach().double().requires_grad_()
    logits = pair.site.logits.detach().double().view(1, -1).requires_grad_()
    alive, tau = torch.ones_like(logits, dtype=torch.bool), float(pair.site.temperature)
    h: Tensor = Rounded.apply(norm(exact_y), eps)  # type: ignore[no-untyped-call]
    x = reference.routed_activation(h, logits, torch.zeros_like(logits), tau, NAMES, alive)
    delta = torch.linspace(-1, 1, x.numel(), device=x.device).view(x.shape).to(y.dtype).double()
    return torch.autograd.grad(x, [exact_y, norm.weight, norm.bias, logits], delta)


def error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


@both_runners
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradients_are_those_of_float64_and_of_a_saved_input(
    shape: str, dtype: torch.dtype, device: torch.device, saving: Callable[[], None]
) -> None:
    skip_if_truncated(device, dtype)
    y = image(shape, dtype, device)
    pair = Pair(y.dim()).to(device)
    assert restoring.source_of(pair.norm(y)) is not None
    pair(y)  # on a GPU, the first call launches the kernels from Python
    x = pair(y)
    found = gradients(x, y, pair)

    saving()
    other_x = pair(y)
    assert torch.equal(other_x, x)
    saved = gradients(other_x, y, pair)

    expected = exact_gradients(pair, y)
    draws = [exact_gradients(pair, y, torch.finfo(dtype).eps) for _ in range(20)]
    for number, name in enumerate(("y", "weight", "bias", "logits")):
        exact = expected[number]
        # As much as rounding h and its gradient may cause, and as much again for the rest: the GPU's approximate
        # functions, and the rounding inside torch's batch norm.
        bound = 2 * max(error(draw[number], exact) for draw in draws)
        own, others = (error(one[number].view_as(exact), exact) for one in (found, saved))
        assert own < bound, name
        assert own < 1.1 * others + 1e-4, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_input_is_computed_as_by_the_batch_norm(shape: str, dtype: torch.dtype, device: torch.device) -> None:
    skip_if_truncated(device, dtype)
    y = image(shape, dtype, device)
    h = Pair(y.dim()).to(device).norm(y)
    source = restoring.source_of(h)
    assert source is not None
    copy_pass, restore = restoring.passes(y)
    (found,) = restore.run(y, *copy_pass.run(*source[1:]))
    assert found.stride() == h.stride()
    assert float((found == h).float().mean()) > 0.99
    torch.testing.assert_close(found, h, rtol=torch.finfo(dtype).eps, atol=1e-6)  # a unit in the last place


def test_the_extension_computes_the_same_as_the_functions_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, y = Pair(), image("channels last")
    expected = gradients(pair(y), y, pair)
    interpreted_extension.use(monkeypatch)
    found = gradients(pair(y), y, pair)
    assert interpreted_extension.Kernels.launched > 0
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@both_runners
def test_the_input_is_freed_after_the_forward() -> None:
    pair = Pair()
    for number in range(2):  # the first call launches the kernels from Python
        h = pair.norm(image())
        x = pair.site(h)
        alive = weakref.ref(h)
        del h
        assert alive() is None, number
        x.sum().backward()


@both_runners
def test_sites_with_the_same_input_need_not_save_it() -> None:
    pair, y = Pair(), image()
    for _ in range(2):
        h = pair.norm(y)
        x = pair.site(h) + pair.site(h)
        alive = weakref.ref(h)
        del h
        assert alive() is None
        found = gradients(x, y, pair)
        x = pair(y)
    for one, other in zip(found, gradients(x, y, pair), strict=True):
        assert error(one, 2 * other) < 2e-3


@both_runners
def test_a_graph_that_is_kept_can_run_twice_and_a_freed_one_raises() -> None:
    pair, y = Pair(), image()
    x = pair(y)
    first = gradients(x, y, pair, retain_graph=True)
    for one, other in zip(first, gradients(x, y, pair), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        gradients(x, y, pair)


@both_runners
def test_an_input_of_the_batch_norm_that_was_written_to_raises() -> None:
    pair, y = Pair(), image()
    x = pair(y)
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(x.sum(), pair.site.logits)


@both_runners
def test_parameters_that_change_before_the_backward_do_not_matter() -> None:
    pair, y = Pair(), image()
    expected = gradients(pair(y), y, pair)
    x = pair(y)
    with torch.no_grad():
        pair.norm.bias.add_(5)
    for one, other in zip(gradients(x, y, pair), expected, strict=True):
        assert torch.equal(one, other)


@both_runners
def test_an_input_may_be_written_to_after_the_site() -> None:
    pair, y = Pair(), image()
    expected = gradients(pair(y), y, pair)
    h = pair.norm(y)
    x = pair.site(h)
    with torch.no_grad():
        h.zero_()
    for one, other in zip(gradients(x, y, pair), expected, strict=True):
        assert torch.equal(one, other)


@both_runners
def test_a_second_derivative_is_that_of_a_saved_input(saving: Callable[[], None]) -> None:
    pair = Pair()

    def second() -> list[Tensor]:
        y = image()
        h = pair.norm(y)
        x = pair.site(h)
        (slope,) = torch.autograd.grad(x.float().sin().sum(), h, create_graph=True)
        return list(torch.autograd.grad(slope.float().square().sum(), [h, y, *pair.parameters()]))

    found = second()
    saving()
    for one, other in zip(found, second(), strict=True):
        assert error(one, other) < 5e-3


class Packed:
    """Counts how often hooks of saved tensors unpack one."""

    def __init__(self) -> None:
        self.unpacked = 0

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        def unpack(tensor: Tensor) -> Tensor:
            self.unpacked += 1
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack)


def in_float32(pair: Pair) -> Tensor:
    return pair.norm(image(dtype=torch.float32))


def in_evaluation(pair: Pair) -> Tensor:
    pair.norm.eval()
    return pair.norm(image())


def written_to(pair: Pair) -> Tensor:
    h = pair.norm(image())
    with torch.no_grad():
        h.mul_(2)
    return h


def changed_in_place(pair: Pair) -> Tensor:
    return pair.norm(image()).mul_(2)


def with_y_written_to(pair: Pair) -> Tensor:
    y = image()
    h = pair.norm(y)
    with torch.no_grad():
        y.mul_(2)
    return h


def reshaped(pair: Pair) -> Tensor:
    return pair.norm(image()).flatten(1)


def with_a_frozen_bias(pair: Pair) -> Tensor:
    pair.norm.bias.requires_grad_(False)
    return pair.norm(image())


def without_parameters(pair: Pair) -> Tensor:
    return nn.BatchNorm2d(3, affine=False)(image())


def without_running_statistics(pair: Pair) -> Tensor:
    return Pair(track_running_stats=False).norm(image())


def of_a_strided_layout(pair: Pair) -> Tensor:
    return pair.norm(image().transpose(2, 3))


def with_parameters_whose_memory_is_freed(pair: Pair) -> Tensor:
    """As `fully_shard` leaves them after the forward of a batch norm that it shards on its own."""
    h = pair.norm(image())
    for parameter in pair.norm.parameters():
        with torch.autograd._unsafe_preserve_version_counter(parameter):
            parameter.untyped_storage().resize_(0)
    return h


def of_a_freed_graph(pair: Pair) -> Tensor:
    h = pair.norm(image())
    h.sum().backward()
    return h


@pytest.mark.parametrize(
    "unusual",
    [
        in_float32, in_evaluation, written_to, changed_in_place, with_y_written_to, reshaped, with_a_frozen_bias,
        without_parameters, of_a_strided_layout, of_a_freed_graph, with_parameters_whose_memory_is_freed,
    ],
)  # fmt: skip
@both_runners
def test_unusual_inputs_are_saved(unusual: Callable[[Pair], Tensor]) -> None:
    for find in (Pair.normal, unusual):
        pair = Pair()
        h = find(pair)
        is_saved = restoring.source_of(h, extension.ready()) is None
        assert is_saved == (find is unusual)


def test_a_site_without_gradients_needs_no_source() -> None:
    h = Pair().norm(image())
    with torch.no_grad():
        assert restoring.source_of(h) is None


@both_runners
@pytest.mark.parametrize("around", ["norm", "site", "both"])
def test_with_hooks_of_saved_tensors_the_input_is_saved_and_nothing_is_unpacked_in_the_forward(around: str) -> None:
    pair, y, packed = Pair(), image(), Packed()
    if around == "both":
        with packed.hooks():
            x = pair(y)
    elif around == "norm":
        with packed.hooks():
            h = pair.norm(y)
        x = pair.site(h)
    else:
        h = pair.norm(y)
        with packed.hooks():
            x = pair.site(h)
    assert packed.unpacked == 0
    expected = gradients(pair(y), y, pair)
    for one, other in zip(gradients(x, y, pair), expected, strict=True):
        assert error(one, other) < 2e-3
    assert packed.unpacked > 0


def test_a_compiled_model_is_one_graph() -> None:
    pair, y = Pair(), image()
    flexact.Schedule(pair, network_steps=10_000)
    expected = gradients(pair(y), y, pair)
    compiled = torch.compile(pair, backend="aot_eager", fullgraph=True)
    for one, other in zip(gradients(compiled(y), y, pair), expected, strict=True):
        assert error(one, other) < 2e-3


@both_runners
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("around", ["norm", "site", "both"])
def test_activation_checkpointing_recomputes_in_the_backward_only(around: str, reentrant: bool) -> None:
    pair, y = Pair(), image()
    assert pair.norm.num_batches_tracked is not None
    if around == "both":
        x = checkpoint(pair, y, use_reentrant=reentrant)
    elif around == "norm":
        x = pair.site(checkpoint(pair.norm, y, use_reentrant=reentrant))
    else:
        x = checkpoint(pair.site, pair.norm(y), use_reentrant=reentrant)
    assert int(pair.norm.num_batches_tracked) == 1
    x.float().square().sum().backward()
    found = [tensor.grad for tensor in (y, *pair.parameters())]
    y.grad = None
    pair.zero_grad()
    pair(y).float().square().sum().backward()
    for one, other in zip(found, (y, *pair.parameters()), strict=True):
        assert error(one, other.grad) < 2e-3


def test_without_a_kernel_torch_computes_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, y = Pair(), image("channels last")
    expected = gradients(pair(y), y, pair)

    def fail(y: Tensor) -> Any:
        raise CannotBuild("_restore: OSError: no compiler")

    monkeypatch.setattr(restoring, "passes", fail)
    monkeypatch.setattr(dispatch, "_broken", {})
    with pytest.warns(UserWarning, match="failed to build"):
        found = gradients(pair(y), y, pair)
    for one, other in zip(found, expected, strict=True):
        assert error(one, other) < 2e-3
    dispatch._broken.clear()


def kept_bytes(network: nn.Module) -> int:
    """Returns how many bytes a forward in bfloat16 leaves allocated."""
    y = torch.randn(8, 3, 16, 16).to(memory_format=torch.channels_last)
    network = network.to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        network(y).sum().backward()  # the first call allocates what stays
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            out = network(y)
    assert out.requires_grad
    return sum(event.self_cpu_memory_usage for event in profiled.events())


@both_runners
@pytest.mark.parametrize("name", BLOCKS)
def test_a_resnet_saves_less_than_the_sum_of_its_inputs_and_outputs(
    name: str, saving: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block with ReLU saves the inputs of two convolutions and of two batch norms. Of its two sites one follows a
    batch norm, and the other an addition, after which only a fused site saves nothing more."""
    # No kernel runs, because what is allocated does not depend on values.
    monkeypatch.setattr(Launches, "__call__", lambda *_: None)
    monkeypatch.setattr(interpreted_extension.Kernels, "launch", lambda *_: None)

    def routed(fuse: bool) -> int:
        return kept_bytes(flexact.convert(ResNet(BLOCKS[name], width=16), where="layer*", fuse=fuse))

    relu = kept_bytes(ResNet(BLOCKS[name], width=16))
    default, fused = routed(False), routed(True)
    saving()
    before = routed(False)
    assert fused < 1.02 * relu
    assert 1.3 * relu < before < 1.5 * relu
    assert default - relu < 0.55 * (before - relu)
