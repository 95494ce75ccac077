"""Writes a benchmark's result to bench/results/<name>.json, with the machine and the commit it was measured on."""

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

RESULTS = Path(__file__).parent / "results"

_PACKAGES = ("torch", "transformers", "onnxruntime-genai", "grpcio", "redis", "fastapi", "uvicorn", "openai")


def write_report(benchmark: str, results: Any, folder: Path = RESULTS) -> Path:
    """Writes {"benchmark", "time", "commit", "machine", "results"}.

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
        "commit": commit(),
        "machine": machine(),
        "results": results,
    }
    path.write_text(json.dumps(content, indent=1, default=_plain) + "\n", encoding="utf-8")
    return path


def commit() -> str:
    """Hash of the checked out commit, with `+changes` when files differ from it; `unknown` outside a checkout."""
    try:
        root = Path(__file__).parent
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        changes = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


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
