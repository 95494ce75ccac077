"""How discovery gets to the Kubernetes API: a pod's service account over TLS, or a kubeconfig file."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kubernetes.aio.config import incluster_config, kube_config
from paceline_gateway.discovery.kubernetes_discovery import KubernetesDiscovery
from paceline_gateway.discovery.targets import KubernetesTarget

from paceline.errors import ConfigurationError
from paceline.runtime.supervisor import OnError, Supervisor
from tests.fakes.kubernetes_api import FakeKubernetesApi, endpoint, endpoint_slice
from tests.integration.discovery_worlds import SOON, Told

CERTIFICATES = Path(__file__).parents[1] / "unit" / "runtime" / "certificates"
TARGET = KubernetesTarget("default", "verifier")


@contextlib.asynccontextmanager
async def in_a_pod(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[FakeKubernetesApi, Path]]:
    """An API with TLS, and the files and variables that a pod has; gives the file with the token too."""
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(CERTIFICATES / "server.pem", CERTIFICATES / "server.key")
    async with FakeKubernetesApi.start(tls) as api:
        token = folder / "token"
        token.write_text(api.token, encoding="utf-8")
        monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
        monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(CERTIFICATES / "ca.pem"))
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
        yield api, token


async def test_a_pod_uses_its_service_account_and_reads_a_new_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with in_a_pod(tmp_path, monkeypatch) as (api, token), Supervisor("test") as supervisor:
        told = Told()
        api.put(endpoint_slice("a", "verifier", [endpoint("10.0.0.1")]))
        discovery = KubernetesDiscovery(TARGET, timing=SOON)
        supervisor.spawn("discovery", lambda: discovery.run(told), on_error=OnError.FAIL)
        await told.show("10.0.0.1")
        api.token = "rotated"
        token.write_text(api.token, encoding="utf-8")
        api.cut_watches()
        api.put(endpoint_slice("a", "verifier", [endpoint("10.0.0.2")]))
        await told.show("10.0.0.2")


async def refused(kubeconfig_file: Path | None) -> None:
    async with asyncio.timeout(5.0):
        await KubernetesDiscovery(TARGET, kubeconfig_file).run(Told())


async def test_no_credentials_are_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    for file in (None, tmp_path / "missing"):
        with pytest.raises(ConfigurationError, match="k8s:// works inside a pod") as caught:
            await refused(file)
        assert caught.value.field == "kubeconfig_file"


async def test_a_kubeconfig_that_is_none_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text("clusters: [", encoding="utf-8")
    with pytest.raises(ConfigurationError, match="no way to the Kubernetes API"):
        await refused(path)


def test_only_a_kubernetes_target_loads_the_kubernetes_client() -> None:
    code = """
import sys
import paceline_gateway.service
from paceline_gateway.discovery.build import make_discovery
from paceline_gateway.discovery.targets import DnsTarget, KubernetesTarget, StaticTarget

def loaded(target):
    make_discovery(target, dns_interval_s=1.0, kubeconfig_file=None)
    return "kubernetes" in sys.modules or "aiohttp" in sys.modules

print(loaded(StaticTarget(("a:1",))), loaded(DnsTarget("a", 1)), loaded(KubernetesTarget("a", "b")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False", "False", "True"]
