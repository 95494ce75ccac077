"""The front door over gRPC: bad requests are refused with the field and the limit, and hurt nobody else."""

from __future__ import annotations

import contextlib
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from paceline_gateway import door
from paceline_gateway.api_keys import ApiKeys
from paceline_gateway.metrics import GatewayMetrics
from paceline_gateway.servicer import GenerationServicer
from prometheus_client import CollectorRegistry

from paceline.client import AsyncClient
from paceline.errors import CapacityExceeded, InvalidArgument, NotFound, PacelineError, Unavailable
from paceline.generation import Started
from paceline.messages import SamplingParams
from paceline.runtime.grpc_client import open_channel
from paceline.runtime.grpc_errors import error_from_rpc
from paceline.runtime.grpc_server import GrpcServer
from paceline.runtime.settings import ServiceSettings
from paceline.text.request import (
    ChatMessage,
    ChatPrompt,
    PreparedRequest,
    Prompt,
    SpeculationOptions,
    TextPrompt,
    TokenPrompt,
)
from paceline.text.validation import prepare
from paceline.v1 import gateway_pb2
from paceline.v1.gateway_pb2_grpc import GenerationStub, add_GenerationServicer_to_server
from tests.fakes.scripted_drafter import StepGate
from tests.fakes.toy_runner import hash_law, poisoned_law
from tests.integration.fleet import VOCAB, Fleet, generate, perfect_method, plain_tokens
from tests.integration.node import free_port

LAW = hash_law(VOCAB, seed=1)
PROMPT = [1, 2, 3]


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **changes)


BAD_REQUESTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "empty text": ({"prompt": TextPrompt("")}, "prompt", "at least one"),
    "empty ids": ({"prompt": TokenPrompt(())}, "prompt", "at least one"),
    "no messages": ({"prompt": ChatPrompt(())}, "messages", "1 to"),
    "unknown role": ({"prompt": ChatPrompt((ChatMessage("robot", "hi"),))}, "messages[0].role", "user"),
    "id beyond the vocabulary": ({"prompt": TokenPrompt((1, VOCAB))}, "prompt", f"[0, {VOCAB})"),
    "negative id": ({"prompt": TokenPrompt((-1,))}, "prompt", f"[0, {VOCAB})"),
    "prompt over the context": ({"prompt": TokenPrompt((1,) * 256)}, "prompt", "255"),
    "max_tokens negative": ({"max_tokens": -1}, "max_tokens", "[1, "),
    "max_tokens zero": ({"max_tokens": 0}, "max_tokens", "[1, "),
    "stop empty": ({"stop": ("",)}, "stop", "at least one"),
    "stop id beyond the vocabulary": ({"sampling": greedy(stop_token_ids=(VOCAB,))}, "stop_token_ids", str(VOCAB)),
    "bias beyond the vocabulary": ({"sampling": greedy(logit_bias={VOCAB: 1.0})}, "logit_bias", str(VOCAB)),
    "bias too large": ({"sampling": greedy(logit_bias={1: 101.0})}, "logit_bias", "100"),
    "temperature negative": ({"sampling": SamplingParams(temperature=-1.0)}, "temperature", "[0"),
    "temperature nan": ({"sampling": SamplingParams(temperature=math.nan)}, "temperature", "[0"),
    "top_p zero": ({"sampling": greedy(top_p=0.0)}, "top_p", "(0, 1]"),
    "top_k negative": ({"sampling": greedy(top_k=-1)}, "top_k", "at least 0"),
    "min_tokens over max_tokens": ({"sampling": greedy(min_tokens=30)}, "min_tokens", "max_tokens"),
    "block too large": (
        {"speculation": SpeculationOptions(num_speculative_tokens=65)},
        "speculation.num_speculative_tokens",
        "[0, 64]",
    ),
    "block negative": (
        {"speculation": SpeculationOptions(num_speculative_tokens=-1)},
        "speculation.num_speculative_tokens",
        "[0, 64]",
    ),
    "session name": ({"session": "a b"}, "session", "128"),
}


def request_of(fleet: Fleet, changes: dict[str, Any]) -> Any:
    return replace(fleet.request(PROMPT), **changes)


async def test_bad_requests_are_refused_and_the_next_good_one_succeeds(tmp_path: Path) -> None:
    async with Fleet.start(tmp_path, LAW, method=perfect_method(LAW)) as fleet, fleet.client() as client:
        for name, (changes, field, limit) in BAD_REQUESTS.items():
            with pytest.raises(InvalidArgument) as caught:
                await generate(client, request_of(fleet, changes))
            assert caught.value.field == field, name
            assert limit in caught.value.message, f"{name}: {caught.value.message}"
            assert fleet.gateway.sessions.num_running == 0
        run = await generate(client, fleet.request(PROMPT))
        assert run.tokens == plain_tokens(LAW, PROMPT, 20)


async def test_what_protobuf_allows_and_the_door_does_not(tmp_path: Path) -> None:
    async with Fleet.start(tmp_path, LAW) as fleet:
        channel = open_channel(fleet.address)
        stub = GenerationStub(channel)
        for request, field in [
            (gateway_pb2.GenerateRequest(), "prompt"),
            (gateway_pb2.GenerateRequest(text="a", acceptance_rule=99), "acceptance_rule"),  # type: ignore[arg-type]
        ]:
            with pytest.raises(Exception, match=field):
                async for _ in stub.Generate(request):
                    pass
        await channel.close()


async def test_an_unknown_model_is_not_found(tmp_path: Path) -> None:
    async with Fleet.start(tmp_path, LAW) as fleet, fleet.client() as client:
        with pytest.raises(NotFound) as caught:
            await generate(client, fleet.request(PROMPT, model="other"))
        assert caught.value.field == "model"
        assert "'toy'" in caught.value.message
        assert (await generate(client, fleet.request(PROMPT, model="toy"))).started.model == "toy"


async def test_text_and_chat_become_the_same_tokens_as_ids(tmp_path: Path) -> None:
    async with Fleet.start(tmp_path, LAW, method=perfect_method(LAW)) as fleet, fleet.client() as client:
        by_ids = await generate(client, fleet.request([0, 1, 2, 3]))
        by_text = await generate(client, fleet.request(TextPrompt("abcd")))
        by_chat = await generate(
            client, fleet.request(ChatPrompt((ChatMessage("user", "ab"), ChatMessage("assistant", "cd"))))
        )
        assert by_ids.tokens == by_text.tokens == by_chat.tokens
        assert by_text.started.prompt_tokens == 4


async def test_a_text_far_beyond_the_context_is_refused_with_its_length(tmp_path: Path) -> None:
    async with Fleet.start(tmp_path, LAW) as fleet, fleet.client() as client:
        with pytest.raises(InvalidArgument) as caught:
            await generate(client, fleet.request(TextPrompt("ab" * 10_000)))
        assert caught.value.field == "prompt"
        # Of such a text only the beginning is tokenized, so its tokens are not counted.
        assert "20000 characters" in caught.value.message
        assert "255" in caught.value.message


async def test_a_prompt_just_below_the_limit_ends_exactly_at_it(tmp_path: Path) -> None:
    async with Fleet.start(tmp_path, LAW, method=perfect_method(LAW)) as fleet, fleet.client() as client:
        prompt = [1 + index % 7 for index in range(253)]
        request = fleet.request(prompt, max_tokens=10_000, num_speculative_tokens=5, sampling=greedy(ignore_eos=True))
        run = await generate(client, request)
        assert len(run.tokens) == 3
        assert run.reason.value == "length"
        assert run.tokens == plain_tokens(LAW, prompt, 3)
        whatever_is_left = await generate(client, fleet.request(prompt, max_tokens=None))
        assert whatever_is_left.tokens == run.tokens


async def test_a_seed_is_drawn_once_and_reported(tmp_path: Path) -> None:
    async with Fleet.start(tmp_path, LAW) as fleet, fleet.client() as client:
        sampling = SamplingParams(temperature=1.0)
        first = await generate(client, fleet.request(PROMPT, sampling=sampling, session="drawn"))
        second = await generate(client, fleet.request(PROMPT, sampling=sampling))
        assert first.started.seed != second.started.seed
        again = await generate(client, fleet.request(PROMPT, sampling=sampling, seed=first.started.seed))
        assert again.tokens == first.tokens
        assert (await client.get_session("drawn")).seed == first.started.seed


async def test_logprobs_do_not_depend_on_the_block_size(tmp_path: Path) -> None:
    async with Fleet.start(tmp_path, LAW, method=perfect_method(LAW)) as fleet, fleet.client() as client:
        runs = [
            await generate(client, fleet.request(PROMPT, sampling=greedy(top_logprobs=2), num_speculative_tokens=size))
            for size in (0, 4)
        ]
        entries = [[entry for chunk in run.chunks for entry in chunk.logprobs] for run in runs]
        assert len(entries[0]) == len(entries[1]) == len(runs[0].tokens)
        for plain, drafted in zip(*entries, strict=True):
            assert plain.top_tokens == drafted.top_tokens
            assert plain.logprob == pytest.approx(drafted.logprob, abs=1e-5)
            assert plain.logprob <= 0


async def test_models_and_sessions_can_be_listed(tmp_path: Path) -> None:
    async with Fleet.start(tmp_path, LAW, method=perfect_method(LAW)) as fleet, fleet.client() as client:
        (model,) = await client.list_models()
        assert (model.model, model.max_model_len, model.methods) == ("toy", 256, ("scripted",))
        with pytest.raises(NotFound) as caught:
            await client.get_session("nobody")
        assert caught.value.field == "session"


async def test_generations_beyond_the_limit_are_refused_at_once(tmp_path: Path) -> None:
    gate = StepGate()
    settings = {"max_concurrent_generations": 2, "draft_wait_ceiling_ms": 60_000, "draft_wait_floor_ms": 60_000}
    async with (
        Fleet.start(tmp_path, LAW, method=perfect_method(LAW, gate=gate), settings=settings) as fleet,
        fleet.client() as client,
    ):
        streams = [client.generate(fleet.request(PROMPT)) for _ in range(2)]
        for stream in streams:
            assert isinstance(await anext(stream), Started)
        with pytest.raises(CapacityExceeded) as caught:
            await generate(client, fleet.request(PROMPT))
        assert "2 of 2" in caught.value.message
        gate.open()
        for stream in streams:
            assert [event async for event in stream]
        await generate(client, fleet.request(PROMPT))


async def test_a_poisoned_request_hurts_only_itself(tmp_path: Path) -> None:
    law = poisoned_law(LAW, lambda prefix: prefix[0] == 9 and len(prefix) > 3)
    async with Fleet.start(tmp_path, law, method=perfect_method(LAW)) as fleet, fleet.client() as client:
        with pytest.raises(PacelineError) as caught:
            await generate(client, fleet.request([9, 1, 2]))
        assert caught.value.code == "model_error"
        assert (await generate(client, fleet.request(PROMPT))).tokens == plain_tokens(LAW, PROMPT, 20)


@pytest.mark.parametrize("rpc", ["Generate", "GetSession", "ListModels"])
async def test_bytes_that_are_no_message_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rpc: str
) -> None:
    async with Fleet.start(tmp_path, LAW) as fleet, open_channel(fleet.address) as channel:
        method, garbage = f"/paceline.v1.Generation/{rpc}", b"\xff\xff garbage"
        streams: Any = channel.unary_stream(method)  # the stubs do not know of calls without a serializer
        single: Any = channel.unary_unary(method)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (streams(garbage).read() if rpc == "Generate" else single(garbage))
        error = error_from_rpc(caught.value)
        assert isinstance(error, InvalidArgument)
        assert (error.field, "protobuf" in error.message) == ("request", True)
        assert not [record for record in caplog.records if record.exc_info]
        async with fleet.client() as client:
            assert (await generate(client, fleet.request(PROMPT))).tokens == plain_tokens(LAW, PROMPT, 20)


@pytest.mark.parametrize(
    ("prompt", "long"),
    [
        (TextPrompt("ab"), False),
        (TextPrompt("ab" * 4096), True),
        (ChatPrompt((ChatMessage("user", "ab" * 4096),)), True),
        (ChatPrompt((ChatMessage("user", ""),) * 2048), True),
        (TokenPrompt((1, 2)), False),
        (TokenPrompt((1, 2) * 4096), True),
    ],
)
async def test_long_prompts_are_read_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt: Prompt, long: bool
) -> None:
    read_by: list[threading.Thread] = []

    def watched(*args: Any, **options: Any) -> PreparedRequest:
        read_by.append(threading.current_thread())
        return prepare(*args, **options)

    monkeypatch.setattr(door, "prepare", watched)
    async with Fleet.start(tmp_path, LAW) as fleet, fleet.client() as client:
        refusal = pytest.raises(InvalidArgument, match="prompt") if long else contextlib.nullcontext()
        with refusal:
            await generate(client, fleet.request(prompt, max_tokens=1))
    (thread,) = read_by
    assert (thread is not threading.current_thread()) == long


async def test_a_gateway_that_is_starting_says_so() -> None:
    server = GrpcServer(ServiceSettings(), ["paceline.v1.Generation"])
    servicer = GenerationServicer(ApiKeys.load(None), GatewayMetrics(CollectorRegistry(), "toy"))
    add_GenerationServicer_to_server(servicer, server.server)
    async with AsyncClient(await server.start()) as client:
        with pytest.raises(Unavailable, match="starting"):
            await client.list_models()
    await server.stop(0)


async def test_client_errors_have_the_class_that_the_gateway_raised() -> None:
    async with AsyncClient(f"127.0.0.1:{free_port()}") as client:
        with pytest.raises(Unavailable):
            await client.list_models(timeout_s=5.0)
