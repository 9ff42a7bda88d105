"""Tests of the Triton kernels against the reference implementation in float64: under the interpreter, or on a GPU.

The interpreter takes about a tenth of a second per program, so tensors are small. Tests that need many programs lower
the number that a launch may have. -m gpu runs the tests on a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flexact.candidates.registry import lookup, register_candidate
from flexact.ops import dispatch, reference, routed_activation, runs_fused
from flexact.ops.blending import Blending
from flexact.ops.triton import routed as triton
from flexact.ops.triton import tiles
from flexact.ops.triton.basis import has_form

FIVE = ("relu", "sigmoid", "tanh", "leaky_relu", "identity")
SIXTEEN = (
    *FIVE, "gelu", "silu", "mish", "elu", "selu", "softplus", "hardswish", "relu6", "softsign", "relu_squared", "sine"
)  # fmt: skip
MORE = (
    "hardsigmoid", "hardtanh", "logsigmoid", "tanhshrink", "hardshrink", "softshrink", "gelu_tanh", "quick_gelu",
    "clipped_gelu", "hard_mish", "laplace", "sqrt_softplus", "star_relu", "snake"
)  # fmt: skip
ALL = (*SIXTEEN, *MORE)
HALF = {torch.bfloat16: 1e-2, torch.float16: 1e-2}

pytestmark = [
    pytest.mark.usefixtures("triton_kernels"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # the interpreter's, at a NaN
]


class Result(NamedTuple):
    x: Tensor
    statistics: Tensor
    to_h: Tensor
    to_logits: Tensor


@dataclass(frozen=True)
class Case:
    """One call of the operation. logits and alive: (rows, K)."""

    h: Tensor
    delta: Tensor
    logits: Tensor
    alive: Tensor
    names: tuple[str, ...]
    hard: bool = False
    channel_dim: int = 1
    temperature: float = 0.7

    @property
    def rows(self) -> int:
        return self.logits.shape[0]

    def probabilities(self) -> Tensor:
        """Returns p in float64, without noise."""
        log_pi = torch.log_softmax(self.logits.double().masked_fill(~self.alive, -torch.inf), -1)
        return torch.softmax(log_pi / self.temperature, -1)

    def run(self, statistics: bool = True) -> Result:
        h, logits = self.h.detach().requires_grad_(), self.logits.flatten().requires_grad_()
        p = self.probabilities().float()
        weights = nn.functional.one_hot(p.argmax(-1), p.shape[-1]).to(p.dtype) if self.hard else p
        alive = torch.nonzero(self.alive.any(0)).flatten().tolist()
        temperature = torch.tensor(self.temperature, device=h.device)
        x, gathered = routed_activation(
            h, logits, weights, p, temperature, self.names, alive, self.channel_dim, statistics
        )
        to_h, to_logits = torch.autograd.grad(x, (h, logits), self.delta)
        return Result(x.detach(), gathered, to_h, to_logits.view(self.logits.shape))

    def exact(self) -> Result:
        """Computes the same with the reference implementation and autograd, in float64. Statistics are those of
        candidates that are alive in some row.
        """
        h, logits = self.h.detach().double().requires_grad_(), self.logits.double().requires_grad_()
        x = reference.routed_activation(
            h, logits, torch.zeros_like(logits), self.temperature, self.names, self.alive, self.hard, self.channel_dim
        )
        to_h, to_logits = torch.autograd.grad(x, (h, logits), self.delta.double())
        sensitivity = reference.mean_sensitivity(h, self.names, self.rows, self.channel_dim)
        return Result(x.detach(), sensitivity * self.alive.any(0), to_h, to_logits)

    def largest_inner_product(self) -> float:
        """Returns max |⟨δ, a_k⟩|/τ: the gradient of the logits is a difference of such terms."""
        h, delta = self.h.double(), self.delta.double()
        products = [self._by_row(delta * lookup(name).function(h)).sum(1) for name in self.names]
        return float(torch.stack(products).abs().max()) / self.temperature

    def _by_row(self, values: Tensor) -> Tensor:
        return values.reshape(1, -1) if self.rows == 1 else values.movedim(self.channel_dim, 0).reshape(self.rows, -1)

    def check(self, result: Result | None = None) -> None:
        result, exact = self.run() if result is None else result, self.exact()
        assert (result.x.dtype, result.x.shape) == (self.h.dtype, self.h.shape)
        assert (result.to_h.dtype, result.to_h.shape) == (self.h.dtype, self.h.shape)
        assert error(result.x, exact.x) < HALF.get(self.h.dtype, 1e-6)
        assert error(result.to_h, exact.to_h) < HALF.get(self.h.dtype, 1e-6)
        # Sums are in float32 for any dtype of h, but a GPU evaluates with fewer bits in half precision.
        summed = 1e-2 if self.h.dtype in HALF and self.h.is_cuda else 1e-6
        assert error(result.statistics, exact.statistics) < summed
        assert float((result.to_logits - exact.to_logits).abs().max()) < summed * self.largest_inner_product()


def error(ours: Tensor, exact: Tensor) -> float:
    """Asserts a small relative error in the Euclidean norm, with 0.1 as the least reference (tails such as gelu
    below −4).
    """
    return float((ours.double() - exact).norm() / exact.norm().clamp(min=max(0.1 * exact.numel() ** 0.5, 1e-30)))


def case(h: Tensor, names: tuple[str, ...], rows: int = 1, dropped: float = 0.0, seed: int = 0, **options: Any) -> Case:
    """Returns a case with random logits and upstream gradient. Each candidate of each row is dropped with some
    probability.
    """
    generator = torch.Generator().manual_seed(seed)
    delta = torch.randn(h.shape, generator=generator) + 0.5  # so that no inner product is a small difference
    alive = torch.rand(rows, len(names), generator=generator) >= dropped
    alive[torch.arange(rows), torch.randint(len(names), (rows,), generator=generator)] = True
    logits = torch.randn(rows, len(names), generator=generator)
    return Case(h, delta.to(h.device, h.dtype), logits.to(h.device), alive.to(h.device), names, **options)


def spread(*shape: int, seed: int = 0) -> Tensor:
    """Returns numbers from −9 to 9, in random order."""
    size = torch.Size(shape).numel()
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    return torch.linspace(-9, 9, size)[order].reshape(shape)


def partner(name: str) -> str:
    """Returns another candidate: the next in the list."""
    return ALL[(ALL.index(name) + 1) % len(ALL)]


# Candidates and dtypes


@pytest.mark.parametrize("name", ALL[::2])
def test_a_candidate_and_its_neighbour_in_float32(name: str, device: torch.device) -> None:
    case(spread(13, 7).to(device), (name, partner(name))).check()


@pytest.mark.parametrize(("name", "dtype"), [*zip(ALL[::2], [*HALF] * 8, strict=False)], ids=str)
def test_a_candidate_and_its_neighbour_in_half_precision(name: str, dtype: torch.dtype, device: torch.device) -> None:
    case(spread(13, 7).to(device, dtype), (name, partner(name))).check()


@pytest.mark.parametrize("names", [SIXTEEN, MORE], ids=["sixteen", "more"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_the_maximum_number_of_candidates_of_a_site(
    dtype: torch.dtype, names: tuple[str, ...], device: torch.device
) -> None:
    case(spread(17, 11).to(device, dtype), names).check()


@pytest.mark.parametrize("seed", range(3))
def test_any_subset_of_candidates_alive(seed: int, device: torch.device) -> None:
    case(spread(9, 8).to(device), (SIXTEEN, MORE)[seed % 2], dropped=0.6, seed=seed).check()


@pytest.mark.parametrize("hard", [False, True], ids=["soft", "hard"])
def test_each_channel_has_its_own_alive_candidates(hard: bool, device: torch.device) -> None:
    case(spread(21, 3).to(device), MORE if hard else SIXTEEN, rows=3, dropped=0.6, hard=hard).check()


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_inputs_of_any_scale(scale: float, device: torch.device) -> None:
    case(scale / 9 * spread(50).to(device), FIVE).check()


def test_a_hard_pick_passes_the_gradient_straight_through(device: torch.device) -> None:
    case(spread(30).to(device), FIVE, hard=True).check()


@pytest.mark.parametrize("temperature", [0.05, 1.0, 20.0])
def test_temperatures(temperature: float, device: torch.device) -> None:
    case(spread(30).to(device), FIVE, temperature=temperature).check()


# One candidate alone


def alone(name: str, h: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the value and the derivative of a candidate that is the only one alive."""
    h, one = h.detach().requires_grad_(), torch.ones(1, 1, device=h.device)
    x, _ = routed_activation(h, one.flatten(), one, one, torch.ones((), device=h.device), (name,), (0,))
    (slope,) = torch.autograd.grad(x.sum(), h)
    return x.detach(), slope


def torchs_own(name: str, h: Tensor) -> tuple[Tensor, Tensor]:
    h = h.detach().requires_grad_()
    x = lookup(name).module()(h)
    (slope,) = torch.autograd.grad(x.sum(), h)
    return x.detach(), slope


@pytest.mark.parametrize("name", ALL)
def test_kinks_have_the_derivative_of_torchs_backward(name: str, device: torch.device) -> None:
    h = torch.tensor([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, -2.0, 3.0, -3.0, 6.0, 10.0], device=device)
    for ours, theirs in zip(alone(name, h), torchs_own(name, h.double()), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=5e-7)


@pytest.mark.parametrize("name", ALL)
def test_extreme_values_do_not_overflow(name: str, device: torch.device) -> None:
    h = torch.tensor([1e4, -1e4, 100.0, -100.0, 1e-30, -1e-30], device=device)
    exact = torchs_own(name, h.double())
    for ours, theirs in zip(alone(name, h), exact, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-7)


def test_a_sine_is_accurate_after_any_number_of_periods(device: torch.device) -> None:
    h = torch.tensor([3.0, 105.0, 1e5, 106000.0, -1e6, 3e7, -1e12, 1e30], device=device)
    for ours, theirs in zip(alone("sine", h), torchs_own("sine", h.double()), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=2e-7)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_sine_in_half_precision_is_accurate_to_11_bits_for_thousands_of_periods(
    dtype: torch.dtype, device: torch.device
) -> None:
    sizes = torch.logspace(-4, 4.8, 301, dtype=torch.float64)
    h = torch.cat([sizes, -sizes]).to(device, dtype)
    for ours, theirs in zip(alone("sine", h), torchs_own("sine", h.double()), strict=True):
        size = torch.where(h.double().abs() < 0.1, theirs.abs(), theirs.abs().clamp(min=0.1))  # near 0 the value's own
        rounding = torch.finfo(dtype).eps  # the interpreter rounds towards 0
        assert bool(((ours.double() - theirs).abs() <= (rounding + 2**-11) * size).all())


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_a_square_that_overflows_is_infinite_and_its_slope_is_finite(dtype: torch.dtype, device: torch.device) -> None:
    above = 300.0 if dtype == torch.float16 else 2e19
    h = torch.tensor([above, -above, 2.0], device=device, dtype=dtype)
    value, slope = alone("relu_squared", h)
    assert value.tolist() == [torch.inf, 0.0, 4.0]
    assert torch.equal(slope, 2 * h.clamp(min=0))


@pytest.mark.parametrize("name", ALL)
def test_nan_and_infinity_pass_as_through_the_function_itself(name: str, device: torch.device) -> None:
    h = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0], device=device)
    if "gelu" in name:
        h = h[[0, 3]]  # at ±∞ torch's own implementations differ with the device and the vector width
    torch.testing.assert_close(alone(name, h)[0], torchs_own(name, h)[0], equal_nan=True)


@pytest.mark.parametrize("names", [SIXTEEN, MORE], ids=["sixteen", "more"])
def test_nan_stays_where_it_is(names: tuple[str, ...], device: torch.device) -> None:
    h = spread(40).to(device)
    clean = case(h, names).run(0)
    h[7] = torch.nan
    result = case(h, names).run(0)
    for ours, before in ((result.x, clean.x), (result.to_h, clean.to_h)):
        assert ours.isnan().nonzero().flatten().tolist() == [7]
        assert torch.equal(ours.nan_to_num(), before.where(~ours.isnan(), 0.0))


# Shapes and layouts

RANDOM = Callable[..., Tensor]
DENSE: dict[str, Callable[[RANDOM], Tensor]] = {
    "contiguous": lambda randn: randn(2, 3, 5, 7),
    "channels last": lambda randn: randn(2, 3, 5, 7).to(memory_format=torch.channels_last),
    "transposed": lambda randn: randn(7, 3, 4).transpose(0, 2),
    "permuted": lambda randn: randn(4, 5, 3).permute(1, 2, 0),
    "from the middle of memory": lambda randn: randn(2, 5, 3, 2)[1],
    "not aligned": lambda randn: randn(46)[1:].view(5, 3, 3),
    "one channel": lambda randn: randn(5, 1, 3),
    "one element": lambda randn: randn(1, 1),
    "channels alone": lambda randn: randn(1, 3),
}
GAPPED: dict[str, Callable[[RANDOM], Tensor]] = {
    "slice": lambda randn: randn(4, 6, 5)[:, ::2],
    "transposed slice": lambda randn: randn(5, 3, 8)[:, :, ::2].transpose(0, 2),
    "expanded": lambda randn: randn(4, 3, 1).expand(4, 3, 5),
}


def laid_out(layout: str, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    return {**DENSE, **GAPPED}[layout](randn)


@pytest.mark.parametrize("layout", [*DENSE, *GAPPED])
def test_any_layout(layout: str, device: torch.device) -> None:
    h = laid_out(layout, device)
    per_channel = layout not in ("one element", "from the middle of memory", "expanded")
    one = case(h, ("relu", "tanh", "elu"), h.shape[1] if per_channel else 1)
    result = one.run()
    one.check(result)
    if layout in DENSE:
        assert result.x.stride() == result.to_h.stride() == h.stride()


class Copies(TorchDispatchMode):
    """Counts the operations that copy a tensor of a size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        copying = ("clone", "copy_", "_to_copy", "contiguous")
        if func.overloadpacket.__name__ in copying and result.numel() == self.size:
            self.count += 1
        return result


@pytest.mark.parametrize("layout", [*DENSE, *GAPPED])
def test_dense_tensors_are_not_copied_and_others_are_copied_once(layout: str, device: torch.device) -> None:
    h, p, temperature = laid_out(layout, device), torch.full((1, 2), 0.5, device=device), torch.ones((), device=device)
    delta = torch.ones_like(h)  # the upstream gradient is as dense as the output
    blending = Blending(p, p, temperature, ("relu", "tanh"), (0, 1), 1, False)
    with Copies(h.numel()) as forward:
        triton.forward(h, blending)
    with Copies(h.numel()) as backward:
        triton.backward(delta, h, blending, True)
    assert forward.count == (layout in GAPPED)
    assert backward.count == (layout in GAPPED) or layout == "transposed slice"


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 1, 1)])
def test_small_shapes(shape: tuple[int, ...], device: torch.device) -> None:
    one = case(spread(*shape).to(device), ("relu", "sigmoid"))
    result = one.run()
    if one.h.numel() > 0:
        one.check(result)
    assert result.x.shape == result.to_h.shape == shape
    assert result.statistics.isfinite().all()
    assert result.to_logits.any() == (one.h.numel() > 0)


@pytest.mark.parametrize("rows", [1, 3], ids=["layer", "channel"])
def test_an_empty_tensor_has_no_statistics(rows: int, device: torch.device) -> None:
    result = case(torch.randn(0, 3).to(device), FIVE, rows).run()
    assert result.statistics.shape == (rows, 5)
    assert not result.statistics.any()
    assert not result.to_logits.any()


@pytest.mark.parametrize("channel_dim", [0, 1, 2, -1, -2, -3])
def test_channels_in_any_dimension(channel_dim: int, device: torch.device) -> None:
    h = spread(3, 4, 2).to(device)
    case(h, ("relu", "silu"), h.shape[channel_dim], channel_dim=channel_dim).check()


@pytest.mark.parametrize("channel_dim", [0, -1])
def test_the_channels_of_a_vector(channel_dim: int, device: torch.device) -> None:
    case(spread(5).to(device), ("relu", "silu"), rows=5, channel_dim=channel_dim).check()


@pytest.mark.parametrize("size", [1024, 2047, 2048, 2049, 4097])
def test_sizes_around_the_tile_size(size: int, device: torch.device) -> None:
    case(spread(size).to(device), ("relu", "tanh")).check()


@pytest.mark.parametrize(
    ("shape", "channel_dim"),
    [((2, 2, 1030), 1), ((3, 2, 1024), 1), ((20, 33), 1), ((33, 2), 0)],
)
def test_numbers_of_channels_around_the_tile_size(
    shape: tuple[int, ...], channel_dim: int, device: torch.device, tile_sizes: Callable
) -> None:
    tile_sizes(512, 1000)
    h = spread(*shape).to(device)
    h = h.t().contiguous().t() if channel_dim == 0 else h  # the channels are the contiguous dimension
    case(h, ("relu", "tanh"), h.shape[channel_dim], channel_dim=channel_dim).check()


@pytest.mark.parametrize(
    ("shape", "rows", "tile", "programs"),
    [((9, 1024), 1, 1024, 1), ((64, 3, 8), 3, 64, 6), ((64, 3), 3, 64, 3)],
    ids=["layer", "inner", "last"],
)
def test_a_program_processes_several_tiles(
    shape: tuple[int, ...], rows: int, tile: int, programs: int, device: torch.device, tile_sizes: Callable
) -> None:
    tile_sizes(tile, programs)
    one, cut = case(spread(*shape).to(device), ("relu", "tanh"), rows), tiles.Cut(tile, programs)
    walked = tiles.flat(one.h, cut) if rows == 1 else tiles.by_channel(one.h, 1, cut)
    assert walked.splits * walked.block_a < walked.outer
    one.check()


@st.composite
def cases(draw: st.DrawFn, device: torch.device) -> Case:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    step = draw(st.sampled_from([1, 1, 2]))
    h = 3 * torch.randn([step * size for size in shape], generator=generator).to(device)
    h = h[tuple(slice(None, None, step) for _ in shape)]
    h = h.permute(torch.randperm(len(shape), generator=generator).tolist())
    channel_dim = draw(st.integers(-h.dim(), h.dim() - 1))
    rows = h.shape[channel_dim] if draw(st.booleans()) else 1
    names = tuple(draw(st.lists(st.sampled_from(ALL), min_size=2, max_size=4, unique=True)))
    dropped, hard = draw(st.sampled_from([0.0, 0.5])), draw(st.booleans())
    dtype = draw(st.sampled_from([torch.float32, *HALF]))
    return case(h.to(dtype), names, rows, dropped, draw(st.integers(0, 99)), hard=hard, channel_dim=channel_dim)


@settings(max_examples=12)
@given(data=st.data())
def test_any_shape_layout_dtype_and_candidates(data: st.DataObject, device: torch.device) -> None:
    data.draw(cases(device)).check()


# Statistics, saved tensors and requested gradients


@pytest.mark.parametrize("rows", [1, 3], ids=["layer", "channel"])
def test_statistics_are_optional_and_change_nothing_else(rows: int, device: torch.device) -> None:
    one = case(spread(7, 3).to(device), ("relu", "tanh"), rows)
    without, result = one.run(False), one.run()
    assert torch.equal(result.x, without.x)
    assert not result.statistics.requires_grad
    assert without.statistics.numel() == 0
    assert error(result.statistics, one.exact().statistics) < 2e-6


@pytest.mark.parametrize("rows", [1, 4], ids=["layer", "channel"])
def test_two_runs_are_bit_identical(rows: int, device: torch.device) -> None:
    one = case(spread(*((9, 4, 8, 8) if device.type == "cpu" else (64, 4, 128, 128))).to(device), FIVE, rows)
    first, second = one.run(), one.run()
    assert all(torch.equal(ours, again) for ours, again in zip(first, second, strict=True))


@pytest.mark.parametrize("rows", [1, 3], ids=["layer", "channel"])
def test_the_gradient_of_the_logits_is_skipped_if_it_is_not_needed(rows: int, device: torch.device) -> None:
    one = case(spread(7, 3).to(device), ("relu", "tanh"), rows)
    expected, p = one.run(), one.probabilities().float()
    temperature = torch.tensor(one.temperature, device=device)
    blending = Blending(p, p, temperature, one.names, (0, 1), 1, False)
    to_h, *_ = triton.backward(one.delta, one.h, blending, need_logits=False)
    assert torch.equal(to_h, expected.to_h)
    h, logits = one.h.detach().requires_grad_(), one.logits.flatten()
    x, _ = routed_activation(h, logits, p, p, temperature, one.names, (0, 1))
    x.backward(one.delta)
    assert h.grad is not None
    assert torch.equal(h.grad, expected.to_h)


def test_only_the_logits_may_need_a_gradient(device: torch.device) -> None:
    one = case(spread(7, 3).to(device), ("relu", "tanh"))
    logits, p = one.logits.flatten().requires_grad_(), one.probabilities().float()
    x, _ = routed_activation(one.h, logits, p, p, torch.tensor(0.7, device=device), one.names, (0, 1))
    (to_logits,) = torch.autograd.grad(x, logits, one.delta)
    assert torch.equal(to_logits, one.run().to_logits.flatten())


def test_only_the_input_and_small_tensors_are_saved(device: torch.device) -> None:
    one = case(spread(40, 25).to(device), FIVE)
    h, logits, p = one.h.requires_grad_(), one.logits.flatten().requires_grad_(), one.probabilities().float()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        routed_activation(h, logits, p, p, torch.ones((), device=device), FIVE, range(5), statistics=True)
    storages = [tensor.untyped_storage() for tensor in saved]
    large = {storage.data_ptr() for storage in storages if storage.nbytes() > 400}
    assert large == {h.untyped_storage().data_ptr()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_input_and_upstream_gradient_are_never_written_to(dtype: torch.dtype, device: torch.device) -> None:
    one = case(spread(6, 4).to(device, dtype), FIVE)
    before = one.h.clone(), one.delta.clone()
    one.run()
    assert torch.equal(one.h, before[0])
    assert torch.equal(one.delta, before[1])


# Fallback to the closed form


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("Triton must not be asked")


def closed(one: Case) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_forced", "closed_form")
        return one.run()


def test_float64_uses_the_closed_form(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "forward", refuse)
    one = case(spread(20).double().to(device), FIVE)
    result, exact = one.run(), one.exact()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(result, closed(one), strict=True))
    assert error(result.x, exact.x) < 1e-7  # the weights are in float32
    assert result.x.dtype == torch.float64


def test_a_candidate_without_a_triton_form_uses_the_closed_form_and_warns_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton, "forward", refuse)
    has_form.cache_clear()
    register_candidate("wave", torch.sin)
    with caplog.at_level(logging.WARNING, logger="flexact"):
        for name in ("relu", "relu", "tanh"):
            case(spread(20).to(device), (name, "wave")).check()
    (record,) = [record for record in caplog.records if "wave" in record.message]
    assert record.name == "flexact.ops.triton.basis"
    assert "closed form" in record.message


# Extreme values


@pytest.mark.parametrize("name", ["tanh", "elu", "selu"])
def test_small_inputs_are_as_accurate_as_large_ones(name: str, device: torch.device) -> None:
    h = 1e-3 * spread(101).to(device)
    exact = torchs_own(name, h.double())[0]
    assert float((alone(name, h)[0] - exact).norm() / exact.norm()) < 1e-6


@pytest.mark.parametrize("lead", [5.0, 12.0, 25.0])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_gradient_of_the_logits_of_a_site_that_is_sure_is_exact(
    rows: int, lead: float, device: torch.device
) -> None:
    torch.manual_seed(0)
    one = case(torch.randn(4, 3, 5).to(device), FIVE, rows)
    one.logits[:, 0] += lead
    ours, exact = one.run().to_logits.double(), one.exact().to_logits
    torch.testing.assert_close(ours, exact, rtol=1e-3, atol=0)


@pytest.mark.parametrize("unbounded", ["identity", "relu", "silu", "gelu", "mish", "softplus", "hardswish", "sine"])
def test_a_candidate_with_weight_0_does_not_contribute_even_where_it_overflows(
    unbounded: str, device: torch.device
) -> None:
    h = torch.tensor([[torch.inf, 1.0]], device=device).requires_grad_()
    p = torch.tensor([[0.0, 0.5, 0.5], [0.4, 0.3, 0.3]], device=device)
    logits = torch.zeros(6, device=device, requires_grad=True)
    one = torch.ones((), device=device)
    x, _ = routed_activation(h, logits, p, p, one, (unbounded, "sigmoid", "tanh"), range(3))
    assert x[0, 0].item() == 1.0
    to_h, to_logits = torch.autograd.grad(x.sum(), (h, logits))
    assert to_h[0, 0].item() == 0.0
    assert to_logits.isfinite().all()
    assert to_logits[0].item() == 0.0


def test_a_dropped_candidate_does_not_contribute_even_where_it_overflows(device: torch.device) -> None:
    h = torch.tensor([[1e25, 2.0]], device=device).requires_grad_()  # relu_squared is infinite there
    p = torch.tensor([[0.0, 0.5, 0.5]], device=device)
    logits, one = torch.zeros(3, device=device, requires_grad=True), torch.ones((), device=device)
    x, _ = routed_activation(h, logits, p, p, one, ("relu_squared", "sigmoid", "tanh"), (1, 2))
    assert x[0, 0].item() == 1.0
    to_h, to_logits = torch.autograd.grad(x.sum(), (h, logits))
    assert to_h[0, 0].item() == 0.0
    assert to_logits.isfinite().all()


def test_only_alive_candidates_count_and_there_is_room_for_sixteen_columns(device: torch.device) -> None:
    has_form.cache_clear()
    for k in range(15):
        register_candidate(f"wave_{k}", torch.sin)
    waves, h = [f"wave_{k}" for k in range(15)], spread(20).to(device)
    assert not runs_fused(h, ("relu", "tanh", waves[0]), (0, 2))
    assert runs_fused(h, ("relu", "tanh", waves[0]), (0, 1))
    assert runs_fused(h, ("relu", "tanh", *waves[:14]), (0, 1))
    assert not runs_fused(h, ("relu", "tanh", *waves), (0, 1))
