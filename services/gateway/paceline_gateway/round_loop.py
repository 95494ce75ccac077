"""All decisions of one generation: what to verify, what to draft, when it ends. Pure: events in, effects out.

One round:

    verify     the block goes to the verifier; an empty one is a plain decoding step
    ahead      meanwhile the drafter drafts on, assuming that the whole block is accepted
    verdict    its tokens are committed one by one until one of them ends the generation
    next       what was drafted ahead and agrees is the next block at once. If a draft that may still agree is on its
               way, it is waited for; else a new one is asked for. Neither is waited for longer than a bound.

A verifier that drafts by itself needs no drafter: the next block rides on the verdict, and nothing is drafted ahead.

The actor calls one method per thing that happens, then takes the effects. A method never raises a `PacelineError`: an
error that ends the generation becomes `Fail`.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import PacelineError
from paceline.generation import Evidence, token_origins
from paceline.messages import DrafterEvent, FeatureFormat, VerifierEvent
from paceline.speculation.room import Room
from paceline.speculation.tree import DraftTree
from paceline.text.commit import Committer
from paceline.token_log import TokenLog
from paceline_gateway.deadlines import earliest
from paceline_gateway.drafter_lane import DrafterLane
from paceline_gateway.effects import Commit, Effect, Fail, Finish, Lane, Measured, Replica
from paceline_gateway.evidence import EvidenceCounters
from paceline_gateway.plan import GenerationPlan, Patience
from paceline_gateway.round_record import Fallback
from paceline_gateway.session_governor import FleetTimes, SessionGovernor
from paceline_gateway.tail import EMPTY_TAIL, Tail
from paceline_gateway.verdict import BlockRefused, Verdict
from paceline_gateway.verifier_lane import VerifierLane


class RoundLoop:
    """One generation.

    Attributes:
        log: committed tokens, prompt included.
        evidence: counters.
        verifier: the verifier's side.
        drafter: the drafter's side.
        over: the generation has ended, well or not.
    """

    def __init__(
        self,
        plan: GenerationPlan,
        committer: Committer,
        patience: Patience,
        now: float,
        times: FleetTimes | None = None,
    ) -> None:
        self._plan = plan
        self._committer = committer
        self._patience = patience
        self._effects: list[Effect] = []
        self._held = False
        self._wait_started: float | None = None
        self._wait_until = 0.0
        self._drafter_late = False
        self._tail_was_ready = False
        self._fallback: Fallback | None = None
        self._wants_drafter = False
        self._served: FeatureFormat | None = None
        self.over = False
        self.log = TokenLog(plan.committed)
        self.evidence = EvidenceCounters(now)
        self.verifier = VerifierLane(plan, self.log, patience, self._effects)
        self.drafter = DrafterLane(plan, self.log, patience, self.evidence, self._effects)
        self._governor = SessionGovernor(plan, FleetTimes() if times is None else times)

    def take_effects(self) -> list[Effect]:
        """What is to be done, in order; each effect is given once."""
        effects = self._effects[:]
        self._effects.clear()
        return effects

    @property
    def deadline(self) -> float | None:
        """When `tick` has something to do."""
        if self.over:
            return None
        wait_ends = self._wait_until if self._wait_started is not None else None
        return earliest(self.verifier.deadline, self.drafter.deadline, wait_ends)

    def report(self, now: float) -> Evidence:
        """The evidence so far."""
        self.evidence.wasted_draft_tokens = self.drafter.book.num_wasted_tokens
        return self.evidence.report(now, self.verifier.attachment.address, self.drafter.attachment.address)

    def learn(self) -> None:
        """Takes in what past rounds teach; to be called when what they decided has been sent."""
        self._governor.learn()

    # --- what happens -------------------------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Looks for a verifier."""
        self._do(lambda: self.verifier.attachment.seek(now), now)

    def found(self, lane: Lane, replica: Replica, now: float) -> None:
        """The pool has a replica, or the one that was lost is back as a new process."""

        def step() -> None:
            if lane is Lane.VERIFIER:
                self.verifier.found(replica, now)
                self._choose_drafter(replica, now)
            else:
                self._drafter_late = False
                self.drafter.found(replica, self.verifier.drafting_bytes)
            drafter = "" if self.verifier.drafts_itself else self.drafter.attachment.address
            self._governor.served_by(self.verifier.attachment.address, drafter, self.verifier.gather_window_s)

        self._do(step, now)

    def _choose_drafter(self, verifier: Replica, now: float) -> None:
        """Drafts come from the verifier if it makes them itself, else from the pool."""
        wanted = self._plan.num_draft_tokens > 0 and not self.verifier.drafts_itself
        served, self._served = self._served, verifier.info.features
        self.drafter.features.verifier_moved(same_features=served == self._served)
        if wanted and (not self._wants_drafter or served != self._served):
            self.drafter.seek(now)  # which drafters are of use depends on the features that the verifier serves
        elif not wanted:
            self.drafter.end()
        self._wants_drafter = wanted
        if self._plan.num_draft_tokens > 0 and self.verifier.drafts_itself:
            self.evidence.uses_memory(self.verifier.drafting_bytes)

    def lost(self, lane: Lane, now: float, gone: bool = False) -> None:
        """A replica's link is broken; one that is gone will not come back."""
        if lane is Lane.VERIFIER:
            self._do(lambda: self.verifier.lost(now, gone), now)
        else:
            self._do(lambda: self.drafter.lost(now, gone), now)

    def back(self, lane: Lane, now: float) -> None:
        """The link to a replica works again, and it still knows the session; one that was restarted is `found`."""
        if lane is Lane.VERIFIER:
            self._do(lambda: self.verifier.back(now), now)
        else:
            self._do(self.drafter.back, now)

    def on_verifier(self, event: VerifierEvent, now: float) -> None:
        """The verifier says something."""

        def step() -> None:
            outcome = self.verifier.handle(event, now)
            if isinstance(outcome, Verdict):
                self._commit(outcome, now)
            elif isinstance(outcome, BlockRefused):
                self.drafter.block_refused(now)
                self._verify(self._plain(Fallback.BLOCK_REFUSED), now)

        self._do(step, now)

    def on_drafter(self, event: DrafterEvent, now: float) -> None:
        """The drafter says something."""

        def step() -> None:
            answer = self.drafter.handle(event, now)
            if answer is not None:
                self._governor.drafted(answer)
                self._drafter_late = False
                # A draft that turned out stale may be followed by a new one, which has a wait of its own.
                self._end_wait(now)

        self._do(step, now)

    def fetched(self, succeeded: bool, now: float) -> None:
        """Features that were to be brought to the drafter are there, or could not be brought."""
        self._do(lambda: self.drafter.features.fetched(succeeded), now)

    def hold(self, held: bool, now: float) -> None:
        """While held no round is started: the client does not read."""
        self._held = held
        self._do(lambda: None, now)

    def tick(self, now: float) -> None:
        """Does what is due at `deadline`."""

        def step() -> None:
            self.verifier.tick(now)
            self.drafter.tick(now)

        self._do(step, now)

    def fail(self, error: PacelineError, now: float) -> None:
        """Ends the generation from outside: cancelled, out of time, fenced."""

        def step() -> None:
            raise error

        self._do(step, now)

    def _do(self, step: Callable[[], None], now: float) -> None:
        if self.over:
            return
        try:
            step()
            self._advance(now)
        except PacelineError as error:
            self._end(now)
            self._effects.append(Fail(error))

    def _end(self, now: float) -> None:
        self.over = True
        self._end_wait(now)
        self.verifier.end()
        self.drafter.end()
        self._governor.ended()
        self._measure(now)

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _commit(self, verdict: Verdict, now: float) -> None:
        event, block = verdict.event, verdict.block
        committed = self._committer.commit_round(event.tokens)
        count, tokens = committed.num_tokens, committed.token_ids
        from_len = len(self.log)
        self.log.extend(tokens)
        if self._plan.resumption is not None:
            self._plan.resumption.check(self.log.tokens, from_len, ended=committed.finish is not None)
        book = self.drafter.book
        self._tell_governor(verdict, now)
        self.evidence.judged(block, len(event.accepted_path), count, book.method)
        self.evidence.verified(event.timing, verdict.round_trip_s)
        if verdict.gap_s is not None:
            self.evidence.verifier_back(verdict.gap_s)
        book.committed(tokens, block)
        if block.tokens:
            self.drafter.block_judged()
        self._tail_was_ready = bool(book.tail.tokens)
        if committed.finish is None:
            book.proposed(verdict.next_block, event.next_method)
            self.drafter.features.verified(event.features, len(self.log) - 1)
        self._effects.append(
            Commit(
                from_len=from_len,
                tokens=tokens,
                origins=token_origins(block, event.accepted_path)[:count],
                logprobs=event.logprobs[:count],
                texts=tuple([token.text for token in committed.tokens]),
            )
        )
        self._measure(now)
        if verdict.followed and committed.finish is None:
            self.evidence.ahead_hits += 1
            self._tail_was_ready = False
        if committed.finish is not None:
            self._end(now)
            self._effects.append(Finish(committed.finish, committed.stop_string or ""))

    def _tell_governor(self, verdict: Verdict, now: float) -> None:
        nobody_to_ask = self._fallback in (
            Fallback.NO_DRAFTER,
            Fallback.DRAFTER_LOST,
            Fallback.FEATURES_LACKING,
            Fallback.CONTEXT_FULL,
        )
        decision = self._governor.judged(verdict, not nobody_to_ask, now)
        if self._plan.governed:
            self.evidence.governed(decision, self._governor.take_changes())

    def _measure(self, now: float) -> None:
        """Tells what the round, or what is left of one at the end, cost and brought."""
        self.evidence.wasted_draft_tokens = self.drafter.book.num_wasted_tokens
        record = self.evidence.end_round(now, self._fallback, len(self._plan.prompt))
        self._fallback = None
        if not record.empty:
            self._effects.append(Measured(record))

    def _advance(self, now: float) -> None:
        """Drafts on while a round runs; starts the next one if none runs and there is nothing to wait for."""
        if self.over:
            return
        if self.verifier.outstanding is not None:
            self._follow_up(self.verifier.outstanding.block)
            self._draft_ahead(self.verifier.outstanding.block, now)
            return
        if self._held or not self.verifier.idle:
            self._end_wait(now)
            self._governor.interrupted()
            return
        block = self._next_block(now)
        if block is None:
            return
        self._end_wait(now)
        if block.tokens and self._tail_was_ready:
            self.evidence.ahead_hits += 1
        self._tail_was_ready = False
        if self.evidence.first_round_at is None:
            self.evidence.first_round_at = now
        self._verify(block, now)
        self._draft_ahead(block.tree, now)

    def _follow_up(self, block: DraftTree) -> None:
        """Sends the block after the one that is judged, if it is known: the verifier goes on with it at once."""
        if not (block.tokens and self.verifier.can_follow_up and self._may_draft_ahead) or self._held:
            return
        tail = self.drafter.book.tail
        expected = tail.main_path[: block.max_depth + 1]
        limit = min(self._block_limit(), self._committer.remaining_tokens - len(expected) - 1)
        rest = tail.below(expected)
        if limit <= 0 or rest is None or expected[:-1] != block.tokens:
            return
        decision = self._governor.decide_next(self._room(limit))
        depth = min(limit, decision.max_depth)
        if 0 < depth <= rest.tree.max_depth:
            most = min(decision.num_draft_tokens, self.verifier.max_draft_tokens)
            self._governor.sends_follow_up(branched=not rest.tree.is_chain)
            self.verifier.send_follow_up(rest.top(depth, most), expected)

    def _verify(self, block: Tail, now: float) -> None:
        serves = self._wants_drafter and self.verifier.features is not None
        self.verifier.verify(block, now, self._next_depth(), self.drafter.features_from if serves else None)

    def _room(self, max_depth: int) -> Room:
        """What the governor may choose from."""
        drafter = self.drafter.attachment.replica
        if drafter is not None and drafter.info.max_draft_tokens and not self.verifier.drafts_itself:
            max_depth = min(max_depth, drafter.info.max_draft_tokens)
        return Room(
            max_depth=max_depth,
            max_draft_tokens=self.verifier.max_draft_tokens,
            may_draft_ahead=self._may_draft_ahead,
            drafts_itself=self.verifier.drafts_itself,
        )

    @property
    def _may_draft_ahead(self) -> bool:
        """Not where drafts build on features of the target: there are none of tokens that it has not judged."""
        return self._plan.draft_ahead and self.drafter.live and not self.drafter.needs_features

    def _block_limit(self) -> int:
        return min(self._plan.num_draft_tokens, self.verifier.max_draft_tokens)

    def _depth_limit(self) -> int:
        return min(self._block_limit(), self._committer.remaining_tokens - 1)

    def _next_depth(self) -> int:
        """How deep a block the verifier is to propose with its verdict, which brings one token at least."""
        if not self.verifier.drafts_itself or self.drafter.distrusted:
            return 0
        room = self._room(max(min(self._block_limit(), self._committer.remaining_tokens - 2), 0))
        return self._governor.decide_next(room).max_depth

    def _next_block(self, now: float) -> Tail | None:
        """The block to verify now; None while a draft is worth waiting for.

        A block ends where lengths say, never because of what is in it: `ratio` would be biased otherwise.
        """
        limit = self._depth_limit()
        book = self.drafter.book
        self._fallback = None
        if limit <= 0:
            return EMPTY_TAIL
        if len(self.log) == len(self._plan.prompt) and not book.tail.tokens:
            return EMPTY_TAIL  # reading the prompt need not wait for anybody
        if not (book.tail.tokens or self.verifier.drafts_itself or self.drafter.live):
            return self._plain(self._why_no_drafter())
        decision = self._governor.decide(self._room(limit))
        limit = min(limit, decision.max_depth)
        if limit <= 0:
            return EMPTY_TAIL
        if book.tail.tokens:
            self._governor.sends(branched=not book.tail.tree.is_chain)
            return book.tail.top(limit, min(decision.num_draft_tokens, self.verifier.max_draft_tokens))
        if self.verifier.drafts_itself:
            return self._plain(Fallback.NOTHING_PROPOSED)
        depth = min(limit, self.drafter.depth_limit())
        if depth > 0 and book.worth_asking() and self.drafter.can_draft():
            self.drafter.draft(depth, now)
        if self._drafter_late:
            return self._plain(Fallback.LATE_DRAFT)
        if not book.promising:
            return self._plain(self._why_no_draft(depth))
        if self._wait_started is None:
            self._wait_started = now
            self._wait_until = now + self._draft_patience_s()
        if now >= self._wait_until:
            self._drafter_late = True
            return self._plain(Fallback.LATE_DRAFT)
        return None

    def _plain(self, cause: Fallback) -> Tail:
        self._fallback = cause
        return EMPTY_TAIL

    def _why_no_drafter(self) -> Fallback:
        replica = self.drafter.attachment.replica
        if replica is None:
            return Fallback.NO_DRAFTER
        outgrown = 0 < replica.info.max_model_len <= len(self.log)
        return Fallback.CONTEXT_FULL if outgrown else Fallback.DRAFTER_LOST

    def _why_no_draft(self, depth: int) -> Fallback:
        """Why no draft that may help is on its way although a drafter is there."""
        if depth <= 0:
            return Fallback.CONTEXT_FULL
        if self.drafter.needs_features and self.drafter.features.fetching is not None:
            return Fallback.FEATURES_LACKING
        return Fallback.LATE_DRAFT if self.drafter.book.num_open else Fallback.NOTHING_PROPOSED

    def _draft_patience_s(self) -> float:
        """How long a draft is worth waiting for: what it saves is the verifier's time."""
        patience = self._patience
        usual_draft = patience.draft_factor * (self.drafter.book.typical_s or 0.0)
        usual_round = patience.round_factor * (self.verifier.typical_s or 0.0)
        return min(max(patience.draft_floor_s, usual_draft, usual_round), patience.draft_ceiling_s)

    def _end_wait(self, now: float) -> None:
        if self._wait_started is not None:
            self.evidence.waited(now - self._wait_started)
            self._governor.waited(now - self._wait_started)
            self._wait_started = None

    def _draft_ahead(self, block: DraftTree, now: float) -> None:
        """Asks for the block after the one that is being verified, with a guess of the token between them.

        Where that is not wanted the guess alone is asked for while the verifier reads the prompt: the drafter has to
        read it too.
        """
        if not self.drafter.live or self.drafter.needs_features:
            return
        decision = self._governor.decide(self._room(self._depth_limit()))
        next_depth = min(decision.ahead_depth, self._block_limit())
        reads_prompt = len(self.log) == len(self._plan.prompt)
        if next_depth <= 0 and not (reads_prompt and decision.max_depth > 0):
            return
        book = self.drafter.book
        known = len(book.tail.main_path)
        wanted = min(block.max_depth + 1 + next_depth, self._committer.remaining_tokens - 1)
        depth = min(wanted - known, self.drafter.depth_limit())
        brings_more = known + depth >= block.max_depth + 1 + min(next_depth, 1)
        if brings_more and depth > 0 and book.worth_asking():
            self.drafter.draft(depth, now)
