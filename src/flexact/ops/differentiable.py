"""The routed activation in differentiable torch operations: for torch.func, traced models, custom candidates, and
derivatives without a closed form (`higher_order`).

The backward of the custom operators is not differentiable, and torch.func cannot trace it. This fallback supports both,
at a cost in time and memory.

The probabilities have no graph, so they are recomputed from the logits ℓ, whose current value is ℓ₀. For the sampled
noise g, p(ℓ) = softmax(log p(ℓ₀) + (ℓ − ℓ₀)/τ) equals softmax((log π + g)/τ) in its value and in all derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from flexact.candidates.registry import lookup
from flexact.ops.blending import Blending
from flexact.ops.reference import blend


def transforming() -> bool:
    """Return whether a torch.func transform (vmap, grad, jvp, …) is active."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def is_wrapped(tensor: Tensor) -> bool:
    """Return whether a tensor is wrapped by a torch.func transform, so that its values cannot be read."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def routed_activation(h: Tensor, logits: Tensor, blending: Blending) -> Tensor:
    """See `flexact.ops.routed_activation`."""
    functions = {k: lookup(blending.keys[k]).function for k in blending.alive}
    return blended(h, logits, blending, functions).to(h.dtype)


def blended(
    h: Tensor, logits: Tensor, blending: Blending, functions: Mapping[int, Callable[[Tensor], Tensor]]
) -> Tensor:
    """Return the blend of these functions of h, in float32 for half precision. functions: by index of the candidate."""
    weights, probabilities, temperature, _, _, channel_dim, _ = blending
    moved = (logits - logits.detach()).view(probabilities.shape) / temperature.detach()
    p = torch.softmax(probabilities.detach().log() + moved, dim=-1)
    mixed = weights.detach() + (p - p.detach())  # when hard: straight-through
    wide = h if h.dtype == torch.float64 else h.float()
    return blend(wide, mixed, functions, channel_dim)


def gradients(
    delta: Tensor, h: Tensor, logits: Tensor, need: tuple[bool, bool], blending: Blending
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients w.r.t. h and the logits (None if not needed), with a graph for further derivatives."""
    # Differentiate with respect to views: h itself may depend on the same logits, through an earlier call of the site.
    h, logits = h.view_as(h), logits.view_as(logits)
    x = routed_activation(h, logits, blending)
    wanted = [tensor for tensor, needed in zip((h, logits), need, strict=True) if needed]
    found = iter(torch.autograd.grad(x, wanted, delta, create_graph=True))
    to_h, to_logits = (next(found) if needed else None for needed in need)
    return to_h, to_logits
