"""What `paceline up` finds in its environment for the services, before it starts any."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.fleet_options import FleetOptions
from paceline.cli.service_settings import Access, check_services
from paceline.errors import ConfigurationError


def test_a_fleet_without_variables_asks_for_nothing() -> None:
    assert check_services(FleetOptions()) == Access()


def test_what_the_gateway_asks_for_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TLS_CERT_FILE", "TLS_KEY_FILE", "TLS_CLIENT_CA_FILE", "API_KEYS_FILE"):
        monkeypatch.setenv(f"PACELINE_GATEWAY_{name}", f"{name}.pem")
    monkeypatch.setenv("PACELINE_GATEWAY_HOST", "0.0.0.0")
    assert check_services(FleetOptions()) == Access("0.0.0.0", True, True, Path("API_KEYS_FILE.pem"))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PACELINE_GATEWAY_API_KEY_FILE", "keys", "did you mean PACELINE_GATEWAY_API_KEYS_FILE"),
        ("PACELINE_VERIFIER_MAX_SESSION", "1", "did you mean PACELINE_VERIFIER_MAX_SESSIONS"),
        ("PACELINE_DRAFTER_MAX_SESSIONS", "0", "--max-sessions \\(PACELINE_DRAFTER_MAX_SESSIONS\\): "),
    ],
)
def test_what_a_service_would_refuse_is_refused(
    name: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=words):
        check_services(FleetOptions())


def test_a_fleet_without_drafters_does_not_read_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DRAFTER_MAX_SESSIONS", "0")
    check_services(FleetOptions(drafters=0))


def test_a_cuda_fleet_and_every_method_pass() -> None:
    check_services(FleetOptions(verifier_device="cuda:0", method="ngram", verifiers=3, drafters=2))
