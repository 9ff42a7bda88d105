"""Property tests of the C code on any shape, layout, dtype and value, against the reference in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from flexact.candidates.registry import lookup, register_candidate
from flexact.ops import differentiable, dispatch, reference, routed_activation
from flexact.ops.blending import Blending
from flexact.ops.native import generated
from flexact.ops.native import routed as native
from flexact.ops.native.blends import NativeBlends

pytestmark = pytest.mark.skipif(not dispatch.c_compiler(), reason="there is no C compiler")

NAMES = (*native.FUNCTIONS[1:], "hardtanh", "hardshrink")  # the last two have generated code
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
UNDEFINED_AT_INFINITY = frozenset({"gelu", "silu", "mish", "hardswish", "softsign", "gelu_tanh"})
"""torch's own functions are NaN at one of the infinities, or differ with the vector width."""


@pytest.fixture(autouse=True)
def _native() -> Iterator[None]:
    with mock.patch.object(dispatch, "_forced", "native"):
        dispatch.active.cache_clear()
        yield
    dispatch.active.cache_clear()


@st.composite
def layouts(draw: st.DrawFn, numbers: st.SearchStrategy[float], dtype: torch.dtype) -> Tensor:
    """Draws a tensor of up to four dimensions, sliced, permuted or expanded."""
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    step = draw(st.sampled_from([1, 1, 2]))
    memory = [step * size for size in shape]
    size = torch.Size(memory).numel()
    values = draw(st.lists(numbers, min_size=size, max_size=size)) if size <= 24 else [draw(numbers)] * size
    h = torch.tensor(values, dtype=torch.float64).to(dtype).view(memory)
    h = h[tuple(slice(None, None, step) for _ in shape)]
    h = h.permute(draw(st.permutations(range(len(shape)))))
    kind = draw(st.sampled_from(["", "", "expanded", "channels last", "negated"]))
    if kind == "expanded":
        return h.unsqueeze(0).expand(3, *h.shape)
    if kind == "channels last" and h.dim() == 4:
        return h.to(memory_format=torch.channels_last)
    return torch.complex(torch.zeros(h.shape), -h.float()).conj().imag.to(dtype) if kind == "negated" else h


def blending_of(names: list[str], weights: list[float]) -> Blending:
    total = sum(weights)
    p = torch.tensor([[weight / total for weight in weights]])
    return Blending(p, p, torch.tensor(0.7), tuple(names), tuple(range(len(names))), 1, True)


@st.composite
def blendings(draw: st.DrawFn) -> Blending:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=6, unique=True))
    return blending_of(names, draw(st.lists(st.floats(0.01, 1), min_size=len(names), max_size=len(names))))


def exact(h: Tensor, blending: Blending) -> tuple[Tensor, Tensor]:
    """Returns the values and the slopes of the candidates in float64, stacked."""
    wide, pairs = h.double(), []
    for key in blending.keys:
        candidate = lookup(key)
        value = candidate.function(wide)
        pairs.append((value, candidate.derivative(wide, value)))
    return torch.stack([value for value, _ in pairs]), torch.stack([slope for _, slope in pairs])


def assert_near(ours: Tensor, theirs: Tensor, terms: Tensor) -> None:
    """Asserts that sums of terms, (number of terms, ...), are equal up to rounding, unless they may overflow. Subnormal
    numbers may be rounded to 0, as in a process in which a library was loaded that enables this. The float64 slopes
    themselves lose digits where they are small, as in s·(1 − s) for a sigmoid s near 1.
    """
    scale, range_of = terms.abs().sum(0), torch.finfo(ours.dtype)
    allowed = (2e-6 + 2 * range_of.eps) * scale + 2 * range_of.tiny + 2 * torch.finfo(torch.float64).eps
    assert bool(((ours.double() - theirs).abs() <= allowed).logical_or(1.001 * scale >= range_of.max).all())


@settings(max_examples=60)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), blending=blendings())
def test_every_finite_number_in_any_layout(data: st.DataObject, dtype: torch.dtype, blending: Blending) -> None:
    width = 16 if dtype == torch.float16 else 32
    finite = st.floats(width=width, allow_nan=False, allow_infinity=False, allow_subnormal=False)
    h = data.draw(layouts(st.floats(-9, 9, allow_subnormal=False) | finite, dtype))
    delta = torch.linspace(-1, 1, h.numel()).view(h.shape).to(dtype)
    assert native.supports(h, blending)
    x, sensitivities = native.forward(h, blending)
    to_h, to_logits = native.backward(delta, h, blending, True)
    assert (x.shape, x.dtype) == (to_h.shape, to_h.dtype) == (h.shape, dtype)

    values, slopes = exact(h, blending)
    k, p = len(values), blending.probabilities[0].double()
    weights = p.view(-1, *[1] * h.dim())
    fine = values.abs() < torch.finfo(torch.float32).max
    assert_near(x, (weights * values).sum(0), (weights * values).where(fine, torch.inf))
    assert_near(to_h, (weights * slopes).sum(0) * delta.double(), weights * slopes)
    means = slopes.abs().reshape(k, -1).mean(1)
    assert_near(sensitivities[0], means, means.unsqueeze(0))
    products = (values * delta.double()).reshape(k, -1)
    inner = products.sum(1)
    assert_near(to_logits, p * (inner - (p * inner).sum()) / 0.7, products.reshape(-1, 1).expand(-1, k) / 0.7)


@settings(max_examples=40)
@given(
    h=st.lists(
        st.sampled_from([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, 1e-45, 3e38]), min_size=1, max_size=40
    ),
    blending=blendings(),
)
def test_nan_and_infinity_stay_where_they_are(h: list[float], blending: Blending) -> None:
    tensor = torch.tensor(h)
    if UNDEFINED_AT_INFINITY & {*blending.keys}:
        tensor = tensor.nan_to_num(torch.nan, 1.0, -1.0)
    x, _ = native.forward(tensor, blending)
    functions = {k: lookup(key).function for k, key in enumerate(blending.keys)}
    expected = reference.blend(tensor.double(), blending.weights.double(), functions, 1)
    assert torch.equal(x.isnan(), expected.isnan())
    finite = expected.float().isfinite()
    assert torch.equal(x[~finite].nan_to_num(), expected[~finite].float().nan_to_num())
    assert x[finite & (expected.abs() < 1e38)].isfinite().all()


@pytest.mark.parametrize("last", ["mish", "hardshrink", "log_gamma"])  # a formula, generated code, torch's values
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_depends_on_the_number_of_threads(last: str, dtype: torch.dtype) -> None:
    register_candidate("log_gamma", lambda h: torch.lgamma(h.abs() + 1))
    h = torch.linspace(-8, 8, 5 * (1 << 17) + 77).to(dtype)  # several chunks in C, and several blocks in torch
    blending, threads, found = blending_of(["gelu", "relu", last], [0.2, 0.3, 0.5]), torch.get_num_threads(), []
    assert native._functions(blending.keys, blending.alive).count(0) == (last == "log_gamma")
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            kept: list[Tensor] = []
            found.append((*native.forward(h, blending, kept), *native.backward(h, h, blending, True, kept)))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_numbers_of_the_c_code_are_on_the_cpu_whatever_the_default_device() -> None:
    h, blending = torch.linspace(-2, 2, 9), blending_of(["tanh", "gelu"], [0.5, 0.5])
    expected = native.forward(h, blending), NativeBlends(h, blending).gradients({0: h, 1: h}, True)
    register_candidate("bump", lambda h: h * torch.exp(-h * h))
    with torch.device("meta"):
        found = native.forward(h, blending), NativeBlends(h, blending).gradients({0: h, 1: h}, True)
        assert generated.address("bump")
    for ours, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_values_are_read_in_the_order_of_the_layout() -> None:
    register_candidate("own", lambda h: h * 2, derivative=lambda h: torch.full_like(h, 2.0))
    h = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).transpose(0, 2)
    x, _ = native.forward(h, blending_of(["own", "relu"], [0.5, 0.5]))
    torch.testing.assert_close(x, h + h.relu() / 2)
    assert x.stride() == h.stride()


def called(h: Tensor) -> Tensor:
    """Calls the operator on new tensors, and differentiates it."""
    logits = torch.zeros(2, device=h.device, requires_grad=True)
    p, temperature = torch.full((1, 2), 0.5, device=h.device), torch.ones((), device=h.device)
    x, _ = routed_activation(h, logits, p, p, temperature, ("relu", "tanh"), (0, 1), 1, True)
    if torch.is_grad_enabled() and not differentiable.transforming():
        x.sum().backward()
    return x


WITHOUT_DATA: dict[str, Callable[[], object]] = {
    "meta": lambda: called(torch.randn(3, device="meta", requires_grad=True)),
    "functionalize": lambda: torch.func.functionalize(called)(torch.randn(3)),
    "vmap of grad": lambda: torch.func.vmap(torch.func.grad(lambda h: called(h).sum()))(torch.randn(4, 3)),
    "jacfwd": lambda: torch.func.jacfwd(called)(torch.randn(3)),
    "make_fx": lambda: make_fx(called, tracing_mode="fake")(torch.randn(3)),
}


@pytest.mark.parametrize("tracer", WITHOUT_DATA)
def test_tensors_without_data_never_reach_the_c_code(tracer: str) -> None:
    with mock.patch.object(native.library, "load", side_effect=AssertionError("the C code ran")):
        WITHOUT_DATA[tracer]()


def test_fake_tensors_never_reach_the_c_code() -> None:
    with (
        mock.patch.object(native.library, "load", side_effect=AssertionError("the C code ran")),
        FakeTensorMode(),
    ):
        assert type(called(torch.randn(3, requires_grad=True))) is FakeTensor
