"""The scripts that the chart gives to pods, run as pods run them, against the services that they ask."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from paceline.runtime.grpc_server import GrpcServer
from paceline.runtime.settings import ServiceSettings
from paceline.runtime.supervisor import Supervisor
from tests.chart.helm import CHART, ROOT, render
from tests.fakes.tiny_tokenizer import write_letters
from tests.fakes.toy_runner import hash_law
from tests.integration.fleet import MODEL, VOCAB, Fleet, perfect_method
from tests.integration.node import free_port

CERTIFICATES = ROOT / "tests" / "unit" / "runtime" / "certificates"
LAW = hash_law(VOCAB)
FILES = CHART / "files"


async def run_python(*arguments: str) -> tuple[int, str]:
    """Exit code and everything said by a Python process."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), timeout=60)
    assert process.returncode is not None
    return process.returncode, output.decode()


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A mounted secret of type kubernetes.io/tls with its authority."""
    for name, file in (("tls.crt", "server.pem"), ("tls.key", "server.key"), ("ca.crt", "ca.pem")):
        shutil.copy(CERTIFICATES / file, tmp_path / name)
    return tmp_path


@contextlib.asynccontextmanager
async def serving(secret: Path, *, mutual: bool) -> AsyncIterator[tuple[GrpcServer, str]]:
    """A server with TLS, and its port."""
    settings = ServiceSettings(
        tls_cert_file=secret / "tls.crt",
        tls_key_file=secret / "tls.key",
        tls_client_ca_file=secret / "ca.crt" if mutual else None,
    )
    server = GrpcServer(settings, ["paceline.v1.Verifier"])
    async with Supervisor("test") as supervisor:
        address = await server.start()
        supervisor.spawn("health", server.run_health)
        try:
            yield server, address.rpartition(":")[2]
        finally:
            await server.stop(0)


@pytest.mark.parametrize("mutual", [False, True])
async def test_the_probe_asks_for_health_over_tls(secret: Path, mutual: bool) -> None:
    script = str(FILES / "tls_probe.py")
    async with serving(secret, mutual=mutual) as (server, port):

        async def probe(service: str, name: str = "localhost") -> tuple[int, str]:
            return await run_python(script, port, service, str(secret), name)

        loading, living = await asyncio.gather(probe(""), probe("liveness"))
        assert loading == (1, "health of '': NOT_SERVING\n")
        assert living == (0, "")
        server.set_serving(True)
        ready, strange = await asyncio.gather(probe(""), probe("", "elsewhere"))
        assert ready == (0, "")
        assert strange[0] == 1
        assert "no health: UNAVAILABLE" in strange[1]


async def test_a_dead_server_has_no_health(secret: Path) -> None:
    code, said = await run_python(str(FILES / "tls_probe.py"), str(free_port()), "", str(secret), "localhost")
    assert code == 1
    assert "no health: UNAVAILABLE" in said


def test_the_pod_of_helm_test_runs_the_script() -> None:
    pod = render({"apiKeys": {"existingSecret": "keys"}}).one("Pod", "fleet-paceline-test")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["spec"]["restartPolicy"] == "Never"
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["python", "-c"]
    script, *arguments = container["args"]
    assert script.strip() == (FILES / "gateway_test.py").read_text().strip()
    assert arguments == [
        "http://fleet-paceline-gateway:8000",
        "smollm2-135m-instruct",
        "60",
        "/etc/paceline/api-keys/api-keys",
    ]


@pytest.mark.parametrize("with_key", [False, True])
async def test_helm_test_passes_on_a_fleet(tmp_path: Path, with_key: bool) -> None:
    keys = tmp_path / "api-keys"
    keys.write_text("# written by somebody\n\nteam-a: 0123456789abcdef-A\nteam-b: 0123456789abcdef-B\n")
    settings = {"http_port": 0} | ({"api_keys_file": keys} if with_key else {})
    script = (FILES / "gateway_test.py").read_text()
    async with Fleet.start(tmp_path, LAW, method=perfect_method(LAW), settings=settings) as fleet:
        arguments = ["-c", script, fleet.http_url, MODEL, "5"]
        code, said = await run_python(*arguments, *([str(keys)] if with_key else []))
        assert code == 0, said
        assert said.startswith("completed ")
        wrong = ["-c", script, fleet.http_url, "another-model", "5"]
        code, said = await run_python(*wrong, *([str(keys)] if with_key else []))
        assert code == 1
        assert "answered 404" in said
        assert "another-model" in said
        if with_key:
            code, said = await run_python(*arguments)
            assert code == 1
            assert "answered 401" in said


async def test_helm_test_fails_without_a_gateway() -> None:
    script = (FILES / "gateway_test.py").read_text()
    code, said = await run_python("-c", script, f"http://127.0.0.1:{free_port()}", MODEL, "0")
    assert code == 1
    assert "cannot be reached" in said


async def test_the_init_container_resolves_a_model(tmp_path: Path) -> None:
    folder = write_letters(tmp_path / "model")
    values = {"model": {"source": str(folder)}, "gateway": {"convertModel": True}}
    pod = render(values).one("Deployment", "fleet-paceline-gateway")["spec"]["template"]["spec"]
    (init,) = pod["initContainers"]
    assert init["command"] == ["python", "-c"]
    script, source = init["args"]
    assert await run_python("-c", script, source) == (0, f"{folder}\n")
    code, said = await run_python("-c", script, str(tmp_path / "none.gguf"))
    assert code == 1
    assert "there is no file" in said
