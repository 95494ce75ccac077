"""Drafts that are prepared for outcomes: what a draft is does not change, only when it is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from paceline_drafter.foresight import Foresight

from paceline.drafting.draft_model import DraftModelMethod
from paceline.drafting.method import DraftJob
from paceline.drafting.outcomes import NUM_CANDIDATES, Outcome, likeliest_outcomes
from paceline.drafting.torch_runner import TorchDraftRunner
from paceline.engine.simulated.pass_time import PassTime
from paceline.engine.simulated.runner import SimulatedModel, SimulatedRunner
from paceline.engine.simulated.text import SimulatedText
from paceline.messages import AcceptanceRule, SamplingParams

VOCAB, BLOCK, NUM_OUTCOMES = 50, 4, 8
ACCEPTANCE, CANDIDATES = 0.7, 0.6
GREEDY = SamplingParams(temperature=0.0)


def _method(max_sessions: int = 100) -> DraftModelMethod:
    model = SimulatedModel(PassTime(0.0, 0.0), agreement=ACCEPTANCE, candidates=CANDIDATES)
    runner = SimulatedRunner(model, vocab_size=VOCAB, kv_bytes=1 << 20, max_sessions=max_sessions)
    return DraftModelMethod(TorchDraftRunner(runner, max_sessions))


@dataclass
class Gateway:
    """One session that drafts ahead and is judged by the text that the target writes.

    Attributes:
        drafts: every draft that was asked for, with the passes that it took once the verdict was there.
    """

    method: DraftModelMethod
    foresight: Foresight
    sampling: SamplingParams = GREEDY
    name: str = "s"
    committed: list[int] = field(default_factory=lambda: [5, 6])
    drafts: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    text: SimulatedText = field(default_factory=lambda: SimulatedText(tuple(range(VOCAB))))

    def draft(self, assumed: Sequence[int], depth: int, *, passes: int = 100) -> DraftJob:
        job = DraftJob(self.name, [*self.committed, *assumed], depth, self.sampling)
        self.foresight.begin(job, len(self.committed))
        taken = 0
        while len(job.tokens) < depth and taken < passes:
            self.method.advance([job, *self.foresight.beside([job])])
            taken += 1
        if not assumed:
            self.drafts.append((tuple(job.tokens), taken))
        return job

    def run(self, num_rounds: int) -> None:
        self.method.open(self.name)
        tail: list[int] = []
        for _ in range(num_rounds):
            block = tail or self.draft((), BLOCK).tokens
            ahead = self.draft(block, BLOCK + 1).tokens
            state = [self.text.start, *self.text.after(self.text.start, self.committed)][-1]
            accepted = 0
            while accepted < BLOCK and block[accepted] == self.text.next_token(state):
                (state,) = self.text.after(state, [block[accepted]])
                accepted += 1
            extra = self.text.next_token(state)
            self.committed += [*block[:accepted], extra]
            tail = ahead[1:] if (accepted, extra) == (BLOCK, ahead[0]) else []


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.2, seed=4)], ids=["greedy", "sampled"])
def test_drafts_are_the_same_and_most_are_there_when_they_are_asked_for(sampling: SamplingParams) -> None:
    gateways = []
    for num in (0, NUM_OUTCOMES):
        method = _method()
        gateway = Gateway(method, Foresight(method, num), sampling)
        gateway.run(60)
        gateways.append(gateway)
    without, with_outcomes = gateways
    assert with_outcomes.committed == without.committed
    assert [tokens for tokens, _ in with_outcomes.drafts] == [tokens for tokens, _ in without.drafts]
    assert {taken for _, taken in without.drafts} == {BLOCK}
    assert {taken for _, taken in with_outcomes.drafts} == {0, BLOCK}
    ready = sum(taken == 0 for _, taken in with_outcomes.drafts) / len(with_outcomes.drafts)
    assert ready == pytest.approx(_expected_share(), abs=0.12)


def _expected_share() -> float:
    """Of the rounds whose tail is dropped, those whose outcome is prepared."""
    prepared = likeliest_outcomes(BLOCK, NUM_OUTCOMES)
    stops = [ACCEPTANCE**position * (1 - ACCEPTANCE) for position in range(BLOCK + 1)]
    among = [
        sum(CANDIDATES * (1 - CANDIDATES) ** (one.rank - 1) for one in prepared if one.position == position)
        for position in range(BLOCK + 1)
    ]
    return sum(stop * share for stop, share in zip(stops, among, strict=True)) / sum(stops)


def test_a_draft_that_is_half_made_when_it_is_asked_for_goes_on() -> None:
    method = _method()
    gateway = Gateway(method, Foresight(method, NUM_OUTCOMES))
    method.open("s")
    block = gateway.draft((), BLOCK).tokens
    ahead = gateway.draft(block, BLOCK + 1, passes=3)
    other = ahead.candidates[0][1]
    gateway.committed += [*block, other]
    job = gateway.draft((), BLOCK)
    assert gateway.drafts[-1] == (tuple(job.tokens), BLOCK - 2)
    again = Gateway(method, Foresight(method, 0), name="t", committed=list(gateway.committed))
    method.open("t")
    assert again.draft((), BLOCK).tokens == job.tokens
    assert len(job.candidates) == len(job.confidences) == BLOCK


def test_nothing_is_prepared_beside_other_sessions_or_without_a_block_or_under_ratio() -> None:
    method = _method()
    foresight = Foresight(method, NUM_OUTCOMES)
    for name in ("s", "t"):
        method.open(name)
    gateway = Gateway(method, foresight)
    block = gateway.draft((), BLOCK).tokens
    assert method.kv_usage().used_tokens <= 16  # a page: no draft but its own

    def begun(name: str, rule: AcceptanceRule = AcceptanceRule.MATCH) -> DraftJob:
        job = DraftJob(name, [5, 6, *block], BLOCK + 1, GREEDY, rule=rule)
        foresight.begin(job, 2)
        method.advance([job])
        return job

    assert not foresight.beside([begun("s", AcceptanceRule.RATIO)])
    jobs = [begun("s"), begun("t")]
    assert not foresight.beside(jobs)
    assert len(foresight.beside(jobs[:1])) == NUM_OUTCOMES
    # Nobody has told the candidates of this block: what may stand behind it is known.
    assert [job.context[:-1] for job in foresight.beside(jobs[1:])] == [[5, 6, *block]]


def test_what_is_prepared_takes_no_room_that_is_not_there_and_is_freed_with_its_session() -> None:
    method = _method(max_sessions=3)
    foresight = Foresight(method, NUM_OUTCOMES)
    gateway = Gateway(method, foresight)
    gateway.run(20)
    assert {taken for _, taken in gateway.drafts} == {0, BLOCK}
    foresight.forget("s")
    foresight.forget("s")
    method.close("s")
    assert method.kv_usage().used_tokens == 0
    method.check_integrity()


def test_the_likeliest_outcomes_stop_early_or_take_the_next_best_token() -> None:
    assert likeliest_outcomes(2, 4) == (Outcome(0, 1), Outcome(1, 1), Outcome(2, 1), Outcome(0, 2))
    assert likeliest_outcomes(0, 2) == (Outcome(0, 1), Outcome(0, 2))
    everything = likeliest_outcomes(3, 1000)
    assert len(set(everything)) == len(everything) == 4 * (NUM_CANDIDATES - 1)
    assert likeliest_outcomes(3, 0) == ()
