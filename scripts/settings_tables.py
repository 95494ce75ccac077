"""Writes the settings tables into the services' READMEs, from the settings classes. `tests/contract` checks them."""

from __future__ import annotations

import re
from pathlib import Path

from paceline_drafter.settings import DrafterSettings
from paceline_gateway.settings import GatewaySettings
from paceline_verifier.settings import VerifierSettings

from paceline.runtime.settings import ServiceSettings, settings_table

ROOT = Path(__file__).resolve().parents[1]
CLASSES: dict[str, type[ServiceSettings]] = {
    "drafter": DrafterSettings,
    "gateway": GatewaySettings,
    "verifier": VerifierSettings,
}
TABLE = re.compile(r"^\| flag \| environment .*?(?=\n(?!\|)|\Z)", re.DOTALL | re.MULTILINE)


def main() -> None:
    for service, settings_class in CLASSES.items():
        readme = ROOT / "services" / service / "README.md"
        table = settings_table(settings_class)
        text = readme.read_text("utf-8")
        old = TABLE.search(text)
        if old is None:
            raise SystemExit(f"{readme} has no settings table")
        readme.write_text(text[: old.start()] + table + text[old.end() :], "utf-8")


if __name__ == "__main__":
    main()
