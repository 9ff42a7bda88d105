"""Tests of the closed form and of plain torch against the reference implementation, the method's formulas and torch's
own checkers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flexact.candidates.registry import lookup
from flexact.ops import _routed, closed_form, dispatch, reference, routed_activation, stacked_form
from flexact.ops.blending import Blending
from kernels import using
from routed_cases import ALL, FIVE

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DENSE = ("contiguous", "permuted", "channels_last", "offset")
GAPPED = ("slice", "permuted slice", "expanded")


@dataclass(frozen=True)
class Case:
    """A random call of the operator."""

    h: Tensor
    delta: Tensor
    logits: Tensor
    noise: Tensor
    alive: Tensor
    temperature: float
    names: tuple[str, ...]
    hard: bool
    channel_dim: int
    block: int
    form: dispatch.Kernels | Literal["stacked"]
    """The form, or "stacked" for the closed form as it runs on a GPU."""

    def size(self) -> Tensor:
        """Returns a bound on a candidate's value at each element: 1 + 1.1·|h|, or 1 + h²."""
        h = self.h.double().abs()
        return 1 + (torch.maximum(1.1 * h, h.square()) if {"relu_squared", "star_relu"} & {*self.names} else 1.1 * h)

    def p(self) -> Tensor:
        log_pi = torch.log_softmax(self.logits.masked_fill(~self.alive, -torch.inf), -1)
        return torch.softmax((log_pi + self.noise) / self.temperature, -1)

    def run(self, statistics: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns x, the statistics, and the gradients with respect to h and to the logits."""
        h = self.h.detach().requires_grad_()
        logits = self.logits.flatten().requires_grad_()
        p = self.p()
        weights = nn.functional.one_hot(p.argmax(-1), p.shape[-1]).to(p.dtype) if self.hard else p
        alive = torch.nonzero(self.alive.any(0)).flatten().tolist()
        temperature = torch.tensor(self.temperature, dtype=torch.float64)
        with (
            mock.patch.object(closed_form, "BLOCK", self.block),
            mock.patch.object(stacked_form, "stacks", return_value=self.form == "stacked"),
            using("closed_form" if self.form == "stacked" else self.form),
        ):
            x, gathered = routed_activation(
                h, logits, weights, p, temperature, self.names, alive, self.channel_dim, statistics
            )
            to_h, to_logits = torch.autograd.grad(x, (h, logits), self.delta)
        assert gathered.is_contiguous()  # as the operator's fake implementation declares
        return x.detach(), gathered, to_h, to_logits.view(self.logits.shape)

    def run_reference(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns x and the gradients with respect to h and to the logits, by autograd in float64."""
        h = self.h.double().detach().requires_grad_()
        logits = self.logits.detach().requires_grad_()
        x = reference.routed_activation(
            h, logits, self.noise, self.temperature, self.names, self.alive, self.hard, self.channel_dim
        )
        return (x.detach(), *torch.autograd.grad(x, (h, logits), self.delta.double()))


def laid_out(
    kind: str, shape: list[int], generator: torch.Generator, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Tensor:
    """Returns random numbers of about this shape in a memory layout."""

    def randn(*size: int) -> Tensor:
        return (scale * torch.randn(size, generator=generator, dtype=torch.float64)).to(dtype)

    if kind == "channels_last":
        four = [*shape, 2, 3, 2, 2][:4]
        return randn(*four).to(memory_format=torch.channels_last)
    if kind == "permuted":
        return randn(*shape).permute(torch.randperm(len(shape), generator=generator).tolist())
    if kind == "offset":
        return randn(2, *shape)[1]
    if kind == "expanded":
        return randn(*shape, 1).expand(*shape, 3)
    gapped = randn(*(2 * size for size in shape))[tuple(slice(None, None, 2) for _ in shape)]
    if kind == "permuted slice":
        return gapped.permute(torch.randperm(len(shape), generator=generator).tolist())
    return gapped if kind == "slice" else randn(*shape)


@st.composite
def cases(draw: st.DrawFn, smallest: int = 0) -> Case:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shape = draw(st.lists(st.integers(smallest, 5), max_size=4))
    dtype, scale = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([0.1, 1.0, 30.0]))
    h = laid_out(draw(st.sampled_from(DENSE + GAPPED)), shape, generator, dtype, scale)
    per_channel = h.dim() > 0 and draw(st.booleans())
    channel_dim = draw(st.integers(-h.dim(), h.dim() - 1)) if h.dim() else 1
    rows = max(h.shape[channel_dim], 1) if per_channel else 1
    names = tuple(draw(st.lists(st.sampled_from(ALL), min_size=2, max_size=5, unique=True)))
    k = len(names)
    alive = torch.rand(rows, k, generator=generator) < draw(st.sampled_from([0.5, 1.0]))
    alive[torch.arange(rows), torch.randint(k, (rows,), generator=generator)] = True
    delta = torch.randn(h.shape, generator=generator).to(dtype)
    return Case(
        h=h,
        delta=delta.t() if delta.dim() == 2 and delta.shape[0] == delta.shape[1] else delta,
        logits=torch.randn(rows, k, generator=generator, dtype=torch.float64),
        noise=torch.randn(rows, k, generator=generator, dtype=torch.float64),
        alive=alive,
        temperature=draw(st.sampled_from([0.1, 1.0, 5.0])),
        names=names,
        hard=draw(st.booleans()),
        channel_dim=channel_dim,
        block=draw(st.sampled_from([1, 7, 1 << 17])),
        form=draw(st.sampled_from(["closed_form", "stacked", "plain"])),
    )


def close(ours: Tensor, theirs: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    """Asserts equality up to the rounding of a dtype, relative to the magnitude of the summands."""
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ours.double(), theirs.double(), rtol=4 * eps, atol=16 * eps * scale)


@settings(max_examples=400)
@given(case=cases())
def test_equals_the_reference_for_every_shape_layout_dtype_and_mode(case: Case) -> None:
    x, _, to_h, to_logits = case.run()
    expected_x, expected_to_h, expected_to_logits = case.run_reference()
    assert (x.dtype, x.shape) == (case.h.dtype, case.h.shape)
    assert (to_h.dtype, to_h.shape) == (case.h.dtype, case.h.shape)
    close(x, expected_x, case.h.dtype, float(case.size().max()) if case.h.numel() else 1.0)
    close(to_h, expected_to_h, case.h.dtype, 10.0)
    computed = torch.float64 if case.h.dtype == torch.float64 else torch.float32
    summed = float((case.delta.double().abs() * case.size()).sum()) / case.temperature
    close(to_logits, expected_to_logits, computed, 1 + summed)


@settings(max_examples=200)
@given(case=cases(smallest=1))
def test_statistics_are_means(case: Case) -> None:
    x, gathered, _, _ = case.run(True)
    h, rows = case.h.double(), case.logits.shape[0]
    sensitivity = reference.mean_sensitivity(h, case.names, rows, case.channel_dim)
    someone = case.alive.any(0)
    dtype = torch.float64 if case.h.dtype == torch.float64 else torch.float32
    close(gathered, sensitivity * someone, dtype, 2.0)
    assert torch.equal(x, case.run()[0]), "gathering statistics must not change the output"


def test_no_statistics_are_collected_unless_asked_for() -> None:
    p = torch.full((1, 5), 0.2)
    _, gathered = routed_activation(torch.randn(4), torch.zeros(5), p, p, torch.ones(()), FIVE, range(5))
    assert gathered.numel() == 0


def test_statistics_have_no_gradient() -> None:
    h, p = torch.randn(4, requires_grad=True), torch.full((1, 5), 0.2)
    logits = torch.zeros(5, requires_grad=True)
    _, gathered = routed_activation(h, logits, p, p, torch.ones(()), FIVE, range(5), statistics=True)
    assert gathered.shape == (1, 5)
    assert not gathered.requires_grad


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_empty_input_gives_empty_output_and_zero_statistics(shape: tuple[int, ...]) -> None:
    h, logits, p = torch.randn(shape, requires_grad=True), torch.zeros(5, requires_grad=True), torch.full((1, 5), 0.2)
    x, gathered = routed_activation(h, logits, p, p, torch.ones(()), FIVE, range(5), statistics=True)
    to_h, to_logits = torch.autograd.grad(x.sum(), (h, logits))
    assert x.shape == to_h.shape == shape
    assert not gathered.any()
    assert not to_logits.any()


@given(kind=st.sampled_from(DENSE), shape=st.lists(st.integers(1, 4), max_size=4), per_channel=st.booleans())
def test_dense_layouts_are_kept(kind: str, shape: list[int], per_channel: bool) -> None:
    h = laid_out(kind, shape, torch.Generator().manual_seed(0)).requires_grad_()
    rows = h.shape[1] if per_channel and h.dim() > 1 else 1
    logits, p = torch.zeros(rows * 5, requires_grad=True), torch.full((rows, 5), 0.2)
    x, _ = routed_activation(h, logits, p, p, torch.ones(()), FIVE, range(5))
    (to_h,) = torch.autograd.grad(x.sum(), h)
    assert x.stride() == to_h.stride() == h.stride()


def away_from_kinks(*shape: int) -> Tensor:
    h = torch.linspace(-7, 7, math.prod(shape), dtype=torch.float64)[torch.randperm(math.prod(shape))].reshape(shape)
    for kink in (0.0, 3.0, -3.0, 6.0):
        h = torch.where((h - kink).abs() < 0.05, h + 0.1, h)
    return h


def routed(h: Tensor, logits: Tensor, names: tuple[str, str], temperature: float, hard: bool) -> Tensor:
    p = torch.softmax(torch.log_softmax(logits.detach(), -1) / temperature, -1)
    weights = nn.functional.one_hot(p.argmax(-1), 2).to(p.dtype) if hard else p
    tau = torch.tensor(temperature, dtype=torch.float64)
    return routed_activation(h, logits.flatten(), weights, p, tau, names, (0, 1))[0]


@pytest.mark.parametrize("rows", [1, 3], ids=["layer", "channel"])
@pytest.mark.parametrize("name", ALL)
def test_gradcheck_soft(name: str, rows: int) -> None:
    torch.manual_seed(0)
    names = (name, "sigmoid" if name == "tanh" else "tanh")
    h, logits = away_from_kinks(4, 3, 2).requires_grad_(), torch.randn(rows, 2, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda h, logits: routed(h, logits, names, 0.7, hard=False), (h, logits))


@pytest.mark.parametrize("rows", [1, 3], ids=["layer", "channel"])
@pytest.mark.parametrize("name", ALL)
def test_gradcheck_hard(name: str, rows: int) -> None:
    torch.manual_seed(0)
    names = (name, "sigmoid" if name == "tanh" else "tanh")
    h, logits = away_from_kinks(4, 3, 2).requires_grad_(), torch.randn(rows, 2, dtype=torch.float64).requires_grad_()
    logits.data[0, 0] = 3.0  # so that the candidate under test is picked
    assert torch.autograd.gradcheck(lambda h: routed(h, logits, names, 0.7, hard=True), (h,))
    delta = torch.randn_like(h)
    alive = torch.ones(rows, 2, dtype=torch.bool)
    straight_through = reference.routed_activation(h, logits, torch.zeros_like(logits), 0.7, names, alive, hard=True)
    (ours,) = torch.autograd.grad(routed(h, logits, names, 0.7, hard=True), logits, delta)
    torch.testing.assert_close(ours, *torch.autograd.grad(straight_through, logits, delta))


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32), temperature=st.sampled_from([0.05, 0.5, 1.0, 3.0]))
def test_proposition_1(seed: int, temperature: float) -> None:
    """∂L/∂log π_k = (p_k/τ)·⟨δ, a_k − x⟩."""
    generator = torch.Generator().manual_seed(seed)
    h, delta = (torch.randn(6, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    logits, noise = (torch.randn(1, len(ALL), generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    p = torch.softmax((torch.log_softmax(logits.detach(), -1) + noise) / temperature, -1)
    tau = torch.tensor(temperature, dtype=torch.float64)
    x, _ = routed_activation(h, logits.flatten(), p, p, tau, ALL, range(len(ALL)))
    (ours,) = torch.autograd.grad(x, logits, delta)
    blend = sum(p[0, k] * lookup(name).module()(h) for k, name in enumerate(ALL))
    formula = [p[0, k] / temperature * (delta * (lookup(n).module()(h) - blend)).sum() for k, n in enumerate(ALL)]
    torch.testing.assert_close(ours[0], torch.stack(formula))
    everyone = torch.ones(1, len(ALL), dtype=torch.bool)
    plain = reference.routed_activation(h, logits, noise, temperature, ALL, everyone)
    torch.testing.assert_close(ours, *torch.autograd.grad(plain, logits, delta))


OPCHECKED = {
    "contiguous": lambda: torch.randn(3, 4, 5),
    "transposed": lambda: torch.randn(5, 4, 3).transpose(0, 2),
    "slice": lambda: torch.randn(3, 4, 10)[:, :, ::2],
    "transposed slice": lambda: torch.randn(10, 4, 3)[::2].transpose(0, 2),
    "expanded": lambda: torch.randn(3, 4, 1).expand(3, 4, 5),
    "channels last": lambda: torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last),
    "empty": lambda: torch.randn(0, 4, 5),
}


@pytest.mark.parametrize("rows", [1, 4], ids=["layer", "channel"])
@pytest.mark.parametrize("layout", OPCHECKED)
def test_opcheck(layout: str, rows: int) -> None:
    h = OPCHECKED[layout]().requires_grad_()
    logits = torch.randn(rows * 3, requires_grad=True)
    p = torch.softmax(logits.detach().view(rows, 3), -1)
    arguments = (h, logits, p, p, torch.tensor(0.5), "relu\nsigmoid\ngelu", [0, 1, 2], 1, True)
    torch.library.opcheck(_routed.operator, arguments)


def test_opcheck_of_a_zero_dimensional_input() -> None:
    h, logits, p = torch.randn((), requires_grad=True), torch.zeros(2, requires_grad=True), torch.full((1, 2), 0.5)
    torch.library.opcheck(_routed.operator, (h, logits, p, p, torch.ones(()), "relu\ntanh", [0, 1], 1, 0))


@pytest.mark.parametrize("rows", [1, 4], ids=["layer", "channel"])
def test_two_runs_are_bit_identical(rows: int) -> None:
    torch.manual_seed(0)
    h, delta, logits = torch.randn(9, 4, 64, 64), torch.randn(9, 4, 64, 64), torch.randn(rows * 5, requires_grad=True)
    p = torch.softmax(logits.detach().view(rows, 5), -1)
    results = []
    for _ in range(2):
        x, gathered = routed_activation(h, logits, p, p, torch.ones(()), FIVE, range(5), statistics=True)
        results.append((x, gathered, *torch.autograd.grad(x, logits, delta)))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def saved_bytes(forward: object) -> int:
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept_alive = forward()  # type: ignore[operator]
    del kept_alive
    return sum(storage.nbytes() for storage in kept.values())


def saved_by_both(h: Tensor) -> tuple[int, int]:
    """Returns the bytes that the routed activation and the plain blend save for the backward."""
    logits, p, alive = torch.zeros(1, 5, requires_grad=True), torch.full((1, 5), 0.2), torch.ones(1, 5).bool()
    ours = saved_bytes(
        lambda: routed_activation(h, logits.flatten(), p, p, torch.ones(()), FIVE, range(5), statistics=True)
    )
    return ours, saved_bytes(lambda: reference.routed_activation(h, logits, torch.zeros(1, 5), 1.0, FIVE, alive))


def test_a_large_tensor_saves_only_its_input_and_small_tensors() -> None:
    h = torch.randn(closed_form.MOST_KEPT + 1, requires_grad=True)
    ours, plain = saved_by_both(h)
    assert ours <= h.untyped_storage().nbytes() + 100
    assert ours <= plain / 4


def test_a_small_tensor_also_saves_values_but_less_than_a_plain_blend() -> None:
    h = torch.randn(16, 8, 8, 8, requires_grad=True)
    ours, plain = saved_by_both(h)
    assert ours <= 4 * h.untyped_storage().nbytes() + 100  # including the slope, sigmoid and tanh
    assert ours < plain


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 6], ids=["layer", "channel"])
@pytest.mark.parametrize("form", [closed_form, stacked_form], ids=["added", "stacked"])
def test_gradients_from_saved_values_are_bit_identical_to_recomputed_ones(
    dtype: torch.dtype, rows: int, form: Any
) -> None:
    h, delta = torch.randn(700, 6, 40).to(dtype), torch.randn(700, 6, 40).to(dtype)  # several blocks
    p = torch.softmax(torch.randn(rows, 5), -1)
    blending = Blending(p, p, torch.tensor(0.7), FIVE, (0, 1, 3, 4), 1, True)
    kept: list[Tensor] = []
    for kept_one, one in zip(form.forward(h, blending, kept), form.forward(h, blending), strict=True):
        assert torch.equal(kept_one, one)
    found = form.backward(delta, h, blending, True, kept)
    assert all(map(torch.equal, found, form.backward(delta, h, blending, True)))


def test_input_and_upstream_gradient_are_never_written_to() -> None:
    for dtype in DTYPES:
        h, delta = torch.randn(4, 6).to(dtype).requires_grad_(), torch.randn(4, 6).to(dtype)
        before = (h.detach().clone(), delta.clone())
        k = len(ALL)
        logits, p = torch.zeros(k, requires_grad=True), torch.full((1, k), 1 / k)
        x, _ = routed_activation(h, logits, p, p, torch.ones(()), ALL, range(k), statistics=True)
        torch.autograd.grad(x, (h, logits), delta)
        assert torch.equal(h.detach(), before[0])
        assert torch.equal(delta, before[1])


SPECIAL = (torch.nan, torch.inf, -torch.inf, 1.0, -2.0, 0.0)


@pytest.mark.parametrize("rows", [1, 6], ids=["layer", "channel"])
@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("name", ALL)
def test_hard_passes_nan_and_infinity_as_the_picked_function_would(name: str, statistics: bool, rows: int) -> None:
    h, k = torch.tensor([SPECIAL]), len(ALL)
    weights = nn.functional.one_hot(torch.full((rows,), ALL.index(name)), k).float()
    p = torch.full((rows, k), 1 / k)
    x, _ = routed_activation(h, torch.zeros(rows * k), weights, p, torch.ones(()), ALL, range(k), 1, statistics)
    torch.testing.assert_close(x, lookup(name).module()(h), equal_nan=True)


def test_soft_passes_nan_and_infinity_as_the_sum_of_the_functions_would() -> None:
    h = torch.tensor(SPECIAL)
    for names in (FIVE, ALL):
        p = torch.full((1, len(names)), 1 / len(names))
        x, _ = routed_activation(h, torch.zeros(len(names)), p, p, torch.ones(()), names, range(len(names)))
        expected = sum(lookup(name).module()(h) / len(names) for name in names)
        torch.testing.assert_close(x, expected, equal_nan=True)
        assert torch.equal(x[3:], x[3:].nan_to_num()), "the other elements must stay as they are"


def test_dropped_candidates_do_not_contribute_even_where_they_overflow() -> None:
    """A row that has dropped an infinite candidate must have finite output and gradients."""
    h = torch.tensor([[torch.inf, 1.0]]).requires_grad_()
    p = torch.tensor([[0.0, 0.5, 0.5], [0.4, 0.3, 0.3]])
    logits = torch.zeros(6, requires_grad=True)
    x, _ = routed_activation(h, logits, p, p, torch.ones(()), ("identity", "sigmoid", "tanh"), range(3))
    assert x[0, 0].item() == 1.0
    to_h, to_logits = torch.autograd.grad(x.sum(), (h, logits))
    assert to_h[0, 0].item() == 0.0
    assert to_logits.isfinite().all()
    assert to_logits[0].item() == 0.0
