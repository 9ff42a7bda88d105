"""A byte-level GPT on the sources of Python's standard library: does it pick ReLU², as larger GPTs have found?

    python examples/byte_gpt.py --picture gpt.png

Trains the network with GELU and with Flex-Act, from the same weights and on the same batches, for minutes on a CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flexact

DIM, DEPTH, HEADS, CONTEXT, BATCH, RATE = 64, 2, 4, 48, 16, 2e-3
CONFIG = flexact.FlexConfig(candidates=("original", "relu", "silu", "relu_squared"))


def text() -> tuple[Tensor, ...]:
    """The bytes of the standard library's modules in a fixed random order: nine tenths, and the last tenth."""
    files = sorted(Path(argparse.__file__).parent.glob("*.py"))
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    data = torch.frombuffer(bytearray(b"".join(files[i].read_bytes() for i in order)), dtype=torch.uint8)
    return data.tensor_split([len(data) * 9 // 10])


class Block(nn.Module):
    """Causal attention and an MLP, each after a layer norm and around a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = (nn.Embedding(n, DIM, _weight=0.02 * torch.randn(n, DIM)) for n in (256, CONTEXT))
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.bytes(tokens) + self.places.weight)))


def loss_at(model: nn.Module, data: Tensor, starts: Tensor) -> Tensor:
    """The cross-entropy in nats per byte of the windows that start here."""
    tokens = data[starts.unsqueeze(1) + torch.arange(CONTEXT + 1)].long()
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(data: Tensor, seed: int, steps: int, picks: bool) -> tuple[nn.Module, list[float]]:
    """The trained plain network, and the loss of each step of its weights."""
    torch.manual_seed(seed)
    model = GPT()
    batches = torch.randint(len(data) - CONTEXT - 1, (steps, BATCH), generator=torch.Generator().manual_seed(seed))
    model = flexact.convert(model, config=CONFIG) if picks else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.05)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    schedule = flexact.Schedule(model, network_steps=steps, optimizer=optimizer, rewinds=[rate]) if picks else None
    losses = [0.0] * steps
    for step in range(schedule.total_steps if schedule else steps):
        at = (schedule.trained_steps if schedule else step) % steps
        loss = loss_at(model, data, batches[at])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        losses[at] = loss.item()
        if schedule:
            schedule.step(losses[at])
    if picks:
        print(flexact.selection(model))
    return (flexact.extract(model) if picks else model).eval(), losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    train_data, test_data = text()
    windows = torch.linspace(0, len(test_data) - CONTEXT - 1, 1024).long()
    curves: dict[str, list[list[float]]] = {"GELU": [], "Flex-Act": []}
    for seed in range(given.seeds):
        told = []
        for name, own in curves.items():
            model, losses = train(train_data, seed, given.steps, picks=name == "Flex-Act")
            own.append(losses)
            with torch.no_grad():
                told.append(f"{name} {loss_at(model, test_data, windows):.3f}")
        print(f"seed {seed}: {', '.join(told)} nats per byte of new text\n", flush=True)
    if given.picture:
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
        for seed, (fixed, picked) in enumerate(zip(*curves.values(), strict=True)):
            behind = (torch.tensor(picked) - torch.tensor(fixed)).unfold(0, 50, 10).mean(-1)
            axes.plot(25 + 10 * torch.arange(len(behind)), behind, label=f"seed {seed}")
        axes.axhline(0, color="grey", linewidth=0.8)
        axes.set(xlabel="step of these weights", ylabel="Flex-Act − GELU in nats per byte")
        axes.legend(title="loss on the same batch, mean of 50")
        figure.savefig(given.picture, dpi=100)


if __name__ == "__main__":
    main()
