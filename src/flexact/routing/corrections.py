"""Corrections for the bias of the routing gradient.

The routing gradient grows with the magnitude of a candidate's output, so unbounded candidates win regardless of the
data (Corollary 1). `Policy.correction` selects one of these corrections:

- grad_norm_kl: `target` and `kl`, in the loss (`flexact.penalty`) or in units of the task gradient (`relative_kl`);
- clipped_norm_kl: the same, with sensitivities that are clipped at `Policy.clip`;
- clip_logit_gradient: `clip_rows`;
- output_norm: `normalised_blend`.

All of them operate on tables of (rows, K), with one row per site or per channel, so their cost hardly depends on the
depth. Dropped candidates have probability 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexact.candidates.registry import lookup
from flexact.ops.reference import blend, straight_through
from flexact.routing.gumbel import log_pi, probabilities

_TINY = 1e-30
_SMALLEST_NORM = 1e-3  # minimum divisor, so that an output of zeros does not cause a huge gradient


def target(sensitivity: Tensor, lam: Tensor | float, alive: Tensor) -> Tensor:
    """Return p̃ = softmax(−ḡ/λ) over the candidates that are alive; it favours functions with small slopes."""
    return torch.softmax(torch.where(alive, sensitivity / -lam, -torch.inf), dim=-1)


def kl(target: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p̃ ‖ q) of each row. Its gradient with respect to the logits of q is q − p̃ (Proposition 2)."""
    log_q = log_q.masked_fill(target == 0, 0.0)
    return (torch.xlogy(target, target) - target * log_q).sum(-1)


def clip_rows(gradient: Tensor, bound: float) -> Tensor:
    """Clip the norm of each row's gradient; its direction, and thus the ranking, does not change."""
    norm: Tensor = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
    return gradient * (bound / norm.clamp(min=_TINY)).clamp(max=1.0)


def relative_kl(gradient: Tensor, q: Tensor, target: Tensor, alpha: Tensor, size: Tensor, width: Tensor) -> Tensor:
    """Return the gradient plus α·size/width·(q − p̃).

    size: (rows, 1), the running root-mean-square of the task gradient. It makes α dimensionless: with a larger α,
    a steep candidate needs a more consistent gradient to win.
    width: (rows, 1), the elements per sample at the site. The task gradient sums over the elements, and the KL counts
    once per site, as it does when α·KL is a term of the loss.
    """
    return gradient + alpha * size / width * (q - target)


def normalised_blend(
    h: Tensor,
    logits: Tensor,
    alive: Tensor,
    noise: Tensor,
    temperature: Tensor,
    keys: tuple[str, ...],
    hard: bool,
    channel_dim: int,
) -> Tensor:
    """Return Σ p_k a_k/‖a_k‖, with the norm over one sample of the layer, or of the channel.

    This is the output normalisation of the ablation. It discards the magnitude of the signal.
    """
    p = probabilities(log_pi(logits.view(alive.shape), alive), noise, temperature)
    batch = {0} if alive.shape[0] == 1 else {0, channel_dim % h.dim()}
    dims = [dim for dim in range(h.dim()) if dim not in batch]

    def norm(value: Tensor) -> Tensor:
        found = torch.linalg.vector_norm(value, dim=dims, keepdim=True) if dims else value.abs()
        return found.clamp(min=_SMALLEST_NORM)

    wide = h if h.dtype == torch.float64 else h.float()  # a norm can overflow in half precision
    functions = {k: lookup(key).function for k, key in enumerate(keys)}
    return blend(wide, straight_through(p) if hard else p, functions, channel_dim, norm).to(h.dtype)
