"""The Hugging Face Trainer with a tiny BERT on synthetic sentences. Takes about ten seconds on a CPU.

The weights and tokens are random, so the example runs offline. With `from_pretrained` and your own data the three lines
of Flex-Act stay the same. A row has the label 1 if it contains the token WORD. Picking needs more steps than this
example has, so the Schedule warns.
"""

from __future__ import annotations

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import flexact
from flexact.integrations.transformers import FlexActCallback

WORD = 7


class Sentences(Dataset):  # type: ignore[type-arg]
    """Rows of eight random tokens, about half of which contain WORD."""

    def __init__(self, rows: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(10, 60, (rows, 8), generator=generator)
        self.labels = torch.randint(0, 2, (rows,), generator=generator)
        position = torch.randint(1, 8, (rows,), generator=generator)
        self.ids[self.labels == 1, position[self.labels == 1]] = WORD

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[row], "labels": self.labels[row]}


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(vocab_size=60, max_position_embeddings=8, **sizes))
    test = Sentences(256, seed=1)

    model = flexact.convert(model, config=flexact.FlexConfig(init="original", warmup=0.3))  # 1
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            num_train_epochs=5,
            per_device_train_batch_size=32,
            learning_rate=2e-3,
            logging_steps=40,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(model=model, args=args, train_dataset=Sentences(1024, seed=0), eval_dataset=test)
        trainer = FlexActCallback().wrap(trainer)  # 2 and 3: import and wrap
        trainer.train()

    print(trainer.flexact.selection)
    with torch.no_grad():
        accuracy = (model.eval()(input_ids=test.ids).logits.argmax(1) == test.labels).float().mean()
    print(f"\nAccuracy of the plain network on new sentences: {100 * accuracy:.1f} %")


if __name__ == "__main__":
    main()
