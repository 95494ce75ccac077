"""What the target engine refuses, and that one session's fault stays its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from paceline.engine.local import LocalRequest, generate
from paceline.engine.runner import SequencePass
from paceline.engine.target import TargetEngine, TargetOptions
from paceline.errors import CapacityExceeded, ConfigurationError, InvalidArgument
from paceline.messages import Failed, Open, SamplingParams, Verified, Verify
from paceline.speculation.tree import DraftTree
from tests.fakes.toy_runner import ToyRunner, hash_law, poisoned_law
from tests.unit.engine.rounds import GREEDY, Owner, greedy_continuation, run

PROMPT = (1, 2, 3, 4)
LAW = hash_law(16, seed=3)


def open_command(tokens: Sequence[int]) -> Open:
    return Open("session", 1, tuple(tokens), len(tokens), GREEDY)


@pytest.mark.parametrize(
    ("command", "field", "message"),
    [
        (open_command(()), "prompt", "empty"),
        (open_command(range(16)), "prompt", r"16 tokens; the context of 16 leaves room for at most 15"),
        (open_command((1, 16)), "prompt", r"token id 16 is outside \[0, 16\)"),
        (open_command((-1,)), "prompt", r"token id -1 is outside \[0, 16\)"),
    ],
)
def test_open_refuses_with_field_and_limit(command: Open, field: str, message: str) -> None:
    engine = TargetEngine(ToyRunner(LAW, 16, max_model_len=16))
    with pytest.raises(InvalidArgument, match=message) as caught:
        engine.open(command)
    assert caught.value.field == field
    assert engine.num_sessions == 0


def test_a_full_house_refuses_and_a_known_session_may_still_be_taken_over() -> None:
    engine = TargetEngine(ToyRunner(LAW, 16), options=TargetOptions(max_sessions=1))
    Owner(engine, PROMPT)
    with pytest.raises(CapacityExceeded, match="all 1 session slots"):
        engine.open(Open("other", 1, PROMPT, 4, GREEDY))
    assert engine.open(Open("session", 2, PROMPT, 4, GREEDY)).epoch == 2
    engine.close("session")
    engine.open(Open("other", 1, PROMPT, 4, GREEDY))


def test_a_block_that_can_never_fit_in_a_pass_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match=r"max_batch_tokens \(8\) must exceed max_draft_tokens \(8\)"):
        TargetEngine(ToyRunner(LAW, 16), options=TargetOptions(max_batch_tokens=8, max_draft_tokens=8))


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (Verify("session", 1, 1, 0, 0), "base_len"),
        (Verify("session", 1, 1, 2, 0, (1, 2, 3)), "base_len"),
        (Verify("session", 1, 1, 512, 0), "base_len"),
        (Verify("session", 1, 1, 4, 0, (1, 99)), "catch_up"),
    ],
)
def test_a_malformed_verify_fails_and_has_no_effect(command: Verify, field: str) -> None:
    engine = TargetEngine(ToyRunner(LAW, 16))
    owner = Owner(engine, PROMPT)
    answer = engine.submit(command)
    assert isinstance(answer, Failed)
    assert (answer.failure.code, answer.failure.field, answer.command_id) == ("invalid_argument", field, 1)
    owner.verify()


def test_padded_columns_are_never_chosen_and_their_ids_refused() -> None:
    runner = ToyRunner(hash_law(16, seed=3, scale=4.0), 16)
    engine = TargetEngine(runner, vocab_size=6)
    owner = Owner(engine, (1, 2))
    for _ in range(20):
        answer = owner.verify(DraftTree.from_paths([[7], [15], [1]]))
        assert set(answer.accepted_path) <= {3}
    assert max(owner.tokens) < 6


def test_drafts_outside_the_vocabulary_and_too_many_are_cut() -> None:
    engine = TargetEngine(runner := ToyRunner(LAW, 16), options=TargetOptions(max_draft_tokens=3))
    owner = Owner(engine, PROMPT)
    owner.verify()
    right = greedy_continuation(LAW, owner.tokens, 6)
    block = DraftTree.from_paths([[-1, 3], [16], [1 << 40], right])
    answer = owner.verify(block)
    assert runner.passes[-1] == (4,)
    assert answer.tokens == tuple(right[:4])
    assert [block.token_of(node) for node in answer.accepted_path] == right[:3]


def test_a_row_that_is_not_finite_fails_its_session_only() -> None:
    law = poisoned_law(LAW, lambda prefix: prefix[0] == 7 and len(prefix) >= 6)
    engine = TargetEngine(ToyRunner(law, 16))
    sick, well = Owner(engine, (7, 1, 2, 3), name="sick"), Owner(engine, PROMPT, name="well")
    for _ in range(4):
        for owner in (sick, well):
            owner.submit()
        for answer in run(engine):
            owner = sick if answer.session == "sick" else well
            if isinstance(answer, Failed):
                assert owner is sick
                assert answer.failure.code == "model_error"
                assert "position 6" in answer.failure.message
            else:
                owner.take(answer)
    assert len(well.tokens) == len(PROMPT) + 4
    assert len(sick.tokens) == 4 + 2
    alone = TargetEngine(ToyRunner(LAW, 16))
    again = Owner(alone, PROMPT)
    for _ in range(4):
        again.verify()
    assert again.tokens == well.tokens


def test_a_row_that_is_not_finite_on_a_discarded_draft_does_no_harm() -> None:
    law = poisoned_law(LAW, lambda prefix: prefix[-1] == 9)
    engine = TargetEngine(ToyRunner(law, 16))
    owner = Owner(engine, PROMPT)
    right = greedy_continuation(law, PROMPT, 2)
    assert 9 not in right
    assert owner.verify(DraftTree.from_paths([[9, 9], right[:1]])).tokens == tuple(right)


class BrokenRunner(ToyRunner):
    """Raises for every batch that holds a poisoned token."""

    def forward(self, batch: Sequence[SequencePass], *, wait: bool = True) -> list[torch.Tensor]:
        if any(13 in part.tokens for part in batch):
            raise RuntimeError("kernel fault")
        return super().forward(batch)


def test_a_pass_that_breaks_fails_only_the_session_that_breaks_it() -> None:
    engine = TargetEngine(BrokenRunner(LAW, 16))
    sick, well = Owner(engine, (13, 1), name="sick"), Owner(engine, PROMPT, name="well")
    sick.submit()
    well.submit()
    answers = {answer.session: answer for answer in run(engine)}
    failed, verified = answers["sick"], answers["well"]
    assert isinstance(failed, Failed)
    assert "RuntimeError: kernel fault" in failed.failure.message
    assert isinstance(verified, Verified)
    well.take(verified)
    well.verify()
    engine.close("sick")
    engine.close("well")
    assert engine.kv_pages_in_use == 0


def test_an_exhausted_pool_costs_the_later_session_its_rows_and_nobody_a_token() -> None:
    engine = TargetEngine(ToyRunner(LAW, 16, num_pages=7, page_tokens=4))
    prompts = [tuple(range(12)), tuple(range(1, 13))]
    propose = lambda _, depth: DraftTree.chain([1, 2, 3][:depth])  # noqa: E731
    results = generate(engine, [LocalRequest(prompt, GREEDY, 9, 3, propose) for prompt in prompts])
    assert [result.tokens for result in results] == [greedy_continuation(LAW, prompt, 9) for prompt in prompts]
    assert engine.scheduling.preemptions > 0
    assert engine.kv_pages_in_use == 0


def test_a_nearly_full_pool_costs_the_block_and_not_the_session() -> None:
    runner = ToyRunner(LAW, 16, num_pages=2, page_tokens=4)
    engine = TargetEngine(runner)
    owner = Owner(engine, PROMPT)
    owner.verify()
    right = greedy_continuation(LAW, owner.tokens, 6)
    answer = owner.verify(DraftTree.chain(right[:5]))
    assert answer.tokens == (right[0],)
    assert runner.passes[-1] == (1,)


def test_closing_a_queued_session_takes_it_out_of_the_queue() -> None:
    engine = TargetEngine(ToyRunner(LAW, 16))
    owner = Owner(engine, PROMPT)
    owner.submit()
    assert engine.close(owner.name)
    assert not engine.has_work
    assert engine.step() == []
    engine.check_integrity()


def test_a_command_submitted_again_replaces_the_queued_one() -> None:
    engine = TargetEngine(ToyRunner(LAW, 16))
    owner = Owner(engine, PROMPT)
    owner.submit(DraftTree.chain([1]))
    owner.submit()
    (answer,) = run(engine)
    assert isinstance(answer, Verified)
    assert answer.round == 2


def test_eos_is_masked_until_min_tokens() -> None:
    law = hash_law(16, seed=3)
    plain = greedy_continuation(law, PROMPT, 1)[0]
    engine = TargetEngine(ToyRunner(law, 16), eos_token_ids=(plain,))
    owner = Owner(engine, PROMPT, SamplingParams(temperature=0.0, min_tokens=3))
    for _ in range(3):
        assert owner.verify(DraftTree.chain([plain])).accepted_path == ()
    assert plain not in owner.tokens[len(PROMPT) :]
