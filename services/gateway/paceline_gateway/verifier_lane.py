"""A session's dealings with its verifier: one verdict after another, whatever happens to the replica. Pure.

At most one `Verify` is outstanding. It is said again, word for word, after a broken link or an eviction; the replica
answers a round that it has answered before from memory. After a move it is another round. Rounds count within the
session's epoch.

A follow-up may have been sent besides: the block after the outstanding one, for the verdict that is hoped for. If that
comes, the follow-up is outstanding from then on, and runs already. After a broken link it is said again with the round
that it follows, and whenever something else happens it is forgotten.

A replica that owes an answer for too long, frozen or cut off without a word, is left for another one. If there is no
other, the session opens again on the same one, each time after a longer wait.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.errors import (
    Cancelled,
    CapacityExceeded,
    Fenced,
    InvalidArgument,
    PacelineError,
    Unavailable,
    from_failure,
)
from paceline.messages import Evicted, Failed, FeatureFormat, NeedTokens, Opened, Verified, VerifierEvent, Verify
from paceline.token_log import TokenLog, extend_hash
from paceline_gateway.attachment import Attachment
from paceline_gateway.deadlines import earliest
from paceline_gateway.effects import Effect, Lane, Replica, Send
from paceline_gateway.plan import GenerationPlan, Patience
from paceline_gateway.tail import Tail
from paceline_gateway.verdict import BlockRefused, Verdict, check_verdict

_EWMA_WEIGHT = 0.3
_MAX_REPAIRS = 6
"""Misunderstandings in a row about one round before the session gives up."""
_MAX_SILENCE_DOUBLINGS = 10


class VerifierLane:
    """The verifier's side of one session.

    Raises from `handle` and `tick` the error that ends the generation.
    """

    def __init__(self, plan: GenerationPlan, log: TokenLog, patience: Patience, effects: list[Effect]) -> None:
        self._plan = plan
        self._log = log
        self._patience = patience
        self._effects = effects
        self._round = 0
        self._sent_at = 0.0
        self._repairs = 0
        self._refusals = 0
        self._retry_at: float | None = None
        self._move = False
        self._reopen = False
        self._opened = False
        self._reading = True
        self._typical_is_reading = True
        self._silences = 0
        self._lost_at: float | None = None
        self.attachment = Attachment(Lane.VERIFIER, patience.return_window_s, effects)
        self.outstanding: Verify | None = None
        self.follow_up: Verify | None = None
        self._followed_round = 0
        self.kv_len = 0
        self.weights_digest = "" if plan.resumption is None else plan.resumption.weights_digest
        """Of the weights that gave the tokens so far; empty as long as there are none."""
        self.typical_s: float | None = None
        """Running mean of a round trip; of one that reads all tokens only until there was another kind."""

    @property
    def idle(self) -> bool:
        """Whether a block can be sent now."""
        return self.attachment.live and self.outstanding is None

    @property
    def max_draft_tokens(self) -> int:
        """Most nodes that the verifier judges in one block; 0 without a verifier."""
        replica = self.attachment.replica
        return replica.info.max_draft_tokens if replica else 0

    @property
    def drafts_itself(self) -> bool:
        """Whether the verifier drafts by itself, and by the method that is asked for if one is."""
        replica = self.attachment.replica
        return replica is not None and replica.drafts_by(self._plan.method)

    @property
    def drafting_bytes(self) -> int:
        """Memory that it spends on drafting: its own, or the features that it serves."""
        replica = self.attachment.replica
        return replica.info.drafting_bytes if replica else 0

    @property
    def gather_window_s(self) -> float:
        """Longest wait of its passes for sessions that will soon be back."""
        replica = self.attachment.replica
        return replica.info.gather_window_us / 1e6 if replica else 0.0

    @property
    def features(self) -> FeatureFormat | None:
        """The features that it serves; None for none."""
        replica = self.attachment.replica
        return replica.info.features if replica else None

    @property
    def deadline(self) -> float | None:
        """When `tick` has something to do."""
        since = self.attachment.without_since
        no_verifier_ends = None if since is None else since + self._patience_s()
        return earliest(self.attachment.deadline, self._retry_at, no_verifier_ends, self._silence_ends)

    def _patience_s(self) -> float:
        return self._patience.verifier_s if self._round else self._patience.first_verifier_s

    @property
    def _silence_ends(self) -> float | None:
        """When the replica has owed its answer for too long; None while it owes none."""
        if self.outstanding is None or not self.attachment.live or self._retry_at is not None:
            return None
        patience = self._patience
        factor = 1.0 if self._typical_is_reading else patience.silence_factor
        bound_s = max(patience.verifier_silence_s, factor * (self.typical_s or 0.0))
        if self._reading and self._opened:
            bound_s = max(bound_s, patience.prompt_silence_s)
        # Opening again throws away what the replica has read: one that is only slow must not be asked for ever.
        doublings = min(max(0, self._silences - 1), _MAX_SILENCE_DOUBLINGS)
        return self._sent_at + bound_s * float(1 << doublings)

    # --- what happens to the replica ----------------------------------------------------------------------------------

    def found(self, replica: Replica, now: float) -> None:
        """A replica is there: the session moves in with all its tokens, and what is outstanding is asked anew.

        Under another number: should it be the replica that was left, an answer from the earlier stay would pass for one
        of this stay, in which the round still runs.
        """
        self.attachment.found(replica)
        if self.outstanding is not None:
            self._round += 1
            self.outstanding = replace(self.outstanding, round=self._round)
        self._open_and_repeat(now)

    def lost(self, now: float, gone: bool = False) -> None:
        """The link is broken; a replica that is gone is not waited for."""
        self._missed_since(now)
        self.attachment.lost(now, gone)
        self._retry_at = None

    def _missed_since(self, at: float) -> None:
        if self._lost_at is None:
            self._lost_at = at

    def back(self, now: float) -> None:
        """The link works again."""
        if self.attachment.back():
            follow_up = self.follow_up
            self._repeat(now)
            if follow_up is not None:
                self._say_follow_up(follow_up)

    def tick(self, now: float) -> None:
        """Does what is due.

        Raises:
            Unavailable: no verifier for too long.
        """
        self.attachment.tick(now)
        since = self.attachment.without_since
        if since is not None and now >= since + self._patience_s():
            waited_s = now - since
            weights = f" with the session's weights (digest {self.weights_digest})" if self.weights_digest else ""
            raise Unavailable(
                f"no verifier of model {self._plan.model!r}{weights} for {waited_s:.1f} s; try again later"
            )
        if self._silence_ends is not None and now >= self._silence_ends:
            self._silences += 1
            self._missed_since(self._sent_at)
            self.attachment.seek(now, avoid=self.attachment.address, silent=True)
        if self._retry_at is not None and now >= self._retry_at and self.attachment.live:
            self._retry_at = None
            if self._move:
                self.attachment.seek(now, avoid=self.attachment.address)
            elif self._reopen:
                self._open_and_repeat(now)
            else:
                self._repeat(now)

    def end(self) -> None:
        """The session needs no verifier any more."""
        self.outstanding = self.follow_up = None
        self._retry_at = None
        self.attachment.without_since = None
        self.attachment.end()

    # --- commands -------------------------------------------------------------------------------------------------

    def verify(self, block: Tail, now: float, next_depth: int = 0, features_from: int | None = None) -> None:
        """Sends the next block; only while `idle`.

        Args:
            block: what to judge.
            now: the time.
            next_depth: most depth of the block that the verifier is to propose for the round after; 0 for none.
            features_from: from which row on it is to send features; None for none.
        """
        self._round += 1
        base_len = len(self._log)
        self.outstanding = Verify(
            session=self._plan.session,
            epoch=self._plan.epoch,
            round=self._round,
            base_len=base_len,
            prefix_hash=self._log.hash_at(base_len),
            block=block.tree,
            draft_probs=block.draft_probs,
            next_depth=next_depth,
            features_from=features_from,
        )
        self._repeat(now)

    @property
    def can_follow_up(self) -> bool:
        """Whether the block after the outstanding one may be sent; once for each."""
        command = self.outstanding
        if command is None or self._retry_at is not None or self._reading:
            return False
        return command.round > self._followed_round and self.attachment.live

    def send_follow_up(self, block: Tail, expected: tuple[int, ...]) -> None:
        """Sends the block after the outstanding one; only while `can_follow_up`.

        Args:
            block: what to judge next.
            expected: the tokens of the verdict on which it counts.
        """
        if self.outstanding is None:
            return
        self._followed_round = self.outstanding.round
        self._round += 1
        base_len = len(self._log)
        self._say_follow_up(
            Verify(
                session=self._plan.session,
                epoch=self._plan.epoch,
                round=self._round,
                base_len=base_len + len(expected),
                prefix_hash=extend_hash(self._log.hash_at(base_len), expected),
                block=block.tree,
                draft_probs=block.draft_probs,
                follows=self.outstanding.round,
                expected=expected,
            )
        )

    def _say_follow_up(self, command: Verify) -> None:
        self.follow_up = command
        self._effects.append(Send(Lane.VERIFIER, command))

    def _repeat(self, now: float, catch_up: tuple[int, ...] = ()) -> None:
        self.follow_up = None
        if self.outstanding is None:
            return
        self._sent_at = now
        command = replace(self.outstanding, catch_up=catch_up) if catch_up else self.outstanding
        self._effects.append(Send(Lane.VERIFIER, command))

    def _open_and_repeat(self, now: float) -> None:
        self._reopen = self._opened = False
        self._reading = True
        self._effects.append(Send(Lane.VERIFIER, self._plan.opening(self._log)))
        self._repeat(now)

    # --- events ---------------------------------------------------------------------------------------------------

    def handle(self, event: VerifierEvent, now: float) -> Verdict | BlockRefused | None:
        """Takes in an event; what became of the block, if it says."""
        if isinstance(event, Verified):
            return self._verdict(event, now)
        if isinstance(event, Opened):
            if event.epoch == self._plan.epoch:
                self._opened = True
                self.kv_len = event.kv_len
        elif isinstance(event, Failed | NeedTokens | Evicted):
            follow_up = self.follow_up
            if follow_up is not None and (event.epoch, event.command_id) == (follow_up.epoch, follow_up.round):
                self.follow_up = None
            elif isinstance(event, Failed):
                return self._failed(event, now)
            else:
                self._misunderstood(event, now)
        return None

    def _verdict(self, event: Verified, now: float) -> Verdict | None:
        command = self.outstanding
        if command is None or (event.epoch, event.round) != (command.epoch, command.round):
            return None  # late, or twice
        check_verdict(event, command)
        self.outstanding, follow_up, self.follow_up = None, self.follow_up, None
        self._repairs = self._refusals = self._silences = 0
        self._retry_at = None
        self._move = False
        self.kv_len = event.kv_len
        took, reading = now - self._sent_at, self._reading
        if self.attachment.replica is not None:
            self.weights_digest = self.attachment.replica.info.weights_digest or self.weights_digest
        gap_s, self._lost_at = None if self._lost_at is None else now - self._lost_at, None
        self._learn_typical(took)
        next_block = Tail.drafted(event.next_block, (), self._plan.rule).top(command.next_depth)
        followed = follow_up is not None and follow_up.expected == event.tokens
        if follow_up is not None and followed:
            # Should it have to be said again, it is a round like any other.
            self.outstanding = replace(follow_up, follows=0, expected=())
            self._sent_at = now
        return Verdict(command.block, event, took, next_block, command.next_depth, reading, gap_s, followed)

    def _learn_typical(self, took: float) -> None:
        """A round that reads all tokens tells little of the next one, and counts only until another kind was seen."""
        if self.typical_s is None or self._typical_is_reading:
            self.typical_s = took
            self._typical_is_reading = self._reading
        elif not self._reading:
            self.typical_s += _EWMA_WEIGHT * (took - self.typical_s)
        self._reading = False

    def _misunderstood(self, event: NeedTokens | Evicted | Failed, now: float) -> None:
        command = self.outstanding
        if command is None or (event.epoch, event.command_id) != (command.epoch, command.round):
            return
        if self._retry_at is not None:
            return  # the Open before it was refused and will be said again
        self._repairs += 1
        if self._repairs > _MAX_REPAIRS:
            raise PacelineError(
                f"verifier {self.attachment.address} answered round {command.round} of session {command.session} "
                f"{self._repairs} times with {type(event).__name__}; its log says why"
            )
        if isinstance(event, NeedTokens):
            self._reading = True
            self._repeat(now, self._log.slice(min(event.have_len, command.base_len), command.base_len))
        else:
            self._open_and_repeat(now)

    def _failed(self, event: Failed, now: float) -> BlockRefused | None:
        command = self.outstanding
        of_open = event.command_id == 0
        if event.epoch != self._plan.epoch or not (of_open or (command and event.command_id == command.round)):
            return None
        error = from_failure(event.failure)
        if isinstance(error, CapacityExceeded | Unavailable):
            self._refused_for_now(error, of_open, now)
        elif isinstance(error, InvalidArgument) and command and command.block.tokens and not of_open:
            self.outstanding = None
            return BlockRefused()
        elif isinstance(error, Cancelled) and not of_open:
            # The session was closed there, its round with it; it has not ended here, so this is no more than Evicted.
            self._misunderstood(event, now)
        elif isinstance(error, Fenced):
            raise Fenced(f"another gateway has taken over session {self._plan.session}")
        else:
            raise error
        return None

    def _refused_for_now(self, error: CapacityExceeded | Unavailable, of_open: bool, now: float) -> None:
        """A full verifier may have room soon; one that shuts down is left for another."""
        self._refusals += 1
        patience = self._patience
        if self._refusals > patience.refusal_retries:
            raise error
        self._reopen = self._reopen or of_open
        self._move = isinstance(error, Unavailable) or self._refusals > patience.refusal_retries // 2
        if isinstance(error, Unavailable) and self._refusals == 1:
            self.attachment.seek(now, avoid=self.attachment.address)
        else:
            self._retry_at = now + patience.refusal_pause_s * 2 ** (self._refusals - 1)
