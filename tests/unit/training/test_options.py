"""Vocabularies, layers, schedules and prompts that options name."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.errors import InvalidArgument, NotFound
from paceline.text.request import ChatMessage
from paceline.training.collect import parse_temperatures
from paceline.training.draft_vocabulary import most_frequent
from paceline.training.learner import Progress
from paceline.training.loop import learning_rate_share
from paceline.training.methods import aux_layers
from paceline.training.objectives.draft_model import kept_layers
from paceline.training.objectives.layerskip import dropout_of, exit_weights
from paceline.training.options import Curriculum, LayerSkipOptions, MedusaOptions
from paceline.training.prompts import read_prompts, template_prompts
from tests.unit.training.corpora import corpus


def test_the_most_frequent_tokens_of_the_answers(tmp_path: Path) -> None:
    read = corpus(tmp_path, [[9, 9, 9, 3, 3, 5], [9, 3, 7, 7]], [3, 1])
    chosen = most_frequent(read, (0, 1), 10, 3, always=(0,))
    assert chosen.token_ids.tolist() == [0, 3, 7]
    assert chosen.d2t.tolist() == [0, 2, 5]
    assert chosen.t2d.nonzero().flatten().tolist() == [0, 3, 7]
    assert chosen.draft_ids().tolist() == [0, -1, -1, 1, -1, -1, -1, 2, -1, -1]
    assert chosen.coverage == pytest.approx(5 / 6)
    for size in (0, 10, 8192):
        assert most_frequent(read, (0,), 10, size).is_full
    with pytest.raises(InvalidArgument, match="draft_vocab_size"):
        most_frequent(read, (0,), 10, 1, always=(0,))


def test_layers_that_options_name() -> None:
    assert aux_layers("", 30) == (2, 15, 27)
    assert aux_layers("", 3) == (0, 1, 2)
    assert aux_layers("1, 4,30", 30) == (1, 4, 30)
    assert kept_layers("", 30) == (0, 29)
    assert kept_layers("3,3,0", 4) == (3, 3, 0)
    for text in ("4,1", "1,31", "one", "1,,2"):
        with pytest.raises(InvalidArgument):
            aux_layers(text, 30)
    with pytest.raises(InvalidArgument):
        kept_layers("0,4", 4)


def test_the_learning_rate_rises_and_falls() -> None:
    shares = [learning_rate_share(step / 100, 0.1) for step in range(101)]
    assert shares[:10] == sorted(shares[:10])
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert max(shares) == 1.0
    assert shares[100] == pytest.approx(0.1)
    assert learning_rate_share(0.0, 0.0) == 1.0


def test_layer_dropout_grows_with_the_layer() -> None:
    chances = [dropout_of(layer, 30, 0.2) for layer in range(30)]
    assert chances[0] == 0.0
    assert chances[29] == pytest.approx(0.2)
    assert chances[10] == pytest.approx(0.2 * (math.exp(10 * math.log(2) / 29) - 1))


def layerskip(curriculum: Curriculum) -> LayerSkipOptions:
    return LayerSkipOptions(max_steps=1, curriculum=curriculum, rotation=2, exit_scale=1.0, exit_share=0.3)


def test_losses_after_layers_follow_the_curriculum() -> None:
    rotational = layerskip(Curriculum.ROTATIONAL)
    # Weights before they are made to sum to 1: 0, 1, 3 and 3 + 3 for the last.
    assert exit_weights(4, 1, rotational, Progress(0, 0)) == pytest.approx([0, 0, 3 / 9, 6 / 9])
    assert exit_weights(4, 1, rotational, Progress(1, 0)) == pytest.approx([0, 1 / 7, 0, 6 / 7])
    gradual = layerskip(Curriculum.GRADUAL)
    assert exit_weights(4, 1, gradual, Progress(0, 0.0)) == [0, 0, 0, 1]
    assert exit_weights(4, 1, gradual, Progress(0, 0.25)) == pytest.approx([0, 0, 3 / 9, 6 / 9])
    assert exit_weights(4, 1, gradual, Progress(0, 0.5)) == pytest.approx([0, 1 / 10, 3 / 10, 6 / 10])
    assert exit_weights(4, 2, layerskip(Curriculum.FIXED), Progress(0, 0)) == pytest.approx([0, 0.3, 0, 0.7])


def test_a_run_must_have_an_end_and_something_held_out() -> None:
    with pytest.raises(InvalidArgument, match="max_steps or max_seconds"):
        MedusaOptions()
    with pytest.raises(InvalidArgument, match="held_out"):
        MedusaOptions(max_steps=1, held_out=1.0)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("Why?\n\n  How? \n")
    assert [messages[-1].content for messages in read_prompts(lines)] == ["Why?", "How?"]
    objects = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    objects.write_text("\n".join(map(json.dumps, ("Why?", {"prompt": "How?"}, {"messages": messages}))))
    assert read_prompts(objects) == [
        (ChatMessage("user", "Why?"),),
        (ChatMessage("user", "How?"),),
        (ChatMessage("system", "Be brief."), ChatMessage("user", "Why?")),
    ]


@pytest.mark.parametrize("line", ["{", "3", "{}", '{"messages": []}', '{"messages": [{"role": "user"}]}', '""'])
def test_a_line_that_is_no_prompt(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"Why?"\n{line}\n')
    with pytest.raises(InvalidArgument, match=r"prompts\.jsonl:2"):
        read_prompts(path)


def test_no_prompts(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        read_prompts(tmp_path / "prompts.txt")
    (tmp_path / "prompts.txt").write_text("\n\n")
    with pytest.raises(InvalidArgument, match="one per line"):
        read_prompts(tmp_path / "prompts.txt")
    assert len(template_prompts()) == len(set(template_prompts())) > 400


def test_temperatures() -> None:
    assert parse_temperatures("0.6, 1") == (0.6, 1.0)
    for text in ("", "0", "warm", "0.5,3"):
        with pytest.raises(InvalidArgument, match="temperatures"):
            parse_temperatures(text)


@pytest.mark.parametrize("command", ["collect", "draft_model", "eagle", "eagle3", "medusa", "layerskip"])
def test_every_command_explains_itself(command: str) -> None:
    result = CliRunner().invoke(app, ["train", command, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "--target" in result.stdout
    assert "--json" in result.stdout


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", "medusa", "--data", str(tmp_path / "none"), "--max-steps", "1"])
    assert result.exit_code != 0
    assert result.stderr.startswith("error: there is no corpus at")
    result = CliRunner().invoke(app, ["train", "medusa"])
    assert "give max_steps or max_seconds" in result.stderr
