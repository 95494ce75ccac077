"""The settings tables in the services' READMEs are what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest
from paceline_drafter.settings import DrafterSettings
from paceline_gateway.settings import GatewaySettings
from paceline_verifier.settings import VerifierSettings

from paceline.runtime.settings import ServiceSettings, settings_table

ROOT = Path(__file__).resolve().parents[2]


SERVICES = [("verifier", VerifierSettings), ("drafter", DrafterSettings), ("gateway", GatewaySettings)]


@pytest.mark.parametrize(("service", "settings_class"), SERVICES)
def test_settings_table_is_the_code_s(service: str, settings_class: type[ServiceSettings]) -> None:
    readme = (ROOT / "services" / service / "README.md").read_text(encoding="utf-8")
    table = settings_table(settings_class)
    assert table in readme, f"put this table into services/{service}/README.md:\n\n{table}"


@pytest.mark.parametrize("settings_class", [settings_class for _, settings_class in SERVICES])
def test_every_setting_says_what_it_is(settings_class: type[ServiceSettings]) -> None:
    assert [name for name, field in settings_class.model_fields.items() if not field.description] == []
