"""Finds the first stop string in a growing text and says how much of its end must be held back.

One Knuth-Morris-Pratt automaton per stop string, so that the work per character does not depend on the length of the
text and a match may span any number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string was found.

    Attributes:
        stop: the string.
        start: index in the pushed text at which it starts; negative when it began in an earlier push.
    """

    stop: str
    start: int


def _failure_table(pattern: str) -> list[int]:
    """Entry i: length of the longest proper border of pattern[:i]."""
    table = [0] * (len(pattern) + 1)
    border = 0
    for index in range(1, len(pattern)):
        while border and pattern[index] != pattern[border]:
            border = table[border]
        if pattern[index] == pattern[border]:
            border += 1
        table[index + 1] = border
    return table


class StopMatcher:
    """The stop strings of one generation.

    The string that ends first wins; of those that end at the same character the longest does, since its start must not
    be sent either.
    """

    __slots__ = ("_matched", "_stops", "_tables")

    def __init__(self, stops: Sequence[str]) -> None:
        """Takes the stop strings, none of them empty."""
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._tables = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)

    @property
    def held(self) -> int:
        """Characters at the end of the text that may still become a stop string."""
        return max(self._matched, default=0)

    def push(self, text: str, *, armed: bool = True) -> StopMatch | None:
        """Takes the next text.

        Args:
            text: what follows the text of earlier calls.
            armed: whether a stop string that is completed here counts; if not, it is ordinary text.

        Returns:
            The first match, after which the matcher is of no further use; None if there is none.
        """
        if not self._stops:
            return None
        for index, character in enumerate(text):
            stop = self._step(character)
            if stop is not None and armed:
                return StopMatch(stop, index + 1 - len(stop))
        return None

    def _step(self, character: str) -> str | None:
        """Advances all automata by one character; returns the longest string that it completes."""
        found = None
        for index, (stop, table) in enumerate(zip(self._stops, self._tables, strict=True)):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = table[matched]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                found = found or stop
                matched = table[matched]
            self._matched[index] = matched
        return found
