"""`paceline doctor --drafter --target` on models that are small and random, but real."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from paceline.cli import drafter_loading
from paceline.cli.app import app
from paceline.cli.drafter_check import DrafterReport, judge
from paceline.cli.drafter_loading import load_drafter
from paceline.cli.smoke_acceptance import SmokeAcceptance
from paceline.drafting.checkpoints.draft_vocabulary import write_draft_vocabulary
from paceline.drafting.checkpoints.target_facts import TargetFacts, read_target_facts
from paceline.errors import ModelError
from tests.unit.drafting.checkpoints import samples

HIDDEN, INNER, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 32, 48, 64, 4, 2, 8


@pytest.fixture(autouse=True)
def small_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_loading, "PROMPTS", ("abc",))
    monkeypatch.setattr(drafter_loading, "KV_BYTES", 4 << 20)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples of checkpoints in the sizes of the tiny target."""
    monkeypatch.setattr(samples, "LLAMA", samples.LLAMA | {"hidden_size": HIDDEN, "intermediate_size": INNER})
    values = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB}
    monkeypatch.setattr(samples, "LLAMA", samples.LLAMA | values)
    names = ("HIDDEN", "INNER", "VOCAB", "HEADS", "KV_HEADS", "HEAD_DIM")
    for name, value in zip(names, (HIDDEN, INNER, VOCAB, HEADS, KV_HEADS, HEAD_DIM), strict=True):
        monkeypatch.setattr(samples, name, value)


def check(drafter: Path, target: Path, *more: str) -> tuple[int, DrafterReport]:
    result = CliRunner().invoke(app, ["doctor", "--drafter", str(drafter), "--target", str(target), "--json", *more])
    assert result.exit_code in {0, 1}, result.output + repr(result.exception)
    return result.exit_code, DrafterReport(**json.loads(result.stdout))


def test_a_target_accepts_all_that_it_drafts_itself(tiny_llama: Path) -> None:
    code, report = check(tiny_llama, tiny_llama)
    assert code == 0
    assert report.healthy
    assert set(report.accepted_per_position) == {1.0}
    assert report.tokens_per_pass > 2
    assert (report.layout, report.method) == ("causal-lm", "draft_model")
    assert report.weights_bytes > 0
    assert report.advice == ""


@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize("make", [samples.eagle, samples.eagle3, samples.medusa_v1, samples.medusa_v2])
def test_a_head_that_is_not_trained_is_told_by_its_acceptance(
    make: Callable[[], samples.Sample], tiny_llama: Path, tmp_path: Path
) -> None:
    sample = make()
    sample.config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 3]
    code, report = check(sample.write(tmp_path), tiny_llama, "--min-acceptance", "0.9")
    assert code == 1
    assert not report.healthy
    assert report.layout == sample.layout
    assert report.judged[0] > 10
    assert "at least 90% should be: was it trained for this very target" in report.advice


@pytest.mark.usefixtures("sizes")
def test_what_is_printed(tiny_llama: Path, tmp_path: Path) -> None:
    sample = samples.eagle3()
    sample.config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 3]
    arguments = ["doctor", "--drafter", str(sample.write(tmp_path)), "--target", str(tiny_llama)]
    result = CliRunner().invoke(app, [*arguments, "--min-acceptance", "0"])
    assert result.exit_code == 0, result.output
    assert "safeailab-eagle3, for the method eagle3: hidden size 32" in result.stdout
    assert "features enter layers 0, 1, 3 of the target" in result.stdout
    assert "tokens per pass of the target" in result.stdout


def test_a_head_for_another_target_is_an_error_of_usage(tiny_llama: Path, tmp_path: Path) -> None:
    folder = samples.medusa_v2().write(tmp_path)
    result = CliRunner().invoke(app, ["doctor", "--drafter", str(folder), "--target", str(tiny_llama), "--json"])
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert (error["code"], error["field"]) == ("model_error", "draft_model")
    assert "[8, 8], expected [32, 32]" in error["message"]


@pytest.mark.parametrize("given", ["--drafter", "--target"])
def test_both_folders_are_needed(given: str) -> None:
    result = CliRunner().invoke(app, ["doctor", given, "somewhere"])
    assert result.exit_code == 2
    assert "is missing: a drafter is checked with its target" in result.stderr


def test_what_is_no_drafter(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no folder"):
        load_drafter(tmp_path / "nothing", TargetFacts(8, 12, 20))


@pytest.mark.parametrize(
    ("first", "healthy", "advice"),
    [(0.2, True, ""), (0.1, False, "10% of first drafts"), (None, False, "nothing at all")],
)
def test_the_verdict(first: float | None, healthy: bool, advice: str) -> None:
    blank = DrafterReport(False, "safeailab-eagle", "eagle", "", 0)
    counts = () if first is None else (int(100 * first),)
    report = judge(blank, SmokeAcceptance((100,) * len(counts), counts, 10, 8), 0.2)
    assert report.healthy == healthy
    assert advice in report.advice


@pytest.mark.parametrize(("held_out", "told"), [((0.264, 0.08), True), ((0.1, 0.0), False), ((), False)])
def test_a_head_that_was_better_in_training_is_told_of_that(held_out: tuple[float, ...], told: bool) -> None:
    blank = DrafterReport(False, "layerskip-adapter", "layerskip", "", 0, held_out=held_out)
    report = judge(blank, SmokeAcceptance((100,), (12,), 10, 8), 0.2)
    assert not report.healthy
    assert ("When it was trained 26% of held-out ones were" in report.advice) == told


@pytest.mark.usefixtures("sizes")
def test_what_was_measured_in_training_stands_beside_it(tiny_llama: Path, tmp_path: Path) -> None:
    folder = samples.medusa_v2().write(tmp_path)
    (folder / "provenance.json").write_text('{"best": {"at_least": [0.264, 0.08, 0.02, 0.01]}}')
    arguments = ["doctor", "--drafter", str(folder), "--target", str(tiny_llama), "--min-acceptance", "0"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "held out in training" in result.stdout
    assert "26%" in result.stdout
    (folder / "provenance.json").write_text('{"best": null}')
    assert "held out" not in CliRunner().invoke(app, arguments).stdout


def test_a_trimmed_vocabulary_is_checked_and_told(tiny_llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "drafter"))
    write_draft_vocabulary(folder, torch.arange(VOCAB))
    target = TargetFacts(HIDDEN, 3, 2 * VOCAB)
    assert load_drafter(folder, target).sizes == "3 layers of 32, 64 of 128 ids"
    write_draft_vocabulary(folder, torch.arange(VOCAB) + VOCAB)
    with pytest.raises(ModelError, match="wrong vocabulary map"):
        load_drafter(folder, target)


def test_facts_of_a_target(tiny_llama: Path, tmp_path: Path) -> None:
    assert read_target_facts(tiny_llama) == TargetFacts(HIDDEN, 3, VOCAB)
    (tmp_path / "config.json").write_text('{"text_config": {"hidden_size": 4, "num_hidden_layers": 2}}')
    with pytest.raises(ModelError, match="names no vocab_size"):
        read_target_facts(tmp_path)
