"""Records a candidate and its derivative as a straight-line program of elementwise operations.

The candidate runs once on a small float32 tensor under a dispatch mode, which sees every operation of torch, those of
autograd included. Operations outside the table are decomposed as torch.compile does.
"""

from __future__ import annotations

import math
from string import Formatter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode

from flexact.candidates.registry import Candidate
from flexact.ops.codegen.operations import COMPARISONS, CONSTANT, LOGICAL, MASK_OF, SAME, VALUES

Operand = str | float
"""The name of a variable, or a number."""

_MOST_FACTORS = 8
"""Maximum integer exponent that is written as a product."""
_TEMPLATES = VALUES | COMPARISONS | LOGICAL
_MASKS = COMPARISONS.keys() | LOGICAL.keys()
_WITHOUT_OPERANDS = CONSTANT | {"sum"}
"""Operations whose operands do not matter. Autograd differentiates the sum of the values, but does not use it."""
_KNOWN = _TEMPLATES.keys() | SAME | _WITHOUT_OPERANDS


class Unsupported(Exception):
    """Raised if a candidate is not a straight line of known elementwise operations; the message gives the reason."""


class Line(NamedTuple):
    """One assignment."""

    template: str
    """An expression of `operations`."""
    operands: tuple[Operand, ...]
    is_mask: bool = False


class Program(NamedTuple):
    """Line n assigns the variable `tn`; the input is `h`."""

    lines: tuple[Line, ...]
    value: Operand
    slope: Operand


def record(candidate: Candidate) -> Program:
    """Return the program of a candidate. Raise Unsupported if it has none, and what the candidate itself raises."""
    h = torch.linspace(-1.3, 1.7, 5, dtype=torch.float32, device="cpu")
    recorder = _Recorder(h)
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False), recorder:
        value = candidate.function(h)
        slope = candidate.derivative(h, value)
    return Program(tuple(recorder.lines), recorder.number(value), recorder.number(slope))


class _Recorder(TorchDispatchMode):
    """Assigns a variable to the result of every operation.

    Results are identified by their storage, so that views and in-place operations need no bookkeeping.
    """

    def __init__(self, h: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: dict[Line, str] = {}
        self._operands: dict[int, Operand] = {_storage(h): "h"}
        self._alive = [h]  # so that no storage is reused

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch would import all of torch._dynamo, in more than a second

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name: str = func.overloadpacket.__name__
        if func._schema.is_mutable:
            name = name.removesuffix("_")
        if name not in _KNOWN:
            with self:
                result = decomposition_table.get(func, func.decompose)(*args, **kwargs)
            if result is NotImplemented:
                raise Unsupported(f"it calls {func}")
            return result
        operand = None if name in _WITHOUT_OPERANDS else self._computed(name, args, kwargs)
        result = func(*args, **kwargs)
        self._alive.append(result)
        if result.dtype != (torch.bool if name in _MASKS else torch.float32) and result.dim() and name not in SAME:
            raise Unsupported(f"{func} returns {result.dtype}")
        if name != "sum":
            self._operands[_storage(result)] = float(result.flatten()[0]) if operand is None else operand
        return result

    def number(self, result: Tensor) -> Operand:
        """Return a result as a number."""
        return self._converted(result, torch.float32)

    def _computed(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operand | None:
        """Return what an operation computes; None if it has no operands but numbers."""
        if name in SAME:
            return self._same(name, args, kwargs)
        args = self._without_defaults(name, args, kwargs)
        operands = []
        for position, arg in enumerate(args):
            is_mask = name in LOGICAL or position == MASK_OF.get(name)
            dtype = torch.bool if is_mask else torch.float32
            operands.append(self._converted(arg, dtype) if isinstance(arg, Tensor) else float(arg))
        if name == "pow" and isinstance(operands[1], float):
            return self._power(operands[0], operands[1])
        template = _TEMPLATES[name]
        if len(operands) != len({field for _, field, _, _ in Formatter().parse(template) if field}):
            raise Unsupported(f"it calls {name} with {len(operands)} operands")
        return self._line(template, *operands, is_mask=name in _MASKS)

    def _same(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Operand:
        """Return the operand whose values an operation copies."""
        source: Tensor = args[1] if name == "copy" else args[0]
        if name == "lift_fresh" and source.numel() == 1:  # torch.tensor(0.5) inside the function
            return float(source)
        dtype = args[0].dtype if name == "copy" else kwargs.get("dtype") or source.dtype
        if dtype not in (torch.float32, torch.bool):
            raise Unsupported(f"it converts to {dtype}")
        return self._converted(source, dtype)

    def _without_defaults(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the operands of an operation, with its options applied to them."""
        given = {key: value for key, value in kwargs.items() if value is not None}
        if (factor := given.pop("alpha", 1)) != 1:
            with self:
                args = args[0], args[1] * factor
        if given:
            raise Unsupported(f"it calls {name} with {', '.join(given)}")
        if name == "clamp":
            low, high = (*args[1:], None, None)[:2]
            return args[0], -math.inf if low is None else low, math.inf if high is None else high
        return args

    def _power(self, base: Operand, exponent: float) -> Operand | None:
        """Return base ** exponent. Small integer powers are products, as in torch."""
        size = abs(exponent)
        if isinstance(base, float) or size == 0:
            return None
        if size == 0.5:
            power = self._line("sqrt_of({0})", base)
        elif size == int(size) and size <= _MOST_FACTORS:
            power = base if size == 1 else self._line(" * ".join(["{0}"] * int(size)), base)
        else:
            return self._line(VALUES["pow"], base, exponent)
        return power if power is None or exponent > 0 else self._line(VALUES["reciprocal"], power)

    def _converted(self, tensor: Tensor, dtype: torch.dtype) -> Operand:
        """Return the operand of a tensor, a mask as a number or as it is."""
        found = self._operands.get(_storage(tensor))
        if found is None:
            raise Unsupported("it uses a tensor that is not computed from its input")
        if isinstance(found, float) or tensor.dtype == dtype:
            return found
        if dtype == torch.bool:
            raise Unsupported("it uses numbers as a mask")
        return self._line("where({0}, 1, 0)", found) or found

    def _line(self, template: str, *operands: Operand, is_mask: bool = False) -> Operand | None:
        """Return the variable of an expression, assigned once; None if it is a constant."""
        if all(isinstance(operand, float) for operand in operands):
            return None
        return self.lines.setdefault(Line(template, operands, is_mask), f"t{len(self.lines)}")


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
