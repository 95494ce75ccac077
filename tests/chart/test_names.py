"""Names that YAML would take for a number, a truth or nothing, and names that Kubernetes takes for no object at all."""

from __future__ import annotations

import pytest

from tests.chart.cases import Values
from tests.chart.helm import OLDEST_KUBERNETES, environment, render, template
from tests.chart.kubernetes_schemas import problems

ODD = ["123", "007", "0x1f", "1e3", "1.10", "true", "on", "null"]


def _everything(name: str) -> list[Values]:
    """Values that together have this name wherever a user may choose one."""
    placed = {"priorityClassName": name, "runtimeClassName": name}
    cache = {"type": "pvc", "storageClassName": name}
    own = {"serviceAccount": {"create": False, "name": name}, "ingress": {"enabled": True, "className": name}}
    hub = {"token": {"existingSecret": name, "key": name}}
    volume = {"existingClaim": name, "subPath": name}
    tls = {"enabled": True, "serverSecret": name, "mutual": True, "clientSecret": name, "serverName": name}
    return [
        {
            "commonLabels": {"team": name},
            "imagePullSecrets": [{"name": name}],
            "model": {"source": name, "name": name, "volume": volume},
            "hub": hub,
            "verifierDefaults": {**placed, "modelCache": cache},
            "drafterDefaults": {**placed, "modelCache": {"type": "pvc", "existingClaim": name}},
            "gateway": {**placed, **own, "env": [{"name": "SOME", "value": name}]},
            "apiKeys": {"existingSecret": name, "key": name},
            "redis": {"mode": "external", "external": {"existingSecret": name, "key": name}},
            "tls": tls,
        },
        {
            "images": {"tag": name},
            "redis": {
                "embedded": {
                    "auth": {"existingSecret": name, "key": name},
                    "persistence": {"enabled": True, "storageClassName": name},
                    "priorityClassName": name,
                }
            },
            "networkPolicy": {"metricsNamespaces": [name]},
            "podMonitor": {"enabled": True, "labels": {"team": name}},
        },
        {"apiKeys": {"key": name, "values": {name: "0" * 16}}},
    ]


@pytest.mark.parametrize("name", ODD)
def test_a_name_that_looks_like_another_value_stays_a_text(name: str) -> None:
    for values in _everything(name):
        rendered = render(values)
        assert [found for manifest in rendered.manifests for found in problems(manifest, OLDEST_KUBERNETES)] == []
    (gateway,) = render(_everything(name)[0]).one("Deployment", "fleet-paceline-gateway")["spec"]["template"]["spec"][
        "containers"
    ]
    told = environment(gateway)
    assert told["PACELINE_GATEWAY_LINK_TLS_SERVER_NAME"] == told["PACELINE_GATEWAY_MODEL"] == name


@pytest.mark.parametrize("name", ["on", "true", "null", "off"])
def test_pools_namespaces_and_releases_may_have_such_names(name: str) -> None:
    values: Values = {"verifiers": [{"name": name}], "nameOverride": name, "podMonitor": {"enabled": True}}
    rendered = render(values, release=name, namespace=name)
    assert [found for manifest in rendered.manifests for found in problems(manifest, OLDEST_KUBERNETES)] == []
    for manifest in rendered.manifests:
        assert manifest["metadata"]["namespace"] == manifest["metadata"]["labels"]["app.kubernetes.io/instance"] == name


def test_a_namespace_of_digits() -> None:
    rendered = render(release="fleet", namespace="007")
    assert {manifest["metadata"]["namespace"] for manifest in rendered.manifests} == {"007"}


@pytest.mark.parametrize("release", ["123", "7b", "v1.2"])
def test_a_release_after_which_no_service_can_be_named_is_told_what_to_do(release: str) -> None:
    refused = template({}, release=release)
    assert refused.code != 0
    assert f"{release}-paceline" in refused.errors
    assert "set fullnameOverride" in refused.errors
    rendered = render({"fullnameOverride": "web", "podMonitor": {"enabled": True}}, release=release)
    assert rendered.one("Service", "web-gateway")["spec"]["selector"]["app.kubernetes.io/instance"] == release
    assert [found for manifest in rendered.manifests for found in problems(manifest, OLDEST_KUBERNETES)] == []


@pytest.mark.parametrize(
    "values",
    [
        {"fullnameOverride": "A"},
        {"fullnameOverride": "1a"},
        {"fullnameOverride": "a.b"},
        {"nameOverride": "a b"},
        {"apiKeys": {"key": "../keys"}},
        {"images": {"tag": "a:b"}},
        {"images": {"registry": "https://registry.example.com"}},
        {"images": {"gateway": {"repository": "paceline-gateway:1.0"}}},
        {"redis": {"embedded": {"image": {"tag": "8 "}}}},
        {"redis": {"external": {"key": "a: b"}}},
    ],
)
def test_names_that_cannot_be_are_refused(values: Values) -> None:
    refused = template(values)
    assert refused.code != 0
    assert "pattern" in refused.errors
