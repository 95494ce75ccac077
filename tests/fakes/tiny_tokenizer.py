"""Writes tiny model folders with a tokenizer and a chat template, for tests that need text but no model.

    write_letters(folder, vocab_size=16)    ids 0..15: one readable letter per id, the last two are "_" (for everything
                                            unknown) and "<eos>"; toy laws over few tokens read as text
    write_byte_level(folder)                byte-level BPE of 300 ids that encodes any text: 256 bytes, some merges, and
                                            "<|im_start|>", "<|im_end|>" (end of sequence), "<|endoftext|>"

Both folders hold tokenizer.json, tokenizer_config.json, config.json and generation_config.json; config.json describes a
tiny Llama of that vocabulary, so that a real model with random weights can be made from it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LETTER_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
BYTE_LEVEL_VOCAB_SIZE = 300
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_letters(
    folder: Path, vocab_size: int = 16, *, max_model_len: int = 256, eos_token_id: int | None = None
) -> Path:
    """One readable character per id; returns the folder.

    Args:
        folder: made if it does not exist.
        vocab_size: 4 to 64.
        max_model_len: context that config.json names.
        eos_token_id: id of "<eos>"; the last one by default.
    """
    if not 4 <= vocab_size <= 64:
        raise ValueError(f"vocab_size must be in [4, 64], got {vocab_size}")
    eos = vocab_size - 1 if eos_token_id is None else eos_token_id
    unknown = vocab_size - 1 if eos != vocab_size - 1 else vocab_size - 2
    letters = iter(LETTERS)
    vocab = {
        "<eos>" if token_id == eos else "_" if token_id == unknown else next(letters): token_id
        for token_id in range(vocab_size)
    }
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="_"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    return _write(folder, tokenizer, "<eos>", LETTER_CHAT_TEMPLATE, max_model_len)


def write_byte_level(folder: Path, *, max_model_len: int = 512) -> Path:
    """Byte-level BPE that encodes any text; returns the folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    space = "Ġ"
    pairs = [
        *[
            ("t", "h"),
            ("th", "e"),
            ("i", "n"),
            ("a", "n"),
            ("an", "d"),
            ("e", "r"),
            ("o", "n"),
            ("in", "g"),
            ("r", "e"),
        ],
        *[("l", "l"), ("o", "u"), ("e", "s"), ("o", "r"), ("s", "t"), ("a", "t"), ("e", "n"), ("e", "d"), ("i", "s")],
        *[(space, "the"), (space, "a"), (space, "s"), (space, "and"), (space, "o"), (space, "w"), (space, "c")],
        *[(space, "in"), (space, "b"), (space, "p"), (space, "f"), (space, "m"), (space, "d"), (space, "is")],
        *[
            ("h", "e"),
            ("he", "ll"),
            ("hell", "o"),
            ("w", "or"),
            (space, "wor"),
            ("l", "d"),
            (" wor".replace(" ", space), "ld"),
        ],
    ]
    tokens = [*alphabet, *("".join(pair) for pair in pairs)]
    tokens = list(dict.fromkeys(tokens))
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    missing = BYTE_LEVEL_VOCAB_SIZE - tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(f"<extra_{index}>", normalized=False) for index in range(missing)])
    return _write(folder, tokenizer, "<|im_end|>", CHAT_TEMPLATE, max_model_len)


def _write(folder: Path, tokenizer: Tokenizer, eos_token: str, chat_template: str, max_model_len: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = tokenizer.token_to_id(eos_token)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": eos_token,
            "model_max_length": max_model_len,
            "clean_up_tokenization_spaces": False,
            "chat_template": chat_template,
        },
    )
    _write_json(folder / "generation_config.json", {"eos_token_id": eos})
    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": tokenizer.get_vocab_size(),
            "max_position_embeddings": max_model_len,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "eos_token_id": eos,
            "bos_token_id": None,
        },
    )
    return folder


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
