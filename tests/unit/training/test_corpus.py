from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.errors import InvalidArgument, NotFound
from paceline.training.corpus import load_corpus
from tests.unit.training.corpora import corpus, tensors

_SEQUENCES = [[1, 2, 3], [4, 5], [1, 2, 9, 9]]
_PROMPTS = [2, 1, 2]


def test_reads_sequences(tmp_path: Path) -> None:
    read = corpus(tmp_path, _SEQUENCES, _PROMPTS)
    assert [read.tokens(index).tolist() for index in range(len(read))] == _SEQUENCES
    assert [read.length(index) for index in range(3)] == [3, 2, 4]
    assert (read.num_tokens, read.num_answer_tokens) == (9, 4)


def test_a_folder_is_its_shards_in_the_order_of_their_names(tmp_path: Path) -> None:
    whole = corpus(tmp_path, _SEQUENCES, _PROMPTS)
    folder = tmp_path / "shards"
    folder.mkdir()
    save_file(tensors(_SEQUENCES[2:], _PROMPTS[2:]), folder / "answers-00001.safetensors")
    save_file(tensors(_SEQUENCES[:2], _PROMPTS[:2]), folder / "answers-00000.safetensors")
    (folder / "answers-00002.part").write_bytes(b"half a shard")
    read = load_corpus(folder)
    assert [read.tokens(index).tolist() for index in range(3)] == _SEQUENCES
    assert read.digest == whole.digest


def test_the_digest_is_of_the_contents(tmp_path: Path) -> None:
    first = corpus(tmp_path, _SEQUENCES, _PROMPTS).digest
    assert corpus(tmp_path, _SEQUENCES, [1, 1, 2]).digest != first


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("token_ids", None, "lacks token_ids"),
        ("token_ids", torch.arange(9), "flat int32"),
        ("token_ids", -torch.ones(9, dtype=torch.int32), "negative"),
        ("offsets", torch.tensor([0, 3, 5]), "one offset more"),
        ("offsets", torch.tensor([0, 3, 5, 8]), "rise from 0 to the number of tokens, 9"),
        ("offsets", torch.tensor([0, 5, 3, 9]), "rise from 0"),
        ("prompt_len", torch.tensor([2, 2, 2], dtype=torch.int32), "one of answer"),
        ("prompt_len", torch.tensor([0, 1, 2], dtype=torch.int32), "one token of prompt"),
        ("prompt_len", torch.ones(3, 1, dtype=torch.int32), "flat"),
    ],
)
def test_says_what_is_wrong_with_a_file(tmp_path: Path, name: str, tensor: torch.Tensor | None, reason: str) -> None:
    path = tmp_path / "bad.safetensors"
    content = tensors(_SEQUENCES, _PROMPTS) | ({} if tensor is None else {name: tensor})
    if tensor is None:
        del content[name]
    save_file(content, path)
    with pytest.raises(InvalidArgument, match=reason) as caught:
        load_corpus(path)
    assert str(path) in caught.value.message


def test_a_file_that_is_no_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "text.safetensors"
    path.write_text("not tensors")
    with pytest.raises(InvalidArgument, match="not a corpus"):
        load_corpus(path)


@pytest.mark.parametrize("name", ["nothing", "nothing.safetensors"])
def test_there_is_no_corpus(tmp_path: Path, name: str) -> None:
    with pytest.raises(NotFound, match="paceline train collect"):
        load_corpus(tmp_path / name)
    with pytest.raises(NotFound):
        load_corpus(tmp_path)


def test_a_prompt_stays_on_its_side(tmp_path: Path) -> None:
    prompts = [[index // 10, index % 10] for index in range(100)]
    sequences = [[*prompt, answer] for prompt in prompts for answer in (1, 2)]
    read = corpus(tmp_path, sequences, [2] * 200)
    split = read.split(0.2)
    assert sorted((*split.train, *split.held_out)) == list(range(200))
    assert 10 <= len(split.held_out) <= 70
    sides = [{tuple(sequences[index][:2]) for index in side} for side in (split.train, split.held_out)]
    assert not sides[0] & sides[1]
    # More sequences move none of the old ones.
    more = corpus(tmp_path, [*sequences, [7, 7, 7]], [2] * 201).split(0.2)
    assert set(split.held_out) <= set(more.held_out)


def test_a_split_needs_both_sides(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="collect more prompts"):
        corpus(tmp_path, _SEQUENCES[:1], [2]).split(0.5)


def test_another_target_s_corpus_is_refused(tmp_path: Path) -> None:
    read = corpus(tmp_path, _SEQUENCES, _PROMPTS)
    read.check_vocabulary(10)
    with pytest.raises(InvalidArgument, match="token id 9"):
        read.check_vocabulary(9)
