"""Prints a recorded program as a C function and as a Triton function."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from flexact.ops.codegen.recording import Operand, Program

_C = """
#include "generated.h"

void value_and_slope(int size, const float *restrict inputs, float *restrict values, float *restrict slopes) {{
    for (int i = 0; i < size; i++) {{
        const float h = inputs[i];
        {lines}
        values[i] = {value}, slopes[i] = {slope};
    }}
}}
"""
_TRITON = """
def form(h):
    {lines}
    return {value}, {slope}
"""


def c_source(program: Program) -> str:
    """Return the function `value_and_slope` of an array."""
    kinds = ["int" if line.is_mask else "float" for line in program.lines]
    lines = [f"const {kind} {text};" for kind, text in zip(kinds, _assignments(program, _in_c), strict=True)]
    value, slope = (_operand(result, _in_c) for result in program[1:])
    return _C.format(lines="\n        ".join(lines), value=value, slope=slope)


def triton_source(program: Program) -> str:
    """Return the function `form` of a block of numbers, which returns a tuple."""
    lines = ["pass", *_assignments(program, _in_python)]
    block = "tl.full(h.shape, {}, h.dtype)"
    value, slope = (block.format(_in_python(r)) if isinstance(r, float) else r for r in program[1:])
    return _TRITON.format(lines="\n    ".join(lines), value=value, slope=slope)


def _assignments(program: Program, number: Callable[[float], str]) -> Iterator[str]:
    for n, line in enumerate(program.lines):
        yield f"t{n} = {line.template.format(*[_operand(operand, number) for operand in line.operands])}"


def _operand(operand: Operand, number: Callable[[float], str]) -> str:
    return operand if isinstance(operand, str) else number(operand)


def _in_c(number: float) -> str:
    if math.isfinite(number):
        return f"({number!r}f)"
    return "NAN" if math.isnan(number) else f"({'-' if number < 0 else ''}INFINITY)"


def _in_python(number: float) -> str:
    return f"({number!r})" if math.isfinite(number) else f'float("{number}")'
