"""The functions of generated Triton code (see `codegen.operations`), and a kernel that evaluates such code.

NaN propagates.
"""

import triton
import triton.language as tl


@triton.jit
def where(mask, a, b):
    return tl.where(mask, a, b)


@triton.jit
def abs_of(x):
    return tl.abs(x)


@triton.jit
def floor_of(x):
    return tl.floor(x)


@triton.jit
def sqrt_of(x):
    return tl.sqrt(x)


@triton.jit
def exp_of(x):
    return tl.exp(x)


@triton.jit
def expm1_of(x):
    series = 1 / 24 + x * (1 / 120 + x * (1 / 720 + x / 5040))
    near_0 = x * (1 + x * (1 / 2 + x * (1 / 6 + x * series)))  # where exp(x) − 1 cancels
    return tl.where(tl.abs(x) < 0.3, near_0, tl.exp(x) - 1)


@triton.jit
def log_of(x):
    return tl.log(x)


@triton.jit
def log1p_of(x):
    """Return log(u)·x/(u − 1) for u = 1 + x, in which the rounding errors of u cancel."""
    u = 1 + x
    d = u - 1
    return tl.where(d == 0, x, tl.where(x > 1e9, tl.log(x), tl.log(u) * (x / d)))


@triton.jit
def sigmoid_of(x):
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1 + e)


@triton.jit
def tanh_of(x):
    m = expm1_of(-2 * tl.abs(x))
    size = m / (m + 2)
    return tl.where(x < 0, size, -size)


@triton.jit
def erf_of(x):
    return tl.erf(x)


@triton.jit
def sin_of(x):
    return tl.sin(x)


@triton.jit
def cos_of(x):
    return tl.cos(x)


@triton.jit
def pow_of(x, y):
    return tl.exp(y * tl.log(x))


@triton.jit
def evaluate(h_ptr, value_ptr, slope_ptr, size, BASIS: tl.constexpr, BLOCK: tl.constexpr):
    """Store the values and slopes of the only function of a basis, the form of a custom candidate."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value, slope = BASIS[0](tl.load(h_ptr + at, at < size, other=0.0))
    tl.store(value_ptr + at, value, at < size)
    tl.store(slope_ptr + at, slope, at < size)
