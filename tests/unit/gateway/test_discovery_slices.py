"""What slices say together."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes.aio.client import V1EndpointSlice
from paceline_gateway.discovery.endpoint import Endpoint
from paceline_gateway.discovery.endpoint_slices import SliceTable

from tests.fakes.kubernetes_api import Json, endpoint, endpoint_slice


def read(item: Json) -> V1EndpointSlice:
    found = V1EndpointSlice.from_dict(item)
    assert found is not None
    return found


def table(*slices: Json, port: str | int | None = None) -> SliceTable:
    made = SliceTable(port)
    made.replace([read(item) for item in slices])
    return made


def one(name: str, *endpoints: Json, **fields: Any) -> Json:
    return endpoint_slice(name, "verifier", endpoints, **fields)


def test_a_pod_with_two_families_is_one_endpoint_with_its_ipv4_address() -> None:
    v4 = one("a", endpoint("10.0.0.1", uid="pod"), endpoint("10.0.0.2", uid="only-v4"))
    v6 = one("b", endpoint("fd00::1", uid="pod"), endpoint("fd00::3", uid="only-v6"), address_type="IPv6")
    assert table(v6, v4).endpoints() == (
        Endpoint("10.0.0.1:50052"),
        Endpoint("10.0.0.2:50052"),
        Endpoint("[fd00::3]:50052"),
    )


@pytest.mark.parametrize("new_first", [True, False])
def test_a_copy_that_says_terminating_is_the_newer_one(new_first: bool) -> None:
    old = one("a", endpoint("10.0.0.1"))
    new = one("b", endpoint("10.0.0.1", ready=False, serving=True, terminating=True))
    slices = (new, old) if new_first else (old, new)
    assert table(*slices).endpoints() == (Endpoint("10.0.0.1:50052", draining=True),)
    ended = one("c", endpoint("10.0.0.1", ready=False, serving=False, terminating=True))
    assert table(old, ended).endpoints() == ()


def test_one_ready_copy_is_enough() -> None:
    slices = (one("a", endpoint("10.0.0.1", ready=False)), one("b", endpoint("10.0.0.1")))
    assert table(*slices).endpoints() == table(*reversed(slices)).endpoints() == (Endpoint("10.0.0.1:50052"),)


def test_an_address_that_was_given_to_a_new_pod_is_usable() -> None:
    old = endpoint("10.0.0.1", ready=False, serving=True, terminating=True, uid="old")
    new = endpoint("10.0.0.1", uid="new")
    for endpoints in ([old, new], [new, old]):
        assert table(one("a", *endpoints)).endpoints() == (Endpoint("10.0.0.1:50052"),)


@pytest.mark.parametrize(
    ("ports", "wanted", "port"),
    [
        ({"anything": 7000}, None, 7000),
        ({"metrics": 9400, "grpc": 7000}, None, 7000),
        ({"metrics": 9400, "grpc": 7000}, "metrics", 9400),
        ({"metrics": 9400, "grpc": 7000}, 7500, 7500),
        ({"metrics": 9400, "other": 7000}, None, None),
        ({"metrics": 9400}, "grpc", None),
    ],
)
def test_the_port(ports: dict[str, int], wanted: str | int | None, port: int | None) -> None:
    made = table(one("a", endpoint("10.0.0.1"), ports=ports), port=wanted)
    assert made.endpoints() == (() if port is None else (Endpoint(f"10.0.0.1:{port}"),))
    assert made.portless == (("a",) if port is None else ())


def test_a_named_port_may_have_another_number_in_each_slice() -> None:
    slices = (
        one("a", endpoint("10.0.0.1"), ports={"grpc": 1, "metrics": 9}),
        one("b", endpoint("10.0.0.2"), ports={"grpc": 2}),
    )
    assert table(*slices, port="grpc").endpoints() == (Endpoint("10.0.0.1:1"), Endpoint("10.0.0.2:2"))


def test_what_a_slice_may_lack() -> None:
    bare = one("a")
    bare["endpoints"] = None
    without_conditions = {"addresses": ["10.0.0.2"]}
    headless = one("b", without_conditions)
    headless["ports"] = None
    assert table(bare, headless, port=7).endpoints() == (Endpoint("10.0.0.2:7"),)
    assert table(bare, headless).portless == ("b",)
    udp = one("c", endpoint("10.0.0.3"))
    udp["ports"][0]["protocol"] = "UDP"
    assert table(udp).endpoints() == ()


def test_changes() -> None:
    made = table(one("a", endpoint("10.0.0.1")))
    made.put(read(one("b", endpoint("10.0.0.2"))))
    made.put(read(one("a", endpoint("10.0.0.3"))))
    assert made.endpoints() == (Endpoint("10.0.0.2:50052"), Endpoint("10.0.0.3:50052"))
    made.remove(read(one("b")))
    made.remove(read(one("never-heard-of")))
    assert made.endpoints() == (Endpoint("10.0.0.3:50052"),)
    nameless = one("x")
    del nameless["metadata"]["name"]
    with pytest.raises(ValueError, match="without a name"):
        made.put(read(nameless))
