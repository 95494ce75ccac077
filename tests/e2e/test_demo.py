"""`make demo` with short texts: the real model behind a real fleet, in processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.benchmark.prompts import DEMO_PROMPTS

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]


def test_the_demo_shows_equal_texts_and_a_gain_and_stops_everything(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.demo", "--max-tokens=24", f"--log-dir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"All {len(DEMO_PROMPTS)} texts are equal" in done.stdout
    assert "Everything is stopped" in done.stdout
    kinds = {prompt.kind.replace("_", " ") for prompt in DEMO_PROMPTS}
    rows = re.findall(r"^ +([a-z ]+?) +(\d+) +([\d.]+) +(\d+)% +([\d.]+) +([\d.]+) +[\d.]+x", done.stdout, re.MULTILINE)
    assert {row[0] for row in rows} == kinds
    # An int8 copy agrees with its original nearly always, whatever else the machine does. How soon it has read the
    # prompt and joins in, the machine decides.
    assert all(int(acceptance) > 60 for _, _, _, acceptance, *_ in rows)
    assert all(float(tokens_per_pass) > 1 for _, _, tokens_per_pass, *_ in rows)
    for log in ("gateway.log", "verifier-0.log", "drafter-0.log"):
        assert "exit_code=0" in (tmp_path / log).read_text()
