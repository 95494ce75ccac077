"""The field that keeps a body from being JSON is found, and nothing else is blamed."""

from __future__ import annotations

import pytest
from paceline_gateway.http.misfit import body_misfit


@pytest.mark.parametrize(
    ("content", "field", "said"),
    [
        (b'{"temperature": NaN}', "temperature", "nan"),
        (b'{"top_p": -Infinity, "temperature": NaN}', "top_p", "-inf"),
        (b'{"speculation": {"method": "a\\udc00"}}', "speculation.method", "surrogate at character 1"),
        (b'{"prompt": "ok \\ud83d\\ude00", "stop": ["a", "\\ud83d"]}', "stop[1]", "surrogate at character 0"),
        (b'{"messages": [{"content": "a"}, {"content": "\\ud800"}]}', "messages[1].content", "surrogate"),
        (b'{"logit_bias": {"\\ud800": 1}}', "logit_bias", "surrogate"),
        (b'{"logit_bias": {"1": NaN}}', "logit_bias.1", "nan"),
        (b"[1, [NaN]]", "[1][0]", "nan"),
        (b'"\\ud800"', "", "surrogate"),
        (b'{"' + b"a" * 5000 + b'": NaN}', "a" * 200, "nan"),
    ],
)
def test_the_first_field_at_fault_is_named(content: bytes, field: str, said: str) -> None:
    error = body_misfit(content)
    assert error is not None
    assert error.field == field
    assert error.message.startswith("the body is not valid JSON: " + field)
    assert said in error.message
    assert error.message.isprintable()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b'{"a": 1}', b'{"a": ' + b"9" * 5000 + b"}"])
def test_nobody_is_blamed_for_other_faults(content: bytes) -> None:
    assert body_misfit(content) is None
