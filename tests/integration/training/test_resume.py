"""A run that is killed goes on from its last checkpoint and ends where it would have ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.errors import ConfigurationError
from paceline.training.options import EagleOptions
from paceline.training.run import train
from paceline.training.status import Status

_CLI = "import sys; from paceline.cli import main; sys.exit(main())"


class Killed(Exception):
    """Stands for the end of the process."""


def options(target: Path, answers: Path, out: Path, **values: Any) -> EagleOptions:
    common: dict[str, Any] = {
        "target": str(target),
        "data": answers,
        "out": out,
        "cache_dir": out.parent / "features",
        "batch_tokens": 256,
        "held_out": 0.2,
        "eval_every": 8,
        "eval_sequences": 4,
        "checkpoint_every": 5,
        "checkpoint_seconds": 1e9,
        "threads": 1,
        "cpu": True,
    }
    return EagleOptions(**(common | values))


def die_at(step: int) -> Callable[[Status], None]:
    def check(status: Status) -> None:
        if status.step == step:
            raise Killed

    return check


def test_goes_on_as_if_nothing_had_happened(tiny_target: Path, answers: Path, tmp_path: Path) -> None:
    whole = options(tiny_target, answers, tmp_path / "whole", max_steps=20)
    broken = options(tiny_target, answers, tmp_path / "broken", max_steps=20)
    train(whole)
    with pytest.raises(Killed):
        train(broken, on_status=die_at(13))
    seen: list[int] = []
    train(broken, on_status=lambda status: seen.append(status.step))
    assert seen[0] == 11  # the checkpoint is of step 10
    ends = [load_file(folder.out / "model.safetensors") for folder in (whole, broken)]
    for name, weight in ends[0].items():
        torch.testing.assert_close(ends[1][name], weight, rtol=1e-3, atol=1e-4)
    histories = [json.loads((folder.out / "history.json").read_text()) for folder in (whole, broken)]
    figures = [[point["tokens_per_pass"] for point in history["evaluations"]] for history in histories]
    assert figures[0] == pytest.approx(figures[1])


def test_another_run_is_not_continued(tiny_target: Path, answers: Path, tmp_path: Path) -> None:
    train(options(tiny_target, answers, tmp_path / "out", max_steps=1))
    other = {"max_steps": 1, "learning_rate": 0.5}
    with pytest.raises(ConfigurationError, match="--restart"):
        train(options(tiny_target, answers, tmp_path / "out", **other))
    result = train(options(tiny_target, answers, tmp_path / "out", restart=True, **other))
    assert result is not None
    assert result.steps == 1


def test_survives_kill_9(
    tiny_target: Path, answers: Path, tmp_path: Path, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    out = tmp_path / "out"
    given = options(tiny_target, answers, out, max_steps=1_000_000)
    names = ("target", "data", "out", "cache_dir", "batch_tokens", "held_out", "eval_every", "eval_sequences")
    more = ("checkpoint_every", "max_steps", "threads")
    arguments = [part for name in names + more for part in (f"--{name.replace('_', '-')}", str(getattr(given, name)))]
    command = [sys.executable, "-c", _CLI, "train", "eagle", "--cpu", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: (out / "checkpoint" / "last.pt").is_file() or process.poll() is not None)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    saved = torch.load(out / "checkpoint" / "last.pt", weights_only=True)
    seen: list[int] = []
    result = train(
        options(tiny_target, answers, out, max_steps=saved["step"] + 3),
        on_status=lambda status: seen.append(status.step),
    )
    assert seen[0] == saved["step"] + 1
    assert result is not None
    assert result.steps == saved["step"] + 3
    provenance = json.loads((out / "provenance.json").read_text())
    assert provenance["steps"] == result.steps
    assert provenance["tokens"] > saved["tokens"]
