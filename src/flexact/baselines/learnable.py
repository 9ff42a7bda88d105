"""What the baselines share: parameters for the whole layer or for each channel, shaped to meet a layer's input."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flexact.errors import FlexActError


class Learnable(nn.Module):
    """An elementwise function with parameters that train with the network.

    channels: how many sets of parameters; None for one that the whole layer shares.
    channel_dim: which dimension of the input holds the channels.
    """

    def __init__(self, channels: int | None = None, channel_dim: int = 1) -> None:
        super().__init__()
        if channels is not None and (isinstance(channels, bool) or not isinstance(channels, int) or channels < 1):
            raise FlexActError(f"channels must be a number of channels, or None for the layer; got {channels!r}.")
        self.channels, self.channel_dim = channels, channel_dim

    def _parameter(self, *start: float) -> nn.Parameter:
        """A parameter of (rows, n) that starts at these n numbers in every row."""
        return nn.Parameter(torch.tensor(start).repeat(self.channels or 1, 1))

    def _columns(self, table: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        """The columns of a (rows, n) table, each shaped to broadcast against h."""
        shape = [1] * h.dim()
        if self.channels is not None:
            dim = self.channel_dim
            if not -h.dim() <= dim < h.dim() or h.shape[dim] != self.channels:
                raise FlexActError(
                    f"{type(self).__name__} has parameters for {self.channels} channels in dimension {dim}, but its "
                    f"input has shape {tuple(h.shape)}. Give it channel_dim=..., or channels=None for the layer."
                )
            shape[dim] = self.channels
        return tuple(column.reshape(shape) for column in table.unbind(1))

    def extra_repr(self) -> str:
        return "" if self.channels is None else f"channels={self.channels}, channel_dim={self.channel_dim}"
