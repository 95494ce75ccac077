"""What goes wrong in fleets and a rendered chart can prevent: draining, rollouts, probes, scaling, discovery."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.chart.cases import CASES, Values
from tests.chart.helm import Manifest, Rendered, environment, render

each_case = pytest.mark.parametrize("values", CASES.values(), ids=CASES)

PORTS = {"gateway": 7400, "verifier": 50052, "drafter": 50053}
_STOP_S = 3
"""What a service takes after draining to end what is left."""


def services(rendered: Rendered) -> list[tuple[str, Manifest, Manifest]]:
    """Component, Deployment and container of each of our own services."""
    found = []
    for deployment in rendered.all("Deployment"):
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        found.append((container["name"], deployment, container))
    assert found
    return found


def container_of(rendered: Rendered, deployment: str) -> Manifest:
    (container,) = rendered.one("Deployment", deployment)["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def pre_stop_s(container: Manifest) -> float:
    """How long the hook before SIGTERM sleeps."""
    if "lifecycle" not in container:
        return 0
    *python, script = container["lifecycle"]["preStop"]["exec"]["command"]
    slept = re.fullmatch(r"import time; time\.sleep\((\d+)\)", script)
    assert python == ["python", "-c"]
    assert slept is not None
    return float(slept[1])


@each_case
def test_a_rolling_update_breaks_no_stream_that_ends_in_time(values: Values) -> None:
    for component, deployment, container in services(render(values)):
        drain_s = float(environment(container)[f"PACELINE_{component.upper()}_DRAIN_TIMEOUT_S"])
        grace_s = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert drain_s >= 60
        assert pre_stop_s(container) + drain_s + _STOP_S < grace_s


def test_draining_is_computed_from_one_value() -> None:
    rendered = render({"drain": {"timeoutSeconds": 300}})
    for component, deployment, container in services(rendered):
        assert environment(container)[f"PACELINE_{component.upper()}_DRAIN_TIMEOUT_S"] == "300"
        assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 320


@each_case
def test_the_rollout_ends_where_two_pods_cannot_run_at_once(values: Values) -> None:
    for component, deployment, container in services(render(values)):
        strategy = deployment["spec"]["strategy"]
        surge = strategy.get("rollingUpdate", {}).get("maxSurge", 0)
        pod = deployment["spec"]["template"]["spec"]
        has_device = any("/" in name for name in container["resources"].get("limits", {}))
        if has_device or (component != "gateway" and _has_exclusive_cache(pod, render(values))):
            assert surge == 0
            assert strategy["type"] == "Recreate" or strategy["rollingUpdate"]["maxUnavailable"] == 1
        else:
            assert strategy["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def _has_exclusive_cache(pod: Manifest, rendered: Rendered) -> bool:
    (cache,) = [volume for volume in pod["volumes"] if volume["name"] == "cache"]
    claim = cache.get("persistentVolumeClaim", {}).get("claimName", "")
    if not claim:
        return False
    own = [found for found in rendered.all("PersistentVolumeClaim") if found["metadata"]["name"] == claim]
    return not own or own[0]["spec"]["accessModes"] != ["ReadWriteMany"]


@each_case
def test_loading_a_model_is_no_failure_of_the_rollout(values: Values) -> None:
    for _component, deployment, container in services(render(values)):
        spec = deployment["spec"]
        startup = container["startupProbe"]
        slowest_s = (
            startup["periodSeconds"] * startup["failureThreshold"]
            + spec["template"]["spec"]["terminationGracePeriodSeconds"]
            + spec["minReadySeconds"]
        )
        assert spec["progressDeadlineSeconds"] > slowest_s


@pytest.mark.parametrize("case", [case for case in CASES if "tls" not in case])
def test_probes_ask_the_service_itself(case: str) -> None:
    for component, _deployment, container in services(render(CASES[case])):
        # Not ready until the service has generated a token; dead when a pass hangs although the process runs.
        assert container["startupProbe"]["grpc"] == {"port": PORTS[component], "service": ""}
        assert container["readinessProbe"]["grpc"] == {"port": PORTS[component], "service": ""}
        assert container["livenessProbe"]["grpc"] == {"port": PORTS[component], "service": "liveness"}


@pytest.mark.parametrize("case", ["tls", "mutual tls"])
def test_probes_speak_tls_where_the_replicas_do(case: str) -> None:
    rendered = render(CASES[case])
    name = CASES[case]["tls"].get("serverName", "paceline-replica")
    for component, deployment, container in services(rendered):
        if component == "gateway":
            assert environment(container)["PACELINE_GATEWAY_LINK_TLS_SERVER_NAME"] == name
            continue
        for probe, service in (("startupProbe", ""), ("readinessProbe", ""), ("livenessProbe", "liveness")):
            script, *arguments = container[probe]["exec"]["command"][1:]
            assert arguments == [str(PORTS[component]), service, "/etc/paceline/tls", name]
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert script == f"{mounts['probe']}/tls_probe.py"
        volumes = {volume["name"]: volume for volume in deployment["spec"]["template"]["spec"]["volumes"]}
        config = rendered.one("ConfigMap", volumes["probe"]["configMap"]["name"])
        assert "tls_probe.py" in config["data"]


@pytest.mark.parametrize(("seconds", "failures"), [(5, 1), (6, 2), (1800, 360)])
def test_time_for_loading(seconds: int, failures: int) -> None:
    rendered = render({"verifiers": [{"name": "target", "startupSeconds": seconds}]})
    startup = container_of(rendered, "fleet-paceline-verifier-target")["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= seconds
    assert startup["failureThreshold"] == failures


@each_case
def test_autoscaling_and_replicas_exclude_each_other(values: Values) -> None:
    rendered = render(values)
    scalers = {scaler["spec"]["scaleTargetRef"]["name"]: scaler["spec"] for scaler in rendered.all(_HPA)}
    assert bool(scalers) == ("autoscaling" in str(values))
    for deployment in rendered.all("Deployment"):
        assert ("replicas" in deployment["spec"]) == (deployment["metadata"]["name"] not in scalers)


_HPA = "HorizontalPodAutoscaler"


def test_autoscalers_look_at_our_own_metrics_and_hesitate_to_shrink() -> None:
    rendered = render(CASES["autoscaling"])
    wanted = {
        "fleet-paceline-verifier-target": {
            "paceline_queue_time_recent_seconds": "200m",
            "paceline_utilization": "800m",
        },
        # One target of two is switched off here.
        "fleet-paceline-drafter-ngram": {"paceline_queue_time_recent_seconds": "100m"},
        "fleet-paceline-gateway": {"paceline_num_requests_running": "128000m"},
    }
    assert {scaler["metadata"]["name"] for scaler in rendered.all(_HPA)} == set(wanted)
    for name, targets in wanted.items():
        spec = rendered.one(_HPA, name)["spec"]
        assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}
        assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 6)
        assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 300
        assert all(metric["type"] == "Pods" for metric in spec["metrics"])
        found = {metric["pods"]["metric"]["name"]: metric["pods"]["target"] for metric in spec["metrics"]}
        assert found == {metric: {"type": "AverageValue", "averageValue": value} for metric, value in targets.items()}


@pytest.mark.parametrize(
    ("pool", "budget"),
    [
        ({"replicas": 1}, None),
        ({"replicas": 1, "pdb": {"enabled": True}}, {"maxUnavailable": 1}),
        ({"replicas": 2}, {"maxUnavailable": 1}),
        ({"replicas": 2, "pdb": {"enabled": False}}, None),
        ({"replicas": 4, "pdb": {"maxUnavailable": None, "minAvailable": "50%"}}, {"minAvailable": "50%"}),
        ({"replicas": 4, "pdb": {"maxUnavailable": None, "minAvailable": 0}}, {"minAvailable": 0}),
        ({"replicas": 1, "autoscaling": {"enabled": True}}, {"maxUnavailable": 1}),
    ],
)
def test_a_budget_never_blocks_a_drain_unless_asked_to(pool: Values, budget: Values | None) -> None:
    name = "fleet-paceline-verifier-target"
    rendered = render({"verifiers": [{"name": "target", **pool}]})
    budgets = [found for found in rendered.all("PodDisruptionBudget") if found["metadata"]["name"] == name]
    if budget is None:
        assert budgets == []
        return
    spec = dict(budgets[0]["spec"])
    spec.pop("selector")
    # A replica that cannot become ready must not hold a node either.
    assert spec == {**budget, "unhealthyPodEvictionPolicy": "AlwaysAllow"}


@pytest.mark.parametrize("lane", ["verifier", "drafter"])
def test_gateways_see_all_ready_replicas_of_a_lane_and_no_other(lane: str) -> None:
    rendered = render(CASES["several pools"])
    service = rendered.one("Service", f"fleet-paceline-{lane}s")["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is False
    ports = {port["name"]: port["port"] for port in service["ports"]}
    assert ports == {"grpc": PORTS[lane], "metrics": 9400}
    for component, deployment, container in services(rendered):
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert (service["selector"].items() <= labels.items()) == (component == lane)
        if component == lane:
            assert {port["name"]: port["containerPort"] for port in container["ports"]} == ports


@pytest.mark.parametrize(
    ("case", "verifiers", "drafters", "has_role"),
    [
        ("default", "k8s://serving/fleet-paceline-verifiers:grpc", "k8s://serving/fleet-paceline-drafters:grpc", True),
        ("no drafters", "k8s://serving/fleet-paceline-verifiers:grpc", None, True),
        (
            "discovery by dns",
            "dns:///fleet-paceline-verifiers.serving.svc:50052",
            "dns:///fleet-paceline-drafters.serving.svc:50053",
            False,
        ),
        ("replicas elsewhere", "gpu1:50052,[fd00::1]:50052", None, False),
    ],
)
def test_discovery(case: str, verifiers: str, drafters: str | None, has_role: bool) -> None:
    rendered = render(CASES[case])
    found = environment(container_of(rendered, "fleet-paceline-gateway"))
    assert found["PACELINE_GATEWAY_VERIFIERS"] == verifiers
    assert found.get("PACELINE_GATEWAY_DRAFTERS") == drafters
    assert bool(rendered.all("Role")) == bool(rendered.all("RoleBinding")) == has_role
    pod = rendered.one("Deployment", "fleet-paceline-gateway")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is has_role


def test_replicas_of_one_lane_only_when_there_are_some() -> None:
    names = {service["metadata"]["name"] for service in render(CASES["no drafters"]).all("Service")}
    assert names == {"fleet-paceline-gateway", "fleet-paceline-verifiers", "fleet-paceline-valkey"}
    elsewhere = render(CASES["replicas elsewhere"])
    assert [found["metadata"]["name"] for found in elsewhere.all("Deployment")] == ["fleet-paceline-gateway"]


@pytest.mark.parametrize(
    ("case", "url"),
    [
        ("default", "redis://:$(REDIS_PASSWORD)@fleet-paceline-valkey:6379/0"),
        ("redis in memory", "memory://"),
        ("external redis", {"secretKeyRef": {"name": "store", "key": "url"}}),
    ],
)
def test_store_of_sessions(case: str, url: Any) -> None:
    rendered = render(CASES[case])
    container = container_of(rendered, "fleet-paceline-gateway")
    assert environment(container)["PACELINE_GATEWAY_REDIS_URL"] == url
    names = list(environment(container))
    if "$(REDIS_PASSWORD)" in str(url):
        # A variable is only replaced by one that stands before it.
        assert names.index("REDIS_PASSWORD") < names.index("PACELINE_GATEWAY_REDIS_URL")
    assert bool(rendered.all("StatefulSet")) == (case == "default")


def test_records_and_models_outlive_the_release() -> None:
    valkey = render(CASES["persistent valkey"]).one("StatefulSet", "fleet-paceline-valkey")["spec"]
    assert valkey["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Retain", "whenScaled": "Retain"}
    (claim,) = valkey["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "2Gi"
    rendered = render(CASES["caches"])
    claims = {claim["metadata"]["name"]: claim for claim in rendered.all("PersistentVolumeClaim")}
    assert set(claims) == {"fleet-paceline-verifier-own-cache", "fleet-paceline-verifier-shared-cache"}
    assert all(found["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for found in claims.values())


@pytest.mark.parametrize(
    ("case", "converts"),
    [
        ("default", True),
        ("model in a volume", True),
        ("two-gpus", False),
        ("converted on demand", True),
        ("tokenizer at hand", False),
    ],
)
def test_a_model_without_tokenizer_files_is_converted_for_the_gateway(case: str, converts: bool) -> None:
    pod = render(CASES[case]).one("Deployment", "fleet-paceline-gateway")["spec"]["template"]["spec"]
    assert bool(pod.get("initContainers")) == converts
    if converts:
        (init,), (gateway,) = pod["initContainers"], pod["containers"]
        assert "paceline-verifier" in init["image"]
        assert init["args"][1] == environment(gateway)["PACELINE_GATEWAY_MODEL"]
        assert init["volumeMounts"] == gateway["volumeMounts"]


def test_the_ingress_leads_to_http() -> None:
    rendered = render(CASES["ingress"])
    (ingress,) = rendered.all("Ingress")
    assert ingress["spec"]["ingressClassName"] == "nginx"
    paths = {rule["host"]: rule["http"]["paths"][0] for rule in ingress["spec"]["rules"]}
    assert {host: (path["path"], path["pathType"]) for host, path in paths.items()} == {
        "a.example.com": ("/", "Prefix"),
        "b.example.com": ("/llm", "Exact"),
    }
    for path in paths.values():
        backend = path["backend"]["service"]
        service = rendered.one("Service", backend["name"])
        assert {port["name"]: port["port"] for port in service["spec"]["ports"]}[backend["port"]["name"]] == 8000
    assert not render().all("Ingress")
