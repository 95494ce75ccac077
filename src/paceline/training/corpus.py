"""The target's own answers as token ids: read, checked, split.

A corpus is one safetensors file, or a folder of such files (shards, in the order of their names). A file holds

| tensor | type and shape | meaning |
|---|---|---|
| `token_ids` | int32 # [num_tokens] | all sequences one after another, prompt and answer |
| `offsets` | int64 # [num_sequences + 1] | sequence i is tokens [offsets[i], offsets[i + 1]) |
| `prompt_len` | int32 # [num_sequences] | how many of them are the prompt |
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from paceline.errors import InvalidArgument, NotFound

_TENSORS = ("token_ids", "offsets", "prompt_len")


@dataclass(frozen=True, slots=True)
class Split:
    """Indices of sequences. No prompt is on both sides.

    Attributes:
        train: to learn from.
        held_out: to measure with.
    """

    train: tuple[int, ...]
    held_out: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Sequences of token ids, each a prompt and the target's answer.

    Attributes:
        token_ids: # [num_tokens] int32
        offsets: # [num_sequences + 1] int64
        prompt_len: # [num_sequences] int32
        digest: of the contents; names caches.
    """

    token_ids: torch.Tensor
    offsets: torch.Tensor
    prompt_len: torch.Tensor
    digest: str

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.prompt_len)

    def tokens(self, index: int) -> torch.Tensor:
        """Tokens of a sequence # [length] int32."""
        return self.token_ids[int(self.offsets[index]) : int(self.offsets[index + 1])]

    def length(self, index: int) -> int:
        """Tokens of a sequence, prompt included."""
        return int(self.offsets[index + 1] - self.offsets[index])

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return len(self.token_ids)

    @property
    def num_answer_tokens(self) -> int:
        """Tokens of all answers."""
        return self.num_tokens - int(self.prompt_len.sum())

    def split(self, held_out: float) -> Split:
        """Splits by the hash of the prompt, so that a prompt asked twice, and a corpus that grows, change no side.

        Args:
            held_out: share of the prompts that is kept for measuring, above 0 and below 1.

        Raises:
            InvalidArgument: one of the sides would be empty.
        """
        sides: tuple[list[int], list[int]] = ([], [])
        for index in range(len(self)):
            prompt = self.tokens(index)[: int(self.prompt_len[index])]
            draw = int.from_bytes(hashlib.blake2b(_bytes(prompt), digest_size=8).digest(), "big") / 2**64
            sides[draw < held_out].append(index)
        if not sides[0] or not sides[1]:
            raise InvalidArgument(
                f"{len(self)} sequences leave nothing to {'measure with' if sides[0] else 'learn from'} when "
                f"{held_out:.0%} of the prompts are held out: collect more prompts or change held_out",
                field="held_out",
            )
        return Split(tuple(sides[0]), tuple(sides[1]))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Makes sure that the target knows every token.

        Raises:
            InvalidArgument: it does not.
        """
        highest = int(self.token_ids.max())
        if highest >= vocab_size:
            raise InvalidArgument(
                f"the corpus holds token id {highest}, and the target knows ids below {vocab_size}: it is another "
                "model's; collect answers of this target",
                field="data",
            )


def load_corpus(path: Path) -> Corpus:
    """Reads a corpus.

    Args:
        path: a safetensors file, or a folder of them.

    Raises:
        NotFound: there is no such file, or the folder holds none.
        InvalidArgument: a file is not a corpus; says which and why.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not path.exists():
        raise NotFound(
            f"there is no corpus at {path}: give a .safetensors file or a folder that `paceline train collect` wrote",
            field="data",
        )
    parts = [_read(file) for file in files]
    shifts = [0]
    for token_ids, _, _ in parts:
        shifts.append(shifts[-1] + len(token_ids))
    token_ids = torch.cat([part[0] for part in parts])
    ends = [part[1][1:] + shift for part, shift in zip(parts, shifts, strict=False)]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), *ends])
    prompt_len = torch.cat([part[2] for part in parts])
    digest = hashlib.blake2b(digest_size=16)
    for tensor in (token_ids, offsets, prompt_len):
        digest.update(_bytes(tensor))
    return Corpus(token_ids, offsets, prompt_len, digest.hexdigest())


def _read(file: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    try:
        with safe_open(file, framework="pt") as content:
            names = set(content.keys())
            if missing := [name for name in _TENSORS if name not in names]:
                raise _not_a_corpus(file, f"it lacks {', '.join(missing)}")
            token_ids, offsets, prompt_len = (content.get_tensor(name) for name in _TENSORS)
    except (SafetensorError, OSError) as error:
        raise _not_a_corpus(file, str(error)) from error
    kinds = (token_ids.dtype, offsets.dtype, prompt_len.dtype)
    if kinds != (torch.int32, torch.int64, torch.int32) or {token_ids.dim(), offsets.dim(), prompt_len.dim()} != {1}:
        raise _not_a_corpus(file, "token_ids and prompt_len must be flat int32, offsets flat int64")
    if len(offsets) != len(prompt_len) + 1 or not len(prompt_len):
        raise _not_a_corpus(file, f"{len(offsets)} offsets and {len(prompt_len)} prompts; one offset more is needed")
    lengths = offsets.diff()
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(token_ids) or bool((lengths < 1).any()):
        raise _not_a_corpus(file, f"offsets must rise from 0 to the number of tokens, {len(token_ids)}")
    if bool((prompt_len < 1).any()) or bool((prompt_len >= lengths).any()):
        raise _not_a_corpus(file, "each sequence needs at least one token of prompt and one of answer")
    if bool((token_ids < 0).any()):
        raise _not_a_corpus(file, "token ids must not be negative")
    return token_ids, offsets, prompt_len


def _not_a_corpus(file: Path, reason: str) -> InvalidArgument:
    return InvalidArgument(f"{file} is not a corpus: {reason}", field="data")


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()
