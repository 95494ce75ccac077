from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from paceline.errors import InvalidArgument, ModelError
from paceline.text.tokenizer import Tokenizer
from tests.fakes.tiny_tokenizer import BYTE_LEVEL_VOCAB_SIZE, write_byte_level, write_letters
from tests.unit.text import tokenizer_zoo as zoo


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_byte_level(tmp_path / "model")


def test_facts_of_a_model_folder(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.vocab_size == BYTE_LEVEL_VOCAB_SIZE
    assert tokenizer.max_model_len == 512
    assert tokenizer.special_tokens == {"eos_token": "<|im_end|>"}
    assert [tokenizer.token(token_id) for token_id in tokenizer.eos_token_ids] == ["<|im_end|>"]
    assert tokenizer.token(BYTE_LEVEL_VOCAB_SIZE) is None


def test_encode_and_decode(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("hello <|im_start|>the world🚲")
    assert tokenizer.token_id("<|im_start|>") in ids
    assert max(ids) < tokenizer.vocab_size
    assert tokenizer.decode(ids) == "hello the world🚲"
    assert tokenizer.encode("") == ()


def test_padding_and_truncation_of_the_file_are_off(folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_padding(length=64)
    backend.enable_truncation(4)
    backend.save(str(folder / "tokenizer.json"))
    assert len(Tokenizer.load(folder).encode("x" * 10)) == 10


def test_special_tokens_around_a_text_are_asked_for(tmp_path: Path) -> None:
    backend = zoo.backend("sentencepiece")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.get_vocab()["<s>"])]
    )
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("the")[1:] == tokenizer.encode("the", add_special_tokens=False)


@pytest.mark.parametrize(
    ("generation", "config", "own", "expected"),
    [
        ([1, 2], 3, None, (1, 2)),
        (7, 3, None, (7,)),
        (None, 3, None, (3,)),
        (None, [4, 3], None, (3, 4)),
        (1, None, "<|im_end|>", (1, 297)),
        (None, None, {"content": "<|im_end|>"}, (297,)),
        (None, None, None, ()),
    ],
)
def test_end_tokens(folder: Path, generation: object, config: object, own: object, expected: tuple[int, ...]) -> None:
    edit(folder / "generation_config.json", eos_token_id=generation)
    edit(folder / "config.json", eos_token_id=config)
    edit(folder / "tokenizer_config.json", eos_token=own)
    assert Tokenizer.load(folder).eos_token_ids == expected


def test_context_is_found_in_a_nested_text_config(folder: Path) -> None:
    edit(folder / "config.json", max_position_embeddings=None, text_config={"n_positions": 99, "eos_token_id": 5})
    assert Tokenizer.load(folder).max_model_len == 99
    (folder / "config.json").unlink()
    assert Tokenizer.load(folder).max_model_len is None


def test_fingerprint_is_stable_and_sees_every_token(folder: Path, tmp_path: Path) -> None:
    """A constant, so that a change of the hash, which would part fleets during an update, is noticed."""
    assert Tokenizer.load(folder).fingerprint == "fc46ac5d0fe7651a17af79ee21a8fca29963a92ffdb1ab4446f680525537f0fd"
    assert Tokenizer.load(write_letters(tmp_path / "letters")).fingerprint != Tokenizer.load(folder).fingerprint
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([AddedToken("<extra>", normalized=False)])
    assert Tokenizer(backend).fingerprint != Tokenizer.load(folder).fingerprint


def word_level(words: list[str]) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="a"))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (["a", "c", "b"], "token 1 is 'b' here and 'c' there"),
        (["a", "b"], "there it has no token 2, which is 'c' here"),
        (["a", "b", "c", "d"], "here it has no token 3, which is 'd' there"),
    ],
)
def test_first_difference_names_the_lowest_token_that_differs(other: list[str], message: str) -> None:
    here, there = word_level(["a", "b", "c"]), word_level(other)
    assert str(here.first_difference(there.vocabulary)) == message
    assert here.fingerprint != there.fingerprint


def test_the_same_tokenizer_with_a_padded_vocabulary_is_the_same() -> None:
    plain, padded = word_level(["a", "b", "c"]), word_level(["a", "b", "c", "[PAD3]", "[PAD4]"])
    assert plain.fingerprint == padded.fingerprint
    assert plain.first_difference(padded.vocabulary) is None
    assert plain.first_difference({0: "a", 1: "b", 2: "c", 3: "[PAD3]"}) is None  # a peer that does not leave it out
    assert padded.vocab_size == 3


def test_a_padding_token_of_the_model_itself_is_a_token() -> None:
    assert word_level(["a", "b", "[PAD]"]).vocab_size == 3
    assert word_level(["a", "[PAD1]", "b"]).vocab_size == 3


def test_the_models_width_does_not_enter_the_fingerprint(folder: Path) -> None:
    before = Tokenizer.load(folder).fingerprint
    edit(folder / "config.json", vocab_size=512)
    assert Tokenizer.load(folder).fingerprint == before


def test_a_lone_surrogate_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="lone surrogate at character 2") as caught:
        Tokenizer.load(folder).encode("ab\ud800")
    assert caught.value.field == "prompt"


def test_missing_and_broken_files_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    "decoder",
    [decoders.WordPiece(), decoders.BPEDecoder(), decoders.CTC(), decoders.Sequence([decoders.Strip(" ", 1, 0)])],
)
def test_a_decoder_that_cannot_be_streamed_is_refused_at_load(decoder: object) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoder  # type: ignore[assignment]
    with pytest.raises(ModelError, match="cannot be decoded token by token"):
        Tokenizer(backend)


REAL_TEXTS = (
    "Hello, world!",
    "def f(x):\n    return x ** 2  # naïve\n",
    "你好 👩‍🚀 Ünïcödé \u200b \t tabs",
    "<|im_start|>user\nhi<|im_end|>\n",
    " leading and trailing ",
    "1234567890 3.14159",
    "",
)


@pytest.mark.real_model
def test_ids_and_text_of_the_real_model_equal_transformers() -> None:
    from transformers import AutoTokenizer

    from paceline import model_source

    folder = model_source.resolve("smollm2-135m-instruct")
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert (ours.vocab_size, ours.eos_token_ids, ours.max_model_len) == (49152, (2,), 8192)
    for text in REAL_TEXTS:
        for special in (False, True):
            assert list(ours.encode(text, add_special_tokens=special)) == theirs.encode(
                text, add_special_tokens=special
            )
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    for start in range(0, 49152, 997):
        ids = tuple(range(start, min(start + 997, 49152)))
        assert ours.decode(ids) == theirs.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
