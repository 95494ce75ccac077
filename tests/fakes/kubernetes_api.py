"""A small Kubernetes API server for EndpointSlices, on a real socket.

It speaks list and watch with label selectors, resource versions, bookmarks, timeoutSeconds and 410 Gone, and checks the
bearer token. Watches can be cut, expired and starved; the whole server can go away and come back.

    async with FakeKubernetesApi.start() as api:
        api.put(endpoint_slice("verifier-a", "verifier", [endpoint("10.0.0.1")]))
        config = api.write_kubeconfig(tmp_path)
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

SERVICE_LABEL = "kubernetes.io/service-name"
NAMESPACE = "default"
_PATH = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

Json = dict[str, Any]


def endpoint(
    address: str,
    *,
    ready: bool | None = True,
    serving: bool | None = None,
    terminating: bool | None = None,
    uid: str = "",
) -> Json:
    """One endpoint of a slice; the pod's uid is the address unless told otherwise."""
    return {
        "addresses": [address],
        "conditions": {"ready": ready, "serving": serving, "terminating": terminating},
        "targetRef": {"kind": "Pod", "namespace": NAMESPACE, "name": f"pod-{address}", "uid": uid or f"uid-{address}"},
    }


def endpoint_slice(
    name: str,
    service: str,
    endpoints: Sequence[Json],
    *,
    ports: Mapping[str, int] | None = None,
    address_type: str = "IPv4",
    namespace: str = NAMESPACE,
) -> Json:
    """A slice; port grpc is 50052 unless told otherwise."""
    return {
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": {"name": name, "namespace": namespace, "labels": {SERVICE_LABEL: service}},
        "addressType": address_type,
        "endpoints": list(endpoints),
        "ports": [
            {"name": port_name, "port": port, "protocol": "TCP"}
            for port_name, port in (ports or {"grpc": 50052}).items()
        ],
    }


@dataclass(frozen=True, slots=True)
class _Record:
    """One change of one object; None before it was made and after it was deleted."""

    version: int
    before: Json | None
    after: Json | None


@dataclass(frozen=True, slots=True)
class _Selection:
    """What a request asks for."""

    namespace: str
    labels: Mapping[str, str]

    def matches(self, item: Json | None) -> bool:
        if item is None or item["metadata"]["namespace"] != self.namespace:
            return False
        labels = item["metadata"]["labels"]
        return all(labels.get(key) == value for key, value in self.labels.items())


@dataclass
class _Watch:
    """A running watch; None in its queue ends it."""

    selection: _Selection
    bookmarks: bool
    request: web.Request
    queue: asyncio.Queue[Json | None] = field(default_factory=asyncio.Queue)

    def tell(self, record: _Record) -> None:
        was, now = self.selection.matches(record.before), self.selection.matches(record.after)
        if now and record.after is not None:
            self.queue.put_nowait({"type": "MODIFIED" if was else "ADDED", "object": record.after})
        elif was and record.before is not None:
            # As in the real one: the last state that matched, with the version at which it ceased to.
            self.queue.put_nowait({"type": "DELETED", "object": _at(record.before, record.version)})


def _at(item: Json, version: int) -> Json:
    changed = copy.deepcopy(item)
    changed["metadata"]["resourceVersion"] = str(version)
    return changed


def _status(code: int, reason: str) -> Json:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "message": f"the fake says {reason}",
        "code": code,
    }


class FakeKubernetesApi:
    """The server; see the module's docstring.

    Args:
        tls: makes it speak HTTPS.

    Attributes:
        token: the bearer token that it accepts.
        gone_in_stream: a watch from a forgotten version gets 410 as an event in the stream, not as its HTTP status.
        answer_with: HTTP status that every request gets, with a body that is no JSON; None for honest answers.
        num_lists: lists that were answered.
        watched_from: version from which each watch so far has begun.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.token = "let-me-in"
        self.gone_in_stream = True
        self.answer_with: int | None = None
        self.num_lists = 0
        self.watched_from: list[str] = []
        self._tls = tls
        self._port = 0
        self._version = 100
        self._oldest_version = 0
        self._items: dict[str, Json] = {}
        self._cache: tuple[int, dict[str, Json]] | None = None
        self._records: list[_Record] = []
        self._watches: list[_Watch] = []
        self._runner: web.AppRunner | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeKubernetesApi]:
        """A running one."""
        api = cls(tls)
        await api.come_back()
        try:
            yield api
        finally:
            await api.go_away()

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._port}"

    @property
    def num_watches(self) -> int:
        """Watches that run."""
        return len(self._watches)

    def write_kubeconfig(self, folder: Path) -> Path:
        """A kubeconfig file for this server, with its token."""
        path = folder / "kubeconfig"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "gateway", "user": {"token": self.token}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "gateway"}}],
            "current-context": "fake",
        }
        path.write_text(json.dumps(config), encoding="utf-8")
        return path

    # --- the cluster --------------------------------------------------------------------------------------------------

    def put(self, item: Json) -> None:
        """Makes or replaces a slice."""
        self._version += 1
        name = item["metadata"]["name"]
        before, after = self._items.get(name), _at(item, self._version)
        self._items[name] = after
        self._record(_Record(self._version, before, after))

    def delete(self, name: str) -> None:
        """Deletes a slice."""
        self._version += 1
        self._record(_Record(self._version, self._items.pop(name), None))

    def relabel(self, name: str, service: str) -> None:
        """Makes a slice belong to another service."""
        item = copy.deepcopy(self._items[name])
        item["metadata"]["labels"][SERVICE_LABEL] = service
        self.put(item)

    def _record(self, record: _Record) -> None:
        self._records.append(record)
        for watch in self._watches:
            watch.tell(record)

    # --- what can go wrong --------------------------------------------------------------------------------------------

    def bookmark(self) -> None:
        """Sends a bookmark to every watch that asked for them."""
        item = {
            "kind": "EndpointSlice",
            "apiVersion": "discovery.k8s.io/v1",
            "metadata": {"resourceVersion": str(self._version)},
            "addressType": "",
            "endpoints": None,
            "ports": None,
        }
        for watch in self._watches:
            if watch.bookmarks:
                watch.queue.put_nowait({"type": "BOOKMARK", "object": item})

    def compact(self) -> None:
        """Forgets the history: a watch from an older version than the present one gets 410."""
        self._oldest_version = self._version
        self._records.clear()

    def expire_watches(self) -> None:
        """Sends 410 into every running watch."""
        for watch in self._watches:
            watch.queue.put_nowait({"type": "ERROR", "object": _status(410, "Expired")})
            watch.queue.put_nowait(None)

    def keep_cache(self) -> None:
        """From now on lists that allow any version (resourceVersion=0) get the present state, however old it is."""
        self._cache = (self._version, dict(self._items))

    def end_watches(self) -> None:
        """Ends every watch before its time and in good order, as a server does that is replaced."""
        for watch in self._watches:
            watch.queue.put_nowait(None)

    def cut_watches(self) -> None:
        """Breaks the connection of every watch."""
        watches, self._watches = self._watches, []
        for watch in watches:
            if watch.request.transport is not None:
                watch.request.transport.abort()
            watch.queue.put_nowait(None)

    async def go_away(self) -> None:
        """Breaks every connection and closes the port."""
        self.cut_watches()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def come_back(self) -> None:
        """Listens, on the same port as before."""
        app = web.Application()
        app.router.add_get(_PATH, self._get)
        # A watch whose client has left ends at once.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, ssl_context=self._tls, reuse_address=True).start()
        self._port = self._runner.addresses[0][1]

    # --- HTTP ---------------------------------------------------------------------------------------------------------

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if self.answer_with is not None:
            return web.Response(status=self.answer_with, text="<html>no luck</html>\n", content_type="text/html")
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or token != self.token:
            return web.json_response(_status(401, "Unauthorized"), status=401)
        labels = dict(part.split("=", 1) for part in request.query.get("labelSelector", "").split(",") if part)
        selection = _Selection(request.match_info["namespace"], labels)
        if request.query.get("watch") in ("true", "1", "True"):
            return await self._watch(request, selection)
        return self._list(request, selection)

    def _list(self, request: web.Request, selection: _Selection) -> web.Response:
        self.num_lists += 1
        version, items = self._version, self._items
        if request.query.get("resourceVersion") == "0" and self._cache is not None:
            version, items = self._cache
        found = [item for item in items.values() if selection.matches(item)]
        return web.json_response(
            {
                "kind": "EndpointSliceList",
                "apiVersion": "discovery.k8s.io/v1",
                "metadata": {"resourceVersion": str(version)},
                "items": found,
            }
        )

    async def _watch(self, request: web.Request, selection: _Selection) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        self.watched_from.append(str(since))
        is_gone = since < self._oldest_version
        if is_gone and not self.gone_in_stream:
            return web.json_response(_status(410, "Gone"), status=410)
        watch = _Watch(selection, request.query.get("allowWatchBookmarks") in ("true", "1", "True"), request)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        for record in self._records:
            if record.version > since:
                watch.tell(record)
        self._watches.append(watch)
        if is_gone:
            watch.queue.put_nowait({"type": "ERROR", "object": _status(410, "Expired")})
            watch.queue.put_nowait(None)
        try:
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(float(request.query.get("timeoutSeconds", "1800"))):
                    while (event := await watch.queue.get()) is not None:
                        await response.write(json.dumps(event).encode() + b"\n")
        finally:
            if watch in self._watches:
                self._watches.remove(watch)
        return response
