"""What the log line of a refusal says, and what it leaves out."""

from __future__ import annotations

import pytest

from paceline.errors import InvalidArgument, NotFound
from paceline.runtime.refusals import safe_reason

APOSTROPHE = "it's secret"
QUOTED = "it's a \"secret\", isn't it"


@pytest.mark.parametrize(
    ("said", "logged"),
    [
        ("top_p is 2; it must be in (0, 1]", "top_p is 2; it must be in (0, 1]"),
        ("model 'secret' is not served", "model … is not served"),
        (f"model {QUOTED!r} is not served", "model … is not served"),
        (f"model {APOSTROPHE!r} is not served", "model … is not served"),
        ("the model's context is not the client's 'secret' one", "the model's context is not the client's … one"),
        ("model 'secret that was cut", "model …"),
        ("line 'a\nsecret' ends", "line … ends"),
        ("x" * 1000, "x" * 300),
    ],
)  # fmt: skip
def test_what_is_quoted_is_cut(said: str, logged: str) -> None:
    assert safe_reason(NotFound(said), "") == logged


def test_a_field_that_may_not_be_shown_is_not_in_the_reason_either() -> None:
    error = InvalidArgument("logit_bias.secret must be a number", field="logit_bias.secret")
    assert safe_reason(error, "logit_bias.…") == "logit_bias.… must be a number"


def refuse() -> None:
    try:
        raise ValueError("secret")
    except ValueError as error:
        raise InvalidArgument(f"the template refuses: {error}") from error


def test_words_of_a_library_are_cut_however_often_the_error_was_raised_again() -> None:
    with pytest.raises(InvalidArgument) as once:
        refuse()
    with pytest.raises(InvalidArgument) as again:
        raise once.value from once.value
    assert safe_reason(again.value, "") == "the template refuses: …"
