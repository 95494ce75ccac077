"""The `DraftRunner` on onnxruntime-genai: a quantised model on a CPU, one generator per session.

A generator computes one sequence; `append_tokens` runs a pass over the new tokens, `get_logits` tells the logits after
the last of them, and `rewind_to` forgets rows exactly. More sequences in one generator do not serve drafting: they must
have one length (`append_tokens` takes a padded block, once), and only to 0 can they be rewound. The runtime's own
engine, which batches ragged requests, tells tokens and not logits. So the sessions of a step run one after the other.

A generator's rows live in one buffer, allocated and cleared when it is made. Sessions begin with a small one and change
to one of twice the size when it is full, which computes their rows again. All buffers together stay within the memory
budget: the least recently fed session loses its buffer, and is fed again from the start when it drafts next.

Models come from `paceline.quantize`, or from anywhere else that the runtime's builder made them for a CPU.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.drafting.draft_runner import DraftRunnerInfo, Feed, FeedResult
from paceline.errors import CapacityExceeded, ConfigurationError, ModelError
from paceline.huge_pages import move_to_huge_pages
from paceline.kv_usage import KvUsage

_log = logging.getLogger(__name__)

CONFIG_FILE = "genai_config.json"
"""A folder with this file holds a model for this runner."""

DEFAULT_KV_BYTES = 512 << 20
MIN_SESSION_TOKENS = 64
"""Shorter contexts are not worth a draft model."""

_FIRST_BUFFER_TOKENS = 256
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class _ModelFacts:
    """The numbers of `genai_config.json` that matter here; `row_bytes` counts keys and values of all layers."""

    context_length: int
    vocab_size: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A generator and the tokens it has room for."""

    generator: Any
    capacity: int

    @property
    def num_rows(self) -> int:
        return int(self.generator.token_count())


def is_onnx_model(folder: Path) -> bool:
    """Whether a folder holds a model for this runner."""
    return (folder / CONFIG_FILE).is_file()


def load_runtime() -> Any:
    """The module onnxruntime_genai, which carries no types.

    Raises:
        ConfigurationError: the `onnx` extra is not installed.
    """
    try:
        return importlib.import_module("onnxruntime_genai")
    except ImportError as error:
        raise ConfigurationError(
            f"quantised draft models need the onnx extra ({error}): run `pip install 'paceline[onnx]'`, or draft with "
            "a folder of safetensors"
        ) from error


class OnnxDraftRunner:
    """Runs a quantised draft model, session after session.

    Args:
        folder: model with `genai_config.json`.
        kv_bytes: memory for the key/value rows of all sessions together.
        max_sessions: sessions at once; 0 for any number.
        max_model_len: most tokens of a session; None for what the model and the memory allow.
        max_batch_tokens: most tokens fed in one step, all sessions together; a longer context takes several.
        num_threads: threads of a pass.

    Raises:
        ConfigurationError: the runtime is not installed, or the memory is not enough for a useful session.
        ModelError: the folder holds no model that can be loaded.
    """

    def __init__(
        self,
        folder: Path,
        *,
        kv_bytes: int = DEFAULT_KV_BYTES,
        max_sessions: int = 0,
        max_model_len: int | None = None,
        max_batch_tokens: int = 256,
        num_threads: int = 1,
    ) -> None:
        if max_batch_tokens < 1:
            raise ConfigurationError(
                f"max_batch_tokens is {max_batch_tokens}; it must be at least 1", field="max_batch_tokens"
            )
        self._max_batch_tokens = max_batch_tokens
        self._runtime = load_runtime()
        facts = _read_facts(folder)
        self._budget_tokens = kv_bytes // facts.row_bytes
        context = _session_len(facts, kv_bytes, max_model_len)
        overlay = {
            "model": {
                "decoder": {
                    "session_options": {"intra_op_num_threads": num_threads, "inter_op_num_threads": 1},
                }
            },
            # Greedy settings keep the runtime's own search, which is not used, out of the way.
            "search": {"max_length": context, "past_present_share_buffer": True, "num_beams": 1, "do_sample": False},
        }
        try:
            config = self._runtime.Config(str(folder))
            config.overlay(json.dumps(overlay))
            self._model = self._runtime.Model(config)
        except Exception as error:  # the runtime raises RuntimeError and its own classes alike
            raise ModelError(f"{folder} cannot be loaded by onnxruntime-genai: {error}", field="draft_model") from error
        self._info = DraftRunnerInfo(
            vocab_size=facts.vocab_size,
            max_model_len=context,
            weights_bytes=sum(file.stat().st_size for file in folder.glob("*.onnx*")),
            kv_bytes=self._budget_tokens * facts.row_bytes,
            max_sessions=max_sessions,
        )
        # The least recently fed first; None before the first tokens and after the buffer went to another one.
        self._sessions: dict[str, _Buffer | None] = {}
        self._spare: list[_Buffer] = []
        self._warm_up()
        move_to_huge_pages(self._info.weights_bytes)

    @property
    def info(self) -> DraftRunnerInfo:
        """Facts about the model."""
        return self._info

    def _warm_up(self) -> None:
        """The first pass allocates; better now than in the first request."""
        buffer = self._new_buffer(min(_FIRST_BUFFER_TOKENS, self._info.max_model_len))
        buffer.generator.append_tokens(np.zeros(1, dtype=np.int32))
        self._spare.append(buffer)

    def _new_buffer(self, capacity: int) -> _Buffer:
        parameters = self._runtime.GeneratorParams(self._model)
        parameters.set_search_options(max_length=capacity)
        return _Buffer(self._runtime.Generator(self._model, parameters), capacity)

    def open(self, session: str) -> None:
        """Begins a session without rows."""
        limit = self._info.max_sessions
        if limit and session not in self._sessions and len(self._sessions) >= limit:
            raise CapacityExceeded(f"all {limit} draft sessions are taken; try again when one has ended")
        self.close(session)
        self._sessions[session] = None

    def rows(self, session: str) -> int:
        """Key/value rows that the session holds; 0 for an unknown one."""
        buffer = self._sessions.get(session)
        return 0 if buffer is None else buffer.num_rows

    def kv_usage(self) -> KvUsage:
        """Buffers that sessions hold, filled or not."""
        held = [buffer.capacity for buffer in list(self._sessions.values()) if buffer is not None]
        return KvUsage(sum(held), self._budget_tokens)

    def forward(self, batch: Sequence[Feed]) -> list[FeedResult]:
        """Runs the sessions of a step one after the other; see `DraftRunner.forward`."""
        results = [FeedResult()] * len(batch)
        for feed in batch:
            buffer = self._sessions[feed.session]
            if buffer is not None:
                buffer.generator.rewind_to(feed.keep_rows)
        budget = self._max_batch_tokens
        # Short feeds first: a running draft does not wait for a long prompt.
        fed: set[str] = set()
        for index in sorted(range(len(batch)), key=lambda index: len(batch[index].tokens) - batch[index].keep_rows):
            feed = batch[index]
            buffer = self._buffer(feed.session, len(feed.tokens), fed) if budget > 0 else None
            if buffer is None:
                continue
            start = buffer.num_rows
            stop = min(len(feed.tokens), start + budget)
            budget -= stop - start
            fed.add(feed.session)
            results[index] = self._feed(buffer, feed, start, stop)
        return results

    def _feed(self, buffer: _Buffer, feed: Feed, start: int, stop: int) -> FeedResult:
        """Feeds tokens [start, stop)."""
        generator = buffer.generator
        try:
            generator.append_tokens(np.asarray(feed.tokens[start:stop], dtype=np.int32))
            if stop < len(feed.tokens) or not feed.wants_logits:
                return FeedResult()
            # [1, 1, vocab_size] or [1, num_tokens, vocab_size], as the model was built
            logits = generator.get_logits()[0, -1:]
        except Exception as error:  # see __init__
            _log.warning("draft session %s cannot be fed: %s", feed.session, error)
            # Its state is unknown: the next draft starts with a fresh one.
            self._sessions[feed.session] = None
            return FeedResult(error=ModelError(f"the draft model failed: {error}"))
        return FeedResult(logits=torch.from_numpy(logits))

    def _buffer(self, session: str, num_tokens: int, fed: Collection[str]) -> _Buffer | None:
        """The session's buffer with room for so many tokens, perhaps a new one; None if there is no memory for it.

        Sessions that are not `fed` in this step may lose theirs for it.
        """
        buffer = self._sessions.pop(session)
        self._sessions[session] = buffer
        if buffer is not None and buffer.capacity >= num_tokens:
            return buffer
        if buffer is not None:
            self._sessions[session] = None
            self._spare.append(buffer)
        fitting = [spare for spare in self._spare if spare.capacity >= num_tokens]
        if fitting:
            found = min(fitting, key=lambda spare: spare.capacity)
            self._spare.remove(found)
            found.generator.rewind_to(0)
            self._sessions[session] = found
            return found
        capacity = _FIRST_BUFFER_TOKENS
        while capacity < num_tokens:
            capacity *= 2
        capacity = min(capacity, self._info.max_model_len)
        if not self._free(capacity, fed):
            return None
        buffer = self._sessions[session] = self._new_buffer(capacity)
        return buffer

    def _free(self, capacity: int, kept: Collection[str]) -> bool:
        """Lets go of buffers until one of `capacity` tokens fits the budget; whether that succeeded."""
        while True:
            buffers = [buffer for buffer in (*self._sessions.values(), *self._spare) if buffer is not None]
            if sum(buffer.capacity for buffer in buffers) + capacity <= self._budget_tokens:
                return True
            if self._spare:
                del self._spare[0]
                continue
            victim = next((name for name, held in self._sessions.items() if held and name not in kept), None)
            if victim is None:
                return False
            self._sessions[victim] = None

    def discard(self, session: str) -> None:
        """Forgets the session's rows."""
        buffer = self._sessions[session]
        if buffer is not None:
            buffer.generator.rewind_to(0)

    def close(self, session: str) -> None:
        """Ends the session and keeps its buffer for the next one."""
        buffer = self._sessions.pop(session, None)
        if buffer is not None:
            self._spare.append(buffer)


def _session_len(facts: _ModelFacts, kv_bytes: int, max_model_len: int | None) -> int:
    """Most tokens of a session."""
    affordable = kv_bytes // facts.row_bytes
    least = min(MIN_SESSION_TOKENS, facts.context_length)
    if affordable < least:
        raise ConfigurationError(
            f"{kv_bytes} bytes hold the rows of {affordable} tokens; at least {least * facts.row_bytes} bytes "
            f"({least} tokens) are needed",
            field="kv_bytes",
        )
    return min(facts.context_length, affordable, max_model_len or facts.context_length)


def _read_facts(folder: Path) -> _ModelFacts:
    try:
        model = json.loads((folder / CONFIG_FILE).read_text())["model"]
        decoder = model["decoder"]
        head_numbers = int(decoder["num_key_value_heads"]) * int(decoder["head_size"])
        return _ModelFacts(
            context_length=int(model["context_length"]),
            vocab_size=int(model["vocab_size"]),
            row_bytes=2 * int(decoder["num_hidden_layers"]) * head_numbers * _FLOAT_BYTES,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder / CONFIG_FILE} is not a model description: {error}", field="draft_model") from error
