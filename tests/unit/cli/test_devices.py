"""Devices that are not there, told before a fleet starts."""

from __future__ import annotations

import pytest

from paceline.cli import devices
from paceline.cli.devices import check_devices, why_unusable
from paceline.cli.fleet_options import FleetOptions
from paceline.errors import ConfigurationError


@pytest.mark.parametrize(
    ("device", "words"),
    [("cuda:0", "sees no CUDA device"), ("gpu", "it is no device"), ("meta", "models do not run on meta")],
)
def test_a_device_that_cannot_be_used(device: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert words in why_unusable(device)
    assert "\n" not in why_unusable(device)


async def test_only_devices_that_a_model_needs_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def ask(device: str) -> str:
        asked.append(device)
        return "it is far away"

    monkeypatch.setattr(devices, "_ask", ask)
    await check_devices(FleetOptions(drafter_device="cuda:1", method="ngram"))
    assert asked == []
    with pytest.raises(ConfigurationError, match=r"^--verifier-device cuda:7 .*: it is far away$") as caught:
        await check_devices(FleetOptions(verifier_device="cuda:7"))
    assert caught.value.field == "verifier_device"
    with pytest.raises(ConfigurationError, match="--drafter-device cuda:1"):
        await check_devices(FleetOptions(drafter_device="cuda:1", drafter_model="other"))
    assert asked == ["cuda:7", "cuda:1"]
