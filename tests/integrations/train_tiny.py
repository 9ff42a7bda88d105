"""Trains a tiny BERT with FlexActCallback: ``train_tiny.py OUT [SETTING ...]``, alone or under torchrun.

SETTING: a setting of TrainingArguments, such as bf16. Each rank prints one line of JSON: the logits after every step,
the losses, the picks.
"""

from __future__ import annotations

import json
import os
import sys

sys.modules["torchvision"] = None  # type: ignore[assignment]  # it need not fit this torch, and nothing here needs it

import torch  # noqa: E402
import transformers  # noqa: E402

import flexact  # noqa: E402
from flexact.integrations.transformers import FlexActCallback  # noqa: E402
from flexact.routing.sites import sites_of  # noqa: E402


class Rows(torch.utils.data.Dataset):
    ids = torch.randint(3, 40, (48, 5), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index][1] % 2}


class Watch(transformers.TrainerCallback):
    def __init__(self, model: torch.nn.Module) -> None:
        self.sites = sites_of(model)
        self.seen: list[list[float]] = []

    def note(self, *_: object, **__: object) -> None:
        self.seen.append(torch.cat([site.logits.detach() for site in self.sites]).tolist())

    on_train_begin = on_step_end = note


def main(folder: str, *settings: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = transformers.BertConfig(**sizes, vocab_size=40, max_position_embeddings=8)
    model = transformers.BertForSequenceClassification(config)
    policy = flexact.FlexConfig(init="original", init_probability=0.5, warmup=0.2, policy=flexact.Policy(noise=1.0))
    model = flexact.convert(model, config=policy)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    args = transformers.TrainingArguments(
        output_dir=folder,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        per_device_train_batch_size=8 // ranks,
        num_train_epochs=2,
        learning_rate=1e-3,
        use_cpu=True,
        **dict.fromkeys(settings, True),
    )
    trainer = FlexActCallback(log=False).wrap(transformers.Trainer(model=model, args=args, train_dataset=Rows()))
    trainer.remove_callback(transformers.PrinterCallback)
    watch = Watch(model)
    outputs: set[str] = set()
    model.bert.pooler.dense.register_forward_hook(lambda *call: outputs.add(str(call[-1].dtype)))
    trainer.add_callback(watch)
    trainer.train()
    printed = {
        "rank": args.process_index,
        "logits": watch.seen,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "picks": trainer.flexact.selection.picks,
        "dtypes": {"logits": sorted({str(site.logits.dtype) for site in watch.sites}), "layers": sorted(outputs)},
    }
    print(json.dumps(printed) + "\n", end="", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
