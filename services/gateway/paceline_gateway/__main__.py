"""Wires the gateway: `python -m paceline_gateway --model MODEL --verifiers HOST:PORT --drafters HOST:PORT`."""

from __future__ import annotations

from paceline.runtime.process import main
from paceline_gateway.service import GatewayService
from paceline_gateway.settings import GatewaySettings

if __name__ == "__main__":
    main("gateway", GatewaySettings, GatewayService)
