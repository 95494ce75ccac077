"""A `ModelRunner` without weights: a pass takes a stated time, and its logits are all but one token's certainty.

Where a model stores keys and values it stores the hash of the prefix (`SimulatedText`), in a real pool: reserving,
compacting, sharing and rolling back move the same things, and a stale or missing row writes another text.

The device is busy for the whole pass: the thread that runs it sleeps until the stated time is over, counted from the
pass's begin, so that looking up tokens costs nothing beside it. Like a GPU it takes passes in order, and one that is
handed over before the last one is done begins when that is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engine.features import FeatureRows
from paceline.engine.kv.pool import DEFAULT_PAGE_TOKENS, KVPool, PlaneShape, SequenceKV
from paceline.engine.runner import RunnerInfo, SequencePass
from paceline.engine.simulated.pass_time import Alarm, PassTime
from paceline.engine.simulated.text import SimulatedText
from paceline.errors import ConfigurationError

DEFAULT_MAX_MODEL_LEN = 4096
_CERTAIN = 1000.0
"""Logit of the one token; no temperature that is allowed makes another likely. Further candidates have a part of it."""
_NUM_CANDIDATES = 4
_ROW_BYTES = 8


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A model to simulate.

    Attributes:
        pass_time: of its device.
        seed: of the table of tokens; drafter and target must have the same.
        agreement: how often, per position, it has the target's own token; 1 for the target itself.
        candidates: how often a further candidate is the target's token where those before it are not.
    """

    pass_time: PassTime
    seed: int = 0
    agreement: float = 1.0
    candidates: float = 0.0

    def text(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> SimulatedText:
        """What it writes.

        Args:
            vocab_size: of its tokenizer.
            eos_token_ids: tokens that it never writes.

        Raises:
            ConfigurationError: fewer than two tokens are left.
        """
        choices = tuple([token for token in range(vocab_size) if token not in eos_token_ids])
        if len(choices) < 2:
            raise ConfigurationError(
                f"a tokenizer of {vocab_size} tokens leaves a simulated model nothing to write: name another model",
                field="model",
            )
        return SimulatedText(choices, self.seed, self.agreement, self.candidates)


SIMULATED_DRAFTER = SimulatedModel(PassTime(3.0, 0.05), agreement=0.8)
"""What the drafter service simulates unless it is told otherwise."""


class SimulatedRunner:
    """Runs a simulated model. Used from one thread at a time.

    Args:
        model: what to simulate.
        vocab_size: of its tokenizer.
        eos_token_ids: tokens that it never writes, so that a generation ends by its length.
        kv_bytes: most memory for rows; each takes eight bytes.
        max_sessions: sequences that may be as long as `max_model_len` at once.
        max_model_len: most tokens of a sequence; None for 4096.
        prefix_caching: whether sequences share the rows of equal beginnings.

    Raises:
        ConfigurationError: fewer than two tokens are left to write, or the memory holds no page.

    Attributes:
        packing: of weights, of which there are none.
        eos_token_ids: as given.
    """

    packing = "none"

    def __init__(
        self,
        model: SimulatedModel,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        kv_bytes: int,
        max_sessions: int,
        max_model_len: int | None = None,
        prefix_caching: bool = True,
    ) -> None:
        self.eos_token_ids = eos_token_ids
        self._text = model.text(vocab_size, eos_token_ids)
        self._num_candidates = _NUM_CANDIDATES if model.candidates else 1
        self._pass_time = model.pass_time
        self._alarm = Alarm()
        self._idle_from_s = -math.inf
        self._vocab_size = vocab_size
        max_len = max_model_len or DEFAULT_MAX_MODEL_LEN
        # A page more for each, since the last one is rarely full.
        wanted_bytes = max_sessions * (max_len + DEFAULT_PAGE_TOKENS) * _ROW_BYTES
        self.pool = KVPool.within_budget(
            [PlaneShape(1, 1, 1)], min(kv_bytes, wanted_bytes), dtype=torch.int64, prefix_caching=prefix_caching
        )
        self._states: NDArray[np.int64] = self.pool.groups[0][0, 0, :, 0].numpy()
        self._info = RunnerInfo(
            vocab_size=vocab_size,
            max_model_len=min(max_len, self.pool.capacity_tokens),
            weights_bytes=0,
            kv_bytes=self.pool.num_bytes,
            kv_bytes_per_token=self.pool.bytes_per_token,
            device="cpu",
            dtype="int64",
            runner="simulated",
        )

    @property
    def info(self) -> RunnerInfo:
        """Facts about the model."""
        return self._info

    def new_sequence(self) -> SequenceKV:
        """An empty sequence."""
        return self.pool.new_sequence()

    def features(self, kv: SequenceKV) -> FeatureRows:
        """Refuses: a simulated model has no hidden states.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError("a simulated model has no hidden states: set served_features to none", field="taps")

    def forward(self, batch: Sequence[SequencePass], *, wait: bool = True) -> list[torch.Tensor]:
        """Runs one pass; see `ModelRunner.forward`. If somebody waits, returns when the device would have."""
        begins_s = max(time.perf_counter(), self._idle_from_s)
        self._idle_from_s = begins_s + self._pass_time.seconds(sum(part.num_tokens for part in batch))
        logits = [self._part(part) for part in batch]
        if wait:
            self.synchronize()
        return logits

    def synchronize(self) -> None:
        """Returns when the device would be done with all passes."""
        self._alarm.wait_until(self._idle_from_s)

    def _part(self, part: SequencePass) -> torch.Tensor:
        """Writes a part's rows; logits of its last ones # [num_logits, vocab_size]."""
        start = part.kv.num_rows
        first = max(start - 1, 0)
        slots = part.kv.slot_list(first, start + part.num_tokens)
        state = int(self._states[slots[0]]) if start else self._text.start
        last = part.tokens[-1:] if part.last_on_device is None else part.last_on_device.tolist()
        states = self._text.after(state, (*part.tokens[:-1], *last))
        # Nodes of a tree come after their parents; the root is the last of the tokens.
        nodes = states[-1:]
        for token, parent in zip(part.tree.tokens, part.tree.parents, strict=True):
            nodes += self._text.after(nodes[parent], (token,))
        states += nodes[1:]
        for slot, seen in zip(slots[start - first :], states, strict=True):
            self._states[slot] = seen
        logits = np.zeros((part.num_logits, self._vocab_size), dtype=np.float32)
        for row, seen in enumerate(states[len(states) - part.num_logits :]):
            for rank, token in enumerate(self._text.best_tokens(seen, self._num_candidates)):
                logits[row, token] = _CERTAIN / (1 + rank)
        return torch.from_numpy(logits)
