"""Who may import whom: the contracts of .importlinter, and a gateway that lives without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

_IMPORT_ALL = """
import importlib, importlib.abc, pkgutil, sys

BLOCKED = {blocked!r}

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED or name in BLOCKED:
            raise ImportError(f"{{name}} is blocked by the test")
        return None

sys.meta_path.insert(0, Blocker())
package = importlib.import_module({package!r})
names = [package.__name__] + [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""
_MODELS = ("torch", "transformers", "safetensors", "onnxruntime_genai", "onnxruntime", "accelerate", "gguf")


def _import_all(package: str, blocked: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    code = _IMPORT_ALL.format(package=package, blocked=blocked)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120, cwd=ROOT
    )


def lint_imports(config: Path) -> int:
    """Exit status of import-linter; in a process of its own, because it disables the loggers of the one it runs in."""
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program, "--config", config, "--no-cache"], capture_output=True, check=False, cwd=ROOT)
    return done.returncode


def test_import_contracts() -> None:
    assert lint_imports(ROOT / ".importlinter") == 0


def test_broken_contract_is_found(tmp_path: Path) -> None:
    text = (ROOT / ".importlinter").read_text(encoding="utf-8")
    broken = tmp_path / ".importlinter"
    # The drafter does import torch: forbidding it there must fail.
    broken.write_text(text.replace("source_modules =\n    paceline_gateway", "source_modules =\n    paceline_drafter"))
    assert lint_imports(broken) == 1


@pytest.mark.parametrize("package", ["paceline_gateway", "paceline.text", "paceline.session", "paceline.wire"])
def test_package_lives_without_models(package: str) -> None:
    completed = _import_all(package, _MODELS)
    assert completed.returncode == 0, completed.stderr
    assert int(completed.stdout) >= 3


def test_gateway_lives_without_engine_and_drafting() -> None:
    blocked = ("paceline.engine", "paceline.drafting", "paceline.speculation.acceptance", "paceline.speculation.noise")
    completed = _import_all("paceline_gateway", (*_MODELS, *blocked))
    assert completed.returncode == 0, completed.stderr


def test_blocker_blocks() -> None:
    completed = _import_all("paceline.engine", _MODELS)
    assert completed.returncode != 0
    assert "blocked by the test" in completed.stderr
