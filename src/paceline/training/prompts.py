"""Prompts to collect a target's answers to: from a file, or made from templates where there is none."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

from paceline.errors import InvalidArgument, NotFound
from paceline.text.request import ChatMessage

Conversation = tuple[ChatMessage, ...]

_TEMPLATES = (
    "Explain {subject} to a beginner in a few paragraphs.",
    "List ten facts about {subject}.",
    "Write a short story in which {subject} plays a part.",
    "What are common mistakes that people make about {subject}?",
    "Write a Python program that has to do with {subject}, with comments.",
    "Write a friendly letter to a colleague about {subject}.",
    "Make a table with three columns that compares three kinds of {subject}.",
    "Summarise what is known about {subject} in three sentences.",
    "Give step by step instructions for somebody who begins with {subject}.",
    "Write a dialogue between two experts who disagree about {subject}.",
    "Ask and answer five questions about {subject}.",
    "Write a JSON document that describes {subject}, and explain each field.",
)
_SUBJECTS = (
    *("bread", "bicycles", "volcanoes", "sorting algorithms", "the Roman Empire", "photosynthesis", "chess", "bees"),
    *("electric cars", "budget planning", "databases", "the human heart", "jazz", "rivers", "vaccines", "bridges"),
    *(
        "gardening",
        "black holes",
        "coffee",
        "unit tests",
        "mountains",
        "public speaking",
        "the water cycle",
        "football",
    ),
    *("recursion", "sleep", "solar power", "painting", "regular expressions", "tea", "the stock market", "dogs"),
    *("web servers", "earthquakes", "poetry", "cooking rice", "the moon", "error handling", "trains", "fractions"),
)


def template_prompts() -> list[Conversation]:
    """Prompts of many kinds, always the same, for a first try; prompts of your own users train a better drafter."""
    return [
        (ChatMessage("user", template.format(subject=subject)),) for subject, template in product(_SUBJECTS, _TEMPLATES)
    ]


def read_prompts(path: Path) -> list[Conversation]:
    """Reads prompts from a file.

    Args:
        path: `.jsonl`: per line a string, `{"prompt": "..."}` or `{"messages": [{"role": ..., "content": ...}, ...]}`
            that ends with what is to be answered; any other file: one prompt per line. Empty lines are skipped.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: it holds no prompt, or a line that is none; says which.
    """
    if not path.is_file():
        raise NotFound(f"there is no file of prompts at {path}", field="prompts")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path} is not UTF-8 text: {error}", field="prompts") from error
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            found.append(_from_json(line, f"{path}:{number}") if path.suffix == ".jsonl" else _user(line.strip()))
    if not found:
        raise InvalidArgument(f"{path} holds no prompt: write one per line", field="prompts")
    return found


def _from_json(line: str, where: str) -> Conversation:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InvalidArgument(f"{where} is not JSON: {error}", field="prompts") from error
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        messages = value["messages"]
        if messages and all(_is_message(message) for message in messages):
            return tuple(ChatMessage(message["role"], message["content"]) for message in messages)
    elif isinstance(text := value.get("prompt") if isinstance(value, dict) else value, str) and text.strip():
        return _user(text)
    raise InvalidArgument(
        f'{where} is no prompt: give a string, {{"prompt": "..."}} or {{"messages": [...]}} with role and content',
        field="prompts",
    )


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(name), str) for name in ("role", "content"))


def _user(text: str) -> Conversation:
    return (ChatMessage("user", text),)
