"""Writes the services' settings into the schema of the chart's values, from the settings classes.

So `gateway.settings` and the pools' `settings` take exactly what the services take, with their limits, except what
other values of the chart decide. `tests/chart` checks that the schema is up to date.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline_drafter.settings import DrafterSettings
from paceline_gateway.settings import GatewaySettings
from paceline_verifier.settings import VerifierSettings

from paceline.method_names import CUT_METHODS, HEAD_METHODS, POOL_METHODS, SELF_DRAFT_METHODS
from paceline.runtime.settings import ServiceSettings

SCHEMA_FILE = Path(__file__).resolve().parents[1] / "k8s" / "chart" / "values.schema.json"
CLASSES: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "verifier": VerifierSettings,
    "drafter": DrafterSettings,
}
_KEPT = ("type", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "items", "minLength", "pattern")

OWNED_BY_THE_CHART = frozenset(
    {
        *("host", "port", "metrics_port", "http_port", "ready_file", "parent_pid"),
        *("tls_cert_file", "tls_key_file", "tls_client_ca_file", "drain_timeout_s", "log_level", "log_format"),
        *("model", "model_name", "method", "device", "dtype", "kv_cache_bytes"),
        *("self_draft_method", "self_draft_model", "draft_head"),
        *("verifiers", "drafters", "api_keys_file", "redis_url"),
        *("link_tls", "link_tls_ca_file", "link_tls_cert_file", "link_tls_key_file", "link_tls_server_name"),
    }
)
"""Settings that other values of the chart decide."""


def settings_schema(settings_class: type[ServiceSettings]) -> dict[str, Any]:
    """A JSON schema (draft 7) of a service's settings under their own names, without those that the chart decides."""
    properties = {
        name: _simple(field)
        for name, field in settings_class.model_json_schema()["properties"].items()
        if name not in OWNED_BY_THE_CHART
    }
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _simple(field: dict[str, Any]) -> dict[str, Any]:
    """One type instead of `anyOf`, whose violations Helm reports badly; null is what the chart leaves out."""
    choices = [choice for choice in field.get("anyOf", [field]) if choice.get("type") != "null"]
    if len(choices) != 1:
        raise SystemExit(f"a setting of several types needs a rule here: {field}")
    kept = {key: choices[0][key] for key in _KEPT if key in choices[0]}
    return kept | ({"description": field["description"]} if "description" in field else {})


def updated(schema: dict[str, Any]) -> dict[str, Any]:
    """The chart's schema with the settings and the drafting methods as the code has them now."""
    current: dict[str, Any] = {
        f"{service}Settings": settings_schema(settings_class) for service, settings_class in CLASSES.items()
    }
    methods = [*POOL_METHODS, *HEAD_METHODS, *CUT_METHODS]
    current["methods"] = {"type": "array", "items": {"enum": methods}, "minItems": 1, "uniqueItems": True}
    current["selfDraftMethod"] = {"enum": ["none", *SELF_DRAFT_METHODS]}
    return schema | {"definitions": schema["definitions"] | current}


def main() -> None:
    schema = json.loads(SCHEMA_FILE.read_text("utf-8"))
    SCHEMA_FILE.write_text(json.dumps(updated(schema), indent=2, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
