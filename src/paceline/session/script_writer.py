"""Sends Lua scripts to Redis in groups.

All calls that are made before the last group has been answered, and at least all of one event-loop turn, go out as one
pipeline: under load the cost of a round trip is shared by all sessions, and calls arrive in the order in which they
were made. Scripts are called by their hash; a server that does not know them, because it was restarted, gets them
again and the calls that it refused are repeated. Knows nothing of records.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoScriptError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from paceline.errors import PacelineError, Unavailable

MAX_GROUP = 1024
"""Most calls in one pipeline."""

Argument = str | bytes | int


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """One call of a script. It must do no harm twice: it is repeated when a connection broke and may have carried it.

    Attributes:
        script: its name, as in `session/lua/<name>.lua`.
        keys: the keys that it touches.
        args: its other arguments.
    """

    script: str
    keys: tuple[str, ...]
    args: tuple[Argument, ...]


def load_scripts(*names: str) -> dict[str, str]:
    """Source of the named scripts, each with the common part before it."""
    folder = resources.files("paceline.session") / "lua"
    common = (folder / "common.lua").read_text(encoding="utf-8")
    return {name: common + (folder / f"{name}.lua").read_text(encoding="utf-8") for name in names}


class ScriptWriter:
    """Groups script calls into pipelines.

    Attributes:
        num_pipelines: pipelines of script calls sent so far.
    """

    def __init__(self, redis: Redis, scripts: Mapping[str, str], *, timeout_s: float, address: str) -> None:
        """Sends nothing yet.

        Args:
            redis: the client, without retries of its own.
            scripts: source by name.
            timeout_s: seconds that one group may take.
            address: the server as error messages name it.
        """
        self._redis = redis
        self._scripts = dict(scripts)
        self._hashes = {name: hashlib.sha1(code.encode()).hexdigest() for name, code in scripts.items()}  # noqa: S324
        self._timeout_s = timeout_s
        self._address = address
        self._waiting: list[tuple[ScriptCall, asyncio.Future[str]]] = []
        self._sender: asyncio.Task[None] | None = None
        self._closed = False
        self.num_pipelines = 0

    async def call(self, call: ScriptCall) -> str:
        """Runs a script with the next group and returns its status reply.

        Raises:
            Unavailable: the server cannot be reached, does not answer in time, or refuses the call.
        """
        if self._closed:
            raise Unavailable("the session store is closed")
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((call, answer))
        if self._sender is None:
            # The task starts after everything that is ready in this turn, so that all of it joins the group.
            # It works for all sessions: what it logs is not about the one whose call came first.
            self._sender = asyncio.create_task(
                self._send_all(), name="redis script writer", context=contextvars.Context()
            )
        return await answer

    async def close(self) -> None:
        """Answers everything that waits, then returns; nothing is sent afterwards."""
        self._closed = True
        for _, answer in self._waiting:
            _answer(answer, Unavailable("the session store is closed"))
        self._waiting.clear()
        if self._sender is not None:
            await self._sender

    async def _send_all(self) -> None:
        group: list[tuple[ScriptCall, asyncio.Future[str]]] = []
        try:
            while self._waiting:
                group, self._waiting = self._waiting[:MAX_GROUP], self._waiting[MAX_GROUP:]
                replies = await self._send([call for call, _ in group])
                for (_, answer), reply in zip(group, replies, strict=True):
                    _answer(answer, reply)
        finally:
            self._sender = None
            for _, answer in [*group, *self._waiting]:  # none is left open unless this task was cancelled
                _answer(answer, Unavailable("the session store was stopped"))

    async def _send(self, calls: Sequence[ScriptCall]) -> list[str | PacelineError]:
        """One reply per call; never raises, since one group's fault must not end the sender."""
        replies: list[Any] = [None] * len(calls)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send_once(calls, range(len(calls)), replies)
                # A connection that broke in between is worth one more try: the server may have been restarted.
                if lost := [at for at, reply in enumerate(replies) if isinstance(reply, RedisConnectionError)]:
                    await self._send_once(calls, lost, replies)
        except Exception as error:  # whatever the client library may raise
            return [unavailable(self._address, error)] * len(calls)
        return [self._translate(reply) for reply in replies]

    async def _send_once(self, calls: Sequence[ScriptCall], indices: Sequence[int], replies: list[Any]) -> None:
        """Sends some of the calls and stores their replies, errors among them."""
        try:
            results = await self._pipeline([calls[index] for index in indices])
            unknown = [at for at, result in enumerate(results) if isinstance(result, NoScriptError)]
            if unknown:
                for code in self._scripts.values():
                    await self._redis.script_load(code)
                again = await self._pipeline([calls[indices[at]] for at in unknown])
                for at, result in zip(unknown, again, strict=True):
                    results[at] = result
        except RedisError as error:
            results = [error] * len(indices)
        for index, result in zip(indices, results, strict=True):
            replies[index] = result

    async def _pipeline(self, calls: Sequence[ScriptCall]) -> list[Any]:
        self.num_pipelines += 1
        async with self._redis.pipeline(transaction=False) as pipeline:
            for call in calls:
                pipeline.evalsha(self._hashes[call.script], len(call.keys), *call.keys, *call.args)
            return await pipeline.execute(raise_on_error=False)

    def _translate(self, reply: Any) -> str | PacelineError:
        if isinstance(reply, Exception):
            return unavailable(self._address, reply)
        return reply.decode() if isinstance(reply, bytes) else str(reply)


def unavailable(address: str, error: Exception) -> Unavailable:
    """The error for a server that does not serve, by what the client library or a timeout says.

    Args:
        address: the server, without a password.
        error: what happened.
    """
    if isinstance(error, (ResponseError, AuthenticationError)):
        return Unavailable(f"Redis at {address} refuses calls: {error}; check its settings", field="redis_url")
    reason = "no answer in time" if isinstance(error, TimeoutError) else str(error).rstrip(".")
    return Unavailable(
        f"Redis not reachable at {address}: {reason}. Start a Redis or Valkey server there, or name another by the "
        "redis_url setting; on one machine `paceline up` brings its own",
        field="redis_url",
    )


def _answer(future: asyncio.Future[str], reply: str | PacelineError) -> None:
    if future.done():
        return  # its caller was cancelled
    if isinstance(reply, PacelineError):
        future.set_exception(reply)
    else:
        future.set_result(reply)
