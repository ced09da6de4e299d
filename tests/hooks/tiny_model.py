"""A Qwen2 of two layers, made on the spot: small enough for hundreds of optimiser steps per minute on one core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 48


def save(folder: Path) -> None:
    """Writes configuration and random weights (seed 0). The initial range is wide, so that log-probs differ between
    tokens.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder, safe_serialization=True)


def load(folder: Path) -> Any:
    """The same weights in float64, without verl: what the reference differentiates."""
    from transformers import Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    return model.train()
