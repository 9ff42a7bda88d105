"""A byte-level GPT on the sources of Python's standard library."""

from __future__ import annotations

import sysconfig
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexact.studies.picks.task import Problem, Task
from flexact.studies.picks.tasks.parts import Block

DIM, DEPTH, HEADS, CONTEXT, BATCH = 128, 4, 4, 64, 32
BYTES = 8_000_000
WINDOWS = {"held_out": 256, "test": 2048}
"""Number of windows of text over which the held-out loss and the score are averaged."""
PARTS = {"train": (0.0, 0.9), "held_out": (0.9, 0.92), "test": (0.92, 1.0)}


@lru_cache(maxsize=1)
def text() -> Tensor:
    """Return the modules of the standard library, concatenated in a fixed random order, as uint8."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py"))
    files = [file for file in files if file.parent.name not in ("site-packages", "dist-packages", "test")]
    contents = [file.read_bytes() for file in files]
    order = torch.randperm(len(contents), generator=torch.Generator().manual_seed(0)).tolist()
    joined = bytearray(b"".join(contents[i] for i in order))[:BYTES]
    return torch.frombuffer(joined, dtype=torch.uint8)


class GPT(nn.Module):
    """Learned positions, four blocks, 256 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, DIM)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, DIM))
        self.blocks = nn.Sequential(*(Block(DIM, HEADS, causal=True) for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, 256)
        nn.init.normal_(self.bytes.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.blocks(self.bytes(tokens) + self.positions)))
        return out


class Bytes(Problem):
    """Prediction of the next byte from up to 64 previous bytes."""

    def __init__(self, seed: int, device: torch.device, data: None) -> None:
        every = text()
        self.parts = {
            name: every[int(first * len(every)) : int(last * len(every))].to(device)
            for name, (first, last) in PARTS.items()
        }
        self._span = torch.arange(CONTEXT + 1, device=device)

    def network(self) -> nn.Module:
        return GPT()

    def order(self, steps: int, generator: torch.Generator) -> Tensor:
        return torch.randint(len(self.parts["train"]) - CONTEXT - 1, (steps, BATCH), generator=generator)

    def loss(self, network: nn.Module, rows: Tensor) -> Tensor:
        return self._loss(network, self.parts["train"], rows)

    def held_out_loss(self, network: nn.Module) -> Tensor:
        return self._mean_loss(network, "held_out")

    def score(self, network: nn.Module) -> float:
        """Return the mean log-likelihood per byte."""
        return -float(self._mean_loss(network, "test"))

    def _mean_loss(self, network: nn.Module, name: str) -> Tensor:
        part = self.parts[name]
        starts = torch.linspace(0, len(part) - CONTEXT - 1, WINDOWS[name], device=part.device).long()
        return torch.stack([self._loss(network, part, rows) for rows in starts.split(256)]).mean()

    def _loss(self, network: nn.Module, part: Tensor, starts: Tensor) -> Tensor:
        tokens = part[starts.unsqueeze(1) + self._span].long()
        return F.cross_entropy(network(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


TASK = Task(
    name="gpt",
    title="byte-level GPT, Python sources",
    unit="nats",
    candidates=("relu", "gelu", "silu", "relu_squared", "tanh", "identity", "sigmoid"),
    problem=Bytes,
    weight_decay=0.05,
    precision="tf32",
    clip=1.0,
)
