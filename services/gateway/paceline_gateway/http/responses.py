"""What the endpoints answer, in OpenAI's shapes; fields of our own are said to be extensions.

A field without a default is in every answer. One with a default is there only when it was asked for: these models are
written without the fields that were not set.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

FinishedBy = Literal["stop", "length"]


class ResponseModel(BaseModel):
    """Base of all answers."""

    model_config = ConfigDict(use_attribute_docstrings=True, frozen=True)

    def to_json(self) -> str:
        """The answer as it is sent: fields that were not set are left out."""
        return self.model_dump_json(exclude_unset=True)


class Usage(ResponseModel):
    """Tokens of the whole request. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class SpeculativeDecoding(ResponseModel):
    """What speculation did for one choice, all of it measured. Times are sums over the choice, in milliseconds."""

    mean_acceptance_length: float
    """Tokens of a judged draft that stood, the target's own included: 1 + accepted / drafts."""
    draft_acceptance_rate: float
    """Accepted draft tokens / judged draft tokens."""
    acceptance_histogram: list[int]
    """Entry i: drafts of which exactly i tokens were accepted."""
    num_drafts: int
    """Drafts that were judged."""
    num_draft_tokens: int
    """Draft tokens that were judged."""
    num_accepted_tokens: int
    """Draft tokens that were accepted and are part of the answer."""
    num_draft_tokens_per_pos: list[int]
    """Entry i: how often a draft had a token at position i."""
    num_accepted_tokens_per_pos: list[int]
    """Entry i: how often that token was accepted."""
    num_wasted_draft_tokens: int
    """Draft tokens that were dropped unjudged, because they built on something that did not happen."""
    draft_ahead_hits: int
    """Drafts that were ready before the verdict that they build on."""
    num_off_rounds: int
    """Rounds without a draft because the governor held plain decoding for faster."""
    num_probe_rounds: int
    """Rounds in which it tried one all the same, to see whether that still holds."""
    num_target_passes: int
    """Passes of the target, the prompt's included."""
    tokens_per_target_pass: float
    goodput_tokens_per_second: float
    """Tokens of the answer / total time."""
    time_to_first_token_ms: float
    total_ms: float
    draft_ms: float
    """Drafters at work."""
    verify_ms: float
    """Verifiers at work."""
    queue_ms: float
    """Commands waiting in replicas."""
    wire_ms: float
    """Round trips less the replicas' own time."""
    draft_wait_ms: float
    """Waiting for a draft with no pass running."""
    drafter_memory_bytes: int
    """Memory that the drafter holds on top of the target."""
    methods: list[str]
    """Methods whose drafts were judged."""
    warnings: list[str]
    """What the client should know, such as that no drafter is there."""


class ChoiceMetrics(ResponseModel):
    """Measurements of one choice."""

    speculative_decoding: SpeculativeDecoding


class TopLogprob(ResponseModel):
    """One alternative."""

    token: str
    logprob: float
    """-9999.0 where the token is impossible."""
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """One token and its alternatives, best first."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    """One entry for each token."""

    content: list[TokenLogprob]


class CompletionLogprobs(ResponseModel):
    """Lists with one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
    """Where in the choice's text each token begins."""


class _Choice(ResponseModel):
    index: int
    """Prompt index * n + number of the choice."""
    finish_reason: FinishedBy | None
    """Why it ended; null until the last chunk of a stream."""
    token_ids: list[int] | None = None
    """With `return_token_ids`. An extension."""
    promise: Literal["exact", "distribution"] | None = None
    """exact: the tokens of plain decoding, given equal logits; distribution: its distribution; set where the choice
    ends. An extension."""
    metrics: ChoiceMetrics | None = None
    """With `metrics`, where the choice ends. An extension."""


class _Head(ResponseModel):
    id: str
    created: int
    """Unix time of the request, in seconds."""
    model: str
    system_fingerprint: str
    """Changes with the model's name and the server's version."""


class ChatMessage(ResponseModel):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str


class ChatChoice(_Choice):
    """One answer."""

    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(_Head):
    """Answer of POST /v1/chat/completions without `stream`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids`. An extension."""


class ChatDelta(ResponseModel):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(_Choice):
    """What a chunk adds to one choice."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatCompletionChunk(_Head):
    """Event of POST /v1/chat/completions with `stream`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    """With `include_usage`: null but in the last chunk, which has no choices."""
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids`, in the first chunk of each choice. An extension."""


class CompletionChoice(_Choice):
    """One continuation, or what a chunk adds to it."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = None
    """With `return_token_ids`; in a stream in the first chunk of each choice. An extension."""


class Completion(_Head):
    """Answer of POST /v1/completions; with `stream` each event is one too."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None
    """In a stream only with `include_usage`: null but in the last chunk, which has no choices."""


class ModelCard(ResponseModel):
    """A model that can be asked for."""

    id: str
    object: Literal["model"]
    created: int
    """Unix time at which the server started, in seconds."""
    owned_by: str
    max_model_len: int | None
    """Tokens that prompt and completion may have together; null while no verifier is there. An extension."""
    methods: list[str]
    """Drafting methods that some drafter offers now. An extension."""


class ModelList(ResponseModel):
    """All models that can be asked for."""

    object: Literal["list"]
    data: list[ModelCard]
