"""What the Dockerfiles promise and can be read off them; `make test-containers` builds and runs them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from paceline_drafter.settings import DrafterSettings
from paceline_gateway.settings import GatewaySettings
from paceline_verifier.settings import VerifierSettings

from paceline.cli.serve import GRPC_CORE
from paceline.runtime.settings import ServiceSettings
from scripts.image_requirements import requirements

ROOT = Path(__file__).resolve().parents[2]
SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "verifier": VerifierSettings,
    "drafter": DrafterSettings,
}
PORTS = {"gateway": {"7400", "8000", "9400"}, "verifier": {"50052", "9400"}, "drafter": {"50053", "9400"}}

Instruction = tuple[str, str]
"""Its name and the rest of it, continuation lines joined."""


def instructions(text: str) -> list[Instruction]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(name.upper(), rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines())]


def last_stage(found: list[Instruction]) -> list[Instruction]:
    return found[max(index for index, (name, _) in enumerate(found) if name == "FROM") :]


def environment(found: list[Instruction]) -> dict[str, str]:
    pairs = [pair for name, rest in found if name == "ENV" for pair in rest.split()]
    return dict(pair.split("=", 1) for pair in pairs)


@pytest.fixture(params=sorted(SETTINGS))
def service(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def dockerfile(service: str) -> list[Instruction]:
    return instructions((ROOT / "services" / service / "Dockerfile").read_text(encoding="utf-8"))


def test_runs_as_nobody_in_particular(dockerfile: list[Instruction]) -> None:
    names = [name for name, _ in last_stage(dockerfile)]
    assert [rest for name, rest in dockerfile if name == "USER"] == ["65532:65532"]
    assert not {"RUN", "COPY"} & set(names[names.index("USER") :]), "nothing of the image belongs to its user"


def test_process_gets_flags_and_signals(service: str, dockerfile: list[Instruction]) -> None:
    (entrypoint,) = [rest for name, rest in dockerfile if name == "ENTRYPOINT"]
    assert json.loads(entrypoint) == ["python", "-m", f"paceline_{service}"]
    assert "CMD" not in [name for name, _ in dockerfile]


def test_environment_names_are_settings(service: str, dockerfile: list[Instruction]) -> None:
    prefix = f"PACELINE_{service.upper()}_"
    set_here = {name: value for name, value in environment(last_stage(dockerfile)).items() if "PACELINE" in name}
    assert all(name.startswith(prefix) for name in set_here)
    values = {name.removeprefix(prefix).lower(): value for name, value in set_here.items()}
    assert values.keys() <= SETTINGS[service].model_fields.keys()
    needed = {"model": "m"} if "model" in SETTINGS[service].model_fields else {}
    checked = SETTINGS[service].model_validate({**needed, **values})
    assert checked.host == "0.0.0.0"
    assert checked.log_format == "json"


def test_ports_are_those_that_are_exposed(service: str, dockerfile: list[Instruction]) -> None:
    ports = {value for name, value in environment(last_stage(dockerfile)).items() if name.endswith("PORT")}
    exposed = {port for name, rest in dockerfile if name == "EXPOSE" for port in rest.split()}
    assert ports == exposed == PORTS[service]


def test_only_two_folders_are_written_to(dockerfile: list[Instruction]) -> None:
    set_here = environment(last_stage(dockerfile))
    assert set_here["PYTHONDONTWRITEBYTECODE"] == "1"
    assert set_here["HOME"] == "/tmp"
    assert set_here["XDG_CACHE_HOME"] == "/cache"
    assert set_here["HF_HOME"] == "/cache/huggingface"


def test_grpc_is_run_as_on_one_machine(dockerfile: list[Instruction]) -> None:
    set_here = environment(last_stage(dockerfile))
    assert {name: value for name, value in set_here.items() if name.startswith("GRPC_")} == GRPC_CORE


def test_build_takes_nothing_from_elsewhere_but_packages(dockerfile: list[Instruction]) -> None:
    text = "\n".join(f"{name} {rest}" for name, rest in dockerfile)
    assert "ADD" not in [name for name, _ in dockerfile]
    assert not re.search(r"\b(curl|wget|git clone)\b", text)
    assert "--constraint constraints.txt" in text


def test_dependencies_come_before_the_source(service: str, dockerfile: list[Instruction]) -> None:
    copies = [rest for name, rest in dockerfile if name == "COPY" and "--from" not in rest]
    assert copies.index(f"services/{service}/pyproject.toml services/{service}/") < copies.index("src src")
    assert [rest for name, rest in last_stage(dockerfile) if name == "COPY"] == [
        "--from=dependencies /opt/venv /opt/venv",
        "--from=packages /opt/paceline /opt/paceline",
    ]


def test_no_syntax_line_that_would_have_to_be_fetched(service: str) -> None:
    text = (ROOT / "services" / service / "Dockerfile").read_text(encoding="utf-8")
    assert not re.search(r"^#\s*syntax\s*=", text, re.MULTILINE)


def test_builds_see_only_what_they_copy() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    let_in = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    copied: set[str] = set()
    for service in SETTINGS:
        text = (ROOT / "services" / service / "Dockerfile").read_text(encoding="utf-8")
        for name, rest in instructions(text):
            if name == "COPY" and "--from" not in rest:
                copied |= {Path(source).parts[0] for source in rest.split()[:-1]}
    assert {Path(path).parts[0] for path in let_in} == copied
    assert all((ROOT / path).exists() for path in let_in)
    assert "**/__pycache__" in rules


@pytest.mark.parametrize("service", SETTINGS)
def test_requirements_are_the_service_s_and_the_library_s(service: str) -> None:
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in requirements(service)}
    assert {"grpcio", "redis"} <= names
    assert ("torch" in names) == (service != "gateway")
    assert ("uvicorn" in names) == (service == "gateway")
    assert not any(name.startswith("paceline") for name in names)
    assert "onnxruntime-genai" in {requirement.split(">")[0] for requirement in requirements(service, ["onnx"])}
