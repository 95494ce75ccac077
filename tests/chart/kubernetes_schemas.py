"""Strict validation against the schemas of a Kubernetes version; `kubernetes_validate` itself reads them every time."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from referencing import Registry, Resource

from tests.chart.helm import Manifest

_SCHEMAS = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
NEWEST = kubernetes_validate.latest_version().rpartition(".")[0]
NOT_KUBERNETES = {("monitoring.coreos.com/v1", "PodMonitor")}
"""Kinds of others, for which there is no schema: a test looks at each by hand."""


def problems(manifest: Manifest, version: str) -> list[str]:
    """What is wrong with an object, a kind that is not known included."""
    if (manifest["apiVersion"], manifest["kind"]) in NOT_KUBERNETES:
        return []
    validator = _validator(manifest["apiVersion"], manifest["kind"], version)
    if validator is None:
        return [f"Kubernetes {version} has no {manifest['apiVersion']} {manifest['kind']}"]
    name = f"{manifest['kind']}/{manifest['metadata']['name']}"
    return [
        f"{name}: {'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in validator.iter_errors(manifest)
    ]


@functools.cache
def _validator(api_version: str, kind: str, version: str) -> Draft202012Validator | None:
    group, _, number = api_version.rpartition("/")
    suffix = f"{group.split('.')[0]}-{number}" if group else number
    file = _folder(version) / f"{kind.lower()}-{suffix}.json"
    if not file.is_file():
        return None
    return Draft202012Validator(_read(file), registry=_definitions(version))


@functools.cache
def _definitions(version: str) -> Registry[Any]:
    return Resource.from_contents(_read(_folder(version) / "_definitions.json")) @ Registry()


def _folder(version: str) -> Path:
    (folder,) = _SCHEMAS.glob(f"v{version}.*-local-strict")
    return folder


def _read(file: Path) -> Any:
    return json.loads(file.read_text("utf-8"))
