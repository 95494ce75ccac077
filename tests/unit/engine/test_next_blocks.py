"""A target engine that drafts by itself: whoever drafts and whatever comes of it, the tokens are plain decoding's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from paceline.drafting.ngram import NgramMethod
from paceline.drafting.self_drafting import SelfDrafting
from paceline.engine.features import FeatureTaps
from paceline.engine.local import LocalRequest, generate
from paceline.engine.self_draft import SelfDraft, SelfDraftJob
from paceline.engine.target import TargetEngine, TargetOptions
from paceline.messages import AcceptanceRule, Open, SamplingParams, Verified
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree
from tests.fakes.toy_runner import Law, ToyRunner, cycle_law, hash_law, poisoned_law
from tests.unit.engine.rounds import GREEDY, Owner, greedy_continuation, run

PROMPT = (1, 2, 3, 4)
LAW = hash_law(16, seed=3)
SAMPLED = SamplingParams(temperature=0.9, seed=7)

Script = Callable[[SelfDraftJob], SelfDraft]


class Scripted:
    """A self-drafter that follows a script and checks what it is given."""

    method = "scripted"
    taps: FeatureTaps | None = FeatureTaps()
    weights_bytes = kv_bytes = 0

    def __init__(self, script: Script) -> None:
        self.script = script
        self.calls: list[list[str]] = []
        self.forgotten: list[str] = []

    def draft(self, jobs: Sequence[SelfDraftJob]) -> list[SelfDraft]:
        self.calls.append([job.session for job in jobs])
        for job in jobs:
            assert job.max_depth >= 1
            assert job.kv.num_rows == len(job.tokens) - 1
            # The toy's features are (token, position): those of all tokens but the pending one.
            assert job.features is not None
            rows = job.features.read(0, job.kv.num_rows).tolist()
            assert rows == [[token, position] for position, token in enumerate(job.tokens[:-1])]
        return [self.script(job) for job in jobs]

    def forget(self, session: str) -> None:
        self.forgotten.append(session)


def perfect(law: Law) -> Script:
    return lambda job: SelfDraft(DraftTree.chain(greedy_continuation(law, job.tokens, job.max_depth)))


def make_engine(drafter: Scripted | SelfDrafting | None, law: Law = LAW, **limits: int) -> TargetEngine:
    runner = ToyRunner(law, 16, max_model_len=limits.pop("max_model_len", 64), num_pages=limits.pop("num_pages", 256))
    return TargetEngine(runner, options=TargetOptions(**limits), self_drafter=drafter)


def ask(owner: Owner, next_depth: int, block: DraftTree = EMPTY_BLOCK) -> Verified:
    """One whole round that asks for the next block."""
    assert owner.engine.submit(replace(owner.command(block), next_depth=next_depth)) is None
    (answer,) = run(owner.engine)
    assert isinstance(answer, Verified)
    owner.take(answer)
    return answer


def test_the_next_block_rides_on_the_verdict_and_is_accepted() -> None:
    drafter = Scripted(perfect(LAW))
    owner = Owner(make_engine(drafter), PROMPT)
    answer = ask(owner, 3)
    for depth in (4, 1, 0):
        block = answer.next_block
        assert (answer.next_method, answer.next_confidences) == ("scripted", ())
        answer = ask(owner, depth, block)
        assert len(answer.accepted_path) == block.num_draft_tokens > 0
        assert 0 <= answer.timing.draft_us <= answer.timing.total_us
    assert (answer.next_block, answer.next_method, answer.timing.draft_us) == (EMPTY_BLOCK, "", 0)
    assert owner.tokens[len(PROMPT) :] == greedy_continuation(LAW, PROMPT, len(owner.tokens) - len(PROMPT))
    stats = owner.engine.self_drafting
    assert (stats.num_drafts, stats.num_tokens, stats.num_failures) == (3, 3 + 4 + 1, 0)
    assert stats.seconds > 0


def test_sessions_of_a_pass_are_drafted_for_in_one_call_and_only_those_that_ask() -> None:
    drafter = Scripted(perfect(LAW))
    engine = make_engine(drafter)
    owners = [Owner(engine, (*PROMPT, index), name=str(index)) for index in range(4)]
    for index, owner in enumerate(owners):
        assert engine.submit(replace(owner.command(), next_depth=index % 3)) is None
    answers = run(engine)
    assert drafter.calls == [["1", "2"]]
    assert [answer.next_block.num_draft_tokens for answer in answers if isinstance(answer, Verified)] == [0, 1, 2, 0]


def test_only_the_pass_that_completes_a_prompt_drafts() -> None:
    drafter = Scripted(perfect(LAW))
    engine = make_engine(drafter, max_batch_tokens=8, max_draft_tokens=4)
    owner = Owner(engine, tuple(range(16)) * 2)
    assert engine.submit(replace(owner.command(), next_depth=2)) is None
    while engine.has_work:
        assert drafter.calls == []
        engine.step()
    assert drafter.calls == [["session"]]


def test_blocks_end_with_the_context_and_with_what_a_block_may_hold() -> None:
    drafter = Scripted(perfect(LAW))
    owner = Owner(make_engine(drafter, max_draft_tokens=5, max_model_len=16), PROMPT)
    assert ask(owner, 99).next_block.num_draft_tokens == 5
    owner.log.extend(greedy_continuation(LAW, owner.tokens, 7))
    command = replace(owner.command(catch_up=7), next_depth=99)
    assert owner.engine.submit(command) is None
    (answer,) = run(owner.engine)
    assert isinstance(answer, Verified)
    # 13 tokens now: the next round's pending token, two drafts, and the token after them.
    assert answer.next_block.num_draft_tokens == 2
    owner.take(answer)
    assert len(ask(owner, 99, answer.next_block).accepted_path) == 2
    assert len(owner.tokens) == 16
    assert drafter.calls[2:] == [], "no draft where the context is full"


@pytest.mark.parametrize(
    ("tree", "confidences", "left"),
    [
        (DraftTree.chain([1, 16, 2]), (0.5, 0.4, 0.3), SelfDraft(DraftTree.chain([1]), (0.5,))),
        (DraftTree((-1, 3, 4), (0, 0, 1)), (0.5, 0.4, 0.3), SelfDraft(DraftTree.chain([3]), (0.4,))),
        (DraftTree.chain([1, 2, 3, 4, 5]), (), SelfDraft(DraftTree.chain([1, 2, 3]))),
        (DraftTree((1, 2, 3, 4, 5, 6), (0,) * 6), (0.1,) * 6, SelfDraft(DraftTree((1, 2, 3, 4), (0,) * 4), (0.1,) * 4)),
        (DraftTree.chain([1, 2]), (0.5,), SelfDraft(DraftTree.chain([1, 2]))),
    ],
    ids=["no token", "first no token", "too deep", "too wide", "confidences missing"],
)
def test_what_cannot_be_judged_is_cut(tree: DraftTree, confidences: tuple[float, ...], left: SelfDraft) -> None:
    drafter = Scripted(lambda _job: SelfDraft(tree, confidences))
    answer = ask(Owner(make_engine(drafter, max_draft_tokens=4), PROMPT), 3)
    assert (answer.next_block, answer.next_confidences) == (left.tree, left.confidences)


def broken(_job: SelfDraftJob) -> SelfDraft:
    raise RuntimeError("scripted fault")


GARBAGE: dict[str, Script] = {
    "raises": broken,
    "wrong": lambda job: SelfDraft(DraftTree.chain([(job.tokens[-1] + 1) % 16] * job.max_depth)),
    "too deep": lambda job: SelfDraft(DraftTree.chain([3] * 100)),
    "no tokens": lambda job: SelfDraft(DraftTree.chain([-5, 99])),
    "wide": lambda job: SelfDraft(DraftTree(tuple(range(16)), (0,) * 16)),
    "in turn": lambda job: broken(job) if len(job.tokens) % 2 else SelfDraft(DraftTree.from_paths([[3, 4], [5]])),
}


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", GARBAGE)
def test_no_drafter_changes_a_token_or_fails_a_session(name: str, sampling: SamplingParams) -> None:
    requests = [LocalRequest((*PROMPT, index), sampling, 12) for index in range(4)]
    plain = generate(make_engine(None), requests)
    engine = make_engine(Scripted(GARBAGE[name]), max_draft_tokens=6)
    drafted = generate(engine, [replace(request, self_draft_depth=4) for request in requests])
    assert [result.tokens for result in drafted] == [result.tokens for result in plain]
    assert engine.kv_pages_in_use == 0


@pytest.mark.parametrize("returned", [None, SelfDraft(None), SelfDraft(DraftTree.chain([1]), None)])  # type: ignore[arg-type]
def test_what_is_no_draft_costs_its_own_session_a_block(returned: SelfDraft) -> None:
    good = perfect(LAW)
    drafter = Scripted(lambda job: returned if job.session == "0" else good(job))
    engine = make_engine(drafter)
    owners = [Owner(engine, (*PROMPT, index), name=str(index)) for index in range(2)]
    for owner in owners:
        assert engine.submit(replace(owner.command(), next_depth=2)) is None
    answers = run(engine)
    assert [answer.next_block.num_draft_tokens for answer in answers if isinstance(answer, Verified)] == [0, 2]
    assert drafter.forgotten == ["0"]
    assert (engine.self_drafting.num_failures, engine.self_drafting.num_drafts) == (1, 1)
    engine.check_integrity()


def test_a_drafter_that_fails_is_logged_once_and_forgets_its_sessions(caplog: pytest.LogCaptureFixture) -> None:
    drafter = Scripted(broken)
    owner = Owner(make_engine(drafter), PROMPT)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            answer = ask(owner, 2)
            assert (answer.next_block, answer.next_method) == (EMPTY_BLOCK, "")
    assert len([record for record in caplog.records if "self-drafter" in record.message]) == 1
    assert drafter.forgotten == ["session"] * 3
    assert owner.engine.self_drafting.num_failures == 3


def test_a_drafter_that_returns_too_few_blocks_or_cannot_forget_fails_nobody() -> None:
    class Worse(Scripted):
        def draft(self, jobs: Sequence[SelfDraftJob]) -> list[SelfDraft]:
            return []

        def forget(self, session: str) -> None:
            raise KeyError(session)

    owner = Owner(make_engine(Worse(broken)), PROMPT)
    assert ask(owner, 2).next_block == EMPTY_BLOCK
    assert owner.engine.close("session")


def test_a_session_is_forgotten_when_it_ends_begins_anew_or_loses_its_rows() -> None:
    drafter = Scripted(perfect(LAW))
    engine = make_engine(drafter, num_pages=8, max_model_len=32)
    first, second = Owner(engine, range(4, 16), name="first"), Owner(engine, PROMPT, name="second")
    ask(first, 2)
    ask(second, 2)
    second = Owner(engine, PROMPT, name="second")
    assert drafter.forgotten == ["second"]
    ask(second, 2)
    first.log.extend(greedy_continuation(LAW, first.tokens, 18))
    assert engine.submit(first.command(catch_up=18)) is None
    run(engine)  # takes the pages of the second one, which came later
    assert (engine.kv_len("second"), drafter.forgotten) == (0, ["second"] * 2)
    engine.close("first")
    assert drafter.forgotten == ["second", "second", "first"]


def test_a_session_whose_rows_nobody_can_vouch_for_is_forgotten() -> None:
    drafter = Scripted(perfect(LAW))
    law = poisoned_law(LAW, lambda prefix: len(prefix) == 5)
    owner = Owner(make_engine(drafter, law), PROMPT)
    ask(owner, 0)
    assert owner.submit(DraftTree.chain([1])) is None
    owner.engine.step()
    assert drafter.forgotten == ["session"]


def test_under_ratio_a_block_that_branches_is_dropped() -> None:
    drafter = Scripted(lambda _job: SelfDraft(DraftTree((1, 2), (0, 0))))
    engine = make_engine(drafter)
    owner = Owner(engine, PROMPT)
    engine.open(Open("session", 1, PROMPT, 4, SAMPLED, AcceptanceRule.RATIO))
    assert ask(owner, 2).next_block == EMPTY_BLOCK


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("rule", AcceptanceRule)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_ngram_inside_the_engine_gives_the_tokens_of_plain_decoding_in_fewer_passes(
    sampling: SamplingParams, rule: AcceptanceRule, batch: int
) -> None:
    law = cycle_law([3, 5, 7, 9, 2], vocab_size=16)
    requests = [LocalRequest((*PROMPT, index), sampling, 24, rule=rule) for index in range(batch)]
    plain = generate(make_engine(None, law), requests)
    engine = make_engine(SelfDrafting(NgramMethod()), law)
    drafted = generate(engine, [replace(request, self_draft_depth=4) for request in requests])
    for own, expected in zip(drafted, plain, strict=True):
        assert own.tokens == expected.tokens
        assert own.num_accepted > 10
        assert own.num_rounds == expected.num_rounds - own.num_accepted
    assert engine.self_drafting.num_drafts > 0
