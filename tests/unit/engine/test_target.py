"""The target engine on a scripted runner that checks every visible row."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.local import LocalRequest, generate
from paceline.engine.target import TargetEngine, TargetOptions
from paceline.messages import Evicted, NeedTokens, Open, SamplingParams, Verified, Verify
from paceline.speculation.tree import DraftTree
from tests.fakes.toy_runner import Law, ToyRunner, cycle_law, hash_law
from tests.unit.engine.rounds import GREEDY, Owner, greedy_continuation, run

PROMPT = (1, 2, 3, 4)


def make_engine(law: Law | None = None, **limits: int) -> tuple[TargetEngine, ToyRunner]:
    runner = ToyRunner(law or hash_law(16), vocab_size=16, max_model_len=limits.pop("max_model_len", 64))
    return TargetEngine(runner, options=TargetOptions(**limits)), runner


def test_textbook_block_of_five() -> None:
    law = hash_law(16, seed=3)
    engine, runner = make_engine(law)
    owner = Owner(engine, PROMPT)
    owner.verify()

    right = greedy_continuation(law, owner.tokens, 6)
    answer = owner.verify(DraftTree.chain(right[:5]))
    assert answer.tokens == tuple(right), "all accepted: six tokens from one pass"
    assert answer.accepted_path == (1, 2, 3, 4, 5)
    assert runner.passes[-1] == (6,)

    right = greedy_continuation(law, owner.tokens, 5)
    wrong_fourth = [*right[:3], (right[3] + 1) % 16, right[4]]
    answer = owner.verify(DraftTree.chain(wrong_fourth))
    assert answer.tokens == tuple(right[:4]), "the first three, then the target's own fourth; the fifth is discarded"
    assert answer.accepted_path == (1, 2, 3)
    engine.close(owner.name)


@pytest.mark.parametrize("num_right", range(6))
def test_rows_after_none_some_and_all_of_a_chain_are_accepted(num_right: int) -> None:
    law = hash_law(16, seed=5)
    engine, runner = make_engine(law)
    owner = Owner(engine, PROMPT)
    first = owner.verify()
    assert first.kv_len == len(PROMPT)
    for _ in range(4):
        right = greedy_continuation(law, owner.tokens, 6)
        drafts = [token if index < num_right else (token + 1) % 16 for index, token in enumerate(right[:5])]
        answer = owner.verify(DraftTree.chain(drafts))
        assert answer.tokens == tuple(right[: num_right + 1])
        assert runner.prefix(engine._sessions[owner.name].kv) == tuple(owner.tokens[:-1])


def test_rows_after_a_path_through_a_tree_is_accepted() -> None:
    law = hash_law(16, seed=7)
    engine, runner = make_engine(law)
    owner = Owner(engine, PROMPT)
    owner.verify()
    for depth in range(4):
        right = greedy_continuation(law, owner.tokens, 4)
        wrong = [(token + 1) % 16 for token in right]
        # The right path lies behind wrong siblings at every level, so its rows have to move.
        paths = [[*right[:level], wrong[level]] for level in range(depth + 1)]
        block = DraftTree.from_paths([*paths, right[:depth]])
        answer = owner.verify(block)
        assert answer.tokens == tuple(right[: depth + 1])
        assert [block.token_of(node) for node in answer.accepted_path] == right[:depth]
        assert runner.prefix(engine._sessions[owner.name].kv) == tuple(owner.tokens[:-1])


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    data=st.data(),
)
def test_no_draft_changes_a_token(seed: int, temperature: float, data: st.DataObject) -> None:
    """Random, right, garbage and oversized trees: the tokens are those of plain decoding."""
    law = hash_law(16, seed=seed % 5)
    sampling = SamplingParams(temperature=temperature, seed=seed, top_p=0.95)
    plain_engine, _ = make_engine(law)
    plain = generate(plain_engine, [LocalRequest(PROMPT, sampling, 14)])[0].tokens
    engine, _ = make_engine(law, max_draft_tokens=6)
    owner = Owner(engine, PROMPT, sampling)
    while len(owner.tokens) < len(PROMPT) + 14:
        done = len(owner.tokens) - len(PROMPT)
        future = plain[done : done + 4]
        paths = data.draw(st.lists(st.lists(st.integers(-1, 16), min_size=1, max_size=4), max_size=4))
        if data.draw(st.booleans()):
            paths.insert(data.draw(st.integers(0, len(paths))), future)
        owner.verify(DraftTree.from_paths(paths))
    assert owner.tokens[len(PROMPT) :][:14] == plain
    engine.close(owner.name)
    assert engine.kv_pages_in_use == 0


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_block_size_changes_no_token_and_drafts_of_the_target_itself_are_all_accepted(
    num_draft_tokens: int, temperature: float
) -> None:
    law = hash_law(16, seed=11)
    sampling = SamplingParams(temperature=temperature, seed=9)
    engine, _ = make_engine(law)
    plain = generate(engine, [LocalRequest(PROMPT, sampling, 30)])[0]
    truth = [*PROMPT, *plain.tokens]

    def propose(context: object, depth: int) -> DraftTree:
        assert isinstance(context, list)
        return DraftTree.chain(truth[len(context) : len(context) + depth])

    drafted = generate(engine, [LocalRequest(PROMPT, sampling, 30, num_draft_tokens, propose)])[0]
    assert drafted.tokens == plain.tokens
    assert drafted.num_accepted == drafted.num_drafted
    assert plain.num_rounds == 30
    if num_draft_tokens == 4:
        assert drafted.num_rounds == 6
    assert engine.kv_pages_in_use == 0


def test_a_mixed_batch_equals_each_session_alone() -> None:
    law = hash_law(16, seed=2)
    requests = [
        LocalRequest(
            tuple((index * 7 + offset) % 16 for offset in range(1 + index * 3)),
            SamplingParams(temperature=0.3 * (index % 3), seed=index),
            10 + index,
            num_draft_tokens=index % 4,
            propose=lambda context, depth: DraftTree.chain([context[-1]] * depth),
        )
        for index in range(8)
    ]
    solo_engine, _ = make_engine(law)
    solo = [generate(solo_engine, [request])[0].tokens for request in requests]
    crowd_engine, runner = make_engine(law, max_batch_tokens=24, max_draft_tokens=8)
    crowd = [result.tokens for result in generate(crowd_engine, requests)]
    assert crowd == solo
    assert max(map(sum, runner.passes)) <= 24
    assert max(map(len, runner.passes)) > 4
    assert crowd_engine.kv_pages_in_use == 0


def test_a_long_prompt_is_fed_in_chunks_that_leave_room_for_blocks() -> None:
    law = hash_law(16, seed=4)
    engine, runner = make_engine(law, max_batch_tokens=8, max_draft_tokens=3)
    short, long = Owner(engine, PROMPT, name="short"), Owner(engine, tuple(range(15)) * 2, name="long")
    short.verify()
    del runner.passes[:]
    assert long.submit(DraftTree.chain([1, 2])) is None
    answers: list[Verified] = []
    while engine.has_work:
        if engine._sessions["short"].work is None and len(answers) < 3:
            assert short.submit(DraftTree.chain([5, 6])) is None
        for answer in engine.step():
            assert isinstance(answer, Verified)
            (short if answer.session == "short" else long).take(answer)
            answers.append(answer)
    assert runner.passes[0] == (3, 5), "the block first, then a chunk in what is left"
    assert sum(map(sum, runner.passes)) == 30 + 2 + 3 * 3
    assert [answer.session for answer in answers] == ["short", "short", "short", "long"]
    assert answers[-1].timing.batch_tokens <= 8


def test_blocks_that_do_not_fit_in_a_pass_take_turns() -> None:
    engine, runner = make_engine(max_batch_tokens=8, max_draft_tokens=3)
    owners = [Owner(engine, PROMPT, name=str(index)) for index in range(4)]
    for owner in owners:
        owner.verify()
    del runner.passes[:]
    for owner in owners:
        assert owner.submit(DraftTree.chain([1, 2, 3])) is None
    answers = run(engine)
    assert [answer.session for answer in answers] == ["0", "1", "2", "3"]
    assert runner.passes == [(4, 4), (4, 4)]


def test_a_replica_ahead_crops_and_proceeds() -> None:
    law = hash_law(16, seed=1)
    engine, _ = make_engine(law)
    owner = Owner(engine, PROMPT)
    owner.verify()
    right = greedy_continuation(law, owner.tokens, 5)
    owner.verify(DraftTree.chain(right[:4]))
    # A stop string ended the generation inside the block: the owner keeps fewer tokens than the verifier.
    owner.log.crop(len(PROMPT) + 3)
    answer = owner.verify()
    assert answer.tokens == tuple(greedy_continuation(law, owner.tokens[:-1], 1))


def test_a_replica_behind_asks_for_what_it_lacks() -> None:
    law = hash_law(16, seed=1)
    engine, _ = make_engine(law)
    owner = Owner(engine, PROMPT)
    owner.verify()
    owner.log.extend(greedy_continuation(law, owner.tokens, 3))
    answer = owner.submit()
    assert answer == NeedTokens("session", 1, owner.round, len(PROMPT) + 1)
    assert not engine.has_work
    owner.verify(catch_up=3)
    owner.log.extend(greedy_continuation(law, owner.tokens, 2))
    owner.verify(catch_up=4)


def test_a_replica_that_disagrees_is_told_the_truth() -> None:
    law = hash_law(16, seed=1)
    engine, runner = make_engine(law)
    owner = Owner(engine, PROMPT)
    owner.verify()
    owner.log.crop(2)
    owner.log.extend([9, 9, 9, 9])
    answer = owner.submit(catch_up=1)
    assert isinstance(answer, NeedTokens)
    assert answer.have_len in (0, 5)
    owner.verify(catch_up=6)
    assert runner.prefix(engine._sessions[owner.name].kv) == tuple(owner.tokens[:-1])


def test_catch_up_that_only_repeats_keeps_the_rows() -> None:
    engine, runner = make_engine()
    owner = Owner(engine, PROMPT)
    owner.verify()
    del runner.passes[:]
    owner.verify(catch_up=len(owner.tokens))
    assert runner.passes == [(1,)]


def test_an_unknown_session_is_evicted() -> None:
    engine, _ = make_engine()
    assert engine.submit(Verify("nobody", 3, 5, 4, 0)) == Evicted("nobody", 3, 5)
    assert not engine.close("nobody")


def test_a_session_opened_again_keeps_the_rows_of_the_common_prefix() -> None:
    engine, runner = make_engine()
    owner = Owner(engine, PROMPT)
    owner.verify()
    del runner.passes[:]
    opened = engine.open(Open("session", 2, (*PROMPT[:3], 9, 9), 3, GREEDY))
    assert (opened.epoch, opened.kv_len, opened.cached_len) == (2, 3, 3)
    assert not engine.has_work
    again = Owner(engine, (*PROMPT[:3], 9, 9))
    again.verify()
    assert runner.passes == [(2,)]
    assert runner.prefix(engine._sessions["session"].kv) == (*PROMPT[:3], 9, 9)


def test_blocks_shrink_to_the_end_of_the_context() -> None:
    engine, _ = make_engine(cycle_law([5], vocab_size=16), max_model_len=12)
    owner = Owner(engine, tuple(range(9)))
    owner.verify()
    answer = owner.verify(DraftTree.chain([5] * 5))
    assert answer.accepted_path == (1,)
    assert len(owner.tokens) == 12
    refused = owner.submit()
    assert refused is not None
    assert not engine.has_work
    owner.round = 0
    result = generate(engine, [LocalRequest(tuple(range(9)), GREEDY, 100, 5, lambda _, k: DraftTree.chain([5] * k))])
    assert result[0].tokens == [5, 5, 5]
