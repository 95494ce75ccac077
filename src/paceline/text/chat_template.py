"""Renders a conversation with the model's own chat template, as `transformers` does with a generation prompt.

A template is a program that comes with the model's files, so it runs in jinja2's immutable sandbox and sees plain
strings only. Where the template is looked for, first hit wins: chat_template.jinja, then `chat_template` in
tokenizer_config.json (a string, or a list of named ones of which "default" is used).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import InvalidArgument, ModelError
from paceline.text.request import ChatMessage


class ChatTemplate:
    """A compiled template, or the knowledge that the model has none."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compiles a template.

        Args:
            source: the template; None if the model has none.
            special_tokens: values of `bos_token`, `eos_token` and so on in the template.

        Raises:
            ModelError: the template is not valid jinja2.
        """
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = None if source is None else _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the chat template is not valid: line {error.lineno}: {error.message}") from error

    @classmethod
    def load(cls, model_dir: Path | str, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate:
        """Reads the template of a model folder; `special_tokens` is `Tokenizer.special_tokens` of the same folder.

        Raises:
            ModelError: the template or the file that holds it is not valid.
        """
        return cls(_find_source(Path(model_dir)), special_tokens)

    @property
    def available(self) -> bool:
        """Whether the model has a template."""
        return self._template is not None

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The text of a conversation, up to where the assistant's answer begins.

        Encode it with `add_special_tokens=False`: the template writes them.

        Raises:
            InvalidArgument: the model has no template, or the template refuses this conversation.
            ModelError: the template fails in a way that it did not mean to.
        """
        if self._template is None:
            raise InvalidArgument(
                "this model has no chat template, so it takes no chat messages; send text or token ids", field="chat"
            )
        try:
            return self._template.render(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (jinja2.UndefinedError, jinja2.TemplateSyntaxError, SecurityError) as error:
            raise ModelError(f"the model's chat template failed: {error}", field="chat") from error
        except jinja2.TemplateError as error:  # what raise_exception raises
            raise InvalidArgument(f"the model's chat template refuses these messages: {error}", field="chat") from error
        except Exception as error:  # any expression in a template may fail
            raise ModelError(f"the model's chat template failed: {error}", field="chat") from error


def _find_source(folder: Path) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return None
    try:
        source = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    except ValueError as error:
        raise ModelError(f"{config} is not valid JSON: {error}", field="model") from error
    if isinstance(source, list):
        return next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    return source if isinstance(source, str) else None


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012  (the attribute's type is jinja2's)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(jinja2.utils.Namespace):
    """A jinja2 namespace that refuses underscored names, which lead to Python's internals."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _PlainNamespace
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja2's HTML escapes, which a model has never seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
