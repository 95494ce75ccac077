"""From the fields of an HTTP request to what the door takes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from paceline.errors import InvalidArgument
from paceline.messages import AcceptanceRule, SamplingParams
from paceline.text.request import GenerationRequest, Prompt, SpeculationOptions
from paceline_gateway.http.request_fields import GenerationFields, Speculation

_TOKEN_ID = re.compile(r"-?[0-9]{1,10}")
_DEFAULTS = SamplingParams()


def generation_request(fields: GenerationFields, prompt: Prompt, top_logprobs: int | None) -> GenerationRequest:
    """What is asked for, with one of the prompts.

    Args:
        fields: of the HTTP request; null and left out are the same.
        prompt: the first one.
        top_logprobs: alternatives wanted for each token; None for no log-probabilities.

    Raises:
        InvalidArgument: two fields contradict each other, or a key is no token id.
    """
    if fields.stream_options is not None and not fields.stream:
        raise InvalidArgument("stream_options needs stream: true", field="stream_options")
    return GenerationRequest(
        prompt,
        model=fields.model or "",
        sampling=_sampling(fields, top_logprobs),
        seed=fields.seed,
        max_tokens=_max_tokens(fields),
        stop=fields.stop or (),
        rule=AcceptanceRule(fields.acceptance_rule or AcceptanceRule.MATCH.value),
        speculation=_speculation(fields.speculation),
        session=fields.session_id,
    )


def _max_tokens(fields: GenerationFields) -> int | None:
    old, new = fields.max_tokens, fields.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidArgument(
            f"max_tokens is {old} and max_completion_tokens is {new}; they mean the same, so give one of them",
            field="max_completion_tokens",
        )
    return old if new is None else new


def _sampling(fields: GenerationFields, top_logprobs: int | None) -> SamplingParams:
    return SamplingParams(
        temperature=_or(fields.temperature, _DEFAULTS.temperature),
        top_p=_or(fields.top_p, _DEFAULTS.top_p),
        top_k=0 if fields.top_k == -1 else fields.top_k or 0,
        min_p=_or(fields.min_p, _DEFAULTS.min_p),
        repetition_penalty=_or(fields.repetition_penalty, _DEFAULTS.repetition_penalty),
        presence_penalty=_or(fields.presence_penalty, _DEFAULTS.presence_penalty),
        frequency_penalty=_or(fields.frequency_penalty, _DEFAULTS.frequency_penalty),
        logit_bias=_logit_bias(fields.logit_bias or {}),
        min_tokens=fields.min_tokens or 0,
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        top_logprobs=top_logprobs,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    for key in biases:
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidArgument(f"logit_bias has the key {key[:40]!r}, which is no token id", field="logit_bias")
    return {int(key): bias for key, bias in biases.items()}


def _speculation(options: Speculation | None) -> SpeculationOptions:
    if options is None:
        return SpeculationOptions()
    return SpeculationOptions(
        enabled=options.enabled is not False,
        method=options.method or "",
        num_speculative_tokens=options.num_speculative_tokens,
    )
