"""What a drafter allows, and what it refuses before it touches a session."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import InvalidArgument
from paceline.token_log import MAX_SESSION_TOKENS


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What the drafter allows.

    Attributes:
        max_draft_tokens: most tokens of one proposal.
        max_session_tokens: most tokens of a session, assumed ones included; more are refused. Beyond
            `max_model_len` but within this a session is served with empty blocks, so that its request decodes plainly.
        max_model_len: most tokens of context and proposal; None when the method has no limit.
        vocab_size: ids at or above it are refused; None when the method takes any.
    """

    max_draft_tokens: int = 16
    max_session_tokens: int = MAX_SESSION_TOKENS
    max_model_len: int | None = None
    vocab_size: int | None = None

    def check_len(self, length: int, name: str) -> None:
        """Checks how long a session would become.

        Args:
            length: in tokens.
            name: of the field that makes it so long.

        Raises:
            InvalidArgument: it is too long.
        """
        if length > self.max_session_tokens:
            raise InvalidArgument(
                f"with {name} the session has {length} tokens; this drafter takes at most {self.max_session_tokens}",
                field=name,
            )

    def check_ids(self, tokens: tuple[int, ...], name: str) -> None:
        """Checks tokens of the field of that name.

        Raises:
            InvalidArgument: one is not in the vocabulary.
        """
        limit = self.vocab_size
        if limit is not None and tokens and max(tokens) >= limit:
            raise InvalidArgument(f"{name} holds id {max(tokens)}; the vocabulary has {limit} ids", field=name)
