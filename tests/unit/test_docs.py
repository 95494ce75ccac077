"""What the documents name exists: files, make targets, commands with their options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from paceline_drafter.settings import DrafterSettings
from paceline_gateway.settings import GatewaySettings
from paceline_verifier.settings import VerifierSettings
from typer.main import get_command

from paceline.cli.app import app
from paceline.runtime.settings import ServiceSettings, load_settings

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("services/*/README.md"), *ROOT.glob("bench/**/*.md")]
)
_FOLDERS = "src|services|tests|bench|docs|proto|k8s|models|scripts"
_PATH = re.compile(rf"(?<![\w./-])((?:{_FOLDERS})/[\w./*-]*[\w*])")
_LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
_FENCE = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_WILDCARD = re.compile(r"[*<{]")

_SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "verifier": VerifierSettings,
    "drafter": DrafterSettings,
}


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def code_lines(text: str) -> list[str]:
    """Lines of fenced blocks with continued ones joined and comments removed, and inline code."""
    fenced = [line for block in _FENCE.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    return [line.split("  #")[0].strip() for line in fenced] + _INLINE.findall(_FENCE.sub("", text))


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


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_command_that_is_named_parses(document: Path) -> None:
    group = get_command(app)
    for line in code_lines(document.read_text()):
        match = re.match(r"(?:\.venv/bin/)?paceline ([a-z].*)", line)
        if match is None or "|" in match.group(1):
            continue
        name, *arguments = shlex.split(match.group(1))
        command = group.get_command(group.make_context("paceline", [], resilient_parsing=True), name)  # type: ignore[attr-defined]
        assert command is not None, line
        if name == "serve" and len(arguments) > 1 and "--help" not in arguments:
            load_settings(_SETTINGS[arguments[0]], arguments[1:])
        # Inline code often names a command without its arguments; in a block it must be complete.
        complete = bool(arguments)
        command.make_context(name, arguments, resilient_parsing=not complete)


def test_the_readme_shows_the_two_commands_first() -> None:
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:60])
    assert "make demo" in first_screen
    assert "make test" in first_screen


def test_every_service_carries_the_licence() -> None:
    licence = (ROOT / "LICENSE").read_text()
    for folder in ROOT.glob("services/*/"):
        assert (folder / "LICENSE").read_text() == licence
