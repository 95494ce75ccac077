"""The method `draft_model`: a smaller or quantised model of the same vocabulary writes the draft, token by token.

The method keeps no state per draft. Before each pass the session's rows are brought to `context + drafted` by the
rollback rule of `rows.py`: on a draft's first step that drops what the target rejected and feeds what it chose itself,
on later steps it feeds the last drafted token. So a draft may be superseded between any two steps, and a context whose
assumed tokens were rejected needs no care.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from paceline.drafting.draft_id_map import DraftIdMap
from paceline.drafting.draft_runner import DraftRunner, DraftsChains, Feed
from paceline.drafting.method import DraftJob, MethodInfo
from paceline.drafting.rows import rows_to_keep
from paceline.engine.best_token import takes_the_best
from paceline.engine.draft_candidates import best_drafts, draft_candidates
from paceline.engine.draft_sampling import draw_drafts
from paceline.engine.sampling import DraftChoice, DraftRow
from paceline.errors import ConfigurationError
from paceline.kv_usage import KvUsage
from paceline.messages import AcceptanceRule, SamplingParams

_MOST_AT_ONCE = 8
"""Steps without a look at what has come meanwhile: as many as most drafts have."""


class DraftSampleMethod(Enum):
    """How the drafts of a sampled request are chosen under the rule `ratio`."""

    PROBABILISTIC = "probabilistic"
    """Drawn from the model's best tokens; their probabilities are sent along."""
    GREEDY = "greedy"
    """The model's best token; nothing is sent."""


@dataclass(frozen=True, slots=True)
class _Held:
    """What a session's rows are rows of.

    Attributes:
        tokens: the session's first rows are those of the first of these, as many as the runner says; grows with `job`.
        job: whose context and drafts they are.
    """

    tokens: list[int]
    job: DraftJob | None = None


class DraftModelMethod:
    """Drafts with a model.

    Under the rule `match` tokens are chosen with the target's own noise, under `ratio` by `draft_sample_method`; a
    greedy request gets the model's best tokens under both.

    Args:
        runner: the model and its rows.
        name: of the method; `layerskip` where the model is the target's first layers.
        tokenizer_hash: fingerprint of the model's tokenizer.
        vocabulary: its tokens.
        vocab_limit: ids at or above it are never proposed, whatever the model's output layer holds; None for the
            model's own size. Set it to the number of real tokens where the output layer is padded.
        eos_token_ids: ids that `min_tokens` masks.
        draft_sample_method: how to choose under `ratio`.
        num_draft_probs: most tokens of a distribution that drafts are drawn from and that is sent with them.
        id_map: of a model that knows only some of the target's tokens; None where ids are the target's.
    """

    def __init__(
        self,
        runner: DraftRunner,
        *,
        name: str = "draft_model",
        tokenizer_hash: str = "",
        vocabulary: Mapping[int, str] | None = None,
        vocab_limit: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        draft_sample_method: DraftSampleMethod = DraftSampleMethod.PROBABILISTIC,
        num_draft_probs: int = 64,
        id_map: DraftIdMap | None = None,
    ) -> None:
        if num_draft_probs < 1:
            raise ConfigurationError(
                f"num_draft_probs is {num_draft_probs}; it must be at least 1", field="num_draft_probs"
            )
        self._draft_sample_method = draft_sample_method
        self._num_draft_probs = num_draft_probs
        self._runner = runner
        self._eos_token_ids = eos_token_ids
        facts = runner.info
        self._id_map = id_map
        known_ids = facts.vocab_size if id_map is None else id_map.target_vocab_size
        self._num_embeddings = known_ids
        self._info = MethodInfo(
            name=name,
            vocab_size=min(known_ids, vocab_limit or known_ids),
            max_model_len=facts.max_model_len,
            tokenizer_hash=tokenizer_hash,
            vocabulary=vocabulary or {},
            weights_bytes=facts.weights_bytes,
            kv_bytes=facts.kv_bytes,
            max_sessions=facts.max_sessions,
        )
        self._held: dict[str, _Held] = {}

    @property
    def info(self) -> MethodInfo:
        """Facts about the method."""
        return self._info

    def open(self, session: str) -> None:
        """Makes room for a session; one that is open already begins again."""
        self._runner.open(session)
        self._held[session] = _Held([])

    def kv_len(self, session: str) -> int:
        """Key/value rows that the session holds."""
        return self._runner.rows(session)

    def kv_usage(self) -> KvUsage:
        """Room taken now; may be asked from any thread."""
        return self._runner.kv_usage()

    def fed_tokens(self, session: str) -> tuple[int, ...]:
        """The tokens of those rows, for tests and checks."""
        held = self._held.get(session)
        return () if held is None else tuple(held.tokens[: self._runner.rows(session)])

    def close(self, session: str) -> None:
        """Frees what the session holds; unknown sessions are closed already."""
        self._runner.close(session)
        self._held.pop(session, None)

    def check_integrity(self) -> None:
        """Checks that every session's rows are tokens that are noted for it.

        Raises:
            AssertionError: names the session.
        """
        for session, held in self._held.items():
            if self._runner.rows(session) > len(held.tokens):
                raise AssertionError(
                    f"{session} holds {self._runner.rows(session)} rows for {len(held.tokens)} fed tokens"
                )

    def advance(self, jobs: Sequence[DraftJob]) -> None:
        """Takes one step for all jobs in one pass; see `DraftMethod.advance`."""
        planned = self._plan([job for job in jobs if not job.done])
        if not planned:
            return
        results = self._runner.forward([self._in_draft_ids(feed) for _, _, feed in planned])
        chosen: list[tuple[DraftJob, torch.Tensor]] = []
        for (job, held, _), result in zip(planned, results, strict=True):
            self._held[job.session] = held
            if result.error is not None:
                job.done = True
            elif result.logits is not None:
                chosen.append((job, result.logits))
        if chosen:
            self._choose(chosen)

    def draft_at_once(self, job: DraftJob) -> bool:
        """Takes the steps of a greedy draft without a wait between them; see `DraftsAtOnce`."""
        sampling = job.sampling_without_chance
        if not isinstance(self._runner, DraftsChains) or self._id_map or job.num_candidates:
            return False
        if self._is_drawn(job) or not takes_the_best(sampling):
            return False
        planned = self._plan([job])
        if not planned:
            return True  # it cannot be served, and is done
        ((_, held, feed),) = planned
        num_steps = min(job.max_depth - len(job.tokens), _MOST_AT_ONCE)
        result = self._runner.forward_chain(feed, num_steps, self._info.vocab_size)
        if result is None:
            return False
        self._held[job.session] = held
        job.done = result.error is not None
        for choice in result.choices:
            self._append_choice(job, choice)
        held.tokens.extend(choice.token for choice in result.choices[:-1] if choice is not None)
        return True

    def _plan(self, jobs: Sequence[DraftJob]) -> list[tuple[DraftJob, _Held, Feed]]:
        """What each job wants to be fed, and holds then; jobs that cannot be served are marked done."""
        planned: list[tuple[DraftJob, _Held, Feed]] = []
        for job in jobs:
            job.method = self._info.name
            before = self._held.get(job.session)
            if before is None or len(job.tokens) >= job.max_depth:
                job.done = True
                continue
            held, keep_rows = self._wanted(job, before)
            if self._can_feed(held.tokens, keep_rows):
                feed = Feed(job.session, held.tokens, keep_rows, is_context=not job.tokens)
                planned.append((job, held, feed))
            else:
                job.done = True
        return planned

    def _wanted(self, job: DraftJob, before: _Held) -> tuple[_Held, int]:
        """What the session is to hold, and how many of its rows stay."""
        num_rows = self._runner.rows(job.session)
        if before.job is job:
            # A later step of a draft only adds its newest token: nothing is compared or copied anew.
            before.tokens.extend(job.tokens[len(before.tokens) - len(job.context) :])
            return before, min(num_rows, len(before.tokens) - 1)
        tokens = [*job.context, *job.tokens]
        return _Held(tokens, job), rows_to_keep(before.tokens[:num_rows], tokens) if tokens else 0

    def _in_draft_ids(self, feed: Feed) -> Feed:
        if self._id_map is None:
            return feed
        return replace(feed, tokens=self._id_map.to_draft(feed.tokens))

    def _can_feed(self, tokens: Sequence[int], keep_rows: int) -> bool:
        if not 0 < len(tokens) <= self._info.max_model_len:
            return False
        # Tokens beyond the model's embedding: the target's vocabulary is larger, and this context uses it.
        return all(0 <= token < self._num_embeddings for token in tokens[keep_rows:])

    @torch.inference_mode()
    def _choose(self, chosen: Sequence[tuple[DraftJob, torch.Tensor]]) -> None:
        """Appends each job's next token, chosen from its logits # [1, vocab_size]."""
        target_ids = None if self._id_map is None else self._id_map.target_ids
        drawn = [entry for entry in chosen if self._is_drawn(entry[0])]
        ranked = [entry for entry in chosen if entry[0].num_candidates and not self._is_drawn(entry[0])]
        others = [entry for entry in chosen if not (entry[0].num_candidates or self._is_drawn(entry[0]))]
        if drawn:
            rows = [_draft_row(job, job.sampling) for job, _ in drawn]
            choices: Sequence[DraftChoice | None] = draw_drafts(
                torch.cat([row for _, row in drawn]),
                rows,
                num_draft_probs=self._num_draft_probs,
                vocab_size=self._info.vocab_size,
                eos_token_ids=self._eos_token_ids,
                target_ids=target_ids,
            )
            self._append(drawn, choices)
        if ranked:
            self._append_ranked(ranked, target_ids)
        if others:
            rows = [_draft_row(job, job.sampling_without_chance) for job, _ in others]
            choices = best_drafts(
                [row for _, row in others],
                rows,
                vocab_size=self._info.vocab_size,
                eos_token_ids=self._eos_token_ids,
                target_ids=target_ids,
            )
            self._append(others, choices)

    def _append_ranked(self, chosen: Sequence[tuple[DraftJob, torch.Tensor]], target_ids: torch.Tensor | None) -> None:
        """Appends the best of each job's candidates, and notes all of them."""
        found = draft_candidates(
            torch.cat([row for _, row in chosen]),
            [_draft_row(job, job.sampling_without_chance) for job, _ in chosen],
            num=max(job.num_candidates for job, _ in chosen),
            vocab_size=self._info.vocab_size,
            eos_token_ids=self._eos_token_ids,
            target_ids=target_ids,
        )
        for (job, _), candidates in zip(chosen, found, strict=True):
            job.candidates.append(tuple([choice.token for choice in candidates[: job.num_candidates]]))
        self._append(chosen, [candidates[0] if candidates else None for candidates in found])

    def _is_drawn(self, job: DraftJob) -> bool:
        probabilistic = self._draft_sample_method is DraftSampleMethod.PROBABILISTIC
        return probabilistic and job.rule is AcceptanceRule.RATIO and not job.sampling.greedy

    def _append(self, chosen: Sequence[tuple[DraftJob, torch.Tensor]], choices: Sequence[DraftChoice | None]) -> None:
        for (job, _), choice in zip(chosen, choices, strict=True):
            self._append_choice(job, choice)

    def _append_choice(self, job: DraftJob, choice: DraftChoice | None) -> None:
        if choice is None:
            # Rows that give no finite logits may not be finite either: the next draft computes them anew.
            self._runner.discard(job.session)
            job.done = True
            return
        job.tokens.append(choice.token)
        job.confidences.append(choice.confidence)
        if choice.draft_probs is not None:
            job.draft_probs.append(choice.draft_probs)
        job.done = len(job.tokens) >= job.max_depth


def _draft_row(job: DraftJob, sampling: SamplingParams) -> DraftRow:
    return DraftRow(sampling, job.context, job.tokens, job.generation_start)
