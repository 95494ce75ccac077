"""Our rendering against that of `transformers`, on templates that use what real ones use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from paceline import model_source
from paceline.errors import InvalidArgument, ModelError
from paceline.text.chat_template import ChatTemplate
from paceline.text.request import ChatMessage
from paceline.text.tokenizer import Tokenizer
from tests.fakes.tiny_tokenizer import CHAT_TEMPLATE, write_byte_level

CHATS = {
    "one": [("user", "Hi")],
    "system": [("system", "Be brief."), ("user", "  Name a bike.\n")],
    "turns": [("user", "a"), ("assistant", "b<|im_end|>"), ("user", "c"), ("assistant", "d"), ("user", "e")],
    "signs": [("user", "<b>\"quotes\" & 'more'</b> {{ 1 + 1 }} {% if %} 你好 🚲 \\n")],
    "tool": [("user", "a"), ("tool", '{"x": 1}')],
}

TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "whitespace": """
    {%- for message in messages %}
        {% if loop.first %}
    first
        {% endif %}
        {{- '[' ~ message.role | upper ~ '] ' }}
        {{ message['content'] | trim }}
    {% endfor %}
    {% if add_generation_prompt -%} GO {%- endif %}
""",
    "namespace_and_loops": """{{ bos_token }}{% set ns = namespace(found=false, count=0) %}
{%- for message in messages -%}
{%- if message.role == 'system' %}{% set ns.found = true %}{% continue %}{% endif -%}
{%- set ns.count = ns.count + 1 -%}
{%- if ns.count > 3 %}{% break %}{% endif -%}
{{ loop.index0 }}:{{ message.content }}{{ eos_token }}
{% endfor -%}
{{ 'with' if ns.found else 'without' }} system, {{ strftime_now('%Y') }}""",
    "json": """{% for message in messages %}{{ message | tojson }}
{{ message | tojson(indent=2) }}
{{ {'b': 1, 'a': '<é>'} | tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':')) }}
{% endfor %}{% if tools is not none %}TOOLS{% endif %}{% if documents %}DOCS{% endif %}""",
    "macro_and_slices": """{% macro turn(m) %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>{% endmacro %}
{%- if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{{ messages[0]['content'] }}{% else %}
{%- set rest = messages %}{% endif %}
{%- for m in rest %}{{ turn(m) }}{% endfor %}{{ messages | length }}{{ messages[-1]['content'].split(' ') | join('+') }}
{%- if undefined_thing is defined %}never{% endif %}{{ undefined_thing }}{{ unk_token }}""",
    "generation_tag": """{% for m in messages %}{% if m.role == 'assistant' %}
{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}
{% else %}{{ m.role }}: {{ m.content }}
{% endif %}{% endfor %}""",
}
SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}


def messages(chat: str) -> list[ChatMessage]:
    return [ChatMessage(role, content) for role, content in CHATS[chat]]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = write_byte_level(tmp_path_factory.mktemp("model"))
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(folder / "tokenizer.json"), **SPECIAL
    )


def rendered(theirs: PreTrainedTokenizerBase, chat: str, template: str | None = None) -> str:
    text = theirs.apply_chat_template(
        [{"role": role, "content": content} for role, content in CHATS[chat]],
        chat_template=template,
        tokenize=False,
        add_generation_prompt=True,
    )
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_equals_transformers(theirs: PreTrainedTokenizerBase, name: str, chat: str) -> None:
    ours = ChatTemplate(TEMPLATES[name], SPECIAL)
    assert ours.render(messages(chat)) == rendered(theirs, chat, TEMPLATES[name])


@pytest.fixture(scope="module")
def real_tokenizers() -> tuple[Path, Tokenizer, PreTrainedTokenizerBase]:
    """Folder of the real model, our tokenizer and theirs."""
    folder = model_source.resolve("smollm2-135m-instruct")
    return folder, Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.real_model
@pytest.mark.parametrize("chat", CHATS)
def test_the_real_models_template_and_ids_equal_transformers(
    real_tokenizers: tuple[Path, Tokenizer, PreTrainedTokenizerBase], chat: str
) -> None:
    folder, ours, theirs = real_tokenizers
    text = ChatTemplate.load(folder, ours.special_tokens).render(messages(chat))
    assert text == rendered(theirs, chat)
    ids = theirs(text, add_special_tokens=False)["input_ids"]
    assert list(ours.encode(text, add_special_tokens=False)) == ids


def test_what_a_template_refuses_is_the_clients_error() -> None:
    template = ChatTemplate(
        "{% if messages[0].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}ok"
    )
    assert template.render(messages("one")) == "ok"
    with pytest.raises(InvalidArgument, match="refuses these messages: roles must alternate") as caught:
        template.render(messages("system"))
    assert caught.value.field == "chat"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ messages[0].content.nothing.more }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_breaks_out_or_breaks_is_the_models_error(source: str) -> None:
    with pytest.raises(ModelError, match="chat template failed"):
        ChatTemplate(source).render(messages("one"))


def test_a_template_that_is_not_jinja_is_refused_at_load() -> None:
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate("a\n{% for %}")


def test_a_model_without_a_template_takes_no_chat(tmp_path: Path) -> None:
    template = ChatTemplate.load(tmp_path)
    assert not template.available
    with pytest.raises(InvalidArgument, match="no chat template") as caught:
        template.render(messages("one"))
    assert caught.value.field == "chat"


def test_where_the_template_is_found(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": [{"name": "rag", "template": "r"}]}))
    assert not ChatTemplate.load(tmp_path).available
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "named"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.load(tmp_path).render(messages("one")) == "named"
    config.write_text(json.dumps({"chat_template": "plain"}))
    assert ChatTemplate.load(tmp_path).render(messages("one")) == "plain"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.load(tmp_path).render(messages("one")) == "file"
    (tmp_path / "chat_template.jinja").unlink()
    config.write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        ChatTemplate.load(tmp_path)
