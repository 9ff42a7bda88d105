"""What several tasks share: an MLP, the transformer block of the ViT and of the GPT, and the order of batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(widths: Sequence[int], activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers between these widths, with an activation after every layer but the last."""
    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside), activation()]
    return nn.Sequential(*layers[:-1])


class Block(nn.Module):
    """Attention and an MLP of four times the width, each after a layer norm and around a shortcut."""

    def __init__(self, dim: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, dim))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


def epochs(count: int, steps: int, batch: int, generator: torch.Generator) -> Tensor:
    """Return (steps, batch) indices of `count` items in a new order per epoch. Partial batches are dropped."""
    batch = min(batch, count)
    per_epoch = count // batch
    orders = [torch.randperm(count, generator=generator)[: per_epoch * batch] for _ in range(-(-steps // per_epoch))]
    return torch.cat(orders).view(-1, batch)[:steps]
