"""A collection is what the engine writes; stopped at any time, it goes on and ends with the same answers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from safetensors import safe_open

from paceline.engine.load_runner import load_runner
from paceline.engine.local import LocalRequest, generate
from paceline.engine.runner_options import RunnerOptions
from paceline.engine.target import TargetEngine
from paceline.errors import ConfigurationError
from paceline.messages import SamplingParams
from paceline.training.collect import CollectStatus, collect
from paceline.training.corpus import load_corpus
from tests.integration.training.conftest import PROMPTS, collect_options

_FEW = 24


class Killed(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS[:_FEW]))
    return path


def shards(folder: Path) -> dict[str, bytes]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        corpus = load_corpus(path)
        found[path.name] = corpus.token_ids.numpy().tobytes()
    return found


def test_goes_on_where_it_was_stopped(tiny_target: Path, prompts: Path, tmp_path: Path) -> None:
    whole = dataclasses.replace(collect_options(tiny_target, prompts, tmp_path / "whole"), shard_size=6, sessions=4)
    broken = dataclasses.replace(whole, out=tmp_path / "broken")
    collect(whole)

    def die(status: CollectStatus) -> None:
        if status.done == 15:
            raise Killed

    with pytest.raises(Killed):
        collect(broken, on_status=die)
    kept = shards(broken.out)
    assert 0 < len(kept) < 4
    seen: list[CollectStatus] = []
    result = collect(broken, on_status=seen.append)
    assert seen[0].done == 6 * len(kept)
    assert result.prompts == _FEW
    assert shards(broken.out) == shards(whole.out)
    assert list(shards(whole.out)) == [f"answers-{index:05d}.safetensors" for index in range(4)]
    assert collect(broken).new_tokens == 0


def test_answers_are_the_target_s_own(tiny_target: Path, prompts: Path, tmp_path: Path) -> None:
    options = dataclasses.replace(collect_options(tiny_target, prompts, tmp_path / "out"), greedy_share=1.0)
    collect(options)
    corpus = load_corpus(options.out)
    runner = load_runner(tiny_target, options=RunnerOptions(kv_bytes=1 << 20))
    engine = TargetEngine(runner, eos_token_ids=runner.eos_token_ids)
    for index in (0, 7, _FEW - 1):
        tokens = tuple(corpus.tokens(index).tolist())
        begin = int(corpus.prompt_len[index])
        request = LocalRequest(tokens[:begin], SamplingParams(temperature=0.0), options.max_new_tokens)
        assert tuple(generate(engine, [request], eos_token_ids=runner.eos_token_ids)[0].tokens) == tokens[begin:]


def test_says_where_answers_come_from(answers: Path) -> None:
    with safe_open(next(answers.glob("*.safetensors")), framework="pt") as content:
        about = {name: json.loads(value) for name, value in content.metadata().items()}
    assert about["collection"]["target"] == "tiny"
    assert len(about["collection"]["target_digest"]) == 64
    assert about["collection"]["options"]["seed"] == 0
    assert about["versions"]["paceline"]
    assert about["date"].startswith("20")


def test_refuses_a_folder_of_something_else(tiny_target: Path, prompts: Path, tmp_path: Path) -> None:
    options = dataclasses.replace(collect_options(tiny_target, prompts, tmp_path / "out"), limit=2)
    collect(options)
    with pytest.raises(ConfigurationError, match="another options"):
        collect(dataclasses.replace(options, seed=1))
    with pytest.raises(ConfigurationError, match="another num_prompts, prompts_digest"):
        collect(dataclasses.replace(options, limit=3))
