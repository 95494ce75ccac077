"""The drafting method around a head: contexts are fed, drafts grow, several sessions share each pass.

A draft's steps, one pass each: the pairs of its context that are not fed yet, in chunks; then level after level of the
draft, from the head's own states. A chain adds its token at once, so that it may be superseded between any two steps;
a tree comes whole. Sampled requests are drafted with the target's own noise. Under the rule `ratio` the draft is a
chain of the head's best tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from paceline.drafting.checkpoints.eagle import EagleCheckpoint
from paceline.drafting.eagle.candidates import find_candidates
from paceline.drafting.eagle.growth import Growth
from paceline.drafting.eagle.head_build import build_head
from paceline.drafting.eagle.head_pass import HeadPart, HeadRunner
from paceline.drafting.eagle.sessions import HeadSession, HeadSessions
from paceline.drafting.eagle.taps import FeatureFusion, make_taps
from paceline.drafting.method import DraftJob, MethodInfo
from paceline.engine.runner_options import DEFAULT_KV_BYTES, RunnerOptions
from paceline.engine.sampling import DraftRow
from paceline.engine.scheduler import SchedulerStats
from paceline.engine.shared_parts import SharedParts
from paceline.engine.wants import Want
from paceline.errors import ConfigurationError
from paceline.kv_usage import KvUsage
from paceline.messages import AcceptanceRule, SamplingParams

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Draft:
    """A draft under way.

    Attributes:
        job: what is asked for.
        session: whose rows it grows on.
        growth: its nodes.
        sampling: by which its tokens are chosen.
        evaluated: nodes whose states are in `states`, in order: the frontier before the present one.
        states: # [len(evaluated), hidden_size]; None as long as the context is not fed.
        rows: where the rows of its nodes lie.
        num_rows: rows that the sequence must have, if it has not lost any.
    """

    job: DraftJob
    session: HeadSession
    growth: Growth
    sampling: SamplingParams
    evaluated: list[int] = field(default_factory=list)
    states: torch.Tensor | None = None
    rows: dict[int, int] = field(default_factory=dict)
    num_rows: int = 0

    def draft_row(self, node: int) -> DraftRow:
        """What is known of the logits after a node."""
        drafted = [self.growth.token(ancestor) for ancestor in self.growth.path(node)]
        return DraftRow(self.sampling, self.job.context, drafted, self.job.generation_start)

    def part(self) -> HeadPart:
        """The frontier's part of a pass; its rows are reserved."""
        assert self.states is not None  # noqa: S101 - drafts are fed after their contexts
        growth, frontier, kv = self.growth, self.growth.frontier, self.session.holder.kv
        for index, node in enumerate(frontier):
            self.rows[node] = kv.num_rows + index
        visible = None
        if len(frontier) > 1 or growth.width > 1:
            num_context = len(self.job.context) - 1 - self.session.first_row
            visible = torch.zeros(len(frontier), kv.num_rows + len(frontier), dtype=torch.bool)
            visible[:, :num_context] = True
            for index, node in enumerate(frontier):
                visible[index, [self.rows[ancestor] for ancestor in growth.path(node)]] = True
        sources = [self.evaluated.index(growth.parent(node)) for node in frontier]
        position = len(self.job.context) - 2 + growth.depth
        return HeadPart(
            kv=kv,
            features=self.states[sources],
            token_ids=[growth.token(node) for node in frontier],
            positions=[position] * len(frontier),
            num_wanted=len(frontier),
            visible=visible,
        )


class EagleMethod:
    """Drafts with an EAGLE head.

    Args:
        checkpoint: of the head.
        parts: what it borrows from the target.
        kv_bytes: memory for its rows.
        eagle_topk: candidates per node and nodes expanded per level; 1 for chains.
        num_draft_tokens: nodes of a tree.
        max_sessions: sessions at once; 0 for any number: they share the memory.
        vocab_limit: ids at or above it are never proposed; None for the target's number of columns. Set it to the
            number of real tokens where the target's output layer is padded.
        eos_token_ids: ids that `min_tokens` masks.
        tokenizer_hash: fingerprint of the target's tokenizer.
        vocabulary: its tokens.
        refresh: whether accepted tokens' rows are made anew from the target's features. False keeps what the draft
            made, for chains: it drafts badly, and shows why this is needed.
        max_batch_tokens: most pairs of contexts in a pass; a longer context is fed in several.
        pack: whether to pack weights where that is possible.

    Raises:
        ConfigurationError: a value is out of range, the memory is too small, or the head does not fit the target.
    """

    def __init__(
        self,
        checkpoint: EagleCheckpoint,
        parts: SharedParts,
        *,
        kv_bytes: int = DEFAULT_KV_BYTES,
        eagle_topk: int = 1,
        num_draft_tokens: int = 16,
        max_sessions: int = 0,
        vocab_limit: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        tokenizer_hash: str = "",
        vocabulary: Mapping[int, str] | None = None,
        refresh: bool = True,
        max_batch_tokens: int = 256,
        pack: bool = True,
    ) -> None:
        _check_at_least_one(eagle_topk=eagle_topk, num_draft_tokens=num_draft_tokens)
        if not refresh and eagle_topk > 1:
            raise ConfigurationError("refresh=False is for chains: set eagle_topk to 1", field="eagle_topk")
        config = checkpoint.config
        vocab_size = min(parts.vocab_size, vocab_limit or parts.vocab_size)
        self._runner = HeadRunner(
            build_head(checkpoint, parts, vocab_size=vocab_size, pack=pack), RunnerOptions(kv_bytes=kv_bytes)
        )
        head, pool = self._runner.head, self._runner.pool
        self._head = head
        self._topk = eagle_topk
        self._num_nodes = num_draft_tokens
        self._refresh = refresh
        self._eos_token_ids = eos_token_ids
        self._sessions = HeadSessions(
            pool, max_sessions=max_sessions, max_batch_tokens=max_batch_tokens, vocab_size=head.vocab_size
        )
        self._drafts: dict[str, _Draft] = {}
        taps = make_taps(checkpoint)
        fusion_bytes = taps.project.num_bytes if isinstance(taps.project, FeatureFusion) else 0
        self._info = MethodInfo(
            name=config.kind,
            vocab_size=vocab_size,
            max_model_len=min(config.max_model_len or pool.capacity_tokens, pool.capacity_tokens),
            tokenizer_hash=tokenizer_hash,
            vocabulary=vocabulary or {},
            weights_bytes=head.weights_bytes + fusion_bytes + parts.weights_bytes,
            kv_bytes=pool.num_bytes,
            max_sessions=max_sessions,
            taps=taps,
        )

    @property
    def info(self) -> MethodInfo:
        """Facts about the method."""
        return self._info

    @property
    def num_short_starts(self) -> int:
        """How often a session began without the features of its first tokens; such drafts are accepted less."""
        return self._sessions.num_short_starts

    @property
    def stats(self) -> SchedulerStats:
        """How often sessions lost their rows to others, and how many rows they shared."""
        return self._sessions.scheduler.stats

    def open(self, session: str) -> None:
        """Makes room for a session; one that is open already begins again."""
        self._sessions.open(session)
        self._drafts.pop(session, None)

    def kv_len(self, session: str) -> int:
        """Key/value rows that the session holds."""
        opened = self._sessions.get(session)
        return 0 if opened is None else opened.holder.kv.num_rows

    def kv_usage(self) -> KvUsage:
        """Room taken now; may be asked from any thread."""
        return self._runner.pool.usage

    def close(self, session: str) -> None:
        """Frees what the session holds; unknown sessions are closed already."""
        self._sessions.close(session)
        self._drafts.pop(session, None)

    def check_integrity(self) -> None:
        """Checks that the sessions' rows are what is noted of them.

        Raises:
            AssertionError: says what is wrong.
        """
        self._sessions.check_integrity()

    @torch.inference_mode()
    def advance(self, jobs: Sequence[DraftJob]) -> None:
        """Takes one step for all jobs in one pass; see `DraftMethod.advance`."""
        drafts = [draft for job in jobs if not job.done and (draft := self._draft_of(job)) is not None]
        waiting = [draft for draft in drafts if draft.states is None]
        growing = [draft for draft in drafts if draft.evaluated]
        parts = [*self._context_parts(waiting), *self._level_parts(growing, drafts)]
        begun = [draft for draft in drafts if draft.states is not None and not draft.evaluated]
        evaluated = [*begun, *self._run(parts)]
        if evaluated:
            self._grow(evaluated)
        elif not parts:
            for draft in waiting:
                self._finish(draft)  # there is room for none of them

    # --- the steps of a draft -----------------------------------------------------------------------------------------

    def _draft_of(self, job: DraftJob) -> _Draft | None:
        """The job's draft, begun if need be; None where it cannot be served, and it is marked done."""
        draft = self._drafts.get(job.session)
        if draft is None or draft.job is not job:
            draft = self._begin(job)
        elif draft.evaluated:
            return draft
        # Between two chunks of its context a session may have lost its rows.
        if draft is None or not self._sessions.follow(draft.session, job.context, job.features):
            self._drafts.pop(job.session, None)
            job.done = True
            return None
        draft.states = draft.session.last_state
        return draft

    def _begin(self, job: DraftJob) -> _Draft | None:
        job.method = self._info.name
        session = self._sessions.get(job.session)
        num_pairs = len(job.context) - 1
        max_depth = min(job.max_depth, self._info.max_model_len - num_pairs + 1)
        if session is None or num_pairs < 1 or max_depth < 1 or num_pairs > self._info.max_model_len:
            return None
        width = 1 if job.rule is AcceptanceRule.RATIO else self._topk
        growth = Growth(width, max_depth if width == 1 else self._num_nodes, max_depth)
        draft = self._drafts[job.session] = _Draft(job, session, growth, job.sampling_without_chance)
        return draft

    def _context_parts(self, drafts: Sequence[_Draft]) -> list[tuple[_Draft, HeadPart]]:
        """Pairs of contexts for the next pass."""
        parts: list[tuple[_Draft, HeadPart]] = []
        if not drafts:
            return parts
        plan = self._sessions.scheduler.plan([Want(draft.session.holder, draft.session.pairs) for draft in drafts])
        for part in plan.parts:
            draft = drafts[part.index]
            session = draft.session
            start = session.stop_row
            stop = start + len(part.sequence.tokens)
            assert draft.job.features is not None  # noqa: S101 - as `follow` has seen
            parts.append(
                (
                    draft,
                    HeadPart(
                        kv=session.holder.kv,
                        features=draft.job.features.read(start, stop),
                        token_ids=session.tokens[start + 1 : stop + 1],
                        positions=range(start, stop),
                        num_wanted=int(part.complete),
                    ),
                )
            )
        return parts

    def _level_parts(self, drafts: Sequence[_Draft], busy: Sequence[_Draft]) -> list[tuple[_Draft, HeadPart]]:
        """Levels of drafts for the next pass; drafts without room for one end with what they have."""
        parts: list[tuple[_Draft, HeadPart]] = []
        sessions = [draft.session for draft in busy]
        for draft in drafts:
            kept_rows = draft.session.holder.kv.num_rows == draft.num_rows
            if kept_rows and self._sessions.reserve(draft.session, len(draft.growth.frontier), sessions):
                parts.append((draft, draft.part()))
            else:
                self._finish(draft)
        return parts

    def _run(self, parts: Sequence[tuple[_Draft, HeadPart]]) -> list[_Draft]:
        """Runs a pass; the drafts that have new states."""
        if not parts:
            return []
        try:
            outputs = self._runner.forward([part for _, part in parts])
        except Exception as error:
            # Whatever a head raises: the sessions that are not at fault must go on, so each is tried alone.
            if len(parts) > 1:
                return [draft for entry in parts for draft in self._run([entry])]
            draft, part = parts[0]
            _log.warning("draft session %s cannot be fed: %s", draft.job.session, error)
            part.kv.commit(0)
            self._finish(draft)
            return []
        evaluated: list[_Draft] = []
        for (draft, part), states in zip(parts, outputs, strict=True):
            part.kv.commit(len(part.token_ids))
            if draft.evaluated:
                draft.states = states
            else:
                if self._refresh:
                    draft.session.publish()
                if not len(states):
                    continue
                draft.states = draft.session.last_state = states
            evaluated.append(draft)
        return evaluated

    def _grow(self, drafts: Sequence[_Draft]) -> None:
        """Adds a level to each draft, chosen by the states of its frontier."""
        rows: list[DraftRow] = []
        states: list[torch.Tensor] = []
        for draft in drafts:
            draft.evaluated, draft.num_rows = list(draft.growth.frontier), draft.session.holder.kv.num_rows
            if not draft.growth.depth:
                # A context that was fed by an earlier draft may have lost its rows to one that is fed in this pass.
                draft.num_rows = len(draft.job.context) - 1 - draft.session.first_row
            rows += [draft.draft_row(node) for node in draft.evaluated]
            if draft.states is not None:
                states.append(draft.states)
        candidates = iter(
            find_candidates(
                self._head.logits(torch.cat(states)),
                rows,
                num=max(draft.growth.width for draft in drafts),
                vocab_size=self._info.vocab_size,
                eos_token_ids=self._eos_token_ids,
                target_ids=self._head.target_ids,
            )
        )
        for draft in drafts:
            found = [next(candidates) for _ in draft.evaluated]
            if not draft.growth.depth and not found[0]:
                # Rows that give no finite logits may not be finite either: the next draft computes them anew.
                draft.session.holder.kv.discard()
                draft.session.last_state = None
            draft.growth.grow(found)
            if draft.growth.done:
                self._finish(draft)
            elif draft.growth.width == 1:
                self._report(draft)

    def _report(self, draft: _Draft) -> None:
        """Tells the job what has grown so far."""
        job, grown = draft.job, draft.growth.grown()
        job.tokens, job.confidences = grown.tokens, grown.confidences
        job.parents = grown.parents if draft.growth.width > 1 else []

    def _finish(self, draft: _Draft) -> None:
        """Ends a draft with what has grown, and drops its rows."""
        self._report(draft)
        draft.job.done = True
        del self._drafts[draft.job.session]
        session = draft.session
        if self._refresh:
            session.holder.kv.rollback(len(draft.job.context) - 1 - session.first_row)
        else:
            drafted = draft.job.tokens[: max(session.stop_row - len(draft.job.context) + 1, 0)]
            session.restart([*draft.job.context, *drafted], session.first_row, session.stop_row)


def _check_at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigurationError(f"{name} is {value}; it must be at least 1", field=name)
