"""The chart renders with the real Helm 3 and Helm 4, alike, and Kubernetes takes what it renders."""

from __future__ import annotations

import base64
import copy
import json
import tarfile
from pathlib import Path

import pytest
import yaml

from paceline import __version__
from scripts.kubernetes_tools import HELM_RELEASES, HelmRelease
from tests.chart.cases import CASES, Values
from tests.chart.helm import CHART, EXAMPLES, HELM_3, HELM_4, OLDEST_KUBERNETES, Manifest, Rendered, render, run_helm
from tests.chart.kubernetes_schemas import NEWEST, NOT_KUBERNETES, problems

each_helm = pytest.mark.parametrize("helm", HELM_RELEASES, ids=lambda helm: f"helm {helm.major}")
each_case = pytest.mark.parametrize("values", CASES.values(), ids=CASES)


@each_helm
def test_the_binaries_are_what_they_are_called(helm: HelmRelease) -> None:
    assert run_helm(helm, "version", "--short").output.startswith(f"v{helm.version}")


@each_helm
@pytest.mark.parametrize("values_file", [CHART / "values.yaml", *EXAMPLES], ids=lambda file: file.stem)
def test_lint_has_no_complaint(helm: HelmRelease, values_file: Path) -> None:
    done = run_helm(helm, "lint", "--strict", str(CHART), "--values", str(values_file))
    assert done.code == 0, done.output + done.errors
    assert "WARNING" not in done.output + done.errors


@each_case
def test_both_versions_of_helm_render_the_same(values: Values) -> None:
    assert _without_chance(render(values, HELM_3)) == _without_chance(render(values, HELM_4))


def _without_chance(rendered: Rendered) -> list[Manifest]:
    """The objects without the password that is drawn anew each time."""
    manifests = copy.deepcopy(rendered.manifests)
    for manifest in manifests:
        if manifest["kind"] == "Secret" and "password" in manifest.get("data", {}):
            manifest["data"]["password"] = ""
    return list(manifests)


@each_case
@pytest.mark.parametrize("version", [OLDEST_KUBERNETES, NEWEST])
def test_kubernetes_takes_every_object(values: Values, version: str) -> None:
    found = [problem for manifest in render(values).manifests for problem in problems(manifest, version)]
    assert found == []


@pytest.mark.parametrize(
    ("manifest", "complaint"),
    [
        ({"apiVersion": "apps/v1", "kind": "Deploiment", "metadata": {"name": "x"}}, "has no apps/v1 Deploiment"),
        ({"apiVersion": "extensions/v1beta1", "kind": "Ingress", "metadata": {"name": "x"}}, "has no extensions"),
        ({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"porst": []}}, "porst"),
        ({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}, "spec": {}}, "required"),
    ],
)
def test_a_mistake_is_found(manifest: Manifest, complaint: str) -> None:
    for version in (OLDEST_KUBERNETES, NEWEST):
        assert any(complaint in problem for problem in problems(manifest, version))


def test_the_pod_monitor_has_the_shape_that_the_operator_wants() -> None:
    assert {("monitoring.coreos.com/v1", "PodMonitor")} == NOT_KUBERNETES
    rendered = render(CASES["monitoring"])
    (monitor,) = rendered.all("PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    spec = monitor["spec"]
    assert set(spec) == {"namespaceSelector", "selector", "podTargetLabels", "podMetricsEndpoints"}
    assert spec["namespaceSelector"] == {"matchNames": ["serving"]}
    assert spec["podMetricsEndpoints"] == [{"port": "metrics", "path": "/metrics", "interval": "15s"}]
    (expression,) = spec["selector"]["matchExpressions"]
    for deployment in rendered.all("Deployment"):
        template = deployment["spec"]["template"]
        assert spec["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        assert template["metadata"]["labels"][expression["key"]] in expression["values"]
        assert "metrics" in [port["name"] for port in template["spec"]["containers"][0]["ports"]]


@each_helm
def test_package(helm: HelmRelease, tmp_path: Path) -> None:
    done = run_helm(helm, "package", str(CHART), "--destination", str(tmp_path))
    assert done.code == 0, done.errors
    (package,) = tmp_path.glob("paceline-*.tgz")
    with tarfile.open(package) as archive:
        names = {name.removeprefix("paceline/") for name in archive.getnames()}
    assert {"Chart.yaml", "values.yaml", "values.schema.json", "templates/NOTES.txt"} <= names
    assert {f"files/{file.name}" for file in CHART.glob("files/*.py")} <= names
    assert run_helm(helm, "template", "fleet", str(package), "--kube-version", OLDEST_KUBERNETES).code == 0


def test_versions() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__
    assert "dependencies" not in chart


@each_helm
def test_older_kubernetes_is_refused(helm: HelmRelease) -> None:
    done = run_helm(helm, "template", "fleet", str(CHART), "--kube-version", "1.28")
    assert done.code != 0
    assert "incompatible with Kubernetes" in done.errors


@pytest.mark.parametrize("case", ["names", "caches", "autoscaling", "mutual tls", "monitoring"])
def test_names_fit_and_are_unique(case: str) -> None:
    # 53 characters is the longest name of a release that Helm takes, 20 that of a pool.
    values = {"verifiers": [{"name": "v" * 20, "replicas": 2}], **CASES[case]}
    rendered = render(values, release="r" * 53)
    seen = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in rendered.manifests]
    assert len(set(seen)) == len(seen)
    assert [name for kind, name in seen if len(name) > 63] == []
    assert {manifest["metadata"]["namespace"] for manifest in rendered.manifests} == {"serving"}


def test_two_long_names_with_one_beginning_stay_apart() -> None:
    names = [
        {manifest["metadata"]["name"] for manifest in render(release="r" * 40 + end).manifests} for end in ("-a", "-b")
    ]
    assert names[0].isdisjoint(names[1])


def test_a_release_named_like_the_chart_says_it_once() -> None:
    assert render(release="paceline").one("Deployment", "paceline-gateway")
    assert render(release="fleet").one("Deployment", "fleet-paceline-gateway")


@each_case
def test_labels_and_selectors_belong_together(values: Values) -> None:
    rendered = render(values)
    common = values.get("commonLabels", {})
    for manifest in rendered.manifests:
        labels = manifest["metadata"]["labels"]
        assert {"helm.sh/chart", "app.kubernetes.io/managed-by", "app.kubernetes.io/version"} <= set(labels)
        assert common.items() <= labels.items()
    templates = [workload["spec"]["template"]["metadata"]["labels"] for workload in rendered.workloads()]
    for workload in rendered.workloads():
        selector = workload["spec"]["selector"]["matchLabels"]
        # A selector never changes, so nothing in it may: no version, no chart, no label of the user's.
        assert set(selector) <= {f"app.kubernetes.io/{key}" for key in ("name", "instance", "component")} | {
            "paceline/pool"
        }
        assert sum(selector.items() <= labels.items() for labels in templates) == 1
    for budget in rendered.all("PodDisruptionBudget"):
        selector = budget["spec"]["selector"]["matchLabels"]
        assert sum(selector.items() <= labels.items() for labels in templates) == 1


@each_case
def test_server_side_apply_meets_no_key_twice(values: Values) -> None:
    for name, container in render(values).containers():
        for field, key in (("env", "name"), ("volumeMounts", "mountPath"), ("ports", "containerPort")):
            keys = [entry[key] for entry in container.get(field, [])]
            assert len(set(keys)) == len(keys), (name, field)
        assert all(port["protocol"] == "TCP" for port in container.get("ports", []))
    for service in render(values).all("Service"):
        assert all(port["protocol"] == "TCP" for port in service["spec"]["ports"])


def test_images() -> None:
    rendered = render(CASES["names"])
    assert {container["image"] for name, container in rendered.containers() if "valkey" not in name} == {
        f"registry.example.com/ml/paceline-{service}:1.2.3" for service in ("gateway", "verifier", "drafter")
    }
    pools = render(CASES["several pools"])
    (big,) = pools.one("Deployment", "fleet-paceline-verifier-big")["spec"]["template"]["spec"]["containers"]
    assert big["image"] == "example.com/own-verifier@sha256:" + "0f" * 32
    (mig,) = pools.one("Deployment", "fleet-paceline-verifier-mig")["spec"]["template"]["spec"]["containers"]
    assert mig["image"] == f"paceline-verifier:{__version__}"


def test_a_password_is_drawn_when_none_is_given() -> None:
    drawn = {render(helm=helm).one("Secret", "fleet-paceline-valkey")["data"]["password"] for helm in (HELM_3, HELM_4)}
    assert len(drawn) == 2
    assert all(len(base64.b64decode(password)) == 32 for password in drawn)
    given = render(CASES["given password"]).one("Secret", "fleet-paceline-valkey")["data"]["password"]
    assert base64.b64decode(given).decode() == "correct-horse_battery.staple~7"
    assert not render(CASES["persistent valkey"]).all("Secret")


def test_pods_restart_when_the_given_password_changes() -> None:
    def marks(password: str) -> dict[str, str]:
        rendered = render({"redis": {"embedded": {"auth": {"password": password}}}})
        annotated = {
            workload["metadata"]["name"]: workload["spec"]["template"]["metadata"].get("annotations", {})
            for workload in rendered.workloads()
        }
        return {name: found["checksum/redis-password"] for name, found in annotated.items() if found}

    first, same, second = marks("one"), marks("one"), marks("two")
    assert set(first) == {"fleet-paceline-gateway", "fleet-paceline-valkey"}
    assert first == same
    assert all(first[name] != second[name] for name in first)


@pytest.mark.parametrize(
    ("case", "said", "unsaid"),
    [
        ("default", ["no API keys are set", "Valkey keeps sessions in memory"], ["adapter", "plainly", "Bearer"]),
        ("api keys", ["Bearer $KEY"], ["no API keys"]),
        ("autoscaling", ["gateway, verifiers[target], drafters[ngram]: autoscaling needs an adapter"], []),
        ("no drafters", ["everything is decoded plainly"], []),
        ("redis in memory", ["sessions end with the gateway's pod"], []),
        ("replicas elsewhere", ["gpu1:50052", "everything is decoded plainly"], []),
    ],
)
def test_notes_say_what_to_know(case: str, said: list[str], unsaid: list[str]) -> None:
    values = json.dumps(CASES[case])
    # Helm 3 renders notes only with a cluster at hand.
    done = run_helm(HELM_4, "install", "fleet", str(CHART), "--dry-run=client", "--values", "-", given=values)
    assert done.code == 0, done.errors
    notes = done.output.split("\nNOTES:\n", 1)[1]
    assert "service/fleet-paceline-gateway 8000 7400" in notes
    assert [text for text in said if text not in notes] == []
    assert [text for text in unsaid if text in notes] == []


def test_notes_warn_of_a_budget_that_blocks_every_drain() -> None:
    pool = {"name": "target", "pdb": {"enabled": True, "maxUnavailable": None, "minAvailable": 1}}
    values = json.dumps({"verifiers": [pool]})
    done = run_helm(HELM_4, "install", "fleet", str(CHART), "--dry-run=client", "--values", "-", given=values)
    assert "verifiers[target]: pdb.minAvailable equals replicas" in done.output


@pytest.mark.parametrize(("tag", "warned"), [(None, True), ("0.1.0-cuda", False)])
def test_notes_ask_whether_the_image_of_a_device_has_its_torch(tag: str | None, warned: bool) -> None:
    pool = {"name": "target", "resources": {"limits": {"nvidia.com/gpu": 1}}}
    values = json.dumps({"verifiers": [pool], "images": {"verifier": {"tag": tag}} if tag else {}})
    done = run_helm(HELM_4, "install", "fleet", str(CHART), "--dry-run=client", "--values", "-", given=values)
    assert done.code == 0, done.errors
    assert ("verifiers[target] asks for a device" in done.output) is warned
