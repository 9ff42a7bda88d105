"""The sensitivities of all calls in one step, averaged per row of the routing tables.

Adding a call appends its tensor to a list. Averaging concatenates the list into one tensor, from which each row gathers
its calls, so the number of operations does not depend on the depth.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor

from flexact.errors import FlexActError
from flexact.ops.policy_tables import concatenated

_HAS_DISTRIBUTED = torch.distributed.is_available()


def rank_count() -> int:
    """Return the number of ranks; 1 if torch.distributed is not in use."""
    if not (_HAS_DISTRIBUTED and torch.distributed.is_initialized()):
        return 1
    return torch.distributed.get_world_size()


def mean_over_ranks(values: Tensor) -> Tensor:
    """Return the mean of a tensor over all ranks. Every rank must call this.

    DistributedDataParallel averages only gradients. If the policy used the statistics of its own rank, the logits of
    the ranks would diverge.
    """
    ranks = rank_count()
    if ranks == 1:
        return values
    total = values.clone()
    torch.distributed.all_reduce(total)
    return total / ranks


class CallStatistics:
    """The sensitivities |σ_k′(h)| of all calls since the last `clear`.

    rows, k: the size of the routing tables.
    start: the offset of the first sensitivity in the `values` of `flexact.ops.policy_tables.PolicyKernels.update`.
    """

    def __init__(self, rows: int, k: int, start: int) -> None:
        self.rows, self.k, self.start = rows, k, start
        self._calls: list[tuple[int, Tensor]] = []
        """The first row of each call's site, and the sensitivities, (rows of the site, K of the site)."""
        self._arranged: object = None

    def clear(self) -> None:
        self._calls = []

    def forget(self, first_rows: Set[int]) -> None:
        """Remove the calls of the sites that start at these rows."""
        self._calls = [(first_row, table) for first_row, table in self._calls if first_row not in first_rows]

    def add(self, first_row: int, sensitivity: Tensor) -> None:
        """Add the sensitivities of one call."""
        if type(sensitivity) is not Tensor:  # a user's subclass may not support deepcopy
            with torch._C.DisableTorchFunctionSubclass():
                sensitivity = sensitivity.detach()
        self._calls.append((first_row, sensitivity))

    def means(self, device: torch.device) -> Tensor:
        """Return the mean over the calls of each row and over the ranks, (rows, K); 0 for rows without calls."""
        self._arrange(device)
        if self._in_order:
            return mean_over_ranks(concatenated(self._tables()).view(self.rows, self.k))
        flat = concatenated([*self._tables(), torch.zeros(1, device=device)])
        return mean_over_ranks(flat[self._positions].sum(1) / self._counts.clamp(min=1))

    def of_calls(self, device: torch.device, means: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
        """Return the sensitivities of each call, and the table `calls` of `flexact.ops.policy_tables`.

        means: the means over several ranks; if given, they replace the calls.
        """
        self._arrange(device)
        if means is None:
            return self._tables(), self._kernel_calls
        first = self.start + self.k * torch.arange(self.rows, device=device).unsqueeze(1)
        return [means], torch.cat([self._called.long(), torch.ones_like(first), first], dim=1)

    def called(self, device: torch.device) -> Tensor:
        """Return a mask of the rows that were called, (rows, 1)."""
        self._arrange(device)
        return self._called

    def _tables(self) -> list[Tensor]:
        return [table for _, table in self._calls]

    def _arrange(self, device: torch.device) -> None:
        """Compute where each row's sensitivities are in the concatenated calls, if the set of calls has changed."""
        pattern = (device, [(first_row, table.shape) for first_row, table in self._calls])
        if self._arranged == pattern:
            return
        _refuse_capture(device)
        self._arranged = pattern
        offsets: list[list[int]] = [[] for _ in range(self.rows)]
        widths, end = [0] * self.rows, 0
        for first_row, table in self._calls:
            rows, k = table.shape
            for row in range(first_row, first_row + rows):
                offsets[row].append(end)
                widths[row] = k
                end += k
        # Whether each row has one call, of K sensitivities, in the order of the rows.
        self._in_order = end == self.rows * self.k and offsets == [[row * self.k] for row in range(self.rows)]
        most = max(1, *(len(own) for own in offsets))
        first = torch.tensor([own + [end] * (most - len(own)) for own in offsets], device=device)
        column, width = torch.arange(self.k, device=device), torch.tensor(widths, device=device).view(-1, 1, 1)
        # (rows, calls, K); padded with the position of the zero after the last call
        self._positions = torch.where(column < width, first.unsqueeze(2) + column, end).clamp(max=end)
        self._counts = torch.tensor([[len(own)] for own in offsets], device=device)
        self._called = self._counts > 0
        self._kernel_calls = torch.cat([self._called.long(), self._counts, self.start + first], dim=1)


def _refuse_capture(device: torch.device) -> None:
    """Raise during a CUDA-graph capture, in which the offsets of new calls cannot be copied from the host."""
    if device.type == "cuda" and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing():
        raise FlexActError(
            "this CUDA graph cannot be captured, because its step calls the sites differently from earlier steps. "
            "Warm up with full steps, with schedule.step() after each optimizer.step(), and capture such a step: "
            "without schedule.step(), every forward counts as another micro-batch of the same step."
        )
