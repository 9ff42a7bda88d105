"""The routed activation, forward and backward, as a torch operator.

x = Σ_k w_k σ_k(h) is differentiable with respect to h and the logits ℓ that determine the weights. The probabilities
are inputs without a graph, sampled once per step for all sites. The gradient with respect to the logits is
Proposition 1,

    ∂L/∂ℓ_k = (p_k/τ)·(⟨δ, a_k⟩ − Σ_j p_j ⟨δ, a_j⟩).

Its entries sum to zero, so it is also the gradient with respect to log π. No graph runs through the sampling, and
recomputing the forward of a site, as activation checkpointing does, cannot change the sample.

CUDA tensors are dispatched to Triton kernels (`ops.triton.nodes`), CPU tensors to C (`ops.native`), and all others
to the closed form or, if it is faster, to plain torch. `flexact.ops.dispatch` makes the choice, gives its reason and
can override it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexact.ops import (
    closed_form,
    differentiable,
    dispatch,
    inductor_form,
    measured_form,
    operators,
    plain_form,
    stacked_form,
)
from flexact.ops.blending import Blending
from flexact.ops.closed_form_blends import ClosedFormBlends
from flexact.ops.higher_order import Blends
from flexact.ops.known_calls import KnownCalls
from flexact.ops.native import routed as native
from flexact.ops.native.blends import NativeBlends
from flexact.ops.operators import Implementation

__all__ = ["activated", "routed_activation"]

_COMPILERS = ("torch._inductor", "torch._dynamo")


def routed_activation(
    h: Tensor,
    logits: Tensor,
    weights: Tensor,
    probabilities: Tensor,
    temperature: Tensor,
    keys: tuple[str, ...],
    alive: Sequence[int],
    channel_dim: int = 1,
    statistics: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the blend x and the sensitivities mean |σ_k′(h)|, (rows, K), which are empty without `statistics`.

    h: floating point, any shape and layout; x has the same.
    logits: (rows·K,), used only to receive the gradient.
    weights: (rows, K), the weights of the forward: p if soft, one-hot if hard.
    probabilities: (rows, K), the p of the gradient with respect to the logits.
    temperature: τ, a scalar tensor.
    keys: registry keys of the K candidates.
    alive: indices of the candidates that are not eliminated.
    rows is 1 for the layer, or the size of h's `channel_dim`.
    """
    blending = Blending(weights, probabilities, temperature, keys, tuple(alive), channel_dim, statistics)
    return activated(h, logits, blending)


def activated(h: Tensor, logits: Tensor, blending: Blending, known: KnownCalls | None = None) -> tuple[Tensor, Tensor]:
    """Return the result of `routed_activation`. known: receives what ran, if such a call can be repeated."""
    if differentiable.transforming():
        return differentiable.routed_activation(h, logits, blending), blending.weights.new_empty(0)
    if runs_fused(h, blending.keys, blending.alive):
        from flexact.ops.triton import nodes  # needs Triton

        return nodes.routed(h, logits, blending, known)
    return _routed(h, logits, blending)


def runs_fused(h: Tensor, keys: tuple[str, ...], alive: Sequence[int]) -> bool:
    """Return whether the Triton kernels support this input and the alive candidates."""
    return (
        h.dtype != torch.float64
        and len(keys) <= dispatch.MOST_CANDIDATES
        and not differentiable.transforming()
        and torch._C._get_tracing_state() is None  # torch.jit.trace passes tensors where the kernels expect numbers
        and _triton_takes(h.device, keys, tuple(alive), operators.is_recorded(h))
    )


def _triton_takes(device: torch.device, keys: tuple[str, ...], alive: tuple[int, ...], recorded: bool) -> bool:
    """Return whether the kernels run on a device and have a form of each alive candidate; torch.compile cannot record
    the forms of custom candidates. Raise if a user's form of a custom candidate is wrong."""
    if dispatch.active(device).name != "triton":
        return False
    custom = _custom(keys, alive)
    if not custom or recorded:
        return not custom
    from flexact.ops.triton import basis, custom_forms  # need Triton

    return all(map(basis.has_form, custom)) and all(custom_forms.works(key, device) for key in custom)


@functools.cache
def _custom(keys: tuple[str, ...], alive: tuple[int, ...]) -> tuple[str, ...]:
    """Return the alive candidates that the kernels have no formula for."""
    from flexact.ops.triton import basis  # needs Triton

    return tuple(keys[k] for k in alive if basis.is_custom(keys[k]))


# Same as torch.compiler.assume_constant_result, which would import the whole compiler here.
_triton_takes._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _implementation(h: Tensor, blending: Blending, keeps: bool) -> Implementation:
    if native.supports(h, blending):
        return _NATIVE
    if dispatch.compiles():
        return _COMPILED
    closed, name = _closed_form(h), dispatch.active(h.device).name
    # Plain torch keeps a graph, which neither an operator nor a forward without gradients can.
    if not keeps or name not in ("plain", "measured") or not plain_form.supports(blending):
        return closed
    if name == "measured":
        name = measured_form.faster(h, blending, {"closed_form": closed, "plain": _PLAIN})
    return _PLAIN if name == "plain" else closed


def _closed_form(h: Tensor) -> Implementation:
    return _STACKED if stacked_form.stacks(h) else _CLOSED_FORM


def _compiled_forward(h: Tensor, blending: Blending, kept: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    return _compiled(inductor_form.forward, h, blending) or _closed_form(h).forward(h, blending, kept)


def _compiled_backward(
    delta: Tensor, h: Tensor, blending: Blending, need_logits: bool, kept: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor]:
    found = None if kept else _compiled(inductor_form.backward, delta, h, blending, need_logits)
    return found or _closed_form(h).backward(delta, h, blending, need_logits, kept)


def _compiled(function: Callable[..., tuple[Tensor, Tensor]], *arguments: Any) -> tuple[Tensor, Tensor] | None:
    """Return the result of the closed form under torch.compile; None if it cannot be compiled."""
    try:
        return function(*arguments)
    except (RuntimeError, OSError) as error:  # OSError: no writable cache folder, for example
        if not isinstance(error, OSError) and not type(error).__module__.startswith(_COMPILERS):
            raise
        dispatch.give_up("compiled", "torch.compile failed", error)
        return None


def _native_blends(h: Tensor, blending: Blending) -> Blends:
    return NativeBlends(h, blending) if native.has_formulas(blending) else ClosedFormBlends(h, blending)


_NATIVE = Implementation(native.forward, native.backward, _native_blends)
_COMPILED = Implementation(_compiled_forward, _compiled_backward, ClosedFormBlends)
_CLOSED_FORM = Implementation(closed_form.forward, closed_form.backward, ClosedFormBlends)
_STACKED = Implementation(stacked_form.forward, stacked_form.backward, ClosedFormBlends)
_PLAIN = Implementation(plain_form.forward, plain_form.backward, ClosedFormBlends)
_routed = operators.RoutedActivation("routed_activation", torch.library.custom_op, _implementation)


@_routed.operator.register_fake
def _(h: Tensor, logits: Tensor, weights: Tensor | None, p: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    statistics = rest[-1]
    return torch.empty_like(h), p.new_empty(p.shape if statistics else 0)


@_routed.backward_operator.register_fake
def _(delta: Tensor, h: Tensor, weights: Tensor | None, p: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    need_logits = rest[-1]
    return torch.empty_like(h), p.new_empty(p.numel() if need_logits else 0)
