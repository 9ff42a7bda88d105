"""The routed activation, forward and backward, as a torch operator.

x = Σ_k w_k σ_k(h) is differentiable with respect to h and the logits ℓ that determine the weights. The probabilities
are inputs without a graph, sampled once per step for all sites. The gradient to the logits is Proposition 1,

    ∂L/∂ℓ_k = (p_k/τ)·(⟨δ, a_k⟩ − Σ_j p_j ⟨δ, a_j⟩).

Its entries sum to zero, so it is also the gradient to log π. No graph runs through the sampling, and recomputing the
forward of a site, as activation checkpointing does, cannot change the sample.

CUDA tensors are dispatched to Triton kernels (`ops.triton.autograd`), all others to the closed form, in eager mode
or through torch.compile. `flexact.ops.dispatch` makes the choice, gives its reason and can override it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexact.ops import closed_form, differentiable, dispatch, inductor_form

__all__ = ["routed_activation"]

_COMPILERS = ("torch._inductor", "torch._dynamo")
_SEPARATOR = "\n"  # joins the keys, because a custom operator takes no list of strings


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
    probabilities: (rows, K), the p of the gradient to the logits.
    temperature: τ, a scalar tensor.
    keys: registry keys of the K candidates.
    alive: indices of the candidates that are not eliminated.
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
    """Return whether the Triton kernels support this input and the alive candidates."""
    return (
        h.dtype != torch.float64
        and len(keys) <= dispatch.MOST_CANDIDATES
        and not differentiable.transforming()
        and torch._C._get_tracing_state() is None  # torch.jit.trace passes tensors where the kernels expect numbers
        and _takes_triton(h.device, tuple([keys[k] for k in alive]))
    )


def _takes_triton(device: torch.device, keys: tuple[str, ...]) -> bool:
    if dispatch.active(device).name != "triton":
        return False
    from flexact.ops.triton.basis import without_form  # needs Triton

    return not without_form(keys)


# Same as torch.compiler.assume_constant_result, which would import the whole compiler here.
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
    statistics: bool,
) -> tuple[Tensor, Tensor]:
    arguments = (h, weights, keys.split(_SEPARATOR), alive, channel_dim, statistics)
    return _run_compiled_or_eager(inductor_form.forward, closed_form.forward, h, arguments)


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
    return _run_compiled_or_eager(inductor_form.backward, closed_form.backward, h, arguments)


def _run_compiled_or_eager(
    compiled_function: Callable[..., tuple[Tensor, Tensor]],
    eager_function: Callable[..., tuple[Tensor, Tensor]],
    h: Tensor,
    arguments: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:
    """Run the compiled function if h is large enough, and fall back to the eager one if compilation fails."""
    if dispatch.compiles(h):
        try:
            return compiled_function(*arguments)
        except (RuntimeError, OSError) as error:  # OSError: no writable cache folder, for example
            if not isinstance(error, OSError) and not type(error).__module__.startswith(_COMPILERS):
                raise
            dispatch.give_up_compiler(error)
    return eager_function(*arguments)


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
    statistics: bool,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(h), weights.new_empty(weights.shape if statistics else 0)


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
    if torch.is_grad_enabled():  # the backward runs with create_graph=True
        names, need = ctx.keys.split(_SEPARATOR), (need_h, need_logits)
        found = differentiable.gradients(delta, h, logits, need, *routing, names, ctx.alive, ctx.channel_dim)
        return (*found, *(None,) * 7)
    gradient, to_logits = _routed_activation_backward(
        delta, h, *routing, ctx.keys, ctx.alive, ctx.channel_dim, need_logits
    )
    return (gradient if need_h else None, to_logits if need_logits else None, *(None,) * 7)


_routed_activation.register_autograd(_backward, setup_context=_setup_context)
