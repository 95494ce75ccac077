"""Simulated models: the table of tokens, the time of a pass, and rounds through the real engine and drafting method."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice

import pytest
import torch

from paceline.drafting.draft_model import DraftModelMethod
from paceline.drafting.local import LocalDrafter
from paceline.drafting.torch_runner import TorchDraftRunner
from paceline.engine.local import LocalRequest, generate
from paceline.engine.runner import SequencePass
from paceline.engine.simulated.pass_time import Alarm, PassTime
from paceline.engine.simulated.runner import SimulatedModel, SimulatedRunner
from paceline.engine.simulated.text import SimulatedText
from paceline.engine.target import TargetEngine
from paceline.errors import ConfigurationError
from paceline.messages import SamplingParams
from paceline.speculation.tree import DraftTree
from tests.unit.engine.rounds import GREEDY, Owner

VOCAB = 40
EOS = (0, 7)
NO_TIME = PassTime(0.0, 0.0)


def _runner(agreement: float = 1.0, seed: int = 3, pass_time: PassTime = NO_TIME) -> SimulatedRunner:
    return SimulatedRunner(
        SimulatedModel(pass_time, seed, agreement),
        vocab_size=VOCAB,
        eos_token_ids=EOS,
        kv_bytes=1 << 20,
        max_sessions=8,
        max_model_len=2048,
    )


def _target(runner: SimulatedRunner | None = None) -> TargetEngine:
    return TargetEngine(runner or _runner(), eos_token_ids=EOS)


def _written(prompt: Sequence[int], num_tokens: int, seed: int = 3) -> list[int]:
    """What the table says, without any engine."""
    text = SimulatedText(tuple(token for token in range(VOCAB) if token not in EOS), seed)
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(text.next_token(text.after(text.start, tokens)[-1]))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.5, seed=11)], ids=["greedy", "sampled"])
def test_plain_decoding_writes_the_table_and_never_ends_by_itself(sampling: SamplingParams) -> None:
    (result,) = generate(_target(), [LocalRequest((5, 6), sampling, max_tokens=150)], eos_token_ids=EOS)
    assert result.tokens == _written((5, 6), 150)
    assert len(set(result.tokens)) == VOCAB - len(EOS)


def test_another_seed_or_prompt_or_position_gives_another_text() -> None:
    assert _written((5,), 20) != _written((6,), 20)
    assert _written((5,), 20) != _written((5,), 20, seed=4)
    assert _written((5, 5), 20) != _written((5,), 20)


def test_a_tree_is_judged_along_its_paths_and_rejected_rows_leave_no_trace() -> None:
    owner = Owner(_target(), (5, 6))
    truth = _written((5, 6), 12)
    other = (truth[0] + 1) % VOCAB
    tree = DraftTree.from_paths([(other, 3, 4), (truth[0], truth[1], (truth[2] + 1) % VOCAB)])
    for block in (tree, DraftTree.chain((truth[3], truth[4])), DraftTree.chain((1, 2, 3)), DraftTree.chain(())):
        owner.verify(block)
    assert owner.tokens[2:] == truth[: len(owner.tokens) - 2]
    assert len(owner.tokens) - 2 == 3 + 3 + 1 + 1


def test_a_drafter_agrees_at_the_stated_rate_whatever_was_accepted_before() -> None:
    method = DraftModelMethod(TorchDraftRunner(_runner(agreement=0.8)), eos_token_ids=EOS)
    drafter = LocalDrafter(method, GREEDY)
    request = LocalRequest((5, 6), GREEDY, max_tokens=400, num_draft_tokens=4, propose=drafter)
    (result,) = generate(_target(), [request])
    assert result.tokens == _written((5, 6), 400)
    # some 120 rounds: the mean of a truncated geometric number, (1 - 0.8^5) / 0.2 = 3.36, give or take 0.15
    assert len(result.tokens) / result.num_rounds == pytest.approx(3.36, abs=0.3)
    for accepted in range(4):
        reached = sum(1 for tokens in result.rounds if tokens > accepted)
        passed = sum(1 for tokens in result.rounds if tokens > accepted + 1)
        assert passed / reached == pytest.approx(0.8, abs=0.1)


def test_the_thread_waits_for_the_stated_time_and_uses_no_cpu_for_it() -> None:
    runner = _runner(pass_time=PassTime(20.0, 2.0))
    assert PassTime(20.0, 2.0).seconds(5) == pytest.approx(0.030)
    owner = Owner(_target(runner), (5, 6, 7, 8, 9))
    started_s, cpu_s = time.perf_counter(), time.thread_time()
    owner.verify()
    assert time.perf_counter() - started_s >= 0.030
    assert time.thread_time() - cpu_s < 0.025


def test_passes_that_nobody_waits_for_are_done_one_after_the_other() -> None:
    runner = _runner(pass_time=PassTime(20.0, 0.0))
    kv = runner.new_sequence()
    started_s = time.perf_counter()
    tokens: list[int] = []
    chosen: torch.Tensor | None = None
    for left in (2, 1, 0):
        kv.reserve(1)
        part = SequencePass(kv, (5 if chosen is None else 0,), num_logits=1, last_on_device=chosen)
        (logits,) = runner.forward([part], wait=False)
        if left == 2:
            handed_over_s = time.perf_counter() - started_s
        kv.commit(1)
        chosen = logits.argmax(-1)
        tokens += chosen.tolist()
    runner.synchronize()
    assert time.perf_counter() - started_s >= 0.060
    assert handed_over_s < 0.020
    kv.free()
    kv = runner.new_sequence()
    for token, expected in zip((5, *tokens), tokens, strict=False):
        kv.reserve(1)
        (logits,) = runner.forward([SequencePass(kv, (token,), num_logits=1)])
        kv.commit(1)
        assert int(logits.argmax()) == expected


def test_a_deadline_in_the_past_is_no_wait() -> None:
    started_s = time.perf_counter()
    Alarm().wait_until(started_s - 1.0)
    assert time.perf_counter() - started_s < 0.05


def test_an_alarm_that_was_late_before_is_never_early() -> None:
    alarm = Alarm()
    for _ in range(20):
        deadline_s = time.perf_counter() + 0.001
        alarm.wait_until(deadline_s)
        assert time.perf_counter() >= deadline_s


def test_hidden_states_are_refused_and_so_is_a_vocabulary_without_choice() -> None:
    runner = _runner()
    with pytest.raises(ConfigurationError, match="set served_features to none"):
        runner.features(runner.new_sequence())
    with pytest.raises(ConfigurationError, match="nothing to write"):
        SimulatedRunner(SimulatedModel(NO_TIME), vocab_size=2, eos_token_ids=(1,), kv_bytes=1 << 20, max_sessions=1)


def test_agreements_are_those_of_the_two_texts() -> None:
    target, drafter = SimulatedText(tuple(range(VOCAB)), 3), SimulatedText(tuple(range(VOCAB)), 3, 0.7)
    tokens, found = [5, 6], []
    for _ in range(200):
        state = target.after(target.start, tokens)[-1]
        found.append(drafter.next_token(state) == target.next_token(state))
        tokens.append(target.next_token(state))
    assert list(islice(drafter.agreements((5, 6)), 200)) == found
    assert 0.6 < sum(found) / 200 < 0.8
