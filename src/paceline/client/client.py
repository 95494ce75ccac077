"""An async client of the gateway's `Generation` service.

    async with AsyncClient("127.0.0.1:7400") as client:
        async for event in client.generate(GenerationRequest(TextPrompt("Once upon a time"), max_tokens=64)):
            match event:
                case Chunk():
                    print(event.text, end="")

What the gateway refuses comes back as the same class of `paceline.errors` that it raised.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

import grpc.aio

from paceline.errors import InvalidArgument
from paceline.generation import GenerationEvent, ServedModel, SessionInfo
from paceline.runtime.grpc_client import ClientTls, open_channel
from paceline.runtime.grpc_errors import error_from_rpc
from paceline.text.request import GenerationRequest
from paceline.v1 import gateway_pb2
from paceline.v1.gateway_pb2_grpc import GenerationStub
from paceline.wire.generation import (
    generate_request_to_pb,
    generation_event_from_pb,
    get_session_request_to_pb,
    served_model_from_pb,
    session_info_from_pb,
)

_KEY = re.compile(r"[\x21-\x7e]+")
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class AsyncClient:
    """One connection to one gateway; belongs to the event loop that makes it. Close it, or use it in `async with`.

    Args:
        address: host:port of the gateway.
        tls: how to check the gateway, and who this client is; None for plain text.
        api_key: the key to show; None for a gateway that asks for none.

    Raises:
        InvalidArgument: no header can hold the key.
        ConfigurationError: a TLS file cannot be read.
    """

    def __init__(self, address: str, *, tls: ClientTls | None = None, api_key: str | None = None) -> None:
        if api_key is not None and not _KEY.fullmatch(api_key):
            raise InvalidArgument("the API key must be visible ASCII characters without spaces", field="api_key")
        self.address = address
        self._authorization: tuple[tuple[str, str], ...] = (
            () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        )
        self._channel = open_channel(address, tls=tls)
        self._stub = GenerationStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends what runs and closes the connection."""
        await self._channel.close()

    async def generate(
        self, request: GenerationRequest, *, timeout_s: float | None = None, request_id: str | None = None
    ) -> AsyncIterator[GenerationEvent]:
        """Runs one generation: `Started`, any number of `Chunk`, `Finished`.

        Leaving the loop early (`aclose`, or the end of its task) cancels the generation.

        Args:
            request: what to generate.
            timeout_s: most seconds that it may take.
            request_id: its name in the gateway's logs; None: the gateway draws one.

        Raises:
            InvalidArgument: no message can hold a value of the request; nothing was sent.
            PacelineError: what the gateway says, or `Unavailable` when it cannot be reached.
        """
        metadata = self._authorization
        if request_id is not None:
            if not _REQUEST_ID.fullmatch(request_id):
                raise InvalidArgument(
                    f"request_id is {request_id!r}; it must be 1 to 128 characters of [A-Za-z0-9_.:-]",
                    field="request_id",
                )
            metadata = (*metadata, ("x-request-id", request_id))
        call = self._stub.Generate(generate_request_to_pb(request), timeout=timeout_s, metadata=metadata)
        try:
            async for message in call:
                event = generation_event_from_pb(message)
                if event is not None:
                    yield event
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        finally:
            call.cancel()

    async def get_session(self, session: str, *, timeout_s: float | None = 10.0) -> SessionInfo:
        """Reads the record of a session.

        Raises:
            InvalidArgument: no message can hold the name.
            NotFound: there is none, or it was made with another API key.
            PacelineError: what else the gateway says.
        """
        request = get_session_request_to_pb(session)
        try:
            message = await self._stub.GetSession(request, timeout=timeout_s, metadata=self._authorization)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        return session_info_from_pb(message)

    async def list_models(self, *, timeout_s: float | None = 10.0) -> tuple[ServedModel, ...]:
        """The models that can be asked for.

        Raises:
            PacelineError: what the gateway says.
        """
        try:
            message = await self._stub.ListModels(
                gateway_pb2.ListModelsRequest(), timeout=timeout_s, metadata=self._authorization
            )
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        return tuple([served_model_from_pb(model) for model in message.models])
