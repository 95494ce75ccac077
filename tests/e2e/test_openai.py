"""The official `openai` client, as it is, against `paceline up` on the real model."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from paceline.cli.fleet import FleetAddresses
from paceline.cli.fleet_options import DEFAULT_MODEL as MODEL
from paceline.cli.request import RequestOptions, complete
from paceline.cli.up import examples
from paceline.client import AsyncClient
from paceline.text.request import ChatMessage, ChatPrompt, Prompt, TextPrompt
from tests.e2e.launcher import Launcher, Up, generate
from tests.e2e.openai_answers import CHAT, COMPLETIONS, Answers, ask, ask_async, gather

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(300)]

QUESTION = "Give me a list of eight habits that help people sleep better."
KEY, OTHER_KEY = "key-of-alice-0123456789", "key-of-bob-0123456789"
MAX_GENERATIONS = 6
APIS = pytest.mark.parametrize("api", [CHAT, COMPLETIONS])


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("openai")
    keys = folder / "keys"
    keys.write_text(f"alice: {KEY}\nbob: {OTHER_KEY}\n")
    launcher = Launcher(folder)
    environment = {
        "PACELINE_GATEWAY_API_KEYS_FILE": str(keys),
        "PACELINE_GATEWAY_MAX_CONCURRENT_GENERATIONS": str(MAX_GENERATIONS),
    }
    yield launcher.up(MODEL, environment=environment)
    launcher.close()


@pytest.fixture(scope="module")
def client(up: Up) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{up.http}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@dataclass(frozen=True)
class Greedy:
    """A greedy answer of 24 tokens to QUESTION."""

    answers: Answers

    @property
    def text(self) -> str:
        return self.answers.choices[0].text


GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "extra_body": {"return_token_ids": True}}


@pytest.fixture(scope="module")
def greedy(client: OpenAI) -> Greedy:
    return Greedy(ask(client, CHAT, MODEL, QUESTION, **GREEDY))


def test_the_model_is_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


@APIS
def test_a_stream_says_what_a_whole_answer_says(client: OpenAI, api: str) -> None:
    options = {
        "n": 2,
        "seed": 7,
        "temperature": 0.8,
        "top_p": 0.95,
        "max_tokens": 16,
        "logprobs": True if api == CHAT else 1,
        "extra_body": {"return_token_ids": True},
    }
    whole = ask(client, api, MODEL, QUESTION, **options)
    streamed = ask(client, api, MODEL, QUESTION, stream=True, stream_options={"include_usage": True}, **options)
    for one, other in zip(whole.choices, streamed.choices, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
        other.logprobs = one.logprobs
        assert one == other
        assert len(one.finishes) == 1
        assert len(one.token_ids) == len(one.tokens) == len(one.logprobs) > 0
    assert whole.usage == streamed.usage
    assert whole.usage is not None
    prompt, completion, total = whole.usage
    assert completion == sum(len(choice.token_ids) for choice in whole.choices)
    assert total == prompt + completion


@APIS
async def test_the_async_client_gets_the_same(up: Up, client: OpenAI, api: str) -> None:
    options = {"seed": 3, "temperature": 0.7, "max_tokens": 12, "extra_body": {"return_token_ids": True}}
    wanted = ask(client, api, MODEL, QUESTION, **options)
    async with AsyncOpenAI(base_url=f"{up.http}/v1", api_key=KEY, max_retries=0) as other:
        whole = await ask_async(other, api, MODEL, QUESTION, **options)
        streamed = await ask_async(other, api, MODEL, QUESTION, stream=True, **options)
    assert whole == wanted
    assert streamed.choices == wanted.choices
    assert streamed.usage is None  # not asked for


def test_a_stream_has_the_shape_that_clients_expect(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_completion_tokens=6,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    first, *middle, last, usage = chunks
    assert first.choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in [*middle, last])
    assert all(chunk.choices[0].finish_reason is None for chunk in [first, *middle])
    assert last.choices[0].finish_reason == "length"
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 6
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_the_client_s_stream_helper_and_request_ids_work(client: OpenAI, greedy: Greedy) -> None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    headers = {"X-Request-Id": "from-a-test"}
    stop = greedy.text[20:31]  # the helper takes an answer that was cut by its length for a failure
    with client.chat.completions.stream(model=MODEL, messages=messages, temperature=0, stop=stop) as stream:
        told = [event.delta for event in stream if event.type == "content.delta"]
        completion = stream.get_final_completion()
    assert "".join(told) == completion.choices[0].message.content == greedy.text[: greedy.text.index(stop)]
    named = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1, extra_headers=headers)
    assert named._request_id == "from-a-test"


@APIS
async def test_greedy_text_is_that_of_grpc_and_of_the_command_line(up: Up, client: OpenAI, api: str) -> None:
    over_http = ask(client, api, MODEL, QUESTION, **GREEDY)
    prompt: Prompt = ChatPrompt((ChatMessage("user", QUESTION),)) if api == CHAT else TextPrompt(QUESTION)
    async with AsyncClient(up.gateway, api_key=KEY) as grpc:
        over_grpc = await complete(grpc, RequestOptions(max_tokens=24).request(prompt))
    form = "--chat" if api == CHAT else "--raw"
    printed = generate(up.gateway, QUESTION, form, "--max-tokens=24", f"--api-key={KEY}")
    (choice,) = over_http.choices
    assert choice.text == over_grpc.text == printed["text"]
    assert tuple(choice.token_ids) == over_grpc.token_ids == tuple(printed["token_ids"])
    assert choice.finishes == [over_grpc.finish_reason.value]
    assert over_http.usage is not None
    assert over_http.usage[0] == over_grpc.prompt_tokens


@pytest.mark.parametrize(
    "speculation", [{"enabled": False}, {"num_speculative_tokens": 2}, {"method": "draft_model"}], ids=str
)
def test_speculation_is_an_extension_that_changes_no_text(
    client: OpenAI, greedy: Greedy, speculation: dict[str, Any]
) -> None:
    body = {"return_token_ids": True, "speculation": speculation, "metrics": {"speculative_decoding": True}}
    messages: Any = [{"role": "user", "content": QUESTION}]
    completion = client.chat.completions.create(model=MODEL, messages=messages, **GREEDY | {"extra_body": body})
    assert gather([completion]) == greedy.answers
    extra: dict[str, Any] = completion.choices[0].model_extra or {}
    evidence = extra["metrics"]["speculative_decoding"]
    if speculation.get("enabled", True):
        assert evidence["tokens_per_target_pass"] > 1.5
        assert evidence["methods"] == ["draft_model"]
    else:
        assert evidence["num_drafts"] == 0
        assert evidence["num_target_passes"] == 24


@APIS
def test_three_choices_are_three_answers(client: OpenAI, api: str) -> None:
    options = {"seed": 11, "temperature": 1.0, "max_tokens": 10, "extra_body": {"return_token_ids": True}}
    three = ask(client, api, MODEL, QUESTION, n=3, **options)
    alone = ask(client, api, MODEL, QUESTION, **options)
    assert three.choices[0] == alone.choices[0]
    assert len({choice.text for choice in three.choices}) == 3
    streamed = ask(client, api, MODEL, QUESTION, n=3, stream=True, **options)
    assert streamed.choices == three.choices
    assert all(len(choice.finishes) == 1 for choice in streamed.choices)
    assert three.usage is not None
    assert three.usage[1] == sum(len(choice.token_ids) for choice in three.choices) > 10


def test_the_seed_decides(client: OpenAI) -> None:
    def text(seed: int) -> str:
        return ask(client, CHAT, MODEL, QUESTION, seed=seed, temperature=1.0, max_tokens=12).choices[0].text

    assert text(1) == text(1) != text(2)


@pytest.mark.parametrize("stream", [False, True])
def test_no_part_of_a_stop_string_is_told(client: OpenAI, greedy: Greedy, stream: bool) -> None:
    stop = greedy.text[20:31]
    answers = ask(client, CHAT, MODEL, QUESTION, stop=["never said", stop], stream=stream, **GREEDY)
    (choice,) = answers.choices
    assert choice.text == greedy.text[: greedy.text.index(stop)]
    assert choice.finishes == ["stop"]


@APIS
@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"stop": ""}, "stop"),
        ({"extra_body": {"best_of": 2}}, "best_of"),
        ({"extra_body": {"no_such_thing": 1}}, "no_such_thing"),
        ({"extra_body": {"speculation": {"method": 5}}}, "speculation.method"),
    ],
)
def test_a_bad_request_names_its_parameter(client: OpenAI, api: str, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, api, MODEL, QUESTION, **options)
    assert caught.value.param == param
    assert param in caught.value.message


def test_a_model_that_is_not_served(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=MODEL) as caught:
        ask(client, CHAT, "gpt-9", QUESTION)
    assert caught.value.param == "model"


def test_a_key_that_is_not_ours(client: OpenAI) -> None:
    wrong = client.with_options(api_key="key-of-nobody-0123456789")
    with pytest.raises(openai.AuthenticationError) as caught:
        ask(wrong, CHAT, MODEL, QUESTION)
    assert "key-of-nobody" not in caught.value.message
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_a_running_session_is_a_conflict_and_belongs_to_its_key(client: OpenAI) -> None:
    body = {"session_id": "the-one", "ignore_eos": True}
    running = open_stream(client, extra_body=body)
    with running:
        next(iter(running))
        with pytest.raises(openai.ConflictError, match="the-one"):
            ask(client, CHAT, MODEL, QUESTION, extra_body=body)
        with pytest.raises(openai.NotFoundError):
            ask(client.with_options(api_key=OTHER_KEY), CHAT, MODEL, QUESTION, extra_body=body)


def test_too_many_at_once_are_refused_and_the_client_s_own_retries_get_through(client: OpenAI) -> None:
    with ExitStack() as stack:
        for _ in range(2):
            running = open_stream(client, n=MAX_GENERATIONS // 2, extra_body={"ignore_eos": True})
            next(iter(stack.enter_context(running)))
        with pytest.raises(openai.RateLimitError) as caught:
            ask(client, CHAT, MODEL, QUESTION, max_tokens=1)
        assert int(caught.value.response.headers["retry-after"]) >= 1
    # The streams were left: their room is free again.
    answers = ask(client.with_options(max_retries=5), CHAT, MODEL, QUESTION, temperature=0, max_tokens=1)
    assert answers.usage is not None
    assert answers.usage[1] == 1


def open_stream(client: OpenAI, **options: Any) -> openai.Stream[Any]:
    messages: Any = [{"role": "user", "content": QUESTION}]
    # A stream that was left a moment ago may still hold its place.
    patient = client.with_options(max_retries=5)
    stream: openai.Stream[Any] = patient.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=1000, stream=True, **options
    )
    return stream


def test_the_curl_line_that_up_prints_streams_until_done(up: Up, tmp_path: Path) -> None:
    addresses = FleetAddresses(gateway=up.gateway, http=up.http)
    command = shlex.split(examples(MODEL, addresses)[1])
    body = json.loads(command[command.index("-d") + 1]) | {"max_tokens": 8}
    command[command.index("-d") + 1] = json.dumps(body)
    headers = tmp_path / "headers"
    more = ["-sS", "-D", str(headers), "-H", f"Authorization: Bearer {KEY}", "-H", "X-Request-Id: from-curl"]
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=60, check=True)
    events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
    assert events[-1] == "[DONE]"
    parts = [json.loads(event)["choices"][0]["delta"].get("content") for event in events[:-1]]
    assert "".join(part or "" for part in parts).strip()
    told = headers.read_text().lower()
    assert "content-type: text/event-stream" in told
    assert "x-request-id: from-curl" in told
