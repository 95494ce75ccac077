"""An async client of the gateways' `Generation` service.

    async with AsyncClient("127.0.0.1:7400") as client:
        async for event in client.generate(GenerationRequest(TextPrompt("Once upon a time"), max_tokens=64)):
            match event:
                case Chunk():
                    print(event.text, end="")

A stream that breaks is resumed, on the same gateway or on another one, and whoever reads it does not notice: no token
comes twice and none is lost. What a gateway refuses comes back as the same class of `paceline.errors` that it raised.
"""

from __future__ import annotations

import asyncio
import random
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc.aio

from paceline.client.resuming import Recovery, ResumePolicy, Step
from paceline.errors import DeadlineExceeded, InvalidArgument, Unavailable
from paceline.generation import GenerationEvent, ServedModel, SessionInfo
from paceline.runtime.grpc_client import ClientTls, open_channel
from paceline.runtime.grpc_errors import error_from_rpc, is_peers_word
from paceline.text.request import GenerationRequest, ResumeRequest
from paceline.v1 import gateway_pb2
from paceline.v1.gateway_pb2_grpc import GenerationStub
from paceline.wire.generation import (
    generate_request_to_pb,
    generation_event_from_pb,
    get_session_request_to_pb,
    resume_request_to_pb,
    served_model_from_pb,
    session_info_from_pb,
)

if TYPE_CHECKING:
    from paceline.v1.gateway_pb2_grpc import GenerationAsyncStub  # in the stub file only

_KEY = re.compile(r"[\x21-\x7e]+")
_REQUEST_ID_KEY = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

Metadata = tuple[tuple[str, str], ...]
Answer = TypeVar("Answer")


class AsyncClient:
    """Connections to the gateways of one fleet; belongs to the event loop that makes it. Close it, or use `async with`.

    Args:
        addresses: host:port of a gateway, or of several; one of them is used until it fails.
        tls: how to check the gateways, and who this client is; None for plain text.
        api_key: the key to show; None for gateways that ask for none.
        resume: how to go on after a broken stream; None hands every break to the caller.

    Raises:
        InvalidArgument: there is no address, or no header can hold the key.
        ConfigurationError: a TLS file cannot be read.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        tls: ClientTls | None = None,
        api_key: str | None = None,
        resume: ResumePolicy | None = ResumePolicy(),  # noqa: B008  (frozen)
    ) -> None:
        self.addresses: tuple[str, ...] = (addresses,) if isinstance(addresses, str) else tuple(addresses)
        if not self.addresses:
            raise InvalidArgument("a client needs the address of a gateway, host:port", field="addresses")
        if api_key is not None and not _KEY.fullmatch(api_key):
            raise InvalidArgument("the API key must be visible ASCII characters without spaces", field="api_key")
        self._authorization: Metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self._channels = [open_channel(address, tls=tls) for address in self.addresses]
        self._stubs: list[GenerationAsyncStub] = [GenerationStub(channel) for channel in self._channels]
        self._policy = resume
        self._closed = False
        self._random = random.Random()  # noqa: S311  (spreads clients over gateways and moments)
        self._chosen = self._random.randrange(len(self._stubs))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def address(self) -> str:
        """The gateway that is asked now; another one when it fails."""
        return self.addresses[self._chosen]

    async def close(self) -> None:
        """Ends what runs and closes the connections."""
        self._closed = True
        for channel in self._channels:
            await channel.close()

    def generate(
        self, request: GenerationRequest, *, timeout_s: float | None = None, request_id: str | None = None
    ) -> AsyncGenerator[GenerationEvent]:
        """Runs one generation: `Started`, any number of `Chunk`, `Finished`.

        Leaving the loop early (`aclose`, or the end of its task) cancels the generation.

        Args:
            request: what to generate.
            timeout_s: most seconds that it may take.
            request_id: its name in the gateways' logs; None: the gateway draws one.

        Raises:
            InvalidArgument: no message can hold a value of the request; nothing was sent.
            ResumeFailed: the stream broke and could not be resumed.
            PacelineError: what the gateway says, or `Unavailable` when none can be reached.
        """
        draws_seed = request.session is not None and request.seed is None
        if draws_seed:
            # By which a generation is known from an earlier turn's, should the stream break before it begins.
            request = replace(request, seed=secrets.randbits(63))
        return self._stream(request, None, timeout_s, request_id, knows_own=draws_seed)

    def resume(
        self, point: ResumeRequest, *, timeout_s: float | None = None, request_id: str | None = None
    ) -> AsyncGenerator[GenerationEvent]:
        """Goes on with a session, perhaps of another process: `Started`, the chunks that are missing, `Finished`.

        Whoever runs or reads the session now is cut off.

        Args:
            point: the session and what the caller has of it; see `ResumeRequest.after` and `ResumeFailed.point`.
            timeout_s: most seconds that it may take.
            request_id: its name in the gateways' logs; None: the gateway draws one.

        Raises:
            NotFound: there is no such session, or it was made with another API key.
            DataLoss: the caller has other tokens than the session's.
            ResumeFailed: the stream broke again and could not be resumed.
            PacelineError: what else the gateway says, or `Unavailable` when none can be reached.
        """
        return self._stream(None, point, timeout_s, request_id)

    async def _stream(
        self,
        request: GenerationRequest | None,
        point: ResumeRequest | None,
        timeout_s: float | None,
        request_id: str | None,
        *,
        knows_own: bool = False,
    ) -> AsyncGenerator[GenerationEvent]:
        if self._closed:
            raise Unavailable("the client is closed")
        metadata = self._metadata(request_id)
        clock = asyncio.get_running_loop().time
        ends_at = None if timeout_s is None else clock() + timeout_s
        policy = self._policy or ResumePolicy()
        recovery = Recovery(request, point, policy, len(self._stubs), clock(), knows_own=knows_own)
        while True:
            call = self._call(recovery, None if ends_at is None else max(ends_at - clock(), 0.0), metadata)
            try:
                async for message in call:
                    event = generation_event_from_pb(message)
                    new = None if event is None else recovery.take(event, clock())
                    if new is not None:
                        yield new
                if not recovery.finished:
                    raise Unavailable("the stream ended without its last message: the gateway speaks another version")
                return
            except grpc.aio.AioRpcError as rpc_error:
                error, broken = error_from_rpc(rpc_error), not is_peers_word(rpc_error)
                reached = any(key == _REQUEST_ID_KEY for key, _ in rpc_error.initial_metadata() or ())
                error.__cause__ = rpc_error
            finally:
                call.cancel()
            if recovery.finished:
                return  # the connection broke after the last message
            if self._policy is None or self._closed or isinstance(error, DeadlineExceeded):
                raise error
            chance = self._random.random()
            pause_s = recovery.failed(error, clock(), broken=broken, reached=reached, chance=chance)
            if not recovery.stays:
                self._choose_another()
            await asyncio.sleep(pause_s)

    def _call(self, recovery: Recovery, timeout_s: float | None, metadata: Metadata) -> Any:
        stub = self._stubs[self._chosen]
        if recovery.step is Step.GENERATE:
            asked = generate_request_to_pb(recovery.generate_request())
            return stub.Generate(asked, timeout=timeout_s, metadata=metadata)
        return stub.Resume(resume_request_to_pb(recovery.resume_request()), timeout=timeout_s, metadata=metadata)

    def _choose_another(self) -> None:
        self._chosen = (self._chosen + 1) % len(self._stubs)

    def _metadata(self, request_id: str | None) -> Metadata:
        if request_id is None:
            return self._authorization
        if not _REQUEST_ID.fullmatch(request_id):
            raise InvalidArgument(
                f"request_id is {request_id!r}; it must be 1 to 128 characters of [A-Za-z0-9_.:-]",
                field="request_id",
            )
        return (*self._authorization, (_REQUEST_ID_KEY, request_id))

    async def get_session(self, session: str, *, timeout_s: float | None = 10.0) -> SessionInfo:
        """Reads the record of a session.

        Raises:
            InvalidArgument: no message can hold the name.
            NotFound: there is none, or it was made with another API key.
            PacelineError: what else the gateway says.
        """
        request = get_session_request_to_pb(session)
        message = await self._ask(
            lambda stub: stub.GetSession(request, timeout=timeout_s, metadata=self._authorization)
        )
        return session_info_from_pb(message)

    async def list_models(self, *, timeout_s: float | None = 10.0) -> tuple[ServedModel, ...]:
        """The models that can be asked for.

        Raises:
            PacelineError: what the gateway says.
        """
        request = gateway_pb2.ListModelsRequest()
        message = await self._ask(
            lambda stub: stub.ListModels(request, timeout=timeout_s, metadata=self._authorization)
        )
        return tuple([served_model_from_pb(model) for model in message.models])

    async def _ask(self, ask: Callable[[GenerationAsyncStub], Awaitable[Answer]]) -> Answer:
        """One answer from the first gateway that can be reached."""
        for attempt in range(1, len(self._stubs) + 1):
            try:
                return await ask(self._stubs[self._chosen])
            except grpc.aio.AioRpcError as rpc_error:
                error = error_from_rpc(rpc_error)
                if not isinstance(error, Unavailable) or attempt == len(self._stubs):
                    raise error from rpc_error
                self._choose_another()
        raise AssertionError("the last attempt returns or raises")
