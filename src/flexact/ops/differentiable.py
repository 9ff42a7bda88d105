"""The routed activation in torch's own differentiable operations, for what needs more than one derivative.

The operator's backward is written by hand, and torch can look into it neither for torch.func's transforms nor for a
second derivative. There the blend is computed as it is written, at the cost of time and memory.

The probabilities come in without a graph; with ℓ₀ the value of the logits ℓ, p(ℓ) = softmax(log p(ℓ₀) + (ℓ − ℓ₀)/τ) is
the same function of them as softmax((log π + g)/τ), whatever the noise g was, to every order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexact.candidates import lookup


def transforming() -> bool:
    """Whether torch.func looks at what is done: vmap, grad, jvp and what is made of them."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor is one of torch.func's, whose numbers cannot be read."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def routed_activation(
    h: Tensor,
    logits: Tensor,
    weights: Tensor,
    probabilities: Tensor,
    temperature: Tensor,
    keys: Sequence[str],
    alive: Sequence[int],
    channel_dim: int,
) -> Tensor:
    """See `flexact.ops.routed_activation`."""
    moved = (logits - logits.detach()).view(probabilities.shape) / temperature.detach()
    p = torch.softmax(probabilities.detach().log() + moved, dim=-1)
    blend = weights.detach() + (p - p.detach())  # when hard: straight-through
    wide = h if h.dtype == torch.float64 else h.float()
    shape = [1] * h.dim()
    if weights.shape[0] > 1:
        shape[channel_dim] = -1
    x = torch.zeros_like(wide)
    for k in alive:
        x = x + blend[:, k].view(shape) * lookup(keys[k]).function(wide)
    return x.to(h.dtype)


def gradients(
    delta: Tensor,
    h: Tensor,
    logits: Tensor,
    need: tuple[bool, bool],
    weights: Tensor,
    probabilities: Tensor,
    temperature: Tensor,
    keys: Sequence[str],
    alive: Sequence[int],
    channel_dim: int,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients to h and to the logits, of those needed, which can be differentiated again."""
    # Of these names alone: h may itself come from the same logits, through an earlier call of the site.
    h, logits = h.view_as(h), logits.view_as(logits)
    x = routed_activation(h, logits, weights, probabilities, temperature, keys, alive, channel_dim)
    wanted = [tensor for tensor, needed in zip((h, logits), need, strict=True) if needed]
    found = iter(torch.autograd.grad(x, wanted, delta, create_graph=True))
    to_h, to_logits = (next(found) if needed else None for needed in need)
    return to_h, to_logits
