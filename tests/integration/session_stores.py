"""The stores that the session tests run over: in memory, and on every real server that this machine has."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import redis

from paceline.messages import AcceptanceRule, SamplingParams
from paceline.session.embedded import EmbeddedRedis, find_server
from paceline.session.memory_store import MemoryStore
from paceline.session.redis_store import RedisStore
from paceline.session.store import Append, Positions, SessionRecord, SessionState, SessionStore
from paceline.text.request import SpeculationOptions

SERVERS: dict[str, Path] = {"valkey": find_server()}
if found := shutil.which("redis-server"):
    SERVERS["redis"] = Path(found)

EXPIRY_S = 60.0
PROMPT = (11, 0, 2**31 - 1)
POSITIONS = Positions("verifier-1", 7, "drafter-2", 5, 0.8125)
RECORD = SessionRecord(
    session="chat.1",
    epoch=3,
    owner="gateway-1",
    tenant="team-ö",
    state=SessionState.RUNNING,
    model="tiny",
    sampling=SamplingParams(
        temperature=0.1 + 0.2, logit_bias={7: -100.0, 0: 0.5}, stop_token_ids=(4, 5), seed=-(2**63), top_logprobs=0
    ),
    rule=AcceptanceRule.MATCH,
    generation_start=3,
    tokens=PROMPT,
    positions=POSITIONS,
    max_tokens=100,
    stop=("\n\n", "é"),
    speculation=SpeculationOptions(method="ngram", num_speculative_tokens=3),
)


def record(**changes: object) -> SessionRecord:
    return replace(RECORD, **changes)  # type: ignore[arg-type]


def append(
    *tokens: int,
    at: int,
    epoch: int = 3,
    owner: str = RECORD.owner,
    session: str = "chat.1",
    positions: Positions = POSITIONS,
) -> Append:
    return Append(session, epoch, owner, at, tokens, positions)


@dataclass(slots=True)
class Server:
    """A running server; `restart` brings it back on the same port with nothing in it."""

    process: EmbeddedRedis

    @property
    def url(self) -> str:
        return self.process.url

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, decode_responses=True)

    def restart(self) -> None:
        self.process.stop()
        self.process.start()


def start_server(name: str) -> Server:
    """A server on a port that stays its own over restarts."""
    with EmbeddedRedis(program=SERVERS[name]) as probe:
        port = probe.port
    process = EmbeddedRedis(port=port, program=SERVERS[name])
    process.start()
    return Server(process)


@pytest.fixture(scope="session", params=list(SERVERS))
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    running = start_server(request.param)
    yield running
    running.process.stop()


@pytest.fixture
async def redis_store(server: Server) -> AsyncIterator[RedisStore]:
    """A store on an empty server; afterwards no key may be left without an expiry."""
    store = RedisStore.from_url(server.url, expiry_s=EXPIRY_S, timeout_s=5.0)
    with server.client() as client:
        client.flushall()
        yield store
        await store.close()
        for key in client.keys("*"):
            assert 0 < client.pttl(key) <= EXPIRY_S * 1000, f"{key} has no expiry"


@pytest.fixture(params=["memory", *SERVERS])
async def store(request: pytest.FixtureRequest, servers: dict[str, Server]) -> AsyncIterator[SessionStore]:
    """Each store in turn, empty."""
    if request.param == "memory":
        yield MemoryStore(expiry_s=EXPIRY_S)
        return
    running = servers[request.param]
    with running.client() as client:
        client.flushall()
    on_server = RedisStore.from_url(running.url, expiry_s=EXPIRY_S, timeout_s=5.0)
    yield on_server
    await on_server.close()


@pytest.fixture(scope="session")
def servers() -> Iterator[dict[str, Server]]:
    """All servers, by name."""
    running = {name: start_server(name) for name in SERVERS}
    yield running
    for server in running.values():
        server.process.stop()
