"""Endpoints behind a Kubernetes service: list its EndpointSlices, then watch them.

    list ── version ──▶ watch ──▶ watch ──▶ ...  each goes on from the last event or bookmark
      ▲                   │
      └── every few minutes, and after every cut, error or 410 Gone

Nothing is believed lost: while the API is away the last known endpoints stay in force, however long that takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from dataclasses import dataclass
from pathlib import Path

from kubernetes.aio.client import ApiException

from paceline.errors import ConfigurationError, Unavailable
from paceline.runtime.supervisor import end_if_cancelled
from paceline_gateway.discovery.endpoint import Endpoint, Tell
from paceline_gateway.discovery.endpoint_slices import SliceTable
from paceline_gateway.discovery.kubernetes_api import Change, SliceEvent, SlicesApi, open_client
from paceline_gateway.discovery.targets import KubernetesTarget

logger = logging.getLogger(__name__)

_EARLY_S = 1.0
"""A watch that ends by itself may be so much early."""


@dataclass(frozen=True, slots=True)
class KubernetesTiming:
    """How often what is done, in seconds.

    Attributes:
        watch_s: one watch; a connection that died without a word is noticed a little later.
        resync_s: between two lists while nothing breaks.
        list_timeout_s: time for one list.
        first_pause_s: after the first failure in a row; doubled after each further one, with jitter.
        last_pause_s: longest pause.
        steady_s: a failure after so long without one is the first of a new row.
    """

    watch_s: float = 60.0
    resync_s: float = 300.0
    list_timeout_s: float = 10.0
    first_pause_s: float = 0.1
    last_pause_s: float = 10.0
    steady_s: float = 30.0


class KubernetesDiscovery:
    """Tells the endpoints of a service, and the changes.

    Args:
        target: the service.
        kubeconfig_file: as for `open_client`.
        timing: how often what is done.
    """

    def __init__(
        self, target: KubernetesTarget, kubeconfig_file: Path | None = None, timing: KubernetesTiming | None = None
    ) -> None:
        self.name = str(target)
        self._target = target
        self._kubeconfig_file = kubeconfig_file
        self._timing = timing or KubernetesTiming()
        self._table = SliceTable(target.port)
        self._told: tuple[Endpoint, ...] | None = None
        self._portless: tuple[str, ...] = ()
        self._failures = 0

    async def run(self, tell: Tell) -> None:
        """Follows the service until it is cancelled.

        Raises:
            ConfigurationError: there are no credentials at the start.
        """
        clock = asyncio.get_running_loop().time
        began = False
        while True:
            started_at = clock()
            try:
                # A new client each time: its credentials may be what was wrong.
                async with await open_client(self._kubeconfig_file) as client:
                    began = True
                    await self._follow(SlicesApi(client, self._target, self._timing.list_timeout_s), tell)
            except Exception as error:
                end_if_cancelled()
                if isinstance(error, ConfigurationError) and not began:
                    raise
                # Whatever else it is, the pool is better off with the endpoints that it knows.
                if clock() - started_at >= self._timing.steady_s:
                    self._failures = 0
                self._failed(error)
            await asyncio.sleep(self._pause_s())

    async def _follow(self, api: SlicesApi, tell: Tell) -> None:
        """Lists and watches in turn; ends by raising what has broken."""
        clock = asyncio.get_running_loop().time
        while True:
            listed = await api.list()
            if self._failures:
                logger.info("%s: the Kubernetes API answers again", self.name)
            version = listed.version
            self._table.replace(listed.slices)
            self._publish(tell)
            resync_at = clock() + self._timing.resync_s * random.uniform(0.9, 1.0)  # noqa: S311
            while (left_s := resync_at - clock()) > 0:
                timeout_s = max(1, math.ceil(min(self._timing.watch_s, left_s)))
                ends_at = clock() + timeout_s
                async with contextlib.aclosing(api.watch(version, timeout_s)) as events:
                    async for event in events:
                        version = event.version
                        self._take(event)
                        self._publish(tell)
                if clock() < ends_at - _EARLY_S:
                    raise Unavailable("the watch was cut")  # what has happened meanwhile only a list can tell
                self._failures = 0

    def _take(self, event: SliceEvent) -> None:
        self._failures = 0
        if event.change is Change.DELETED:
            self._table.remove(event.slice)
        elif event.change is not Change.BOOKMARK:
            self._table.put(event.slice)

    def _publish(self, tell: Tell) -> None:
        portless = self._table.portless
        if portless and portless != self._portless:
            logger.warning("%s: no such port in %s; name one of the service's ports", self.name, ", ".join(portless))
        self._portless = portless
        endpoints = self._table.endpoints()
        if endpoints != self._told:
            self._told = endpoints
            tell(endpoints)

    # --- trouble ------------------------------------------------------------------------------------------------------

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        # A single one is an API server that was replaced; a long row of them is one piece of news.
        level = {1: logging.INFO, 2: logging.WARNING}.get(self._failures, logging.DEBUG)
        reason = f"{error.status} {error.reason}" if isinstance(error, ApiException) else str(error)
        text = f"{type(error).__name__}: {reason}"
        logger.log(level, "%s: %s; the %d known endpoints stay in use", self.name, text, len(self._told or ()))

    def _pause_s(self) -> float:
        timing = self._timing
        pause_s = min(timing.first_pause_s * 2.0 ** min(self._failures - 1, 30), timing.last_pause_s)
        return pause_s * random.uniform(0.5, 1.0)  # noqa: S311
