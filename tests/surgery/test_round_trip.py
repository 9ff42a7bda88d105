"""Tests of conversion and extraction on real models: after a round trip the model is unchanged."""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flexact

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TOKENS = {"input_ids": torch.arange(14).reshape(2, 7)}
PIXELS = {"pixel_values": IMAGES}

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {"vocab_size": 20, "max_position_embeddings": 16}


def _torchvision(name: str) -> nn.Module:
    import torchvision

    return torchvision.models.get_model(name, weights=None)


def _timm(name: str, **options: Any) -> nn.Module:
    import timm

    return timm.create_model(name, pretrained=False, **options)


def _transformers(name: str, config: str, **settings: Any) -> nn.Module:
    import transformers

    return getattr(transformers, name)(getattr(transformers, config)(**settings))


def _distilbert(name: str) -> nn.Module:
    sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}
    return _transformers(name, "DistilBertConfig", **TEXT, **sizes)


def _gpt2(name: str) -> nn.Module:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 20}
    return _transformers(name, "GPT2Config", **sizes, bos_token_id=0, eos_token_id=0)


# The constructor of each model, its inputs, its number of sites, and a part of the log about other activations.
MODELS: dict[str, tuple[Callable[[], nn.Module], Any, int, str | None]] = {
    "resnet18": (lambda: _torchvision("resnet18"), IMAGES, 9, None),
    "resnet50": (lambda: _torchvision("resnet50"), IMAGES, 17, None),
    "vit_tiny": (lambda: _timm("vit_tiny_patch16_224", img_size=32), IMAGES, 12, None),
    "mobilenetv3_small_100": (
        lambda: _timm("mobilenetv3_small_100"),
        IMAGES,
        33,
        None,
    ),
    "convnext_atto": (lambda: _timm("convnext_atto"), IMAGES, 12, None),
    "bert": (lambda: _transformers("BertModel", "BertConfig", **SMALL, **TEXT), TOKENS, 2, None),
    "bert_classifier": (
        lambda: _transformers("BertForSequenceClassification", "BertConfig", **SMALL, **TEXT),
        TOKENS,
        3,
        None,
    ),
    "distilbert": (lambda: _distilbert("DistilBertModel"), TOKENS, 2, None),
    "distilbert_classifier": (
        lambda: _distilbert("DistilBertForSequenceClassification"),
        TOKENS,
        2,
        None,
    ),
    "deberta_classifier": (
        lambda: _transformers("DebertaV2ForSequenceClassification", "DebertaV2Config", **SMALL, **TEXT),
        TOKENS,
        2,
        None,
    ),
    "gpt2": (lambda: _gpt2("GPT2LMHeadModel"), TOKENS, 2, None),
    "vit": (
        lambda: _transformers("ViTModel", "ViTConfig", **SMALL, image_size=32, patch_size=8),
        PIXELS,
        2,
        None,
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Any, int, str | None]:
    """Returns a plain model in eval mode whose batch norms have statistics like a trained one's, and its inputs."""
    make, inputs, sites, message = MODELS[request.param]
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None  # a cumulative average, from the first batch on
        outputs(model.train(), inputs)
    return model.eval(), inputs, sites, message


def outputs(model: nn.Module, inputs: Any) -> list[Tensor]:
    with torch.no_grad():
        result = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return list(_tensors(result))


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, dict):
        for value in result.values():
            yield from _tensors(value)
    elif isinstance(result, (tuple, list)):
        for value in result:
            yield from _tensors(value)


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) > 0 and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def described(model: nn.Module) -> list[tuple[str, type]]:
    return [(name, type(module)) for name, module in model.named_modules(remove_duplicate=False)]


@functools.lru_cache(maxsize=1)  # the tests of a model run one after another
def _converted(model: nn.Module, expected: str | None, probability: float) -> nn.Module:
    config = flexact.FlexConfig(init="original", init_probability=probability)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        copied = flexact.convert(copy.deepcopy(model), config=config)
    said = [str(warning.message) for warning in caught if "flexact" in str(warning.message)]
    assert len(said) == (expected is not None), said
    assert all(expected in one for one in said)
    return copied


def converted(model: nn.Module, message: str | None, probability: float = 0.9) -> nn.Module:
    """Returns a converted copy. Every log message about it must be expected."""
    return copy.deepcopy(_converted(model, message, probability))


def test_committed_to_the_original_everywhere_the_model_is_restored(case: Any, pick: Callable) -> None:
    plain, inputs, sites, message = case
    model = converted(plain, message)
    assert len(flexact.selection(model)) == sites
    flexact.commit(pick(model, None))
    back = flexact.extract(model)
    assert same(outputs(back, inputs), outputs(plain, inputs))
    assert same(outputs(model, inputs), outputs(plain, inputs))
    assert list(back.state_dict()) == list(plain.state_dict())
    assert all(torch.equal(back.state_dict()[name], value) for name, value in plain.state_dict().items())
    assert described(back) == described(plain)
    assert b"flexact" not in pickle.dumps(back)
    fresh = copy.deepcopy(plain)
    for parameter in fresh.parameters():
        nn.init.zeros_(parameter)
    fresh.load_state_dict(back.state_dict(), strict=True)
    assert same(outputs(fresh, inputs), outputs(plain, inputs))


def test_another_pick_everywhere_is_extracted_bit_identically_and_leaves_no_trace(case: Any, pick: Callable) -> None:
    plain, inputs, sites, message = case
    model = flexact.commit(pick(converted(plain, message), "tanh"))
    extracted = flexact.extract(model)
    assert same(outputs(extracted, inputs), outputs(model, inputs))
    assert not same(outputs(extracted, inputs), outputs(plain, inputs))
    assert list(extracted.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(extracted.state_dict(), strict=True)
    assert [name for name, _ in described(extracted)] == [name for name, _ in described(plain)]
    changed = [cls for (_, cls), (_, first) in zip(described(extracted), described(plain), strict=True) if cls != first]
    assert set(changed) <= {nn.Tanh}
    assert len(set(map(id, (m for m in extracted.modules() if isinstance(m, nn.Tanh))))) >= sites
    assert b"flexact" not in pickle.dumps(extracted)


def test_a_converted_model_trains(case: Any) -> None:
    plain, inputs, sites, message = case
    model = converted(plain, message).train()
    result = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    sum(tensor.float().square().mean() for tensor in _tensors(result)).backward()
    gradients = [m.logits.grad for m in model.modules() if isinstance(m, flexact.FlexAct)]
    assert len(gradients) == sites
    assert all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("distilbert_classifier", "  DistilBertForSequenceClassification: relu in line"),
        ("deberta_classifier", "  pooler: gelu in line"),
    ],
)
def test_an_activation_created_in_a_forward_is_named_when_it_first_runs(name: str, message: str) -> None:
    make, inputs, *_ = MODELS[name]
    model = flexact.convert(make())
    with pytest.warns(UserWarning, match=message):
        outputs(model, inputs)
