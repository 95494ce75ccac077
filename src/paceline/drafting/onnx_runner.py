"""The `DraftRunner` on onnxruntime-genai: a quantised model on a CPU, one generator per session.

A generator computes one sequence; `append_tokens` runs a pass over the new tokens, `get_logits` tells the logits after
the last of them, and `rewind_to` forgets rows exactly. A generator's rows live in one buffer for the longest context,
allocated and cleared when it is made. So generators are made on first need and used again after a session has closed,
and the longest context is what the memory budget allows for each of them.

Models come from `paceline.quantize`, or from anywhere else that the runtime's builder made them for a CPU.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.drafting.draft_runner import DraftRunnerInfo, Feed, FeedResult
from paceline.errors import CapacityExceeded, ConfigurationError, ModelError
from paceline.kv_usage import KvUsage

_log = logging.getLogger(__name__)

CONFIG_FILE = "genai_config.json"
"""A folder with this file holds a model for this runner."""

DEFAULT_KV_BYTES = 512 << 20
MIN_SESSION_TOKENS = 64
"""Shorter contexts are not worth a draft model."""

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class _ModelFacts:
    """The numbers of `genai_config.json` that matter here; `row_bytes` counts keys and values of all layers."""

    context_length: int
    vocab_size: int
    row_bytes: int


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
        kv_bytes: memory for key/value rows; each session has an equal share, which may limit its length.
        max_sessions: sessions at once, at least 1.
        max_model_len: most tokens of a session; None for what the model and the memory allow.
        num_threads: threads of a pass.

    Raises:
        ConfigurationError: the runtime is not installed, or the memory is not enough for useful sessions.
        ModelError: the folder holds no model that can be loaded.
    """

    def __init__(
        self,
        folder: Path,
        *,
        kv_bytes: int = DEFAULT_KV_BYTES,
        max_sessions: int = 8,
        max_model_len: int | None = None,
        num_threads: int = 1,
    ) -> None:
        self._runtime = load_runtime()
        facts = _read_facts(folder)
        context = _session_len(facts, kv_bytes, max_sessions, max_model_len)
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
            kv_bytes=max_sessions * context * facts.row_bytes,
            max_sessions=max_sessions,
        )
        self._sessions: dict[str, Any] = {}  # None until the first tokens come
        self._spare: list[Any] = []
        self._warm_up()

    @property
    def info(self) -> DraftRunnerInfo:
        """Facts about the model."""
        return self._info

    def _warm_up(self) -> None:
        """The first pass allocates; better now than in the first request."""
        generator = self._new_generator()
        generator.append_tokens(np.zeros(1, dtype=np.int32))
        self._spare.append(generator)

    def _new_generator(self) -> Any:
        return self._runtime.Generator(self._model, self._runtime.GeneratorParams(self._model))

    def open(self, session: str) -> None:
        """Begins a session without rows."""
        limit = self._info.max_sessions
        if session not in self._sessions and len(self._sessions) >= limit:
            raise CapacityExceeded(f"all {limit} draft sessions are taken; try again when one has ended")
        self.close(session)
        self._sessions[session] = None

    def rows(self, session: str) -> int:
        """Key/value rows that the session holds; 0 for an unknown one."""
        generator = self._sessions.get(session)
        return 0 if generator is None else int(generator.token_count())

    def kv_usage(self) -> KvUsage:
        """Every open session has an equal share of the room for itself, filled or not."""
        info = self._info
        return KvUsage(len(self._sessions) * info.max_model_len, info.max_sessions * info.max_model_len)

    def forward(self, batch: Sequence[Feed]) -> list[FeedResult]:
        """Runs the sessions of a step one after the other; see `DraftRunner.forward`."""
        return [self._feed(feed) for feed in batch]

    def _feed(self, feed: Feed) -> FeedResult:
        try:
            generator = self._generator(feed.session)
            generator.rewind_to(feed.keep_rows)
            generator.append_tokens(np.asarray(feed.tokens, dtype=np.int32))
            if not feed.wants_logits:
                return FeedResult()
            # [1, 1, vocab_size] or [1, num_tokens, vocab_size], as the model was built
            logits = generator.get_logits()[0, -1]
        except Exception as error:  # see __init__
            _log.warning("draft session %s cannot be fed: %s", feed.session, error)
            # Its state is unknown: the next draft starts with a fresh one.
            self._sessions[feed.session] = None
            return FeedResult(error=ModelError(f"the draft model failed: {error}"))
        return FeedResult(logits=torch.from_numpy(logits))

    def _generator(self, session: str) -> Any:
        generator = self._sessions[session]
        if generator is None:
            generator = self._spare.pop() if self._spare else self._new_generator()
            generator.rewind_to(0)
            self._sessions[session] = generator
        return generator

    def close(self, session: str) -> None:
        """Ends the session and keeps its buffer for the next one."""
        generator = self._sessions.pop(session, None)
        if generator is not None:
            self._spare.append(generator)


def _session_len(facts: _ModelFacts, kv_bytes: int, max_sessions: int, max_model_len: int | None) -> int:
    """Most tokens of a session."""
    if max_sessions < 1:
        raise ConfigurationError(f"max_sessions is {max_sessions}; it must be at least 1", field="max_sessions")
    affordable = kv_bytes // (max_sessions * facts.row_bytes)
    if affordable < min(MIN_SESSION_TOKENS, facts.context_length):
        needed = MIN_SESSION_TOKENS * max_sessions * facts.row_bytes
        raise ConfigurationError(
            f"{kv_bytes} bytes hold {affordable} tokens for each of {max_sessions} draft sessions; at least {needed} "
            f"bytes ({MIN_SESSION_TOKENS} tokens each) are needed, or fewer sessions",
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
