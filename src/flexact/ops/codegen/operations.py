"""torch's elementwise operations as expressions that are valid both in C and in Triton.

`generated.h` defines the functions for C, and `triton/generated.py` for Triton. Operands are names or numbers. NaN
propagates as it does in torch.
"""

from __future__ import annotations

_CLAMP = "where({0} < {1}, {1}, where({0} > {2}, {2}, {0}))"

VALUES = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "neg": "-{0}",
    "abs": "abs_of({0})",
    "sign": "where({0} > 0, 1, where({0} < 0, -1, 0))",
    "sgn": "where({0} > 0, 1, where({0} < 0, -1, 0))",
    "reciprocal": "1 / {0}",
    "exp": "exp_of({0})",
    "exp2": "exp_of(0.6931471805599453 * {0})",
    "expm1": "expm1_of({0})",
    "log": "log_of({0})",
    "log2": "1.4426950408889634 * log_of({0})",
    "log1p": "log1p_of({0})",
    "sqrt": "sqrt_of({0})",
    "rsqrt": "1 / sqrt_of({0})",
    "sigmoid": "sigmoid_of({0})",
    "tanh": "tanh_of({0})",
    "erf": "erf_of({0})",
    "sin": "sin_of({0})",
    "cos": "cos_of({0})",
    "floor": "floor_of({0})",
    "remainder": "{0} - floor_of({0} / {1}) * {1}",
    "pow": "pow_of({0}, {1})",
    "relu": "where({0} <= 0, 0, {0})",
    "clamp": _CLAMP,
    "clamp_min": "where({0} < {1}, {1}, {0})",
    "clamp_max": "where({0} > {1}, {1}, {0})",
    "maximum": "where(({0} > {1}) | ({0} != {0}), {0}, {1})",
    "minimum": "where(({0} < {1}) | ({0} != {0}), {0}, {1})",
    "where": "where({0}, {1}, {2})",
    "masked_fill": "where({1}, {2}, {0})",
    "sigmoid_backward": "{0} * (1 - {1}) * {1}",
    "tanh_backward": "{0} * (1 - {1} * {1})",
    "threshold_backward": "where({1} <= {2}, 0, {0})",
    "softshrink_backward": "where(({1} >= -{2}) & ({1} <= {2}), 0, {0})",
    "hardshrink_backward": "where(({1} >= -{2}) & ({1} <= {2}), 0, {0})",
}
"""Operations whose result is a number."""

COMPARISONS = {
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "isnan": "{0} != {0}",
}
"""Operations on numbers whose result is a mask."""

LOGICAL = {
    **dict.fromkeys(("logical_and", "bitwise_and", "__and__"), "{0} & {1}"),
    **dict.fromkeys(("logical_or", "bitwise_or", "__or__"), "{0} | {1}"),
    **dict.fromkeys(("logical_xor", "bitwise_xor", "__xor__"), "{0} != {1}"),
    **dict.fromkeys(("logical_not", "bitwise_not"), "{0} == 0"),
}
"""Operations on masks."""

MASK_OF = {"where": 0, "masked_fill": 1}
"""The position of the mask among the operands of an operation on numbers."""

SAME = frozenset(
    {"alias", "clone", "contiguous", "copy", "detach", "expand", "lift_fresh", "view", "_to_copy", "_unsafe_view"}
)
"""Operations whose result has the values of their operand: of the second one, if they write to the first."""

CONSTANT = frozenset(
    {"full", "full_like", "ones", "ones_like", "zeros", "zeros_like", "new_full", "new_ones", "new_zeros"}
    | {"scalar_tensor", "_efficientzerotensor"}
)
"""Operations whose result is one number in all places, whatever their operands."""
