"""The engine, the images and the fleet of these tests, and the table of figures at their end."""

from __future__ import annotations

import subprocess
import time
import uuid
from collections.abc import Iterator

import pytest

from paceline.model_source import resolve
from paceline.quantize import quantize
from tests.containers.engine import Engine, NoEngine, engine
from tests.containers.fleet import MODEL_NAME, Models, Site, start_fleet
from tests.containers.supplies import ROOT, offline_build_arguments, readable_copy

_FIGURES = pytest.StashKey[list[tuple[str, str]]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints the figures."""
    figures = config.stash.get(_FIGURES, [])
    if figures:
        terminalreporter.section("containers")
    for what, figure in figures:
        terminalreporter.write_line(f"{what:<44} {figure:>12}")


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> list[tuple[str, str]]:
    """What was measured: what, and how much."""
    return pytestconfig.stash.setdefault(_FIGURES, [])


@pytest.fixture(scope="session")
def docker(figures: list[tuple[str, str]]) -> Iterator[Engine]:
    started_s = time.monotonic()
    try:
        with engine() as running:
            figures.append(("engine", "private" if running.private else "as found"))
            yield running
            figures.append(("all of it, to the last container gone", f"{time.monotonic() - started_s:.0f} s"))
    except NoEngine as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def images(docker: Engine, figures: list[tuple[str, str]]) -> Iterator[dict[str, str]]:
    """References of the three images, built by `make images`."""
    tag = f"test-{uuid.uuid4().hex[:8]}"
    arguments = offline_build_arguments(docker) if docker.private else []
    built = {}
    for service in ("gateway", "verifier", "drafter"):
        started_s = time.monotonic()
        variables = {"CONTAINER_TOOL": docker.client, "SERVICES": service, "IMAGE_TAG": tag}
        variables["IMAGE_ARGS"] = " ".join(arguments)
        done = subprocess.run(
            ["make", "images", *(f"{name}={value}" for name, value in variables.items())],
            cwd=ROOT,
            env=docker.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        built[service] = f"paceline-{service}:{tag}"
        size = int(docker.run("image", "inspect", "--format", "{{.Size}}", built[service]))
        figures.append((f"paceline-{service}, size", f"{size / 1e6:.0f} MB"))
        figures.append((f"paceline-{service}, build", f"{time.monotonic() - started_s:.0f} s"))
    yield built
    if not docker.private:
        docker.run("image", "rm", "--force", *built.values())


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The demo's target and its int8 copy, readable by any user."""
    folder = tmp_path_factory.mktemp("models")
    return Models(
        readable_copy(resolve(MODEL_NAME), folder / "target"), readable_copy(quantize(MODEL_NAME), folder / "draft")
    )


@pytest.fixture
def site(docker: Engine, images: dict[str, str]) -> Iterator[Site]:
    """A network of its own, with nothing on it."""
    empty = Site(docker, images, f"paceline-{uuid.uuid4().hex[:8]}")
    empty.open()
    yield empty
    empty.close()


@pytest.fixture(scope="module")
def fleet(docker: Engine, images: dict[str, str], models: Models, figures: list[tuple[str, str]]) -> Iterator[Site]:
    """A fleet that serves."""
    running = Site(docker, images, f"paceline-{uuid.uuid4().hex[:8]}")
    running.open()
    try:
        for service, seconds in start_fleet(running, models).items():
            figures.append((f"{service}, from run to healthy", f"{seconds:.1f} s"))
        yield running
    finally:
        running.close()
