"""Containers as a careful operator runs them, and the fleet that the tests talk to."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.containers.engine import Engine

UID = 65532
MODEL_NAME = "smollm2-135m-instruct"
STOP_GRACE_S = 60
SERVICE_NAMES = {
    "gateway": ("gateway:7400", "paceline.v1.Generation"),
    "verifier": ("verifier:50052", "paceline.v1.Verifier"),
    "drafter": ("drafter:50053", "paceline.v1.Drafter"),
}
"""Address on the fleet's network and gRPC service of each."""

_CLIENT = (Path(__file__).parent / "client.py").read_text(encoding="utf-8")
_HARDENED = (
    *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", f"{UID}:{UID}"),
    *("--pids-limit", "256", "--tmpfs", "/tmp:size=256m,mode=1777"),
)
# The Valkey server that comes with the library, on all interfaces of its container.
_VALKEY = """
import os
from paceline.session.embedded import find_server
server = str(find_server())
os.execv(server, [server, "--bind", "0.0.0.0", "--protected-mode", "no", "--save", "", "--dir", "/tmp"])
"""


@dataclass(slots=True)
class Site:
    """One private network on an engine and what runs on it.

    Attributes:
        engine: where.
        images: reference of each service's image.
        name: of the network; begins the names of all containers.
        containers: names of the containers that were started here.
    """

    engine: Engine
    images: dict[str, str]
    name: str
    containers: list[str] = field(default_factory=list)

    def open(self) -> None:
        """Makes the network, from which nothing outside can be reached."""
        self.engine.run("network", "create", "--internal", self.name)

    def close(self) -> None:
        """Removes everything."""
        self.close_containers()
        self.engine.run("network", "rm", self.name)

    def close_containers(self) -> None:
        """Removes the containers."""
        if self.containers:
            self.engine.run("rm", "--force", "--volumes", *self.containers)
            self.containers.clear()

    def start(self, alias: str, image: str, options: list[str], arguments: list[str]) -> str:
        """Starts a container that others reach as `alias`; returns its name."""
        container = f"{self.name}-{alias}"
        self.containers.append(container)
        network = ["--network", self.name, "--network-alias", alias]
        self.engine.run("run", "--detach", "--name", container, *network, *_HARDENED, *options, image, *arguments)
        return container

    def ask(self, *arguments: str) -> list[dict[str, Any]]:
        """What `client.py` says when it is run on the network."""
        said = self.engine.run(*self._client_command(arguments), stdin=_CLIENT)
        return [json.loads(line) for line in said.splitlines()]

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        """The same, while it runs."""
        process = self.engine.start(*self._client_command(arguments))
        assert process.stdin is not None
        process.stdin.write(_CLIENT)
        process.stdin.close()
        process.stdin = None  # `communicate` would write to it
        return process

    def _client_command(self, arguments: tuple[str, ...]) -> list[str]:
        run = ["run", "--rm", "--interactive", "--network", self.name, *_HARDENED, "--memory", "512m"]
        return [*run, "--entrypoint", "python", self.images["gateway"], "-", *arguments]

    def wait_until_serving(self, service: str) -> None:
        """Returns when the gRPC health of a service's container says so."""
        address, rpc_service = SERVICE_NAMES[service]
        try:
            self.ask("wait", address, rpc_service)
        except AssertionError as error:
            raise AssertionError(f"{error}; {service} said: {self.log(f'{self.name}-{service}')}") from None

    def log(self, container: str) -> str:
        """All that a container wrote."""
        done = subprocess.run(
            [self.engine.client, "logs", container],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
            env=self.engine.environment,
        )
        return done.stdout


@dataclass(frozen=True, slots=True)
class Models:
    """Folders to mount: the target and its quantised copy for drafting."""

    target: Path
    draft: Path


def start_fleet(site: Site, models: Models) -> dict[str, float]:
    """Starts Valkey, verifier, drafter and gateway; settings come by flag and by environment.

    Returns:
        Seconds from `docker run` to healthy, by service.
    """
    valkey = ["--memory", "128m", "--entrypoint", "python"]
    site.start("valkey", site.images["gateway"], valkey, ["-c", _VALKEY])
    started_s = time.monotonic()
    site.start(
        "verifier",
        site.images["verifier"],
        [*_mount(models.target), "--memory", "3g", "--env", f"PACELINE_VERIFIER_KV_CACHE_BYTES={256 * 2**20}"],
        ["--model", "/model", "--model-name", MODEL_NAME],
    )
    site.start(
        "drafter",
        site.images["drafter"],
        [*_mount(models.draft), "--memory", "2g", "--env", "PACELINE_DRAFTER_MODEL=/model"],
        ["--method", "ngram,draft_model", "--model-name", MODEL_NAME],
    )
    site.start(
        "gateway",
        site.images["gateway"],
        [*_mount(models.target), "--memory", "512m", "--env", "PACELINE_GATEWAY_REDIS_URL=redis://valkey:6379"],
        ["--model", "/model", "--model-name", MODEL_NAME, "--verifiers=verifier:50052", "--drafters=drafter:50053"],
    )
    seconds = {}
    for service in ("verifier", "drafter", "gateway"):
        site.wait_until_serving(service)
        seconds[service] = time.monotonic() - started_s
    return seconds


def _mount(folder: Path) -> list[str]:
    return ["--volume", f"{folder}:/model:ro", "--tmpfs", f"/cache:size=64m,uid={UID},gid={UID},mode=700"]
