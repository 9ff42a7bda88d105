"""The imports of the process from which `forked` forks."""

from __future__ import annotations

import contextlib
import os
import runpy
import warnings
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TRITON_INTERPRET"] = "0"
_OPERATORS = runpy.run_path(str(Path(__file__).parent / "torchvision_operators" / "sitecustomize.py"))

import torch  # noqa: E402

import flexact  # noqa: E402

torch.set_num_threads(1)
with contextlib.suppress(ImportError):
    import sklearn.datasets
    import sklearn.model_selection  # noqa: F401
try:
    from transformers import BertConfig, BertForSequenceClassification, Trainer  # noqa: F401
except ImportError:
    pass
else:
    _sizes = {"hidden_size": 4, "intermediate_size": 4, "num_attention_heads": 2, "num_hidden_layers": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flexact.convert(BertForSequenceClassification(BertConfig(**_sizes, vocab_size=4, max_position_embeddings=4)))
