"""The public API on the wire: what goes out comes back the same."""

from __future__ import annotations

from dataclasses import fields

import pytest

from paceline import generation as g
from paceline.errors import InvalidArgument
from paceline.messages import FinishReason, SamplingParams, TokenLogprobs, TokenOrigin
from paceline.session.store import SessionState
from paceline.text.request import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    Prompt,
    SpeculationOptions,
    TextPrompt,
    TokenPrompt,
)
from paceline.v1 import gateway_pb2
from paceline.wire import generation as wire

EVIDENCE = g.Evidence(
    target_passes=3,
    tokens_per_target_pass=2.5,
    draft_tokens=8,
    accepted_tokens=5,
    drafted_per_position=(2, 2),
    accepted_per_position=(2, 1),
    wasted_draft_tokens=4,
    ahead_hits=1,
    time_to_first_token_ms=1.5,
    total_ms=9.5,
    draft_ms=2.5,
    verify_ms=3.5,
    queue_ms=0.5,
    wire_ms=0.25,
    draft_wait_ms=0.75,
    drafter_memory_bytes=2**33,
    methods=("ngram", "draft_model"),
    verifier="127.0.0.1:1",
    drafter="127.0.0.1:2",
)


@pytest.mark.parametrize(
    "prompt",
    [
        TextPrompt("é"),
        TextPrompt(""),
        ChatPrompt((ChatMessage("user", "hi"), ChatMessage("assistant", ""))),
        ChatPrompt(()),
        TokenPrompt((1, 2, 3)),
        TokenPrompt(()),
    ],
)
@pytest.mark.parametrize("seed", [None, 0, -(2**63)])
def test_requests_come_back_the_same(prompt: Prompt, seed: int | None) -> None:
    request = GenerationRequest(
        prompt=prompt,
        model="m",
        sampling=SamplingParams(temperature=0.5, top_k=4, logit_bias={3: -1.5}, stop_token_ids=(7,), top_logprobs=0),
        seed=seed,
        max_tokens=5,
        stop=("x",),
        speculation=SpeculationOptions(enabled=False, method="ngram", num_speculative_tokens=0),
        session="s",
    )
    message = gateway_pb2.GenerateRequest.FromString(wire.generate_request_to_pb(request).SerializeToString())
    back = wire.generate_request_from_pb(message)
    assert {field.name: getattr(back, field.name) for field in fields(back) if field.name != "sampling"} == {
        field.name: getattr(request, field.name) for field in fields(request) if field.name != "sampling"
    }
    assert back.sampling.logit_bias == {3: -1.5}
    assert back.sampling.top_logprobs == 0


def test_an_empty_message_takes_the_defaults() -> None:
    request = wire.generate_request_from_pb(gateway_pb2.GenerateRequest(text="a"))
    assert request == GenerationRequest(TextPrompt("a"))


def test_no_prompt_is_refused() -> None:
    with pytest.raises(InvalidArgument) as caught:
        wire.generate_request_from_pb(gateway_pb2.GenerateRequest())
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    "event",
    [
        g.Started("s", "m", 3, -5, g.Promise.EXACT, ("no drafter",)),
        g.Chunk(
            "ab",
            (1, 2),
            (TokenOrigin.ACCEPTED, TokenOrigin.BONUS),
            7,
            False,
            (0, 2),
            (TokenLogprobs(-0.5, (1,), (-0.5,)), TokenLogprobs(-1.5)),
        ),
        g.Finished(FinishReason.STOP, 3, 9, EVIDENCE, "END"),
    ],
)
def test_events_come_back_the_same(event: g.GenerationEvent) -> None:
    message = gateway_pb2.GenerateResponse.FromString(wire.generation_event_to_pb(event).SerializeToString())
    assert wire.generation_event_from_pb(message) == event


def test_an_event_of_a_later_version_is_skipped() -> None:
    assert wire.generation_event_from_pb(gateway_pb2.GenerateResponse()) is None


def test_records_and_models_come_back_the_same() -> None:
    info = g.SessionInfo("s", 2, SessionState.CANCELLED, "m", 5, 2, (1, 2, 3), "v", 2, "d", 1, "cancelled")
    assert wire.session_info_from_pb(wire.session_info_to_pb(info)) == info
    assert wire.session_info_to_pb(info).committed_len == 3
    model = g.ServedModel("m", 256, ("ngram",))
    assert wire.served_model_from_pb(wire.served_model_to_pb(model)) == model


@pytest.mark.parametrize(
    ("request_", "field", "says"),
    [
        (GenerationRequest(TextPrompt("hi"), max_tokens=2**31), "max_tokens", "at most 2147483647"),
        (GenerationRequest(TextPrompt("hi"), max_tokens=-(2**40)), "max_tokens", "at least -2147483648"),
        (GenerationRequest(TextPrompt("hi"), seed=2**63), "seed", "at most 9223372036854775807"),
        (GenerationRequest(TextPrompt("hi"), sampling=SamplingParams(top_k=2**31)), "top_k", "at most"),
        (GenerationRequest(TextPrompt("hi"), sampling=SamplingParams(logit_bias={2**31: 1.0})), "logit_bias", "2**31"),
        (
            GenerationRequest(TextPrompt("hi"), sampling=SamplingParams(stop_token_ids=(1, 2**31))),
            "stop_token_ids[1]",
            "2147483648; it must be at most",
        ),
        (
            GenerationRequest(TextPrompt("hi"), speculation=SpeculationOptions(num_speculative_tokens=2**31)),
            "speculation.num_speculative_tokens",
            "at most",
        ),
        (GenerationRequest(TextPrompt("ab\udcff")), "prompt", "lone surrogate at character 2"),
        (GenerationRequest(TokenPrompt((1, 2**31))), "prompt[1]", "at most"),
        (GenerationRequest(ChatPrompt((ChatMessage("user", "\udcff"),))), "messages[0].content", "lone surrogate"),
        (GenerationRequest(TextPrompt("hi"), stop=("a", "\udcff")), "stop[1]", "lone surrogate"),
        (GenerationRequest(TextPrompt("hi"), model="\udcff"), "model", "lone surrogate"),
        (GenerationRequest(TextPrompt("hi"), session="\udcff"), "session", "lone surrogate"),
        (GenerationRequest(TextPrompt("hi"), max_tokens=1.5), "max_tokens", "1.5"),  # type: ignore[arg-type]
    ],
)
def test_what_no_message_can_hold_names_its_field(request_: GenerationRequest, field: str, says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        wire.generate_request_to_pb(request_)
    assert caught.value.field == field
    assert says.replace("2**31", str(2**31)) in caught.value.message
    assert caught.value.message.startswith(field)


def test_a_session_name_that_no_message_can_hold() -> None:
    with pytest.raises(InvalidArgument, match="session is not valid Unicode"):
        wire.get_session_request_to_pb("\udcff")
