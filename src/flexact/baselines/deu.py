"""DEU, a differential equation unit: the solution of a second-order linear ODE (Torkamani et al., 2019, 2020).

Torkamani, Wallis, Shankar and Rooshenas, "Learning compact neural networks using ordinary differential equations as
activation functions" (arXiv 1905.07685); "Differential equation units" (AAAI 2020, arXiv 1909.03069).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flexact.baselines.learnable import Learnable

LEAST = 0.01
"""Minimum |a|. The authors' code uses this bound too, but drops y″ below it, which makes the function discontinuous."""
MOST_GROWTH = 7.0
"""The solution is constant beyond the input at which a term would grow to e⁷, about the authors' bound of 1,000."""


class DifferentialEquationUnit(Learnable):
    """y(z), where a·y″ + b·y′ + c·y is 0 for z ≤ 0 and 1 for z > 0, with learned a, b, c, y(0) and y′(0).

    Five parameters. It starts at a = b = 1 and c = y(0) = y′(0) = 0, a smooth ReLU: 0 for z ≤ 0, z − 1 + exp(−z) above.
    The initial values replace the authors' weights of the two fundamental solutions: the functions are the same, but
    they are continuous in a, b and c where the characteristic roots coincide or are 0.
    """

    start = (1.0, 1.0, 0.0, 0.0, 0.0)

    @staticmethod
    def function(z: Tensor, *equation: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return solution(z, *equation)
        # Autograd would save about a hundred tensors of the input's size; recomputing is cheaper.
        found: Tensor = checkpoint(solution, z, *equation, use_reentrant=False, preserve_rng_state=False)
        return found


def solution(t: Tensor, a: Tensor, b: Tensor, c: Tensor, start: Tensor, slope: Tensor) -> Tensor:
    """Return y(t) for a·y″ + b·y′ + c·y = [t > 0], y(0) = start and y′(0) = slope, in closed form.

    With the characteristic roots p ± √D, the fundamental solutions exp(pt)·cosh(√D·t) and exp(pt)·sinh(√D·t)/√D are
    real and smooth in D. For D < 0 they are a cosine and a sine, and at D = 0 they are exp(pt) and t·exp(pt).
    """
    a = torch.where(a.abs() < LEAST, torch.copysign(torch.full_like(a, LEAST), a), a)
    p, product = -b / (2 * a), c / a
    discriminant = p * p - product
    t = _bounded(t, p, product)
    cosine, sine = _fundamental(p * t, discriminant * t * t)
    free = start * cosine + (slope - p * start) * t * sine
    positive = torch.relu(t)
    return free + positive * positive / a * _step_response(p * positive, product * positive * positive)


def _bounded(t: Tensor, p: Tensor, product: Tensor) -> Tensor:
    """Return the inputs, limited to where no exponential of a root grows beyond exp(MOST_GROWTH)."""
    largest = torch.sqrt(p * p + torch.relu(-product) + 1e-12)  # the larger root's real part is at most p + largest
    tiny = 1e-6
    upper, lower = MOST_GROWTH / (torch.relu(p + largest) + tiny), MOST_GROWTH / (torch.relu(largest - p) + tiny)
    return torch.maximum(torch.minimum(t, upper), -lower)


def _fundamental(q: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Return exp(q)·cosh(√s) and exp(q)·sinh(√s)/√s; with a cosine and a sine for s < 0, and series near s = 0."""
    near = s.abs() < 0.1
    root = torch.sqrt(torch.where(near, torch.ones_like(s), s.abs()))
    zero = torch.zeros_like(root)
    real, turning = torch.where(~near & (s > 0), root, zero), torch.where(~near & (s < 0), root, zero)
    rising, falling, decay = torch.exp(q + real), torch.exp(q - real), torch.exp(q)
    small = torch.where(near, s, zero)
    cosine = 1 + small / 2 * (1 + small / 12 * (1 + small / 30 * (1 + small / 56 * (1 + small / 90))))
    sine = 1 + small / 6 * (1 + small / 20 * (1 + small / 42 * (1 + small / 72 * (1 + small / 110))))
    return (
        torch.where(near, decay * cosine, torch.where(s > 0, (rising + falling) / 2, decay * torch.cos(turning))),
        torch.where(
            near, decay * sine, torch.where(s > 0, (rising - falling) / (2 * root), decay * torch.sin(turning) / root)
        ),
    )


def _step_response(q: Tensor, product: Tensor) -> Tensor:
    """Return f(1) for f″ − 2q·f′ + product·f = 1 and f(0) = f′(0) = 0.

    It is the divided difference of exp at 0 and at both roots x and y, with x + y = 2q and x·y = product. Each case
    has its own formula, because the textbook's (1 − exp(q)·...) / product suffers from cancellation where a
    root is near 0.
    """
    near = (q.abs() < 0.5) & (product.abs() < 0.25)
    one = torch.ones_like(product)
    q_far, product_far = torch.where(near, one, q), torch.where(near, one / 2, product)
    s = q_far * q_far - product_far
    cosine, sine = _fundamental(q_far, s)
    turning = (1 - cosine + q_far * sine) / torch.where(s > 0, one, product_far)
    large = q_far + torch.copysign(one, q_far) * torch.sqrt(torch.where(s > 0, s, one))
    large = torch.where(s > 0, large, one)
    real = (sine - _mean_exponential(torch.where(s > 0, product_far, one) / large)) / large
    zero = torch.zeros_like(product)
    return torch.where(
        near,
        _series(torch.where(near, q, zero), torch.where(near, product, zero)),
        torch.where(s > 0, real, turning),
    )


def _series(q: Tensor, product: Tensor) -> Tensor:
    """Return Σ hₙ / (n + 2)! with the complete symmetric polynomials hₙ of the two roots, for roots below 1.3."""
    before, current = torch.zeros_like(product), torch.ones_like(product)
    total, factorial = current / 2, 2.0
    for n in range(1, 17 if product.dtype == torch.float64 else 9):
        before, current = current, 2 * q * current - product * before
        factorial *= n + 2
        total = total + current / factorial
    return total


def _mean_exponential(x: Tensor) -> Tensor:
    """Return (exp(x) − 1) / x, and 1 at 0."""
    near = x.abs() < 1e-6
    safe = torch.where(near, torch.ones_like(x), x)
    return torch.where(near, 1 + x / 2, torch.expm1(safe) / safe)
