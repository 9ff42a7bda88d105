"""One routed activation, forward and backward, as a torch operator.

x = Σ_k w_k σ_k(h), differentiable in h and in the logits ℓ behind the weights. The probabilities come in as plain
tensors, drawn once a step for all sites; the gradient to the logits is Proposition 1,

    ∂L/∂ℓ_k = (p_k/τ)·(⟨δ, a_k⟩ − Σ_j p_j ⟨δ, a_j⟩),

which is also the gradient to log π, since its entries sum to zero. So no graph runs through the drawing, and
recomputing a site's forward cannot change its draw.

On CUDA tensors Triton's kernels run (`ops.triton.autograd`), elsewhere the closed form, which the compiler takes as
it is; `flexact.ops.dispatch` says which and why, and can force one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexact.ops import closed_form, differentiable, dispatch, inductor_form
from flexact.ops.closed_form import DEVIATION, SENSITIVITY

__all__ = ["DEVIATION", "SENSITIVITY", "routed_activation"]

_COMPILERS = ("torch._inductor", "torch._dynamo")
MOST_CANDIDATES = 16
"""Of a site: as many columns Triton's kernels have room for."""
_SEPARATOR = "\n"  # an operator takes one string, not several


def routed_activation(
    h: Tensor,
    logits: Tensor,
    weights: Tensor,
    probabilities: Tensor,
    temperature: Tensor,
    keys: tuple[str, ...],
    alive: Sequence[int],
    channel_dim: int = 1,
    statistics: int = 0,
) -> tuple[Tensor, Tensor]:
    """The blend x, and its statistics (2, rows, K): mean |σ_k′(h)| and mean (a_k − x)², zeros for the one not asked
    for; empty where neither is.

    h: floating point, any shape and layout; x has the same.
    logits: (rows·K,), only to receive the gradient.
    weights: (rows, K), what the forward blends with: p when soft, one-hot when hard.
    probabilities: (rows, K), p, through which the gradient to the logits goes.
    temperature: τ, a scalar tensor.
    keys: the K candidates' registry keys; alive: the indices of those still in; statistics: flags.
    rows is 1 for the layer, or the size of h's `channel_dim`.
    """
    if differentiable.transforming():
        plain = differentiable.routed_activation(
            h, logits, weights, probabilities, temperature, keys, alive, channel_dim
        )
        return plain, weights.new_empty(0)
    if runs_fused(h, keys, alive):
        from flexact.ops.triton import autograd as triton_autograd  # needs Triton

        blending = triton_autograd.Blending(weights, probabilities, temperature, keys, tuple(alive), statistics)
        return triton_autograd.routed(h, logits, blending, channel_dim)
    x, gathered = _routed_activation(
        h, logits, weights, probabilities, temperature, _SEPARATOR.join(keys), list(alive), channel_dim, statistics
    )
    return x, gathered


def runs_fused(h: Tensor, keys: tuple[str, ...], alive: Sequence[int]) -> bool:
    """Whether Triton's kernels take this input and those of these candidates that are still in."""
    return (
        h.dtype != torch.float64
        and len(keys) <= MOST_CANDIDATES
        and not differentiable.transforming()
        and torch._C._get_tracing_state() is None  # torch.jit.trace has tensors where kernels take numbers
        and _takes_triton(h.device, tuple([keys[k] for k in alive]))
    )


def _takes_triton(device: torch.device, keys: tuple[str, ...]) -> bool:
    if dispatch.active(device).name != "triton":
        return False
    from flexact.ops.triton.basis import without_form  # needs Triton

    return not without_form(keys)


# What torch.compiler.assume_constant_result does, which would import the whole compiler here.
_takes_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]


@torch.library.custom_op("flexact::routed_activation", mutates_args=())
def _routed_activation(
    h: Tensor,
    logits: Tensor,
    weights: Tensor,
    probabilities: Tensor,
    temperature: Tensor,
    keys: str,
    alive: Sequence[int],
    channel_dim: int,
    statistics: int,
) -> tuple[Tensor, Tensor]:
    arguments = (h, weights, keys.split(_SEPARATOR), alive, channel_dim, statistics)
    return _compiled_or_not(inductor_form.forward, closed_form.forward, h, arguments)


@torch.library.custom_op("flexact::routed_activation_backward", mutates_args=())
def _routed_activation_backward(
    delta: Tensor,
    h: Tensor,
    weights: Tensor,
    probabilities: Tensor,
    temperature: Tensor,
    keys: str,
    alive: Sequence[int],
    channel_dim: int,
    need_logits: bool,
) -> tuple[Tensor, Tensor]:
    names, routing = keys.split(_SEPARATOR), (weights, probabilities, temperature)
    arguments = (delta, h, *routing, names, alive, channel_dim, need_logits)
    return _compiled_or_not(inductor_form.backward, closed_form.backward, h, arguments)


def _compiled_or_not(
    fast: Callable[..., tuple[Tensor, Tensor]],
    otherwise: Callable[..., tuple[Tensor, Tensor]],
    h: Tensor,
    arguments: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:
    if dispatch.compiles(h):
        try:
            return fast(*arguments)
        except (RuntimeError, OSError) as error:  # OSError: no folder to compile in
            if not isinstance(error, OSError) and not type(error).__module__.startswith(_COMPILERS):
                raise
            dispatch.give_up_compiler(error)
    return otherwise(*arguments)


@_routed_activation.register_fake
def _(
    h: Tensor,
    logits: Tensor,
    weights: Tensor,
    probabilities: Tensor,
    temperature: Tensor,
    keys: str,
    alive: Sequence[int],
    channel_dim: int,
    statistics: int,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(h), weights.new_empty((2, *weights.shape) if statistics else 0)


@_routed_activation_backward.register_fake
def _(
    delta: Tensor,
    h: Tensor,
    weights: Tensor,
    probabilities: Tensor,
    temperature: Tensor,
    keys: str,
    alive: Sequence[int],
    channel_dim: int,
    need_logits: bool,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(h), weights.new_empty(weights.numel() if need_logits else 0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    h, logits, weights, probabilities, temperature, ctx.keys, ctx.alive, ctx.channel_dim, _ = inputs
    ctx.save_for_backward(h, logits, weights, probabilities, temperature)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, delta: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    need_h, need_logits = ctx.needs_input_grad[:2]
    h, logits, weights, probabilities, temperature = ctx.saved_tensors
    routing = (weights, probabilities, temperature)
    if torch.is_grad_enabled():  # as create_graph=True has it
        names, need = ctx.keys.split(_SEPARATOR), (need_h, need_logits)
        found = differentiable.gradients(delta, h, logits, need, *routing, names, ctx.alive, ctx.channel_dim)
        return (*found, *(None,) * 7)
    gradient, to_logits = _routed_activation_backward(
        delta, h, *routing, ctx.keys, ctx.alive, ctx.channel_dim, need_logits
    )
    return (gradient if need_h else None, to_logits if need_logits else None, *(None,) * 7)


_routed_activation.register_autograd(_backward, setup_context=_setup_context)
