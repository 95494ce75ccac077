"""`paceline up` with a trained head, in both placements: real processes, a tiny target and a head that fits it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.launcher import Launcher, generate
from tests.fakes.tiny_models import write_model
from tests.unit.drafting.checkpoints import samples
from tests.unit.drafting.test_self_draft_build import TARGET


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()


@pytest.mark.parametrize(("placement", "num_drafters"), [("auto", 0), ("pool", 1)])
def test_a_head_drafts_in_the_verifier_or_in_a_drafter(
    launcher: Launcher, tmp_path: Path, placement: str, num_drafters: int
) -> None:
    target, head = write_model(tmp_path / "target", TARGET), samples.eagle31().write(tmp_path / "head")
    up = launcher.up(
        target,
        "--method=eagle3",
        f"--head={head}",
        f"--placement={placement}",
        "--eagle-topk=2",
        "--num-draft-tokens=6",
    )
    assert len(up.told["addresses"]["drafters"]) == num_drafters
    assert len(up.told["pids"]) == 2 + num_drafters
    question = ("abcabcab", "--raw", "--max-tokens=40", "--temperature=0.8", "--seed=5")
    drafted = generate(up.gateway, *question, "--method=eagle3")
    plain = generate(up.gateway, *question, "--no-speculation")
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["warnings"] == []
    assert drafted["evidence"]["accepted_tokens"] > 0
    assert plain["evidence"]["draft_tokens"] == 0
