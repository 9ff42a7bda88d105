"""Fits a small network with FlexActCallback: ``fit_lightning.py PACKAGE``, alone or under torchrun.

PACKAGE: lightning.pytorch or pytorch_lightning. Each rank prints one line of JSON: the logits after every step, the
picks, and the extracted network's outputs.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flexact
from flexact.routing.sites import sites_of

# The default policy moves logits by normalised gradients, which amplifies rounding; this policy does not.
CONFIG = flexact.FlexConfig(policy=flexact.Policy(noise=1.0, logit_step="optimizer", alpha_kind="absolute", alpha=0.3))
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
pl = importlib.import_module(sys.argv[1])
FlexActCallback = importlib.import_module("flexact.integrations.lightning").FlexActCallback  # after the package


class Lit(pl.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.second = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.act(self.first(x))))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(flexact.param_groups(self, weight_decay=0.01), lr=0.1)


class Watch(pl.Callback):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.seen.append(torch.cat([site.logits.detach() for site in sites_of(module)]).tolist())


def main() -> None:
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    part = x[RANK::RANKS]  # the batches of all ranks together equal those of one process
    loader = DataLoader(TensorDataset(part, (part[:, 0] > 0).long()), batch_size=8 // RANKS)
    module = flexact.convert(Lit(), config=CONFIG)
    callback, watch = FlexActCallback(), Watch()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    several = {"devices": RANKS, "strategy": "ddp", "use_distributed_sampler": False} if RANKS > 1 else {"devices": 1}
    trainer = pl.Trainer(max_epochs=3, accelerator="cpu", callbacks=[callback, watch], **several, **quiet)
    trainer.fit(module, loader)
    printed = {
        "rank": trainer.global_rank,
        "logits": watch.seen,
        "picks": callback.selection.picks,
        "committed": callback.schedule.committed,
        "outputs": callback.extracted.eval()(x[:2]).flatten().tolist(),
        "base": FlexActCallback.__mro__[1].__module__,
    }
    print(json.dumps(printed) + "\n", end="", flush=True)


if __name__ == "__main__":
    main()
