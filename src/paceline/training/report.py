"""What lies beside a trained checkpoint: its history, plots of it, and where the checkpoint comes from."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from paceline import __version__
from paceline.drafting.checkpoints.writing import write_json
from paceline.training.history import History

PROVENANCE_FILE = "provenance.json"
_PACKAGES = ("torch", "transformers", "accelerate", "peft", "safetensors")


@dataclass(frozen=True, slots=True)
class Figures:
    """Acceptance on held-out answers.

    Attributes:
        positions: anchors measured.
        at_least: share of anchors at which drafts 0 to i were all accepted.
        tokens_per_pass: expected, when a whole chain is drafted each time.
    """

    positions: int
    at_least: tuple[float, ...]
    tokens_per_pass: float


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a trained checkpoint comes from.

    Attributes:
        method: what was trained.
        target: name and digest of the target.
        data: name, digest and sizes of the corpus.
        options: of the run.
        steps: steps taken.
        tokens: answer tokens learnt from, epochs counted.
        seconds: time spent.
        initial: before the first step.
        best: of the parameters that were written.
        machine: what it ran on.
        versions: of the packages that did it.
        commit: of Paceline's source; empty where it is not known.
        date: when it ended, UTC.
    """

    method: str
    target: Mapping[str, str]
    data: Mapping[str, str | int | float]
    options: Mapping[str, Any]
    steps: int
    tokens: int
    seconds: float
    initial: Figures
    best: Figures
    machine: Mapping[str, str | int]
    versions: Mapping[str, str]
    commit: str
    date: str


def machine_facts(device: str, num_processes: int) -> dict[str, str | int]:
    """What this machine is."""
    facts: dict[str, str | int] = {"platform": platform.platform(), "python": platform.python_version()}
    facts |= {"processor": _processor(), "threads": torch.get_num_threads(), "device": device}
    return facts | {"processes": num_processes}


def package_versions() -> dict[str, str]:
    """Versions of what trains; packages that are not there are left out."""
    found = {"paceline": __version__}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def source_commit() -> str:
    """The commit of Paceline's source where it runs from a clone; else empty."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - no outside input
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def now() -> str:
    """Date and time, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def figures_of(history: History, *, best: bool) -> Figures:
    """Figures of the first or the best evaluation; there must be one."""
    point = (history.best if best else None) or history.evaluations[0]
    return Figures(point.positions, point.at_least, point.tokens_per_pass)


def plain_options(options: Any) -> dict[str, Any]:
    """Options as JSON has them, without what says only where files are."""
    content = asdict(options)
    for name in ("target", "data", "out", "restart", "cache_dir", "cache_gb"):
        content.pop(name, None)
    return {name: value.value if isinstance(value, Enum) else value for name, value in content.items()}


def held_out_acceptance(folder: Path) -> tuple[float, ...]:
    """Share of held-out places at which drafts 0 to i were accepted when a checkpoint was trained; empty if unknown."""
    try:
        best = json.loads((folder / PROVENANCE_FILE).read_text(encoding="utf-8"))["best"]
        return tuple(float(share) for share in best["at_least"])
    except (OSError, ValueError, TypeError, LookupError):
        return ()


def write_provenance(folder: Path, provenance: Provenance) -> None:
    """Writes provenance.json."""
    write_json(folder / PROVENANCE_FILE, asdict(provenance))


def write_history(folder: Path, history: History) -> None:
    """Writes history.json, loss.png and acceptance.png."""
    write_json(folder / "history.json", asdict(history))
    # A heavy import that only training needs.
    from paceline.training.plots import plot_acceptance, plot_loss

    plot_loss(folder / "loss.png", history)
    plot_acceptance(folder / "acceptance.png", history)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
