from __future__ import annotations

import pytest
from paceline_gateway.evidence import EvidenceCounters
from paceline_gateway.round_record import Fallback, FirstRound

from paceline.messages import Timing
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree

CHAIN = DraftTree.chain([1, 2, 3])
TREE = DraftTree.from_paths([[1, 2], [1, 3], [4]])


def test_counts_add_up() -> None:
    counters = EvidenceCounters(started_at=10.0)
    counters.judged(EMPTY_BLOCK, 0, 1, "")
    counters.judged(CHAIN, 3, 4, "ngram")
    counters.judged(CHAIN, 1, 2, "draft_model")
    counters.judged(TREE, 2, 3, "ngram")
    # The generation ended at the first of three accepted drafts.
    counters.judged(CHAIN, 3, 1, "ngram")
    evidence = counters.report(12.5, "v", "d")
    assert (evidence.target_passes, counters.completion_tokens) == (5, 11)
    assert evidence.tokens_per_target_pass == pytest.approx(11 / 5)
    assert (evidence.draft_tokens, evidence.accepted_tokens) == (13, 7)
    assert evidence.drafted_per_position == (4, 4, 3)
    assert evidence.accepted_per_position == (4, 2, 1)
    assert evidence.methods == ("ngram", "draft_model")
    assert (evidence.verifier, evidence.drafter, evidence.total_ms) == ("v", "d", 2500.0)


def test_times_add_up() -> None:
    counters = EvidenceCounters(started_at=0.0)
    counters.verified(Timing(queue_us=1000, forward_us=4000, total_us=6000), 0.008)
    counters.drafted(Timing(queue_us=500, forward_us=1000, total_us=2000), 0.003)
    # A clock that says otherwise does not make time negative.
    counters.verified(Timing(queue_us=0, forward_us=1000, total_us=1000), 0.0)
    counters.first_token_at = 0.25
    evidence = counters.report(1.0, "", "")
    assert evidence.verify_ms == pytest.approx(6.0)
    assert evidence.draft_ms == pytest.approx(1.5)
    assert evidence.queue_ms == pytest.approx(1.5)
    assert evidence.wire_ms == pytest.approx(3.0)
    assert evidence.time_to_first_token_ms == pytest.approx(250.0)


def test_a_rounds_record_has_what_came_since_the_one_before() -> None:
    counters = EvidenceCounters(started_at=10.0, first_round_at=10.5)
    counters.verified(Timing(queue_us=1000, total_us=3000), 0.004)
    counters.judged(EMPTY_BLOCK, 0, 1, "")
    first = counters.end_round(11.0, None, 7)
    assert first.first == FirstRound(prompt_tokens=7, queue_s=0.5, time_to_first_token_s=1.0)
    assert (first.target_passes, first.new_tokens, first.draft_tokens, first.since_last_s) == (1, 1, 0, 0.0)
    assert first.times.verify_s == pytest.approx(0.002)

    counters.drafted(Timing(queue_us=500, total_us=2500), 0.003)
    counters.waited(0.25)
    counters.wasted_draft_tokens, counters.ahead_hits = 5, 1
    counters.judged(CHAIN, 2, 3, "ngram")
    second = counters.end_round(11.5, Fallback.LATE_DRAFT, 7)
    assert second.first is None
    assert (second.new_tokens, second.draft_tokens, second.accepted_tokens, second.method) == (3, 3, 2, "ngram")
    assert (second.wasted_draft_tokens, second.ahead_hit, second.since_last_s) == (5, True, 0.5)
    assert second.times.draft_s == pytest.approx(0.002)
    assert second.times.draft_wait_s == 0.25
    assert second.times.verify_s == 0.0
    assert second.fallback is Fallback.LATE_DRAFT

    assert counters.end_round(12.0, Fallback.NO_DRAFTER, 7).empty
    counters.waited(0.1)
    rest = counters.end_round(12.5, Fallback.NO_DRAFTER, 7)
    assert not rest.empty
    assert (rest.target_passes, rest.fallback, rest.since_last_s, rest.first) == (0, None, 0.0, None)


def test_what_replicas_did_not_need_of_a_round_is_its_overhead() -> None:
    counters = EvidenceCounters(started_at=0.0, first_round_at=0.0)
    counters.verified(Timing(total_us=90_000), 0.1)
    counters.judged(EMPTY_BLOCK, 0, 1, "")
    assert counters.end_round(1.0, None, 7).overhead_s is None

    # In turn: 20 ms of drafting in a wait of 21 ms, then 30 ms of judging, and the next verdict after 53 ms.
    counters.drafted(Timing(queue_us=1000, total_us=20_000), 0.021)
    counters.waited(0.021)
    counters.verified(Timing(queue_us=2000, total_us=30_000), 0.032)
    counters.judged(CHAIN, 3, 4, "ngram")
    assert counters.end_round(1.053, None, 7).overhead_s == pytest.approx(0.003)

    # Ahead: of two drafts one came while the block was judged, and only the end of the other was waited for.
    counters.drafted(Timing(total_us=20_000), 0.021)
    counters.drafted(Timing(total_us=20_000), 0.021)
    counters.waited(0.005)
    counters.verified(Timing(total_us=30_000), 0.032)
    counters.judged(CHAIN, 3, 4, "ngram")
    assert counters.end_round(1.090, None, 7).overhead_s == pytest.approx(0.002)

    counters.waited(0.05)
    counters.verified(Timing(total_us=30_000), 0.032)
    counters.judged(EMPTY_BLOCK, 0, 1, "")
    assert counters.end_round(1.2, Fallback.LATE_DRAFT, 7).overhead_s is None


def test_nothing_has_happened_yet() -> None:
    evidence = EvidenceCounters(started_at=0.0).report(0.5, "", "")
    assert evidence.tokens_per_target_pass == 0.0
    assert evidence.drafted_per_position == ()
