from __future__ import annotations

import pytest
from paceline_gateway.drafts import MAX_OPEN_DRAFTS, DraftBook

from paceline.messages import AcceptanceRule, Drafted, DraftProbs
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree
from paceline.token_log import TokenLog


class Setup:
    """A session with three committed tokens and an attached drafter."""

    def __init__(self, rule: AcceptanceRule = AcceptanceRule.MATCH) -> None:
        self.log = TokenLog([1, 2, 3])
        self.book = DraftBook("s", 1, self.log, rule)
        self.book.attached()

    def answer(self, draft_id: int, *tokens: int, now: float = 1.0) -> None:
        self.book.answered(Drafted("s", 1, draft_id, DraftTree.chain(tokens), 0, method=f"m{draft_id}"), now)

    def commit(self, *tokens: int, judged: DraftTree = EMPTY_BLOCK) -> None:
        self.log.extend(tokens)
        self.book.committed(tokens, judged)

    @property
    def tail(self) -> tuple[int, ...]:
        return self.book.tail.tokens

    def check_probs(self, *expected: DraftProbs) -> None:
        assert self.book.tail.draft_probs == expected


def test_a_draft_names_what_it_builds_on() -> None:
    setup = Setup()
    draft = setup.book.request(4, 0.0)
    assert (draft.draft_id, draft.base_len, draft.catch_up, draft.assumed, draft.max_depth) == (1, 3, (), (), 4)
    assert draft.prefix_hash == setup.log.hash_at(3)
    setup.answer(1, 4, 5)
    setup.commit(9)
    # What was committed since the last answered draft goes along.
    assert setup.book.request(4, 0.0).catch_up == (9,)
    setup.commit(8)
    assert setup.book.request(4, 0.0).catch_up == (9, 8)


def test_a_drafter_that_is_behind_is_sent_more() -> None:
    setup = Setup()
    setup.book.known_to_drafter(1)
    assert setup.book.request(4, 0.0).catch_up == (2, 3)
    setup.book.known_to_drafter(99)
    assert setup.book.request(4, 0.0).catch_up == ()


def test_an_answer_extends_the_tail_and_the_next_draft_assumes_it() -> None:
    setup = Setup()
    setup.book.request(2, 0.0)
    setup.answer(1, 4, 5)
    draft = setup.book.request(3, 0.0)
    assert draft.assumed == (4, 5)
    setup.answer(2, 6, 7, 8)
    assert list(setup.tail) == [4, 5, 6, 7, 8]
    assert setup.book.method == "m1"
    setup.commit(4, 5, 6, judged=DraftTree.chain([4, 5]))
    assert setup.tail == (7, 8)
    assert setup.book.method == "m2"
    assert setup.book.num_wasted_tokens == 0


def test_what_the_verdict_contradicts_is_wasted() -> None:
    setup = Setup()
    setup.book.request(5, 0.0)
    setup.answer(1, 4, 5, 6, 7, 8)
    setup.commit(4, 9, judged=DraftTree.chain([4, 5, 6]))
    assert setup.tail == ()
    assert setup.book.num_wasted_tokens == 2  # the judged ones were of use: they were judged


def test_an_answer_that_comes_late_is_cut_to_what_is_left() -> None:
    setup = Setup()
    setup.book.request(5, 0.0)
    setup.commit(4)
    setup.commit(5)
    assert setup.book.promising
    setup.answer(1, 4, 5, 6, 7)
    assert setup.tail == (6, 7)
    assert setup.book.num_wasted_tokens == 2


def test_an_answer_that_comes_too_late_is_wasted() -> None:
    setup = Setup()
    setup.book.request(2, 0.0)
    setup.commit(4)
    setup.commit(5)
    assert not setup.book.promising
    setup.answer(1, 4, 5)
    assert setup.tail == ()
    assert setup.book.num_wasted_tokens == 2


def test_a_contradicted_draft_is_not_promising() -> None:
    setup = Setup()
    setup.book.request(2, 0.0)
    setup.answer(1, 4, 5)
    setup.book.request(3, 0.0)
    assert setup.book.promising
    setup.commit(4, 9, judged=DraftTree.chain([4, 5]))
    assert not setup.book.promising
    assert setup.book.worth_asking()
    setup.book.request(2, 0.0)
    assert setup.book.num_open == MAX_OPEN_DRAFTS
    assert not setup.book.worth_asking()


def test_an_answer_is_taken_once() -> None:
    setup = Setup()
    setup.book.request(2, 0.0)
    setup.answer(1, 4, 5)
    setup.answer(1, 4, 5)
    setup.answer(7, 6)
    assert setup.tail == (4, 5)


def test_nothing_found_is_remembered_for_this_context_only() -> None:
    setup = Setup()
    setup.book.request(2, 0.0)
    setup.answer(1)
    assert not setup.book.worth_asking()
    setup.commit(4)
    assert setup.book.worth_asking()


def test_more_than_was_asked_for_is_cut() -> None:
    setup = Setup()
    setup.book.request(2, 0.0)
    setup.answer(1, 4, 5, 6, 7)
    assert setup.tail == (4, 5)


def test_a_lost_drafter_owes_nothing_but_its_answers_stay() -> None:
    setup = Setup()
    setup.book.request(2, 0.0)
    setup.answer(1, 4, 5)
    setup.book.request(2, 0.0)
    setup.book.dropped()
    assert setup.book.num_open == 0
    assert setup.tail == (4, 5)
    setup.answer(2, 6)
    assert setup.tail == (4, 5)
    setup.book.attached()
    assert setup.book.request(2, 0.0).draft_id == 3


def test_the_usual_time_leaves_the_first_draft_out() -> None:
    setup = Setup()
    setup.book.request(1, 0.0)
    setup.answer(1, 4, now=9.0)  # it read the whole prompt
    assert setup.book.typical_s is None
    setup.book.request(1, 10.0)
    setup.answer(2, 5, now=10.2)
    assert setup.book.typical_s == pytest.approx(0.2)
    setup.book.request(1, 11.0)
    setup.answer(3, 6, now=11.1)
    assert setup.book.typical_s == pytest.approx(0.17)


def test_a_refused_block_is_forgotten_with_all_that_follows_it() -> None:
    setup = Setup()
    setup.book.request(2, 0.0)
    setup.answer(1, 4, 5)
    setup.book.request(2, 0.0)
    setup.book.drop_tail()
    assert setup.tail == ()
    assert not setup.book.promising
    setup.answer(2, 6, 7)
    assert setup.tail == ()


def drawn(token: int) -> DraftProbs:
    return DraftProbs((token, token + 1), (0.75, 0.25))


def certain(token: int) -> DraftProbs:
    return DraftProbs((token,), (1.0,))


def answer_drawn(setup: Setup, draft_id: int, *tokens: int) -> None:
    probs = tuple([drawn(token) for token in tokens])
    setup.book.answered(Drafted("s", 1, draft_id, DraftTree.chain(tokens), 0, draft_probs=probs), 1.0)


def test_under_ratio_probabilities_go_where_their_tokens_go() -> None:
    setup = Setup(AcceptanceRule.RATIO)
    setup.book.request(2, 0.0)
    answer_drawn(setup, 1, 4, 5, 6)  # one more than it was asked for
    setup.check_probs(drawn(4), drawn(5))
    setup.book.request(2, 0.0)
    setup.answer(2, 6, 7)  # chosen without chance
    setup.check_probs(drawn(4), drawn(5), certain(6), certain(7))
    setup.commit(4, 5, 6, judged=DraftTree.chain([4, 5]))
    setup.check_probs(certain(7))
    setup.book.drop_tail()
    setup.check_probs()


def test_under_ratio_an_overtaken_answer_keeps_the_probabilities_of_what_is_left() -> None:
    setup = Setup(AcceptanceRule.RATIO)
    setup.book.request(3, 0.0)
    setup.commit(4)
    answer_drawn(setup, 1, 4, 5, 6)
    assert setup.tail == (5, 6)
    setup.check_probs(drawn(5), drawn(6))


def test_under_match_probabilities_are_not_kept() -> None:
    setup = Setup()
    setup.book.request(3, 0.0)
    answer_drawn(setup, 1, 4, 5)
    assert setup.tail == (4, 5)
    setup.check_probs()
