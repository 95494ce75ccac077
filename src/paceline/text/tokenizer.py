"""A model's tokenizer without the model: text to token ids and back, and a fingerprint to compare two of them by.

Reads a model folder's tokenizer.json, tokenizer_config.json, special_tokens_map.json, generation_config.json and
config.json. Needs neither torch nor `transformers`. Streaming text is `paceline.text.detokenizer`'s task.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from paceline.errors import InvalidArgument, ModelError
from paceline.text.detokenizer import Detokenizer
from paceline.text.pieces import PieceDecoder
from paceline.text.vocabulary import VocabularyDifference, first_difference, without_padding

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names under which a chat template knows special tokens."""

_LONG_CHARS = 4096
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")


class Tokenizer:
    """Text to ids and back. Immutable; may be shared by threads.

    Attributes:
        vocab_size: number of token ids that it can produce: one above the highest, padding not counted.
        eos_token_ids: ids that end a generation, ascending.
        special_tokens: text of the named special tokens (`bos_token`, ...) that the model defines.
        max_model_len: tokens that the model's configuration allows in one context; None if it does not say.
        decoder: how tokens become text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Iterable[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        max_model_len: int | None = None,
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        vocab = {token_id: token for token, token_id in backend.get_vocab(with_added_tokens=True).items()}
        vocab.update({token_id: token.content for token_id, token in added.items()})
        self._vocab = without_padding(vocab)
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._pieces: dict[int, bytes | None] = {}
        self.vocab_size = 1 + max(self._vocab, default=-1)
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.special_tokens: Mapping[str, str] = dict(special_tokens or {})
        self.max_model_len = max_model_len
        self.decoder = PieceDecoder.from_description(json.loads(backend.to_str()).get("decoder"))

    @classmethod
    def load(cls, model_dir: Path | str) -> Tokenizer:
        """Reads the tokenizer of a model folder.

        Raises:
            ModelError: there is none, it cannot be read, or its text cannot be streamed.
        """
        folder = Path(model_dir)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                f"{folder} has no tokenizer.json; write one with "
                "transformers.AutoTokenizer.from_pretrained(...).save_pretrained(...)",
                field="model",
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{path} cannot be read: {error}", field="model") from error
        settings = _read_json(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(_read_json(folder / "special_tokens_map.json") | settings)
        return cls(
            backend,
            eos_token_ids=_eos_token_ids(folder, backend, special_tokens),
            special_tokens=special_tokens,
            max_model_len=_max_model_len(_read_json(folder / "config.json")),
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a text.

        Args:
            text: what to encode; special tokens spelt out in it become their ids, as in `transformers`.
            add_special_tokens: add what the tokenizer adds around a text, such as a begin token; not wanted for a
                rendered chat, which has them.

        Raises:
            InvalidArgument: the text holds a lone surrogate and is no Unicode.
        """
        try:
            text.encode()  # the library's own complaint does not say what is wrong
        except UnicodeEncodeError as error:
            raise InvalidArgument(
                f"prompt is not valid Unicode: lone surrogate at character {error.start}", field="prompt"
            ) from error
        if len(text) > _LONG_CHARS:
            # Unlike `encode` this lets other threads run meanwhile.
            return tuple(self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)
        return tuple(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of the ids, special tokens left out; what is no UTF-8 becomes U+FFFD, also at the end."""
        detokenizer = Detokenizer(self)
        return "".join([detokenizer.push(token_id) for token_id in token_ids]) + detokenizer.incomplete

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id without one."""
        return self._vocab.get(token_id)

    def token_id(self, token: str) -> int | None:
        """The id of a token; None if the vocabulary lacks it."""
        return self._backend.token_to_id(token)

    def piece(self, token_id: int, *, first: bool = False) -> bytes | None:
        """Bytes that a token adds to a text; None for special tokens and ids without a token, which add nothing.

        Args:
            token_id: the token.
            first: whether it is the first token with text.
        """
        if first and self.decoder.bare_first:
            return None if self._hidden(token_id) else self.decoder.piece(self._vocab[token_id], first=True)
        try:
            return self._pieces[token_id]
        except KeyError:
            hidden = self._hidden(token_id)
            piece = self._pieces[token_id] = None if hidden else self.decoder.piece(self._vocab[token_id])
            return piece

    def _hidden(self, token_id: int) -> bool:
        return token_id in self._special_ids or token_id not in self._vocab

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 over all (id, token) pairs, added tokens included and padding left out.

        Equal fingerprints mean that every id stands for the same token, which is all that drafting and verifying need;
        the width of the model's logits, which may be padded, does not enter.
        """
        digest = hashlib.sha256()
        for token_id in sorted(self._vocab):
            token = self._vocab[token_id].encode("utf-8", "surrogatepass")
            digest.update(f"{token_id}:{len(token)}:".encode())
            digest.update(token)
        return digest.hexdigest()

    @property
    def vocabulary(self) -> Mapping[int, str]:
        """Token of each id, added tokens included and padding left out; a live view, not to be changed."""
        return self._vocab

    def first_difference(self, there: Mapping[int, str]) -> VocabularyDifference | None:
        """The lowest id at which a vocabulary differs from this one, padding left out; None when it is the same."""
        return first_difference(self._vocab, without_padding(there))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}", field="model") from error
    return content if isinstance(content, dict) else {}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens; each is a string or an object with its `content`."""
    found = {}
    for name in SPECIAL_TOKEN_NAMES:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _eos_token_ids(folder: Path, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> set[int]:
    """Ids of generation_config.json, else of config.json; the tokenizer's own end token always counts too."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        config = _read_json(folder / name)
        value = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
        if value is not None:
            ids.update(value if isinstance(value, list) else [value])
            break
    own = backend.token_to_id(special_tokens["eos_token"]) if "eos_token" in special_tokens else None
    return ids if own is None else ids | {own}


def _max_model_len(config: Mapping[str, Any]) -> int | None:
    for settings in (config, config.get("text_config") or {}):
        for key in _CONTEXT_KEYS:
            if isinstance(settings.get(key), int):
                return int(settings[key])
    return None
