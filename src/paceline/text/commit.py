"""The one decision on when a generation ends, and on how much of its text may be sent.

Per token, in this order, first hit wins:

1. an end-of-sequence token, unless the request ignores them
2. one of the request's stop ids
3. one of the request's stop strings, completed by this token's text
4. length: max_tokens, or the end of the context

The token that ends a generation is committed and counted like any other. What of it is seen:

    end by                text of the ending token              text held back before it
    end-of-sequence, id   not sent                              sent: the end is natural
    stop string           up to the string; nothing after       up to the string
    length                sent                                  sent

Bytes of an unfinished character are never sent, at the end neither. The visible text after n tokens is a function
of the prompt and the n tokens alone: any process that replays the ids cuts the same text.

min_tokens: the n-th token (counted from 1) can end a generation by 1, 2 or 3 only if n > min_tokens. The verifier masks
end and stop ids until then; the check here is a guard. A stop string that is completed within the first min_tokens
tokens is ordinary text, also if more tokens follow; one that only begins there counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.errors import PacelineError
from paceline.messages import FinishReason
from paceline.text.detokenizer import Detokenizer
from paceline.text.stop_strings import StopMatcher
from paceline.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EndSettings:
    """When a generation ends.

    Attributes:
        max_new_tokens: most tokens to generate, the context's limit included; at least 1.
        eos_token_ids: the model's end tokens.
        stop_token_ids: the request's stop ids.
        stop: the request's stop strings.
        min_tokens: tokens that are generated at least.
        ignore_eos: end tokens do not end.
    """

    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class CommittedToken:
    """One final token.

    Attributes:
        token: its id.
        text: text that became visible with it; may hold text of earlier tokens that was held back.
        finish: why the generation ends with it; None if it goes on.
        stop_string: the stop string that ended it, if one did.
    """

    token: int
    text: str
    finish: FinishReason | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class CommittedRound:
    """The final tokens of one round: a prefix of what the verifier returned."""

    tokens: tuple[CommittedToken, ...]

    @property
    def num_tokens(self) -> int:
        """How many of the round's tokens are final; what the verifier holds beyond them is provisional."""
        return len(self.tokens)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The final ids."""
        return tuple([token.token for token in self.tokens])

    @property
    def text(self) -> str:
        """Text that became visible."""
        return "".join([token.text for token in self.tokens])

    @property
    def finish(self) -> FinishReason | None:
        """Why the generation ended, if it did."""
        return self.tokens[-1].finish if self.tokens else None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it, if one did."""
        return self.tokens[-1].stop_string if self.tokens else None


class Committer:
    """The generated tokens of one session, in order.

    Attributes:
        num_tokens: tokens committed so far.
        finish: why the generation has ended; None while it runs.
        stop_string: the stop string that ended it, if one did.
    """

    __slots__ = ("_detokenizer", "_end_ids", "_hidden", "_matcher", "_settings", "finish", "num_tokens", "stop_string")

    def __init__(self, tokenizer: Tokenizer, settings: EndSettings, prompt_ids: Sequence[int] = ()) -> None:
        self._settings = settings
        self._end_ids = settings.stop_token_ids | (frozenset() if settings.ignore_eos else settings.eos_token_ids)
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._matcher = StopMatcher(settings.stop) if settings.stop else None
        self._hidden = ""
        self.num_tokens = 0
        self.finish: FinishReason | None = None
        self.stop_string: str | None = None

    @property
    def remaining_tokens(self) -> int:
        """How many tokens may still come; a block deeper than this less one is of no use."""
        return 0 if self.finish is not None else self._settings.max_new_tokens - self.num_tokens

    def commit_token(self, token_id: int) -> CommittedToken:
        """Takes the next token and decides.

        Raises:
            PacelineError: the generation has ended already.
        """
        if self.finish is not None:
            raise PacelineError(f"token {token_id} was committed after the generation's end ({self.finish.value})")
        self.num_tokens += 1
        armed = self.num_tokens > self._settings.min_tokens
        if armed and token_id in self._end_ids:
            text = self._release()
            self.finish = FinishReason.STOP
        else:
            text = self._push_text(token_id, armed=armed)
        if self.finish is None and self.num_tokens >= self._settings.max_new_tokens:
            text += self._release()
            self.finish = FinishReason.LENGTH
        return CommittedToken(token_id, text, self.finish, self.stop_string)

    def commit_round(self, token_ids: Iterable[int]) -> CommittedRound:
        """Commits the tokens of a round up to and with the one that ends the generation; the others are not final."""
        committed = []
        for token_id in token_ids:
            committed.append(self.commit_token(token_id))
            if self.finish is not None:
                break
        return CommittedRound(tuple(committed))

    def _push_text(self, token_id: int, *, armed: bool) -> str:
        """Text that becomes visible with a token; sets `finish` if it completes a stop string."""
        new = self._detokenizer.push(token_id)
        if self._matcher is None:
            return new
        match = self._matcher.push(new, armed=armed)
        text = self._hidden + new
        if match is None:
            cut = len(text) - self._matcher.held
            self._hidden = text[cut:]
            return text[:cut]
        self._hidden = text[len(text) - len(new) + match.start :]
        self.finish = FinishReason.STOP
        self.stop_string = match.stop
        return text[: len(text) - len(self._hidden)]

    def _release(self) -> str:
        """The held text, which cannot become a stop string any more."""
        text, self._hidden = self._hidden, ""
        return text
