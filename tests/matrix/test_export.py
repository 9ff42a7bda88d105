"""torch.export, ONNX, torch.jit and int8 of the extracted model give the outputs of the plain network."""

from __future__ import annotations

import copy
import importlib
import io
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import flexact
from flexact.candidates.registry import lookup
from matrix.models import STEADY, Column, scatter_logits

onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's warnings that torch.jit and torch.ao are deprecated


@pytest.fixture
def extracted(column: Column) -> nn.Module:
    """Returns an extracted model with other functions than the original ones."""
    return flexact.extract(scatter_logits(column.build(STEADY), 3.0), commit=True).eval()


def by_hand(column: Column) -> nn.Module:
    """Returns the plain model with the same picks, replaced by hand."""
    model = scatter_logits(column.build(STEADY), 3.0)
    picks = flexact.selection(model).picks
    if column.is_site:
        return lookup(next(iter(picks.values()))).module()
    duplicate = column.unconverted()
    for name, pick in picks.items():
        duplicate.set_submodule(name, lookup(pick).module())
    return duplicate.eval()


class Answering(nn.Module):
    """A model that returns one tensor, as exporters of transformers' models receive."""

    def __init__(self, model: nn.Module, column: Column) -> None:
        super().__init__()
        self.model = model
        self.dictionary = column.name == "bert"

    def forward(self, *inputs: Tensor) -> Tensor:
        if self.dictionary:
            return self.model(*inputs, return_dict=False)[0]
        return self.model(*inputs)


def one_tensor(model: nn.Module, column: Column) -> nn.Module:
    return Answering(model, column).eval() if column.name == "bert" else model


def answers(model: nn.Module, column: Column) -> Tensor:
    with torch.no_grad():
        return column.answer(model, column.batch(5)[0])


def test_some_picks_differ_from_the_original_functions(column: Column, extracted: nn.Module) -> None:
    kinds = {type(module) for module in extracted.modules()}
    assert kinds & {nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.Identity, nn.ReLU}
    torch.testing.assert_close(answers(extracted, column), answers(by_hand(column), column), rtol=0, atol=0)
    assert column.is_site or not torch.equal(answers(extracted, column), answers(column.unconverted().eval(), column))


def test_torch_export(column: Column, extracted: nn.Module, tmp_path: Path) -> None:
    inputs, _ = column.batch(5)
    strict = column.name != "bert"  # takes six seconds, for transformers' own code
    program = torch.export.export(one_tensor(extracted, column), inputs, strict=strict)
    assert "flexact" not in str(program.graph)
    torch.testing.assert_close(program.module()(*inputs), answers(extracted, column))
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(loaded(*inputs), answers(extracted, column))


def test_onnx(column: Column, extracted: nn.Module, tmp_path: Path) -> None:
    inputs, _ = column.batch(5)
    path = tmp_path / "model.onnx"
    torch.onnx.export(one_tensor(extracted, column), inputs, path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    given = {slot.name: one.numpy() for slot, one in zip(session.get_inputs(), inputs, strict=True)}
    (found,) = session.run(None, given)
    torch.testing.assert_close(torch.from_numpy(found), answers(extracted, column), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["trace", "script"])
def test_torch_jit(column: Column, extracted: nn.Module, how: str) -> None:
    if how == "script" and column.name == "bert":  # torch.jit.script refuses transformers' models, plain ones too
        for model in (extracted, by_hand(column)):
            with pytest.raises((OSError, RuntimeError, torch.jit.frontend.FrontendError)):
                torch.jit.script(one_tensor(model, column))
        return
    inputs, _ = column.batch(5)
    model = one_tensor(extracted, column)
    made = torch.jit.script(model) if how == "script" else torch.jit.trace(model, inputs)
    file = io.BytesIO()
    torch.jit.save(made, file)
    file.seek(0)
    torch.testing.assert_close(torch.jit.load(file)(*inputs), answers(extracted, column))


def test_int8(column: Column, extracted: nn.Module) -> None:
    """After quantization, the model is bit-identical to the quantized plain network with the same functions."""
    quantization = importlib.import_module("torch.ao.quantization")
    results = []
    for model in (extracted, by_hand(column)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            small = quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
        results.append(answers(small, column))
        quantised = any("quantized" in type(module).__module__ for module in small.modules())
        assert column.is_site or quantised
    assert torch.equal(*results)
    assert column.is_site or not torch.equal(results[0], answers(extracted, column))
