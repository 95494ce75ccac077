"""The Kubernetes API as discovery uses it: a client, and list and watch of one service's EndpointSlices.

The client's own `Watch` is not used: it takes an error page of a proxy for an event, and lists again by itself in cases
where the caller has to know that events were lost.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from kubernetes.aio.client import ApiClient, ApiException, Configuration, DiscoveryV1Api, V1EndpointSlice
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from paceline.errors import ConfigurationError
from paceline_gateway.discovery.targets import KubernetesTarget

_SERVICE_LABEL = "kubernetes.io/service-name"
_GRACE_S = 5.0
"""How much longer than its time a watch may take before its connection counts as dead."""


class Change(Enum):
    """What a watch says."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"
    """Nothing has happened up to this version."""


@dataclass(frozen=True, slots=True)
class SliceList:
    """All slices at one version of the cluster."""

    slices: tuple[V1EndpointSlice, ...]
    version: str


@dataclass(frozen=True, slots=True)
class SliceEvent:
    """One change; of a bookmark only the version counts."""

    change: Change
    slice: V1EndpointSlice
    version: str


async def open_client(kubeconfig_file: Path | None) -> ApiClient:
    """A client with the credentials of the moment; use it as a context.

    Args:
        kubeconfig_file: the file to use; None takes the pod's service account, or else the user's own kubeconfig.

    Raises:
        ConfigurationError: there are no credentials.
    """
    configuration = Configuration()
    try:
        if kubeconfig_file is not None:
            await _load_file(kubeconfig_file, configuration)
        else:
            try:
                load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            except ConfigException:
                await _load_file(None, configuration)
    except Exception as error:  # a file that people write can be wrong in any way
        raise ConfigurationError(
            f"no way to the Kubernetes API: {error}; k8s:// works inside a pod with a service account, or with "
            "kubeconfig_file",
            field="kubeconfig_file",
        ) from error
    return ApiClient(configuration)


async def _load_file(path: Path | None, configuration: Configuration) -> None:
    # Nothing is written back: the file belongs to the user, and may be a read-only secret.
    file = None if path is None else str(path)
    await load_kube_config(  # type: ignore[no-untyped-call]
        config_file=file, client_configuration=configuration, persist_config=False
    )


class SlicesApi:
    """Lists and watches the slices of one service.

    Raises from both `ApiException`, with the status that the API answers or puts into the stream, and what a broken
    connection raises.

    Args:
        client: the client.
        target: the service.
        list_timeout_s: time for one list, in seconds.
    """

    def __init__(self, client: ApiClient, target: KubernetesTarget, list_timeout_s: float) -> None:
        self._api = DiscoveryV1Api(client)
        self._namespace = target.namespace
        self._selector = f"{_SERVICE_LABEL}={target.service}"
        self._list_timeout_s = list_timeout_s

    async def list(self) -> SliceList:
        """All slices, as they are now."""
        # No resource_version: the API must not answer from a cache that may be older than what was seen before.
        answer = await self._api.list_namespaced_endpoint_slice(
            self._namespace, label_selector=self._selector, _request_timeout=self._list_timeout_s
        )
        version = answer.metadata.resource_version if answer.metadata else None
        return SliceList(tuple(answer.items), version or "")

    async def watch(self, version: str, timeout_s: int) -> AsyncGenerator[SliceEvent, None]:
        """What happens after a version; ends when the API ends the stream, at the latest after the time.

        Args:
            version: of the list, or of the last event.
            timeout_s: how long, in seconds.
        """
        response = await self._api.list_namespaced_endpoint_slice_without_preload_content(
            self._namespace,
            label_selector=self._selector,
            watch=True,
            allow_watch_bookmarks=True,
            resource_version=version,
            timeout_seconds=timeout_s,
            _request_timeout=timeout_s + _GRACE_S,
        )
        async with response:
            if response.status != 200:
                raise ApiException(status=response.status, reason=(await response.text())[:500])
            async for line in response.content:
                yield _event(json.loads(line))


def _event(message: dict[str, Any]) -> SliceEvent:
    kind, body = message["type"], message["object"]
    if kind == "ERROR":
        raise ApiException(status=body.get("code"), reason=body.get("message") or body.get("reason"))
    changed = V1EndpointSlice.from_dict(body)
    if changed is None:
        raise ValueError(f"the API sent {kind} of nothing")
    return SliceEvent(Change(kind), changed, body["metadata"]["resourceVersion"])
