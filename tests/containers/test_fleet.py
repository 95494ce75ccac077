"""A fleet of the three images on a private network, each container confined as far as it goes. In this order."""

from __future__ import annotations

import json

import pytest

from tests.containers.fleet import MODEL_NAME, STOP_GRACE_S, UID, Site

pytestmark = pytest.mark.timeout(3600)
SERVICES = ("gateway", "verifier", "drafter")
PROMPT = "Write the numbers from one to ten in words, separated by commas."
MAX_TOKENS = 32

_LOOK = """
import os, json
def writes(folder):
    try:
        open(os.path.join(folder, "probe"), "w").close()
        return "written"
    except OSError as error:
        return error.strerror
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
first = open("/proc/1/cmdline").read().split("\\0")[:3]
print(json.dumps({
    "uid": os.getuid(), "capabilities": int(status["CapEff"], 16), "no_new_privileges": int(status["NoNewPrivs"]),
    "first_process": first, "writes": {name: writes(name) for name in ("/", "/opt/venv", "/model", "/tmp", "/cache")},
}))
"""


@pytest.mark.parametrize("service", SERVICES)
def test_containers_are_confined(fleet: Site, service: str) -> None:
    seen = json.loads(fleet.engine.run("exec", f"{fleet.name}-{service}", "python", "-c", _LOOK))
    denied = "Read-only file system"
    assert seen == {
        "uid": UID,
        "capabilities": 0,
        "no_new_privileges": 1,
        "first_process": ["python", "-m", f"paceline_{service}"],
        "writes": {"/": denied, "/opt/venv": denied, "/model": denied, "/tmp": "written", "/cache": "written"},
    }


def test_grpc_and_http_stream_the_same_text(fleet: Site, figures: list[tuple[str, str]]) -> None:
    first, grpc_answer = fleet.ask("generate", "gateway:7400", PROMPT, str(MAX_TOKENS))
    assert first["first"] != grpc_answer["text"]
    assert grpc_answer["chunks"] > 1
    assert grpc_answer["durable"]
    assert grpc_answer["drafted"] > 0
    assert grpc_answer["tokens"] > 5
    (http_answer,) = fleet.ask("chat", "gateway:8000", MODEL_NAME, PROMPT, str(MAX_TOKENS))
    assert http_answer["done"]
    assert http_answer["chunks"] > 1
    assert http_answer["text"] == grpc_answer["text"]
    assert http_answer["reason"] == grpc_answer["reason"]
    figures.append(("the answer, tokens", str(grpc_answer["tokens"])))


@pytest.mark.parametrize("address", ["gateway:8000", "gateway:9400", "verifier:9400", "drafter:9400"])
def test_metrics_are_served(fleet: Site, address: str) -> None:
    (answer,) = fleet.ask("get", address, "/metrics")
    assert answer["status"] == 200
    assert "paceline_" in answer["body"]


def test_stop_ends_after_a_drain_and_logs_are_json(fleet: Site) -> None:
    client = fleet.begin("generate", "gateway:7400", "Tell me a long story about the sea.", "64")
    assert client.stdout is not None
    assert "first" in json.loads(client.stdout.readline())
    for service in ("gateway", "drafter", "verifier"):
        fleet.engine.run("stop", "--time", str(STOP_GRACE_S), f"{fleet.name}-{service}")
        if service == "gateway":
            rest, complaint = client.communicate(timeout=STOP_GRACE_S)
            assert client.returncode == 0, complaint
            assert json.loads(rest.splitlines()[-1])["tokens"] == 64
    for service in SERVICES:
        container = f"{fleet.name}-{service}"
        assert fleet.engine.run("inspect", "--format", "{{.State.ExitCode}}", container) == "0", fleet.log(container)
        records = [json.loads(line) for line in fleet.log(container).splitlines()]
        assert {record["service"] for record in records} == {service}
        messages = [record["message"] for record in records]
        assert messages[0] == "starting"
        assert "draining" in messages
        assert messages[-1] == "ended"
