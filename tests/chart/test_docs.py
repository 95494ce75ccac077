"""The Helm commands of docs/kubernetes.md are run, as far as they can be without a cluster."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from scripts.kubernetes_tools import HELM_RELEASES, HelmRelease
from tests.chart.cases import CASES
from tests.chart.helm import EXAMPLES, OLDEST_KUBERNETES, ROOT, parse, render, run_helm

DOCUMENT = (ROOT / "docs" / "kubernetes.md").read_text("utf-8")
_BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMANDS = [shlex.split(line) for block in _BLOCK.findall(DOCUMENT) for line in block.splitlines()]
INSTALLS = [command for command in COMMANDS if command[0] == "helm" and "k8s/chart" in command]


def test_the_document_has_the_commands_that_these_tests_look_for() -> None:
    assert len(INSTALLS) == 3
    assert {command[0] for command in COMMANDS} == {"make", "helm", "kubectl", "curl"}


@pytest.mark.parametrize("helm", HELM_RELEASES, ids=lambda helm: f"helm {helm.major}")
@pytest.mark.parametrize("command", INSTALLS, ids=" ".join)
def test_install_commands_render(helm: HelmRelease, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    arguments = [word for word in command[1:] if word not in {"install", "upgrade", "--install", "--create-namespace"}]
    done = run_helm(helm, "template", *arguments, "--kube-version", OLDEST_KUBERNETES)
    assert done.code == 0, done.errors
    manifests = parse(done.output)
    assert {manifest["metadata"]["namespace"] for manifest in manifests} == {"paceline"}
    services = {manifest["metadata"]["name"]: manifest for manifest in manifests if manifest["kind"] == "Service"}
    ports = [str(port["port"]) for port in services["paceline-gateway"]["spec"]["ports"]]
    # What the port-forward and the curl after it need.
    assert "kubectl --namespace paceline port-forward service/paceline-gateway 8000 7400" in DOCUMENT
    assert {"8000", "7400"} <= set(ports)


@pytest.mark.parametrize("helm", HELM_RELEASES, ids=lambda helm: f"helm {helm.major}")
def test_the_other_helm_commands_exist(helm: HelmRelease) -> None:
    others = [command for command in COMMANDS if command[0] == "helm" and command not in INSTALLS]
    assert {command[1] for command in others} == {"test", "uninstall"}
    for _, verb, release, *flags in others:
        told = run_helm(helm, verb, "--help")
        assert release == "paceline"
        assert told.code == 0
        assert [flag for flag in flags if flag.startswith("--") and flag not in told.output] == []


def test_the_adapter_s_rule_serves_what_autoscalers_ask_for() -> None:
    (block,) = re.findall(r"^```yaml\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    (rule,) = yaml.safe_load(block)["rules"]
    (pattern,) = re.findall(r'__name__=~"([^"]+)"', rule["seriesQuery"])
    asked = {
        metric["pods"]["metric"]["name"]
        for scaler in render(CASES["autoscaling"]).all("HorizontalPodAutoscaler")
        for metric in scaler["spec"]["metrics"]
    }
    assert len(asked) == 3
    metrics = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    for name in asked:
        assert re.fullmatch(pattern, name)
        assert re.sub(rule["name"]["matches"], r"\1", name) == name
        # That page is checked against what the services show.
        assert f"| `{name}` | gauge |" in metrics


def test_the_document_names_every_example() -> None:
    assert [example.name for example in EXAMPLES if f"k8s/examples/{example.name}" not in DOCUMENT] == []
