"""The HTTP server itself: starting, its port, version and metrics, TLS."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from paceline_gateway.service import GatewayService
from paceline_gateway.settings import GatewaySettings

import paceline
from paceline.errors import ConfigurationError
from paceline.runtime.supervisor import Supervisor
from tests.fakes.tiny_tokenizer import write_letters
from tests.fakes.toy_runner import hash_law
from tests.integration.fleet import VOCAB, Fleet, until
from tests.integration.http_calls import (
    COMPLETIONS,
    error_of,
    http_client,
    http_fleet,
    post,
)
from tests.integration.node import free_port

LAW = hash_law(VOCAB, seed=21)
PROMPT = [1, 2, 3]


@contextlib.asynccontextmanager
async def lonely_gateway(folder: Path, **settings: Any) -> AsyncIterator[tuple[GatewayService, asyncio.Task[None]]]:
    """A gateway that is starting, as its process would start it: without replicas it waits for them."""
    model = write_letters(folder / "model", VOCAB, max_model_len=256)
    gateway = GatewayService(
        GatewaySettings(model=str(model), **{"verifiers": (f"127.0.0.1:{free_port()}",), "http_port": 0, **settings})
    )
    async with Supervisor("gateway") as supervisor:
        starting = asyncio.create_task(gateway.start(supervisor, lambda healthy: None))
        try:
            yield gateway, starting
        finally:
            starting.cancel()
            await asyncio.wait({starting})
            await gateway.stop()


async def test_while_starting(tmp_path: Path) -> None:
    async with lonely_gateway(tmp_path, startup_wait_s=60) as (gateway, starting):
        await until(lambda: "http" in gateway.addresses)
        async with httpx.AsyncClient(base_url=f"http://{gateway.addresses['http']}") as http:
            health = await http.get("/health")
            assert (health.status_code, health.json()["state"], health.json()["status"]) == (
                200,
                "starting",
                "degraded",
            )
            assert error_of(await http.get("/ready"))[0] == 503
            for path in ("/v1/models", "/v1/models/toy"):
                assert error_of(await http.get(path)) == (503, "server_error", None, "unavailable")
            response = await post(http, COMPLETIONS, {"prompt": PROMPT})
            assert error_of(response) == (503, "server_error", None, "unavailable")
            assert response.headers["retry-after"] == "1"
            assert not starting.done()


async def test_a_port_that_is_taken(tmp_path: Path) -> None:
    async with http_fleet(tmp_path / "one", LAW) as (fleet, _):
        port = int(fleet.gateway.addresses["http"].rpartition(":")[2])
        async with lonely_gateway(tmp_path / "two", http_port=port) as (_, starting):
            with pytest.raises(ConfigurationError, match="for HTTP") as caught:
                await starting
            assert caught.value.field == "http_port"


async def test_without_http_there_is_no_server(tmp_path: Path) -> None:
    async with Fleet.start(tmp_path, LAW, settings={"http_port": None}) as fleet:
        assert fleet.gateway.addresses == {}


async def test_version_and_models(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (_, http):
        assert (await http.get("/version")).json() == {"version": paceline.__version__}
        (model,) = (await http.get("/v1/models")).json()["data"]
        assert model == (await http.get("/v1/models/toy")).json()
        assert (model["id"], model["object"], model["max_model_len"]) == ("toy", "model", 256)


async def test_metrics_in_both_formats(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (_, http):
        for accept, kind in (
            ("", "text/plain"),
            ("text/plain", "text/plain"),
            ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text"),
            ("application/openmetrics-text; version=x.y", "text/plain"),
        ):
            response = await http.get("/metrics", headers={"Accept": accept})
            assert response.status_code == 200
            assert response.headers["content-type"].startswith(kind)
            assert response.text.endswith("# EOF\n") == (kind != "text/plain")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    make = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "1",
    ]
    subprocess.run([*make, *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


async def test_tls(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    settings = {"tls_cert_file": cert, "tls_key_file": key}
    async with http_fleet(tmp_path, LAW, settings=settings) as (fleet, _):
        url = fleet.http_url.replace("http://", "https://")
        async with httpx.AsyncClient(base_url=url, verify=ssl.create_default_context(cafile=str(cert))) as http:
            assert (await http.get("/ready")).status_code == 200
        with pytest.raises(httpx.HTTPError):
            async with http_client(fleet) as plain:
                await plain.get("/ready")


async def test_tls_files_that_cannot_be_read(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    for files in ((cert, tmp_path / "none"), (key, cert)):
        async with lonely_gateway(tmp_path, tls_cert_file=files[0], tls_key_file=files[1]) as (_, starting):
            with pytest.raises(ConfigurationError, match="TLS"):
                await starting


async def test_mutual_tls(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    settings = {"tls_cert_file": cert, "tls_key_file": key, "tls_client_ca_file": cert}
    async with http_fleet(tmp_path, LAW, settings=settings) as (fleet, _):
        url = fleet.http_url.replace("http://", "https://")
        context = ssl.create_default_context(cafile=str(cert))
        async with httpx.AsyncClient(base_url=url, verify=context) as http:
            with pytest.raises(httpx.HTTPError):
                await http.get("/ready")
        context.load_cert_chain(cert, key)
        async with httpx.AsyncClient(base_url=url, verify=context) as http:
            assert (await http.get("/ready")).status_code == 200
