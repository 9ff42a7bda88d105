"""Base class of the baselines: parameters per layer or per channel, broadcast against the input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from flexact.errors import FlexActError


class Learnable(nn.Module):
    """An elementwise function of the input and a few learned numbers.

    channels: number of parameter sets; None shares one set across the layer.
    channel_dim: the channel dimension of the input.
    """

    start: tuple[float, ...]
    """The initial values of the learned numbers."""
    function: Callable[..., Tensor]
    """(z, *weights) -> the activation, where each of the weights broadcasts against z."""

    def __init__(self, channels: int | None = None, channel_dim: int = 1) -> None:
        super().__init__()
        if channels is not None and (isinstance(channels, bool) or not isinstance(channels, int) or channels < 1):
            raise FlexActError(
                f"got channels={channels!r}. It must be a positive int, or None for one set of parameters per layer."
            )
        self.channels, self.channel_dim = channels, channel_dim
        self.learned = nn.Parameter(torch.tensor(self.start).repeat(channels or 1, 1))

    def weights(self) -> Tensor:
        """Return the numbers that the function takes, (rows, n)."""
        return self.learned

    def forward(self, z: Tensor) -> Tensor:
        return self.function(z, *self._columns(self.weights(), z))

    def _columns(self, table: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        """Return the columns of a (rows, n) table, each shaped to broadcast against h."""
        shape = [1] * h.dim()
        if self.channels is not None:
            dim = self.channel_dim
            if not -h.dim() <= dim < h.dim() or h.shape[dim] != self.channels:
                raise FlexActError(
                    f"the input of this {type(self).__name__} has shape {tuple(h.shape)}, but dimension {dim} must "
                    f"have {self.channels} channels. Pass another channel_dim, or channels=None for one set of "
                    "parameters per layer."
                )
            shape[dim] = self.channels
        return tuple(column.reshape(shape) for column in table.unbind(1))

    def extra_repr(self) -> str:
        return "" if self.channels is None else f"channels={self.channels}, channel_dim={self.channel_dim}"
