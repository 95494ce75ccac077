"""Going on with a session on another gateway, or on the same one: no token twice, none lost, the same text."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paceline_gateway.service import GatewayService

from paceline.client import AsyncClient
from paceline.errors import DataLoss, Fenced, InvalidArgument, NotFound, SessionBusy, Unavailable
from paceline.generation import Chunk, Finished, GenerationEvent, Started
from paceline.messages import AcceptanceRule, FinishReason, SamplingParams, TokenOrigin
from paceline.session.memory_store import MemoryStore
from paceline.session.store import Append, AppendOutcome, SessionRecord, SessionState
from paceline.text.request import ResumeRequest
from tests.fakes.toy_runner import script_law
from tests.integration.fleet import EOS, VOCAB, Fleet, generate, perfect_method, until
from tests.integration.paced import EXPECTED, LAW, MAX_TOKENS, PROMPT, request_of, streaming
from tests.integration.test_api_keys import ALICE, keys_file

START = len(PROMPT)


def point(tokens: Sequence[int], session: str = "s") -> ResumeRequest:
    return ResumeRequest.after(session, START, tokens)


async def read(events: AsyncIterator[GenerationEvent]) -> tuple[Started, list[Chunk], Finished]:
    started, *chunks, finished = [event async for event in events]
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    only_chunks = [chunk for chunk in chunks if isinstance(chunk, Chunk)]
    assert len(only_chunks) == len(chunks)
    for chunk in only_chunks:
        assert len(chunk.token_ids) == len(chunk.origins) == len(chunk.text_lengths)
        assert sum(chunk.text_lengths) == len(chunk.text)
    return started, only_chunks, finished


def tokens_of(chunks: Sequence[GenerationEvent]) -> list[int]:
    return [token for chunk in chunks if isinstance(chunk, Chunk) for token in chunk.token_ids]


def text_of(chunks: Sequence[GenerationEvent]) -> str:
    return "".join(chunk.text for chunk in chunks if isinstance(chunk, Chunk))


@contextlib.asynccontextmanager
async def two_gateways(folder: Path, **options: Any) -> AsyncIterator[tuple[Fleet, Any, GatewayService, AsyncClient]]:
    """A stream at the test's pace through one gateway, and a client of another one."""
    merged: dict[str, Any] = {"store": MemoryStore(), "request": {"session": "s"}, **options}
    async with (
        streaming(folder, **merged) as (fleet, stream),
        fleet.another_gateway() as (other, address),
        AsyncClient(address, resume=None) as client,
    ):
        yield fleet, stream, other, client


@pytest.mark.parametrize("lacks", [0, 1, 4])
@pytest.mark.parametrize("count", [1, 6, 31])
async def test_another_gateway_goes_on_and_the_first_one_stops(tmp_path: Path, count: int, lacks: int) -> None:
    async with two_gateways(tmp_path) as (_fleet, stream, _other, client):
        await stream.tokens(count)
        had = tokens_of(stream.events)
        kept = had[: max(len(had) - lacks, 0)]
        resumed = client.resume(point(kept))
        assert isinstance(await anext(resumed), Started)
        with pytest.raises(Fenced):
            await stream.rest()
        assert tokens_of(stream.events) == had  # nothing came after the take-over
        chunks = [event async for event in resumed]
        assert kept + tokens_of(chunks) == EXPECTED
        finished = chunks[-1]
        assert isinstance(finished, Finished)
        assert (finished.finish_reason, finished.completion_tokens) == (FinishReason.LENGTH, MAX_TOKENS)
        # What was recorded comes first, marked as that; the evidence is of the rest alone.
        num_recorded = [origin for c in chunks if isinstance(c, Chunk) for origin in c.origins].count(
            TokenOrigin.RECORDED
        )
        assert num_recorded == len(had) - len(kept)
        assert finished.evidence.target_passes > 0
        assert finished.evidence.accepted_tokens <= MAX_TOKENS - count


async def test_the_record_shows_the_new_owner(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (fleet, stream, _other, client):
        await stream.tokens(6)
        before = await client.get_session("s")
        resumed = client.resume(point(tokens_of(stream.events)))
        started = await anext(resumed)
        assert started == Started("s", "toy", START, 4)
        now = await client.get_session("s")
        assert now.state is SessionState.RUNNING
        assert now.epoch > before.epoch
        async with fleet.client() as first:
            with pytest.raises(SessionBusy, match="Resume"):
                await generate(first, request_of(fleet, session="s"))
        stream.pace.open()
        async for _ in resumed:
            pass
        record = await client.get_session("s")
        assert (record.state, list(record.tokens)) == (SessionState.FINISHED, PROMPT + EXPECTED)
        with pytest.raises(Fenced):
            await stream.rest()


async def test_the_same_gateway_goes_on(tmp_path: Path) -> None:
    async with streaming(tmp_path, request={"session": "s"}) as (fleet, stream), fleet.client() as client:
        await stream.tokens(11)
        had = tokens_of(stream.events)
        resumed = client.resume(point(had))
        await anext(resumed)
        with pytest.raises(Fenced):
            await stream.rest()
        assert had + tokens_of([event async for event in resumed]) == EXPECTED


async def test_a_client_that_left_comes_back(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (fleet, stream, _other, client):
        await stream.tokens(11)
        had = tokens_of(stream.events)
        await stream.leave()
        stream.pace.open()
        await until(lambda: not fleet.gateway.sessions.actors)
        assert (await client.get_session("s")).state is SessionState.CANCELLED
        _, chunks, _ = await read(client.resume(point(had)))
        assert had + tokens_of(chunks) == EXPECTED


@pytest.mark.parametrize("kept", [0, 7, MAX_TOKENS])
async def test_of_an_ended_generation_the_rest_is_told_again(tmp_path: Path, kept: int) -> None:
    async with two_gateways(tmp_path) as (_fleet, stream, _other, client):
        run = await stream.rest()
        epoch = (await client.get_session("s")).epoch
        _, chunks, finished = await read(client.resume(point(EXPECTED[:kept])))
        assert tokens_of(chunks) == EXPECTED[kept:]
        assert run.text.endswith(text_of(chunks))
        assert finished.finish_reason is run.reason
        assert (finished.prompt_tokens, finished.completion_tokens) == (START, MAX_TOKENS)
        assert (await client.get_session("s")).epoch == epoch  # nobody had to take it over


async def test_without_a_place_everything_is_told(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (_fleet, stream, _other, client):
        await stream.rest()
        _, chunks, _ = await read(client.resume(ResumeRequest("s")))
        assert tokens_of(chunks) == EXPECTED


async def test_text_and_stop_string_are_cut_at_the_same_places(tmp_path: Path) -> None:
    letters = [ord(letter) - ord("a") for letter in "abcxyabxyzcd"]
    law = script_law(letters, 4, EOS, VOCAB)
    prompt = [25] * 4
    async with (
        Fleet.start(tmp_path, law, method=perfect_method(law), store=MemoryStore()) as fleet,
        fleet.another_gateway() as (_, address),
        AsyncClient(address, resume=None) as other,
        fleet.client() as client,
    ):
        request = fleet.request(prompt, stop=("xyz",), session="s")
        run = await generate(client, request)
        assert (run.text, run.finished.stop_string) == ("abcxyab", "xyz")
        texts = [text for chunk in run.chunks for text in pieces(chunk)]
        for kept in range(len(run.tokens) + 1):
            # Ended, and as if its gateway had died somewhere before the end.
            for recorded in {len(run.tokens), max(kept - 1, 0), kept}:
                await pretend(fleet, recorded)
                _, chunks, finished = await read(other.resume(ResumeRequest.after("s", 4, run.tokens[:kept])))
                assert tokens_of(chunks) == run.tokens[kept:]
                assert [text for chunk in chunks for text in pieces(chunk)] == texts[kept:]
                assert (finished.finish_reason, finished.stop_string) == (FinishReason.STOP, "xyz")
                assert finished.completion_tokens == len(run.tokens)


def pieces(chunk: Chunk) -> list[str]:
    ends = [sum(chunk.text_lengths[: n + 1]) for n in range(len(chunk.text_lengths))]
    return [chunk.text[end - length : end] for end, length in zip(ends, chunk.text_lengths, strict=True)]


async def pretend(fleet: Fleet, num_generated: int, session: str = "s") -> None:
    """The record as a gateway leaves it that dies after so many generated tokens."""
    store = fleet.gateway.store
    record = await store.get(session)
    assert record is not None
    known = record.tokens[: record.generation_start + num_generated]
    running = replace(
        record, epoch=record.epoch + 1, owner="dead", tokens=known, state=SessionState.RUNNING, finish_reason=""
    )
    assert await store.put(running) is AppendOutcome.APPLIED


async def test_a_record_that_lacks_only_its_end_is_finished(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (fleet, stream, _other, client):
        await stream.rest()
        await pretend(fleet, MAX_TOKENS)
        assert (await client.get_session("s")).state is SessionState.RUNNING
        _, chunks, finished = await read(client.resume(point(EXPECTED)))
        assert not chunks
        assert finished.finish_reason is FinishReason.LENGTH
        record = await client.get_session("s")
        assert (record.state, record.finish_reason) == (SessionState.FINISHED, "length")


async def test_a_client_ahead_of_the_record_is_caught_up_in_silence(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (fleet, stream, _other, client):
        await stream.rest()
        await pretend(fleet, 6)
        started, chunks, finished = await read(client.resume(point(EXPECTED[:17])))
        assert started.prompt_tokens == START
        assert tokens_of(chunks) == EXPECTED[17:]
        assert chunks[0].next_token - len(chunks[0].token_ids) == START + 17
        assert finished.completion_tokens == MAX_TOKENS
        record = await client.get_session("s")
        assert list(record.tokens) == PROMPT + EXPECTED


@pytest.mark.parametrize("recorded", [6, 17, MAX_TOKENS])
async def test_a_client_with_other_tokens_is_told_so(tmp_path: Path, recorded: int) -> None:
    async with two_gateways(tmp_path) as (fleet, stream, _other, client):
        await stream.rest()
        await pretend(fleet, recorded)
        wrong = [*EXPECTED[:16], (EXPECTED[16] + 1) % EOS]
        with pytest.raises(DataLoss) as caught:
            await read(client.resume(point(wrong)))
        assert caught.value.field == "ids_hash"
        # The right one is served none the less.
        _, chunks, _ = await read(client.resume(point(EXPECTED[:17])))
        assert tokens_of(chunks) == EXPECTED[17:]


class OneMoreRound(MemoryStore):
    """The owner before records one more round between the first look and the take-over."""

    tokens: tuple[int, ...] = ()

    async def take_over(self, seen: SessionRecord, owner: str, epoch: int) -> AppendOutcome:
        late = Append(seen.session, seen.epoch, seen.owner, seen.committed_len, self.tokens, seen.positions)
        assert await self.append(late) is AppendOutcome.APPLIED
        return await super().take_over(seen, owner, epoch)


async def test_what_is_recorded_until_the_take_over_counts(tmp_path: Path) -> None:
    store = OneMoreRound()
    async with two_gateways(tmp_path, store=store) as (fleet, stream, _other, client):
        await stream.rest()
        await pretend(fleet, 6)
        store.tokens = tuple(EXPECTED[6:11])
        _, chunks, _ = await read(client.resume(point(EXPECTED[:4])))
        assert chunks[0].token_ids == tuple(EXPECTED[4:11])
        assert tokens_of(chunks) == EXPECTED[4:]


async def test_a_take_over_that_comes_to_nothing_leaves_no_running_session(tmp_path: Path) -> None:
    store = OneMoreRound()
    async with two_gateways(tmp_path, store=store) as (fleet, stream, _other, client):
        await stream.rest()
        await pretend(fleet, 6)
        store.tokens = tuple(EXPECTED[6:11])
        # Only what is recorded at the last moment shows that the client has other tokens.
        with pytest.raises(DataLoss):
            await read(client.resume(point([*EXPECTED[:7], 30])))
        record = await client.get_session("s")
        assert (record.state, record.finish_reason) == (SessionState.FAILED, "data_loss")


class LostAnswer(MemoryStore):
    """A take-over is done, and whoever asked for it is not told."""

    lost = False

    async def take_over(self, seen: SessionRecord, owner: str, epoch: int) -> AppendOutcome:
        outcome = await super().take_over(seen, owner, epoch)
        if self.lost:
            raise Unavailable("no answer")
        return outcome


async def test_a_take_over_that_nobody_waits_for_leaves_no_running_session(tmp_path: Path) -> None:
    store = LostAnswer()
    async with two_gateways(tmp_path, store=store) as (fleet, stream, _other, client):
        await stream.rest()
        await pretend(fleet, 6)
        store.lost = True
        with pytest.raises(Unavailable):
            await read(client.resume(point(EXPECTED[:4])))
        assert (await client.get_session("s")).state is SessionState.FAILED
        store.lost = False
        _, chunks, _ = await read(client.resume(point(EXPECTED[:4])))
        assert tokens_of(chunks) == EXPECTED[4:]


async def test_a_client_with_more_tokens_than_there_can_be_is_told_so(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (fleet, stream, _other, client):
        await stream.rest()
        with pytest.raises(DataLoss, match="it has ended"):
            await read(client.resume(point([*EXPECTED, 1])))
        await pretend(fleet, 6)
        with pytest.raises(DataLoss, match="it has ended"):
            await read(client.resume(point([*EXPECTED, 1])))


async def test_a_generation_that_ends_before_its_client_is_is_data_loss(tmp_path: Path) -> None:
    law = script_law([1, 2, 3, EOS], 3, EOS, VOCAB)
    store = MemoryStore()
    async with Fleet.start(tmp_path, law, store=store) as fleet, fleet.client() as client:
        await generate(client, fleet.request(PROMPT, session="s"))
        await pretend(fleet, 1)
        with pytest.raises(DataLoss, match="ends after 7 tokens"):
            await read(client.resume(point([1, 2, 3, 4, 5])))


async def test_under_ratio_a_client_ahead_is_data_loss_and_one_behind_goes_on(tmp_path: Path) -> None:
    sampled = SamplingParams(temperature=1.0, ignore_eos=True)
    async with two_gateways(tmp_path) as (fleet, stream, _other, client):
        stream.pace.open()
        async with fleet.client() as first:
            asked = fleet.request(PROMPT, max_tokens=20, sampling=sampled, session="r", rule=AcceptanceRule.RATIO)
            run = await generate(first, asked)
        _, chunks, _ = await read(client.resume(point(run.tokens[:5], "r")))
        assert tokens_of(chunks) == run.tokens[5:]
        await pretend(fleet, 8, "r")
        with pytest.raises(DataLoss, match="ratio"):
            await read(client.resume(point(run.tokens[:9], "r")))
        _, chunks, finished = await read(client.resume(point(run.tokens[:3], "r")))
        assert tokens_of(chunks)[:5] == run.tokens[3:8]
        assert finished.completion_tokens == 20
        await stream.rest()


@pytest.mark.parametrize("recorded", [6, 17, MAX_TOKENS])
async def test_log_probabilities_are_made_again(tmp_path: Path, recorded: int) -> None:
    sampling = SamplingParams(temperature=0.7, ignore_eos=True, top_logprobs=2)
    async with two_gateways(tmp_path) as (fleet, stream, _other, client):
        stream.pace.open()
        async with fleet.client() as first:
            asked = fleet.request(PROMPT, max_tokens=MAX_TOKENS, sampling=sampling, seed=4, session="s2")
            run = await generate(first, asked)
        expected = [entry for chunk in run.chunks for entry in chunk.logprobs]
        assert len(expected) == len(run.tokens) == MAX_TOKENS
        if recorded < MAX_TOKENS:
            await pretend(fleet, recorded, "s2")
        _, chunks, finished = await read(client.resume(point(run.tokens[:10], "s2")))
        assert tokens_of(chunks) == run.tokens[10:]
        again = [entry for chunk in chunks for entry in chunk.logprobs]
        assert [entry.top_tokens for entry in again] == [entry.top_tokens for entry in expected[10:]]
        assert [entry.logprob for entry in again] == pytest.approx([entry.logprob for entry in expected[10:]])
        assert finished.completion_tokens == MAX_TOKENS
        final = await fleet.gateway.store.get("s2")
        assert final is not None
        assert (list(final.tokens), final.state) == (PROMPT + run.tokens, SessionState.FINISHED)
        await stream.rest()


async def test_a_session_that_was_resumed_and_left_is_free(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (fleet, stream, other, client):
        await stream.rest()
        await pretend(fleet, 6)
        request = request_of(fleet, session="s")
        resumed = client.resume(point(EXPECTED[:6]))
        await anext(resumed)
        await resumed.aclose()
        await until(lambda: not other.sessions.actors)
        assert (await generate(client, request)).tokens == EXPECTED


class NoSigns(MemoryStore):
    """No sign of life of a gateway arrives."""

    async def is_alive(self, owner: str) -> bool:
        return False


async def test_a_gateway_that_was_only_silent_is_fenced_by_the_next_generation(tmp_path: Path) -> None:
    async with two_gateways(tmp_path, store=NoSigns()) as (fleet, stream, _other, client):
        await stream.tokens(6)
        new = client.generate(request_of(fleet, session="s"))
        assert isinstance(await anext(new), Started)
        had = tokens_of(stream.events)
        with pytest.raises(Fenced):
            await stream.rest()
        assert tokens_of(stream.events) == had
        assert tokens_of([event async for event in new]) == EXPECTED


async def test_what_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    settings = {"api_keys_file": keys_file(tmp_path, f"alice: {ALICE}\nbob: sk-bob-0123456789abcdefgh\n")}
    async with (
        Fleet.start(tmp_path, LAW, settings=settings) as fleet,
        fleet.client(ALICE) as alice,
        fleet.client("sk-bob-0123456789abcdefgh") as bob,
    ):
        run = await generate(alice, request_of(fleet, session="mine"))
        with pytest.raises(NotFound) as foreign:
            await read(bob.resume(point([], "mine")))
        with pytest.raises(NotFound) as nobodys:
            await read(bob.resume(point([], "none")))
        assert foreign.value.message == nobodys.value.message.replace("none", "mine")
        with pytest.raises(InvalidArgument, match="begins at 3") as caught:
            await read(alice.resume(ResumeRequest("mine", 2)))
        assert caught.value.field == "next_token"
        _, chunks, _ = await read(alice.resume(point(run.tokens[:30], "mine")))
        assert tokens_of(chunks) == run.tokens[30:]
