"""The columns of the compatibility matrix: four models small enough for every row, with batches and a loss.

Importable as `matrix.models`, by the tests and by the processes they start.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flexact
from flexact import FlexConfig, Policy
from flexact.routing.sites import sites_of
from resnets import SharedBlock

Batch = tuple[tuple[Tensor, ...], Tensor]
"""The inputs of a model, and its targets."""

STEADY = FlexConfig.paper(commit_at=None, policy=Policy.paper(noise=0.0))
"""It has no noise, and the optimizer moves the logits: the Schedule would follow a gradient's sign and its rounding."""


class TinyResNet(nn.Module):
    """A stem and two of torchvision's basic blocks, one of them with a downsampling branch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = SharedBlock(4, 4, 1)
        self.layer2 = SharedBlock(4, 8, 2)
        self.linear = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def _bert() -> nn.Module:
    transformers = importlib.import_module("transformers")  # slow to import, and only this column needs it
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**sizes, **still, vocab_size=40, max_position_embeddings=8, num_labels=3)
    return transformers.BertForSequenceClassification(config)


def _numbers(count: int, generator: torch.Generator) -> Batch:
    x = torch.randn(count, 6, generator=generator)
    return (x,), torch.randint(3, (count,), generator=generator)


def _curve(count: int, generator: torch.Generator) -> Batch:
    x = torch.randn(count, 6, generator=generator)
    return (x,), torch.tanh(x)


def _images(count: int, generator: torch.Generator) -> Batch:
    return (torch.randn(count, 3, 8, 8, generator=generator),), torch.randint(3, (count,), generator=generator)


def _tokens(count: int, generator: torch.Generator) -> Batch:
    ids = torch.randint(3, 40, (count, 5), generator=generator)
    return (ids, torch.ones_like(ids)), ids[:, 1] % 3


@dataclass(frozen=True)
class Column:
    """One of the four models."""

    name: str
    plain: Callable[[], nn.Module]
    batches: Callable[[int, torch.Generator], Batch]

    @property
    def is_site(self) -> bool:
        """Whether the model is a FlexAct by itself."""
        return self.name == "alone"

    def build(self, config: FlexConfig = STEADY, plain: nn.Module | None = None) -> nn.Module:
        """Returns the converted model: with the same weights every time, or with those of a plain model."""
        if self.is_site:
            return flexact.FlexAct(config=config, original=self.plain() if config.init == "original" else None)
        return flexact.convert(self.unconverted() if plain is None else plain, config=config)

    def unconverted(self) -> nn.Module:
        """Returns the plain model, with the same weights every time."""
        torch.manual_seed(0)
        return self.plain()

    def batch(self, seed: int = 0, count: int = 12) -> Batch:
        return self.batches(count, torch.Generator().manual_seed(seed))

    def answer(self, model: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Tensor:
        """Returns the output of a model as one tensor."""
        found = model(*inputs)
        return found if isinstance(found, Tensor) else found["logits"]

    def loss(self, model: Callable[..., Any], batch: Batch) -> Tensor:
        """Returns the mean over the batch, in float32."""
        inputs, wanted = batch
        answer = self.answer(model, inputs).float()
        return F.mse_loss(answer, wanted) if wanted.is_floating_point() else F.cross_entropy(answer, wanted)


COLUMNS = {
    one.name: one
    for one in (
        Column("alone", nn.ReLU, _curve),
        Column("mlp", _mlp, _numbers),
        Column("resnet", TinyResNet, _images),
        Column("bert", _bert, _tokens),
    )
}
TITLES = {"alone": "FlexAct alone", "mlp": "converted MLP", "resnet": "converted ResNet", "bert": "converted BERT"}


def optimizer_of(model: nn.Module, lr: float = 0.05, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(flexact.param_groups(model, lr=lr), lr=lr, **options)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def logits_of(model: nn.Module) -> Tensor:
    """Returns the logits of all sites as one vector."""
    return torch.cat([site.logits.detach().flatten() for site in sites_of(model)])


def scatter_logits(model: nn.Module, scale: float = 1.0) -> nn.Module:
    """Sets distinct logits at every site, so that no two candidates are equally likely."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for site in sites_of(model):
            site.logits.copy_(scale * torch.randn(site.logits.shape, generator=generator))
    return model
