"""What the Makefile says to a newcomer: how to go on, and what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_BUILDX = 'echo "ERROR: BuildKit is enabled but the buildx component is missing or broken." >&2; exit 1'


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    # As from a shell, although the tests themselves may have been started by make.
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    }
    return subprocess.run(
        ["make", *arguments], capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=60
    )


def program(path: Path, script: str) -> Path:
    """A shell script in the place of a tool that need not be installed here."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_setup_says_how_to_run_the_program() -> None:
    assert ". .venv/bin/activate" in make("--dry-run", "setup").stdout.splitlines()[-1]


def test_images_without_a_tool() -> None:
    done = make("images", "CONTAINER_TOOL=no-such-tool")
    assert done.returncode == 2
    (line,) = done.stdout.splitlines()
    assert line.startswith("No no-such-tool found: ")
    assert "CONTAINER_TOOL=" in line
    assert "docs/images.md" in line


def test_images_with_a_docker_that_cannot_build(tmp_path: Path) -> None:
    docker = program(tmp_path / "docker", WITHOUT_BUILDX)
    done = make("images", f"CONTAINER_TOOL={docker}")
    assert done.returncode == 2
    (line,) = done.stdout.splitlines()
    assert "buildx" in line
    assert "docs/images.md" in line
    assert "BuildKit is enabled" not in done.stderr


def test_images_with_a_tool_that_builds(tmp_path: Path) -> None:
    tool = program(tmp_path / "tool", 'echo "$@"')
    done = make("images", f"CONTAINER_TOOL={tool}", "SERVICES=gateway drafter", "IMAGE_TAG=t")
    assert done.returncode == 0, done.stderr
    gateway, drafter = done.stdout.splitlines()
    assert gateway.startswith("build --file services/gateway/Dockerfile --tag paceline-gateway:t ")
    assert drafter.startswith("build --file services/drafter/Dockerfile --tag paceline-drafter:t ")


@pytest.mark.parametrize("given", [True, False], ids=["given", "cached"])
def test_chart_tools_prints_both_paths(tmp_path: Path, given: bool) -> None:
    helms = [program(tmp_path / f"helm{major}", f"echo v{major}.0.0") for major in (3, 4)]
    command = [sys.executable, "scripts/kubernetes_tools.py"]
    flags = ["--helm3", str(helms[0]), "--helm4", str(helms[1])]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    for arguments in [flags] if given else [flags, []]:
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=60
        )
    assert done.returncode == 0, done.stderr
    paths = [Path(line.partition(": ")[2]) for line in done.stdout.splitlines()]
    assert [path.read_bytes() for path in paths] == [helm.read_bytes() for helm in helms]
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["Helm 3", "Helm 4"]
