"""The client for programs without an event loop: the same calls, and plain iterators.

with Client("127.0.0.1:7400") as client:
    for event in client.generate(GenerationRequest(TextPrompt("Once upon a time"), max_tokens=64)):
        ...
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from paceline.client.client import AsyncClient
from paceline.client.resuming import ResumePolicy
from paceline.errors import Unavailable
from paceline.generation import GenerationEvent, ServedModel, SessionInfo
from paceline.runtime.grpc_client import ClientTls
from paceline.text.request import GenerationRequest, ResumeRequest

Answer = TypeVar("Answer")


class Client:
    """An `AsyncClient` on an event loop of its own, in a thread. Any thread may call it. Close it, or use it in `with`.

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
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="paceline client", daemon=True)
        self._thread.start()
        self._closed = False

        async def make() -> AsyncClient:
            return AsyncClient(addresses, tls=tls, api_key=api_key, resume=resume)

        try:
            self._client = self._wait(make())
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends what runs and closes the connections. Repeatable."""
        if not self._closed:
            self._wait(self._client.close())
            self._stop()

    def generate(
        self, request: GenerationRequest, *, timeout_s: float | None = None, request_id: str | None = None
    ) -> Generator[GenerationEvent, None, None]:
        """Runs one generation; see `AsyncClient.generate`. Leaving the loop early cancels it."""
        return self._events(self._client.generate(request, timeout_s=timeout_s, request_id=request_id))

    def resume(
        self, point: ResumeRequest, *, timeout_s: float | None = None, request_id: str | None = None
    ) -> Generator[GenerationEvent, None, None]:
        """Goes on with a session; see `AsyncClient.resume`. Leaving the loop early cancels it."""
        return self._events(self._client.resume(point, timeout_s=timeout_s, request_id=request_id))

    def get_session(self, session: str, *, timeout_s: float | None = 10.0) -> SessionInfo:
        """Reads the record of a session; see `AsyncClient.get_session`."""
        return self._wait(self._client.get_session(session, timeout_s=timeout_s))

    def list_models(self, *, timeout_s: float | None = 10.0) -> tuple[ServedModel, ...]:
        """The models that can be asked for; see `AsyncClient.list_models`."""
        return self._wait(self._client.list_models(timeout_s=timeout_s))

    def _events(self, events: AsyncGenerator[GenerationEvent]) -> Generator[GenerationEvent, None, None]:
        async def next_event() -> GenerationEvent | None:
            return await anext(events, None)

        try:
            while (event := self._wait(next_event())) is not None:
                yield event
        finally:
            if not self._closed:
                self._wait(events.aclose())

    def _wait(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        """Runs a coroutine on the loop and waits for it; an interrupted wait cancels it."""
        if self._closed:
            call.close()
            raise Unavailable("the client is closed")
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
