"""A session's dealings with its drafter. Whatever goes wrong here costs speed and nothing else. Pure.

A drafter is attached, detached and attached again in the middle of a generation; meanwhile the session decodes plainly.
"""

from __future__ import annotations

from paceline.errors import CapacityExceeded, Unavailable, from_failure
from paceline.messages import Drafted, DrafterEvent, Evicted, Failed, NeedTokens
from paceline.token_log import TokenLog
from paceline_gateway.attachment import Attachment, AttachmentState
from paceline_gateway.deadlines import earliest
from paceline_gateway.drafts import Answer, DraftBook
from paceline_gateway.effects import Effect, Fetch, Lane, Replica, Send
from paceline_gateway.evidence import EvidenceCounters
from paceline_gateway.feature_book import FeatureBook
from paceline_gateway.plan import GenerationPlan, Patience

_MAX_REPAIRS = 6
"""Misunderstandings in a row before the drafter is given up for a while."""
_MAX_REFUSED_BLOCKS = 3
"""Blocks in a row that the verifier calls invalid before their drafter is given up for a while."""


class DrafterLane:
    """The drafter's side of one session.

    Attributes:
        attachment: which drafter, if any.
        book: its drafts.
        features: of the target, if it builds on them.
    """

    def __init__(
        self,
        plan: GenerationPlan,
        log: TokenLog,
        patience: Patience,
        evidence: EvidenceCounters,
        effects: list[Effect],
    ) -> None:
        self._plan = plan
        self._log = log
        self._patience = patience
        self._evidence = evidence
        self._effects = effects
        self._repairs = 0
        self._refused_blocks = 0
        self._seek_at: float | None = None
        self._lost_at: float | None = None
        self.attachment = Attachment(Lane.DRAFTER, patience.return_window_s, effects)
        self.book = DraftBook(plan.session, plan.epoch, log, plan.rule)
        self.features = FeatureBook(plan.fetch_features)

    @property
    def live(self) -> bool:
        """Whether drafts can be asked for."""
        return self.attachment.live

    @property
    def distrusted(self) -> bool:
        """Whether the verifier has called the last few blocks invalid, whoever drafted them."""
        return self._refused_blocks >= _MAX_REFUSED_BLOCKS

    @property
    def deadline(self) -> float | None:
        """When `tick` has something to do."""
        oldest = self.book.oldest_sent_at
        silence_ends = oldest + self._patience.drafter_silence_s if oldest is not None and self.live else None
        return earliest(self.attachment.deadline, self._seek_at, silence_ends)

    @property
    def needs_features(self) -> bool:
        """Whether it builds on features of the target; then it drafts after committed tokens only."""
        replica = self.attachment.replica
        return replica is not None and replica.info.features is not None

    @property
    def features_from(self) -> int | None:
        """From which row on features should come with the next verdict; None for not at all.

        As long as no drafter is there, those of the prompt may turn out to be needed.
        """
        base_len = len(self._log)
        if self.live:
            return self.features.wanted_from(base_len) if self.needs_features else None
        if base_len > len(self._plan.prompt):
            return None
        return 0 if self._plan.prompt_features else base_len - 1

    def depth_limit(self) -> int:
        """Most tokens that the drafter can propose after the committed ones and the tail: what its context leaves."""
        replica = self.attachment.replica
        if replica is None or not self.live:
            return 0
        info = replica.info
        left = info.max_model_len - self.book.next_context_len() if info.max_model_len else self._plan.max_tokens
        return min(left, info.max_draft_tokens) if info.max_draft_tokens else left

    # --- what happens to the replica ----------------------------------------------------------------------------------

    def seek(self, now: float) -> None:
        """Asks for a drafter; for another one than the last, if there is one."""
        self._seek_at = None
        self.attachment.seek(now, avoid=self.attachment.address)

    def found(self, replica: Replica, features_bytes: int = 0) -> None:
        """A drafter is there: it is told all committed tokens, unless they have outgrown its context.

        Args:
            replica: the drafter.
            features_bytes: what the verifier holds so that drafters can build on it.
        """
        self.attachment.found(replica)
        if 0 < replica.info.max_model_len <= len(self._log):
            self.end()
            return
        self._evidence.uses_memory(replica.memory_bytes + (features_bytes if self.needs_features else 0))
        self._open()

    def _open(self) -> None:
        self.book.attached()
        replica = self.attachment.replica
        self.features.attached(None if replica is None else replica.info.features)
        self._effects.append(Send(Lane.DRAFTER, self._plan.opening(self._log)))

    def lost(self, now: float, gone: bool = False) -> None:
        """The link is broken; a replica that is gone is not waited for."""
        self._missed_since(now)
        self.attachment.lost(now, gone)
        self.book.dropped()

    def _missed_since(self, at: float) -> None:
        if self._lost_at is None:
            self._lost_at = at

    def back(self) -> None:
        """The link works again."""
        self.attachment.back()

    def tick(self, now: float) -> None:
        """Does what is due."""
        self.attachment.tick(now)
        oldest = self.book.oldest_sent_at
        if self.live and oldest is not None and now >= oldest + self._patience.drafter_silence_s:
            self._give_up(now, silent=True)
        if self._seek_at is not None and now >= self._seek_at:
            self.seek(now)

    def end(self, silent: bool = False) -> None:
        """The session needs no drafter any more, perhaps because it was silent for too long."""
        self._seek_at = None
        self.book.dropped()
        self.attachment.end(silent)

    def _give_up(self, now: float, silent: bool = False) -> None:
        """Leaves this drafter; one is looked for again after a pause."""
        self._missed_since(now)
        self.end(silent)
        self._repairs = 0
        self._seek_at = now + self._patience.drafter_pause_s

    def block_refused(self, now: float) -> None:
        """The verifier calls a block invalid. A drafter that goes on sending such is left alone for a while.

        Each of its blocks costs a round trip. After the pause a single one is enough, until one has been judged.
        """
        self.book.drop_tail()
        self._refused_blocks += 1
        if self.distrusted and self.live:
            self._give_up(now)

    def block_judged(self) -> None:
        """The verifier has judged a block."""
        self._refused_blocks = 0

    # --- commands and events ------------------------------------------------------------------------------------------

    def can_draft(self) -> bool:
        """Whether the drafter has the features that a draft builds on, if any; else they are fetched from now on."""
        if not self.needs_features or self.features.hopeless:
            return True
        lacking = self.features.lacking(len(self._log))
        if lacking is not None and self.features.fetching is None:
            self.features.fetching = lacking
            self._effects.append(Fetch(lacking))
        return lacking is None

    def draft(self, depth: int, now: float) -> None:
        """Asks for up to `depth` tokens after the committed ones and the tail."""
        features, starts_short = None, False
        if self.needs_features:
            starts_short = self.features.lacking(len(self._log)) is not None
            features = self.features.take(len(self._log))
        self._effects.append(Send(Lane.DRAFTER, self.book.request(depth, now, features, starts_short)))

    def handle(self, event: DrafterEvent, now: float) -> Answer | None:
        """Takes in an event; what a draft brought if it is the answer to an open one."""
        if self.attachment.state is not AttachmentState.LIVE:
            return None
        if isinstance(event, Drafted):
            return self._drafted(event, now)
        if isinstance(event, NeedTokens | Evicted | Failed) and event.epoch == self._plan.epoch:
            self._unanswered(event, now)
        return None

    def _drafted(self, event: Drafted, now: float) -> Answer | None:
        if event.epoch != self._plan.epoch:
            return None
        answer = self.book.answered(event, now)
        if answer is not None:
            self._repairs = 0
            self._evidence.drafted(event.timing, now - answer.sent_at)
            if self._lost_at is not None:
                self._evidence.drafter_back(now - self._lost_at)
                self._lost_at = None
            if self.needs_features:
                self.features.drafter_says(event.features_len, answer.base_len)
        return answer

    def _unanswered(self, event: NeedTokens | Evicted | Failed, now: float) -> None:
        """A draft or the Open was refused. The session asks anew when it wants a draft, under a new id."""
        was_open = self.book.unanswered(event.command_id)
        if isinstance(event, Failed):
            error = from_failure(event.failure)
            if event.command_id == 0 or isinstance(error, CapacityExceeded | Unavailable):
                self._give_up(now)
                return
        elif not was_open:
            return
        self._repairs += 1
        if self._repairs > _MAX_REPAIRS:
            self._give_up(now)
        elif isinstance(event, NeedTokens):
            self.book.known_to_drafter(event.have_len)
        elif isinstance(event, Evicted):
            self._open()
