"""What happens where a generation ends inside an accepted block, through the whole fleet with a drafter that is right.

The prompt has four tokens; what the target writes is spelt in letters, "." for end-of-sequence.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from paceline.client import AsyncClient
from paceline.drafting.method import DraftMethod
from paceline.messages import FinishReason, SamplingParams, TokenOrigin
from paceline.session.store import SessionState
from tests.fakes.scripted_drafter import ScriptedDrafter, eos_at, perfect, put_at
from tests.fakes.toy_runner import Law, script_law, table_law
from tests.integration.fleet import EOS, GREEDY, VOCAB, Fleet, MethodFactory, generate, perfect_method, target_law

PROMPT = [25, 25, 25, 25]
START = len(PROMPT)


def ids(text: str) -> list[int]:
    return [EOS if letter == "." else ord(letter) - ord("a") for letter in text]


def writes(text: str) -> Law:
    return script_law(ids(text), START, EOS, VOCAB)


@contextlib.asynccontextmanager
async def fleet_of(
    folder: Path, law: Law, size: int, method: MethodFactory | None = None
) -> AsyncIterator[tuple[Fleet, AsyncClient]]:
    settings = {"num_speculative_tokens": size}
    async with (
        Fleet.start(folder, law, method=method or perfect_method(law), settings=settings) as fleet,
        fleet.client() as client,
    ):
        yield fleet, client


@pytest.mark.parametrize("size", [0, 2, 5, 8])
async def test_nothing_follows_a_stop_id(tmp_path: Path, size: int) -> None:
    async with fleet_of(tmp_path, writes("abscdefgh"), size) as (fleet, client):
        sampling = SamplingParams(temperature=0.0, stop_token_ids=tuple(ids("s")), top_logprobs=0)
        run = await generate(client, fleet.request(PROMPT, max_tokens=5, sampling=sampling))
        assert (run.tokens, run.text, run.reason) == (ids("abs"), "ab", FinishReason.STOP)
        assert sum(len(chunk.logprobs) for chunk in run.chunks) == 3


@pytest.mark.parametrize("size", [0, 2, 5, 8])
async def test_the_length_wins_if_it_comes_first(tmp_path: Path, size: int) -> None:
    async with fleet_of(tmp_path, writes("abcsdef"), size) as (fleet, client):
        sampling = SamplingParams(temperature=0.0, stop_token_ids=tuple(ids("s")))
        run = await generate(client, fleet.request(PROMPT, max_tokens=2, sampling=sampling))
        assert (run.tokens, run.text, run.reason) == (ids("ab"), "ab", FinishReason.LENGTH)


@pytest.mark.parametrize("size", [0, 8])
async def test_a_stop_string_ends_alike_at_each_position_of_a_block(tmp_path: Path, size: int) -> None:
    for position in range(1, 10):
        text = "abcdefghijkl"
        law = writes(text[:position] + "xyz" + text[position:])
        async with fleet_of(tmp_path / str(position), law, size) as (fleet, client):
            run = await generate(client, fleet.request(PROMPT, stop=("xyz",)))
            assert (run.text, run.reason) == (text[:position], FinishReason.STOP)
            assert run.tokens == ids(text[:position] + "xyz")
            assert run.finished.stop_string == "xyz"


@pytest.mark.parametrize("size", [0, 3, 8])
async def test_a_stop_string_that_is_never_completed_is_flushed_at_the_end(tmp_path: Path, size: int) -> None:
    async with fleet_of(tmp_path, writes("abxy."), size) as (fleet, client):
        run = await generate(client, fleet.request(PROMPT, stop=("xyz",)))
        assert (run.text, run.reason) == ("abxy", FinishReason.STOP)


@pytest.mark.parametrize("size", [0, 2, 3, 8])
async def test_what_was_drafted_after_the_end_never_leaves(tmp_path: Path, size: int) -> None:
    law = writes("x.")
    # The target would write end-of-sequence for ever; the drafter goes on with "y".
    drafter = lambda: ScriptedDrafter(put_at(target_law(law), 2, ids("y")[0]))  # noqa: E731
    async with fleet_of(tmp_path, law, size, drafter) as (fleet, client):
        run = await generate(client, fleet.request(PROMPT))
        assert (run.tokens, run.text, run.reason) == (ids("x."), "x", FinishReason.STOP)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
async def test_a_rejected_end_of_sequence_has_no_effect(tmp_path: Path, size: int) -> None:
    law = writes("abcdefgh.")

    def drafter() -> DraftMethod:
        return ScriptedDrafter(eos_at(target_law(law), min(1, size - 1), EOS))

    async with fleet_of(tmp_path, law, size, drafter) as (fleet, client):
        run = await generate(client, fleet.request(PROMPT))
        assert (run.tokens, run.text) == (ids("abcdefgh."), "abcdefgh")


@pytest.mark.parametrize("size", [0, 1, 4, 8])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 6, 7])
async def test_the_record_holds_what_the_client_got(tmp_path: Path, size: int, max_tokens: int) -> None:
    async with fleet_of(tmp_path, writes("abcdefghijklm"), size) as (fleet, client):
        run = await generate(client, fleet.request(PROMPT, max_tokens=max_tokens, session="turn-1"))
        assert (len(run.tokens), run.reason) == (max_tokens, FinishReason.LENGTH)
        record = await client.get_session("turn-1")
        assert list(record.tokens) == PROMPT + run.tokens
        assert record.committed_len == START + max_tokens
        assert (record.state, record.finish_reason) == (SessionState.FINISHED, "length")
        assert record.generation_start == START


@pytest.mark.parametrize("size", [0, 2, 8])
async def test_min_tokens_masks_the_end_at_every_position(tmp_path: Path, size: int) -> None:
    # Both want to end after three tokens; the second choice is "a" (id 0).
    async with fleet_of(tmp_path, writes("bcd."), size) as (fleet, client):
        sampling = SamplingParams(temperature=0.0, min_tokens=8)
        run = await generate(client, fleet.request(PROMPT, sampling=sampling))
        assert (run.text, run.tokens[-1]) == ("bcdaaaaa", EOS)
        assert len(run.tokens) == 9


async def test_textbook_example_through_the_fleet(tmp_path: Path) -> None:
    """A block of five: all accepted gives six tokens from one pass; the fourth wrong gives three and its own."""
    law = writes("abcdefghijklmnopqrstuvwxy")
    async with fleet_of(tmp_path / "right", law, 5) as (fleet, client):
        run = await generate(client, fleet.request(PROMPT, max_tokens=13))
        assert [len(chunk.token_ids) for chunk in run.chunks] == [1, 6, 6]
        accepted, own = [TokenOrigin.ACCEPTED] * 5, [TokenOrigin.BONUS]
        assert [list(chunk.origins) for chunk in run.chunks] == [[TokenOrigin.PLAIN], accepted + own, accepted + own]
    fourth_wrong = lambda: ScriptedDrafter(put_at(target_law(law), 3, ids("z")[0]))  # noqa: E731
    async with fleet_of(tmp_path / "wrong", law, 5, fourth_wrong) as (fleet, client):
        request = fleet.request(PROMPT, max_tokens=12)
        fleet.drafters[0].model.script = put_at(target_law(law), 3, ids("z")[0])  # type: ignore[attr-defined]
        run = await generate(client, request)
        assert run.tokens == ids("abcdefghijkl")
        assert TokenOrigin.RECOVERED in run.origins
        recovered = [chunk for chunk in run.chunks if chunk.origins[-1] is TokenOrigin.RECOVERED]
        assert all(chunk.token_ids[-1] != ids("z")[0] for chunk in recovered)


@pytest.mark.parametrize("size", [0, 1, 4])
async def test_the_most_likely_token_wins_over_a_likely_draft(tmp_path: Path, size: int) -> None:
    law = table_law({token: {0: 0.3, 1: 0.5, 2: 0.2} for token in range(VOCAB)}, VOCAB)
    drafter = lambda: ScriptedDrafter(lambda context, sampling, depth: [0] * depth)  # noqa: E731
    async with fleet_of(tmp_path, law, size, drafter) as (fleet, client):
        run = await generate(client, fleet.request(PROMPT, max_tokens=6))
        assert run.tokens == [1] * 6
        assert run.evidence.accepted_tokens == 0


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
async def test_tiny_temperatures_are_greedy(tmp_path: Path, temperature: float) -> None:
    law = table_law({token: {0: 0.3, 1: 0.5, 2: 0.2} for token in range(VOCAB)}, VOCAB)
    async with fleet_of(tmp_path, law, 4) as (fleet, client):
        sampling = SamplingParams(temperature=temperature, top_p=0.5)
        run = await generate(client, fleet.request(PROMPT, max_tokens=6, sampling=sampling))
        assert run.tokens == [1] * 6


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(temperature=1.3, min_p=0.05),
    ],
    ids=["greedy", "plain", "top_k", "min_p"],
)
async def test_every_draft_of_the_target_itself_is_accepted(tmp_path: Path, sampling: SamplingParams) -> None:
    law = table_law({token: {(token + step) % EOS: 0.2 for step in range(1, 6)} for token in range(VOCAB)}, VOCAB)
    async with fleet_of(tmp_path, law, 4) as (fleet, client):
        run = await generate(client, fleet.request(PROMPT, max_tokens=41, sampling=sampling, seed=5))
        evidence = run.evidence
        assert evidence.accepted_tokens == evidence.draft_tokens > 0
        assert evidence.drafted_per_position == evidence.accepted_per_position
        assert evidence.tokens_per_target_pass > 4


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.9, repetition_penalty=1.8),
        SamplingParams(temperature=0.9, presence_penalty=1.5),
        SamplingParams(temperature=0.9, frequency_penalty=0.7),
        SamplingParams(temperature=0.0, logit_bias={0: -100.0, 3: 5.0}),
    ],
    ids=["repetition", "presence", "frequency", "bias"],
)
async def test_processed_rows_equal_plain_decoding(tmp_path: Path, sampling: SamplingParams) -> None:
    law = table_law({token: dict.fromkeys(range(5), 0.2) for token in range(VOCAB)}, VOCAB)
    # The drafter knows nothing of penalties: it proposes what the bare law would write.
    drafter = lambda: ScriptedDrafter(perfect(lambda context, _: len(context) % 5))  # noqa: E731
    async with fleet_of(tmp_path, law, 4, drafter) as (fleet, client):
        runs = [
            await generate(
                client,
                fleet.request(PROMPT, max_tokens=24, sampling=sampling, num_speculative_tokens=size, seed=3),
            )
            for size in (0, 1, 4, 8)
        ]
        assert all(run.tokens == runs[0].tokens for run in runs)
        assert runs[2].evidence.draft_tokens > 0
