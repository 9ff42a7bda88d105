"""Identifiers of the basis functions, as compile-time constants of the kernels."""

import triton.language as tl

LINEAR = tl.constexpr(0)
RELU = tl.constexpr(1)
SIGMOID = tl.constexpr(2)
TANH = tl.constexpr(3)
GELU = tl.constexpr(4)
SILU = tl.constexpr(5)
MISH = tl.constexpr(6)
NEGATIVE_EXP = tl.constexpr(7)
SOFTPLUS = tl.constexpr(8)
HARDSWISH = tl.constexpr(9)
RELU6 = tl.constexpr(10)
SOFTSIGN = tl.constexpr(11)
RELU_SQUARED = tl.constexpr(12)
SINE = tl.constexpr(13)
