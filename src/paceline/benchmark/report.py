"""Writes a benchmark's result as JSON, with the machine, the version and the commit it was measured on."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from paceline import __version__

_PACKAGES = ("torch", "transformers", "onnxruntime-genai", "grpcio", "redis", "fastapi", "uvicorn", "openai")


def write_report(benchmark: str, results: Any, folder: Path) -> Path:
    """Writes {"benchmark", "time", "version", "commit", "machine", "results"}.

    Args:
        benchmark: name of the benchmark and of the file.
        results: JSON values, dataclasses, or lists, tuples and dicts of those.
        folder: where to.

    Returns:
        The file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{benchmark}.json"
    content = {
        "benchmark": benchmark,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "commit": commit(),
        "machine": machine(),
        "results": results,
    }
    path.write_text(json.dumps(content, indent=1, default=_plain) + "\n", encoding="utf-8")
    return path


def commit() -> str:
    """Hash of the checked out commit, with `+changes` when files differ from it; `unknown` for an installed package."""
    here = Path(__file__)
    try:
        # An installed package may lie within the checkout of something else, which does not track it.
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        head = _git(here.parent, "rev-parse", "HEAD")
        changes = _git(here.parent, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if changes else "")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)  # noqa: S603, S607
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """What the numbers depend on: processor, cores, memory, load, versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {package: found for package in _PACKAGES if (found := _version(package))},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} is not JSON")
