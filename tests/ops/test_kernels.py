"""Tests of the kernels in C and in Triton against the reference implementation in float64.

Triton's interpreter takes about a tenth of a second per program, so tensors are small. -m gpu runs the tests on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexact.candidates.registry import lookup
from flexact.ops import routed_activation
from routed_cases import (
    ALL,
    DENSE,
    FIVE,
    GAPPED,
    HALF,
    MORE,
    SIXTEEN,
    Case,
    case,
    error,
    laid_out,
    spread,
)

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the interpreter's, at NaN


@pytest.fixture(scope="module")
def device(kernel_device: torch.device) -> torch.device:
    return kernel_device


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
        atol = 1e-6 if name == "clipped_gelu" else 5e-7  # the C code uses torch's own gelu in float32
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=atol)


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


@pytest.mark.parametrize("layout", [*DENSE, *GAPPED])
def test_any_layout(layout: str, device: torch.device) -> None:
    h = laid_out(layout, device)
    per_channel = layout not in ("one element", "from the middle of memory", "expanded")
    one = case(h, ("relu", "tanh", "elu"), h.shape[1] if per_channel else 1)
    result = one.run()
    one.check(result)
    if layout in DENSE:
        assert result.x.stride() == result.to_h.stride() == h.stride()


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
def test_the_input_may_be_the_only_one_that_needs_a_gradient(rows: int, device: torch.device) -> None:
    one = case(spread(7, 3).to(device), ("relu", "tanh"), rows)
    p, temperature = one.probabilities().float(), torch.tensor(one.temperature, device=device)
    h, logits = one.h.detach().requires_grad_(), one.logits.flatten()
    x, _ = routed_activation(h, logits, p, p, temperature, one.names, (0, 1))
    x.backward(one.delta)
    assert h.grad is not None
    assert torch.equal(h.grad, one.run().to_h)


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


@pytest.mark.parametrize("infinite", [torch.inf, -torch.inf])
def test_fourteen_candidates_with_weight_0_do_not_contribute_at_infinity(infinite: float, device: torch.device) -> None:
    h = torch.tensor([[infinite, 1.0]], device=device).requires_grad_()
    p = torch.full((2, 16), 1 / 16, device=device)
    p[0] = torch.tensor([0.5 * (name in ("sigmoid", "tanh")) for name in SIXTEEN])
    logits, one = torch.zeros(32, device=device, requires_grad=True), torch.ones((), device=device)
    x, _ = routed_activation(h, logits, p, p, one, SIXTEEN, range(16))
    assert x[0, 0].item() == (1.0 if infinite > 0 else -0.5)
    to_h, to_logits = torch.autograd.grad(x.sum(), (h, logits))
    assert to_h[0, 0].item() == 0.0
    assert to_logits.isfinite().all()


def test_a_dropped_candidate_does_not_contribute_even_where_it_overflows(device: torch.device) -> None:
    h = torch.tensor([[1e25, 2.0]], device=device).requires_grad_()  # relu_squared is infinite there
    p = torch.tensor([[0.0, 0.5, 0.5]], device=device)
    logits, one = torch.zeros(3, device=device, requires_grad=True), torch.ones((), device=device)
    x, _ = routed_activation(h, logits, p, p, one, ("relu_squared", "sigmoid", "tanh"), (1, 2))
    assert x[0, 0].item() == 1.0
    to_h, to_logits = torch.autograd.grad(x.sum(), (h, logits))
    assert to_h[0, 0].item() == 0.0
    assert to_logits.isfinite().all()
