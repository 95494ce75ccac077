"""What services that are started from here find in their environment."""

from __future__ import annotations

import pytest

from paceline.cli.serve import GRPC_CORE, service_environment


def test_services_are_told_how_grpc_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPC_EXPERIMENTS", raising=False)
    monkeypatch.setenv("PACELINE_GATEWAY_MODEL", "m")
    found = service_environment()
    assert found["GRPC_EXPERIMENTS"] == GRPC_CORE["GRPC_EXPERIMENTS"]
    assert found["PACELINE_GATEWAY_MODEL"] == "m"


def test_an_environment_that_says_something_of_its_own_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPC_EXPERIMENTS", "event_engine_client")
    assert service_environment()["GRPC_EXPERIMENTS"] == "event_engine_client"
