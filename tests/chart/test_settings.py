"""Whatever the chart tells a service is a setting of it, with a value that it takes."""

from __future__ import annotations

import json
import re

import pytest

from paceline.model_source import BUILT_IN
from paceline.runtime.settings import ServiceSettings, load_settings
from scripts.chart_settings import CLASSES, OWNED_BY_THE_CHART, SCHEMA_FILE, updated
from tests.chart.cases import CASES, Values
from tests.chart.helm import CHART, Manifest, Rendered, environment, render

each_case = pytest.mark.parametrize("values", CASES.values(), ids=CASES)

_FROM_SECRETS = {"PACELINE_GATEWAY_REDIS_URL": "rediss://user:password@redis.example.com:6380/1"}
"""What stands in secrets that the chart does not make."""


def told(container: Manifest) -> dict[str, str]:
    """The variables of a container that are settings, as the process sees them."""
    found: dict[str, str] = {}
    for name, value in environment(container).items():
        if name.startswith("PACELINE_"):
            found[name] = value if isinstance(value, str) else _FROM_SECRETS[name]
    return {name: value.replace("$(REDIS_PASSWORD)", "password") for name, value in found.items()}


def settings_of(container: Manifest, monkeypatch: pytest.MonkeyPatch) -> ServiceSettings:
    """What the service would read."""
    service = container["name"]
    settings_class = CLASSES[service]
    prefix = f"PACELINE_{service.upper()}_"
    variables = told(container)
    unknown = [name for name in variables if name.removeprefix(prefix).lower() not in settings_class.model_fields]
    # An unknown variable would be ignored by the service.
    assert unknown == []
    with monkeypatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        return load_settings(settings_class, [])


def containers(rendered: Rendered) -> dict[str, Manifest]:
    """Our own services by the name of their Deployment."""
    return {
        deployment["metadata"]["name"]: deployment["spec"]["template"]["spec"]["containers"][0]
        for deployment in rendered.all("Deployment")
    }


@each_case
def test_every_service_takes_what_it_is_told(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    found = containers(render(values))
    assert "gateway" in {container["name"] for container in found.values()}
    for container in found.values():
        settings = settings_of(container, monkeypatch)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert (settings.port, settings.metrics_port) == (ports["grpc"], ports["metrics"])
        assert settings.host == "0.0.0.0"
        assert settings.log_format == "json"
        assert getattr(settings, "http_port", None) == ports.get("http")


@each_case
def test_all_services_of_a_release_speak_of_one_model(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = render(values)
    names = {getattr(settings_of(one, monkeypatch), "model_name", "") for one in containers(rendered).values()}
    assert len(names) == 1
    assert names != {""}
    for _, container in rendered.containers():
        if container["name"] == "test":
            assert container["args"][2] in names


def test_files_that_settings_name_are_mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for values in CASES.values():
        rendered = render(values)
        for name, container in containers(rendered).items():
            pod = rendered.one("Deployment", name)["spec"]["template"]["spec"]
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
            settings = settings_of(container, monkeypatch)
            for field in type(settings).model_fields:
                path = getattr(settings, field)
                if not (field.endswith("_file") and path):
                    continue
                seen.add(field)
                secret = mounts[str(path.parent)]["secret"]
                items = [item["path"] for item in secret.get("items", [])]
                assert not items or path.name in items
                # Readable for the group, which is the pod's fsGroup.
                assert secret["defaultMode"] == 0o440
    assert seen == {
        *("tls_cert_file", "tls_key_file", "tls_client_ca_file", "api_keys_file"),
        *("link_tls_ca_file", "link_tls_cert_file", "link_tls_key_file"),
    }


def test_the_gateway_gets_no_key_of_the_replicas() -> None:
    pod = render(CASES["mutual tls"]).one("Deployment", "fleet-paceline-gateway")["spec"]["template"]["spec"]
    (authority,) = [volume for volume in pod["volumes"] if volume.get("secret", {}).get("secretName") == "replicas"]
    assert authority["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]


def test_large_and_odd_values_arrive_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    found = containers(render(CASES["gateway settings"]))["fleet-paceline-gateway"]
    variables = told(found)
    assert variables["PACELINE_GATEWAY_MAX_BODY_BYTES"] == "16777216"
    assert variables["PACELINE_GATEWAY_SESSION_TTL_S"] == "1800.5"
    assert variables["PACELINE_GATEWAY_DRAFT_AHEAD"] == "false"
    target = containers(render(CASES["two-gpus"]))["fleet-paceline-verifier-target"]
    assert told(target)["PACELINE_VERIFIER_KV_CACHE_BYTES"] == "34359738368"
    pool = settings_of(containers(render(CASES["several pools"]))["fleet-paceline-verifier-cpu"], monkeypatch)
    assert getattr(pool, "cpu_affinity", None) == (0, 1)


def test_verifiers_serve_what_the_drafters_heads_build_on() -> None:
    found = containers(render(CASES["heads in drafters and in the verifier"]))
    variables = {name.removeprefix("fleet-paceline-"): told(container) for name, container in found.items()}
    for pool, method in (("inside", "eagle"), ("plain", "none"), ("copies", "ngram")):
        verifier = variables[f"verifier-{pool}"]
        assert verifier["PACELINE_VERIFIER_SELF_DRAFT_METHOD"] == method
        assert verifier.get("PACELINE_VERIFIER_SELF_DRAFT_MODEL", "") == ("/models/eagle" if pool == "inside" else "")
        assert verifier["PACELINE_VERIFIER_SERVED_FEATURES"] == "final_norm"
    assert variables["drafter-medusa"]["PACELINE_DRAFTER_MODEL"] == "owner/target"
    assert variables["drafter-medusa"]["PACELINE_DRAFTER_DRAFT_HEAD"] == "owner/medusa-heads"
    assert variables["drafter-eagle"]["PACELINE_DRAFTER_MODEL"] == "/models/target"
    small = containers(render(CASES["eagle3-pool"]))
    target, drafter = (told(small[f"fleet-paceline-{name}"]) for name in ("verifier-target", "drafter-eagle3"))
    assert target["PACELINE_VERIFIER_SERVED_FEATURES"] == drafter["PACELINE_DRAFTER_DRAFT_HEAD"]


def test_what_verifiers_serve_may_be_said_where_drafters_are_elsewhere() -> None:
    elsewhere = {"verifiers": [{"name": "target", "settings": {"served_features": "final_norm"}}], "drafters": []}
    for values, served in ((elsewhere, "final_norm"), ({}, "none")):
        container = containers(render(values))["fleet-paceline-verifier-target"]
        entries = [entry["value"] for entry in container["env"] if entry["name"].endswith("SERVED_FEATURES")]
        assert entries == [served]


@pytest.mark.parametrize(
    ("pool", "device", "dtype"),
    [
        ("verifier-big", "cuda", "bfloat16"),
        ("verifier-mig", "cuda", "float16"),
        ("verifier-cpu", "cpu", "float32"),
        ("drafter-small", "cuda", "bfloat16"),
        ("drafter-chain", "cpu", "float32"),
    ],
)
def test_the_device_follows_from_the_resources(pool: str, device: str, dtype: str) -> None:
    variables = environment(containers(render(CASES["several pools"]))[f"fleet-paceline-{pool}"])
    service = pool.split("-")[0].upper()
    assert variables[f"PACELINE_{service}_DEVICE"] == device
    assert variables[f"PACELINE_{service}_DTYPE"] == dtype


def test_the_schema_knows_all_settings() -> None:
    schema = json.loads(SCHEMA_FILE.read_text("utf-8"))
    assert updated(schema) == schema, "run scripts/chart_settings.py"


def test_the_chart_owns_only_settings_that_exist() -> None:
    assert {name for settings in CLASSES.values() for name in settings.model_fields} >= OWNED_BY_THE_CHART


def test_the_chart_knows_the_built_in_models() -> None:
    helper = (CHART / "templates" / "_gateway.tpl").read_text()
    (names,) = re.findall(r"\$builtIn := list (.*?) -}}", helper)
    assert set(re.findall(r'"([^"]+)"', names)) == set(BUILT_IN)
