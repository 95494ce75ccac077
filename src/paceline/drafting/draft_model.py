"""The method `draft_model`: a smaller or quantised model of the same vocabulary writes the draft, token by token.

The method keeps no state per draft. Before each pass the session's rows are brought to `context + drafted` by the
rollback rule of `rows.py`: on a draft's first step that drops what the target rejected and feeds what it chose itself,
on later steps it feeds the last drafted token. So a draft may be superseded between any two steps, and a context whose
assumed tokens were rejected needs no care.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.drafting.draft_runner import DraftRunner, Feed, FeedResult
from paceline.drafting.method import DraftJob, MethodInfo
from paceline.drafting.rows import rows_to_keep
from paceline.engine.sampling import DraftRow, draft_tokens
from paceline.errors import ConfigurationError
from paceline.kv_usage import KvUsage


class DraftModelMethod:
    """Drafts with a model.

    Args:
        runner: the model and its rows.
        tokenizer_hash: fingerprint of the model's tokenizer.
        vocabulary: its tokens.
        vocab_limit: ids at or above it are never proposed, whatever the model's output layer holds; None for the
            model's own size. Set it to the number of real tokens where the output layer is padded.
        eos_token_ids: ids that `min_tokens` masks.
        max_batch_tokens: most tokens of a pass; a longer context is fed in several steps, so that no session stalls
            the others.
    """

    def __init__(
        self,
        runner: DraftRunner,
        *,
        tokenizer_hash: str = "",
        vocabulary: Mapping[int, str] | None = None,
        vocab_limit: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        max_batch_tokens: int = 256,
    ) -> None:
        if max_batch_tokens < 1:
            raise ConfigurationError(
                f"max_batch_tokens is {max_batch_tokens}; it must be at least 1", field="max_batch_tokens"
            )
        self._runner = runner
        self._max_batch_tokens = max_batch_tokens
        self._eos_token_ids = eos_token_ids
        facts = runner.info
        self._num_embeddings = facts.vocab_size
        self._info = MethodInfo(
            name="draft_model",
            vocab_size=min(facts.vocab_size, vocab_limit or facts.vocab_size),
            max_model_len=facts.max_model_len,
            tokenizer_hash=tokenizer_hash,
            vocabulary=vocabulary or {},
            weights_bytes=facts.weights_bytes,
            kv_bytes=facts.kv_bytes,
            max_sessions=facts.max_sessions,
        )
        self._fed: dict[str, list[int]] = {}

    @property
    def info(self) -> MethodInfo:
        """Facts about the method."""
        return self._info

    def open(self, session: str) -> None:
        """Makes room for a session; one that is open already begins again."""
        self._runner.open(session)
        self._fed[session] = []

    def kv_len(self, session: str) -> int:
        """Key/value rows that the session holds."""
        return self._runner.rows(session)

    def kv_usage(self) -> KvUsage:
        """Room taken now; may be asked from any thread."""
        return self._runner.kv_usage()

    def fed_tokens(self, session: str) -> tuple[int, ...]:
        """The tokens of those rows, for tests and checks."""
        return tuple(self._fed.get(session, ()))

    def close(self, session: str) -> None:
        """Frees what the session holds; unknown sessions are closed already."""
        self._runner.close(session)
        self._fed.pop(session, None)

    def check_integrity(self) -> None:
        """Checks that every session's rows are the tokens that are noted for it.

        Raises:
            AssertionError: names the session.
        """
        for session, fed in self._fed.items():
            if self._runner.rows(session) != len(fed):
                raise AssertionError(f"{session} holds {self._runner.rows(session)} rows for {len(fed)} fed tokens")

    def advance(self, jobs: Sequence[DraftJob]) -> None:
        """Takes one step for all jobs in one pass; see `DraftMethod.advance`."""
        planned = self._plan([job for job in jobs if not job.done])
        if not planned:
            return
        results = self._runner.forward([feed for _, feed in planned])
        chosen: list[tuple[DraftJob, torch.Tensor]] = []
        for (job, feed), result in zip(planned, results, strict=True):
            self._note_rows(feed, result)
            if result.error is not None:
                job.done = True
            elif result.logits is not None:
                chosen.append((job, result.logits))
        if chosen:
            self._choose(chosen)

    def _plan(self, jobs: Sequence[DraftJob]) -> list[tuple[DraftJob, Feed]]:
        """What each job feeds in this pass; jobs that cannot be served are marked done.

        Short feeds come first: a running draft does not wait for a long prompt.
        """
        wanted: list[tuple[int, list[int], DraftJob]] = []
        for job in jobs:
            job.method = self._info.name
            tokens = [*job.context, *job.tokens]
            fed = self._fed.get(job.session)
            keep_rows = rows_to_keep(fed, tokens) if fed is not None and tokens else 0
            if fed is None or not self._can_feed(job, tokens, keep_rows):
                job.done = True
            else:
                wanted.append((keep_rows, tokens, job))
        wanted.sort(key=lambda want: len(want[1]) - want[0])
        planned: list[tuple[DraftJob, Feed]] = []
        budget = self._max_batch_tokens
        for keep_rows, tokens, job in wanted:
            stop = min(len(tokens), keep_rows + budget)
            if stop == keep_rows:
                break
            budget -= stop - keep_rows
            planned.append((job, Feed(job.session, keep_rows, tokens[keep_rows:stop], stop == len(tokens))))
        return planned

    def _can_feed(self, job: DraftJob, tokens: Sequence[int], keep_rows: int) -> bool:
        if not tokens or len(job.tokens) >= job.max_depth or len(tokens) > self._info.max_model_len:
            return False
        # Tokens beyond the model's embedding: the target's vocabulary is larger, and this context uses it.
        return all(0 <= token < self._num_embeddings for token in tokens[keep_rows:])

    def _note_rows(self, feed: Feed, result: FeedResult) -> None:
        fed = self._fed[feed.session]
        del fed[feed.keep_rows :]
        if result.error is None:
            fed.extend(feed.tokens)
        else:
            del fed[self._runner.rows(feed.session) :]

    @torch.inference_mode()
    def _choose(self, chosen: Sequence[tuple[DraftJob, torch.Tensor]]) -> None:
        """Appends each job's next token, from its logits # [vocab_size] and the noise it shares with the target."""
        rows = [DraftRow(job.sampling, job.context, job.tokens, job.generation_start) for job, _ in chosen]
        logits = chosen[0][1].unsqueeze(0) if len(chosen) == 1 else torch.stack([row for _, row in chosen])
        choices = draft_tokens(logits, rows, vocab_size=self._info.vocab_size, eos_token_ids=self._eos_token_ids)
        for (job, _), choice in zip(chosen, choices, strict=True):
            if choice is None:
                # Rows that give no finite logits may not be finite either: the next draft computes them anew.
                self._runner.open(job.session)
                self._fed[job.session] = []
                job.done = True
                continue
            job.tokens.append(choice.token)
            job.confidences.append(choice.confidence)
            job.done = len(job.tokens) >= job.max_depth
