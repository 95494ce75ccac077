"""Verifier and drafter without I/O: the contract of the wire over a law that maps tokens to the next token.

Rounds, epochs, reconcile, replay and supersede are as the real ones have them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.errors import Failure, InvalidArgument
from paceline.messages import (
    Close,
    Draft,
    Drafted,
    DrafterCommand,
    DrafterEvent,
    DraftProbs,
    Evicted,
    Failed,
    NeedTokens,
    Open,
    Opened,
    Timing,
    Verified,
    VerifierCommand,
    VerifierEvent,
    Verify,
)
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree
from paceline.token_log import TokenLog
from tests.unit.gateway.laws import Law, Script


def walk(law: Law, log: TokenLog, block: DraftTree) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The acceptance rule on a law: accepted path and tokens. Ids outside the vocabulary never match."""
    children = block.children()
    path: list[int] = []
    node, context = 0, list(log.tokens)
    while True:
        token = law(context)
        context.append(token)
        child = children[node].get(token)
        if child is None:
            return tuple(path), tuple(context[len(log) :])
        path.append(child)
        node = child


def comes_true(follow_up: Verify, verdict: Verified) -> bool:
    """Whether a verdict is what a follow-up counts on."""
    return follow_up.follows == verdict.round and follow_up.expected == verdict.tokens


@dataclass
class _VerifierSession:
    epoch: int
    log: TokenLog
    last: Verified | None = None
    followed: Verified | None = None


Judge = Callable[[TokenLog, Verify], tuple[tuple[int, ...], tuple[int, ...]]]


"""Accepted path and tokens of a block after the committed tokens."""


def matching(law: Law) -> Judge:
    """The rule `match` on a law."""
    return lambda log, command: walk(law, log, command.block)


@dataclass
class SimVerifier:
    """Answers at once; `events` waits for the test."""

    judge: Judge
    sessions: dict[str, _VerifierSession] = field(default_factory=dict)
    passes: int = 0
    refusals: deque[Failure] = field(default_factory=deque)
    """Given out, one per Verify, instead of a verdict."""
    self_draft: Script | None = None
    """What it proposes with a verdict; None for a verifier that does not draft."""
    methods: tuple[str, ...] = ("own",)
    """Under which names, if it does."""

    def handle(self, command: VerifierCommand | DrafterCommand) -> list[VerifierEvent]:
        match command:
            case Open():
                session = self.sessions.get(command.session)
                if session is None or session.epoch < command.epoch:
                    self.sessions[command.session] = _VerifierSession(command.epoch, TokenLog(command.tokens))
                return [Opened(command.session, command.epoch)]
            case Close():
                self.sessions.pop(command.session, None)
                return []
            case Verify():
                return self._verify(command)
        raise AssertionError(f"a verifier does not know {command}")

    def _verify(self, command: Verify) -> list[VerifierEvent]:
        session = self.sessions.get(command.session)
        if session is None:
            return [Evicted(command.session, command.epoch, command.round)]
        if self.refusals:
            return [Failed(command.session, command.epoch, command.round, self.refusals.popleft())]
        if session.last is not None and command.round <= session.last.round:
            kept = (session.last, session.followed)
            return [verdict for verdict in kept if verdict is not None and verdict.round == command.round]
        if command.follows and (session.last is None or not comes_true(command, session.last)):
            have_len = command.base_len - len(command.expected)
            return [NeedTokens(command.session, command.epoch, command.round, have_len)]
        have = session.log.reconcile(command.base_len, command.prefix_hash, command.catch_up)
        if have is not None:
            return [NeedTokens(command.session, command.epoch, command.round, have)]
        self.passes += 1
        try:
            path, tokens = self.judge(session.log, command)
        except InvalidArgument as error:
            return [Failed(command.session, command.epoch, command.round, error.to_failure())]
        session.log.extend(tokens)
        drafts = self.self_draft is not None and command.next_depth > 0
        session.followed = session.last if command.follows else None
        session.last = Verified(
            command.session,
            command.epoch,
            command.round,
            command.base_len,
            path,
            tokens,
            kv_len=len(session.log) - 1,
            timing=Timing(queue_us=100, forward_us=1000, total_us=1200, draft_us=200 if drafts else 0),
            next_block=self.self_draft(session.log.tokens, command.next_depth)
            if self.self_draft and drafts
            else EMPTY_BLOCK,
            next_method=self.methods[0] if drafts else "",
        )
        return [session.last]


@dataclass
class SimDrafter:
    """Drafts by a script. Answers at once; a superseded draft cannot be seen here, only a stale one."""

    script: Script
    draft_probs: Callable[[Sequence[int], DraftTree], tuple[DraftProbs, ...]] = lambda context, block: ()
    """What the tokens of a block after a context were drawn from."""
    sessions: dict[str, TokenLog] = field(default_factory=dict)
    drafts: list[Draft] = field(default_factory=list)
    refuse: Failure | None = None

    def handle(self, command: VerifierCommand | DrafterCommand) -> list[DrafterEvent]:
        match command:
            case Open():
                self.sessions[command.session] = TokenLog(command.tokens)
                return [Opened(command.session, command.epoch)]
            case Close():
                self.sessions.pop(command.session, None)
                return []
            case Draft():
                return [self._draft(command)]
        raise AssertionError(f"a drafter does not know {command}")

    def _draft(self, command: Draft) -> DrafterEvent:
        self.drafts.append(command)
        log = self.sessions.get(command.session)
        if log is None:
            return Evicted(command.session, command.epoch, command.draft_id)
        if self.refuse is not None:
            return Failed(command.session, command.epoch, command.draft_id, self.refuse)
        have = log.reconcile(command.base_len, command.prefix_hash, command.catch_up)
        if have is not None:
            return NeedTokens(command.session, command.epoch, command.draft_id, have)
        context = [*log.tokens, *command.assumed]
        block = self.script(context, command.max_depth)
        return Drafted(
            command.session,
            command.epoch,
            command.draft_id,
            block,
            kv_len=len(log) - 1,
            method="sim",
            draft_probs=self.draft_probs(context, block),
        )
