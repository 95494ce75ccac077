"""Who gets which replica."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from paceline_gateway.commands import FindReplica, SessionCommand
from paceline_gateway.effects import Lane, Replica
from paceline_gateway.routing import Candidate, PrefixTable, choose, prefixes_of

from paceline.messages import ModelInfo
from paceline.token_log import TokenLog

INFO = ModelInfo("toy", 32, 256, (), "", "boot")


class _Nobody:
    def tell(self, command: SessionCommand) -> bool:
        return True


FIND = FindReplica("s", 1, _Nobody())


def there(*loads: int, methods: tuple[tuple[str, ...], ...] = ()) -> list[Candidate]:
    """Replicas a, b, c, ... with so many sessions."""
    offered = methods or ((),) * len(loads)
    return [
        Candidate(Replica(name, replace(INFO, methods=offer)), load)
        for name, load, offer in zip("abcdefgh", loads, offered, strict=False)
    ]


def chosen(candidates: list[Candidate], lane: Lane = Lane.VERIFIER, find: FindReplica = FIND) -> str:
    found = choose(lane, find, candidates, PrefixTable())
    return "" if found is None else found.replica.address


@pytest.mark.parametrize("lane", list(Lane))
def test_the_one_with_fewest_sessions_and_of_equals_the_first(lane: Lane) -> None:
    assert chosen(there(2, 1, 3), lane) == "b"
    assert chosen(there(1, 1, 1), lane) == "a"
    assert chosen([], lane) == ""


def test_what_speaks_against_a_replica_outweighs_its_load() -> None:
    first, second = there(0, 9)
    against = [
        (replace(first, turns_away=True), FIND),
        (first, replace(FIND, avoid="a")),
        (replace(first, works=False), FIND),
        (replace(first, replica=Replica("a", replace(INFO, max_sessions=4)), num_sessions=4), FIND),
    ]
    for candidate, find in against:
        assert chosen([candidate, second], find=find) == "b"
        assert chosen([candidate], find=find) == "a", "a verifier that may not work is better than none"


def test_a_drafter_that_does_not_work_is_worse_than_none() -> None:
    assert chosen([replace(there(0)[0], works=False)], Lane.DRAFTER) == ""


def test_one_on_trial_gets_its_session_whatever_the_load() -> None:
    first, second = there(0, 3)
    assert chosen([first, replace(second, on_trial=True)]) == "b"
    assert chosen([first, replace(second, on_trial=True, works=False)]) == "a", "it has its session already"


def test_a_session_goes_on_only_with_the_weights_that_it_began_with() -> None:
    first, second, unknown = there(0, 5, 9)
    first = replace(first, replica=Replica("a", replace(INFO, weights_digest="new")))
    second = replace(second, replica=Replica("b", replace(INFO, weights_digest="old")))
    begun = replace(FIND, weights_digest="old")
    assert chosen([first, second], find=begun) == "b"
    assert chosen([first, unknown], find=begun) == "c"
    assert chosen([first], find=begun) == ""
    assert chosen([first, second]) == "a", "one that has no token yet goes anywhere"


# --- drafters of several methods --------------------------------------------------------------------------------------

POOLS = (("draft_model",), ("ngram",), ("ngram", "eagle3"), ("draft_model",))


@pytest.mark.parametrize(
    ("method", "expected"),
    [("draft_model", "d"), ("ngram", "b"), ("eagle3", "c"), ("medusa", ""), ("", "b")],
)
def test_the_least_busy_drafter_of_the_method_that_is_asked_for(method: str, expected: str) -> None:
    candidates = there(5, 1, 4, 2, methods=POOLS)
    assert chosen(candidates, Lane.DRAFTER, replace(FIND, method=method)) == expected


def test_sessions_that_name_no_method_spread_over_the_drafters_of_all() -> None:
    loads = Counter(dict.fromkeys("abcd", 0))
    for _ in range(12):
        loads[chosen(there(*loads.values(), methods=POOLS), Lane.DRAFTER)] += 1
    assert set(loads.values()) == {3}


# --- prefixes ---------------------------------------------------------------------------------------------------------


def prefixes(num_tokens: int, other_from: int = 10**6) -> tuple[int, ...]:
    """Those of a prompt that differs from the others from some token on."""
    return prefixes_of(TokenLog([index % 7 if index < other_from else 9 for index in range(num_tokens)]))


def test_prefixes_agree_as_far_as_the_tokens_do() -> None:
    assert prefixes(63) == ()
    long, short = prefixes(300), prefixes(130)
    assert (len(long), len(short)) == (3, 2)
    assert long[-2:] == short
    assert set(prefixes(300, other_from=128)) & set(long) == set(short)
    assert set(prefixes(300, other_from=20)) & set(long) == set()


def test_the_verifier_that_knows_the_longest_beginning_gets_the_session() -> None:
    table = PrefixTable()
    table.given(prefixes(300, other_from=128), "a")
    table.given(prefixes(600), "b")
    find = replace(FIND, prefixes=prefixes(600))

    def pick(*loads: int, find: FindReplica = find) -> str:
        found = choose(Lane.VERIFIER, find, there(*loads), table)
        return "" if found is None else found.replica.address

    assert pick(0, 2, 0) == "b"
    assert pick(0, 3, 0) == "a", "too busy to be waited for"
    assert pick(0, 3, 1) == "a"
    assert pick(40, 50, 40) == "b"
    assert pick(40, 51, 40) == "a"
    assert pick(0, 0, 0, find=replace(find, prefixes=prefixes(300, other_from=64))) == "b"
    assert pick(1, 1, 0, find=replace(find, prefixes=prefixes(600, other_from=20))) == "c"
    assert pick(1, 1, 0, find=replace(find, avoid="b")) == "c"
    assert pick(1, 1, 0, find=replace(find, prefer="a")) == "a", "it holds the session's own rows"
    assert pick(3, 1, 0, find=replace(find, prefer="a")) == "b", "too busy to be waited for"
    assert pick(1, 1, 0, find=replace(find, prefer="gone")) == "b"
    assert pick(1, 1, 0, find=replace(find, prefer="a", avoid="a")) == "b"


def test_verifiers_that_are_gone_are_no_reason_to_forget_a_shorter_beginning() -> None:
    table = PrefixTable()
    table.given(prefixes(64), "a")
    table.given(prefixes(600)[:-1], "gone")
    assert table.who_knows(prefixes(600), frozenset("ab")) == "a"
    assert table.who_knows(prefixes(600), frozenset("b")) == ""


@pytest.mark.parametrize("against", ["does not work", "turns away", "to be avoided"])
def test_verifiers_that_cannot_be_used_are_no_reason_to_forget_a_shorter_beginning(against: str) -> None:
    table = PrefixTable()
    table.given(prefixes(600)[:-1], "b")
    table.given(prefixes(64), "c")
    first, second, third = there(0, 0, 0)
    second = replace(second, works=against != "does not work", turns_away=against == "turns away")
    find = replace(FIND, prefixes=prefixes(600), avoid="b" if against == "to be avoided" else "")
    found = choose(Lane.VERIFIER, find, [first, second, third], table)
    assert found is not None
    assert found.replica.address == "c"


def test_the_table_forgets_what_was_used_least_recently() -> None:
    table = PrefixTable(max_prefixes=3)
    for prefix in (1, 2, 3, 1, 4):
        table.given((prefix,), "a")
    assert [table.who_knows((prefix,), frozenset("a")) for prefix in (1, 2, 3, 4)] == ["a", "", "a", "a"]
