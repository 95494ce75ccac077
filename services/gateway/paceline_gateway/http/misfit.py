"""Which field keeps a body from being JSON: a lone surrogate, NaN or infinity, which lenient encoders write.

Looked for only after the body has been refused: what is JSON costs nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from paceline.errors import InvalidArgument

_SAID = "the body is not valid JSON: "
_MAX_PATH_CHARS = 200


def body_misfit(content: bytes) -> InvalidArgument | None:
    """The error for a body that is no JSON; names the first field at fault. None if no single field is.

    Args:
        content: the body.
    """
    try:
        fields = json.loads(content)  # takes what JSON has not
    except (ValueError, RecursionError):
        return None
    for path, value in _values(fields):
        if isinstance(value, float) and not math.isfinite(value):
            return InvalidArgument(f"{_SAID}{path} is {value}, which is no number there", field=path)
        if isinstance(value, str) and (at := _lone_surrogate(value)) is not None:
            return InvalidArgument(f"{_SAID}{path} has a lone surrogate at character {at}", field=path)
    return None


def _lone_surrogate(text: str) -> int | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _values(fields: Any) -> Iterator[tuple[str, Any]]:
    """Path and value of everything in a JSON value, in its order; a key is a value of its object."""
    waiting = [("", fields)]
    while waiting:
        path, value = waiting.pop()
        inner: list[tuple[str, Any]] = []
        if isinstance(value, dict):
            for key, item in value.items():
                if _lone_surrogate(key) is not None:
                    yield path, key
                inner.append((f"{path}.{key}".lstrip(".")[:_MAX_PATH_CHARS], item))
        elif isinstance(value, list):
            inner = [(f"{path}[{index}]"[:_MAX_PATH_CHARS], item) for index, item in enumerate(value)]
        else:
            yield path, value
        waiting.extend(reversed(inner))
