"""Tests of fused batch norm, residual and routing, against nn.BatchNorm2d and autograd in float64.

On the CPU, Triton's interpreter takes a tenth of a second per program, so tensors are small. -m gpu runs the tests on
a GPU.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flexact.candidates.registry import lookup
from flexact.ops import reference
from flexact.ops.blending import Blending
from flexact.ops.triton import routed, tiles
from flexact.ops.triton.basis import blend
from flexact.ops.triton.moments import moments as batch_moments
from flexact.ops.triton.routed import Norm, Preactivation
from routed_cases import SIXTEEN

NAMES = ("relu", "tanh", "leaky_relu", "silu")
K = len(NAMES)
TEMPERATURE = 0.7
LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}
RESIDUALS = ("none", "plain", "normalised")

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter's


def batch_norm_2d(channels: int, seed: int, affine: bool = True, **options: Any) -> nn.BatchNorm2d:
    """A batch norm whose parameters and statistics differ from the initial ones."""
    torch.manual_seed(seed)
    norm = nn.BatchNorm2d(channels, affine=affine, **options)
    for name, tensor in (*norm.named_parameters(), *norm.named_buffers()):
        if tensor.is_floating_point():
            (nn.init.uniform_ if "var" in name else nn.init.normal_)(tensor)
    return norm


@dataclass
class Case:
    """One site after a batch norm. logits: (rows, K), in float64."""

    y: Tensor
    delta: Tensor
    norm: nn.BatchNorm2d
    logits: Tensor
    residual: Tensor | None = None
    residual_norm: nn.BatchNorm2d | None = None
    names: tuple[str, ...] = NAMES
    terms: float = 0.0

    def exact(self) -> dict[str, Tensor]:
        """Computes everything with torch's modules and autograd, in float64."""
        norm, other = copy.deepcopy(self.norm).double(), copy.deepcopy(self.residual_norm)
        y, logits = self.y.double().requires_grad_(), self.logits.clone().requires_grad_()
        leaves = {"y": y, "logits": logits, **{f"norm.{name}": leaf for name, leaf in norm.named_parameters()}}
        h = norm(y)
        if self.residual is not None:
            leaves["residual"] = residual = self.residual.double().requires_grad_()
            if other is not None:
                h = h + other.double()(residual)
                leaves |= {f"residual_norm.{name}": leaf for name, leaf in other.named_parameters()}
            else:
                h = h + residual
        alive = torch.ones_like(logits, dtype=torch.bool)
        x = reference.routed_activation(h, logits, torch.zeros_like(logits), TEMPERATURE, self.names, alive)
        gradients = torch.autograd.grad(x, list(leaves.values()), self.delta.double())
        sensitivity = reference.mean_sensitivity(h, self.names, logits.shape[0])
        # The gradient of the logits is a difference of inner products, which cancel. A GPU's exponentials are off by
        # some units in the last place, so it is off by up to 2e-6 of itself, and by less than 1e-6 of those products.
        dims = (0, 1, 2, 3) if logits.shape[0] == 1 else (0, 2, 3)
        inner = torch.stack([(self.delta * lookup(name).function(h.detach())).sum(dims) for name in self.names], -1)
        self.terms = float((self.probabilities().double() / TEMPERATURE * inner).norm())
        found = {
            "x": x.detach(),
            "statistics": sensitivity,
            **_running("norm", norm),
            **_running("residual_norm", other),
        }
        return found | {f"to {name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}

    def run(self) -> dict[str, Tensor]:
        """Computes the same with the kernels. The running statistics are those after the forward."""
        norm, other = copy.deepcopy(self.norm), copy.deepcopy(self.residual_norm)
        own = normalises(norm, self.y)
        others = None if other is None or self.residual is None else normalises(other, self.residual)
        preactivation = Preactivation(own, self.residual, others, uses_batch(norm))
        blending = self.blending()
        x, statistics = routed.forward(self.y, blending, preactivation)
        to_y, to_residual, results = routed.backward(self.delta, self.y, blending, True, preactivation)
        to_bias, to_weight, *to_residual_weight, to_logits = routed.split_results(
            results, self.y.shape[1], others is not None
        )
        found = {"x": x, "statistics": statistics, **_running("norm", norm), **_running("residual_norm", other)}
        found |= {"to y": to_y, "to logits": to_logits.view_as(self.logits)}
        if self.residual is not None:
            found["to residual"] = to_residual
        if norm.affine:
            found |= {"to norm.weight": to_weight, "to norm.bias": to_bias}
        if other is not None and other.affine:
            found |= {"to residual_norm.weight": to_residual_weight[0], "to residual_norm.bias": to_bias}
        return found

    def blending(self, statistics: bool = True) -> Blending:
        p, temperature = self.probabilities(), torch.tensor(TEMPERATURE, device=self.y.device)
        return Blending(p, p, temperature, self.names, tuple(range(len(self.names))), 1, statistics)

    def probabilities(self) -> Tensor:
        return torch.softmax(self.logits / TEMPERATURE, -1).float()

    def check(self, tolerance: float = 1e-6) -> None:
        ours, exact = self.run(), self.exact()
        assert ours.keys() == exact.keys()
        for name, found in ours.items():
            assert found.shape == exact[name].shape
            # Sums are in float32 for any dtype of y, but a GPU evaluates with fewer bits in half precision.
            exactly = name not in ("x", "to y", "to residual") and (not self.y.is_cuda or "running" in name)
            allowed = min(tolerance, 3e-6) if exactly or tolerance < 1e-5 else tolerance
            least = self.terms if name == "to logits" and self.y.is_cuda else 0.0
            assert error(found, exact[name], least) < allowed, name
        assert ours["x"].stride() == ours["to y"].stride() == self.y.stride()
        assert ours["x"].dtype == ours["to y"].dtype == self.y.dtype


def _running(name: str, norm: nn.BatchNorm2d | None) -> dict[str, Tensor]:
    if norm is None or norm.running_mean is None or norm.running_var is None:
        return {}
    return {f"{name}.running_mean": norm.running_mean.clone(), f"{name}.running_var": norm.running_var.clone()}


def uses_batch(norm: nn.BatchNorm2d) -> bool:
    return norm.training or not norm.track_running_stats


def normalises(norm: nn.BatchNorm2d, y: Tensor) -> Norm:
    """Returns the statistics with which a batch norm normalises y."""
    tracked = norm.running_mean, norm.running_var, norm.num_batches_tracked
    running = None if norm.running_mean is None else tracked
    if not uses_batch(norm):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        moments = torch.stack([norm.running_mean, (norm.running_var + norm.eps).rsqrt()])
        return Norm(moments, norm.weight, norm.bias)
    return Norm(batch_moments(y, running, norm.momentum, norm.eps), norm.weight, norm.bias)


def error(ours: Tensor, exact: Tensor, least: float = 0.0) -> float:
    """Asserts a small relative error in the Euclidean norm, with respect to the exact tensor or a larger one."""
    return float((ours.double() - exact.double()).norm() / exact.double().norm().clamp(min=max(least, 1e-30)))


def case(
    device: torch.device,
    layout: str = "contiguous",
    residual: str = "none",
    rows: int = 1,
    training: bool = True,
    affine: bool = True,
    shape: tuple[int, ...] = (4, 3, 5, 7),
    dtype: torch.dtype = torch.float32,
    names: tuple[str, ...] = NAMES,
    **options: Any,
) -> Case:
    generator = torch.Generator().manual_seed(0)

    def randn(mean: float, std: float) -> Tensor:
        values = std * torch.randn(shape, generator=generator) + mean
        return values.to(device, dtype).contiguous(memory_format=LAYOUTS[layout])

    norms = [batch_norm_2d(shape[1], seed, affine, **options).train(training).to(device) for seed in (1, 2)]
    logits = torch.randn(rows, len(names), generator=generator, dtype=torch.float64).to(device)
    y, delta, other = randn(3.0, 2.0), randn(0.5, 1.0), randn(-1.0, 1.0)
    if residual == "none":
        return Case(y, delta, norms[0], logits, names=names)
    return Case(y, delta, norms[0], logits, other, norms[1] if residual == "normalised" else None, names)


MODES = list(itertools.product(LAYOUTS, RESIDUALS, [True, False]))
# Every pair of choices occurs; all 48 combinations would take a minute under the interpreter.
AFFINE_AND_ROWS = [((i // 6 + i // 2 + i) % 2 == 0, 1 if (i // 6 + i) % 2 else 3) for i in range(len(MODES))]


@pytest.mark.parametrize(
    ("layout", "residual", "training", "affine", "rows"),
    [(*mode, *more) for mode, more in zip(MODES, AFFINE_AND_ROWS, strict=True)],
)
def test_values_gradients_and_running_statistics(
    layout: str, residual: str, training: bool, affine: bool, rows: int, device: torch.device
) -> None:
    case(device, layout, residual, rows, training, affine).check()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize(("layout", "residual", "training"), MODES)
def test_more_tiles_and_combinations_on_a_gpu(layout: str, residual: str, training: bool, rows: int) -> None:
    case(torch.device("cuda"), layout, residual, rows, training, shape=(16, 70, 9, 13)).check(2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("residual", "layout", "rows"),
    [
        ("none", "channels last", 1),
        ("none", "contiguous", 3),
        ("plain", "contiguous", 1),
        ("normalised", "channels last", 3),
    ],
)
def test_sixteen_candidates(residual: str, layout: str, rows: int, dtype: torch.dtype, device: torch.device) -> None:
    one = case(device, layout, residual, rows, dtype=dtype, names=SIXTEEN)
    assert blend(SIXTEEN, tuple(range(16))).has_many
    one.check(1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("residual", ["none", "normalised"])
def test_half_precision(residual: str, dtype: torch.dtype, device: torch.device) -> None:
    case(device, "channels last", residual, dtype=dtype).check(1e-2)


def test_one_norm_with_parameters_and_one_without(device: torch.device) -> None:
    for own, other in ((True, False), (False, True)):
        one = case(device, "channels last", "normalised", affine=own)
        one.residual_norm = batch_norm_2d(3, 2, other).to(device)
        one.check()


@pytest.mark.parametrize("training", [True, False])
def test_a_norm_without_running_statistics_uses_those_of_the_batch(training: bool, device: torch.device) -> None:
    case(device, "channels last", "plain", training=training, track_running_stats=False).check()


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((2, 1, 9, 130), "contiguous"),
        ((3, 2, 33, 32), "contiguous"),
        ((2, 2, 1, 1), "contiguous"),
        ((2, 66, 1, 2), "channels last"),
        ((300, 2, 2, 1), "channels last"),
    ],
)
def test_shapes_that_tiles_do_not_divide(shape: tuple[int, ...], layout: str, device: torch.device) -> None:
    # With two values per channel, ŷ is always ±1: the gradient of y is a difference of nearly equal numbers.
    one = case(device, layout, shape=shape)
    if shape == (2, 2, 1, 1):
        one.norm.eps = 1.0
    one.check(2e-6)


def test_a_program_processes_several_tiles(device: torch.device, tile_sizes: Callable) -> None:
    tile_sizes(64, 4)
    for layout in LAYOUTS:
        one = case(device, layout, "normalised", rows=2, shape=(12, 2, 4, 4))
        walk = tiles.by_channel(one.y, 1, tiles.MOMENTS)
        assert walk.splits * walk.block_a < walk.outer
        one.check()


def test_the_upstream_gradient_may_have_another_layout(device: torch.device) -> None:
    one = case(device, "channels last")
    one.delta = one.delta.contiguous()
    one.check()
    one.delta = one.delta[:, :, :1].expand_as(one.y)
    one.check()


def test_two_runs_are_bit_identical(device: torch.device) -> None:
    one = case(device, "channels last", "normalised", shape=(8, 3, 5, 7) if device.type == "cpu" else (64, 48, 32, 32))
    first, second = one.run(), one.run()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_inputs_are_never_overwritten(device: torch.device) -> None:
    for residual, names in itertools.product(RESIDUALS, (NAMES, SIXTEEN)):
        one = case(device, "channels last", residual, names=names)
        tensors = [tensor for tensor in (one.y, one.delta, one.residual, one.norm.weight) if tensor is not None]
        before = [tensor.clone() for tensor in tensors]
        one.run()
        assert all(torch.equal(tensor, copied) for tensor, copied in zip(tensors, before, strict=True))


def test_without_the_gradient_to_the_logits_the_others_are_the_same(device: torch.device) -> None:
    one = case(device, "channels last", "normalised", rows=3)
    own, other = (normalises(norm, one.y) for norm in (one.norm, one.residual_norm))
    arguments, preactivation = (one.delta, one.y, one.blending()), Preactivation(own, one.residual, other, True)
    with_it, without = (routed.backward(*arguments, need, preactivation) for need in (True, False))
    assert all(torch.equal(left, right) for left, right in zip(with_it[:2], without[:2], strict=True))
    sums, _ = with_it[2].split([3 * 3, 3 * K])
    assert torch.equal(sums, without[2])


@pytest.mark.parametrize("asked", [False, True])
def test_statistics(asked: bool, device: torch.device) -> None:
    one = case(device, "channels last", "plain", rows=3)
    preactivation = Preactivation(normalises(one.norm, one.y), one.residual, None, True)
    _, gathered = routed.forward(one.y, one.blending(asked), preactivation)
    if not asked:
        assert gathered.numel() == 0
        return
    h = copy.deepcopy(one.norm).double()(one.y.double()) + one.residual
    assert error(gathered, reference.mean_sensitivity(h, NAMES, 3)) < 2e-6


def test_nan_stays_in_its_channel(device: torch.device) -> None:
    one = case(device, "channels last", rows=3)
    clean = one.run()
    one.y[0, 1, 0, 0] = torch.nan
    ours = one.run()
    for name in ("x", "to y"):
        assert ours[name][:, 1].isnan().all()
        assert torch.equal(ours[name][:, ::2], clean[name][:, ::2])


# Moments


def exact_moments(y: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(y.double(), (0, 2, 3), unbiased=False)
    return mean, (variance + eps).rsqrt()


def check_moments(y: Tensor, tolerance: float = 1e-6, eps: float = 1e-5) -> None:
    found = batch_moments(y, None, 0.1, eps).unbind()
    mean, rstd = exact_moments(y, eps)
    assert bool(((found[0] - mean).abs() < tolerance * (mean.abs() + 1 / rstd)).all())
    assert bool(((found[1] - rstd).abs() < tolerance * rstd).all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (1e3, 1.0), (-1e3, 1e-2), (1e-3, 1e-4), (0.0, 1e4)])
def test_moments_of_any_size(mean: float, std: float, layout: str, device: torch.device) -> None:
    torch.manual_seed(0)
    y = (mean + std * torch.randn(4, 3, 5, 7)).contiguous(memory_format=LAYOUTS[layout]).to(device)
    check_moments(y)


def test_moments_of_a_constant(device: torch.device) -> None:
    found = batch_moments(torch.full((4, 3, 5, 7), 7.3, device=device), None, 0.1, 1e-5)
    torch.testing.assert_close(found[0], torch.full_like(found[0], 7.3))
    torch.testing.assert_close(found[1], torch.full_like(found[1], 1e-5**-0.5))


@pytest.mark.parametrize("momentum", [0.1, 0.5, 1.0, None])
def test_running_statistics_continue_as_torchs(momentum: float | None, device: torch.device) -> None:
    ours, theirs = (batch_norm_2d(3, 0, momentum=momentum).to(device) for _ in range(2))
    for _ in range(3):
        y = torch.randn(4, 3, 5, 7).contiguous(memory_format=torch.channels_last).to(device)
        running = ours.running_mean, ours.running_var, ours.num_batches_tracked
        batch_moments(y, running, momentum, ours.eps)
        theirs(y)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours.running_var, theirs.running_var, rtol=1e-6, atol=1e-7)
    assert torch.equal(ours.num_batches_tracked, theirs.num_batches_tracked)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_moments_where_the_first_element_is_far_from_the_others(layout: str, device: torch.device) -> None:
    torch.manual_seed(0)
    y = (1e3 + torch.randn(16, 2, 32, 32)).contiguous(memory_format=LAYOUTS[layout]).to(device)
    y[0, :, 0, 0] = 0
    check_moments(y, 1e-5)
