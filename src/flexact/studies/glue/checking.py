"""Whether an encoder can do what the study asks of it, told before the first cell."""

from __future__ import annotations

from typing import Any

from torch import nn

from flexact.errors import FlexActError
from flexact.studies.glue.encoder import Encoder, activations_of, skeleton, tokenizer_of
from flexact.studies.glue.tokens import MULTIPLE


def check_encoder(encoder: Encoder, length: int) -> None:
    """Refuse an encoder without activations or without padding, and rows that are too long or too short for it.

    length: tokens of a row, at most.
    """
    network = skeleton(encoder)
    activations_of(network, encoder.name)
    tokenizer = tokenizer_of(encoder)
    if tokenizer.pad_token_id is None:
        raise FlexActError(
            f"the tokenizer in {encoder.folder} has no padding token, and rows of a batch are padded to one length. "
            "Give it one (tokenizer.pad_token = tokenizer.eos_token, say), save it there with "
            "tokenizer.save_pretrained, and set pad_token_id in config.json to its number."
        )
    own = tokenizer.num_special_tokens_to_add(pair=True)
    if length <= own:
        raise FlexActError(
            f"--length {length} leaves no room for words: the tokenizer of {encoder.name} adds {own} tokens of its own "
            f"to a pair of sentences; give --length {own + 1} or more."
        )
    positions = positions_of(network)
    padded = -(-length // MULTIPLE) * MULTIPLE
    if positions is not None and padded > positions:
        raise FlexActError(
            f"rows of up to {length} tokens, padded to a multiple of {MULTIPLE}, do not fit {encoder.name}, which has "
            f"{positions} positions; give --length {positions // MULTIPLE * MULTIPLE} or less."
        )


def positions_of(network: Any) -> int | None:
    """How many tokens a network can take; None where nothing limits them, as with relative positions."""
    for name, module in network.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            padding = module.padding_idx  # RoBERTa counts from behind it
            return module.num_embeddings - (0 if padding is None else padding + 1)
    given = getattr(network.config, "max_position_embeddings", None)
    return given if isinstance(given, int) and given > 0 else None
