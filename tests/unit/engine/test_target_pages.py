"""Sessions of the target engine that share pages, wait for them and lose them: no token changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.engine.local import LocalRequest, generate
from paceline.engine.target import TargetEngine, TargetOptions
from paceline.errors import CapacityExceeded
from paceline.messages import AcceptanceRule, DraftProbs, Failed, Open, SamplingParams, Verified, Verify
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree
from tests.fakes.toy_runner import ToyRunner, hash_law, poisoned_law
from tests.unit.engine.rounds import GREEDY, Owner, greedy_continuation, run

LAW = hash_law(16, seed=3)
COMMON = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4)
SAMPLED = SamplingParams(temperature=0.9, seed=4)


def make_engine(num_pages: int = 100, now_s: list[float] | None = None, **limits: int) -> TargetEngine:
    """Pages of 4 tokens."""
    runner = ToyRunner(LAW, 16, num_pages=num_pages, page_tokens=4, max_model_len=num_pages * 4)
    clock = now_s or [0.0]
    return TargetEngine(runner, options=TargetOptions(**limits), clock=lambda: clock[0])


def answer_of(engine: TargetEngine, owner: Owner, block: DraftTree = EMPTY_BLOCK, catch_up: int = 0) -> Verified:
    """One round, whoever else has work."""
    assert owner.submit(block, catch_up) is None
    while True:
        for answer in engine.step():
            if answer.session == owner.name:
                assert isinstance(answer, Verified)
                owner.take(answer)
                return answer


# --- prefixes ---------------------------------------------------------------------------------------------------------


def test_open_tells_the_prefix_that_is_there_and_only_the_rest_is_computed() -> None:
    engine = make_engine()
    Owner(engine, COMMON, name="first").verify()
    opened = engine.open(Open("second", 1, (*COMMON, 7), 21, GREEDY))
    assert (opened.kv_len, opened.cached_len) == (20, 20)
    stats = engine.scheduling
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (20 + 21, 20)
    engine.close("second")
    # At least one token is left to compute, so of 20 only four whole pages come from elsewhere.
    assert engine.open(Open("third", 1, COMMON, 20, GREEDY)).cached_len == 16


def test_a_prefix_outlives_the_session_that_computed_it() -> None:
    engine = make_engine()
    owner = Owner(engine, COMMON, name="first")
    owner.verify()
    engine.close("first")
    assert engine.kv_pages_in_use == 0
    again = Owner(engine, COMMON, name="again")
    assert engine.kv_len("again") == 16
    again.verify()
    assert again.tokens == owner.tokens


def test_rows_of_a_session_whose_row_was_not_finite_are_not_shared() -> None:
    poisoned = [True]
    law = poisoned_law(LAW, lambda _prefix: poisoned[0])
    engine = TargetEngine(ToyRunner(law, 16, page_tokens=4))
    sick = Owner(engine, COMMON, name="sick")
    sick.submit()
    (answer,) = run(engine)
    assert isinstance(answer, Failed)
    poisoned[0] = False
    assert engine.open(Open("well", 1, COMMON, 20, GREEDY)).cached_len == 0


# --- room -------------------------------------------------------------------------------------------------------------


def test_a_prompt_is_refused_with_the_numbers_if_the_tokens_of_all_need_more_pages_than_there_are() -> None:
    engine = make_engine(num_pages=8)
    Owner(engine, COMMON, name="first").verify()
    Owner(engine, (1, 2, 3), name="second")  # no row yet, but it will need a page
    with pytest.raises(
        CapacityExceeded, match=r"8 pages of 4 tokens; 2 open sessions and this prompt \(9 tokens, 0 "
    ) as e:
        engine.open(Open("third", 1, tuple(range(9)), 9, GREEDY))
    assert "need 10;" in e.value.message
    assert engine.num_sessions == 2
    engine.check_integrity()
    # The same length fits if most of it is there already.
    assert engine.open(Open("third", 1, COMMON[:9], 9, GREEDY)).cached_len == 8
    engine.close("first")
    engine.open(Open("fourth", 1, tuple(range(9)), 9, GREEDY))


def test_a_session_that_is_opened_again_is_never_refused_for_pages() -> None:
    engine = make_engine(num_pages=6)
    Owner(engine, COMMON, name="first").verify()
    opened = engine.open(Open("first", 2, (*COMMON[:8], *COMMON[:15]), 23, GREEDY))
    assert opened.kv_len == 8


def test_a_session_that_has_outgrown_the_whole_pool_fails() -> None:
    runner = ToyRunner(LAW, 16, num_pages=2, page_tokens=4)
    owner = Owner(engine := TargetEngine(runner), tuple(range(8)))
    owner.verify()
    answer = owner.submit()
    assert isinstance(answer, Failed)
    assert answer.failure.code == "capacity_exceeded"
    assert "9 tokens and all pages of the KV pool hold 8" in answer.failure.message
    assert not engine.has_work


# --- preemption -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_sessions_in_a_pool_that_holds_two_of_them_get_the_tokens_of_their_solo_runs(
    sampling: SamplingParams, num_drafts: int
) -> None:
    prompts = [tuple((index * 5 + offset * offset) % 16 for offset in range(9 + index % 3)) for index in range(6)]
    requests = [
        LocalRequest(prompt, replace(sampling, seed=index), 16, num_drafts, lambda c, k: DraftTree.chain([c[-1]] * k))
        for index, prompt in enumerate(prompts)
    ]
    solo = [generate(make_engine(), [request])[0].tokens for request in requests]
    crowded = make_engine(num_pages=18)
    assert [result.tokens for result in generate(crowded, requests)] == solo
    assert crowded.scheduling.preemptions > 3
    assert crowded.kv_pages_in_use == 0
    crowded.check_integrity()


def test_a_session_that_lost_its_rows_between_rounds_goes_on_and_one_with_work_is_not_bereft_by_a_later_one() -> None:
    now_s = [0.0]
    engine = make_engine(8, now_s, max_batch_tokens=8, max_draft_tokens=3)
    first, second = Owner(engine, COMMON[:12], name="first"), Owner(engine, COMMON[12:], name="second")
    third = Owner(engine, tuple(range(8)), name="third")
    answer_of(engine, second)
    first.submit()
    engine.step()
    assert engine.kv_len("first") == 8, "in the middle of its prompt"
    now_s[0] += 1.5
    third.log.extend(greedy_continuation(LAW, third.tokens, 8))
    assert third.submit(catch_up=8) is None
    for answer in run(engine):
        assert isinstance(answer, Verified)
        (first if answer.session == "first" else third).take(answer)
    assert (engine.kv_len("second"), engine.scheduling.preemptions) == (0, 1)
    engine.close("third")
    answer_of(engine, second)
    for owner, prompt in ((first, COMMON[:12]), (second, COMMON[12:])):
        assert owner.tokens[len(prompt) :] == greedy_continuation(LAW, prompt, len(owner.tokens) - len(prompt))


def test_work_that_waits_for_pages_of_an_idle_session_says_how_long_and_is_no_busy_loop() -> None:
    now_s = [0.0]
    engine = make_engine(8, now_s)
    first, second = Owner(engine, COMMON, name="first"), Owner(engine, COMMON[5:9], name="second")
    answer_of(engine, first)
    second.log.extend(greedy_continuation(LAW, second.tokens, 12))
    assert second.submit(catch_up=12) is None
    now_s[0] += 0.25
    assert engine.step() == []
    assert (engine.stuck_s, engine.num_blocked, engine.num_working) == (0.75, 1, 1)
    answer_of(engine, first)  # whose work goes on meanwhile, and which therefore is not idle
    assert engine.step() == []
    assert engine.stuck_s == 1.0
    now_s[0] += 1.0
    assert engine.stuck_s == 0
    (answer,) = run(engine)
    assert isinstance(answer, Verified)
    assert answer.tokens == tuple(greedy_continuation(LAW, second.tokens, 1))
    assert (engine.kv_len("first"), engine.num_blocked) == (0, 0)


def test_a_session_that_is_closed_while_it_waits_for_pages_leaves_nothing_behind() -> None:
    engine = make_engine(8)
    first, second = Owner(engine, COMMON, name="first"), Owner(engine, COMMON[5:9], name="second")
    answer_of(engine, first)
    second.log.extend(greedy_continuation(LAW, second.tokens, 12))
    second.submit(catch_up=12)
    assert engine.step() == []
    assert engine.close("second")
    assert (engine.has_work, engine.num_blocked, engine.stuck_s) == (False, 0, 0)
    assert engine.step() == []
    engine.check_integrity()


# --- the rule ratio ---------------------------------------------------------------------------------------------------

EVEN = DraftProbs(tuple(range(16)), (1 / 16,) * 16)


def ratio_command(engine: TargetEngine, block: DraftTree, draft_probs: tuple[DraftProbs, ...]) -> Verify:
    owner = Owner(engine, COMMON)
    engine.open(Open("session", 1, COMMON, 20, SAMPLED, AcceptanceRule.RATIO))
    return replace(owner.command(block), draft_probs=draft_probs)


@pytest.mark.parametrize(
    ("block", "num_probs", "field", "message"),
    [
        (DraftTree.from_paths([[1, 2], [3]]), 3, "block", "branches"),
        (DraftTree.chain([1, 16]), 2, "block", "16 is outside"),
        (DraftTree.chain([1, 2]), 1, "draft_probs", "1 draft_probs came with 2 drafts"),
    ],
)
def test_ratio_refuses_what_it_cannot_judge(block: DraftTree, num_probs: int, field: str, message: str) -> None:
    engine = make_engine()
    answer = engine.submit(ratio_command(engine, block, (EVEN,) * num_probs))
    assert isinstance(answer, Failed)
    assert (answer.failure.code, answer.failure.field) == ("invalid_argument", field)
    assert message in answer.failure.message


def test_ratio_judges_a_cut_block_by_what_its_drafts_were_drawn_from_and_match_needs_no_probabilities() -> None:
    engine = make_engine(max_draft_tokens=2)
    command = ratio_command(engine, DraftTree.chain([1, 2, 3]), (EVEN,) * 3)
    assert engine.submit(command) is None
    (judged,) = run(engine)
    assert isinstance(judged, Verified)
    assert len(judged.accepted_path) <= 2
    # Drafts without probabilities are judged as drawn without chance: another verdict for the same seed is allowed.
    by_match = Owner(make_engine(), COMMON, SAMPLED)
    assert by_match.engine.submit(replace(by_match.command(DraftTree.chain([1])), draft_probs=(EVEN,))) is None
    (verdict,) = run(by_match.engine)
    plain = Owner(make_engine(), COMMON, SAMPLED)
    assert isinstance(verdict, Verified)
    assert verdict.tokens[0] == plain.verify().tokens[0]


def test_probabilities_that_cannot_be_fail_the_block_and_keep_the_rows() -> None:
    engine = make_engine()
    wrong = DraftProbs((3,), (1.0,))  # not of the token that was drafted
    command = ratio_command(engine, DraftTree.chain([1]), (wrong,))
    assert engine.submit(command) is None
    (answer,) = run(engine)
    assert isinstance(answer, Failed)
    assert answer.failure.code == "invalid_argument"
    plain = replace(command, round=2, block=EMPTY_BLOCK, draft_probs=())
    assert engine.submit(plain) is None
    assert isinstance(run(engine)[0], Verified)
