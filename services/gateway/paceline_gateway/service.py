"""The gateway as a process: wires tokenizer, store, pools, sessions and door, and ends them in order."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
import uuid
from collections.abc import Callable, Sequence

import grpc.aio
from prometheus_client import CollectorRegistry

from paceline.errors import ConfigurationError, PacelineError
from paceline.messages import FeatureFormat
from paceline.model_source import default_name, resolve
from paceline.runtime.supervisor import OnError, Supervisor
from paceline.runtime.telemetry import new_registry
from paceline.session.memory_store import MemoryStore
from paceline.session.redis_store import RedisStore
from paceline.session.store import SessionStore
from paceline.text.chat_template import ChatTemplate
from paceline.text.tokenizer import Tokenizer
from paceline.v1 import gateway_pb2, gateway_pb2_grpc
from paceline_gateway.api_keys import ApiKeys
from paceline_gateway.discovery.build import make_discovery
from paceline_gateway.discovery.targets import Target
from paceline_gateway.door import Door, DoorSettings
from paceline_gateway.effects import Lane
from paceline_gateway.fitness import Fitness
from paceline_gateway.gateway_gauges import GatewayGauges
from paceline_gateway.http.app import make_app
from paceline_gateway.http.front import Front, FrontLimits
from paceline_gateway.http.server import HttpServer
from paceline_gateway.link_codec import DRAFTER_CODEC, VERIFIER_CODEC, LinkCodec
from paceline_gateway.metrics import GatewayMetrics
from paceline_gateway.pool import Pool
from paceline_gateway.servicer import GenerationServicer
from paceline_gateway.services import SessionServices
from paceline_gateway.sessions import Sessions
from paceline_gateway.settings import MEMORY_STORE, GatewaySettings

logger = logging.getLogger(__name__)

_VERIFIERS_FIRST_S = 2.0
"""How long a drafter that builds on features is not judged because no verifier is there yet."""
_BEAT_EVERY_S = 1.0
_OWNER_LIFE_S = 10.0
"""After its last sign of life a gateway counts as dead, and names of sessions that it ran are free."""
_STOP_GRACE_S = 2.0
"""For sessions that are ended to write down that they were."""


def make_store(settings: GatewaySettings) -> SessionStore:
    """The session store that the settings name.

    Raises:
        ConfigurationError: the URL cannot be used.
    """
    url = settings.redis_url.get_secret_value()
    if url == MEMORY_STORE:
        return MemoryStore(expiry_s=settings.session_ttl_s)
    return RedisStore.from_url(url, expiry_s=settings.session_ttl_s, timeout_s=settings.redis_timeout_ms / 1000)


class GatewayService:
    """The gateway's `Service`.

    Attributes:
        keys: the API keys that clients must show.
        servicer: its rpc service.
        sessions: all running generations.
        store: records of sessions.
        verifiers: the verifier pool; there after `start`.
        drafters: the drafter pool; there after `start`.
        registry: its metrics, as a scrape reads them.
        metrics: the part of them that sessions count.
        addresses: further addresses that it listens on.
    """

    def __init__(self, settings: GatewaySettings, store: SessionStore | None = None) -> None:
        """Wires what needs no file and no peer.

        Args:
            settings: what it is told.
            store: used instead of the one that the settings name.

        Raises:
            ConfigurationError: the file of API keys or the store's URL cannot be used.
        """
        self._settings = settings
        self.keys = ApiKeys.load(settings.api_keys_file)
        self.sessions = Sessions(settings.max_concurrent_generations)
        self.store = make_store(settings) if store is None else store
        self.verifiers: Pool | None = None
        self.drafters: Pool | None = None
        self._model = settings.model_name or default_name(settings.model)
        self.registry: CollectorRegistry = new_registry("gateway")
        self.metrics = GatewayMetrics(self.registry, self._model)
        self.servicer = GenerationServicer(self.keys, self.metrics)
        self.addresses: dict[str, str] = {}
        self._http = None if settings.http_port is None else self._make_http(settings.http_port)

    def _make_http(self, port: int) -> HttpServer:
        settings = self._settings
        front = Front(
            door=lambda: self.servicer.door,
            keys=self.keys,
            verifiers=lambda: self.verifiers.snapshot if self.verifiers else None,
            drafters=lambda: self.drafters.snapshot if self.drafters else None,
            sessions=self.sessions,
            store=self.store,
            registry=self.registry,
            metrics=self.metrics,
            limits=FrontLimits(settings.max_body_bytes, settings.max_choices, settings.client_stall_s),
        )
        return HttpServer(settings, port, make_app(front), stop_grace_s=_STOP_GRACE_S)

    @property
    def grpc_services(self) -> Sequence[str]:
        """Full names of its rpc services."""
        return (gateway_pb2.DESCRIPTOR.services_by_name["Generation"].full_name,)

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer."""
        gateway_pb2_grpc.add_GenerationServicer_to_server(self.servicer, server)

    async def start(self, supervisor: Supervisor, set_healthy: Callable[[bool], None]) -> None:
        """Listens for HTTP, reads the tokenizer, checks the store, connects to the replicas, and opens the door.

        Raises:
            PacelineError: the port is taken, the tokenizer cannot be read or the store cannot be reached.
        """
        settings = self._settings
        if self._http is not None:
            self.addresses["http"] = self._http.start(supervisor)
        tokenizer, template = await asyncio.to_thread(self._load_text)
        await self._check_store()
        fitness = Fitness(self._model, tokenizer, self._served_features)
        if settings.client_tls is not None:
            settings.client_tls.credentials()  # later a file that cannot be read is the trouble of a link
        self.verifiers, self.drafters = self._make_pools(fitness)
        self.verifiers.start(supervisor)
        self.drafters.start(supervisor)
        self.sessions.start(supervisor)
        await self._wait_for_replicas(self.verifiers, self.drafters)
        owner = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(PacelineError):  # it was there a moment ago, and the heartbeat goes on
            await self.store.beat(owner, _OWNER_LIFE_S)
        supervisor.spawn("heartbeat", lambda: self._beat(owner), on_error=OnError.RESTART)
        services = SessionServices(
            owner=owner,
            verifiers=self.verifiers,
            drafters=self.drafters,
            store=self.store,
            patience=settings.patience,
            limits=settings.session_limits,
            metrics=self.metrics,
        )
        door_settings = DoorSettings(
            model=fitness.model,
            num_draft_tokens=settings.num_speculative_tokens,
            governor=settings.governor,
            draft_ahead=settings.draft_ahead,
            verifier_wait_s=settings.verifier_wait_ms / 1000,
            log_prompts=settings.log_prompts,
            fetch_features=settings.fetch_features,
        )
        door = Door(door_settings, tokenizer, template, services, self.sessions)
        pools = {Lane.VERIFIER: self.verifiers, Lane.DRAFTER: self.drafters}
        self.registry.register(GatewayGauges(self._model, self.sessions, pools, lambda: door.num_preparing))
        self.servicer.open(door)

    async def _served_features(self) -> tuple[FeatureFormat | None, ...]:
        """The features that verifiers serve; a drafter may come up a moment before them."""
        if self.verifiers is None:
            return ()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_VERIFIERS_FIRST_S):
                await self.verifiers.wait_ready()
        return self.verifiers.snapshot.features

    async def _beat(self, owner: str) -> None:
        """Says that this gateway lives: names of sessions that it runs stay taken."""
        while True:
            with contextlib.suppress(PacelineError):  # a store that is away is noticed by those who need it
                await self.store.beat(owner, _OWNER_LIFE_S)
            await asyncio.sleep(_BEAT_EVERY_S)

    def _load_text(self) -> tuple[Tokenizer, ChatTemplate]:
        folder = resolve(self._settings.model, weights=False, progress=logger.info)
        tokenizer = Tokenizer.load(folder)
        return tokenizer, ChatTemplate.load(folder, tokenizer.special_tokens)

    async def _check_store(self) -> None:
        try:
            await self.store.ping()
        except PacelineError as error:
            raise ConfigurationError(
                f"the session store cannot be used: {error.message}; start Redis or correct redis_url "
                f"({MEMORY_STORE} keeps sessions in this process only)",
                field="redis_url",
            ) from error

    def _make_pools(self, fitness: Fitness) -> tuple[Pool, Pool]:
        def pool(codec: LinkCodec, target: Target, silence_ms: int) -> Pool:
            return Pool(
                codec,
                make_discovery(
                    target, dns_interval_s=settings.dns_interval_s, kubeconfig_file=settings.kubeconfig_file
                ),
                functools.partial(fitness.check, codec.lane),
                silence_s=silence_ms / 1000,
                breaker=self._settings.breaker_limits,
                tls=self._settings.client_tls,
                max_message_bytes=self._settings.max_message_bytes,
            )

        settings = self._settings
        return (
            pool(VERIFIER_CODEC, settings.verifier_target, settings.verifier_silence_ms),
            pool(DRAFTER_CODEC, settings.drafter_target, settings.drafter_silence_ms),
        )

    async def _wait_for_replicas(self, verifiers: Pool, drafters: Pool) -> None:
        """Gives replicas a moment, so that the first requests find them; serves without them if need be."""
        try:
            async with asyncio.timeout(self._settings.startup_wait_s):
                await verifiers.wait_settled()
                await drafters.wait_settled()
                await verifiers.wait_ready()
        except TimeoutError:
            pass
        for pool in (verifiers, drafters):
            snapshot = pool.snapshot
            if not snapshot.ready or snapshot.troubles:
                trouble = snapshot.why_not or "none is configured"
                logger.warning("%s: %d ready; %s", pool.name, len(snapshot.ready), trouble)

    async def drain(self) -> None:
        """Takes no new generation and returns when the last client has been served."""
        await self.sessions.drain()

    async def stop(self) -> None:
        """Ends what runs and closes the store."""
        await self.sessions.stop(_STOP_GRACE_S)
        if self._http is not None:
            await self._http.stop()
        await self.store.close()
