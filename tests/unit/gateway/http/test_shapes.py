"""Shapes of answers: events, errors, log-probabilities, measurements."""

from __future__ import annotations

import json
import math

import pytest
from paceline_gateway.http.errors import error_body, error_response
from paceline_gateway.http.logprobs import IMPOSSIBLE, chat_logprobs, completion_logprobs, token_text
from paceline_gateway.http.responses import ChatDelta
from paceline_gateway.http.speculation_metrics import acceptance_histogram, choice_metrics
from paceline_gateway.http.sse import event

from paceline.errors import CapacityExceeded, InvalidArgument, PacelineError, Unauthenticated
from paceline.generation import Chunk, Evidence, Finished, Started
from paceline.messages import FinishReason, TokenLogprobs, TokenOrigin
from paceline.text.tokenizer import Tokenizer
from tests.fakes.tiny_tokenizer import write_byte_level


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_byte_level(tmp_path_factory.mktemp("bytes")))


def chunk_of(tokenizer: Tokenizer, text: str, entries: list[TokenLogprobs]) -> Chunk:
    ids = tokenizer.encode(text)
    lengths = tuple([len(tokenizer.decode([token_id])) for token_id in ids])
    return Chunk(text, ids, (TokenOrigin.PLAIN,) * len(ids), len(ids), True, lengths, tuple(entries))


@pytest.mark.parametrize(
    "text", ["plain", 'quotes " and \\', "line\nend\r", "\x85 \u2028 \u2029", "日本 😀", "\x00\x1f"]
)
def test_an_event_is_one_line_and_its_text_is_whole(text: str) -> None:
    sent = event(ChatDelta(content=text)).decode()
    assert sent.startswith("data: ")
    assert sent.endswith("\n\n")
    assert len(sent.splitlines()) == 2
    assert json.loads(sent.removeprefix("data: ")) == {"content": text}


def all_errors(root: type[PacelineError] = PacelineError) -> list[type[PacelineError]]:
    return [root, *[error for child in root.__subclasses__() for error in all_errors(child)]]


@pytest.mark.parametrize("error_class", all_errors())
def test_every_error_of_the_tree_in_openais_shape(error_class: type[PacelineError]) -> None:
    response = error_response(error_class("it broke; do this", field="session"))
    body = json.loads(bytes(response.body))
    assert response.status_code == error_class.http_status
    assert body == {
        "error": {
            "message": "it broke; do this",
            "type": body["error"]["type"],
            "param": "session_id",
            "code": error_class.code,
        }
    }
    assert body["error"]["type"].endswith("_error")
    assert (body["error"]["type"] == "server_error") == (error_class.http_status >= 499)
    assert response.headers.get("retry-after") == (
        None if error_class.retry_after_s is None else str(error_class.retry_after_s)
    )


def test_headers_of_errors() -> None:
    assert error_response(CapacityExceeded("full")).headers["retry-after"] == "1"
    assert error_response(Unauthenticated("who?")).headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("error", "param", "message"),
    [
        (InvalidArgument("session must be short", field="session"), "session_id", "session_id must be short"),
        (InvalidArgument("sessions are short", field="session"), "session_id", "sessions are short"),
        (InvalidArgument("no template", field="chat"), "messages", "no template"),
        (InvalidArgument("top_p is 2", field="top_p"), "top_p", "top_p is 2"),
        (InvalidArgument("odd"), None, "odd"),
    ],
)
def test_fields_have_their_http_names(error: InvalidArgument, param: str | None, message: str) -> None:
    detail = error_body(error).error
    assert (detail.param, detail.message) == (param, message)


def test_an_unexpected_error_says_nothing_of_itself() -> None:
    detail = error_body(ValueError("the secret is 5")).error
    assert (detail.type, detail.code, detail.param) == ("server_error", "internal", None)
    assert "secret" not in detail.message


def test_tokens_that_are_no_text(tokenizer: Tokenizer) -> None:
    euro = tokenizer.encode("€")
    assert [token_text(token_id, tokenizer) for token_id in euro] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    (end,) = tokenizer.eos_token_ids
    assert token_text(end, tokenizer) == "<|im_end|>"


def test_chat_logprobs(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é")
    other = tokenizer.encode("x")[0]
    entries = [TokenLogprobs(-0.5, (ids[0], other), (-0.5, -math.inf)), TokenLogprobs(-math.inf)]
    content = chat_logprobs(chunk_of(tokenizer, "é", entries), tokenizer).content
    assert [entry.bytes for entry in content] == [[0xC3], [0xA9]]
    assert [entry.logprob for entry in content] == [-0.5, IMPOSSIBLE]
    assert [(top.token, top.logprob, top.bytes) for top in content[0].top_logprobs] == [
        ("bytes:\\xc3", -0.5, [0xC3]),
        ("x", IMPOSSIBLE, [ord("x")]),
    ]
    assert content[1].top_logprobs == []


def test_completion_logprobs(tokenizer: Tokenizer) -> None:
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    entries = [TokenLogprobs(-0.5, (a, b), (-0.5, -1.0)), TokenLogprobs(-7.0, (a, b), (-0.5, -math.inf))]
    logprobs = completion_logprobs(chunk_of(tokenizer, "ac", entries), tokenizer, text_offset=10)
    assert c == tokenizer.encode("ac")[1]
    assert logprobs.tokens == ["a", "c"]
    assert logprobs.token_logprobs == [-0.5, -7.0]
    # The token's own entry is there even where it is none of the best.
    assert logprobs.top_logprobs == [{"a": -0.5, "b": -1.0}, {"a": -0.5, "b": IMPOSSIBLE, "c": -7.0}]
    assert logprobs.text_offset == [10, 11]


def test_text_offsets_follow_what_became_visible(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é") + tokenizer.encode("x")
    chunk = Chunk("éx", ids, (TokenOrigin.PLAIN,) * 3, 3, True, (0, 1, 1), (TokenLogprobs(-1.0),) * 3)
    assert completion_logprobs(chunk, tokenizer, text_offset=0).text_offset == [0, 0, 1]


@pytest.mark.parametrize(
    ("num_drafts", "accepted", "histogram"),
    [(0, [], [0]), (3, [0, 0], [3, 0, 0]), (4, [3, 2, 2], [1, 1, 0, 2]), (2, [2, 2], [0, 0, 2])],
)
def test_acceptance_histogram(num_drafts: int, accepted: list[int], histogram: list[int]) -> None:
    assert acceptance_histogram(num_drafts, accepted) == histogram


def test_measurements_of_one_choice() -> None:
    evidence = Evidence(
        target_passes=5,
        tokens_per_target_pass=2.4,
        draft_tokens=10,
        accepted_tokens=7,
        drafted_per_position=(4, 4, 2),
        accepted_per_position=(3, 2, 2),
        total_ms=500.0,
    )
    started = Started("s", "toy", 3, 1, warnings=("take care",))
    made = choice_metrics(started, Finished(FinishReason.STOP, 3, 12, evidence)).speculative_decoding
    assert made.mean_acceptance_length == 1 + 7 / 4
    assert made.draft_acceptance_rate == 0.7
    assert made.acceptance_histogram == [1, 1, 0, 2]
    assert sum(count * index for index, count in enumerate(made.acceptance_histogram)) == evidence.accepted_tokens
    assert made.goodput_tokens_per_second == 24.0
    assert made.warnings == ["take care"]


def test_measurements_without_any_draft() -> None:
    made = choice_metrics(Started("s", "toy", 3, 1), Finished(FinishReason.STOP, 3, 1, Evidence()))
    speculation = made.speculative_decoding
    assert (speculation.mean_acceptance_length, speculation.draft_acceptance_rate) == (1.0, 0.0)
    assert (speculation.acceptance_histogram, speculation.goodput_tokens_per_second) == ([0], 0.0)
