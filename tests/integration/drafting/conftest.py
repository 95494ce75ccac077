"""A tiny random Llama in a folder, and its quantised copy, made once per run of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.quantize import quantize
from tests.fakes.tiny_tokenizer import BYTE_LEVEL_VOCAB_SIZE, write_byte_level

TINY_VOCAB = BYTE_LEVEL_VOCAB_SIZE + 20
"""Rows of the output layer: padded, as real ones often are."""
TINY_CONTEXT = 96


def write_tiny_llama(folder: Path, seed: int = 0) -> Path:
    """Random weights, large enough for the best tokens to be far apart; returns the folder."""
    write_byte_level(folder, max_model_len=TINY_CONTEXT)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=TINY_VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TINY_CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=BYTE_LEVEL_VOCAB_SIZE - 1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny_onnx_dir(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The int8 copy of `tiny_llama_dir`."""
    return quantize(str(tiny_llama_dir), tmp_path_factory.mktemp("tiny-onnx") / "int8")
