"""Models of `transformers` that ours are compared with; loaded once, for tests that leave them as they are."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import cast

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM


@functools.cache
def stock_model(folder: Path) -> LlamaForCausalLM:
    """Of any architecture; typed as one of them, because the auto class has no type."""
    model = cast("LlamaForCausalLM", AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    # The end of sequence is not to end it: comparisons want every token.
    model.generation_config.eos_token_id = None
    return model


@functools.cache
def stock_greedy(folder: Path, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """What `transformers.generate` says."""
    ids = torch.tensor([list(prompt)])
    output = stock_model(folder).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
    )
    return tuple(int(token) for token in output[0, len(prompt) :])
