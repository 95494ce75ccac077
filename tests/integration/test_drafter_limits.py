"""The drafter and sessions that are too long: for its model, or for any."""

from __future__ import annotations

import logging

import pytest
from paceline_drafter.draft_limits import DraftLimits
from paceline_drafter.load import load_replica
from paceline_drafter.settings import DrafterSettings

from paceline.messages import Drafted, Failed, Opened
from paceline.token_log import MAX_SESSION_TOKENS
from paceline.v1 import common_pb2, drafter_pb2
from tests.fakes.scripted_drafter import ScriptedDrafter, perfect
from tests.integration.replicas import drafter_replica
from tests.integration.test_drafter_service import PROMPT, cycle_from, draft, law, opening


async def test_a_session_beyond_the_cap_is_refused_by_field_and_one_beyond_the_method_gets_empty_drafts() -> None:
    drafter = ScriptedDrafter(perfect(law))
    limits = DraftLimits(max_model_len=64, max_session_tokens=128)
    async with drafter_replica(drafter, draft_limits=limits) as replica, replica.connect() as link:
        prompt = (5,) * 100
        refused = await link.ask(opening("s", (5,) * 129), Failed)
        assert (refused.failure.code, refused.failure.field) == ("invalid_argument", "tokens")
        assert "128" in refused.failure.message
        assert replica.actor.num_sessions == 0
        await link.ask(opening("s", prompt), Opened)
        for command, field in (
            (draft("s", 1, prompt, assumed=(5,) * 29), "assumed"),
            (draft("s", 1, (5,) * 129, catch_up=(5,) * 29), "catch_up"),
            (draft("s", 1, (5,) * 129), "base_len"),
        ):
            refused = await link.ask(command, Failed)
            assert (refused.failure.code, refused.failure.field) == ("invalid_argument", field)
            assert "128" in refused.failure.message
        for number, command in enumerate(
            (
                draft("s", 1, prompt),
                draft("s", 2, prompt, assumed=(5,) * 28),
                draft("s", 3, (5,) * 128, catch_up=(5,) * 28),
            )
        ):
            drafted = await link.ask(command, Drafted)
            assert (drafted.draft_id, drafted.block.tokens) == (number + 1, ())
        assert drafter.contexts == []


@pytest.mark.parametrize("field", ["tokens", "assumed", "catch_up"])
async def test_a_command_of_millions_of_tokens_is_refused_at_once(field: str) -> None:
    many = [5] * 10_000_000
    async with drafter_replica(ScriptedDrafter(perfect(law))) as replica, replica.connect() as link:
        await link.ask(opening("s"), Opened)
        if field == "tokens":
            command = drafter_pb2.DrafterCommand(open=common_pb2.Open(session="s", epoch=1, tokens=many))
        else:
            length = len(many) if field == "catch_up" else len(PROMPT)
            body = drafter_pb2.Draft(session="s", epoch=1, draft_id=1, base_len=length, max_depth=4)
            getattr(body, field).extend(many)
            command = drafter_pb2.DrafterCommand(draft=body)
        await link.send_raw(drafter_pb2.DrafterConnectRequest(commands=[command]))
        refused = await link.receive(Failed)
        assert (refused.failure.code, refused.failure.field) == ("invalid_argument", field)
        assert str(MAX_SESSION_TOKENS) in refused.failure.message
        assert (await link.ask(draft("s", 1), Drafted)).block.tokens == cycle_from(3, 4)


async def test_what_a_drafter_has_room_for_is_logged_at_its_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="paceline_drafter.load")
    replica = load_replica(DrafterSettings(method=("ngram",), max_sessions=3))
    (fields,) = [vars(record) for record in caplog.records if record.getMessage() == "drafting method loaded"]
    assert fields["methods"] == "ngram"
    assert fields["max_model_len"] == replica.info.max_model_len
    assert fields["max_sessions"] == 3
    assert fields["kv_bytes"] == replica.info.kv_bytes
