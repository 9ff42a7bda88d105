"""The routed activation as plain torch operations, whose gradients autograd computes.

It keeps the graph of the blend for the backward, as a blend that is written by hand does. A step has more kernel
launches than with the closed form, but most of them in its backward, where autograd launches them without Python. The
gradient with respect to the logits and further derivatives are those of the closed form.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from flexact.candidates.registry import Backward, lookup
from flexact.ops.blending import Blending
from flexact.ops.closed_form import dense, logit_gradient
from flexact.ops.stacked_form import Stack


def supports(blending: Blending) -> bool:
    """Return whether this form has the results of the closed form, to rounding.

    A hard forward must equal the picked module to the bit. Where channels pick independently, the weights of dropped
    candidates are 0, and must mask infinite values. The derivatives must be those that autograd uses; all candidates
    with such a derivative are finite at a finite input.
    """
    return (
        blending.weights is blending.probabilities
        and len(blending.weights) == 1
        and all(isinstance(lookup(blending.keys[k]).derivative, Backward) for k in blending.alive)
    )


def forward(h: Tensor, blending: Blending, kept: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Return the result of `closed_form.forward`. kept: a list to which x, h and the weights are appended, x with the
    graph that computes it from the other two."""
    h = dense(h.detach())
    stack, leaf, weights = Stack(h, blending), h, blending.weights[0].detach()
    with torch.set_grad_enabled(kept is not None):
        if kept is not None:
            leaf, weights = h.requires_grad_(), weights.requires_grad_()
        source, columns = leaf.to(stack.dtype), weights.to(stack.dtype).unbind()
        values = stack.values(source)
        # With torch.addcmul, the backward would take two launches more per candidate.
        terms = (columns[k] * value for k, value in zip(blending.alive, values, strict=True))
        x = functools.reduce(torch.add, terms).to(h.dtype)
        if kept is not None:
            kept += [x, leaf, weights]
    gathered = blending.weights.new_empty(0)
    if blending.statistics:
        with torch.no_grad():
            slopes = stack.slopes(stack.flat(source), [stack.flat(value) for value in values])
            gathered = stack.table(stack.sizes(torch.stack(slopes)), h.numel())
    return x.data, gathered  # has its own version: the graph needs no x, so other modules may write to it


def backward(
    delta: Tensor, h: Tensor, blending: Blending, need_logits: bool, kept: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the result of `closed_form.backward`. kept: the tensors that `forward` saved."""
    x, *inputs = kept
    # The graph is retained for a caller that retains its own, and freed with the tensors that keep it.
    found = torch.autograd.grad(x, inputs if need_logits else inputs[:1], delta, retain_graph=True)
    return found[0], logit_gradient(found[1][None], blending) if need_logits else blending.weights.new_empty(0)
