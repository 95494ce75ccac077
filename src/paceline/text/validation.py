"""The one check at the door, the same for gRPC and HTTP.

`validate` needs no tokenizer and comes first; `prepare` does everything from a raw request to one that can run. Both
raise `InvalidArgument`, which names the field and the limit. Behind the door nothing is checked again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from paceline.errors import InvalidArgument
from paceline.messages import SamplingParams
from paceline.method_names import METHOD_NAMES
from paceline.text.chat_template import ChatTemplate
from paceline.text.commit import EndSettings
from paceline.text.request import ChatPrompt, GenerationRequest, PreparedRequest, Prompt, TextPrompt, TokenPrompt
from paceline.text.tokenizer import Tokenizer

ROLES = ("system", "user", "assistant", "tool")
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0

_SESSION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_METHOD_NAME = re.compile(r"[a-z0-9_]{0,64}")
_INT32_MAX = 2**31 - 1
_LEAST_PROBED_CHARS = 16_384
_PROBED_CHARS_PER_TOKEN = 16
"""A text that fits has hardly ever more, so that it is not encoded twice."""
_INT64 = (-(2**63), 2**63 - 1)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Sizes that a door accepts.

    Attributes:
        max_text_bytes: UTF-8 bytes of a prompt, all messages together.
        max_messages: messages of a conversation.
        max_stop_strings: number of stop strings.
        max_stop_chars: characters of one stop string.
        max_stop_token_ids: number of stop ids.
        max_logit_bias_entries: tokens with a bias.
        max_speculative_tokens: largest block that a request may pin.
    """

    max_text_bytes: int = 4 * 2**20
    max_messages: int = 4096
    max_stop_strings: int = 16
    max_stop_chars: int = 256
    max_stop_token_ids: int = 256
    max_logit_bias_entries: int = 1024
    max_speculative_tokens: int = 64


DEFAULT_LIMITS = RequestLimits()


def prepare(
    request: GenerationRequest,
    *,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    vocab_size: int,
    max_model_len: int,
    offered_methods: Collection[str] = (),
    limits: RequestLimits = DEFAULT_LIMITS,
) -> PreparedRequest:
    """Checks a request, turns its prompt into ids and settles when it ends.

    Encoding a long prompt takes milliseconds: call it from a thread where that matters.

    Args:
        request: what the client sent.
        tokenizer: the model's.
        template: the model's chat template.
        vocab_size: ids at or above it are refused.
        max_model_len: tokens that one session may hold.
        offered_methods: drafting methods of the fleet's own, which may be asked for besides those of Paceline.
        limits: sizes that the door accepts.

    Raises:
        InvalidArgument: a field cannot work; nothing was done.
    """
    validate(request, vocab_size=vocab_size, offered_methods=offered_methods, limits=limits)
    prompt_ids = _encode(request.prompt, tokenizer, template, max_model_len)
    max_new_tokens = fit_context(
        len(prompt_ids), request.max_tokens, request.sampling.min_tokens, max_model_len=max_model_len
    )
    return PreparedRequest(prompt_ids, end_settings(request, tokenizer, max_new_tokens), request)


def end_settings(request: GenerationRequest, tokenizer: Tokenizer, max_new_tokens: int) -> EndSettings:
    """When a request's generation ends.

    Args:
        request: a checked one.
        tokenizer: the model's.
        max_new_tokens: most tokens, of which there is room in the context.
    """
    return EndSettings(
        max_new_tokens=max_new_tokens,
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        stop_token_ids=frozenset(request.sampling.stop_token_ids),
        stop=request.stop,
        min_tokens=request.sampling.min_tokens,
        ignore_eos=request.sampling.ignore_eos,
    )


def validate(
    request: GenerationRequest,
    *,
    vocab_size: int,
    offered_methods: Collection[str] = (),
    limits: RequestLimits = DEFAULT_LIMITS,
) -> None:
    """Checks all that can be checked without a tokenizer.

    Raises:
        InvalidArgument: names the first field at fault and its limit.
    """
    _check_prompt(request.prompt, vocab_size, limits)
    validate_sampling(request.sampling, vocab_size=vocab_size, limits=limits)
    _check_lengths(request)
    _check_stop(request.stop, limits)
    _check_speculation(request, offered_methods, limits)
    if request.seed is not None and not _INT64[0] <= request.seed <= _INT64[1]:
        raise InvalidArgument(f"seed is {request.seed}; it must fit 64 bits, sign included", field="seed")
    if request.session is not None and not _SESSION_NAME.fullmatch(request.session):
        raise InvalidArgument("session must be 1 to 128 characters of [A-Za-z0-9_.-]", field="session")


def fit_context(prompt_tokens: int, max_tokens: int | None, min_tokens: int, *, max_model_len: int) -> int:
    """Most tokens to generate after a prompt, at least 1.

    Raises:
        InvalidArgument: the prompt is empty or leaves no room, or the room is less than min_tokens.
    """
    if prompt_tokens < 1:
        raise InvalidArgument("prompt is empty; it must have at least one token", field="prompt")
    room = max_model_len - prompt_tokens
    if room < 1:
        raise InvalidArgument(
            f"prompt has {prompt_tokens} tokens; at most {max_model_len - 1} are allowed, since the model's context of "
            f"{max_model_len} tokens must hold at least one generated token too",
            field="prompt",
        )
    if min_tokens > room:
        raise InvalidArgument(
            f"min_tokens is {min_tokens}; after a prompt of {prompt_tokens} tokens the model's context of "
            f"{max_model_len} tokens has room for {room}",
            field="min_tokens",
        )
    return room if max_tokens is None else min(max_tokens, room)


def _encode(prompt: Prompt, tokenizer: Tokenizer, template: ChatTemplate, max_model_len: int) -> tuple[int, ...]:
    match prompt:
        case TextPrompt(text):
            _check_room(text, tokenizer, max_model_len)
            return tokenizer.encode(text)
        case ChatPrompt(messages):
            text = template.render(messages)
            _check_room(text, tokenizer, max_model_len)
            return tokenizer.encode(text, add_special_tokens=False)
        case TokenPrompt(ids):
            return ids


def _check_room(text: str, tokenizer: Tokenizer, max_model_len: int) -> None:
    """Refuses a text whose beginning alone is too long: to encode four megabytes takes seconds and 700 MB.

    How a text is cut changes the tokens around the cut, hence the margin.
    """
    num_chars = max(_LEAST_PROBED_CHARS, _PROBED_CHARS_PER_TOKEN * max_model_len)
    while num_chars < len(text):
        if 4 * len(tokenizer.encode(text[:num_chars], add_special_tokens=False)) > 5 * max_model_len:
            raise InvalidArgument(
                f"prompt has {len(text)} characters, which are more tokens than the {max_model_len - 1} that are "
                f"allowed, since the model's context of {max_model_len} tokens must hold at least one generated token "
                "too",
                field="prompt",
            )
        num_chars *= 4


def _check_prompt(prompt: Prompt, vocab_size: int, limits: RequestLimits) -> None:
    match prompt:
        case TextPrompt(text):
            _check_text(text, "prompt", limits.max_text_bytes)
            if not text:
                raise InvalidArgument("prompt is empty; it must have at least one character", field="prompt")
        case ChatPrompt(messages):
            if not 1 <= len(messages) <= limits.max_messages:
                raise InvalidArgument(
                    f"messages has {len(messages)} entries; it must have 1 to {limits.max_messages}", field="messages"
                )
            left = limits.max_text_bytes
            for index, message in enumerate(messages):
                if message.role not in ROLES:
                    raise InvalidArgument(
                        f"messages[{index}].role must be one of {', '.join(ROLES)}", field=f"messages[{index}].role"
                    )
                left -= _check_text(message.content, f"messages[{index}].content", left)
        case TokenPrompt(ids):
            if not ids:
                raise InvalidArgument("prompt is empty; it must have at least one token", field="prompt")
            _check_ids(ids, "prompt", vocab_size)


def _check_text(text: str, field: str, max_bytes: int) -> int:
    """Checks Unicode and size; returns the size in bytes."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{field} is not valid Unicode: lone surrogate at character {error.start}", field=field
        ) from error
    if size > max_bytes:
        raise InvalidArgument(f"{field} has {size} bytes; {max_bytes} are allowed here", field=field)
    return size


def _check_ids(ids: Sequence[int], field: str, vocab_size: int) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        index, token_id = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        raise InvalidArgument(f"{field}[{index}] is token id {token_id}; ids must be in [0, {vocab_size})", field=field)


def _check_range(field: str, value: float, low: float, high: float, *, above_low: bool = False) -> None:
    """Refuses values outside [low, high], or (low, high] with `above_low`; NaN is outside of everything."""
    if math.isnan(value) or not low <= value <= high or (above_low and value == low):
        bracket = "(" if above_low else "["
        raise InvalidArgument(f"{field} is {value}; it must be in {bracket}{low:g}, {high:g}]", field=field)


def validate_sampling(sampling: SamplingParams, *, vocab_size: int, limits: RequestLimits = DEFAULT_LIMITS) -> None:
    """Checks sampling parameters alone: the part of `validate` that a replica's door needs too.

    Raises:
        InvalidArgument: names the first field at fault and its limit.
    """
    _check_range("temperature", sampling.temperature, 0, MAX_TEMPERATURE)
    _check_range("top_p", sampling.top_p, 0, 1, above_low=True)
    _check_range("min_p", sampling.min_p, 0, 1)
    _check_range("repetition_penalty", sampling.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    _check_range("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_range("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    if not 0 <= sampling.top_k <= _INT32_MAX:
        raise InvalidArgument(f"top_k is {sampling.top_k}; it must be at least 0, and 0 keeps all", field="top_k")
    if not 0 <= sampling.min_tokens <= _INT32_MAX:
        raise InvalidArgument(
            f"min_tokens is {sampling.min_tokens}; it must be in [0, {_INT32_MAX}]", field="min_tokens"
        )
    if sampling.top_logprobs is not None and not 0 <= sampling.top_logprobs <= MAX_TOP_LOGPROBS:
        raise InvalidArgument(
            f"top_logprobs is {sampling.top_logprobs}; it must be in [0, {MAX_TOP_LOGPROBS}]", field="top_logprobs"
        )
    _check_count("logit_bias", len(sampling.logit_bias), limits.max_logit_bias_entries)
    _check_ids(tuple(sampling.logit_bias), "logit_bias", vocab_size)
    for token_id, bias in sampling.logit_bias.items():
        if math.isnan(bias) or abs(bias) > MAX_LOGIT_BIAS:
            raise InvalidArgument(
                f"logit_bias of token {token_id} is {bias}; it must be in [{-MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]",
                field="logit_bias",
            )
    _check_count("stop_token_ids", len(sampling.stop_token_ids), limits.max_stop_token_ids)
    _check_ids(sampling.stop_token_ids, "stop_token_ids", vocab_size)


def _check_count(field: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidArgument(f"{field} has {count} entries; at most {limit} are allowed", field=field)


def _check_lengths(request: GenerationRequest) -> None:
    min_tokens, max_tokens = request.sampling.min_tokens, request.max_tokens
    if max_tokens is not None and not 1 <= max_tokens <= _INT32_MAX:
        raise InvalidArgument(f"max_tokens is {max_tokens}; it must be in [1, {_INT32_MAX}]", field="max_tokens")
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidArgument(
            f"min_tokens is {min_tokens}; it must not exceed max_tokens, which is {max_tokens}", field="min_tokens"
        )


def _check_stop(stop: Sequence[str], limits: RequestLimits) -> None:
    _check_count("stop", len(stop), limits.max_stop_strings)
    for index, text in enumerate(stop):
        if not text:
            raise InvalidArgument(f"stop[{index}] is empty; it must have at least one character", field="stop")
        if len(text) > limits.max_stop_chars:
            raise InvalidArgument(
                f"stop[{index}] has {len(text)} characters; at most {limits.max_stop_chars} are allowed", field="stop"
            )
        _check_text(text, f"stop[{index}]", 4 * limits.max_stop_chars)


def _check_speculation(request: GenerationRequest, offered_methods: Collection[str], limits: RequestLimits) -> None:
    options = request.speculation
    if not _METHOD_NAME.fullmatch(options.method):
        raise InvalidArgument(
            "speculation.method must be at most 64 characters of [a-z0-9_]", field="speculation.method"
        )
    known = tuple(dict.fromkeys([*METHOD_NAMES, *offered_methods]))
    if options.method and options.method not in known:
        raise InvalidArgument(
            f"speculation.method {options.method!r} is not known here; known are {', '.join(known)}",
            field="speculation.method",
        )
    count = options.num_speculative_tokens
    if count is not None and not 0 <= count <= limits.max_speculative_tokens:
        raise InvalidArgument(
            f"speculation.num_speculative_tokens is {count}; it must be in [0, {limits.max_speculative_tokens}]",
            field="speculation.num_speculative_tokens",
        )
