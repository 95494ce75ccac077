"""Runs the real Helm binaries on the chart and reads what they render."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scripts.kubernetes_tools import HELM_RELEASES, HelmRelease

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "k8s" / "chart"
EXAMPLES = sorted((ROOT / "k8s" / "examples").glob("*.yaml"))
OLDEST_KUBERNETES = "1.29"
HELM_3, HELM_4 = HELM_RELEASES

Manifest = dict[str, Any]


class _StrictLoader(yaml.CSafeLoader):
    """Refuses a key that is given twice: an API server does too, and YAML libraries do not."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"given twice: {sorted(twice)}", node.start_mark)
        return super().construct_mapping(node, deep)


@dataclass(frozen=True, slots=True)
class Ended:
    """What a run of Helm left."""

    code: int
    output: str
    errors: str


@dataclass(frozen=True, slots=True)
class Rendered:
    """The objects of a release.

    Attributes:
        manifests: all objects, in an order that does not depend on Helm's version.
    """

    manifests: tuple[Manifest, ...]

    def all(self, kind: str) -> list[Manifest]:
        """All objects of a kind."""
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    def one(self, kind: str, name: str) -> Manifest:
        """The object of that kind and name."""
        (found,) = [manifest for manifest in self.all(kind) if manifest["metadata"]["name"] == name]
        return found

    def workloads(self) -> list[Manifest]:
        """Deployments and StatefulSets."""
        return self.all("Deployment") + self.all("StatefulSet")

    def pods(self) -> Iterator[tuple[str, Manifest]]:
        """Name and pod spec of everything that runs."""
        for manifest in self.workloads():
            yield manifest["metadata"]["name"], manifest["spec"]["template"]["spec"]
        for manifest in self.all("Pod"):
            yield manifest["metadata"]["name"], manifest["spec"]

    def containers(self) -> Iterator[tuple[str, Manifest]]:
        """Name and spec of every container, init containers included."""
        for name, pod in self.pods():
            for container in [*pod.get("initContainers", []), *pod["containers"]]:
                yield f"{name}/{container['name']}", container


def run_helm(release: HelmRelease, *arguments: str, given: str = "") -> Ended:
    """Runs one version of Helm.

    Args:
        release: the version.
        arguments: of Helm.
        given: standard input.
    """
    assert release.path.is_file(), f"there is no {release.path}: run `make chart-tools`"
    command = [str(release.path), *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=60)
    return Ended(done.returncode, done.stdout, done.stderr)


def template(
    values: Mapping[str, Any], helm: HelmRelease = HELM_4, *, release: str = "fleet", namespace: str = "serving"
) -> Ended:
    """Renders the chart with these values over its own."""
    return _template(json.dumps(values, sort_keys=True), helm, release, namespace)


@functools.cache
def _template(values: str, helm: HelmRelease, release: str, namespace: str) -> Ended:
    return run_helm(
        helm,
        *("template", release, str(CHART), "--namespace", namespace),
        *("--kube-version", OLDEST_KUBERNETES, "--values", "-"),
        given=values,
    )


def render(
    values: Mapping[str, Any] | None = None,
    helm: HelmRelease = HELM_4,
    *,
    release: str = "fleet",
    namespace: str = "serving",
) -> Rendered:
    """The objects that the chart makes of these values."""
    done = template(values or {}, helm, release=release, namespace=namespace)
    assert done.code == 0, done.errors
    return Rendered(parse(done.output))


@functools.lru_cache(maxsize=128)
def parse(text: str) -> tuple[Manifest, ...]:
    """The objects of a multi-document text."""
    manifests = [manifest for manifest in yaml.load_all(text, Loader=_StrictLoader) if manifest]
    return tuple(sorted(manifests, key=lambda manifest: (manifest["kind"], manifest["metadata"]["name"])))


def environment(container: Manifest) -> dict[str, Any]:
    """Name and value of a container's variables; of those that come from elsewhere, the source."""
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container.get("env", [])}
