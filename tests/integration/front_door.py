"""Every door of one fleet: the same request through gRPC and over HTTP, whole and streamed, and one kind of answer.

    async with front_door(tmp_path, LAW) as front:
        for door in front.doors:
            answer = await door.generate(front.fleet.request(PROMPT))

A request with messages goes to the chat endpoint, any other to completions. What a door refuses is raised as the error
that the gateway meant, after a check that status, retry time and body say the same. On leaving, nothing may run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc.aio
import httpx
import psutil
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from paceline.client import AsyncClient
from paceline.errors import Failure, PacelineError, from_failure
from paceline.text.request import ChatPrompt, GenerationRequest, TextPrompt, TokenPrompt
from tests.fakes.toy_runner import Law
from tests.integration.fleet import Fleet, generate, perfect_method, until
from tests.integration.http_calls import CHAT, COMPLETIONS, Choice, gather, http_client
from tests.integration.scraping import Scrape

IDLE_GAUGES = (
    "paceline_num_requests_running",
    "paceline_num_requests_waiting",
    "paceline_open_streams",
    "paceline_pool_sessions",
    "paceline_undurable_sessions",
)
FLOOR = -9999.0
"""What HTTP says for a log-probability of minus infinity."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion, whichever door it came through.

    Attributes:
        promise: what is promised about the tokens.
        pieces: its text as it came; a single one where it came whole.
        logprobs: of each token, if asked for.
        top_logprobs: of the best alternatives to each, best first.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    promise: str
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[float, ...], ...] = ()
    pieces: tuple[str, ...] = field(default=(), compare=False)


class Door(Protocol):
    """A way in."""

    name: str

    async def generate(self, request: GenerationRequest) -> Answer:
        """Runs a request to its end.

        Raises:
            PacelineError: what the gateway says.
        """


class GrpcDoor:
    """The rpc `Generate`, through the project's own client."""

    name = "grpc"

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def generate(self, request: GenerationRequest) -> Answer:
        try:
            run = await generate(self._client, request)
        except PacelineError as error:
            check_status(error)
            raise
        entries = [entry for chunk in run.chunks for entry in chunk.logprobs]
        return Answer(
            run.text,
            tuple(run.tokens),
            run.reason.value,
            run.finished.prompt_tokens,
            run.finished.completion_tokens,
            run.started.promise.value,
            tuple([max(entry.logprob, FLOOR) for entry in entries]),
            tuple([tuple([max(value, FLOOR) for value in entry.top_logprobs]) for entry in entries]),
            tuple([chunk.text for chunk in run.chunks]),
        )


def check_status(error: PacelineError) -> None:
    """The rpc's status and its RetryInfo are those of the error's class."""
    cause = error.__cause__
    if not isinstance(cause, grpc.aio.AioRpcError):
        return  # the client itself has refused: no message can hold the request
    assert cause.code().name == error.grpc_status
    details = dict(cause.trailing_metadata() or ())["grpc-status-details-bin"]
    retry, found = error_details_pb2.RetryInfo(), None
    for detail in status_pb2.Status.FromString(details).details:
        if detail.Unpack(retry):
            found = retry.retry_delay.seconds
    assert found == error.retry_after_s


class HttpDoor:
    """OpenAI's endpoints."""

    def __init__(self, http: httpx.AsyncClient, *, stream: bool) -> None:
        self.name = "http stream" if stream else "http"
        self._http = http
        self._stream = stream

    async def generate(self, request: GenerationRequest) -> Answer:
        endpoint = CHAT if isinstance(request.prompt, ChatPrompt) else COMPLETIONS
        content = content_of(body_of(request, stream=self._stream))
        headers = {"Content-Type": "application/json"}
        response = await self._http.post(f"/v1/{endpoint}", content=content, headers=headers)
        if response.status_code != 200:
            raise error_of(response)
        num_alternatives = request.sampling.top_logprobs or 0
        return (_streamed if self._stream else _whole)(endpoint, response.text, num_alternatives)


def body_of(request: GenerationRequest, **more: Any) -> dict[str, Any]:
    """The request as a JSON object."""
    sampling, options = request.sampling, request.speculation
    body: dict[str, Any] = {
        "model": request.model or None,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()},
        "min_tokens": sampling.min_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "stop": list(request.stop),
        "acceptance_rule": request.rule.value,
        "speculation": {
            "enabled": options.enabled,
            "method": options.method,
            "num_speculative_tokens": options.num_speculative_tokens,
        },
        "session_id": request.session,
        "return_token_ids": True,
        **more,
    }
    if more.get("stream"):
        body["stream_options"] = {"include_usage": True}
    match request.prompt:
        case TextPrompt(text):
            body |= {"prompt": text, "logprobs": sampling.top_logprobs}
        case TokenPrompt(ids):
            body |= {"prompt": list(ids), "logprobs": sampling.top_logprobs}
        case ChatPrompt(turns):
            body["messages"] = [{"role": turn.role, "content": turn.content} for turn in turns]
            body |= {"logprobs": sampling.top_logprobs is not None, "top_logprobs": sampling.top_logprobs}
    return body


def content_of(body: Mapping[str, Any]) -> bytes:
    """The object's bytes; infinity as the number that becomes it, which JSON can say."""
    return json.dumps(body).replace("Infinity", "1e999").encode()


def error_of(response: httpx.Response) -> PacelineError:
    """The error of an answer, checked."""
    said = response.json()
    assert said.keys() == {"error"}
    error = _error_in(said)
    assert response.status_code == error.http_status
    retry_after = response.headers.get("retry-after")
    assert retry_after == (None if error.retry_after_s is None else str(error.retry_after_s))
    return error


def _error_in(said: Mapping[str, Any]) -> PacelineError:
    failure = said["error"]
    assert failure.keys() == {"message", "type", "param", "code"}
    return from_failure(Failure(failure["code"], failure["message"], failure["param"] or ""))


def _whole(endpoint: str, text: str, num_alternatives: int) -> Answer:
    said = json.loads(text)
    (raw,) = said["choices"]
    content = raw["message"]["content"] if endpoint == CHAT else raw["text"]
    choice = Choice(text=content, token_ids=raw["token_ids"], finish_reason=raw["finish_reason"])
    choice.add_logprobs(raw["logprobs"])
    return _answer(choice, said["usage"], raw["promise"], num_alternatives, [content])


def _streamed(endpoint: str, text: str, num_alternatives: int) -> Answer:
    *lines, last = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    if last != "[DONE]":
        raise _error_in(json.loads(last))
    events = [json.loads(line) for line in lines]
    answer = gather(endpoint, events, include_usage=True)
    assert answer.usage is not None
    (choice,) = answer.choices
    raw = [one for said in events for one in said["choices"]]
    pieces = [one["delta"].get("content", "") if endpoint == CHAT else one["text"] for one in raw]
    (promise,) = [one["promise"] for one in raw if one["finish_reason"] is not None]
    return _answer(choice, answer.usage, promise, num_alternatives, pieces)


def _answer(
    choice: Choice, usage: Mapping[str, int], promise: str, num_alternatives: int, pieces: Sequence[str]
) -> Answer:
    assert choice.finish_reason is not None
    # Completions list the token's own value too, however bad it is.
    best = [tuple(sorted(top.values(), reverse=True)[:num_alternatives]) for top in choice.top_logprobs]
    return Answer(
        choice.text,
        tuple(choice.token_ids),
        choice.finish_reason,
        usage["prompt_tokens"],
        usage["completion_tokens"],
        promise,
        tuple(choice.token_logprobs),
        tuple(best),
        tuple(pieces),
    )


@dataclass(frozen=True, slots=True)
class FrontDoor:
    """A fleet and its doors."""

    fleet: Fleet
    http: httpx.AsyncClient
    doors: tuple[Door, ...]

    def door(self, name: str) -> Door:
        """The one of that name."""
        return next(door for door in self.doors if door.name == name)

    async def idle(self) -> None:
        """Returns when nothing runs any more, in any service, and /metrics says so."""
        await self.fleet.quiet()
        models = [node.model for node in self.fleet.verifiers if node.booted]
        await until(lambda: all(model.pool.pages_in_use == 0 for model in models))
        scrape = Scrape((await self.http.get("/metrics")).text)
        assert {name: scrape.sum(name) for name in IDLE_GAUGES} == dict.fromkeys(IDLE_GAUGES, 0.0)

    def connect(self, *, receive_bytes: int | None = None) -> Raw:
        """A bare connection to the HTTP server, see `connect`."""
        return connect(self.fleet.gateway.addresses["http"], receive_bytes=receive_bytes)

    @property
    def num_connections(self) -> int:
        """Connections that the HTTP server holds open, the one for `http` included."""
        return num_connections(self.fleet.gateway.addresses["http"])


class Raw:
    """A bare TCP connection: it sends what it is told and reads only when it is told."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    async def __aenter__(self) -> Raw:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    async def send(self, content: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, content)

    async def read(self, count: int = 65536) -> bytes:
        """What has come, at most so many bytes; empty at the end."""
        return await asyncio.get_running_loop().sock_recv(self._socket, count)

    async def rest(self) -> bytes:
        """Everything until the server closes the connection; it may break it off too."""
        content = bytearray()
        with contextlib.suppress(ConnectionError):
            while piece := await self.read():
                content += piece
        return bytes(content)


def connect(address: str, *, receive_bytes: int | None = None) -> Raw:
    """A bare connection to a server.

    Args:
        address: host:port.
        receive_bytes: what the system buffers for a client that does not read; None for the usual.
    """
    host, _, port = address.rpartition(":")
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect((host, int(port)))
    connection.setblocking(False)
    return Raw(connection)


def num_connections(address: str) -> int:
    """Connections that a server of this process holds open."""
    port = int(address.rpartition(":")[2])
    connections = psutil.Process().net_connections(kind="tcp")
    return sum(one.status != psutil.CONN_LISTEN and one.laddr.port == port for one in connections)


def post_bytes(endpoint: str, content: bytes, *headers: str) -> bytes:
    """A POST as it goes over the wire."""
    head = [
        f"POST /v1/{endpoint} HTTP/1.1",
        "Host: test",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        *headers,
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + content


@contextlib.asynccontextmanager
async def front_door(folder: Path, law: Law, **options: Any) -> AsyncIterator[FrontDoor]:
    """A fleet with a perfect drafter unless told otherwise; its options are those of `FleetOptions`."""
    settings = {"http_port": 0, **options.pop("settings", {})}
    options.setdefault("method", perfect_method(law))
    async with (
        Fleet.start(folder, law, settings=settings, **options) as fleet,
        fleet.client() as client,
        http_client(fleet) as http,
    ):
        doors: tuple[Door, ...] = (GrpcDoor(client), HttpDoor(http, stream=False), HttpDoor(http, stream=True))
        front = FrontDoor(fleet, http, doors)
        yield front
        await front.idle()
