"""Triton kernels of the routed activation, alone or fused with the batch norms and the residual addition before it.

    h = y + residual,   x = Σ_k w_k σ_k(h)

y and the residual may each be normalised by a batch norm first. Without fusion, h is y. The forward reads the terms of
h and writes x. The backward recomputes h and writes ∂h, with the memory traffic of a ReLU. The gradient through a batch
norm needs sums of ∂h over each channel first, and a second pass writes ∂y.

Statistics, inner products and sums over channels are partial sums of the same passes. A small kernel reduces them in a
fixed order, without atomics, so results are deterministic. Arithmetic is in float32. The basis functions are constants
of the compiler; probabilities and τ are read from memory.
"""

import triton
import triton.language as tl

from flexact.ops import dispatch
from flexact.ops.triton.basis import coefficients
from flexact.ops.triton.basis_functions import (
    FACTORED,
    LINEAR,
    evaluated,
    factored,
    weighted_slope,
    weighted_value,
)
from flexact.ops.triton.tiles import (
    STAGES,
    add_up,
    add_up_all,
    columns,
    load,
    narrow_zeros,
    places,
    plus,
    store,
    store_sum,
    store_sums,
    zeros,
)

MOST_CANDIDATES = tl.constexpr(dispatch.MOST_CANDIDATES)
"""Width of a row in a kernel, a power of 2."""

# The kinds of a term of h. An affine batch norm has a weight and a bias. The pointers to a missing term or norm are
# never read.
ABSENT, PLAIN, NORMALISED, AFFINE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit(do_not_specialize=["outer"], do_not_specialize_on_alignment=["weights_ptr"])
def forward(
    r_ptr, moments_ptr, weight_ptr, bias_ptr, r_moments_ptr, r_weight_ptr, r_bias_ptr,
    y_ptr, weights_ptr, x_ptr, partials_ptr, numel, outer, channels, inner, k,
    BASIS: tl.constexpr, FORMS: tl.constexpr, FAST: tl.constexpr, MANY: tl.constexpr, SENSITIVITIES: tl.constexpr,
    Y: tl.constexpr, RESIDUAL: tl.constexpr,
    BY_CHANNEL: tl.constexpr, LAST: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_J: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Store x, and partial sums of |slopes|."""
    channel, column, inside = columns(tl.program_id(0), channels, inner, LAST, BLOCK_J)
    weights = coefficients(weights_ptr, channel, inside, k, BASIS, FORMS, BY_CHANNEL)
    norm = _norm(moments_ptr, weight_ptr, bias_ptr, channel, channels, inside, Y)
    r_norm = _norm(r_moments_ptr, r_weight_ptr, r_bias_ptr, channel, channels, inside, RESIDUAL)
    sums = _accumulators(len(BASIS) if SENSITIVITIES else 0, y_ptr, BLOCK_A, BLOCK_J, MANY, BY_CHANNEL)
    for row_tile in tl.range(tl.program_id(1), tl.cdiv(outer, BLOCK_A), tl.num_programs(1), num_stages=STAGES):
        offset, mask = places(row_tile, column, inside, numel, outer, channels, inner, BLOCK_A)
        h, _y, _r = _input(y_ptr, r_ptr, offset, mask, norm, r_norm, Y, RESIDUAL, EVEN)
        x, sums = _blended(h, weights, sums, mask, BASIS, FAST, MANY, SENSITIVITIES, EVEN)
        store(x_ptr, offset, x, mask, EVEN)
    _store_all(partials_ptr, sums, channel, inside, channels, MANY, LAST, BY_CHANNEL)


@triton.jit(do_not_specialize=["by_norm", "outer"], do_not_specialize_on_alignment=["weights_ptr"])
def backward(
    r_ptr, moments_ptr, weight_ptr, bias_ptr, r_moments_ptr, r_weight_ptr, r_bias_ptr,
    delta_ptr, y_ptr, weights_ptr, to_h_ptr, partials_ptr, by_norm, numel, outer, channels, inner, k,
    BASIS: tl.constexpr, FORMS: tl.constexpr, FAST: tl.constexpr, MANY: tl.constexpr, NEED_LOGITS: tl.constexpr,
    Y: tl.constexpr, RESIDUAL: tl.constexpr,
    BY_CHANNEL: tl.constexpr, LAST: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_J: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Store ∂h, and partial sums of the inner products and, for the norms, of ∂h, ∂h·ŷ and ∂h·r̂ per channel.

    The partial sums of the inner products start at offset `by_norm`, after the others. If h is the normalised y alone,
    ∂h is stored only for many basis functions; otherwise `backward_through_norm` computes it again.
    """
    channel, column, inside = columns(tl.program_id(0), channels, inner, LAST, BLOCK_J)
    weights = coefficients(weights_ptr, channel, inside, k, BASIS, FORMS, BY_CHANNEL)
    norm = _norm(moments_ptr, weight_ptr, bias_ptr, channel, channels, inside, Y)
    r_norm = _norm(r_moments_ptr, r_weight_ptr, r_bias_ptr, channel, channels, inside, RESIDUAL)
    sums = _accumulators(len(BASIS) if NEED_LOGITS else 0, y_ptr, BLOCK_A, BLOCK_J, MANY, BY_CHANNEL)
    total, with_y, with_r = zeros(3, BLOCK_A, BLOCK_J)
    for row_tile in tl.range(tl.program_id(1), tl.cdiv(outer, BLOCK_A), tl.num_programs(1), num_stages=STAGES):
        offset, mask = places(row_tile, column, inside, numel, outer, channels, inner, BLOCK_A)
        h, y, r = _input(y_ptr, r_ptr, offset, mask, norm, r_norm, Y, RESIDUAL, EVEN)
        delta = load(delta_ptr, offset, mask, EVEN)
        gradient, sums = _differentiated(h, delta, weights, sums, BASIS, FAST, MANY, NEED_LOGITS)
        if Y == PLAIN or RESIDUAL != ABSENT or MANY:
            store(to_h_ptr, offset, gradient, mask, EVEN)
        if Y >= NORMALISED:
            total += gradient
            with_y += gradient * (y * norm[1])
        if RESIDUAL >= NORMALISED:
            with_r += gradient * (r * r_norm[1])
    _store_all(partials_ptr + by_norm, sums, channel, inside, channels, MANY, LAST, BY_CHANNEL)
    if Y >= NORMALISED:
        count: tl.constexpr = 3 if RESIDUAL >= NORMALISED else 2
        store_sum(partials_ptr, total, 0, count, channel, inside, channels, LAST, True)
        store_sum(partials_ptr, with_y, 1, count, channel, inside, channels, LAST, True)
        if RESIDUAL >= NORMALISED:
            store_sum(partials_ptr, with_r, 2, count, channel, inside, channels, LAST, True)


@triton.jit(do_not_specialize=["outer", "elements"], do_not_specialize_on_alignment=["weights_ptr"])
def backward_through_norm(
    r_ptr, moments_ptr, weight_ptr, bias_ptr, r_moments_ptr, r_weight_ptr, r_bias_ptr,
    to_h_ptr, y_ptr, weights_ptr, sums_ptr, to_y_ptr, to_r_ptr, numel, outer, channels, inner, k, elements,
    BASIS: tl.constexpr, FORMS: tl.constexpr, FAST: tl.constexpr, MANY: tl.constexpr, BATCH: tl.constexpr,
    Y: tl.constexpr, RESIDUAL: tl.constexpr,
    BY_CHANNEL: tl.constexpr, LAST: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_J: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Store ∂y = weight·rstd·(∂h − mean(∂h) − ŷ·mean(∂h·ŷ)), and the same for a residual with a norm of its own.

    With a basis, `to_h_ptr` points to δ and ∂h is computed from it. Otherwise it points to ∂h, which ∂y may overwrite.
    """
    channel, column, inside = columns(tl.program_id(0), channels, inner, LAST, BLOCK_J)
    weights = coefficients(weights_ptr, channel, inside, k, BASIS, FORMS, BY_CHANNEL)
    norm = _norm(moments_ptr, weight_ptr, bias_ptr, channel, channels, inside, Y)
    r_norm = _norm(r_moments_ptr, r_weight_ptr, r_bias_ptr, channel, channels, inside, RESIDUAL)
    if BATCH:
        mean_h = tl.load(sums_ptr + channel, inside, other=0.0)[None, :] / elements
        mean_y = tl.load(sums_ptr + channels + channel, inside, other=0.0)[None, :] / elements
        if RESIDUAL >= NORMALISED:
            mean_r = tl.load(sums_ptr + 2 * channels + channel, inside, other=0.0)[None, :] / elements
    for row_tile in tl.range(tl.program_id(1), tl.cdiv(outer, BLOCK_A), tl.num_programs(1), num_stages=STAGES):
        offset, mask = places(row_tile, column, inside, numel, outer, channels, inner, BLOCK_A)
        normalised, y = _term(y_ptr, offset, mask, norm, Y, EVEN)
        gradient = load(to_h_ptr, offset, mask, EVEN)
        if len(BASIS) > 0:
            gradient, _ = _differentiated(normalised, gradient, weights, (), BASIS, FAST, MANY, False)
        to_y = gradient
        if BATCH:
            to_y = gradient - mean_h - y * norm[1] * mean_y
        store(to_y_ptr, offset, norm[2] * to_y, mask, EVEN)
        if RESIDUAL >= NORMALISED:
            to_r = gradient
            if BATCH:
                _normalised, r = _term(r_ptr, offset, mask, r_norm, RESIDUAL, EVEN)
                to_r = gradient - mean_h - r * r_norm[1] * mean_r
            store(to_r_ptr, offset, r_norm[2] * to_r, mask, EVEN)


@triton.jit
def _norm(moments_ptr, weight_ptr, bias_ptr, channel, channels, inside, KIND: tl.constexpr):
    """Return mean, rstd, weight·rstd and bias for each column of a tile; zeros, which are not used, without a norm."""
    if KIND < NORMALISED:
        return 0.0, 0.0, 0.0, 0.0
    else:
        mean = tl.load(moments_ptr + channel, inside, other=0.0)[None, :]
        rstd = tl.load(moments_ptr + channels + channel, inside, other=0.0)[None, :]
        if KIND == AFFINE:
            weight = tl.load(weight_ptr + channel, inside, other=0.0).to(tl.float32)[None, :]
            bias = tl.load(bias_ptr + channel, inside, other=0.0).to(tl.float32)[None, :]
            return mean, rstd, rstd * weight, bias
        else:
            return mean, rstd, rstd, tl.zeros_like(rstd)


@triton.jit
def _input(
    y_ptr, r_ptr, offset, mask, norm, r_norm, Y: tl.constexpr, RESIDUAL: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Return h, and its terms as stored, centred if they have a norm."""
    h, y = _term(y_ptr, offset, mask, norm, Y, EVEN)
    if RESIDUAL == ABSENT:
        return h, y, y
    else:
        added, r = _term(r_ptr, offset, mask, r_norm, RESIDUAL, EVEN)
        return h + added, y, r


@triton.jit
def _term(pointer, offset, mask, norm, KIND: tl.constexpr, EVEN: tl.constexpr):
    """Return a term of h, and its stored value, centred if it has a norm."""
    stored = load(pointer, offset, mask, EVEN)
    if KIND < NORMALISED:
        return stored, stored
    else:
        centred = stored - norm[0]
        return centred * norm[2] + norm[3], centred


@triton.jit
def _blended(
    h, weights, sums, mask, BASIS: tl.constexpr, FAST: tl.constexpr, MANY: tl.constexpr,
    SENSITIVITIES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return x, and the sums with this tile's |slopes| added."""
    x, factor = tl.zeros_like(h), tl.zeros_like(h)
    updated = ()
    for b in tl.static_range(len(BASIS)):
        if MANY and FACTORED[BASIS[b] if isinstance(BASIS[b], int) else -1]:
            quotient, slope = factored(h, BASIS[b], FAST)
            factor += weights[b] * quotient
        else:
            value, slope = evaluated(h, BASIS[b], FAST)
            x += weighted_value(weights[b], value, BASIS[b])
        if SENSITIVITIES:
            if (BASIS[b] if isinstance(BASIS[b], int) else -1) == LINEAR:
                updated = updated + (sums[b],)  # its slope is 1 everywhere and needs no sum
            else:
                size = tl.abs(slope)
                updated = updated + (plus(sums[b], size if EVEN else tl.where(mask, size, 0.0)),)
    if MANY:
        x += tl.where(factor == 0, 0.0, h * factor)  # zero weights mask an infinite h
    return x, updated


@triton.jit
def _differentiated(
    h, delta, weights, sums,
    BASIS: tl.constexpr, FAST: tl.constexpr, MANY: tl.constexpr, NEED_LOGITS: tl.constexpr,
):  # fmt: skip
    """Return δ·Σ w σ′(h), and the sums with this tile's inner products ⟨δ, σ(h)⟩ added."""
    total = tl.zeros_like(h)
    updated = ()
    times_h = delta * h
    for b in tl.static_range(len(BASIS)):
        if MANY and FACTORED[BASIS[b] if isinstance(BASIS[b], int) else -1]:
            quotient, slope = factored(h, BASIS[b], FAST)
            product = times_h * quotient
        else:
            value, slope = evaluated(h, BASIS[b], FAST)
            product = delta * value
        total += weighted_slope(weights[b], slope, BASIS[b])
        if NEED_LOGITS:
            updated = updated + (plus(sums[b], product),)
    return delta * total, updated


@triton.jit
def _accumulators(
    count: tl.constexpr, y_ptr, BLOCK_A: tl.constexpr, BLOCK_J: tl.constexpr,
    MANY: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Return accumulators for the sums over a program, or over each of its channels; many are narrow if possible."""
    if MANY and not BY_CHANNEL:
        return narrow_zeros(count, y_ptr, BLOCK_A, BLOCK_J)
    else:
        return zeros(count, BLOCK_A, BLOCK_J)


@triton.jit
def _store_all(
    partials_ptr, sums, channel, inside, channels,
    MANY: tl.constexpr, LAST: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Store partial sums of this program, or of each of its channels."""
    if MANY and len(sums) > 0:
        store_sums(partials_ptr, sums, channel, inside, channels, LAST, BY_CHANNEL)
    else:
        for i in tl.static_range(len(sums)):
            store_sum(partials_ptr, sums[i], i, len(sums), channel, inside, channels, LAST, BY_CHANNEL)


@triton.jit(do_not_specialize=["alive", "parts", "elements"], do_not_specialize_on_alignment=["gathered_ptr"])
def finish_forward(
    partials_ptr, gathered_ptr, alive, rows, k, parts, per_row, elements,
    BASIS: tl.constexpr, FORMS: tl.constexpr, FAST: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce the partial sums of a forward to the mean sensitivities, one program per row of the routing."""
    row = tl.program_id(0)
    column = tl.arange(0, MOST_CANDIDATES)
    if MANY:
        found = add_up_all(partials_ptr, len(BASIS), row, rows, parts, per_row, BLOCK)
        for b in tl.static_range(len(BASIS)):
            if (BASIS[b] if isinstance(BASIS[b], int) else -1) == LINEAR:
                found = tl.where(tl.arange(0, found.shape[0]) == b, elements * 1.0, found)
    else:
        found = ()
        for b in tl.static_range(len(BASIS)):
            if (BASIS[b] if isinstance(BASIS[b], int) else -1) == LINEAR:
                found = found + (elements * 1.0,)
            else:
                found = found + (add_up(partials_ptr, b, len(BASIS), row, rows, parts, per_row, BLOCK),)
    sensitivities = _combined(found, BASIS, FORMS, MANY) / elements
    is_in = ((alive >> column) & 1) == 1
    tl.store(gathered_ptr + row * k + column, tl.where(is_in, sensitivities, 0.0), column < k)


@triton.jit(
    do_not_specialize=["by_norm", "alive", "parts", "routing_parts"],
    do_not_specialize_on_alignment=["probabilities_ptr", "temperature_ptr"],
)
def finish_backward(
    partials_ptr, found_ptr, probabilities_ptr, temperature_ptr, by_norm, alive,
    channels, parts, per_channel, rows, routing_parts, per_row, k,
    BASIS: tl.constexpr, FORMS: tl.constexpr, FAST: tl.constexpr, MANY: tl.constexpr,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce the partial sums of a backward: one program per channel of the norms, then one per row of the routing.

    The gradient with respect to the logits is stored after the COUNT sums over each channel.
    """
    program = tl.program_id(0)
    if program < channels:
        for i in tl.static_range(COUNT):
            total = add_up(partials_ptr, i, COUNT, program, channels, parts, per_channel, BLOCK)
            tl.store(found_ptr + i * channels + program, total)
    else:
        _store_logit_gradient(
            partials_ptr + by_norm, probabilities_ptr, temperature_ptr, found_ptr + COUNT * channels, alive,
            program - channels, rows, k, routing_parts, per_row, BASIS, FORMS, MANY, BLOCK,
        )  # fmt: skip


@triton.jit
def _store_logit_gradient(
    partials_ptr, probabilities_ptr, temperature_ptr, to_logits_ptr, alive, row, rows, k, parts, per_row,
    BASIS: tl.constexpr, FORMS: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store (p_k/τ)·Σ_j p_j (⟨δ, a_k⟩ − ⟨δ, a_j⟩), from partial inner products with the basis; 0 if eliminated."""
    if MANY:
        found = add_up_all(partials_ptr, len(BASIS), row, rows, parts, per_row, BLOCK)
    else:
        found = ()
        for b in tl.static_range(len(BASIS)):
            found = found + (add_up(partials_ptr, b, len(BASIS), row, rows, parts, per_row, BLOCK),)
    column = tl.arange(0, MOST_CANDIDATES)
    p = tl.load(probabilities_ptr + row * k + column, column < k, other=0.0)
    # Mask the inner products where p = 0, because 0·∞ would be NaN.
    inner = tl.where((((alive >> column) & 1) == 1) & (p != 0), _combined(found, BASIS, FORMS, MANY), 0.0)
    differences = tl.expand_dims(inner, 1) - tl.expand_dims(inner, 0)
    gradient = p / tl.load(temperature_ptr) * tl.sum(tl.expand_dims(p, 0) * differences, axis=1)
    tl.store(to_logits_ptr + row * k + column, gradient, column < k)


@triton.jit
def _combined(found, BASIS: tl.constexpr, FORMS: tl.constexpr, MANY: tl.constexpr):
    """Return the sums of the candidates from those of the basis; entries of eliminated candidates are arbitrary.

    found: a tuple of numbers, or a vector if there are many.
    """
    column = tl.arange(0, MOST_CANDIDATES)
    if MANY:
        shape: tl.constexpr = (MOST_CANDIDATES, found.shape[0])
        forms = tl.zeros(shape, tl.float32)
        for b in tl.static_range(len(BASIS)):
            for i in tl.static_range(len(FORMS[b])):
                if FORMS[b][i] != 0:
                    is_here = (column == i)[:, None] & (tl.arange(0, shape[1]) == b)[None, :]
                    forms = tl.where(is_here, FORMS[b][i], forms)
        total = tl.sum(tl.where(forms == 0, 0.0, forms * found[None, :]), axis=1)
    else:
        total = tl.zeros([MOST_CANDIDATES], tl.float32)
        for b in tl.static_range(len(BASIS)):
            for i in tl.static_range(len(FORMS[b])):
                if FORMS[b][i] != 0:
                    total += tl.where(column == i, FORMS[b][i] * found[b], 0.0)
    return total
