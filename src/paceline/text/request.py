"""A generation as the doors ask for it, and as the session actor gets it. The same for gRPC and HTTP.

`paceline.text.validation` checks the first kind and `prepare` makes the second from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.messages import AcceptanceRule, SamplingParams
from paceline.text.commit import EndSettings
from paceline.token_log import EMPTY_HASH, extend_hash


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text, tokenized as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, rendered by the model's chat template."""

    messages: tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Ready token ids."""

    ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """Pins or forbids speculation for one request.

    Attributes:
        enabled: False is plain decoding through the same services.
        method: the only method to draft by; empty for whatever the drafter does.
        num_speculative_tokens: block size; 0 is plain decoding; None for the gateway's setting.
    """

    enabled: bool = True
    method: str = ""
    num_speculative_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a client asks for, not checked yet.

    Attributes:
        prompt: text, conversation or ids.
        model: name of a served model; empty when only one is served.
        sampling: how tokens are chosen; its `seed` is not used.
        seed: keys the noise; None: one is drawn at admission.
        max_tokens: most tokens to generate; None for what the context leaves.
        stop: strings that end the generation.
        rule: acceptance rule.
        speculation: options of speculation.
        session: name of the session; None: one is drawn at admission.
    """

    prompt: Prompt
    model: str = ""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    rule: AcceptanceRule = AcceptanceRule.MATCH
    speculation: SpeculationOptions = SpeculationOptions()
    session: str | None = None


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """Goes on with a session whose stream broke.

    Attributes:
        session: its name.
        next_token: index in the session of the first token that the client lacks; None for the generation's first.
        ids_hash: hash of the generated ids before it, as `extend_hash` makes it.
    """

    session: str
    next_token: int | None = None
    ids_hash: int = EMPTY_HASH

    @classmethod
    def after(cls, session: str, prompt_tokens: int, token_ids: Iterable[int]) -> ResumeRequest:
        """For a client that has got the first `token_ids` of a generation.

        Args:
            session: its name, from `Started`.
            prompt_tokens: from `Started`.
            token_ids: all ids that came in its chunks.
        """
        ids = tuple(token_ids)
        return cls(session, prompt_tokens + len(ids), extend_hash(EMPTY_HASH, ids))


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked request, ready to run.

    Attributes:
        prompt_ids: tokens of the prompt; at least one, all inside the vocabulary.
        end: when the generation ends; its max_new_tokens fits the context.
        request: what was asked for.
    """

    prompt_ids: tuple[int, ...]
    end: EndSettings
    request: GenerationRequest
