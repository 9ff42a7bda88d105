"""The plain module of a site whose channels picked different functions."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ChannelPicks(nn.Module):
    """Applies each function to its own channels. It has no parameters and leaves nothing in a `state_dict`."""

    def __init__(self, functions: list[nn.Module], channels: list[list[int]], channel_dim: int = 1) -> None:
        super().__init__()
        self.functions = nn.ModuleList(functions)
        self.channel_dim = channel_dim
        for i, own in enumerate(channels):
            self.register_buffer(f"channels_{i}", torch.tensor(own), persistent=False)
        order = torch.tensor([channel for own in channels for channel in own])
        self.register_buffer("position", torch.argsort(order), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        parts = [
            function(h.index_select(self.channel_dim, self.get_buffer(f"channels_{i}")))
            for i, function in enumerate(self.functions)
        ]
        return torch.cat(parts, self.channel_dim).index_select(self.channel_dim, self.get_buffer("position"))
