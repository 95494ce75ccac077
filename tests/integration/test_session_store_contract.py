"""What every session store does; the same tests over memory and over real servers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from paceline.errors import NotFound, SessionBusy
from paceline.session.store import AppendOutcome, Positions, SessionState, SessionStore, unknown_session
from tests.integration.session_stores import PROMPT, RECORD, append, record, servers, store

__all__ = ["servers", "store"]

APPLIED, ALREADY_APPLIED = AppendOutcome.APPLIED, AppendOutcome.ALREADY_APPLIED
FENCED, MISSING = AppendOutcome.FENCED, AppendOutcome.MISSING
OTHER = Positions("verifier-2", 9)


async def tokens_of(store: SessionStore, session: str = "chat.1") -> tuple[int, ...]:
    found = await store.get(session)
    assert found is not None
    assert found.committed_len == len(found.tokens)
    return found.tokens


async def test_a_record_comes_back_as_it_was(store: SessionStore) -> None:
    await store.ping()
    assert await store.get("chat.1") is None
    await store.create(RECORD)
    assert await store.get("chat.1") == RECORD
    assert await store.get("chat.2") is None


@pytest.mark.parametrize("count", [0, 1, 5000])
async def test_tokens_of_any_number_come_back(store: SessionStore, count: int) -> None:
    tokens = tuple((index * 2_654_435_761) % 2**31 for index in range(count))
    await store.create(record(tokens=tokens))
    assert await tokens_of(store) == tokens
    assert await store.append(append(*tokens, at=count)) is APPLIED
    assert await tokens_of(store) == tokens + tokens


ENDED = [state for state in SessionState if state is not SessionState.RUNNING]


@pytest.mark.parametrize("epoch", [1, 3, 4])
async def test_the_name_of_a_running_session_is_taken(store: SessionStore, epoch: int) -> None:
    await store.create(RECORD)
    with pytest.raises(SessionBusy, match=r"running on session 'chat\.1'.* Resume") as caught:
        await store.create(record(epoch=epoch, owner="gateway-2"))
    assert caught.value.field == "session"
    assert await store.get("chat.1") == RECORD


@pytest.mark.parametrize("state", ENDED)
async def test_an_ended_record_is_replaced_under_a_newer_epoch(store: SessionStore, state: SessionState) -> None:
    await store.create(RECORD)
    await store.append(append(21, 22, at=3))
    await store.finish("chat.1", 3, RECORD.owner, state, "whatever")
    for epoch in (1, 3):
        with pytest.raises(SessionBusy):
            await store.create(record(epoch=epoch, tokens=(5,)))
    new = record(epoch=4, owner="gateway-2", tokens=(5, 6), positions=Positions(), finish_reason="")
    await store.create(new)
    assert await store.get("chat.1") == new
    assert await store.append(append(23, at=5)) is FENCED
    assert await store.finish("chat.1", 3, RECORD.owner, SessionState.FAILED, "late") is FENCED
    assert await store.append(append(7, at=2, epoch=4, owner="gateway-2")) is APPLIED
    assert await tokens_of(store) == (5, 6, 7)


@pytest.mark.parametrize("tenant", ["", "team", "team-ö2"])
@pytest.mark.parametrize("state", list(SessionState))
async def test_the_name_of_another_tenant_is_unknown(store: SessionStore, state: SessionState, tenant: str) -> None:
    await store.create(record(state=state))
    with pytest.raises(NotFound) as caught:
        await store.create(record(epoch=9, tenant=tenant))
    assert caught.value.message == unknown_session("chat.1").message
    assert await store.get("chat.1") == record(state=state)


async def test_epochs_are_numbers_and_no_words(store: SessionStore) -> None:
    await store.create(record(epoch=9, state=SessionState.FINISHED))
    await store.create(record(epoch=10, state=SessionState.FINISHED))
    with pytest.raises(SessionBusy):
        await store.create(record(epoch=9))


async def test_of_many_that_replace_a_record_one_wins(store: SessionStore) -> None:
    await store.create(record(state=SessionState.FINISHED))

    async def replace_by(owner: str) -> str | None:
        try:
            await store.create(record(epoch=4, owner=owner, tokens=(1, 2)))
        except SessionBusy:
            return None
        # Even one that has ended at once is not replaced by the others, which have seen the record before it.
        await store.finish("chat.1", 4, owner, SessionState.FINISHED, "stop")
        return owner

    winners = await asyncio.gather(*[replace_by(f"gateway-{index}") for index in range(10)])
    (winner,) = [owner for owner in winners if owner]
    assert await store.get("chat.1") == record(
        epoch=4, owner=winner, tokens=(1, 2), state=SessionState.FINISHED, finish_reason="stop"
    )


async def test_appends_set_tokens_and_positions_together(store: SessionStore) -> None:
    await store.create(RECORD)
    assert await store.append(append(21, 22, at=3)) is APPLIED
    assert await store.append(append(23, at=5, positions=OTHER)) is APPLIED
    assert await store.get("chat.1") == record(tokens=(*PROMPT, 21, 22, 23), positions=OTHER)


async def test_an_append_without_tokens_sets_positions(store: SessionStore) -> None:
    await store.create(RECORD)
    assert await store.append(append(at=3, positions=OTHER)) is APPLIED
    assert await store.get("chat.1") == record(positions=OTHER)


async def test_a_retried_append_is_applied_once(store: SessionStore) -> None:
    await store.create(RECORD)
    assert await store.append(append(21, 22, at=3)) is APPLIED
    assert await store.append(append(21, 22, at=3)) is ALREADY_APPLIED
    assert await tokens_of(store) == (*PROMPT, 21, 22)


async def test_an_older_append_that_comes_late_changes_nothing(store: SessionStore) -> None:
    await store.create(RECORD)
    await store.append(append(21, 22, at=3))
    await store.append(append(23, at=5, positions=OTHER))
    assert await store.append(append(21, 22, at=3)) is ALREADY_APPLIED
    assert await store.append(append(at=3)) is ALREADY_APPLIED
    assert await store.get("chat.1") == record(tokens=(*PROMPT, 21, 22, 23), positions=OTHER)


async def test_a_suffix_of_which_a_part_has_arrived_is_completed(store: SessionStore) -> None:
    """After a silence of the store the owner sends everything since the last acknowledgement."""
    await store.create(RECORD)
    await store.append(append(21, 22, at=3))
    assert await store.append(append(21, 22, 23, 24, at=3, positions=OTHER)) is APPLIED
    assert await store.get("chat.1") == record(tokens=(*PROMPT, 21, 22, 23, 24), positions=OTHER)


@pytest.mark.parametrize("tail", [(99,), (21, 99), (21, 99, 23), (99, 22, 23)])
async def test_other_tokens_of_the_same_epoch_are_not_mixed_in(store: SessionStore, tail: tuple[int, ...]) -> None:
    await store.create(RECORD)
    await store.append(append(21, 22, at=3))
    assert await store.append(append(*tail, at=3)) is MISSING
    assert await tokens_of(store) == (*PROMPT, 21, 22)


async def test_two_writers_the_newer_epoch_wins(store: SessionStore) -> None:
    await store.create(RECORD)
    await store.append(append(21, at=3))
    assert await store.put(record(epoch=4, owner="gateway-2", tokens=(*PROMPT, 21))) is APPLIED
    assert await store.append(append(22, at=4)) is FENCED
    assert await store.append(append(21, at=3)) is FENCED
    assert await store.put(record(tokens=(*PROMPT, 66))) is FENCED
    assert await store.finish("chat.1", 3, RECORD.owner, SessionState.FAILED, "stopped") is FENCED
    assert await store.append(append(31, at=4, epoch=4, owner="gateway-2")) is APPLIED
    found = await store.get("chat.1")
    assert found == record(epoch=4, owner="gateway-2", tokens=(*PROMPT, 21, 31))


async def test_epochs_of_sixty_three_bits_are_told_apart(store: SessionStore) -> None:
    high = 2**63 - 2
    await store.create(record(epoch=high))
    assert await store.append(append(1, at=3, epoch=high - 1)) is FENCED
    assert await store.append(append(1, at=3, epoch=high + 1)) is MISSING
    assert await store.append(append(1, at=3, epoch=high)) is APPLIED
    assert await store.put(record(epoch=9)) is FENCED


async def test_a_lost_record_is_missing_until_its_owner_puts_it(store: SessionStore) -> None:
    assert await store.append(append(21, at=3)) is MISSING
    assert await store.finish("chat.1", 3, RECORD.owner, SessionState.FINISHED, "stop") is MISSING
    whole = record(tokens=(*PROMPT, 21))
    assert await store.put(whole) is APPLIED
    assert await store.get("chat.1") == whole
    assert await store.append(append(22, at=4)) is APPLIED


async def test_a_shorter_record_is_missing_until_its_owner_puts_it(store: SessionStore) -> None:
    await store.create(RECORD)
    assert await store.append(append(22, at=4)) is MISSING
    assert await tokens_of(store) == PROMPT
    assert await store.put(record(tokens=(*PROMPT, 21, 22))) is APPLIED
    assert await store.append(append(23, at=5)) is APPLIED
    assert await tokens_of(store) == (*PROMPT, 21, 22, 23)


async def test_an_older_record_than_the_owner_is_missing(store: SessionStore) -> None:
    """For instance a server that came back with an old copy of its data."""
    await store.create(RECORD)
    assert await store.append(append(21, at=3, epoch=4)) is MISSING
    assert await store.finish("chat.1", 4, RECORD.owner, SessionState.FINISHED, "stop") is MISSING
    assert await store.get("chat.1") == RECORD


async def test_one_epoch_has_one_owner(store: SessionStore) -> None:
    """The server has lost the record of a generation that runs, and somebody has taken its name since."""
    taken = record(owner="gateway-2")
    await store.create(taken)
    # Even where what is written would fit.
    assert await store.append(append(21, at=3)) is FENCED
    assert await store.append(append(at=3, positions=OTHER)) is FENCED
    assert await store.put(record(tokens=(*PROMPT, 21))) is FENCED
    assert await store.finish("chat.1", 3, RECORD.owner, SessionState.FAILED, "late") is FENCED
    assert await store.get("chat.1") == taken
    assert await store.append(append(31, at=3, owner="gateway-2")) is APPLIED
    assert await store.put(record(owner="gateway-2", tokens=(*PROMPT, 31))) is APPLIED
    assert await store.finish("chat.1", 3, "gateway-2", SessionState.FINISHED, "stop") is APPLIED


async def test_a_lost_record_that_has_ended_is_not_put_over_the_next_turns(store: SessionStore) -> None:
    """The next turn found no record; its epoch, from the clock, is newer all the same."""
    taken = record(epoch=9, owner="gateway-2", tokens=(*PROMPT, 21, 22))
    await store.create(taken)
    for state in ENDED:
        assert await store.put(record(state=state)) is FENCED
    assert await store.get("chat.1") == taken
    assert await store.append(append(23, at=5, epoch=9, owner="gateway-2")) is APPLIED


@pytest.mark.parametrize("state", ENDED)
async def test_a_lost_record_that_has_ended_is_put_over_its_ancestors(store: SessionStore, state: SessionState) -> None:
    """The server came back without its last writes: it holds the turn before, which another gateway ran."""
    await store.create(record(epoch=1, owner="gateway-2", tokens=PROMPT[:1], state=SessionState.FINISHED))
    ended = record(tokens=(*PROMPT, 21), state=state, finish_reason="stop")
    assert await store.finish("chat.1", ended.epoch, ended.owner, state, "stop") is MISSING
    assert await store.put(ended) is APPLIED
    assert await store.get("chat.1") == ended


@pytest.mark.parametrize("epoch", [1, 3])
async def test_a_lost_record_is_not_put_over_another_tenants(store: SessionStore, epoch: int) -> None:
    taken = record(epoch=epoch, tenant="other")
    await store.create(taken)
    assert await store.put(RECORD) is FENCED
    assert await store.get("chat.1") == taken


async def test_put_replaces_everything(store: SessionStore) -> None:
    await store.create(record(finish_reason="old"))
    shorter = record(tokens=(1,), model="other", positions=Positions(), finish_reason="")
    assert await store.put(shorter) is APPLIED
    assert await store.get("chat.1") == shorter


async def test_finish_keeps_the_record_readable(store: SessionStore) -> None:
    await store.create(RECORD)
    assert await store.finish("chat.1", 3, RECORD.owner, SessionState.FINISHED, "length") is APPLIED
    assert await store.finish("chat.1", 3, RECORD.owner, SessionState.FINISHED, "length") is ALREADY_APPLIED
    assert await store.get("chat.1") == record(state=SessionState.FINISHED, finish_reason="length")


async def test_touch_changes_nothing_and_tells_who_owns_the_session(store: SessionStore) -> None:
    await store.create(RECORD)
    assert await store.touch("chat.1", 3, RECORD.owner) is APPLIED
    assert await store.touch("chat.1", 2, RECORD.owner) is FENCED
    assert await store.touch("chat.1", 3, "gateway-2") is FENCED
    assert await store.touch("chat.1", 4, "gateway-2") is MISSING
    assert await store.touch("nobody", 1, "gateway-1") is MISSING
    assert await store.get("chat.1") == RECORD
    assert await store.get("nobody") is None


@pytest.mark.parametrize("state", list(SessionState))
async def test_a_take_over_fences_the_owner_before(store: SessionStore, state: SessionState) -> None:
    await store.create(RECORD)
    await store.append(append(21, 22, at=3))
    if state is not SessionState.RUNNING:
        await store.finish("chat.1", 3, RECORD.owner, state, "whatever")
    assert await store.take_over(RECORD, "gateway-2", 9) is APPLIED
    taken = record(epoch=9, owner="gateway-2", tokens=(*PROMPT, 21, 22))
    assert await store.get("chat.1") == taken
    assert await store.append(append(23, at=5)) is FENCED
    assert await store.put(record(tokens=(*PROMPT, 9))) is FENCED
    assert await store.touch("chat.1", 3, RECORD.owner) is FENCED
    assert await store.finish("chat.1", 3, RECORD.owner, SessionState.FAILED, "late") is FENCED
    assert await store.get("chat.1") == taken
    assert await store.append(append(23, at=5, epoch=9, owner="gateway-2")) is APPLIED


async def test_of_two_who_take_over_one_does(store: SessionStore) -> None:
    await store.create(RECORD)
    # The same process twice, too: two clients may resume through one gateway.
    outcomes = await asyncio.gather(*[store.take_over(RECORD, "gateway-2", 4) for _ in range(5)])
    assert sorted(outcomes, key=lambda outcome: outcome.value) == [APPLIED, *[FENCED] * 4]
    seen = await store.get("chat.1")
    assert seen is not None
    assert await store.take_over(seen, "gateway-3", 5) is APPLIED
    assert await store.get("chat.1") == record(epoch=5, owner="gateway-3")


async def test_a_record_that_is_not_there_is_taken_over_by_nobody(store: SessionStore) -> None:
    assert await store.take_over(RECORD, "gateway-2", 4) is MISSING
    await store.create(RECORD)
    assert await store.take_over(record(epoch=4), "gateway-2", 5) is MISSING
    assert await store.take_over(record(owner="gateway-9"), "gateway-2", 4) is FENCED
    assert await store.get("chat.1") == RECORD


async def test_owners_say_that_they_live(store: SessionStore) -> None:
    assert not await store.is_alive("gateway-1")
    await store.beat("gateway-1", 30.0)
    await store.beat("gateway-2", 0.001)
    assert await store.is_alive("gateway-1")
    while await store.is_alive("gateway-2"):
        pass
    assert await store.get("gateway-1") is None


async def test_many_sessions_at_once_do_not_mix(store: SessionStore) -> None:
    names = [f"s{index}" for index in range(64)]
    await asyncio.gather(*[store.create(record(session=name, tokens=(index,))) for index, name in enumerate(names)])

    async def generate(index: int, name: str) -> None:
        for step in range(10):
            at = 1 + 2 * step
            call = append(index, step, at=at, session=name)
            assert await store.append(call) is APPLIED
            if step % 3 == 0:
                assert await store.append(call) is ALREADY_APPLIED
        assert await store.finish(name, 3, RECORD.owner, SessionState.FINISHED, "stop") is APPLIED

    await asyncio.gather(*[generate(index, name) for index, name in enumerate(names)])
    for index, name in enumerate(names):
        tokens = (index, *[token for step in range(10) for token in (index, step)])
        assert await store.get(name) == record(
            session=name, tokens=tokens, state=SessionState.FINISHED, finish_reason="stop"
        )


async def test_racing_owners_leave_one_truth(store: SessionStore) -> None:
    """Whatever the order in which ten owners take over, the highest epoch owns the record in the end."""
    await store.create(record(epoch=0))
    epochs = [7, 3, 9, 1, 5, 10, 2, 8, 4, 6]

    async def take_over(epoch: int) -> AppendOutcome:
        outcome = await store.put(record(epoch=epoch, owner=f"gateway-{epoch}"))
        if outcome is APPLIED:
            outcome = await store.append(append(epoch, at=3, epoch=epoch, owner=f"gateway-{epoch}"))
        return outcome

    outcomes = dict(zip(epochs, await asyncio.gather(*[take_over(epoch) for epoch in epochs]), strict=True))
    assert outcomes[10] is APPLIED
    assert set(outcomes.values()) <= {APPLIED, FENCED}
    assert await store.get("chat.1") == replace(record(epoch=10, owner="gateway-10"), tokens=(*PROMPT, 10))
