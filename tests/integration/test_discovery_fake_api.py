"""The fake Kubernetes API does what the tests of discovery need of it: each ability once, over plain HTTP."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.fakes.kubernetes_api import FakeKubernetesApi, endpoint, endpoint_slice
from tests.integration.fleet import until

Api = tuple[FakeKubernetesApi, aiohttp.ClientSession]
SELECTOR = {"labelSelector": "kubernetes.io/service-name=verifier"}


@pytest.fixture
async def running() -> AsyncIterator[Api]:
    async with FakeKubernetesApi.start() as api:
        headers = {"Authorization": f"Bearer {api.token}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            api.put(endpoint_slice("a", "verifier", [endpoint("10.0.0.1")]))
            api.put(endpoint_slice("other", "drafter", [endpoint("10.0.0.2")]))
            yield api, session


def url(api: FakeKubernetesApi, namespace: str = "default") -> str:
    return f"{api.url}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"


async def listed(running: Api, namespace: str = "default", **query: str) -> Any:
    api, session = running
    async with session.get(url(api, namespace), params={**SELECTOR, **query}) as response:
        return response.status, await response.json()


def names(answer: Any) -> list[str]:
    return [item["metadata"]["name"] for item in answer["items"]]


@contextlib.asynccontextmanager
async def watching(running: Api, version: str, **query: str) -> AsyncIterator[aiohttp.ClientResponse]:
    api, session = running
    params = {**SELECTOR, "watch": "true", "resourceVersion": version, **query}
    async with session.get(url(api), params=params) as response:
        yield response


async def event(response: aiohttp.ClientResponse) -> tuple[str, str]:
    """Type and name of the next event; the code of an error."""
    message = json.loads(await response.content.readline())
    item = message["object"]
    return message["type"], str(item["code"]) if message["type"] == "ERROR" else item["metadata"].get("name", "")


async def test_a_list_has_what_the_selector_and_the_namespace_ask_for(running: Api) -> None:
    api, _ = running
    api.put(endpoint_slice("far", "verifier", [], namespace="elsewhere"))
    status, answer = await listed(running)
    assert (status, names(answer)) == (200, ["a"])
    assert int(answer["metadata"]["resourceVersion"]) > int(answer["items"][0]["metadata"]["resourceVersion"])
    assert names((await listed(running, "elsewhere"))[1]) == ["far"]
    assert api.num_lists == 2


async def test_a_watch_has_what_came_after_its_version_and_what_comes(running: Api) -> None:
    api, _ = running
    _, answer = await listed(running)
    api.put(endpoint_slice("b", "verifier", []))
    async with watching(running, answer["metadata"]["resourceVersion"]) as response:
        assert await event(response) == ("ADDED", "b")
        api.put(endpoint_slice("b", "verifier", [endpoint("10.0.0.3")]))
        api.put(endpoint_slice("other", "drafter", []))
        api.delete("b")
        assert await event(response) == ("MODIFIED", "b")
        assert await event(response) == ("DELETED", "b")
        assert api.num_watches == 1
    await until(lambda: api.num_watches == 0)


async def test_relabelling_is_a_deletion_for_one_service_and_an_addition_for_another(running: Api) -> None:
    api, _ = running
    _, answer = await listed(running)
    async with watching(running, answer["metadata"]["resourceVersion"]) as response:
        api.relabel("a", "drafter")
        api.relabel("other", "verifier")
        assert await event(response) == ("DELETED", "a")
        assert await event(response) == ("ADDED", "other")


async def test_bookmarks_go_to_who_asked_for_them(running: Api) -> None:
    api, _ = running
    async with (
        watching(running, "102", allowWatchBookmarks="true") as wants,
        watching(running, "102", timeoutSeconds="0.2") as wants_none,
    ):
        await until(lambda: api.num_watches == 2)
        api.bookmark()
        assert await event(wants) == ("BOOKMARK", "")
        assert await wants_none.read() == b""


async def test_a_watch_ends_after_its_time(running: Api) -> None:
    async with watching(running, "102", timeoutSeconds="0.05") as response:
        assert await response.read() == b""


async def test_a_watch_can_be_ended_in_good_order(running: Api) -> None:
    api, _ = running
    async with watching(running, "102") as response:
        await until(lambda: api.num_watches == 1)
        api.end_watches()
        assert await response.read() == b""


async def test_a_cut_watch_ends_in_the_middle(running: Api) -> None:
    api, _ = running
    async with watching(running, "102") as response:
        await until(lambda: api.num_watches == 1)
        api.cut_watches()
        with pytest.raises(aiohttp.ClientError):
            await response.read()


async def test_a_forgotten_version_is_gone_as_a_status_or_as_an_event(running: Api) -> None:
    api, _ = running
    api.put(endpoint_slice("b", "verifier", []))
    api.compact()
    async with watching(running, "101") as response:
        assert (response.status, await event(response)) == (200, ("ERROR", "410"))
    api.gone_in_stream = False
    async with watching(running, "101") as response:
        assert (response.status, (await response.json())["code"]) == (410, 410)


async def test_a_running_watch_can_expire(running: Api) -> None:
    api, _ = running
    async with watching(running, "102") as response:
        await until(lambda: api.num_watches == 1)
        api.expire_watches()
        assert await event(response) == ("ERROR", "410")
        assert await response.read() == b""


async def test_any_version_may_be_an_old_one(running: Api) -> None:
    api, _ = running
    api.keep_cache()
    api.delete("a")
    assert names((await listed(running, resourceVersion="0"))[1]) == ["a"]
    assert names((await listed(running))[1]) == []


async def test_the_token_is_checked(running: Api) -> None:
    api, _ = running
    api.token = "another"
    status, answer = await listed(running)
    assert (status, answer["code"]) == (401, 401)


async def test_it_can_be_in_trouble_and_away_and_come_back_as_it_was(running: Api) -> None:
    api, session = running
    api.answer_with = 503
    async with session.get(url(api)) as response:
        assert (response.status, response.content_type) == (503, "text/html")
    api.answer_with = None
    await api.go_away()
    with pytest.raises(aiohttp.ClientConnectionError):
        await listed(running)
    await api.come_back()
    assert names((await listed(running))[1]) == ["a"]
