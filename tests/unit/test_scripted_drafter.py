"""The scripted drafter does what its scripts say: other tests lean on it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from paceline.drafting.method import DraftJob, MethodInfo
from paceline.errors import CapacityExceeded, ModelError
from paceline.messages import AcceptanceRule, DraftProbs, SamplingParams
from tests.fakes.scripted_drafter import (
    Script,
    ScriptedDrafter,
    StepGate,
    broken,
    drawn,
    empty,
    eos_at,
    garbage,
    out_of_vocab,
    perfect,
    too_long,
    wrong_at,
)

GREEDY = SamplingParams(temperature=0.0)


def law(context: Sequence[int], sampling: SamplingParams) -> int:
    return len(context) % 10


def run(script: Script, depth: int = 4, context: Sequence[int] = (0, 1, 2)) -> list[int]:
    drafter = ScriptedDrafter(script)
    drafter.open("s")
    job = DraftJob("s", tuple(context), depth, GREEDY)
    for _ in range(depth + 10):
        if not job.done:
            drafter.advance([job])
    assert job.done
    assert len(job.confidences) == len(job.tokens)
    return job.tokens


def test_scripts() -> None:
    assert run(perfect(law)) == [3, 4, 5, 6]
    assert run(wrong_at(law, 1, 10)) == [3, 5, 5, 6]
    assert run(wrong_at(law, 4, 10)) == [3, 4, 5, 6]
    assert run(eos_at(law, 2, 99)) == [3, 4, 99, 6]
    assert run(out_of_vocab(law, 0, -1)) == [-1, 4, 5, 6]
    assert run(empty()) == []
    assert run(too_long(law, 2)) == [3, 4, 5, 6, 7, 8]
    assert run(garbage(1, 10)) == run(garbage(1, 10))
    assert all(token < 10 for token in run(garbage(2, 10)))
    with pytest.raises(ModelError, match="scripted"):
        run(broken())


def test_one_token_per_step_and_rows_as_a_model_s() -> None:
    drafter = ScriptedDrafter(perfect(law))
    drafter.open("s")
    job = DraftJob("s", (0, 1, 2), 3, GREEDY)
    for step in range(1, 4):
        drafter.advance([job])
        assert (len(job.tokens), job.done) == (step, step == 3)
    assert drafter.kv_len("s") == 5  # the last draft was never fed
    drafter.advance([DraftJob("s", (0, 1, 2, 3, 9), 3, GREEDY)])
    assert drafter.fed["s"] == [0, 1, 2, 3, 9]
    assert drafter.contexts == [(0, 1, 2), (0, 1, 2, 3, 9)]
    assert drafter.steps == 4


def test_all_tokens_at_once() -> None:
    drafter = ScriptedDrafter(perfect(law), at_once=True, confidence=0.5)
    drafter.open("s")
    job = DraftJob("s", (0, 1, 2), 3, GREEDY)
    drafter.advance([job])
    assert (job.tokens, job.confidences, job.done) == ([3, 4, 5], [0.5] * 3, True)


def test_superseded_jobs_leave_nothing_behind() -> None:
    drafter = ScriptedDrafter(perfect(law))
    drafter.open("s")
    for _ in range(20):
        drafter.advance([DraftJob("s", (0, 1, 2), 3, GREEDY)])
    assert len(drafter._plans) == 1


def test_sessions_are_bounded_when_asked() -> None:
    drafter = ScriptedDrafter(empty(), info=MethodInfo("scripted", max_sessions=1))
    drafter.open("a")
    drafter.open("a")
    with pytest.raises(CapacityExceeded):
        drafter.open("b")
    drafter.close("a")
    drafter.open("b")


def test_a_gate_holds_steps_until_they_are_let_go() -> None:
    gate = StepGate()
    drafter = ScriptedDrafter(perfect(law), gate=gate)
    drafter.open("s")
    job = DraftJob("s", (0, 1, 2), 2, GREEDY)

    def two_steps() -> None:
        for _ in range(2):
            drafter.advance([job])

    thread = threading.Thread(target=two_steps)
    thread.start()
    gate.wait_entered()
    assert job.tokens == []
    gate.release()
    gate.wait_entered()
    assert job.tokens == [3]
    gate.open()
    thread.join(timeout=10)
    assert job.done
    drafter.advance([DraftJob("s", (0, 1), 1, GREEDY)])  # an open gate holds nobody


def row(context: Sequence[int]) -> DraftProbs:
    return DraftProbs((len(context), 50), (0.75, 0.25))


@pytest.mark.parametrize("rule", AcceptanceRule)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drawn_drafts_come_with_what_they_were_drawn_from_where_that_counts(
    rule: AcceptanceRule, temperature: float
) -> None:
    drafter = ScriptedDrafter(drawn(row, seed=1), row=row)
    drafter.open("s")
    job = DraftJob("s", (0, 1, 2), 4, SamplingParams(temperature=temperature), rule=rule)
    for _ in range(4):
        drafter.advance([job])
    assert len(job.tokens) == 4
    assert all(token in (3 + index, 50) for index, token in enumerate(job.tokens))
    told = [row((0,) * length) for length in range(3, 7)]
    assert job.draft_probs == (told if rule is AcceptanceRule.RATIO and temperature else [])
