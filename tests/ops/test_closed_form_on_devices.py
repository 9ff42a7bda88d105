"""Tests of the closed form as it runs on a GPU, on torch's meta device, which has no data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flexact.ops import stacked_form
from flexact.ops.blending import Blending

NAMES = ("relu", "tanh", "gelu", "silu", "identity")


class Copies(TorchDispatchMode):
    """Counts the device tensors that an operation reads but no operation has made: they are copies of host values,
    such as a list of indexes. Such a copy synchronizes, and a CUDA graph cannot capture it."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known, self.found = [*known], list[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        known = {id(one) for one in self.known}
        read = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) and one.device.type == "meta"]
        self.found += [str(function) for one in read if id(one) not in known]
        self.known += [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        return result


@pytest.mark.parametrize("alive", [(0, 1, 2, 3, 4), (1, 3), (4,)], ids=str)
@pytest.mark.parametrize("rows", [1, 4], ids=["layer", "channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_is_copied_from_the_host(rows: int, alive: tuple[int, ...], dtype: torch.dtype) -> None:
    h, delta = (torch.empty(2, 4, 3, dtype=dtype, device="meta") for _ in range(2))
    p, temperature = torch.empty(rows, len(NAMES), device="meta"), torch.empty((), device="meta")
    blending = Blending(p, p, temperature, NAMES, alive, 1, statistics=True)
    with Copies(h, delta, p, temperature) as copies:
        for kept in (None, list[Tensor]()):
            _, sensitivities = stacked_form.forward(h, blending, kept)
            _, to_logits = stacked_form.backward(delta, h, blending, True, kept or ())
    assert copies.found == []
    assert (sensitivities.shape, to_logits.shape) == ((rows, len(NAMES)), (rows * len(NAMES),))
