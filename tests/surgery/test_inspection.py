"""Tests of `flexact.inspect`: it lists every activation in execution order with what `convert` would do, and changes
nothing.
"""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

import flexact
from flexact import FlexActError
from flexact.routing.sites import sites_of
from flexact.surgery import fused_site


class Looping(nn.Module):
    """One F.relu that runs once for each of its layers, and a stored function."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(depth)])
        self.head = nn.Linear(4, 2)
        self.squash = F.softplus

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.squash(self.head(x))


class Restless(nn.Module):
    """Returns everything that a forward can change: buffers, attributes, containers, random states."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act, self.norm = nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4)
        self.prelu = nn.PReLU()
        self.register_buffer("count", torch.zeros(()))
        self.table: dict[str, int] = {}
        self.trace: list[Any] = []
        self.tensor = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.tensor += 1
        self.table["calls"] = self.table.get("calls", 0) + 1
        self.trace.append(x.shape)
        self.new = self.last = random.random() + float(np.random.random())  # noqa: NPY002
        x = x + torch.rand_like(x) * 0
        return self.prelu(self.act(self.norm(self.linear(x))))


class Called(TorchFunctionMode):
    """Counts the calls of torch's functions, independently of flexact's code."""

    def __init__(self, *functions: Callable[..., Any]) -> None:
        super().__init__()
        self.functions, self.shapes = functions, []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in self.functions:
            self.shapes.append(tuple(args[0].shape))
        return function(*args, **(kwargs or {}))


def hooked(model: nn.Module, kind: type[nn.Module], *inputs: Any, **keywords: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Records the names and input shapes of the modules of a type, in the order in which they run."""
    ran: list[tuple[str, tuple[int, ...]]] = []
    for name, module in model.named_modules():
        if isinstance(module, kind):
            module.register_forward_hook(lambda _, x, y, name=name: ran.append((name, tuple(x[0].shape))) or None)
    with torch.no_grad():
        model.eval()(*inputs, **keywords)
    return ran


def convert_quietly(model: nn.Module, **choices: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return flexact.convert(model, **choices)


def test_resnet18_lists_each_relu_as_often_and_with_the_shape_that_hooks_see() -> None:
    torchvision = pytest.importorskip("torchvision")
    x = torch.randn(1, 3, 64, 64)
    model = torchvision.models.resnet18()
    ran = hooked(copy.deepcopy(model), nn.ReLU, x)
    inspection = flexact.inspect(model, example_inputs=x)
    assert [row.name for row in inspection.rows] == list(dict.fromkeys(name for name, _ in ran))
    for row in inspection.rows:
        assert row.calls == sum(name == row.name for name, _ in ran)
        assert row.shapes == tuple({shape for name, shape in ran if name == row.name})
        assert (row.function, row.kind, row.converted) == ("relu", "module", True)


def test_activations_reported_as_fused_run_together_with_their_batch_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    torchvision = pytest.importorskip("torchvision")
    fused = set()
    run = fused_site.normalised_site
    monkeypatch.setattr(fused_site, "normalised_site", lambda site, *parts: fused.add(site.name) or run(site, *parts))
    for build in (torchvision.models.resnet18, torchvision.models.mobilenet_v2, torchvision.models.vgg11):
        fused.clear()
        inspection = flexact.inspect(build())
        rows = [row for row in inspection.rows if row.converted]
        assert {row.fused for row in rows} == {build is not torchvision.models.vgg11}
        converted = convert_quietly(build(), fuse=True).eval()
        converted(torch.randn(1, 3, 64, 64))
        assert {row.name for row in rows if row.fused} == fused
        assert all(row.fused != bool(row.why_not_fused) for row in rows)
    assert "no nn.BatchNorm2d" in rows[0].why_not_fused


def test_the_gates_of_an_efficientnet_are_not_converted_with_the_reason() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("efficientnet_b0", num_classes=3)
    x = torch.randn(1, 3, 32, 32)
    inspection = flexact.inspect(model, example_inputs=x)
    gates = [name for name, _ in hooked(copy.deepcopy(model), nn.Sigmoid, x)]
    left = [row for row in inspection.rows if not row.converted]
    assert len(gates) == 16
    assert [row.name for row in left] == gates
    assert {row.reason for row in left} == {"a sigmoid, which is a gate or an output"}
    assert all(not row.fused for row in left)
    assert inspection.converted == [name for name, _ in hooked(copy.deepcopy(model), nn.SiLU, x)]


def test_the_pooler_of_bert_is_an_output_and_the_layers_are_converted() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=50))
    inspection = flexact.inspect(model, example_inputs={"input_ids": torch.randint(0, 50, (2, 6))})
    layers = [f"encoder.layer.{i}.intermediate.intermediate_act_fn" for i in range(2)]
    assert [row.name for row in inspection.rows] == [*layers, "pooler.activation"]
    assert [row.shapes for row in inspection.rows] == [((2, 6, 32),), ((2, 6, 32),), ((2, 16),)]
    assert inspection.converted == layers
    assert inspection.rows[-1].reason == "an output activation: the network returns its result"


def test_a_functional_call_in_a_loop_is_one_row_with_all_its_calls() -> None:
    model, x = Looping(depth=5), torch.randn(3, 4)
    with Called(F.relu) as relus:
        model(x)
    inspection = flexact.inspect(model, example_inputs=x)
    relu, softplus = inspection.rows
    assert (relu.name, relu.kind, relu.function) == ("relu", "call", "relu")
    assert relu.calls == len(relus.shapes) == 5
    assert relu.shapes == tuple(set(relus.shapes))
    line = Looping.forward.__code__.co_firstlineno + 2
    assert relu.lines == (f"test_inspection.py:{line}",)
    assert (softplus.name, softplus.kind, softplus.calls, softplus.converted) == ("squash", "function", 1, False)
    assert "output activation" in softplus.reason
    assert [row.calls for row in flexact.inspect(model).rows] == [None, None]


def test_rows_are_in_execution_order_even_if_defined_otherwise() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.middle, self.first = nn.GELU(), nn.PReLU(), nn.SiLU()
            self.linear, self.unused = nn.Linear(2, 2), nn.ELU()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.last(self.middle(self.first(x))))

    inspection = flexact.inspect(Backwards(), example_inputs=torch.randn(1, 2))
    assert [(row.name, row.calls) for row in inspection.rows] == [
        ("first", 1),
        ("middle", 1),
        ("last", 1),
        ("unused", 0),
    ]
    assert inspection.rows[1].reason == "PReLU has learnable parameters"
    assert inspection.rows[1].shapes == ((1, 2),)
    by_definition = [row.name for row in flexact.inspect(Backwards()).rows]
    assert by_definition == ["last", "middle", "first", "unused"]


@pytest.mark.parametrize("training", [True, False])
def test_a_model_with_side_effects_and_all_random_states_are_unchanged(training: bool) -> None:
    model = Restless().train(training)
    model.norm.eval()
    hooks = len(model.act._forward_pre_hooks)
    before = pickle.dumps(model)
    states = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]  # noqa: NPY002
    inspection = flexact.inspect(model, example_inputs=torch.randn(2, 4, generator=torch.Generator().manual_seed(0)))
    assert inspection.converted == ["act"]
    assert pickle.dumps(model) == before
    assert (model.training, model.norm.training) == (training, False)
    assert type(model) is Restless
    assert not hasattr(model, "new")
    assert len(model.act._forward_pre_hooks) == hooks
    assert torch.equal(torch.get_rng_state(), states[0])
    assert [random.getstate(), np.random.get_state()[1].tolist()] == states[1:]  # noqa: NPY002


def test_a_model_whose_forward_fails_is_unchanged_and_the_error_says_what_to_pass() -> None:
    model = Looping()
    before = pickle.dumps(model)
    with pytest.raises(FlexActError, match="could not be run on example_inputs"):
        flexact.inspect(model, example_inputs=torch.randn(3, 5))
    assert pickle.dumps(model) == before


def test_lazy_modules_are_not_initialized() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
    assert flexact.inspect(model).converted == ["1"]
    assert flexact.inspect(model, example_inputs=torch.randn(3, 5)).rows[0].shapes == ((3, 4),)
    assert isinstance(model[0], nn.LazyLinear)
    assert is_lazy(model[0].weight)


def test_where_and_per_call_have_the_meaning_of_convert() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Sigmoid())
    inspection = flexact.inspect(model, "3")
    assert inspection.converted == ["3"]
    assert inspection.rows[0].reason == "where does not select it"
    with pytest.raises(FlexActError, match="no activation matched where='4'"):
        flexact.inspect(model, "4")
    with pytest.raises(FlexActError, match=r"inspect needs a torch\.nn\.Module"):
        flexact.inspect(nn.ReLU)
    with pytest.raises(FlexActError, match=r"FlexAct sites already.*flexact\.selection\(model\) shows the sites"):
        flexact.inspect(flexact.convert(model))
    shared = nn.ReLU()
    twice = nn.Sequential(nn.Linear(2, 2), shared, nn.Linear(2, 2), shared)
    (row,) = flexact.inspect(twice, example_inputs=torch.randn(1, 2)).rows
    assert (row.names, row.calls) == (("1", "3"), 2)
    assert flexact.inspect(twice, per_call=True).converted == ["1", "3"]


@pytest.mark.parametrize("inputs", [torch.randn(64, 8), (torch.randn(64, 8), 3)])
def test_inputs_passed_as_where_are_an_error_that_does_not_print_them(inputs: Any) -> None:
    with pytest.raises(FlexActError) as refused:
        flexact.inspect(nn.Sequential(nn.Linear(8, 2), nn.ReLU()), inputs)
    assert "got a Tensor. Give other arguments by name: config=..., example_inputs=..." in str(refused.value)


def test_a_model_without_activations_and_one_that_is_an_activation() -> None:
    assert flexact.inspect(nn.Linear(2, 2)).rows == ()
    assert str(flexact.inspect(nn.Linear(2, 2))) == "no activation was found in this model"
    (row,) = flexact.inspect(nn.GELU(approximate="tanh"), example_inputs=torch.randn(3)).rows
    assert (row.name, row.function, row.calls) == ("GELU", "gelu_tanh", 1)


def test_activations_that_cannot_be_read_or_rewritten_are_rows_with_the_reason() -> None:
    graph = fx.symbolic_trace(Looping())
    rows = flexact.inspect(nn.Sequential(graph, nn.ReLU())).rows
    assert [(row.name, row.converted) for row in rows] == [("0", False), ("1", True)]
    assert "convert it before it is traced" in rows[0].reason

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.table = {"act": torch.tanh}

        def forward(self, x: Tensor) -> Tensor:
            return F.leaky_relu(self.linear(self.table["act"](x)))

    rows = flexact.inspect(nn.Sequential(nn.ReLU(), Hidden()), example_inputs=torch.randn(1, 2)).rows
    assert [(row.name, row.converted) for row in rows] == [("0", True), ("1", False), ("1.leaky_relu", True)]
    assert [row.function for row in rows] == ["relu", "", "leaky_relu"]
    assert "tanh in line" in rows[1].reason


def test_the_table_has_aligned_columns_and_each_reason_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sigmoid(), nn.Linear(2, 2), nn.Sigmoid())
    text = str(flexact.inspect(model, example_inputs=torch.randn(1, 2)))
    header, rule, *lines = text.splitlines()
    assert header.split() == ["name", "function", "kind", "calls", "input", "converted", "fused"]
    assert set(rule) == {"-"}
    for title, cells in (("function", ["relu", "sigmoid", "sigmoid"]), ("converted", ["yes", "no (2)", "no (2)"])):
        at = header.index(title)
        assert [line[at:].startswith(cell) for line, cell in zip(lines, cells, strict=False)] == [True] * 3
    assert text.count("a sigmoid, which is a gate or an output") == 1


def test_the_frame_has_a_row_per_activation() -> None:
    pytest.importorskip("pandas")
    frame = flexact.inspect(nn.Sequential(nn.ReLU(), nn.Sigmoid()), example_inputs=torch.randn(1, 2)).to_frame()
    assert list(frame["function"]) == ["relu", "sigmoid"]
    assert list(frame["converted"]) == [True, False]
    assert list(frame["names"]) == [("0",), ("1",)]


def test_the_rows_that_are_converted_are_the_sites_in_order() -> None:
    torchvision = pytest.importorskip("torchvision")
    x = torch.randn(1, 3, 64, 64)
    for build in (torchvision.models.squeezenet1_1, torchvision.models.googlenet, torchvision.models.vit_b_16):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = build(weights=None, image_size=64) if build is torchvision.models.vit_b_16 else build(weights=None)
        inspection = flexact.inspect(model, example_inputs=x)
        converted = convert_quietly(model, example_inputs=x)
        assert inspection.converted == [site.name for site in sites_of(converted)]


def test_per_call_lists_each_call_of_a_module_that_is_called_twice() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.relu = nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.second(self.relu(self.first(self.relu(x))))

    assert flexact.inspect(Block()).converted == ["relu"]
    inspection = flexact.inspect(Block(), per_call=True, example_inputs=torch.randn(2, 8))
    assert [(row.name, row.kind, row.calls) for row in inspection.rows] == [
        ("relu_1", "call", 1),
        ("relu_2", "call", 1),
    ]
    assert flexact.inspect(Block(), "relu", per_call=True).converted == ["relu_1", "relu_2"]
