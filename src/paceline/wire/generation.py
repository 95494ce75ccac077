"""The gateway's public API: requests of clients and what they get.

Requests are untrusted, but nothing is judged here beyond what protobuf cannot say: `paceline.text.validation` is the
one check at the door.
"""

from __future__ import annotations

from paceline import generation as g
from paceline.errors import InvalidArgument
from paceline.messages import FinishReason, SamplingParams, TokenLogprobs, TokenOrigin
from paceline.session.store import SessionState
from paceline.text.request import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    Prompt,
    ResumeRequest,
    SpeculationOptions,
    TextPrompt,
    TokenPrompt,
)
from paceline.v1 import gateway_pb2
from paceline.wire.misfit import request_misfit, value_misfit
from paceline.wire.parts import rule_from_pb, rule_to_pb, sampling_from_pb, sampling_to_pb

_PROMISE_TO_PB = {
    g.Promise.EXACT: gateway_pb2.PROMISE_EXACT,
    g.Promise.DISTRIBUTION: gateway_pb2.PROMISE_DISTRIBUTION,
}
_PROMISE_FROM_PB = {number: promise for promise, number in _PROMISE_TO_PB.items()}
_ORIGIN_TO_PB = {
    TokenOrigin.ACCEPTED: gateway_pb2.TOKEN_ORIGIN_ACCEPTED,
    TokenOrigin.RECOVERED: gateway_pb2.TOKEN_ORIGIN_RECOVERED,
    TokenOrigin.BONUS: gateway_pb2.TOKEN_ORIGIN_BONUS,
    TokenOrigin.PLAIN: gateway_pb2.TOKEN_ORIGIN_PLAIN,
    TokenOrigin.RECORDED: gateway_pb2.TOKEN_ORIGIN_RECORDED,
}
_ORIGIN_FROM_PB = {number: origin for origin, number in _ORIGIN_TO_PB.items()}
_FINISH_TO_PB = {
    FinishReason.STOP: gateway_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: gateway_pb2.FINISH_REASON_LENGTH,
}
_FINISH_FROM_PB = {number: reason for reason, number in _FINISH_TO_PB.items()}
_STATE_TO_PB = {
    SessionState.RUNNING: gateway_pb2.SESSION_STATE_RUNNING,
    SessionState.FINISHED: gateway_pb2.SESSION_STATE_FINISHED,
    SessionState.FAILED: gateway_pb2.SESSION_STATE_FAILED,
    SessionState.CANCELLED: gateway_pb2.SESSION_STATE_CANCELLED,
}
_STATE_FROM_PB = {number: state for state, number in _STATE_TO_PB.items()}

# --- requests -------------------------------------------------------------------------------------------------------


def generate_request_to_pb(request: GenerationRequest) -> gateway_pb2.GenerateRequest:
    """What a client sends.

    Raises:
        InvalidArgument: no message can hold a value, such as a number too large or text that is not Unicode.
    """
    try:
        return _request_to_pb(request)
    except (TypeError, ValueError) as error:
        raise request_misfit(request, error) from error


def _request_to_pb(request: GenerationRequest) -> gateway_pb2.GenerateRequest:
    sampling = sampling_to_pb(request.sampling)
    if request.seed is None:
        sampling.ClearField("seed")
    else:
        sampling.seed = request.seed
    message = gateway_pb2.GenerateRequest(
        model=request.model,
        sampling=sampling,
        max_tokens=request.max_tokens,
        stop=request.stop,
        speculation=gateway_pb2.SpeculationOptions(
            enabled=request.speculation.enabled,
            method=request.speculation.method,
            num_speculative_tokens=request.speculation.num_speculative_tokens,
        ),
        acceptance_rule=rule_to_pb(request.rule),
        session=request.session,
    )
    match request.prompt:
        case TextPrompt(text):
            message.text = text
        case ChatPrompt(messages):
            message.chat.messages.extend(
                [gateway_pb2.ChatMessage(role=turn.role, content=turn.content) for turn in messages]
            )
            message.chat.SetInParent()
        case TokenPrompt(ids):
            message.token_ids.ids.extend(ids)
            message.token_ids.SetInParent()
    return message


def generate_request_from_pb(message: gateway_pb2.GenerateRequest) -> GenerationRequest:
    """What a gateway receives; unset fields take their defaults.

    Raises:
        InvalidArgument: there is no prompt, or an enum has an unknown value.
    """
    options = message.speculation
    return GenerationRequest(
        prompt=_prompt_from_pb(message),
        model=message.model,
        sampling=sampling_from_pb(message.sampling) if message.HasField("sampling") else SamplingParams(),
        seed=message.sampling.seed if message.sampling.HasField("seed") else None,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        stop=tuple(message.stop),
        rule=rule_from_pb(message.acceptance_rule),
        speculation=SpeculationOptions(
            enabled=options.enabled if options.HasField("enabled") else True,
            method=options.method,
            num_speculative_tokens=(
                options.num_speculative_tokens if options.HasField("num_speculative_tokens") else None
            ),
        ),
        session=message.session if message.HasField("session") else None,
    )


def _prompt_from_pb(message: gateway_pb2.GenerateRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(message.text)
        case "chat":
            return ChatPrompt(tuple([ChatMessage(turn.role, turn.content) for turn in message.chat.messages]))
        case "token_ids":
            return TokenPrompt(tuple(message.token_ids.ids))
        case _:
            raise InvalidArgument("prompt is missing; give text, chat or token_ids", field="prompt")


def resume_request_to_pb(request: ResumeRequest) -> gateway_pb2.ResumeRequest:
    """What a client sends to go on with a session.

    Raises:
        InvalidArgument: no message can hold a value.
    """
    values = (("session", request.session), ("next_token", request.next_token), ("ids_hash", request.ids_hash))
    for name, value in values:
        if (misfit := value_misfit(gateway_pb2.ResumeRequest, name, value, name)) is not None:
            raise misfit
    return gateway_pb2.ResumeRequest(session=request.session, next_token=request.next_token, ids_hash=request.ids_hash)


def resume_request_from_pb(message: gateway_pb2.ResumeRequest) -> ResumeRequest:
    """What a gateway receives."""
    next_token = message.next_token if message.HasField("next_token") else None
    return ResumeRequest(message.session, next_token, message.ids_hash)


# --- events ---------------------------------------------------------------------------------------------------------


def generation_event_to_pb(event: g.GenerationEvent) -> gateway_pb2.GenerateResponse:
    """One event of a stream."""
    match event:
        case g.Chunk():
            return gateway_pb2.GenerateResponse(chunk=_chunk_to_pb(event))
        case g.Started():
            return gateway_pb2.GenerateResponse(started=_started_to_pb(event))
        case g.Finished():
            return gateway_pb2.GenerateResponse(finished=_finished_to_pb(event))


def resume_event_to_pb(event: g.GenerationEvent) -> gateway_pb2.ResumeResponse:
    """One event of a stream that goes on."""
    match event:
        case g.Chunk():
            return gateway_pb2.ResumeResponse(chunk=_chunk_to_pb(event))
        case g.Started():
            return gateway_pb2.ResumeResponse(started=_started_to_pb(event))
        case g.Finished():
            return gateway_pb2.ResumeResponse(finished=_finished_to_pb(event))


def generation_event_from_pb(
    message: gateway_pb2.GenerateResponse | gateway_pb2.ResumeResponse,
) -> g.GenerationEvent | None:
    """One event of a stream; None for one that this version does not know."""
    match message.WhichOneof("event"):
        case "chunk":
            return _chunk_from_pb(message.chunk)
        case "started":
            return _started_from_pb(message.started)
        case "finished":
            return _finished_from_pb(message.finished)
        case _:
            return None


def _started_to_pb(event: g.Started) -> gateway_pb2.Started:
    return gateway_pb2.Started(
        session=event.session,
        model=event.model,
        prompt_tokens=event.prompt_tokens,
        seed=event.seed,
        promise=_PROMISE_TO_PB[event.promise],
        warnings=event.warnings,
    )


def _started_from_pb(message: gateway_pb2.Started) -> g.Started:
    return g.Started(
        session=message.session,
        model=message.model,
        prompt_tokens=message.prompt_tokens,
        seed=message.seed,
        promise=_PROMISE_FROM_PB.get(message.promise, g.Promise.DISTRIBUTION),
        warnings=tuple(message.warnings),
    )


def _chunk_to_pb(event: g.Chunk) -> gateway_pb2.Chunk:
    return gateway_pb2.Chunk(
        text=event.text,
        token_ids=event.token_ids,
        origins=[_ORIGIN_TO_PB[origin] for origin in event.origins],
        next_token=event.next_token,
        durable=event.durable,
        text_lengths=event.text_lengths,
        logprobs=[
            gateway_pb2.ChunkLogprobs(
                logprob=entry.logprob, top_tokens=entry.top_tokens, top_logprobs=entry.top_logprobs
            )
            for entry in event.logprobs
        ],
    )


def _chunk_from_pb(message: gateway_pb2.Chunk) -> g.Chunk:
    return g.Chunk(
        text=message.text,
        token_ids=tuple(message.token_ids),
        origins=tuple([_ORIGIN_FROM_PB.get(origin, TokenOrigin.PLAIN) for origin in message.origins]),
        next_token=message.next_token,
        durable=message.durable,
        text_lengths=tuple(message.text_lengths),
        logprobs=tuple(
            [
                TokenLogprobs(entry.logprob, tuple(entry.top_tokens), tuple(entry.top_logprobs))
                for entry in message.logprobs
            ]
        ),
    )


def _finished_to_pb(event: g.Finished) -> gateway_pb2.Finished:
    return gateway_pb2.Finished(
        finish_reason=_FINISH_TO_PB[event.finish_reason],
        prompt_tokens=event.prompt_tokens,
        completion_tokens=event.completion_tokens,
        evidence=_evidence_to_pb(event.evidence),
        stop_string=event.stop_string,
    )


def _finished_from_pb(message: gateway_pb2.Finished) -> g.Finished:
    return g.Finished(
        finish_reason=_FINISH_FROM_PB.get(message.finish_reason, FinishReason.STOP),
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        evidence=_evidence_from_pb(message.evidence),
        stop_string=message.stop_string,
    )


def _evidence_to_pb(evidence: g.Evidence) -> gateway_pb2.Evidence:
    return gateway_pb2.Evidence(
        target_passes=evidence.target_passes,
        tokens_per_target_pass=evidence.tokens_per_target_pass,
        draft_tokens=evidence.draft_tokens,
        accepted_tokens=evidence.accepted_tokens,
        drafted_per_position=evidence.drafted_per_position,
        accepted_per_position=evidence.accepted_per_position,
        wasted_draft_tokens=evidence.wasted_draft_tokens,
        ahead_hits=evidence.ahead_hits,
        time_to_first_token_ms=evidence.time_to_first_token_ms,
        total_ms=evidence.total_ms,
        draft_ms=evidence.draft_ms,
        verify_ms=evidence.verify_ms,
        queue_ms=evidence.queue_ms,
        wire_ms=evidence.wire_ms,
        draft_wait_ms=evidence.draft_wait_ms,
        drafter_memory_bytes=evidence.drafter_memory_bytes,
        methods=evidence.methods,
        verifier=evidence.verifier,
        drafter=evidence.drafter,
        off_rounds=evidence.off_rounds,
        probe_rounds=evidence.probe_rounds,
    )


def _evidence_from_pb(message: gateway_pb2.Evidence) -> g.Evidence:
    return g.Evidence(
        target_passes=message.target_passes,
        tokens_per_target_pass=message.tokens_per_target_pass,
        draft_tokens=message.draft_tokens,
        accepted_tokens=message.accepted_tokens,
        drafted_per_position=tuple(message.drafted_per_position),
        accepted_per_position=tuple(message.accepted_per_position),
        wasted_draft_tokens=message.wasted_draft_tokens,
        ahead_hits=message.ahead_hits,
        time_to_first_token_ms=message.time_to_first_token_ms,
        total_ms=message.total_ms,
        draft_ms=message.draft_ms,
        verify_ms=message.verify_ms,
        queue_ms=message.queue_ms,
        wire_ms=message.wire_ms,
        draft_wait_ms=message.draft_wait_ms,
        drafter_memory_bytes=message.drafter_memory_bytes,
        methods=tuple(message.methods),
        verifier=message.verifier,
        drafter=message.drafter,
        off_rounds=message.off_rounds,
        probe_rounds=message.probe_rounds,
    )


# --- sessions and models --------------------------------------------------------------------------------------------


def get_session_request_to_pb(session: str) -> gateway_pb2.GetSessionRequest:
    """What a client sends.

    Raises:
        InvalidArgument: no message can hold the name.
    """
    if (misfit := value_misfit(gateway_pb2.GetSessionRequest, "session", session, "session")) is not None:
        raise misfit
    return gateway_pb2.GetSessionRequest(session=session)


def session_info_to_pb(info: g.SessionInfo) -> gateway_pb2.GetSessionResponse:
    """The record of a session."""
    return gateway_pb2.GetSessionResponse(
        session=info.session,
        epoch=info.epoch,
        state=_STATE_TO_PB[info.state],
        model=info.model,
        seed=info.seed,
        generation_start=info.generation_start,
        committed_len=info.committed_len,
        tokens=info.tokens,
        verifier=info.verifier,
        verifier_kv_len=info.verifier_kv_len,
        drafter=info.drafter,
        drafter_kv_len=info.drafter_kv_len,
        finish_reason=info.finish_reason,
    )


def session_info_from_pb(message: gateway_pb2.GetSessionResponse) -> g.SessionInfo:
    """The record of a session."""
    return g.SessionInfo(
        session=message.session,
        epoch=message.epoch,
        state=_STATE_FROM_PB.get(message.state, SessionState.FAILED),
        model=message.model,
        seed=message.seed,
        generation_start=message.generation_start,
        tokens=tuple(message.tokens),
        verifier=message.verifier,
        verifier_kv_len=message.verifier_kv_len,
        drafter=message.drafter,
        drafter_kv_len=message.drafter_kv_len,
        finish_reason=message.finish_reason,
    )


def served_model_to_pb(model: g.ServedModel) -> gateway_pb2.ServedModel:
    """One served model."""
    return gateway_pb2.ServedModel(model=model.model, max_model_len=model.max_model_len, methods=model.methods)


def served_model_from_pb(message: gateway_pb2.ServedModel) -> g.ServedModel:
    """One served model."""
    return g.ServedModel(message.model, message.max_model_len, tuple(message.methods))
