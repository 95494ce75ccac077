"""Wrong values are refused by both versions of Helm, with a message that names the value and says what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from scripts.kubernetes_tools import HELM_RELEASES, HelmRelease
from tests.chart.cases import Values
from tests.chart.helm import CHART, template

each_helm = pytest.mark.parametrize("helm", HELM_RELEASES, ids=lambda helm: f"helm {helm.major}")


def verifier(**values: Any) -> Values:
    return {"verifiers": [{"name": "target", **values}]}


def drafter(**values: Any) -> Values:
    return {"drafters": [{"name": "small", **values}]}


SCALED = {"enabled": True, "minReplicas": 5, "maxReplicas": 2}

BY_THE_SCHEMA: dict[str, tuple[Values, list[str]]] = {
    "unknown key": ({"verifierz": []}, ["verifierz", "not allowed"]),
    "unknown key of the gateway": ({"gateway": {"replica": 2}}, ["gateway", "replica", "not allowed"]),
    "unknown key of a pool": (verifier(gpu=1), ["verifiers", "gpu", "not allowed"]),
    "unknown key of a tolerance": (verifier(tolerations=[{"kye": "x"}]), ["tolerations", "kye", "not allowed"]),
    "unknown setting": (verifier(settings={"max_session": 8}), ["settings", "max_session", "not allowed"]),
    "setting that the chart decides": (verifier(settings={"port": 8}), ["settings", "port", "not allowed"]),
    "setting of another service": (verifier(settings={"quantization": "int8"}), ["quantization", "not allowed"]),
    "setting below its limit": (verifier(settings={"max_sessions": 0}), ["settings", "max_sessions", "1"]),
    "setting of a wrong type": (verifier(settings={"max_sessions": "8"}), ["max_sessions", "integer", "string"]),
    "setting out of a choice": (drafter(method=["ngram"], settings={"runner": "x"}), ["runner", "onnx"]),
    "replicas below 0": (verifier(replicas=-1), ["replicas", "0"]),
    "gateways below 0": ({"gateway": {"replicas": -1}}, ["gateway", "replicas", "0"]),
    "replicas as a word": (verifier(replicas="two"), ["replicas", "integer", "string"]),
    "a part of a replica": (verifier(replicas=1.5), ["replicas", "integer"]),
    "pool without name": ({"verifiers": [{"replicas": 1}]}, ["verifiers", "name"]),
    "name with capitals": ({"verifiers": [{"name": "Big"}]}, ["verifiers", "name", "pattern"]),
    "name that is too long": ({"verifiers": [{"name": "x" * 21}]}, ["verifiers", "name", "20"]),
    "unknown method": (drafter(method=["eagle9"]), ["method", "ngram", "draft_model"]),
    "method twice": (drafter(method=["ngram", "ngram"]), ["method"]),
    "no method": (drafter(method=[]), ["method"]),
    "bytes as a quantity": (verifier(kvCacheBytes="4Gi"), ["kvCacheBytes", "integer", "string"]),
    "memory that is no quantity": (verifier(resources={"limits": {"memory": "4 GB"}}), ["limits", "memory"]),
    "unknown device": (verifier(device="tpu"), ["device", "cuda"]),
    "unknown dtype": (verifier(dtype="int3"), ["dtype", "bfloat16"]),
    "unknown discovery": ({"discovery": {"mode": "consul"}}, ["discovery", "mode", "kubernetes", "dns", "static"]),
    "address without port": ({"discovery": {"static": {"verifiers": ["host"]}}}, ["discovery", "verifiers"]),
    "unknown store": ({"redis": {"mode": "sentinel"}}, ["redis", "mode", "embedded", "external", "memory"]),
    "key of a client that is too short": ({"apiKeys": {"values": {"a": "s3cret"}}}, ["apiKeys", "values", "16"]),
    "client with a blank": ({"apiKeys": {"values": {"a b": "k" * 16}}}, ["apiKeys", "a b", "not allowed"]),
    "utilisation above 1": (verifier(autoscaling={"targetUtilization": 80}), ["targetUtilization", "1"]),
    "scaling to nothing": (verifier(autoscaling={"minReplicas": 0}), ["minReplicas", "1"]),
    "drain below 0": ({"drain": {"timeoutSeconds": -1}}, ["drain", "timeoutSeconds", "0"]),
    "unknown strategy": (verifier(strategy={"type": "OnDelete"}), ["strategy", "Recreate"]),
    "cache on the host": (verifier(modelCache={"type": "hostPath"}), ["modelCache", "type", "emptyDir"]),
    "unknown level": ({"logLevel": "loud"}, ["logLevel", "debug"]),
    "head that is no path": (drafter(method=["eagle"], head="heads"), ["drafters", "head", "pattern"]),
    "unknown method of a verifier": (verifier(selfDraft={"method": "draft_model"}), ["selfDraft", "method", "ngram"]),
    "head as a setting": (drafter(method=["eagle"], settings={"draft_head": "a/b"}), ["draft_head", "not allowed"]),
    "no model": ({"model": {"source": ""}}, ["model", "source"]),
}

BY_A_TEMPLATE: dict[str, tuple[Values, list[str]]] = {
    "grace that is too short": (
        {"drain": {"terminationGracePeriodSeconds": 60}},
        ["drain.terminationGracePeriodSeconds is 60", "give at least 130"],
    ),
    "drain beyond the grace": (
        {"drain": {"timeoutSeconds": 300, "terminationGracePeriodSeconds": 300}},
        ["terminationGracePeriodSeconds is 300", "give at least 310"],
    ),
    "fewest above most": (
        verifier(autoscaling=SCALED),
        ["verifiers[target]: autoscaling.minReplicas 5 is more than maxReplicas 2"],
    ),
    "fewest gateways above most": (
        {"gateway": {"autoscaling": SCALED}},
        ["gateway: autoscaling.minReplicas 5 is more than maxReplicas 2"],
    ),
    "fewest above the default most": (drafter(method=["ngram"], autoscaling={"minReplicas": 9}), ["drafters[small]"]),
    "autoscaling without a target": (
        verifier(autoscaling={"enabled": True, "targetUtilization": None, "targetQueueTimeSeconds": None}),
        ["autoscaling needs targetQueueTimeSeconds or targetUtilization"],
    ),
    "no verifiers": ({"verifiers": []}, ["verifiers is empty", "name at least one pool"]),
    "two pools of one name": (
        {"verifiers": [{"name": "a"}, {"name": "a"}]},
        ["verifiers[a]: two pools have this name"],
    ),
    "draft model that is missing": (
        drafter(method=["ngram", "draft_model"]),
        ["drafters[small]: method ngram,draft_model needs the draft model"],
    ),
    "head that is missing": (
        drafter(method=["ngram", "eagle3"]),
        ["drafters[small]: method ngram,eagle3 needs a head", "as `head`"],
    ),
    "head that nobody has": (drafter(method=["ngram"], head="a/b"), ["method ngram has none"]),
    "two models in one drafter": (
        drafter(method=["eagle", "draft_model"], model="owner/small", head="a/b"),
        ["drafters[small]: a drafter runs one model or head"],
    ),
    "head of a verifier that is missing": (
        verifier(selfDraft={"method": "medusa"}),
        ["verifiers[target]: selfDraft.method medusa needs a head"],
    ),
    "head of a verifier that nobody has": (verifier(selfDraft={"head": "a/b"}), ["selfDraft.method is none"]),
    "drafters with different features": (
        {
            "drafters": [
                {"name": "one", "method": ["eagle3"], "head": "a/b"},
                {"name": "two", "method": ["medusa"], "head": "a/c"},
            ]
        },
        ["drafters[one] and drafters[two] build on different hidden states"],
    ),
    "verifier with other features than its drafters": (
        {
            **verifier(selfDraft={"method": "medusa", "head": "a/c"}),
            "drafters": [{"name": "one", "method": ["eagle3"], "head": "a/b"}],
        },
        ["verifiers[target]: drafts from final_norm by itself and would serve a/b"],
    ),
    "two devices for one model": (
        verifier(resources={"limits": {"nvidia.com/gpu": 2}}),
        ["verifiers[target]: resources.limits asks for 2 of nvidia.com/gpu", "ask for 1 and raise replicas"],
    ),
    "default method without model": (drafter(), ["method draft_model needs the draft model"]),
    "static without addresses": ({"discovery": {"mode": "static"}}, ["discovery.static.verifiers is empty"]),
    "static with pools": (
        {"discovery": {"mode": "static", "static": {"verifiers": ["a:1"]}}},
        ["would never use the pools of this release"],
    ),
    "addresses that nobody reads": (
        {"discovery": {"static": {"verifiers": ["a:1"]}}},
        ["discovery.static is given, but discovery.mode is kubernetes"],
    ),
    "external without secret": ({"redis": {"mode": "external"}}, ["redis.external.existingSecret"]),
    "secret that nobody reads": ({"redis": {"external": {"existingSecret": "x"}}}, ["redis.mode is embedded"]),
    "sessions in two memories": ({"redis": {"mode": "memory"}}, ["set gateway.replicas to 1"]),
    "sessions in many memories": (
        {"redis": {"mode": "memory"}, "gateway": {"replicas": 1, "autoscaling": {"enabled": True}}},
        ["gateway.autoscaling.enabled to false"],
    ),
    "two passwords": (
        {"redis": {"embedded": {"auth": {"existingSecret": "x", "password": "s3cret"}}}},
        ["give existingSecret or password, not both"],
    ),
    "password that breaks the URL": (
        {"redis": {"embedded": {"auth": {"password": "s3cret@/"}}}},
        ["redis.embedded.auth.password stands in a URL"],
    ),
    "two sources of keys": (
        {"apiKeys": {"existingSecret": "x", "values": {"a": "s3cret" * 4}}},
        ["apiKeys: give existingSecret or values, not both"],
    ),
    "one key for two": (
        {"apiKeys": {"values": {"a": "s3cret" * 4, "b": "s3cret" * 4}}},
        ["two names have the same key"],
    ),
    "key with a blank": (
        {"apiKeys": {"values": {"a": "s3cret " * 4}}},
        ["apiKeys.values.a: a key has visible ASCII characters only"],
    ),
    "tls without certificate": ({"tls": {"enabled": True}}, ["tls.serverSecret"]),
    "mutual tls without certificate": (
        {"tls": {"enabled": True, "serverSecret": "x", "mutual": True}},
        ["tls.clientSecret"],
    ),
    "tls that is off": ({"tls": {"serverSecret": "x"}}, ["set tls.enabled to true"]),
    "ingress without host": ({"gateway": {"ingress": {"enabled": True, "hosts": []}}}, ["gateway.ingress.hosts"]),
    "account without name": ({"gateway": {"serviceAccount": {"create": False}}}, ["gateway.serviceAccount.name"]),
    "two budgets": (verifier(pdb={"minAvailable": 1}), ["maxUnavailable or minAvailable, not both"]),
    "no budget": (verifier(pdb={"maxUnavailable": None}), ["set pdb.enabled to false"]),
    "recreate with surge": (
        verifier(strategy={"type": "Recreate", "rollingUpdate": {"maxSurge": 1}}),
        ["strategy.rollingUpdate has no meaning with type Recreate"],
    ),
    "rollout that cannot begin": (
        verifier(strategy={"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 0}}),
        ["verifiers[target]", "no rollout can begin"],
    ),
    "setting as environment": (
        verifier(env=[{"name": "PACELINE_VERIFIER_MAX_SESSIONS", "value": "8"}]),
        ["env PACELINE_VERIFIER_MAX_SESSIONS: write it as a setting"],
    ),
    "environment of the chart": (
        verifier(env=[{"name": "HF_HOME", "value": "/x"}]),
        ["env HF_HOME is set by the chart"],
    ),
    "label of the chart": (
        {"commonLabels": {"app.kubernetes.io/name": "x"}},
        ["commonLabels: app.kubernetes.io/name is set by the chart"],
    ),
    "label of the chart on pods": (verifier(podLabels={"paceline/pool": "x"}), ["podLabels: paceline/pool"]),
    "label given twice": (
        {"commonLabels": {"a": "b"}, "podMonitor": {"labels": {"a": "c"}}},
        ["podMonitor.labels: a is in commonLabels already"],
    ),
    "cache that cannot be shared": (
        verifier(replicas=2, modelCache={"type": "pvc"}),
        ["verifiers[target]: several replicas cannot share a ReadWriteOnce model cache"],
    ),
    "claim that nobody reads": (verifier(modelCache={"existingClaim": "x"}), ["needs modelCache.type pvc"]),
}


@each_helm
@pytest.mark.parametrize(("values", "said"), BY_THE_SCHEMA.values(), ids=BY_THE_SCHEMA)
def test_the_schema_refuses(helm: HelmRelease, values: Values, said: list[str]) -> None:
    done = template(values, helm)
    assert done.code != 0
    assert "values don't meet the specifications of the schema" in done.errors
    (complaint,) = [line for line in done.errors.splitlines() if line.startswith("- ")]
    assert [text for text in said if text not in complaint] == []
    assert "s3cret" not in done.errors


@pytest.mark.parametrize(("values", "said"), BY_A_TEMPLATE.values(), ids=BY_A_TEMPLATE)
def test_a_template_refuses(values: Values, said: list[str]) -> None:
    done = template(values)
    assert done.code != 0
    assert [text for text in said if text not in done.errors] == []
    assert "s3cret" not in done.errors


@each_helm
def test_both_versions_of_helm_show_a_template_s_message(helm: HelmRelease) -> None:
    values, said = BY_A_TEMPLATE["grace that is too short"]
    assert all(text in template(values, helm).errors for text in said)


OPAQUE = {"opaque", "extraVolumes"}
"""Definitions of Kubernetes objects that are passed on."""


def _groups(values: Values, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all objects in the chart's values."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield (*path, key)
            yield from _groups(value, (*path, key))


def test_a_key_that_is_left_empty_is_fine_or_named() -> None:
    """In YAML a key whose entries are all commented out is null, which takes the chart's own value away."""
    refused = set()
    for path in _groups(yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))):
        values: Any = None
        for key in reversed(path):
            values = {key: values}
        done = template(values)
        if done.code != 0:
            refused.add(path)
            assert path[-1] in done.errors
            assert "missing property" in done.errors or "pdb needs" in done.errors, f"{path}: {done.errors}"
    assert {("redis",), ("apiKeys", "values"), ("verifierDefaults", "resources")} <= refused


def test_the_schema_is_strict_everywhere() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    found = dict(_objects("", {key: value for key, value in schema.items() if key != "definitions"}))
    for name, definition in schema["definitions"].items():
        if name not in OPAQUE:
            found |= dict(_objects(name, definition))
    assert len(found) > 40
    # Of others than named keys there are only maps of labels, quantities and the like.
    loose = [path for path, object_ in found.items() if object_.get("additionalProperties") is not False]
    assert loose == ["quantities", "strings"]


def _objects(path: str, schema: Any) -> Iterator[tuple[str, Any]]:
    """Path and schema of every object in a schema."""
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield path, schema
        for key, value in schema.items():
            yield from _objects(f"{path}.{key}", value)
