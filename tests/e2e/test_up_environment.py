"""`paceline up` with variables of the services in its environment: refused, passed on, and told in what it prints."""

from __future__ import annotations

import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.launcher import Launcher, generate

CERTIFICATES = Path(__file__).parents[1] / "unit" / "runtime" / "certificates"


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()


def test_a_misspelt_variable_is_told_before_the_models_are_loaded(launcher: Launcher, tiny_llama: Path) -> None:
    process = launcher.start(tiny_llama, environment={"PACELINE_GATEWAY_API_KEY_FILE": "keys.txt"})
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    first, *_ = errors.splitlines()
    assert first == ("error: PACELINE_GATEWAY_API_KEY_FILE is no setting: did you mean PACELINE_GATEWAY_API_KEYS_FILE?")
    assert "models: preparing" not in errors


def test_keys_tls_and_all_interfaces_are_told_as_clients_need_them(
    launcher: Launcher, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys.txt").write_text("me: 5f0c6d1e8a9b47c2b3d4e5f6a7b8c9d0\n")
    environment = {
        "PACELINE_GATEWAY_HOST": "0.0.0.0",
        "PACELINE_GATEWAY_API_KEYS_FILE": str(tmp_path / "keys.txt"),
        "PACELINE_GATEWAY_TLS_CERT_FILE": str(CERTIFICATES / "server.pem"),
        "PACELINE_GATEWAY_TLS_KEY_FILE": str(CERTIFICATES / "server.key"),
    }
    up = launcher.up(tiny_llama, "--drafters=0", environment=environment)
    assert up.gateway.startswith("127.0.0.1:")
    assert up.http.startswith("https://127.0.0.1:")
    authority = CERTIFICATES / "ca.pem"
    trusting = ssl.create_default_context(cafile=authority)
    trusting.check_hostname = False
    with urllib.request.urlopen(f"{up.http}/health", context=trusting) as answer:
        assert answer.status == 200
    monkeypatch.setenv("PACELINE_API_KEY", "5f0c6d1e8a9b47c2b3d4e5f6a7b8c9d0")
    told = generate(up.gateway, "abc", "--raw", "--max-tokens=3", "--tls", "--tls-ca-file", str(authority))
    assert len(told["token_ids"]) == 3
