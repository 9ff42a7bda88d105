"""What pulls the routing straight.

The routing gradient grows with the size of a candidate's output, so unbounded candidates win whatever the data says
(Corollary 1). Each correction below is one function:

- grad_norm_kl: `target` and `kl`, in the loss (`penalty`) or in units of the task gradient (`relative_kl`);
- clipped_norm_kl: the same from `clipped` sensitivities;
- clip_logit_gradient: `clip_rows`;
- output_norm: `normalised_blend`;
- advantage="normalized": `normalised_advantage`, alone or with one of the others.

All of them work on tables of (rows, K), one row for a site or for a channel of it, so that a deep network pays for them
once. Dropped candidates have probability 0 and take no part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexact.candidates import lookup
from flexact.config import FlexConfig
from flexact.ops import DEVIATION, SENSITIVITY
from flexact.routing.router import log_pi, probabilities

_TINY = 1e-30
_SMALLEST_NORM = 1e-3  # of a normalised output, so that one of zeros passes no huge gradient on


def statistics_needed(config: FlexConfig) -> int:
    """Which sums the forward sweep must gather, as flags."""
    uses_kl = config.correction in ("grad_norm_kl", "clipped_norm_kl") and config.alpha > 0
    return (SENSITIVITY if uses_kl else 0) | (DEVIATION if config.advantage == "normalized" else 0)


def target(sensitivity: Tensor, lam: Tensor | float, alive: Tensor) -> Tensor:
    """p̃ = softmax(−ḡ/λ) over the candidates still in: the flatter a function at this site, the likelier."""
    return torch.softmax((-sensitivity / lam).masked_fill(~alive, -torch.inf), dim=-1)


def clipped(sensitivity: Tensor, bound: float) -> Tensor:
    """ḡ bounded from above, which makes the steep candidates alike."""
    return sensitivity.clamp(max=bound)


def kl(target: Tensor, log_q: Tensor) -> Tensor:
    """KL(p̃ ‖ q) of each row; its gradient to log q's logits is q − p̃ (Proposition 2)."""
    log_q = log_q.masked_fill(target == 0, 0.0)
    return (torch.xlogy(target, target) - target * log_q).sum(-1)


def clip_rows(gradient: Tensor, bound: float) -> Tensor:
    """Each row's gradient with its norm bounded; its direction, and so the ranking, stays."""
    norm: Tensor = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
    return gradient * (bound / norm.clamp(min=_TINY)).clamp(max=1.0)


def normalised_advantage(gradient: Tensor, deviation: Tensor, alive: Tensor) -> Tensor:
    """Each candidate's share divided by the root-mean-square of a_k − x, relative to the row's mean of these.

    That takes the size of a candidate's output out of ⟨δ, a_k − x⟩, and leaves how well it is aligned with what the
    loss asks for. A row without deviations (one that was not called, or has normalised outputs already) stays.
    """
    size = deviation.clamp(min=0).sqrt()
    mean = (size * alive).sum(-1, keepdim=True) / alive.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(mean > 0, gradient * mean / size.clamp(min=1e-6 * mean + _TINY), gradient)


def relative_kl(gradient: Tensor, q: Tensor, target: Tensor, alpha: Tensor, size: Tensor, width: Tensor) -> Tensor:
    """The gradient plus α·size/width·(q − p̃).

    size: (rows, 1), the task gradient's running root-mean-square. In its units α is a pure number: how steadily the
    loss must ask for a steep candidate to have it.
    width: (rows, 1), elements of a sample at the site. The loss speaks once for each of them and the KL once a site, as
    it does when α·KL is a term of the loss.
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
    """Σ p_k a_k/‖a_k‖, each candidate's output divided by its norm over one sample of the layer, or of the channel.

    The ablation's output normalisation, written plainly; it throws the size of the signal away.
    """
    rows, k = alive.shape
    wide = h if h.dtype == torch.float64 else h.float()  # a norm soon leaves the range of half precision
    p = probabilities(log_pi(logits.view(rows, k), alive), noise, temperature)
    if hard:  # straight-through
        p = torch.nn.functional.one_hot(p.argmax(-1), k) - p.detach() + p
    shape = [1] * h.dim()
    own = {0}
    if rows > 1:
        shape[channel_dim] = rows
        own.add(channel_dim % h.dim())
    dims = [dim for dim in range(h.dim()) if dim not in own]
    x = torch.zeros_like(wide)
    for weight, key in zip(p.unbind(1), keys, strict=True):
        value = lookup(key).function(wide)
        norm = torch.linalg.vector_norm(value, dim=dims, keepdim=True) if dims else value.abs()
        x = x + weight.view(shape) * value / norm.clamp(min=_SMALLEST_NORM)
    return x.to(h.dtype)
