"""Least rights: for pods in their node, for accounts in the cluster, for everybody in the network."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.chart.cases import CASES, Values
from tests.chart.helm import Manifest, Rendered, environment, render

each_case = pytest.mark.parametrize("values", CASES.values(), ids=CASES)


@each_case
def test_pods_have_no_rights_on_their_node(values: Values) -> None:
    rendered = render(values)
    for name, pod in rendered.pods():
        assert pod["securityContext"]["runAsNonRoot"] is True
        if "podSecurityContext" not in values:
            assert {key: pod["securityContext"][key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {
                "runAsUser": 65532,
                "runAsGroup": 65532,
                "fsGroup": 65532,
            }
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & set(pod), name
        assert not [volume for volume in pod.get("volumes", []) if "hostPath" in volume]
        assert pod["enableServiceLinks"] is False
    for _, container in rendered.containers():
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@each_case
def test_what_services_write_to_is_a_bounded_volume(values: Values) -> None:
    for deployment in render(values).all("Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
            writable = {path for path, mount in mounts.items() if not mount.get("readOnly")}
            assert {"/tmp", "/cache"} <= writable
            found = environment(container)
            assert (found["HOME"], found["XDG_CACHE_HOME"], found["HF_HOME"]) == (
                "/tmp",
                "/cache",
                "/cache/huggingface",
            )
            for path in ("/tmp", "/cache"):
                volume = volumes[mounts[path]["name"]]
                assert "persistentVolumeClaim" in volume or volume["emptyDir"]["sizeLimit"]


@each_case
def test_every_container_says_what_it_needs(values: Values) -> None:
    for name, container in render(values).containers():
        resources = container["resources"]
        if name.endswith("verifier-mig/verifier"):
            # This case replaces what the chart would say.
            continue
        assert {"cpu", "memory"} <= set(resources["requests"]), name
        assert "memory" in resources["limits"], name


@each_case
def test_images_are_pinned(values: Values) -> None:
    for name, container in render(values).containers():
        reference = container["image"].rsplit("/", 1)[-1]
        assert "@sha256:" in reference or reference.partition(":")[2] not in {"", "latest"}, name


@each_case
def test_only_the_gateway_speaks_to_the_api_and_only_for_discovery(values: Values) -> None:
    rendered = render(values)
    with_token = {name for name, pod in rendered.pods() if pod["automountServiceAccountToken"]}
    gateway = {manifest["metadata"]["name"] for manifest in rendered.all("Deployment")} & with_token
    assert with_token == gateway
    assert all(name.endswith("-gateway") for name in with_token)
    assert bool(with_token) == (values.get("discovery", {}).get("mode", "kubernetes") == "kubernetes")
    assert not rendered.all("ClusterRole")
    assert not rendered.all("ClusterRoleBinding")
    for role in rendered.all("Role"):
        assert role["rules"] == [
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
        ]
    accounts = {account["metadata"]["name"] for account in rendered.all("ServiceAccount")}
    for binding in rendered.all("RoleBinding"):
        (subject,) = binding["subjects"]
        assert subject["name"] in accounts
        assert (
            subject["name"]
            == rendered.one("Deployment", next(iter(gateway)))["spec"]["template"]["spec"]["serviceAccountName"]
        )
    assert all(account["automountServiceAccountToken"] is False for account in rendered.all("ServiceAccount"))


def test_an_account_that_exists_gets_no_role() -> None:
    rendered = render(CASES["accounts"])
    assert not rendered.all("Role")
    pod = rendered.one("Deployment", "fleet-paceline-gateway")["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "own"
    (account,) = rendered.all("ServiceAccount")
    assert account["metadata"]["annotations"] == {"example.com/role": "models"}


def test_secrets_stand_in_secrets_only() -> None:
    password, key = "correct-horse_battery.staple~7", "k" * 32
    rendered = render({"redis": {"embedded": {"auth": {"password": password}}}, "apiKeys": {"values": {"team": key}}})
    held = [manifest for manifest in rendered.manifests if _holds(manifest, password) or _holds(manifest, key)]
    assert {(manifest["kind"], manifest["metadata"]["name"]) for manifest in held} == {
        ("Secret", "fleet-paceline-valkey"),
        ("Secret", "fleet-paceline-api-keys"),
    }
    assert rendered.one("Secret", "fleet-paceline-api-keys")["stringData"] == {"api-keys": f"team: {key}\n"}


def _holds(manifest: Manifest, text: str) -> bool:
    written = str(manifest)
    return text in written or base64.b64encode(text.encode()).decode() in written


def test_tokens_of_the_hub_come_from_a_secret() -> None:
    rendered = render(CASES["hub"])
    for name, container in rendered.containers():
        if "valkey" in name or "test" in name:
            continue
        found = environment(container)
        assert found["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
        assert (found["HF_ENDPOINT"], found["HF_HUB_OFFLINE"]) == ("https://hub.example.com", "1")


def policies(rendered: Rendered) -> dict[str, Any]:
    return {policy["metadata"]["name"]: policy["spec"] for policy in rendered.all("NetworkPolicy")}


def component(name: str) -> dict[str, Any]:
    labels = {
        "app.kubernetes.io/name": "paceline",
        "app.kubernetes.io/instance": "fleet",
        "app.kubernetes.io/component": name,
    }
    return {"podSelector": {"matchLabels": labels}}


@pytest.mark.parametrize(("lane", "port"), [("verifier", 50052), ("drafter", 50053)])
def test_only_gateways_of_the_release_reach_replicas(lane: str, port: int) -> None:
    policy = policies(render())[f"fleet-paceline-{lane}s"]
    assert policy["podSelector"] == component(lane)["podSelector"]
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [
        {"from": [component("gateway")], "ports": [{"port": port, "protocol": "TCP"}]},
        {"from": [{"namespaceSelector": {}}], "ports": [{"port": 9400, "protocol": "TCP"}]},
    ]


def test_only_gateways_of_the_release_reach_valkey() -> None:
    policy = policies(render())["fleet-paceline-valkey"]
    assert policy["podSelector"] == component("valkey")["podSelector"]
    assert policy["ingress"] == [{"from": [component("gateway")], "ports": [{"port": 6379, "protocol": "TCP"}]}]


def test_metrics_from_named_namespaces() -> None:
    policy = policies(render(CASES["egress"]))["fleet-paceline-verifiers"]
    assert policy["ingress"][1]["from"] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}
        for name in ("monitoring", "observability")
    ]


def test_egress() -> None:
    names = [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]
    hub = {"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}], "ports": [{"port": 443, "protocol": "TCP"}]}
    api = {**hub, "ports": [{"port": 443, "protocol": "TCP"}, {"port": 6443, "protocol": "TCP"}]}
    found = policies(render(CASES["egress"]))
    gateway = found["fleet-paceline-gateway"]
    assert gateway["policyTypes"] == ["Egress"]
    assert gateway["egress"] == [
        {"ports": names},
        hub,
        {"to": [component("verifier")], "ports": [{"port": 50052, "protocol": "TCP"}]},
        {"to": [component("drafter")], "ports": [{"port": 50053, "protocol": "TCP"}]},
        {"to": [component("valkey")], "ports": [{"port": 6379, "protocol": "TCP"}]},
        api,
        {"to": [{"ipBlock": {"cidr": "10.1.0.0/16"}}]},
    ]
    for lane in ("verifier", "drafter"):
        policy = found[f"fleet-paceline-{lane}s"]
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        assert policy["egress"] == [{"ports": names}, hub, {"ports": [{"port": 3128, "protocol": "TCP"}]}]
    assert found["fleet-paceline-valkey"]["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in found["fleet-paceline-valkey"]


def test_no_way_out_that_is_not_needed() -> None:
    gateway = policies(render(CASES["egress without hub"]))["fleet-paceline-gateway"]["egress"]
    assert not [rule for rule in gateway if "ipBlock" in str(rule)]


def test_policies_can_be_left_out() -> None:
    assert not policies(render(CASES["no network policy"]))
