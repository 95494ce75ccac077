"""Random storms of commands on the target engine: every session gets the tokens of its own plain decoding.

The pool holds two long sessions, so that they take rows from one another; many prompts begin alike. The engine drafts
by itself too, badly, with a drafter that checks that every row of features belongs to its token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.engine.features import FeatureTaps
from paceline.engine.local import LocalRequest, generate
from paceline.engine.self_draft import SelfDraft, SelfDraftJob
from paceline.engine.target import TargetEngine, TargetOptions
from paceline.errors import CapacityExceeded
from paceline.messages import NeedTokens, SamplingParams, Verified, Verify
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree
from tests.fakes.toy_runner import ToyRunner, hash_law
from tests.unit.engine.rounds import Owner

LAW = hash_law(12, seed=6)
NUM_TOKENS = 24
PREFIX = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8)
NUM_PAGES, PAGE_TOKENS = 18, 3


class CheckingDrafter:
    """Drafts nonsense for sessions whose features are those of their tokens; otherwise it fails, which is counted."""

    method = "checking"
    taps = FeatureTaps()
    weights_bytes = kv_bytes = 0

    def __init__(self) -> None:
        self.known: set[str] = set()

    def draft(self, jobs: Sequence[SelfDraftJob]) -> list[SelfDraft]:
        for job in jobs:
            assert job.features is not None
            rows = job.features.read(0, len(job.tokens) - 1).tolist()
            assert rows == [[token, position] for position, token in enumerate(job.tokens[:-1])]
            self.known.add(job.session)
        return [SelfDraft(DraftTree.chain(job.tokens[-job.max_depth :])) for job in jobs]

    def forget(self, session: str) -> None:
        self.known.discard(session)


class Session(Owner):
    """An owner that knows what plain decoding gives it, and asks for blocks that it does not use."""

    def __init__(self, engine: TargetEngine, prompt: tuple[int, ...], sampling: SamplingParams, name: str) -> None:
        super().__init__(engine, prompt, sampling, name)
        solo = TargetEngine(ToyRunner(LAW, 12))
        self.prompt_len = len(prompt)
        self.truth = [*prompt, *generate(solo, [LocalRequest(prompt, sampling, NUM_TOKENS)])[0].tokens]
        self.waiting = False

    def command(self, block: DraftTree = EMPTY_BLOCK, catch_up: int = 0) -> Verify:
        return replace(super().command(block, catch_up), next_depth=2)

    @property
    def done(self) -> bool:
        return len(self.log) >= self.prompt_len + NUM_TOKENS


class TargetMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.drafter = CheckingDrafter()
        self.engine = TargetEngine(
            ToyRunner(LAW, 12, page_tokens=PAGE_TOKENS, num_pages=NUM_PAGES, max_model_len=NUM_PAGES * PAGE_TOKENS),
            options=TargetOptions(max_sessions=5, max_batch_tokens=14, max_draft_tokens=5),
            clock=lambda: self.now_s,
            self_drafter=self.drafter,
        )
        self.sessions: dict[str, Session] = {}
        self.num_opened = 0

    def idle(self) -> list[str]:
        return [name for name, session in self.sessions.items() if not session.waiting and not session.done]

    @precondition(lambda self: len(self.sessions) < 5)
    @rule(
        num_common=st.integers(0, len(PREFIX)),
        own=st.lists(st.integers(0, 11), min_size=1, max_size=10),
        temperature=st.sampled_from([0.0, 0.8]),
    )
    def open(self, num_common: int, own: list[int], temperature: float) -> None:
        self.num_opened += 1
        name = f"session-{self.num_opened}"
        sampling = SamplingParams(temperature=temperature, seed=self.num_opened)
        prompt = (*PREFIX[:num_common], *own)
        try:
            self.sessions[name] = Session(self.engine, prompt, sampling, name)
        except CapacityExceeded:
            tokens = sum(len(session.log) + PAGE_TOKENS for session in self.sessions.values()) + len(prompt)
            assert tokens > (NUM_PAGES - 1) * PAGE_TOKENS, "it was refused although there is room"

    @precondition(lambda self: self.idle())
    @rule(
        data=st.data(),
        num_right=st.integers(0, 5),
        garbage=st.lists(st.lists(st.integers(-1, 12), min_size=1, max_size=4), max_size=3),
        catch_up=st.integers(0, 6),
    )
    def submit(self, data: st.DataObject, num_right: int, garbage: list[list[int]], catch_up: int) -> None:
        session = self.sessions[data.draw(st.sampled_from(self.idle()))]
        length = len(session.log)
        paths = [*garbage, session.truth[length : length + num_right]]
        refused = session.submit(DraftTree.from_paths(paths), min(catch_up, length))
        if isinstance(refused, NeedTokens):
            refused = session.submit(DraftTree.from_paths(paths), length - refused.have_len)
        assert refused is None
        session.waiting = True

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), num_lost=st.integers(1, 4))
    def owner_falls_back(self, data: st.DataObject, num_lost: int) -> None:
        """The owner lost tokens that it had not recorded; it will get the same ones again."""
        session = self.sessions[data.draw(st.sampled_from(self.idle()))]
        session.log.crop(max(session.prompt_len, len(session.log) - num_lost))

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), num_ahead=st.integers(1, 4))
    def owner_runs_ahead(self, data: st.DataObject, num_ahead: int) -> None:
        """The owner has tokens from elsewhere, as after a move."""
        session = self.sessions[data.draw(st.sampled_from(self.idle()))]
        length = len(session.log)
        session.log.extend(session.truth[length : length + num_ahead])

    @rule(duration_s=st.floats(0.1, 2.0))
    def time_goes_by(self, duration_s: float) -> None:
        self.now_s += duration_s

    @precondition(lambda self: self.engine.has_work)
    @rule()
    def step(self) -> None:
        was_stuck = self.engine.stuck_s > 0
        answers = self.engine.step()
        assert was_stuck or self.engine.last_pass.num_tokens or self.engine.stuck_s
        for answer in answers:
            assert isinstance(answer, Verified)
            session = self.sessions[answer.session]
            session.waiting = False
            session.take(answer)

    @precondition(lambda self: self.idle())
    @rule(num_rounds=st.integers(1, 6), num_right=st.integers(0, 2))
    def everyone_goes_on(self, num_rounds: int, num_right: int) -> None:
        """Rounds of all sessions at once, of which the pool cannot hold everyone's rows."""
        for _ in range(num_rounds):
            for name in self.idle():
                session = self.sessions[name]
                length = len(session.log)
                refused = session.submit(DraftTree.chain(session.truth[length : length + num_right]), 4)
                assert refused is None or isinstance(refused, NeedTokens)
                session.waiting = refused is None
            if self.engine.has_work:
                self.now_s += self.engine.stuck_s
                self.step()

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.sessions)))
        del self.sessions[name]
        assert self.engine.close(name)

    @invariant()
    def every_token_is_the_session_s_own(self) -> None:
        self.engine.check_integrity()
        assert self.engine.num_sessions == len(self.sessions)
        assert self.engine.self_drafting.num_failures == 0
        assert self.drafter.known <= self.sessions.keys()
        for session in self.sessions.values():
            kept = session.log.slice(0, len(session.truth))
            assert list(kept) == session.truth[: len(kept)]

    def teardown(self) -> None:
        while self.engine.has_work:
            self.now_s += self.engine.stuck_s
            self.step()
            assert not self.engine.has_work or self.engine.last_pass.num_tokens or self.engine.stuck_s
        for name in self.sessions:
            self.engine.close(name)
        assert self.engine.kv_pages_in_use == 0


TestTarget = TargetMachine.TestCase
TestTarget.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
