"""Who gets which replica: the choice among those that can be reached. Pure.

verifiers   the one with the fewest sessions; rather the one that had the session before, or else the one that has read
            the beginning of the prompt before, unless it has clearly more to do than the least busy one
drafters    of those that draft by the method that is asked for, by any if none is: the one with the fewest sessions

A session has one verify and two drafts at a replica at most, so that its sessions measure its queue.

What speaks against a replica counts first: it turns sessions away, this session has just left it, it does not do its
work, or it is full. Then it gets the session only if there is no other. A drafter that does not do its work gets none
at all, since a session can do without.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from paceline.token_log import TokenLog
from paceline.weights_digest import same_weights
from paceline_gateway.commands import FindReplica
from paceline_gateway.effects import Lane, Replica

_FIRST_PREFIX_TOKENS = 64
"""Shorter beginnings are read so fast that they are no reason to prefer a replica."""
_MAX_PREFIXES = 8192
_EXTRA_SESSIONS = 2
_EXTRA_SHARE = 4
"""A replica that knows the session's beginning may have this many sessions more than the least busy one, or a 4th."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that can be reached and takes sessions.

    Attributes:
        replica: what it serves.
        num_sessions: sessions of this gateway that are attached.
        turns_away: it has just said that it takes no session.
        works: it does its work, or one session may find out whether it does again.
        on_trial: the latter.
    """

    replica: Replica
    num_sessions: int
    turns_away: bool = False
    works: bool = True
    on_trial: bool = False

    @property
    def full(self) -> bool:
        """It has no room for one more, as far as this gateway knows: there may be others."""
        return 0 < self.replica.info.max_sessions <= self.num_sessions


def choose(lane: Lane, find: FindReplica, there: Collection[Candidate], prefixes: PrefixTable) -> Candidate | None:
    """The best replica for a session; None if there is none for it.

    Args:
        lane: the kind of replica.
        find: what the session needs.
        there: all of that kind that take sessions.
        prefixes: which verifier has read what.
    """
    usable = [one for one in there if is_of_use(lane, find, one.replica) and (one.works or lane is Lane.VERIFIER)]
    if not usable:
        return None
    least = min(one.num_sessions for one in usable)
    bearable = least + max(_EXTRA_SESSIONS, least // _EXTRA_SHARE)
    # What speaks against a replica outweighs what it has read: then one that has read less is to be preferred.
    addresses = frozenset(
        [
            one.replica.address
            for one in usable
            if one.num_sessions <= bearable
            and not one.full
            and one.works
            and not one.turns_away
            and one.replica.address != find.avoid
        ]
    )
    knows = find.prefer if find.prefer in addresses else prefixes.who_knows(find.prefixes, addresses)

    def rank(one: Candidate) -> tuple[bool, bool, bool, bool, bool, bool, bool, int]:
        address = one.replica.address
        return (
            one.turns_away,
            address == find.avoid,
            not one.works,
            one.full,
            bool(find.method) and not one.replica.drafts_by(find.method),
            address != knows,
            not one.on_trial,
            one.num_sessions,
        )

    return min(usable, key=rank)


def is_of_use(lane: Lane, find: FindReplica, replica: Replica) -> bool:
    """Whether a replica can serve the session at all."""
    info = replica.info
    if info.max_model_len and info.max_model_len < find.context_len:
        return False
    if lane is Lane.VERIFIER:
        return same_weights(find.weights_digest, info.weights_digest)
    return replica.finds_features(find.features) and (not find.method or replica.drafts_by(find.method))


def prefixes_of(log: TokenLog) -> tuple[int, ...]:
    """Hashes of beginnings of a session's tokens, longest first: of 64 tokens, and of each twice as many."""
    lengths = []
    length = _FIRST_PREFIX_TOKENS
    while length <= len(log):
        lengths.append(length)
        length *= 2
    return tuple([log.hash_at(length) for length in reversed(lengths)])


class PrefixTable:
    """Which verifier was last given a prompt with some beginning; those used least recently are forgotten."""

    def __init__(self, max_prefixes: int = _MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._addresses: OrderedDict[int, str] = OrderedDict()

    def given(self, prefixes: Sequence[int], address: str) -> None:
        """A replica was given a prompt with these beginnings."""
        for prefix in prefixes:
            self._addresses[prefix] = address
            self._addresses.move_to_end(prefix)
        while len(self._addresses) > self._max_prefixes:
            self._addresses.popitem(last=False)

    def who_knows(self, prefixes: Sequence[int], among: frozenset[str]) -> str:
        """Of some replicas the one that knows the longest of these beginnings; empty if none knows any."""
        return next((there for prefix in prefixes if (there := self._addresses.get(prefix, "")) in among), "")
