"""What the documents name exists: files, make targets, commands with their options."""

from __future__ import annotations

import functools
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from paceline_drafter.settings import DrafterSettings
from paceline_gateway.settings import GatewaySettings
from paceline_verifier.settings import VerifierSettings
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from paceline.cli import train_run
from paceline.cli.app import app
from paceline.runtime.settings import ServiceSettings, load_settings

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    document
    for pattern in ("*.md", "docs/**/*.md", "services/*/README.md", "bench/**/*.md", "models/*.md")
    for document in ROOT.glob(pattern)
)
_FOLDERS = "src|services|tests|bench|docs|proto|k8s|models|scripts"
_PATH = re.compile(rf"(?<![\w./-])((?:{_FOLDERS})/[\w./*-]*[\w*])")
_LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
_FENCE = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_LABELLED_FENCE = re.compile(r"^```([a-z]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SHELLS = ("sh", "shell", "bash", "console")
_VARIABLES = re.compile(r"^(?:[A-Z_]+=\S* +)+")

_CHECKED_PROGRAMS = {
    "make": "a target of the Makefile, see below",
    "paceline": "parsed by its own command line, see below",
    "pip": "its packages and extras are looked up, see below",
    "curl": "run by tests/e2e/test_readme.py",
    "helm": "run by tests/chart/test_docs.py, as far as it can be without a cluster",
    "kubectl": "its Services and ports are looked up by tests/chart/test_docs.py",
}
"""What a block of shell commands may hold, and where it is checked."""

_SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "verifier": VerifierSettings,
    "drafter": DrafterSettings,
}


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def fenced_lines(text: str) -> list[str]:
    """Lines of fenced blocks with continued ones joined and comments removed."""
    fenced = [line for block in _FENCE.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    return [line.split("  #")[0].strip() for line in fenced]


def code_lines(text: str) -> list[str]:
    """Lines of fenced blocks, and inline code."""
    return fenced_lines(text) + _INLINE.findall(_FENCE.sub("", text))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_path_that_is_named_exists(document: Path) -> None:
    text = document.read_text()
    missing = [path for path in set(_PATH.findall(text)) if not list(ROOT.glob(path.rstrip("/.")))]
    missing += [link for link in set(_LINK.findall(text)) if not (document.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_make_target_that_is_named_exists(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"help", "demo", "test"} <= targets
    named = {
        match.group(1)
        for line in code_lines(document.read_text())
        if (match := re.match(r"make ([a-z][a-z-]*)\b", line))
    }
    assert named <= targets


@functools.cache
def program() -> TyperGroup:
    """The command line with all its subcommands; made from their signatures, which takes a while."""
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    return group


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_command_that_is_named_parses(document: Path) -> None:
    group = program()
    for line in code_lines(document.read_text()):
        match = re.match(r"(?:\.venv/bin/)?paceline ([a-z].*)", line)
        if match is None or "|" in match.group(1):
            continue
        name, *arguments = shlex.split(match.group(1))
        command = group.get_command(group.make_context("paceline", [], resilient_parsing=True), name)
        assert command is not None, line
        if name == "serve" and len(arguments) > 1 and "--help" not in arguments:
            load_settings(_SETTINGS[arguments[0]], arguments[1:])
        # Inline code often names a command without its arguments; in a block it must be complete.
        complete = bool(arguments)
        command.make_context(name, arguments, resilient_parsing=not complete)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_training_that_is_shown_would_begin(document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []
    for name in ("run_train", "run_collect"):
        monkeypatch.setattr(train_run, name, lambda options, json_output: begun.append(options))
    shown = [line for line in fenced_lines(document.read_text()) if line.startswith("paceline train ")]
    for line in shown:
        result = CliRunner().invoke(app, shlex.split(line)[1:])
        assert result.exit_code == 0, f"{line}: {result.stderr}"
    assert len(begun) == len(shown)


def programs_of(block: str) -> list[str]:
    """The program of each line of a shell block."""
    lines = [line for line in block.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    return [_VARIABLES.sub("", line).split()[0].removeprefix(".venv/bin/") for line in lines]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_shell_command_is_one_that_is_checked(document: Path) -> None:
    for label, block in _LABELLED_FENCE.findall(document.read_text()):
        programs = programs_of(block)
        # A block without a label is a shell block if it begins like one; else it is output or a drawing.
        if label in _SHELLS or (not label and programs[:1] and programs[0] in _CHECKED_PROGRAMS):
            assert set(programs) <= _CHECKED_PROGRAMS.keys()


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_command_for_a_cluster_is_one_that_the_chart_s_tests_read(document: Path) -> None:
    read_by_them = code_lines((ROOT / "docs" / "kubernetes.md").read_text())
    lines = [line for line in code_lines(document.read_text()) if re.match(r"(helm|kubectl) [a-z-]+ ", line)]
    unknown = [line for line in lines if shlex.split(line) not in [shlex.split(known) for known in read_by_them]]
    assert not unknown


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_local_package_that_pip_shall_install_exists(document: Path) -> None:
    for line in code_lines(document.read_text()):
        if re.match(r"(?:\.venv/bin/)?(?:uv )?pip install ", line) is None:
            continue
        for folder, extras in re.findall(r"(?:-e|--editable) '?([\w./-]+)(?:\[([\w,-]+)\])?'?", line):
            project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
            assert set(filter(None, extras.split(","))) <= project.get("optional-dependencies", {}).keys(), line


def test_the_readme_shows_the_two_commands_first() -> None:
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:60])
    assert "make demo" in first_screen
    assert "make test" in first_screen


def test_every_service_carries_the_licence() -> None:
    licence = (ROOT / "LICENSE").read_text()
    for folder in ROOT.glob("services/*/"):
        assert (folder / "LICENSE").read_text() == licence
