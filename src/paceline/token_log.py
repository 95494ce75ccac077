"""The tokens of one session with a hash of every prefix.

Gateway, drafter and verifier each keep such a log; equal length and hash mean equal tokens, so a command names what
it builds on in
twelve bytes. The hash is FNV-1a over the token ids as 64-bit words, with a final mix; it guards against mistakes, not
against attackers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MAX_SESSION_TOKENS = 2**20
"""Most tokens that a command may name for one session, whatever the model: longer ones are refused uncopied."""

_MASK = (1 << 64) - 1
_OFFSET = 0xCBF29CE484222325
_PRIME = 0x100000001B3


def _step(state: int, token: int) -> int:
    state = ((state ^ (token + 1)) * _PRIME) & _MASK
    return state ^ (state >> 29)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


EMPTY_HASH = _signed(_OFFSET)
"""Hash of no tokens."""


def extend_hash(prefix_hash: int, tokens: Iterable[int]) -> int:
    """Hash of a sequence and further tokens after it: what was hashed need not be kept."""
    state = prefix_hash & _MASK
    for token in tokens:
        state = _step(state, token)
    return _signed(state)


class TokenLog:
    """Append-only tokens with crop, and the hash of each prefix [0, n) as a signed 64-bit integer."""

    __slots__ = ("_states", "_tokens")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._states: list[int] = [_OFFSET]
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> Sequence[int]:
        """All tokens; a live view, not to be changed."""
        return self._tokens

    def slice(self, start: int, stop: int) -> tuple[int, ...]:
        """Tokens [start, stop)."""
        return tuple(self._tokens[start:stop])

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens."""
        for token in tokens:
            self._tokens.append(token)
            self._states.append(_step(self._states[-1], token))

    def crop(self, length: int) -> None:
        """Keeps tokens [0, length)."""
        del self._tokens[length:]
        del self._states[length + 1 :]

    def hash_at(self, length: int) -> int:
        """Hash of tokens [0, length); `length` must not exceed the log's own."""
        return _signed(self._states[length])

    def reconcile(self, base_len: int, prefix_hash: int, catch_up: Sequence[int]) -> int | None:
        """Brings the log to the committed prefix that a command names.

        Args:
            base_len: committed length of the command.
            prefix_hash: hash of its tokens [0, base_len).
            catch_up: its tokens [base_len - len(catch_up), base_len).

        Returns:
            None when the log now holds exactly those tokens. Otherwise the log is unchanged and the result is the
            length from which tokens are
            needed: its own length when it is behind, 0 when the contents differ.
        """
        if base_len <= len(self) and self.hash_at(base_len) == prefix_hash:
            self.crop(base_len)
            return None
        start = base_len - len(catch_up)
        if start > len(self):
            return len(self)
        trial = self._states[start]
        for token in catch_up:
            trial = _step(trial, token)
        if _signed(trial) != prefix_hash:
            return 0
        self.crop(start)
        self.extend(catch_up)
        return None


def common_prefix_len(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix, by bisection: comparing slices costs far less than a loop in Python."""
    if type(left) is not type(right):  # a list and a tuple are never equal
        left, right = list(left), list(right)
    limit = min(len(left), len(right))
    if left[:limit] == right[:limit]:
        return limit
    # [0, agreed) agree, and the first difference lies in [agreed, differs).
    agreed, differs = 0, limit
    while differs - agreed > 1:
        middle = (agreed + differs) // 2
        if left[agreed:middle] == right[agreed:middle]:
            agreed = middle
        else:
            differs = middle
    return agreed
