"""The built-in candidates as linear combinations of basis functions in Triton.

Candidates share terms: leaky_relu is 0.01·h + 0.99·relu(h), and elu is relu(h) plus a negative exponential. A blend is
therefore computed over a *basis* of functions, each evaluated once, with coefficients folded from the candidates'
weights. A sum over a candidate's values or slopes is the same combination of the sums of the basis functions. Only
candidates that are increasing everywhere are decomposed, so |σ′| is the combination of the slopes as well.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from flexact.candidates.registry import lookup
from flexact.ops.triton import generated
from flexact.ops.triton.basis_functions import FORMS

FEW = 10
"""Maximum size of a basis that is kept while candidates are eliminated; see `blend`.

The kernels of a larger basis are bound by arithmetic, so they evaluate its functions with fewer instructions, and store
∂h rather than compute it twice.
"""

_log = logging.getLogger(__name__)

Part = Any
"""A basis function: the number of a built-in one, or the Triton form of a custom candidate."""


class _WithCustomForms(tuple[Part, ...]):
    """A basis with custom forms as a compile-time constant.

    Without this key, Triton's cache on disk would tell functions in a tuple apart by their names only.
    """

    @functools.cached_property
    def cache_key(self) -> str:
        """The key of this constant, which changes with the source code of the forms."""
        key = repr([getattr(part, "cache_key", part) for part in self])
        return hashlib.sha256(key.encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class Blend:
    """A set of candidates in the form that the kernels take.

    `blend` caches the instances, so they are compared by identity. A kernel is compiled per basis, not per set of alive
    candidates, so sites that eliminated different candidates usually share it.
    """

    basis: tuple[Part, ...]
    """The functions to evaluate: those of the alive candidates, or those of all candidates if they are few."""
    forms: tuple[tuple[float, ...], ...]
    """Coefficients, indexed by basis function and then by candidate (eliminated ones included)."""
    alive: int
    """Bit mask of the alive candidates; the weights of the others are 0."""

    @property
    def has_many(self) -> bool:
        """Whether the basis is larger than `FEW`."""
        return len(self.basis) > FEW

    def constants(self, fast: bool) -> tuple[tuple[Part, ...], tuple[tuple[float, ...], ...], bool, bool]:
        """Return the compile-time constants in the order in which every kernel takes them."""
        return self.basis if self.is_built_in else _WithCustomForms(self.basis), self.forms, fast, self.has_many

    @property
    def is_built_in(self) -> bool:
        """Whether the basis has no custom forms."""
        return all(isinstance(part, int) for part in self.basis)

    def picks(self) -> list[Blend]:
        """Return a blend for each alive candidate alone, as a site that commits to it has."""
        alone = []
        for k in range(self.alive.bit_length()):
            if self.alive >> k & 1:
                kept = [b for b, form in enumerate(self.forms) if form[k]]
                alone.append(Blend(tuple(self.basis[b] for b in kept), tuple(self.forms[b] for b in kept), 1 << k))
        return alone


def is_fast(h: Tensor) -> bool:
    """Return whether the GPU's approximate instructions are accurate enough for h, as they are in half precision."""
    return h.is_cuda and h.element_size() == 2


def form(key: str) -> dict[Part, float]:
    """Return a candidate as coefficients by basis function; empty if it has no Triton implementation."""
    if not is_custom(key):
        return FORMS[key]
    custom = lookup(key).triton or generated.form(key)
    return {} if custom is None else {custom: 1.0}


def is_custom(key: str) -> bool:
    return key not in FORMS


@functools.cache
def has_form(key: str) -> bool:
    """Return whether a candidate has a Triton implementation, and log a warning once if it has none."""
    found = bool(form(key))
    if not found:
        _log.warning("no Triton kernel for %s: its sites fall back to the closed form, which is slower.", key)
    return found


@functools.cache
def blend(keys: tuple[str, ...], alive: tuple[int, ...]) -> Blend:
    """Return the blend of the alive candidates.

    A basis of at most FEW functions is kept until one candidate is left. The kernels are bound by memory: five
    candidates instead of two cost 2 % of a training step (candidates.csv of the overhead study), while compiling a
    kernel for a smaller basis takes up to a second.
    """
    # Eliminated custom candidates are left out: their forms may be missing or unchecked.
    forms = [form(key) if k in alive or not is_custom(key) else {} for k, key in enumerate(keys)]
    every, needed = (dict.fromkeys(part for k in some for part in forms[k]) for some in (range(len(keys)), alive))
    chosen = list(every if len(every) <= FEW and len(alive) > 1 else needed)
    numbers, custom = sorted(p for p in chosen if isinstance(p, int)), [p for p in chosen if not isinstance(p, int)]
    basis = (*numbers, *custom)
    table = tuple(tuple(form.get(part, 0.0) for form in forms) for part in basis)
    return Blend(basis, table, sum(1 << k for k in alive))


@triton.jit
def coefficients(
    weights_ptr, channel, inside, k, BASIS: tl.constexpr, FORMS: tl.constexpr, BY_CHANNEL: tl.constexpr
):  # fmt: skip
    """Return the coefficient of each basis function from a (rows, k) table of weights, for each column of a tile or one
    for all columns."""
    row = tl.where(inside, channel, 0)[None, :] if BY_CHANNEL else tl.zeros([1, 1], tl.int32)
    found = ()
    for b in tl.static_range(len(BASIS)):
        total = tl.zeros_like(row).to(tl.float32)
        for i in tl.static_range(len(FORMS[b])):
            if FORMS[b][i] != 0:
                total += FORMS[b][i] * tl.load(weights_ptr + row * k + i)
        found = found + (total,)
    return found
