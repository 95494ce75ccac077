"""Prompt lookup: proposes what followed the context's last tokens when they occurred before. Needs no model.

The longest suffix of `prompt_lookup_min` to `prompt_lookup_max` tokens that occurred earlier is looked up, its most
recent earlier occurrence wins, and the tokens that followed it are the draft. An occurrence may overlap the suffix:
then the draft repeats itself, as in a run of equal tokens. Quoting, editing and summarising repeat their input; chat
seldom does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.drafting.method import DraftJob, MethodInfo
from paceline.errors import ConfigurationError
from paceline.token_log import common_prefix_len


class NgramIndex:
    """Where each n-gram of a growing and shrinking context ended last.

    An n-gram is entered when the token after it is known, so the suffix itself is never its own occurrence.

    | interval | n-grams that end there |
    |---|---|
    | [0, len - 1) | indexed |
    | [len - 1, len) | the suffix to look up |

    Following costs one dictionary step per new, removed or looked-up token and n-gram length, whatever the context's
    length. Each entry remembers the one it hid, so that a crop uncovers it.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(shortest, longest + 1)
        self._tokens: list[int] = []
        self._last_end: dict[tuple[int, ...], int] = {}
        # _hidden[i] holds, per length, the end that the n-gram ending at i replaced; None where there was none.
        self._hidden: list[list[int | None]] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def follow(self, context: Sequence[int]) -> None:
        """Makes `context` the indexed tokens; costs its difference from the last one."""
        keep = common_prefix_len(self._tokens, context)
        # n-grams that end in [keep - 1, ...) may have been entered for the old tokens.
        while len(self._hidden) > max(keep - 1, 0):
            self._remove_last()
        del self._tokens[keep:]
        self._tokens.extend(context[keep:])
        while len(self._hidden) < len(self._tokens) - 1:
            self._enter(len(self._hidden))

    def _gram(self, end: int, length: int) -> tuple[int, ...] | None:
        start = end + 1 - length
        return tuple(self._tokens[start : end + 1]) if start >= 0 else None

    def _enter(self, end: int) -> None:
        hidden: list[int | None] = []
        for length in self._lengths:
            gram = self._gram(end, length)
            if gram is None:
                break
            hidden.append(self._last_end.get(gram))
            self._last_end[gram] = end
        self._hidden.append(hidden)

    def _remove_last(self) -> None:
        end = len(self._hidden) - 1
        for length, previous in zip(self._lengths, self._hidden.pop(), strict=False):
            gram = self._gram(end, length)
            if gram is None:
                break
            if previous is None:
                del self._last_end[gram]
            else:
                self._last_end[gram] = previous

    def find(self, count: int) -> tuple[list[int], int]:
        """What followed the longest known suffix, and that suffix's length.

        Args:
            count: tokens wanted.

        Returns:
            `count` tokens and the length of the suffix; no tokens and 0 when no suffix occurred before.
        """
        end = len(self._tokens) - 1
        for length in reversed(self._lengths):
            gram = self._gram(end, length)
            earlier = None if gram is None else self._last_end.get(gram)
            if earlier is not None:
                period = end - earlier
                known = self._tokens[earlier + 1 : earlier + 1 + min(period, count)]
                return [known[index % period] for index in range(count)], length
        return [], 0


@dataclass(slots=True)
class NgramMethod:
    """The method `ngram`. Finishes every job in its first step.

    Confidences are `n / (n + 1)` for a suffix of n tokens: they order proposals, longer matches first, and are no
    measured probabilities.

    Attributes:
        prompt_lookup_min: shortest suffix that counts as an occurrence.
        prompt_lookup_max: longest suffix that is looked up.
    """

    prompt_lookup_min: int = 3
    prompt_lookup_max: int = 5
    _indexes: dict[str, NgramIndex] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ConfigurationError(
                f"prompt_lookup_min is {self.prompt_lookup_min} and prompt_lookup_max {self.prompt_lookup_max}; they "
                "must satisfy 1 <= min <= max",
                field="prompt_lookup_min",
            )

    @property
    def info(self) -> MethodInfo:
        """Facts about the method: it has no model, no rows and no limits."""
        return MethodInfo(name="ngram")

    def open(self, session: str) -> None:
        """Begins an empty index for the session."""
        self._indexes[session] = NgramIndex(self.prompt_lookup_min, self.prompt_lookup_max)

    def advance(self, jobs: Sequence[DraftJob]) -> None:
        """Finishes every job, with `max_depth` tokens or none."""
        for job in jobs:
            if job.done:
                continue
            job.method = "ngram"
            job.done = True
            index = self._indexes.get(job.session)
            if index is None:
                continue
            index.follow(list(job.context))
            tokens, length = index.find(job.max_depth)
            job.tokens.extend(tokens)
            job.confidences.extend([length / (length + 1)] * len(tokens))

    def kv_len(self, session: str) -> int:
        """Always 0: there are no rows."""
        return 0

    def close(self, session: str) -> None:
        """Drops the session's index."""
        self._indexes.pop(session, None)
