"""Records of sessions in Redis or Valkey, shared by all gateways.

    paceline:{<session>}            hash: epoch, owner, tenant, state, sampling, positions, ..., see `codec`
    paceline:{<session>}:tokens     string: all final tokens as little-endian int32, append-only
    paceline:owner:<owner>          there while the gateway of that name lives

The braces are part of the names: they put both keys of a session on one shard. Both keys expire together; every write
extends them. All writes are scripts in `session/lua`, so that each is atomic, and use commands of Redis 7.0 only.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from paceline.errors import ConfigurationError
from paceline.session.codec import pack_tokens, position_fields, record_fields, record_from_fields
from paceline.session.script_writer import ScriptCall, ScriptWriter, load_scripts, unavailable
from paceline.session.store import (
    Append,
    AppendOutcome,
    SessionRecord,
    SessionState,
    busy_session,
    unknown_session,
)

Result = TypeVar("Result")


class RedisStore:
    """A `SessionStore` on a server. Belongs to the event loop that uses it first."""

    def __init__(self, redis: Redis, *, address: str, expiry_s: float, timeout_s: float) -> None:
        """Connects at the first use; see `from_url`."""
        self._redis = redis
        self._expiry_ms = round(expiry_s * 1000)
        self._timeout_s = timeout_s
        self.address = address
        self._writer = ScriptWriter(
            redis,
            load_scripts("create", "put", "append", "finish", "take_over", "touch"),
            timeout_s=timeout_s,
            address=address,
        )

    @classmethod
    def from_url(cls, url: str, *, expiry_s: float = 3600.0, timeout_s: float = 1.0) -> RedisStore:
        """A store on the server that a URL names. Connects at the first use; `ping` checks.

        Args:
            url: redis://, rediss:// (TLS) or unix://, with user and password if the server wants them.
            expiry_s: seconds that a record lives after its last write or touch.
            timeout_s: seconds that one call may take.

        Raises:
            ConfigurationError: the URL or a number cannot be used.
        """
        if not (expiry_s > 0 and timeout_s > 0):
            raise ConfigurationError(
                f"expiry_s and timeout_s must be above 0, got {expiry_s:g} and {timeout_s:g}", field="expiry_s"
            )
        try:
            # Repeating after a broken connection is done here and in the writer, within the time of one call.
            redis = Redis.from_url(
                url, socket_timeout=None, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0), protocol=2
            )
        except ValueError as error:
            raise ConfigurationError(
                "redis_url must look like redis://[[user]:password@]host:port[/database]", field="redis_url"
            ) from error
        return cls(redis, address=_address(redis), expiry_s=expiry_s, timeout_s=timeout_s)

    @property
    def num_pipelines(self) -> int:
        """Pipelines of writes sent so far; writes of one event-loop turn share one."""
        return self._writer.num_pipelines

    async def create(self, record: SessionRecord) -> None:
        """See `SessionStore.create`."""
        fields = _flat(record_fields(record))
        packed = pack_tokens(record.tokens)
        # A call that has to be repeated must know its own record from another of that name.
        call_id = secrets.token_hex(8)
        outcome = await self._call(
            "create", record.session, call_id, record.epoch, record.tenant, packed, self._expiry_ms, *fields
        )
        if outcome == "foreign":
            raise unknown_session(record.session)
        if outcome == "busy":
            raise busy_session(record.session)

    async def put(self, record: SessionRecord) -> AppendOutcome:
        """See `SessionStore.put`."""
        fields = _flat(record_fields(record))
        packed = pack_tokens(record.tokens)
        return AppendOutcome(
            await self._call(
                "put", record.session, record.epoch, record.owner, record.tenant, packed, self._expiry_ms, *fields
            )
        )

    async def append(self, append: Append) -> AppendOutcome:
        """See `SessionStore.append`; appends of one event-loop turn go out together."""
        fields = _flat(position_fields(append.positions))
        packed = pack_tokens(append.tokens)
        return AppendOutcome(
            await self._call(
                "append",
                append.session,
                append.epoch,
                append.owner,
                append.from_len,
                packed,
                self._expiry_ms,
                *fields,
            ),
        )

    async def finish(
        self, session: str, epoch: int, owner: str, state: SessionState, finish_reason: str
    ) -> AppendOutcome:
        """See `SessionStore.finish`."""
        return AppendOutcome(
            await self._call("finish", session, epoch, owner, state.value, finish_reason, self._expiry_ms),
        )

    async def take_over(self, seen: SessionRecord, owner: str, epoch: int) -> AppendOutcome:
        """See `SessionStore.take_over`."""
        # As in `create`: this process may want the same record twice at once, and only one of the two may get it.
        call_id = secrets.token_hex(8)
        return AppendOutcome(
            await self._call(
                *("take_over", seen.session, call_id, seen.epoch, seen.owner, epoch, owner, self._expiry_ms)
            ),
        )

    async def touch(self, session: str, epoch: int, owner: str) -> AppendOutcome:
        """See `SessionStore.touch`; those of one event-loop turn go out together with all other writes."""
        return AppendOutcome(await self._call("touch", session, epoch, owner, self._expiry_ms))

    async def get(self, session: str) -> SessionRecord | None:
        """See `SessionStore.get`."""
        fields, packed = await self._read(lambda: self._fetch(session))
        return record_from_fields(session, fields, packed or b"")

    async def beat(self, owner: str, life_s: float) -> None:
        """See `SessionStore.beat`."""
        await self._read(lambda: self._redis.set(_owner_key(owner), "", px=round(life_s * 1000)))

    async def is_alive(self, owner: str) -> bool:
        """See `SessionStore.is_alive`."""
        return bool(await self._read(lambda: self._redis.exists(_owner_key(owner))))

    async def ping(self) -> None:
        """See `SessionStore.ping`."""
        await self._read(self._redis.ping)

    async def close(self) -> None:
        """See `SessionStore.close`."""
        await self._writer.close()
        await self._redis.aclose()

    async def _call(self, script: str, session: str, *args: str | bytes | int) -> str:
        return await self._writer.call(ScriptCall(script, _keys(session), args))

    async def _fetch(self, session: str) -> tuple[dict[bytes, bytes], bytes | None]:
        record_key, tokens_key = _keys(session)
        async with self._redis.pipeline(transaction=True) as pipeline:
            pipeline.hgetall(record_key)
            pipeline.get(tokens_key)
            fields, packed = await pipeline.execute()
        return fields, packed

    async def _read(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """Runs a call that may be repeated; once more if the connection turns out to be broken."""
        try:
            async with asyncio.timeout(self._timeout_s):
                try:
                    return await call()
                except RedisConnectionError:
                    return await call()
        except (RedisError, OSError) as error:  # a TimeoutError is an OSError
            raise unavailable(self.address, error) from error


def _keys(session: str) -> tuple[str, str]:
    record_key = f"paceline:{{{session}}}"
    return record_key, f"{record_key}:tokens"


def _owner_key(owner: str) -> str:
    return f"paceline:owner:{owner}"


def _flat(fields: dict[str, str]) -> list[str]:
    return [part for field in fields.items() for part in field]


def _address(redis: Redis) -> str:
    """Where the server is, without user and password."""
    settings = redis.connection_pool.connection_kwargs
    if "path" in settings:
        return f"unix://{settings['path']}"
    host = settings.get("host", "localhost")
    return f"redis://{host}:{settings.get('port', 6379)}"
