"""What every discovery must do, each in a world of its own: a name that is looked up, or a Kubernetes API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from kubernetes.aio.client import ApiClient
from paceline_gateway.discovery import kubernetes_discovery
from paceline_gateway.discovery.dns import DnsDiscovery
from paceline_gateway.discovery.kubernetes_discovery import KubernetesDiscovery, KubernetesTiming
from paceline_gateway.discovery.static import StaticDiscovery
from paceline_gateway.discovery.targets import DnsTarget

from paceline.errors import ConfigurationError
from paceline.runtime.supervisor import Supervisor
from tests.fakes.kubernetes_api import FakeKubernetesApi, endpoint, endpoint_slice
from tests.integration.discovery_worlds import (
    PORT,
    SOON,
    TARGET,
    DnsWorld,
    KubernetesWorld,
    Told,
    World,
    followed,
    kubernetes,
)
from tests.integration.fleet import until

ATTEMPTS_IN_A_MINUTE = 12
"""Pauses double from 0.1 s to 10 s."""


@pytest.fixture(params=["dns", "k8s"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """A followed one with two hosts."""
    if request.param == "dns":
        dns = DnsWorld(tmp_path)
        dns.has("10.0.0.1", "10.0.0.2")
        async with followed(dns):
            await dns.told.show("10.0.0.1", "10.0.0.2")
            yield dns
    else:
        async with kubernetes(tmp_path) as world:
            yield world


def attempts(caplog: pytest.LogCaptureFixture) -> int:
    return sum("known endpoints stay in use" in record.getMessage() for record in caplog.records)


# --- every discovery --------------------------------------------------------------------------------------------------


async def test_a_fixed_list_is_told_once() -> None:
    told = Told()
    await StaticDiscovery([f"a:{PORT}", f"b:{PORT}"]).run(told)
    assert len(told.sets) == 1
    assert told.present == {"a": False, "b": False}


async def test_endpoints_come_and_go(world: World) -> None:
    world.has("10.0.0.1", "10.0.0.2", "10.0.0.3")
    await world.told.show("10.0.0.1", "10.0.0.2", "10.0.0.3")
    world.has("10.0.0.3")
    await world.told.show("10.0.0.3")
    world.has("10.0.0.4")
    await world.told.show("10.0.0.4")


async def test_nothing_is_told_twice(world: World) -> None:
    world.has("10.0.0.2", "10.0.0.1")
    world.has("10.0.0.9")
    await world.told.show("10.0.0.9")
    assert all(before != after for before, after in zip(world.told.sets, world.told.sets[1:], strict=False))


async def test_both_address_families(world: World) -> None:
    if isinstance(world, KubernetesWorld):
        world.put(endpoint("fd00::7"), name="verifier-v6", address_type="IPv6")
    else:
        world.has("10.0.0.1", "10.0.0.2", "fd00::7")
    await world.told.show("10.0.0.1", "10.0.0.2", "[fd00::7]")


async def test_the_last_known_stay_while_the_source_is_away(world: World) -> None:
    await world.go_away()
    world.has("10.0.0.2", "10.0.0.3")
    num_sets = len(world.told.sets)
    if isinstance(world, DnsWorld):
        lookups = world.lookups
        await until(lambda: world.lookups > lookups + ATTEMPTS_IN_A_MINUTE)
    assert len(world.told.sets) == num_sets
    await world.come_back()
    await world.told.show("10.0.0.2", "10.0.0.3")


# --- DNS --------------------------------------------------------------------------------------------------------------


async def test_an_empty_answer_changes_nothing(tmp_path: Path) -> None:
    world = DnsWorld(tmp_path)
    world.has("10.0.0.1")
    async with followed(world):
        await world.told.show("10.0.0.1")
        world.has()
        lookups = world.lookups
        await until(lambda: world.lookups > lookups + 3)
        assert len(world.told.sets) == 1


async def test_a_name_that_cannot_be_is_a_clear_error() -> None:
    for host in ("a..b", "a" * 64):
        with pytest.raises(ConfigurationError, match="is no host name"):
            await DnsDiscovery(DnsTarget(host, PORT), 0.001).run(Told())


async def test_a_real_name_is_looked_up() -> None:
    told = Told()
    async with Supervisor("test") as supervisor:
        discovery = DnsDiscovery(DnsTarget("localhost", PORT), 60.0)
        supervisor.spawn("discovery", lambda: discovery.run(told))
        await until(lambda: bool(told.sets))
    assert told.present is not None
    assert set(told.present) & {"127.0.0.1", "[::1]"}


# --- Kubernetes: conditions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ready", "serving", "terminating", "shown"),
    [
        (True, True, False, "present"),
        (None, None, None, "present"),
        (False, False, False, "absent"),
        (False, True, False, "absent"),
        (False, True, True, "draining"),
        (False, False, True, "absent"),
        (False, None, True, "absent"),
        (True, None, True, "draining"),  # a service that publishes addresses which are not ready
        (True, True, True, "draining"),
    ],
)
async def test_conditions(
    tmp_path: Path, ready: bool | None, serving: bool | None, terminating: bool | None, shown: str
) -> None:
    async with kubernetes(tmp_path) as world:
        changed = endpoint("10.0.0.2", ready=ready, serving=serving, terminating=terminating)
        world.put(endpoint("10.0.0.1"), changed, endpoint("10.0.0.3"))
        present = ("10.0.0.2",) if shown == "present" else ()
        draining = ("10.0.0.2",) if shown == "draining" else ()
        await world.told.show("10.0.0.1", "10.0.0.3", *present, draining=draining)


async def test_a_pod_that_moves_to_another_slice_is_one_and_never_absent(tmp_path: Path) -> None:
    async with kubernetes(tmp_path) as world:
        world.put(endpoint("10.0.0.2"), endpoint("10.0.0.3"), name="verifier-b")
        await world.told.show("10.0.0.1", "10.0.0.2", "10.0.0.3")
        world.has("10.0.0.1")
        world.put(endpoint("10.0.0.2"), name="verifier-b")
        await world.told.show("10.0.0.1", "10.0.0.2")
        assert all(any(one.address.startswith("10.0.0.2:") for one in told) for told in world.told.sets)


async def test_slices_are_merged_and_one_may_be_deleted(tmp_path: Path) -> None:
    async with kubernetes(tmp_path) as world:
        world.put(endpoint("10.0.0.3"), name="verifier-b")
        await world.told.show("10.0.0.1", "10.0.0.2", "10.0.0.3")
        world.api.delete("verifier-a")
        await world.told.show("10.0.0.3")
        world.api.delete("verifier-b")
        await world.told.show()


async def test_a_relabelled_slice_drops_out_and_comes_back(tmp_path: Path) -> None:
    async with kubernetes(tmp_path) as world:
        world.api.relabel("verifier-a", "somebody-else")
        await world.told.show()
        world.api.relabel("verifier-a", "verifier")
        await world.told.show("10.0.0.1", "10.0.0.2")


# --- Kubernetes: what goes wrong --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [FakeKubernetesApi.cut_watches, FakeKubernetesApi.end_watches])
async def test_a_pod_that_went_while_there_was_no_watch_is_gone(
    tmp_path: Path, how: Callable[[FakeKubernetesApi], None]
) -> None:
    async with kubernetes(tmp_path) as world:
        how(world.api)
        world.has("10.0.0.2")
        await world.told.show("10.0.0.2")
        assert world.api.num_lists == 2
        await until(lambda: world.api.num_watches == 1)
        world.has("10.0.0.2", "10.0.0.3")
        await world.told.show("10.0.0.2", "10.0.0.3")


@pytest.mark.parametrize("how", ["in a running watch", "as an event", "as a status"])
async def test_gone_leads_to_a_new_list(tmp_path: Path, how: str) -> None:
    async with kubernetes(tmp_path, KubernetesTiming(watch_s=1.0, first_pause_s=0.001)) as world:
        api = world.api
        if how == "in a running watch":
            api.expire_watches()
        else:
            # The history is forgotten under a quiet watch: the next one begins from a version that is too old.
            api.gone_in_stream = how == "as an event"
            world.api.put(endpoint_slice("other", "drafter", []))
            api.compact()
        await until(lambda: api.num_lists == 2, 5.0)
        world.has("10.0.0.3")
        await world.told.show("10.0.0.3")


async def test_a_bookmark_keeps_a_quiet_watch_from_being_gone(tmp_path: Path) -> None:
    async with kubernetes(tmp_path, KubernetesTiming(watch_s=1.0)) as world:
        api = world.api
        api.put(endpoint_slice("other", "drafter", []))
        api.compact()
        api.bookmark()
        await until(lambda: len(api.watched_from) == 2, 5.0)
        assert int(api.watched_from[1]) == int(api.watched_from[0]) + 1
        world.has("10.0.0.3")
        await world.told.show("10.0.0.3")
        assert api.num_lists == 1


async def test_lists_are_repeated_while_nothing_breaks(tmp_path: Path) -> None:
    async with kubernetes(tmp_path, KubernetesTiming(resync_s=0.1)) as world:
        await until(lambda: world.api.num_lists == 2, 5.0)
        assert len(world.told.sets) == 1


async def test_an_older_list_is_not_asked_for(tmp_path: Path) -> None:
    async with kubernetes(tmp_path) as world:
        world.api.keep_cache()
        world.has("10.0.0.3")
        await world.told.show("10.0.0.3")
        world.api.expire_watches()
        await until(lambda: world.api.num_lists == 2 and world.api.num_watches == 1)
        assert world.told.present == {"10.0.0.3": False}
        assert len(world.told.sets) == 2


async def away(api: FakeKubernetesApi) -> Callable[[], None]:
    await api.go_away()
    return lambda: None


async def in_trouble(api: FakeKubernetesApi) -> Callable[[], None]:
    api.answer_with = 503
    api.cut_watches()

    def well() -> None:
        api.answer_with = None

    return well


async def forbidding(api: FakeKubernetesApi) -> Callable[[], None]:
    token, api.token = api.token, "another"
    api.cut_watches()

    def well() -> None:
        api.token = token

    return well


@pytest.mark.parametrize("trouble", [away, in_trouble, forbidding])
async def test_a_minute_without_the_api_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trouble: Callable[[FakeKubernetesApi], object]
) -> None:
    caplog.set_level(logging.DEBUG, "paceline_gateway.discovery")
    async with kubernetes(tmp_path) as world:
        well = await trouble(world.api)  # type: ignore[misc]
        world.has("10.0.0.3")
        await until(lambda: attempts(caplog) >= ATTEMPTS_IN_A_MINUTE)
        assert world.told.present == {"10.0.0.1": False, "10.0.0.2": False}
        # A long row of failures is one piece of news.
        assert sum(record.levelno >= logging.WARNING for record in caplog.records) == 1
        well()
        if trouble is away:
            await world.come_back()
        await world.told.show("10.0.0.3")
        assert any("answers again" in record.getMessage() for record in caplog.records)


async def test_an_api_that_is_away_at_the_start_is_waited_for(tmp_path: Path) -> None:
    async with FakeKubernetesApi.start() as api:
        world = KubernetesWorld(tmp_path, api)
        world.has("10.0.0.1")
        await api.go_away()
        async with followed(world):
            await asyncio.sleep(0)
            assert world.told.present is None
            await api.come_back()
            await world.told.show("10.0.0.1")


async def test_it_ends_although_a_task_group_inside_loses_the_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    failing, may_end = asyncio.Event(), asyncio.Event()
    tries: list[int] = []

    async def slow_to_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            failing.set()
            await may_end.wait()

    async def open_client(_: Path | None) -> ApiClient:
        tries.append(1)
        async with asyncio.TaskGroup() as group:
            group.create_task(slow_to_end())
            await asyncio.sleep(0)
            raise OSError("scripted")

    monkeypatch.setattr(kubernetes_discovery, "open_client", open_client)
    task = asyncio.create_task(KubernetesDiscovery(TARGET, timing=SOON).run(Told()))
    await failing.wait()
    task.cancel()
    await asyncio.sleep(0)
    may_end.set()
    await asyncio.wait({task}, timeout=5.0)
    assert task.cancelled()
    assert len(tries) == 1
