"""The routed activation in C: forward and backward of a site on float32 tensors.

The candidates in FUNCTIONS have formulas in kernels.c, and most others have generated code. For the rest, torch
computes the values and slopes, block by block, and the C code blends and sums them. The backward recomputes the former,
and keeps the latter for tensors of up to `closed_form.MOST_KEPT` elements.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from ctypes import c_int32, c_void_p

import torch
from torch import Tensor

from flexact.candidates.registry import lookup
from flexact.ops import dispatch
from flexact.ops.blending import Blending
from flexact.ops.closed_form import BLOCK, MOST_KEPT, dense, with_layout_of
from flexact.ops.native import generated, library

FUNCTIONS = (
    *("given", "relu", "leaky_relu", "sigmoid", "tanh", "identity", "gelu", "silu", "mish", "elu", "selu", "softplus"),
    *("hardswish", "relu6", "softsign", "relu_squared", "sine", "gelu_tanh"),
)
"""The functions of kernels.c in the order of its enumeration."""
_GENERATED = len(FUNCTIONS)
_OF_EXP = frozenset({"sigmoid", "tanh", "silu", "mish", "elu", "selu", "softplus"})


class _Plan(ctypes.Structure):
    """The struct Plan of kernels.c."""

    _fields_ = (
        ("count", c_int32),
        ("functions", c_int32 * dispatch.MOST_CANDIDATES),
        ("columns", c_int32 * dispatch.MOST_CANDIDATES),
        ("higher", c_int32),
        ("blended", c_int32),
        ("summed", c_int32),
        ("shares_e", c_int32),
        ("shares_bell", c_int32),
        ("generated", c_void_p * dispatch.MOST_CANDIDATES),
    )


_Given = dict[int, tuple[Tensor, Tensor]]
"""The values and slopes of the candidates that torch computes, by their position among those that are not dropped."""


def supports(h: Tensor, blending: Blending) -> bool:
    """Return whether the C code can run: on a CPU tensor in at most float32, with one row of weights."""
    weights, probabilities, temperature, keys, *_ = blending
    return (
        h.device.type == "cpu"
        and weights is probabilities  # a hard forward equals the picked module to the bit, so it runs in torch
        and h.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and weights.shape[0] == 1
        and weights.dtype == probabilities.dtype == temperature.dtype == torch.float32
        and len(keys) <= dispatch.MOST_CANDIDATES
        and h.numel() > 0
        and dispatch.active(h.device).name == "native"
        and library.loads()
    )


def has_formulas(blending: Blending) -> bool:
    """Return whether every candidate that is not dropped has a formula in kernels.c, which `blend` needs."""
    return {0, _GENERATED}.isdisjoint(_functions(blending.keys, blending.alive))


def forward(h: Tensor, blending: Blending, kept: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Return x and the sensitivities as `closed_form.forward`. Values that `backward` needs are appended to `kept`."""
    h, statistics = dense(h), blending.statistics
    plan = plan_of(blending.keys, blending.alive, blended=0, summed=1 if statistics else -1)
    if kept is not None and h.numel() <= MOST_KEPT:
        kept += [tensor for pair in _given(as_source(h), blending).values() for tensor in pair]
    x, sums = _swept(plan, h, blending, None, kept or ())
    if not statistics:
        return x, blending.weights.new_empty(0)
    sensitivities = torch.empty_like(blending.weights)
    library.load().means(sums.data_ptr(), h.numel(), sums.numel(), sensitivities.data_ptr())
    return x, sensitivities


def backward(
    delta: Tensor, h: Tensor, blending: Blending, need_logits: bool, kept: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor]:
    """Return the gradients with respect to h and the logits as `closed_form.backward`."""
    plan = plan_of(blending.keys, blending.alive, blended=1, summed=0 if need_logits else -1)
    gradient, sums = _swept(plan, dense(h), blending, delta, kept)
    return gradient, logit_gradient(sums, blending) if need_logits else blending.weights.new_empty(0)


def _swept(
    plan: _Plan, h: Tensor, blending: Blending, delta: Tensor | None, kept: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the blend in the layout and dtype of a dense tensor h, and the sums, (K,)."""
    source = as_source(h)
    upstream = None if delta is None else as_source(with_layout_of(h, _materialised(delta)))
    x = torch.empty_like(source)
    weights = blending.weights.contiguous()
    sums = torch.zeros(weights.shape[1], dtype=torch.float64, device=h.device)
    for start, size, pointers in _blocks(source, blending, kept):
        at = 4 * start
        failed = library.load().sweep(
            ctypes.addressof(plan),
            source.data_ptr() + at,
            None if upstream is None else upstream.data_ptr() + at,
            weights.data_ptr(),
            pointers,
            x.data_ptr() + at,
            sums.data_ptr(),
            size,
            torch.get_num_threads(),
        )
        library.check(failed)
    return x.to(h.dtype), sums


def as_source(tensor: Tensor) -> Tensor:
    """Return a dense tensor in float32, whose memory holds its values."""
    return _materialised(tensor).float()


def _materialised(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory holds its values."""
    return tensor.clone() if tensor._is_zerotensor() or tensor.is_neg() else tensor


def _blocks(source: Tensor, blending: Blending, kept: Sequence[Tensor]) -> Iterator[tuple[int, int, object]]:
    """Yield the start and size of each block, and pointers to the pairs of the candidates that torch computes."""
    size, functions = source.numel(), _functions(blending.keys, blending.alive)
    if 0 not in functions:
        yield 0, size, None
        return
    flat = source.as_strided((size,), (1,))
    length = size if kept else BLOCK * torch.get_num_threads()
    for start in range(0, size, length):
        block = flat[start : start + length]
        tensors = kept or [tensor for pair in _given(block, blending).values() for tensor in pair]
        pairs = iter(tensors)
        addresses = [next(pairs).data_ptr() if function == 0 else None for function in functions for _ in range(2)]
        yield start, block.numel(), (c_void_p * len(addresses))(*addresses)


def _given(source: Tensor, blending: Blending) -> _Given:
    """Return the flat values and slopes of the candidates that torch computes."""
    found: _Given = {}
    flat = source.as_strided((source.numel(),), (1,))
    for position, function in enumerate(_functions(blending.keys, blending.alive)):
        if function == 0:
            candidate = lookup(blending.keys[blending.alive[position]])
            value = candidate.function(flat)
            slope = candidate.derivative(flat, value)
            found[position] = value.float().contiguous(), slope.float().contiguous()
    return found


def logit_gradient(sums: Tensor, blending: Blending) -> Tensor:
    """Return the gradient of Proposition 1 from the inner products, (K,)."""
    probabilities = blending.probabilities.contiguous()
    gradient = torch.empty_like(probabilities).view(-1)
    library.load().logit_gradient(
        sums.data_ptr(),
        probabilities.data_ptr(),
        blending.temperature.data_ptr(),
        sums.numel(),
        gradient.data_ptr(),
    )
    return gradient


@functools.cache
def _functions(keys: tuple[str, ...], alive: tuple[int, ...]) -> tuple[int, ...]:
    """Return the numbers of the candidates that are not dropped; 0 for those that torch computes."""
    left = [(keys[k], lookup(keys[k]).name) for k in alive]
    return tuple(
        FUNCTIONS.index(name) if name in FUNCTIONS else _GENERATED if generated.address(key) else 0
        for key, name in left
    )


@functools.cache
def plan_of(keys: tuple[str, ...], alive: tuple[int, ...], *, blended: int, summed: int, higher: bool = False) -> _Plan:
    """Return the plan of a sweep over the candidates that are not dropped."""
    functions = _functions(keys, alive)
    names = {FUNCTIONS[function] for function in functions if function != _GENERATED}
    shares = not _OF_EXP.isdisjoint(names), "gelu" in names
    code = [generated.address(keys[k]) if f == _GENERATED else 0 for k, f in zip(alive, functions, strict=True)]
    return _Plan(len(alive), functions, alive, higher, blended, summed, *shares, tuple(code))
