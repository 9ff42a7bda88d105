"""Tests of training on a GPU: bit-identical runs, the reference's losses, torch.compile and CUDA graphs.

Run with `python -m pytest -m gpu tests`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flexact
from flexact import FlexConfig, Policy
from flexact.candidates.registry import lookup
from flexact.ops import dispatch, reference, routed_activation
from flexact.ops.blending import Blending
from flexact.routing import layer
from kernels import using

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.usefixtures("triton_kernels", "full_precision"),
]

GPU = "cuda"
ANNEALED = FlexConfig.paper(commit_at=None)
GENTLE = 1e-4
"""A learning rate at which two runs stay together: at 0.002 a rounding grows to a percent of the loss in 100 steps."""


@pytest.fixture
def full_precision() -> Iterator[None]:
    """Disables TF32, so that float32 has its full precision."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def deterministic() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = before


def resnet(resnets: ModuleType, fuse: bool, width: int = 8, **options: Any) -> nn.Module:
    """Returns a converted ResNet-18 of these channels, in channels-last order."""
    torch.manual_seed(0)
    model = flexact.convert(resnets.SharedResNet(width=width), fuse=fuse, **options)
    return model.to(GPU, memory_format=torch.channels_last)


def batch(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(32, 3, 16, 16, generator=generator).to(GPU, dtype, memory_format=torch.channels_last)
    return images, torch.randint(10, (32,), generator=generator).to(GPU)


def trained(
    model: nn.Module, steps: int, run: Callable[[Tensor], Tensor] | None = None, lr: float = 0.01, batches: int = 4
) -> list[float]:
    """Returns the losses of the model under its policy. `run` is called instead of the model."""
    optimizer = torch.optim.SGD(flexact.param_groups(model, lr=lr), lr=lr, momentum=0.9)
    schedule = flexact.Schedule(model, steps, optimizer)
    losses = []
    for step in range(steps):
        images, labels = batch(step % batches)
        loss = F.cross_entropy((model if run is None else run)(images), labels) + flexact.penalty(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("fuse", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("granularity", ["layer", "channel"])
def test_two_runs_with_one_seed_are_bit_identical(fuse: bool, granularity: Any, resnets: ModuleType) -> None:
    states = []
    for _ in range(2):
        config = FlexConfig(granularity=granularity, policy=Policy(noise=1.0))
        images = torch.randn(2, 3, 16, 16) if granularity == "channel" else None
        model = resnet(resnets, fuse, config=config, example_inputs=images)
        trained(model, 12)
        states.append(model.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=0, atol=0, equal_nan=True)


def by_the_reference(h: Tensor, logits: Tensor, blending: Blending) -> tuple[Tensor, Tensor]:
    """Replaces `activated` by the reference implementation, differentiated by autograd, without noise."""
    _, p, temperature, keys, alive, channel_dim, statistics = blending
    rows, k = p.shape
    left = torch.zeros(rows, k, dtype=torch.bool, device=h.device)
    left[:, list(alive)] = True
    x = reference.routed_activation(
        h, logits.view(rows, k), torch.zeros_like(p), temperature, keys, left, channel_dim=channel_dim
    )
    if not statistics:
        return x, x.new_empty(0)
    return x, reference.mean_sensitivity(h, keys, rows, channel_dim) * left


@pytest.mark.parametrize("fuse", [False, True], ids=["apart", "fused"])
def test_a_hundred_steps_end_at_the_references_loss(
    fuse: bool, resnets: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = FlexConfig.paper(
        policy=Policy.paper(noise=0.0)
    )  # a step of the Schedule follows the sign of a gradient, and so its rounding
    ours = trained(resnet(resnets, fuse, config=config), 100, lr=GENTLE, batches=1)
    assert dispatch.active(GPU).name == "triton"
    monkeypatch.setattr(layer, "activated", by_the_reference)
    with using("closed_form"):
        theirs = trained(resnet(resnets, False, config=config), 100, lr=GENTLE, batches=1)
    assert ours[-1] < 0.9 * ours[0], "it must learn something"
    assert ours[-1] == pytest.approx(theirs[-1], rel=1e-4)


@pytest.mark.parametrize("spelling", ["shared", "functional"])
def test_a_fused_resnet_18_is_extracted_as_the_plain_network(spelling: str, resnets: ModuleType) -> None:
    plain = resnets.SPELLINGS[spelling]
    torch.manual_seed(0)
    model = flexact.convert(plain(width=16), fuse=True).to(GPU, memory_format=torch.channels_last)
    trained(model, 100)
    flexact.commit(model)
    extracted = flexact.extract(model)
    images, _ = batch(99)
    with torch.no_grad():
        ours, theirs = model.eval()(images), extracted.eval()(images)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert list(extracted.state_dict()) == list(plain(width=16).state_dict())
    plain(width=16).load_state_dict(extracted.state_dict(), strict=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_mixed_precision_trains_like_float32(dtype: torch.dtype, resnets: ModuleType) -> None:
    config = FlexConfig.paper(
        policy=Policy.paper(noise=0.0)
    )  # a step of the Schedule follows the sign of a gradient, and so its rounding
    model, duplicate = resnet(resnets, True, config=config), resnet(resnets, True, config=config)

    def in_half(images: Tensor) -> Tensor:
        with torch.autocast(GPU, dtype):  # around the forward only: it caches half-precision weights
            return model(images).float()

    losses = trained(model, 100, in_half, lr=GENTLE, batches=1)
    expected = trained(duplicate, 100, lr=GENTLE, batches=1)
    assert losses[-1] < 0.9 * losses[0]
    assert losses == pytest.approx(expected, rel=0.05)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


# torch.compile and CUDA graphs


@pytest.mark.slow
@pytest.mark.parametrize("fuse", [False, True], ids=["apart", "fused"])
def test_compiled_without_graph_breaks_it_gives_the_same_losses_and_is_not_recompiled(
    fuse: bool, resnets: ModuleType
) -> None:
    torch._dynamo.reset()
    model = resnet(resnets, fuse, config=ANNEALED)
    duplicate = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True)
    seen: list[int] = []

    def run(images: Tensor) -> Tensor:
        # The first step creates the statistics, and the second finds them: two graphs, and no third.
        with torch._dynamo.config.patch(error_on_recompile=len(seen) >= 2):
            seen.append(1)
            return compiled(images)

    losses = trained(model, 20, run, lr=GENTLE)
    assert float(flexact.routing.sites.sites_of(model)[0].temperature) < 0.2
    assert losses == pytest.approx(trained(duplicate, 20, lr=GENTLE), rel=1e-3)
    images, _ = batch(99)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(compiled.eval()(images), model.eval()(images), rtol=1e-3, atol=1e-3)


def test_a_captured_step_equals_the_eager_one(resnets: ModuleType) -> None:
    model = resnet(resnets, True, config=ANNEALED)
    flexact.Schedule(model, 100)
    images, labels = batch(0)

    def step() -> Tensor:
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
            model.zero_grad()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    model.zero_grad(set_to_none=False)
    expected = step().detach()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=False)
    graph.replay()
    torch.testing.assert_close(captured, expected, rtol=1e-5, atol=1e-6)
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for ours, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


# Kernels on a GPU


def one_call(h: Tensor) -> tuple[Tensor, ...]:
    names = ("relu", "tanh", "gelu")
    h = h.detach().requires_grad_()
    logits = torch.zeros(3, device=h.device, requires_grad=True)
    p = torch.tensor([[0.5, 0.3, 0.2]], device=h.device)
    one = torch.ones((), device=h.device)
    x, gathered = routed_activation(h, logits, p, p, one, names, range(3), statistics=True)
    return x.detach(), gathered, *torch.autograd.grad(x.square().sum(), (h, logits))


def test_a_built_kernel_is_launched_directly_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexact.ops.triton import tiles
    from flexact.ops.triton.launch import Launches

    built: list[Launches] = []
    build = Launches._build

    def counted(launches: Launches, *arguments: Any) -> Any:
        built.append(launches)
        return build(launches, *arguments)

    tiles._flat.cache_clear()
    monkeypatch.setattr(Launches, "_build", counted)
    torch.manual_seed(0)
    memory = torch.randn(4097, device=GPU)
    first = one_call(memory[:4096])
    assert len(built) == 2  # the forward and the backward, each with the reduction of its sums
    again = one_call(memory[:4096])
    assert len(built) == 2
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    for h in (memory[1:], memory[:1], memory[:4095], memory[1:].view(64, 64).t()):  # another address, other sizes
        ours = one_call(h)
        with using("closed_form"):
            expected = one_call(h)
        for left, right in zip(ours, expected, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_a_second_gpu_are_computed_there() -> None:
    torch.manual_seed(0)
    h = torch.randn(5000)
    first, second = one_call(h.to("cuda:0")), one_call(h.to("cuda:1"))
    assert torch.cuda.current_device() == 0
    for one, other in zip(first, second, strict=True):
        assert other.device == torch.device("cuda:1")
        assert torch.equal(one.cpu(), other.cpu())


LARGE = {
    "layer": ((2**31 + 5000,), 1),
    "channels last": ((2**29 + 1001, 4), 4),
    "contiguous": ((3, 4, 2**28), 4),
}


@pytest.mark.parametrize("layout", LARGE)
def test_more_elements_than_fit_32_bits(layout: str) -> None:
    shape, rows = LARGE[layout]
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of memory")
    torch.manual_seed(0)
    names = ("relu", "tanh")
    h = torch.empty(shape, dtype=torch.bfloat16, device=GPU).normal_().requires_grad_()
    delta = torch.empty_like(h).normal_()
    logits = torch.zeros(rows * 2, device=GPU, requires_grad=True)
    p, one = torch.softmax(torch.randn(rows, 2, device=GPU), -1), torch.ones((), device=GPU)
    x, gathered = routed_activation(h, logits, p, p, one, names, range(2), statistics=True)
    to_h, to_logits = torch.autograd.grad(x, (h, logits), delta)
    channel = torch.arange(rows, device=GPU).view(-1, *(1,) * (len(shape) - 2)).expand(shape[1:]) if rows > 1 else None
    for start in (0, 2**30 - 500, 2**31 - 500, h.numel() - 1000):
        part = slice(start, start + 1000)
        place = torch.arange(start, start + 1000, device=GPU)
        row = torch.zeros_like(place) if channel is None else channel.flatten()[place % channel.numel()]
        piece = h.detach().view(-1)[part].double().requires_grad_()
        weights = p.double()[row]
        exact = weights[:, 0] * torch.relu(piece) + weights[:, 1] * torch.tanh(piece)
        (slope,) = torch.autograd.grad(exact, piece, delta.view(-1)[part].double())
        for ours, theirs in ((x.detach().view(-1)[part], exact.detach()), (to_h.view(-1)[part], slope)):
            assert float((ours.double() - theirs).norm() / theirs.norm()) < 1e-2
    # relu′ of a normal number is 1 half of the time, and tanh′ is 0.6057 on average.
    torch.testing.assert_close(gathered, torch.tensor([0.5, 0.6057], device=GPU).expand(rows, 2), rtol=1e-3, atol=1e-3)
    assert to_logits.isfinite().all()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_batch_norm_of_more_elements_than_fit_32_bits(layout: torch.memory_format) -> None:
    from flexact.surgery.fused_site import normalised_site

    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of memory")
    torch.manual_seed(0)
    site, norm = (
        flexact.FlexAct(config=FlexConfig(policy=Policy(noise=0.0))).to(GPU),
        nn.BatchNorm2d(64, momentum=1.0).to(GPU),
    )
    y = torch.empty(520, 64, 256, 256, dtype=torch.bfloat16, device=GPU, memory_format=layout).normal_().mul_(2).add_(1)
    x = normalised_site(site, norm, y.requires_grad_())
    (to_y,) = torch.autograd.grad(x, y, torch.ones_like(x))
    torch.testing.assert_close(norm.running_mean, torch.ones_like(norm.running_mean), rtol=0, atol=1e-2)
    torch.testing.assert_close(norm.running_var, 4 * torch.ones_like(norm.running_var), rtol=1e-2, atol=0)
    p = torch.full((5,), 0.2, device=GPU)
    for sample in (0, 519):
        h = (y[sample].detach().float() - 1) / 2
        exact = sum(p[k] * lookup(name).function(h) for k, name in enumerate(site.candidates))
        assert float((x[sample].detach().float() - exact).norm() / exact.norm()) < 1e-2
    # The gradient of batch norm sums to zero over each channel.
    total, size = (one.sum((0, 2, 3), dtype=torch.float32) for one in (to_y, to_y.abs()))
    assert bool((total.abs() < 1e-2 * size).all())
