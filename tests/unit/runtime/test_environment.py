"""Variables that look like settings and are none are refused; what is none of the service's business is left alone."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigurationError
from paceline.runtime.environment import check_environment
from paceline.runtime.settings import ServiceSettings, load_settings, settings_config

PREFIX = "PACELINE_GATEWAY_"
FIELDS = ("port", "http_port", "api_keys_file", "host")


class Gateway(ServiceSettings):
    model_config = settings_config("gateway")


def refusal(**environment: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        check_environment(PREFIX, FIELDS, environment)
    return caught.value.message


def test_a_misspelt_variable_is_refused_with_the_nearest_one() -> None:
    assert refusal(PACELINE_GATEWAY_API_KEY_FILE="keys") == (
        "PACELINE_GATEWAY_API_KEY_FILE is no setting: did you mean PACELINE_GATEWAY_API_KEYS_FILE?"
    )


def test_every_such_variable_is_named_whatever_its_case() -> None:
    message = refusal(paceline_gateway_hots="x", PACELINE_GATEWAY_ZZZ="x")
    assert "paceline_gateway_hots is no setting: did you mean PACELINE_GATEWAY_HOST?" in message
    assert "PACELINE_GATEWAY_ZZZ is no setting: unset it, or see --help" in message


def test_what_exists_and_what_is_not_the_services_is_left_alone() -> None:
    environment = {"PACELINE_API_KEY": "k", "XDG_CACHE_HOME": "/", "PACELINE_VERIFIER_X": "", "PACELINE_GATEWAYS": ""}
    check_environment(PREFIX, FIELDS, {**environment, "PACELINE_GATEWAY_PORT": "1", "paceline_gateway_host": "h"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PACELINE_GATEWAY_SERVICE_HOST", "10.0.0.1"),
        ("PACELINE_GATEWAY_SERVICE_PORT", "7400"),
        ("PACELINE_GATEWAY_SERVICE_PORT_GRPC", "7400"),
        ("PACELINE_GATEWAY_PORT", "tcp://10.0.0.1:7400"),
        ("PACELINE_GATEWAY_PORT_7400_TCP_ADDR", "10.0.0.1"),
        ("PACELINE_GATEWAY_HTTP_PORT", "tcp://10.0.0.1:8000"),
        ("PACELINE_GATEWAY_HTTP_SERVICE_HOST", "10.0.0.1"),
    ],
)
def test_service_links_of_kubernetes_are_told_apart(name: str, value: str) -> None:
    message = refusal(**{name: value})
    assert name in message
    assert "enableServiceLinks: false" in message


def test_the_settings_of_a_service_are_loaded_with_this_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_GATEWAY_LOG_LEVLE", "debug")
    with pytest.raises(ConfigurationError, match="did you mean PACELINE_GATEWAY_LOG_LEVEL"):
        load_settings(Gateway, [])
    with pytest.raises(SystemExit):
        load_settings(Gateway, ["--help"])
    assert "--log-level" in capsys.readouterr().out
