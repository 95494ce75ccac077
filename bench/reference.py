"""The second oracle: what decoding without speculation, cache and service says, computed independently.

It shares no code with the engine: the stock `transformers` model, every parameter of a request written out in numpy,
and its own implementation of the keyed noise whose definition is in `paceline.speculation.noise`. A causal model's
logits at every position come from one cache-free pass over the whole text, so a text is checked in one pass: it is what
decoding token by token gives if and only if every token of it is the reference's choice after the tokens before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from paceline.adapted_model import ADAPTER_FOLDER
from paceline.messages import SamplingParams

GAMMA = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


def mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def gumbel_row(seed: int, position: int, vocab_size: int) -> NDArray[np.float64]:
    """The noise of all tokens at an absolute position # [vocab_size]."""
    mixed_seed = int(mix(np.array([seed & MASK], dtype=np.uint64))[0])
    key = mix(np.array([(mixed_seed + (position + 1) * GAMMA) & MASK], dtype=np.uint64))
    hashes = mix(key + np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(GAMMA))
    uniform = ((hashes >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52
    return cast("NDArray[np.float64]", -np.log(-np.log1p(-uniform)))


@dataclass(frozen=True, slots=True)
class Mode:
    """How tokens are chosen.

    Attributes:
        name: for messages.
        sampling: the parameters; the seed comes with each case.
    """

    name: str
    sampling: SamplingParams


GREEDY = Mode("greedy", SamplingParams(temperature=0.0))
SAMPLED = Mode("sampled", SamplingParams(temperature=0.8, top_p=0.95))


@dataclass(frozen=True, slots=True)
class Choice:
    """The reference's token at one position, and by how much it won there."""

    token: int
    gap: float


def edit(
    logits: NDArray[np.float64],
    sampling: SamplingParams,
    prompt: Sequence[int],
    generated: Sequence[int],
    eos_token_ids: Sequence[int],
) -> NDArray[np.float64]:
    """One row # [vocab_size] after logit_bias, penalties and min_tokens."""
    row = logits.copy()
    for token, bias in sampling.logit_bias.items():
        row[token] += bias
    for token in {*prompt, *generated}:
        row[token] *= 1 / sampling.repetition_penalty if row[token] > 0 else sampling.repetition_penalty
    for token, count in Counter(generated).items():
        row[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    if len(generated) < sampling.min_tokens:
        row[[*eos_token_ids, *sampling.stop_token_ids]] = -np.inf
    return row


def truncated(scaled: NDArray[np.float64], sampling: SamplingParams) -> NDArray[np.int64]:
    """Ids that top_k, top_p and min_p leave, each judging what the one before has left, best first."""
    order = np.argsort(-scaled, kind="stable")[: sampling.top_k or None]
    probs = np.exp(scaled[order] - scaled[order[0]])
    probs /= probs.sum()
    kept = (np.cumsum(probs) - probs < sampling.top_p) & (probs >= sampling.min_p * probs[0])
    return cast("NDArray[np.int64]", order[kept])


def choose(logits: NDArray[np.float64], mode: Mode, seed: int, position: int) -> Choice:
    """The token that decoding chooses from one edited row # [vocab_size]."""
    scores, sampling = logits, mode.sampling
    if sampling.temperature > 0:
        scaled = logits / sampling.temperature
        kept = truncated(scaled, sampling)
        scores = np.full_like(scaled, -np.inf)
        scores[kept] = scaled[kept] + gumbel_row(seed, position, len(scaled))[kept]
    best, second = np.argsort(-scores, kind="stable")[:2]
    return Choice(int(best), float(scores[best] - scores[second]))


class CacheFreeReference:
    """Decodes with the stock model.

    Args:
        folder: a model in float32; one with an adapter beside it is both together.
    """

    def __init__(self, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if (adapter := folder / ADAPTER_FOLDER).is_dir():
            from peft import PeftModel  # takes seconds, and few targets have an adapter

            model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
        self.model = cast("LlamaForCausalLM", model.train(mode=False))
        ends = self.model.generation_config.eos_token_id
        self.eos_token_ids = tuple(ends) if isinstance(ends, list) else (ends,) if ends is not None else ()

    @torch.inference_mode()
    def choices(
        self, tokens: Sequence[int], start: int, mode: Mode, seed: int, generation_start: int | None = None
    ) -> list[Choice]:
        """The choice for each position in [start, len(tokens)), each after the tokens before it.

        Args:
            tokens: the whole text.
            start: first position.
            mode: how tokens are chosen.
            seed: of the noise.
            generation_start: index of the first generated token; None for `start`.
        """
        ids = torch.tensor([list(tokens[:-1])])
        kept = len(tokens) - start
        rows = self.model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[0].double().numpy()
        begin = start if generation_start is None else generation_start
        return [
            choose(
                edit(row, mode.sampling, tokens[:begin], tokens[begin : start + index], self.eos_token_ids),
                mode,
                seed,
                start + index,
            )
            for index, row in enumerate(rows)
        ]

    def choice_after(self, tokens: Sequence[int], mode: Mode, seed: int, generation_start: int | None = None) -> Choice:
        """The choice after `tokens`; see `choices`."""
        return self.choices([*tokens, 0], len(tokens), mode, seed, generation_start)[0]

    @torch.inference_mode()
    def transformers_greedy(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """What `transformers.generate` continues with; the end-of-sequence token included."""
        ids = torch.tensor([list(tokens)])
        mask = torch.ones_like(ids)
        output = self.model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
        return [int(token) for token in output[0, len(tokens) :]]
