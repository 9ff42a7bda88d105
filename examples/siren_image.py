"""An image as a function of its coordinates: the sine is picked, with the initialisation that belongs to it.

    python examples/siren_image.py --picture siren.png

Trains the network with its ReLUs and with Flex-Act, from the same weights and on the same pixels. A few minutes on one
core of a CPU; `--seeds 1` is a quick look. Needs scikit-learn, for its photograph.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_image
from torch import Tensor, nn

import flexact

SIDE, WIDTH, BATCH, RATE, OMEGA = 96, 96, 1024, 1e-3, 20.0


def siren_init(layer: nn.Module) -> None:
    """Initialise a layer before a sine as Sitzmann et al. (2020) do, with the frequency ω in the weights."""
    first = layer.in_features == 2
    bound = OMEGA / layer.in_features if first else math.sqrt(6 / layer.in_features)
    nn.init.uniform_(layer.weight, -bound, bound)
    nn.init.uniform_(layer.bias, -bound if first else -0.1, bound if first else 0.1)


flexact.register_candidate("siren", torch.sin, derivative=torch.cos, init=siren_init)


def photograph() -> tuple[Tensor, Tensor]:
    """Places (n, 2) and colours (n, 3), both from −1 to 1, of a piece of scikit-learn's photograph of a temple."""
    pixels = torch.tensor(load_sample_image("china.jpg")).permute(2, 0, 1).float() / 127.5 - 1
    image = F.avg_pool2d(pixels, 3)[:, 20 : 20 + SIDE, 60 : 60 + SIDE]
    line = torch.linspace(-1, 1, SIDE)
    return torch.stack(torch.meshgrid(line, line, indexing="ij"), -1).view(-1, 2), image.flatten(1).T


def network() -> nn.Sequential:
    hidden = [layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(nn.Linear(2, WIDTH), nn.ReLU(), *hidden, nn.Linear(WIDTH, 3))


def train(places: Tensor, colours: Tensor, seed: int, steps: int, picks: bool) -> nn.Module:
    """The trained plain network; half of the pixels are its training data."""
    torch.manual_seed(seed)
    model = network()
    batches = torch.randint(len(places), (steps, BATCH), generator=torch.Generator().manual_seed(seed))
    if picks:
        config = flexact.FlexConfig(candidates=("original", "gelu", "tanh", "sine", "siren"))
        model = flexact.convert(model, config=config)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    schedule = flexact.Schedule(model, network_steps=steps, optimizer=optimizer, rewinds=[rate]) if picks else None
    for step in range(schedule.total_steps if schedule else steps):
        rows = batches[(schedule.trained_steps if schedule else step) % steps]
        loss = F.mse_loss(model(places[rows]), colours[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        if schedule:
            schedule.step(loss.item())
    if picks:
        print(flexact.selection(model))
        model = flexact.extract(model)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3000, help="steps for which each network is trained")
    parser.add_argument("--picture", type=Path, help="where the picture goes")
    given = parser.parse_args()
    places, colours = photograph()
    images = {"the photograph": colours}
    for seed in range(given.seeds):
        unseen = torch.rand(len(places), generator=torch.Generator().manual_seed(100 + seed)) < 0.5
        decibels = {}
        for name in ("ReLU", "Flex-Act"):
            model = train(places[~unseen], colours[~unseen], seed, given.steps, picks=name == "Flex-Act")
            with torch.no_grad():
                drawn = model(places)
            decibels[name] = -10 * math.log10(F.mse_loss(drawn[unseen], colours[unseen]).item() / 4)
            images.setdefault(f"{name}, {decibels[name]:.1f} dB", drawn) if seed == 0 else None
        told = ", ".join(f"{name} {value:.2f}" for name, value in decibels.items())
        print(f"seed {seed}: {told} dB on unseen pixels\n", flush=True)
    if given.picture:
        from matplotlib import pyplot

        figure, panels = pyplot.subplots(1, 3, figsize=(9, 3.3), layout="constrained")
        for axes, (title, drawn) in zip(panels, images.items(), strict=True):
            axes.imshow((drawn.view(SIDE, SIDE, 3) / 2 + 0.5).clamp(0, 1), interpolation="nearest")
            axes.set_title(title)
            axes.axis("off")
        figure.savefig(given.picture, dpi=90)


if __name__ == "__main__":
    main()
