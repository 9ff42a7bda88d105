"""Tests of choosing sites, converting, committing and extracting."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flexact
from flexact import FlexAct, FlexActError, FlexConfig, convert, extract, selection
from flexact.config import PAPER_CANDIDATES
from flexact.routing.sites import sites_of
from flexact.surgery.rewriting import Rewritten

NEAR = FlexConfig(candidates=PAPER_CANDIDATES, init="original", init_probability=1 - 1e-6)


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 8),
        nn.ReLU(),
        nn.Sequential(nn.Linear(8, 8), nn.GELU()),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, 2),
    )


def names(model: nn.Module) -> list[str]:
    return list(selection(model).picks)


def logits(model: nn.Module) -> int:
    return sum(module.logits.numel() for module in model.modules() if isinstance(module, FlexAct))


# The paper's numbers of sites


@pytest.mark.parametrize("spelling", ["shared", "functional"])
@pytest.mark.parametrize(("depth", "blocks"), [(18, 8), (34, 16)])
def test_residual_blocks_have_five_logits_each_in_both_spellings(
    resnets: ModuleType, spelling: str, depth: int, blocks: int
) -> None:
    make = resnets.SPELLINGS[spelling]
    model = convert(make(depth), where="layer*")
    assert (len(selection(model)), logits(model)) == (blocks, 5 * blocks)
    model = convert(make(depth), where="all")
    assert (len(selection(model)), logits(model)) == (blocks + 1, 5 * blocks + 5)
    for options in ({}, {"example_inputs": torch.randn(1, 3, 8, 8)}):
        model = convert(make(depth), where="penultimate", **options)
        assert (len(selection(model)), logits(model)) == (1, 5)
        assert names(model)[0].startswith(f"layer4.{resnets.DEPTHS[depth][-1] - 1}.")


@pytest.mark.parametrize("per_call", [False, True])
@pytest.mark.parametrize("spelling", ["shared", "functional"])
def test_resnets_compute_the_same_after_conversion_and_are_restored(
    resnets: ModuleType, spelling: str, per_call: bool, pick: Callable
) -> None:
    torch.manual_seed(0)
    plain = resnets.SPELLINGS[spelling]().eval()
    x = torch.randn(2, 3, 8, 8)
    expected = plain(x)
    model = convert(copy.deepcopy(plain), config=NEAR, per_call=per_call)
    assert len(selection(model)) == (17 if per_call else 9)
    torch.testing.assert_close(model(x), expected, atol=1e-3, rtol=0)
    back = extract(flexact.commit(pick(model, None)))
    assert torch.equal(back(x), expected)
    assert [(n, type(m)) for n, m in back.named_modules()] == [(n, type(m)) for n, m in plain.named_modules()]
    resnets.SPELLINGS[spelling]().load_state_dict(back.state_dict(), strict=True)


def test_execution_order_of_a_resnet_is_its_depth_order(resnets: ModuleType) -> None:
    for make in resnets.SPELLINGS.values():
        order = names(convert(make(), example_inputs=torch.randn(1, 3, 8, 8)))
        assert order == ["relu"] + [f"layer{stage}.{i}.relu" for stage in range(1, 5) for i in range(2)]


# where


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("all", ["1", "2.1", "4"]),
        ("penultimate", ["4"]),
        ("2.1", ["2.1"]),
        ("2", ["2.1"]),
        ("*1", ["1", "2.1"]),
        (["4", "1"], ["1", "4"]),
        (("2.*", "4"), ["2.1", "4"]),
        (lambda name, module: isinstance(module, nn.GELU), ["2.1"]),
        (lambda name, module: name == "4", ["4"]),
    ],
)
def test_where(where: object, expected: list[str]) -> None:
    assert names(convert(mlp(), where)) == expected


@pytest.mark.parametrize(
    "where", [lambda name, module: "gate" not in name, ["act"], "act", lambda name, module: isinstance(module, nn.ReLU)]
)
def test_an_activation_that_where_leaves_out_does_not_warn(where: object) -> None:
    block = nn.Sequential(OrderedDict(act=nn.ReLU(), gate=nn.RReLU()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert names(convert(block, where=where)) == ["act"]


@pytest.mark.parametrize("where", ["all", "penultimate", ["act", "*"], lambda name, module: True])
def test_an_activation_that_where_asks_for_but_that_cannot_be_a_site_warns(where: object) -> None:
    block = nn.Sequential(OrderedDict(act=nn.ReLU(), gate=nn.RReLU()))
    with pytest.warns(UserWarning, match="gate: RReLU"):
        convert(block, where=where)


def test_a_call_that_is_not_in_the_source_warns_for_every_where() -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return sum(map(F.relu, (x, -x)))

    model = convert(nn.Sequential(nn.ReLU(), Branching()), where=lambda name, module: isinstance(module, nn.ReLU))
    with pytest.warns(UserWarning, match="did not see these activations:\n  1: relu in line"):
        model(torch.ones(2))


def test_an_unknown_where_suggests_the_nearest_name_and_lists_the_activations() -> None:
    model = nn.ModuleDict({"encoder": nn.Sequential(nn.ReLU()), "decoder": nn.Sequential(nn.Tanh())})
    with pytest.raises(FlexActError, match=r"'encoder\.1'.*'encoder\.0'") as e:
        convert(model, "encoder.1")
    assert "encoder.0: ReLU" in str(e.value)
    assert "decoder.0: Tanh" in str(e.value)
    with pytest.raises(FlexActError, match="did you mean 'penultimate'"):
        convert(model, "penultimat")
    with pytest.raises(FlexActError, match=r"where='relu'.* Functions to pick from are given by name: cand"):
        convert(model, ("relu", "tanh"))


@pytest.mark.parametrize("where", ["layer9", ["1", "layer9"], [], lambda name, module: False, [3]])
def test_a_where_that_matches_nothing_is_an_error(where: object) -> None:
    model = mlp()
    before = repr(model)
    with pytest.raises(FlexActError):
        convert(model, where)
    assert repr(model) == before


def test_a_model_without_activations_is_an_error_that_says_so() -> None:
    with pytest.raises(FlexActError, match="No activation"):
        convert(nn.Sequential(nn.Linear(2, 2), nn.Identity(), nn.Softmax(-1)))


def test_a_long_list_of_activations_is_shortened() -> None:
    with pytest.raises(FlexActError, match=r"\.\.\. and 10 more"):
        convert(nn.Sequential(*[nn.ReLU() for _ in range(50)]), "nowhere")


# Models that are refused


def test_converting_twice_is_refused() -> None:
    model = convert(mlp(), "1")
    with pytest.raises(FlexActError, match="converted only once"):
        convert(model, "4")


def test_an_object_that_is_no_module_is_refused() -> None:
    with pytest.raises(FlexActError, match=r"torch\.nn\.Module.*function"):
        convert(F.relu)


def test_compiled_models_are_refused() -> None:
    with pytest.raises(FlexActError, match="compiled"):
        convert(torch.compile(mlp()))
    model = mlp()
    model.compile()
    with pytest.raises(FlexActError, match="compiled"):
        convert(model)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_models_are_refused() -> None:
    with pytest.raises(FlexActError, match="TorchScript"):
        convert(torch.jit.script(mlp()))


def test_distributed_models_are_refused(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(FlexActError, match="DistributedDataParallel"):
            convert(nn.parallel.DistributedDataParallel(mlp()))
        sharded = mlp()
        torch.distributed.fsdp.fully_shard(sharded[0], mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        for model in (sharded, torch.distributed.fsdp.FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))):
            with pytest.raises(FlexActError, match="sharded by FSDP; convert the plain model first"):
                convert(model)
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(FlexActError, match="wrapped in DataParallel; convert the plain model first"):
        convert(nn.DataParallel(mlp()))


# Unusual models


def test_a_lazy_model_can_be_extracted_before_its_first_forward() -> None:
    model = extract(convert(nn.Sequential(nn.LazyLinear(4), nn.ReLU())), commit=True)
    assert model(torch.randn(2, 3)).shape == (2, 4)


def test_a_model_converted_in_inference_mode_can_be_trained() -> None:
    model = mlp()
    x = torch.randn(3, model[0].in_features)
    with torch.inference_mode():
        convert(model)
        model(x)
    model(x).sum().backward()
    assert all(site.logits.grad is not None for site in model.modules() if isinstance(site, flexact.FlexAct))


class Frozen(nn.Module):
    """Refuses new attributes after its construction."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.is_frozen = True

    def __setattr__(self, name: str, value: object) -> None:
        if "is_frozen" in vars(self) and name != "training":
            raise AttributeError(name)
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x))


def test_a_model_that_refuses_new_attributes_is_converted_and_extracted() -> None:
    x = torch.randn(3, 4)
    plain = Frozen()
    extracted = extract(
        convert(copy.deepcopy(plain), candidates=("original", "softsign"), example_inputs=x), commit=True
    )
    assert type(extracted) is Frozen
    assert torch.equal(extracted(x), plain(x))


def test_sites_that_leave_the_meta_device_are_initialised() -> None:
    with torch.device("meta"):
        model = convert(mlp())
    expected = convert(mlp()).state_dict()
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    sites = {name: value for name, value in model.state_dict().items() if "weight" not in name and "bias" not in name}
    assert len(sites) > 0
    for name, value in sites.items():
        assert torch.equal(value.nan_to_num(), expected[name].nan_to_num())
    assert model(torch.randn(3, model[0].in_features)).isfinite().all()


# A failure leaves the model unchanged


class Mixed(nn.Module):
    """A module, a functional call, a function attribute, and one forward that is not rewritten."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
        self.functional = Functional()
        self.odd = Odd()
        self.function = F.silu

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.odd(self.functional(self.body(x))))


class Functional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        function = F.relu
        return function(x)


def _fails_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    return {"config": FlexConfig(granularity="channel", channel_dim=2), "example_inputs": torch.randn(2, 4)}


def _fails_on_a_warning(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.setattr(warnings, "warn", _raise)
    return {"fuse": True}  # there is nothing to fuse


def _fails_in_the_run(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    return {"example_inputs": torch.randn(2, 3)}


def _fails_in_where(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    return {"where": _raise}


def _fails_in_a_candidate(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    return {"config": FlexConfig(candidates=("silu", "original"))}


def _fails_without_inputs(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    return {"config": FlexConfig(granularity="channel")}


def _raise(*args: object, **kwargs: object) -> bool:
    raise RuntimeError("on purpose")


@pytest.mark.parametrize(
    "options",
    [
        _fails_in_the_middle,
        _fails_on_a_warning,
        _fails_in_the_run,
        _fails_in_where,
        _fails_in_a_candidate,
        _fails_without_inputs,
    ],
)
@pytest.mark.filterwarnings("ignore:flexact.convert left")
def test_a_failure_at_any_point_leaves_the_model_unchanged(
    options: Callable[[pytest.MonkeyPatch], dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Mixed()
    model.body[0].eval()
    x = torch.randn(2, 4)
    before = pickle.dumps(model)
    types = [type(module) for module in model.modules()]
    expected = model(x)
    with pytest.raises((FlexActError, RuntimeError)):
        convert(model, **options(monkeypatch))
    assert [type(module) for module in model.modules()] == types
    assert torch.equal(model(x), expected)
    assert pickle.dumps(model) == before


def test_channels_without_example_inputs_are_an_error() -> None:
    with pytest.raises(FlexActError, match="example_inputs"):
        convert(mlp(), config=FlexConfig(granularity="channel"))


# Conversion


def test_the_same_model_is_returned_with_its_mode_kept() -> None:
    model = mlp().eval()
    model[2].train()
    converted = convert(model)
    assert converted is model
    assert [converted[1].training, converted[2][1].training, converted[4].training] == [False, True, False]


def test_sites_are_put_on_the_models_device() -> None:
    model = convert(mlp().to("meta"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}


def test_the_root_module_can_be_an_activation(pick: Callable) -> None:
    original = nn.LeakyReLU(0.2)
    site = convert(original, config=FlexConfig(init="original"))
    assert isinstance(site, FlexAct)
    assert names(site) == ["FlexAct"]
    assert extract(flexact.commit(pick(copy.deepcopy(site), "tanh"))).__class__ is nn.Tanh
    assert extract(site, commit=True, inplace=True) is original


def test_the_original_starts_with_the_configured_probability_at_any_position() -> None:
    model = nn.Sequential(nn.ReLU(), nn.GELU(), nn.LeakyReLU(0.2), nn.GELU("tanh"))
    config = FlexConfig(candidates=PAPER_CANDIDATES, init="original", init_probability=0.8)
    rows = selection(convert(model, config=config))
    assert [row.pick for row in rows] == ["relu", "gelu", "original", "gelu_tanh"]
    assert [len(row.probabilities) for row in rows] == [5, 6, 6, 6]
    for row in rows:
        assert row.probability == pytest.approx(0.8, abs=1e-6)
        others = [p for name, p in row.probabilities.items() if name != row.pick]
        assert others == pytest.approx([0.2 / len(others)] * len(others), abs=1e-6)


@pytest.mark.parametrize("act", [nn.ReLU(True), nn.LeakyReLU(0.2, True), nn.ELU(0.5, True), nn.SiLU(True)], ids=repr)
def test_an_in_place_original_does_not_overwrite_the_input_of_the_other_candidates(act: nn.Module) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), act)
    model = convert(copy.deepcopy(plain), config=FlexConfig(candidates=("tanh", "identity", "original")))
    x = torch.randn(3, 4)
    h = plain[0](x)
    expected = (torch.tanh(h) + h + act(h.clone())) / 3
    torch.testing.assert_close(model(x), expected)
    model(x).sum().backward()


class Chain(nn.Module):
    """A stem, then a given module, with names of their own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return self.layer(*args, **kwargs)


def encoder_layer(**options: object) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, **options)


@pytest.mark.parametrize("activation", ["relu", "gelu", F.silu, nn.GELU(), nn.ReLU(), torch.tanh])
def test_a_transformer_layer_runs_its_site_in_both_modes(activation: object, pick: Callable) -> None:
    torch.manual_seed(0)
    plain = encoder_layer(activation=activation)
    x = torch.randn(2, 5, 8)
    model = convert(copy.deepcopy(plain), config=NEAR)
    assert names(model) == ["activation"]
    for training in (True, False):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                near = plain.train(training)(x)
                torch.testing.assert_close(model.train(training)(x), near, atol=1e-4, rtol=1e-4)
                other = pick(copy.deepcopy(model), "identity")(x)
                assert (other - near).abs().max() > 1e-3  # the site is not bypassed
    extracted = extract(flexact.commit(pick(model, None)))
    assert extracted.activation_relu_or_gelu == plain.activation_relu_or_gelu
    assert type(extracted.activation) is type(plain.activation)
    with torch.no_grad():
        assert torch.equal(extracted(x), plain(x))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_padded_transformer_encoder_runs_its_sites_in_eval_mode(pick: Callable) -> None:
    torch.manual_seed(0)
    plain = nn.TransformerEncoder(encoder_layer(), 2).eval()
    x = torch.randn(2, 5, 8)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        expected = plain(x, src_key_padding_mask=padding)
        model = convert(copy.deepcopy(plain), config=NEAR)
        result = model(x, src_key_padding_mask=padding)
        torch.testing.assert_close(result[~padding], expected[~padding], atol=1e-4, rtol=1e-4)
        other = pick(copy.deepcopy(model), "identity")
        assert (other(x, src_key_padding_mask=padding) - result)[~padding].abs().max() > 1e-3

        back = extract(flexact.commit(pick(copy.deepcopy(model), None)))
        assert torch.equal(back(x, src_key_padding_mask=padding), expected)
        assert vars(back).keys() == vars(plain).keys()
        assert back.use_nested_tensor is plain.use_nested_tensor

        committed = flexact.commit(pick(model, "tanh"))
        tanh = extract(committed)
        assert torch.equal(tanh(x, src_key_padding_mask=padding), committed(x, src_key_padding_mask=padding))
        assert isinstance(tanh.layers[0].activation, nn.Tanh)


def test_a_whole_transformer_is_converted() -> None:
    plain = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True).eval()
    model = convert(copy.deepcopy(plain), config=NEAR)
    assert names(model) == ["encoder.layers.0.activation", "decoder.layers.0.activation"]
    source, target = torch.randn(2, 5, 8), torch.randn(2, 3, 8)
    torch.testing.assert_close(model(source, target), plain(source, target), atol=1e-4, rtol=1e-4)


def test_a_submodule_can_be_converted_on_its_own_and_is_restored(pick: Callable) -> None:
    model = Chain(mlp()).eval()
    x = torch.randn(3, 4)
    expected = model(x)
    model.layer = convert(model.layer, config=NEAR)
    assert names(model) == ["layer.1", "layer.2.1", "layer.4"]
    back = extract(flexact.commit(pick(model, None)))
    assert torch.equal(back(x), expected)
    assert b"flexact" not in pickle.dumps(back.layer)


# Channels


def test_channels_of_a_convolutional_net_pick_independently(pick: Callable) -> None:
    plain = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(96, 2))
    config = FlexConfig(granularity="channel", candidates=("relu", "tanh", "identity"))
    model = convert(copy.deepcopy(plain), config=config, example_inputs=torch.randn(1, 3, 8, 8)).eval()
    assert (model[1].logits.shape, model[3].logits.shape) == ((15,), (18,))
    chosen = torch.tensor([0, 1, 2, 0, 1])
    with torch.no_grad():
        model[1].logits.view(5, 3).copy_(9.0 * F.one_hot(chosen, 3))
    pick(model[3], "tanh")
    flexact.commit(model)
    x = torch.randn(2, 3, 8, 8)
    h = plain[0](x)
    by_hand = torch.stack([(F.relu, torch.tanh, lambda v: v)[k](h[:, c]) for c, k in enumerate(chosen.tolist())], 1)
    expected = plain[5](torch.tanh(plain[2](by_hand)).flatten(1))
    torch.testing.assert_close(model(x), expected)
    extracted = extract(model)
    assert torch.equal(extracted(x), model(x))
    assert list(extracted.state_dict()) == list(plain.state_dict())
    assert isinstance(extracted[3], nn.Tanh)
    assert extracted[1].__class__.__name__ == "ChannelPicks"


def test_channels_of_an_mlp_and_of_a_last_dimension() -> None:
    model = convert(mlp(), config=FlexConfig(granularity="channel"), example_inputs=torch.randn(2, 4))
    assert [row.channel for row in selection(model)] == [*range(8)] * 3
    assert model(torch.randn(3, 4)).shape == (3, 2)
    config = FlexConfig(granularity="channel", channel_dim=-1)
    model = convert(mlp(), config=config, example_inputs=torch.randn(2, 7, 4))
    assert model(torch.randn(3, 5, 4)).shape == (3, 5, 2)
    assert model[1].rows == 8


# Commitment and extraction


def test_extracting_before_commitment_is_refused_and_names_the_sites() -> None:
    model = convert(mlp())
    model[1].commit()
    with pytest.raises(FlexActError, match=r"2 of 3 sites .*\(2\.1, 4\).*commit=True"):
        extract(model)


def test_extract_with_commit_uses_the_current_picks_and_leaves_the_model_uncommitted(pick: Callable) -> None:
    model = pick(convert(mlp(), config=FlexConfig(candidates=("relu", "sigmoid"))), "sigmoid")
    state = copy.deepcopy(model.state_dict())
    plain = extract(model, commit=True)
    assert [type(plain[1]), type(plain[2][1]), type(plain[4])] == [nn.Sigmoid] * 3
    assert not any(row.committed for row in selection(model))
    torch.testing.assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0, equal_nan=True)
    model(torch.randn(2, 4)).sum().backward()
    assert model[1].logits.grad is not None


def test_extract_in_place_changes_the_model_itself(pick: Callable) -> None:
    model = pick(convert(mlp()), "tanh")
    weight = model[0].weight
    plain = extract(model, commit=True, inplace=True)
    assert plain is model
    assert plain[0].weight is weight
    assert isinstance(plain[1], nn.Tanh)
    assert b"flexact" not in pickle.dumps(plain)
    with pytest.raises(FlexActError, match="no FlexAct sites"):
        extract(plain)
    assert names(convert(plain)) == ["1", "2.1", "4"]


@pytest.mark.parametrize("verb", [extract, flexact.commit])
def test_a_model_without_sites_cannot_be_committed_or_extracted(verb: Callable) -> None:
    with pytest.raises(FlexActError, match="no FlexAct sites"):
        verb(mlp())


def test_a_committed_site_is_bit_identical_to_the_plain_function_and_its_gradient(pick: Callable) -> None:
    for name, function in (("relu", F.relu), ("tanh", torch.tanh), ("gelu", F.gelu)):
        site = FlexAct(candidates=(name, "sigmoid"))
        flexact.commit(pick(site, name))
        h = torch.randn(50, requires_grad=True)
        duplicate = h.detach().clone().requires_grad_()
        site(h).square().sum().backward()
        function(duplicate).square().sum().backward()
        assert torch.equal(site(h), function(h))
        assert torch.equal(h.grad, duplicate.grad)
        assert site.logits.grad is None


def test_committing_twice_changes_nothing(pick: Callable) -> None:
    model = flexact.commit(pick(convert(mlp()), "tanh"))
    before = selection(model).to_dict()
    pick(model, "relu")
    assert [row.pick for row in selection(flexact.commit(model))] == ["tanh"] * 3
    assert selection(model).to_dict() == before


def test_sites_placed_by_hand_are_extracted_too(pick: Callable) -> None:
    model = nn.Sequential(nn.Linear(2, 2), FlexAct(("relu", "silu")), FlexAct(("relu", "silu")))
    x = torch.randn(3, 2)
    committed = flexact.commit(pick(model, "silu"))
    plain = extract(committed)
    assert [type(module) for module in plain] == [nn.Linear, nn.SiLU, nn.SiLU]
    assert torch.equal(plain(x), committed(x))


# Copies, pickles, new processes


@pytest.mark.parametrize("spelling", ["shared", "functional"])
def test_a_deep_copy_is_independent_and_computes_the_same(resnets: ModuleType, spelling: str, pick: Callable) -> None:
    model = convert(resnets.SPELLINGS[spelling]()).eval()
    x = torch.randn(1, 3, 8, 8)
    duplicate = copy.deepcopy(model)
    assert torch.equal(duplicate(x), model(x))
    before = model(x)
    pick(duplicate, "tanh")
    flexact.commit(duplicate)
    assert torch.equal(model(x), before)
    assert not torch.equal(duplicate(x), before)
    assert not any(row.committed for row in selection(model))


@pytest.mark.parametrize("spelling", ["shared", "functional"])
def test_pickle_keeps_the_output_of_a_converted_model(resnets: ModuleType, spelling: str) -> None:
    model = convert(resnets.SPELLINGS[spelling](), config=FlexConfig(init="original"))
    x = torch.randn(2, 3, 8, 8)
    model(x)
    duplicate = pickle.loads(pickle.dumps(model))
    assert torch.equal(duplicate(x), model(x))
    assert repr(duplicate) == repr(model)
    assert names(duplicate) == names(model)


NETWORK = """
import torch
import torch.nn.functional as F
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        out = F.dropout(F.leaky_relu(self.first(x), 0.2), training=self.training)
        return F.gelu(self.second(out), approximate="tanh") + x

def network():
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.LeakyReLU(0.3), Block(), nn.ReLU())
"""

LOADER = """
import sys, torch
x = torch.load("x.pt")
for stage in sys.argv[1:]:
    model = torch.load(f"{stage}.pt", weights_only=False)  # the first one before anything else imports flexact
    model.eval()
    torch.save(model(x), f"{stage}-y.pt")
    import flexact
    from network import Block
    assert isinstance(model[0], Block)
    if any(isinstance(module, flexact.FlexAct) for module in model.modules()):
        model.train()
        model(x).sum().backward()
        flexact.extract(model, commit=True)
"""


def test_a_saved_model_works_in_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pick: Callable) -> None:
    (tmp_path / "network.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "network", raising=False)
    import network

    def converted() -> nn.Module:
        return convert(network.network(), config=FlexConfig(init="original"))

    committed = flexact.commit(pick(converted(), "tanh"))
    models = {"converted": converted(), "committed": committed, "extracted": extract(committed)}
    models["back"] = extract(flexact.commit(pick(converted(), None)))
    assert isinstance(models["extracted"][0], Rewritten)
    assert not isinstance(models["back"][0], Rewritten)
    x = torch.randn(3, 4)
    torch.save(x, tmp_path / "x.pt")
    for stage, model in models.items():
        torch.save(model, tmp_path / f"{stage}.pt")
    subprocess.run([sys.executable, "-c", LOADER, *models], cwd=tmp_path, check=True)
    for stage, model in models.items():
        assert torch.equal(torch.load(tmp_path / f"{stage}-y.pt"), model.eval()(x)), stage


def test_a_state_of_other_candidates_is_refused_and_nothing_is_loaded() -> None:
    saved = convert(mlp(), config=FlexConfig(candidates=("relu", "tanh"))).state_dict()
    model = convert(mlp(), config=FlexConfig(candidates=("tanh", "relu")))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(FlexActError, match=r"relu, tanh.*tanh, relu"):
        model.load_state_dict(saved)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0, equal_nan=True)


def test_a_committed_state_loads_as_committed_and_an_earlier_one_undoes_it() -> None:
    model = convert(mlp())
    fresh = copy.deepcopy(model.state_dict())
    flexact.commit(model)
    other = convert(mlp())
    other.load_state_dict(model.state_dict())
    assert all(row.committed for row in selection(other))
    x = torch.randn(3, 4)
    assert torch.equal(other(x), model(x))
    other.load_state_dict(fresh)
    assert not any(row.committed for row in selection(other))


@pytest.mark.parametrize("where", [123, None, nn.ReLU, nn.ReLU()])
def test_a_where_of_another_type_is_an_error_that_says_what_it_takes(where: object) -> None:
    model = mlp()
    with pytest.raises(FlexActError, match=r"where (must be 'all'|takes names, or a function)"):
        convert(model, where)
    assert not any(isinstance(module, FlexAct) for module in model.modules())


def test_a_class_as_where_gives_an_error_that_explains_how_to_choose_by_type() -> None:
    with pytest.raises(FlexActError, match=r"lambda name, module: isinstance\(module, ReLU\)"):
        convert(mlp(), nn.ReLU)


def test_a_config_must_be_a_config() -> None:
    with pytest.raises(FlexActError, match=r"FlexConfig.from_dict"):
        convert(mlp(), config={"seed": 3})
    with pytest.raises(FlexActError, match=r"FlexConfig.*'paper'"):
        convert(mlp(), config="paper")


def test_candidates_are_a_shorthand_for_a_config_with_them() -> None:
    short = convert(mlp(), candidates=("original", "tanh", "softsign"))
    long = convert(mlp(), config=FlexConfig(candidates=("original", "tanh", "softsign")))
    assert [site.candidates for site in sites_of(short)] == [site.candidates for site in sites_of(long)]
    both = convert(mlp(), config=FlexConfig(seed=7), candidates=("relu", "tanh"))
    assert {site.config for site in sites_of(both)} == {FlexConfig(seed=7, candidates=("relu", "tanh"))}
    with pytest.raises(FlexActError, match="did you mean 'tanh'"):
        convert(mlp(), candidates=("relu", "tahn"))


def test_a_config_passed_as_where_says_to_pass_it_by_name() -> None:
    with pytest.raises(FlexActError, match=r"got a FlexConfig\. Give other arguments by name: config="):
        convert(mlp(), FlexConfig())


@pytest.mark.parametrize("verb", [flexact.commit, extract])
@pytest.mark.parametrize("value", [None, 3, nn.ReLU])
def test_only_modules_can_be_committed_or_extracted(verb: Callable, value: object) -> None:
    with pytest.raises(FlexActError, match=rf"{verb.__name__} .*torch\.nn\.Module"):
        verb(value)


class CopiedAsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act, self.function = nn.Linear(4, 4), nn.GELU(), F.silu

    def __deepcopy__(self, memo: object) -> CopiedAsItself:
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.act(F.relu(self.layer(x))))


def test_a_module_whose_deep_copy_is_itself_is_an_error_before_anything_changes() -> None:
    x = torch.randn(2, 4)
    for model in (CopiedAsItself(), nn.Sequential(CopiedAsItself(), nn.ReLU())):
        before, expected = repr(model), model(x)
        for run in (flexact.inspect, convert):
            with pytest.raises(FlexActError, match="itself instead of a copy"):
                run(model, example_inputs=x)
        assert repr(model) == before
        assert model.training
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert torch.equal(model(x), expected)
        convert(model)
        with pytest.raises(FlexActError, match="itself instead of a copy"):
            extract(model, commit=True)
        assert not any(site.committed for site in sites_of(model))
        assert repr(extract(model, commit=True, inplace=True)).count("FlexAct") == 0


def test_a_module_without_sites_may_be_its_own_copy() -> None:
    class Frozen(nn.Linear):
        def __deepcopy__(self, memo: object) -> Frozen:
            return self

    model = convert(nn.Sequential(Frozen(4, 4), nn.ReLU()))
    assert extract(model, commit=True)[0] is model[0]


class Tagged(Tensor):
    pass


def test_a_model_that_ran_on_a_tensor_subclass_can_be_copied_and_extracted() -> None:
    model = convert(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    x = torch.randn(3, 4)
    model(x.as_subclass(Tagged)).sum().backward()
    model.zero_grad()
    copied, extracted = copy.deepcopy(model), extract(model, commit=True)
    assert torch.equal(copied(x), model(x))
    assert extracted(x).shape == (3, 2)
