"""Rounds that go on after recorded tokens, and what a client that is ahead of the record is compared with."""

from __future__ import annotations

from pathlib import Path

import pytest
from paceline_gateway.effects import Commit
from paceline_gateway.resumption import Resumption

from paceline.errors import DataLoss
from paceline.messages import TokenLogprobs, TokenOrigin
from paceline.text.request import ResumeRequest
from tests.unit.gateway.laws import hash_law, perfect
from tests.unit.gateway.simulation import Simulation

PROMPT = (1, 2, 3)
START = len(PROMPT)
LAW = hash_law(7)
NUM_TOKENS = 16


def undisturbed(folder: Path) -> Simulation:
    simulation = Simulation(folder, LAW, perfect(LAW), max_tokens=NUM_TOKENS)
    simulation.start()
    simulation.run()
    return simulation


def resumption(recorded: tuple[int, ...], client: tuple[int, ...]) -> Resumption:
    asked = ResumeRequest.after("s", START, client)
    return Resumption(START, recorded, START + len(client), asked.ids_hash)


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4])
def test_the_rest_is_the_same_wherever_it_goes_on(tmp_path: Path, num_draft_tokens: int) -> None:
    whole = undisturbed(tmp_path)
    pieces = [text for commit in whole.commits for text in commit.texts]
    for known in range(0, len(whole.committed), 3):
        recorded = whole.committed[:known]
        simulation = Simulation(
            tmp_path,
            LAW,
            perfect(LAW),
            max_tokens=NUM_TOKENS,
            num_draft_tokens=num_draft_tokens,
            resumption=resumption(recorded, recorded),
        )
        simulation.start()
        simulation.run()
        assert recorded + simulation.committed == whole.committed
        assert simulation.commits[0].from_len == START + known
        assert [text for commit in simulation.commits for text in commit.texts] == pieces[known:]
        assert simulation.finish == whole.finish


@pytest.mark.parametrize("ahead", [1, 4, 5, 12])
def test_a_client_that_is_ahead_is_compared_when_it_is_reached(tmp_path: Path, ahead: int) -> None:
    whole = undisturbed(tmp_path).committed
    recorded, client = whole[:2], whole[: 2 + ahead]
    right = Simulation(tmp_path, LAW, perfect(LAW), max_tokens=NUM_TOKENS, resumption=resumption(recorded, client))
    right.start()
    right.run()
    assert right.error is None
    assert recorded + right.committed == whole

    other = (*client[:-1], (client[-1] + 1) % 5)
    wrong = Simulation(tmp_path, LAW, perfect(LAW), max_tokens=NUM_TOKENS, resumption=resumption(recorded, other))
    wrong.start()
    wrong.run()
    assert isinstance(wrong.error, DataLoss)
    # What the client has not been sent is not recorded either: it has other tokens.
    assert 2 + len(wrong.committed) < len(client)


def test_a_generation_that_ends_before_the_client_is_is_noticed() -> None:
    client = tuple(range(9))
    tokens = [*PROMPT, *client[:6]]
    point = resumption((), client)
    point.check(tokens, START, ended=False)
    with pytest.raises(DataLoss, match="ends after 9 tokens"):
        point.check(tokens, START, ended=True)
    point.check([*PROMPT, *client, 11], len(tokens), ended=True)
    point.check([*PROMPT, *client, 11, 99], len(tokens) + 4, ended=True)  # beyond it nothing is compared any more


def test_a_commit_is_cut_at_an_index() -> None:
    logprobs = tuple(TokenLogprobs(-float(n)) for n in range(3))
    origins = (TokenOrigin.ACCEPTED, TokenOrigin.ACCEPTED, TokenOrigin.BONUS)
    whole = Commit(10, (5, 6, 7), origins, logprobs, ("a", "", "bc"))
    assert whole.since(10) is whole
    assert whole.since(3) is whole
    assert whole.since(12) == Commit(12, (7,), origins[2:], logprobs[2:], ("bc",))
    assert whole.since(13) is None
    assert whole.since(99) is None
    assert Commit(10, (5, 6), origins[:2], (), ("a", "b")).since(11) == Commit(11, (6,), origins[1:2], (), ("b",))
