"""What a verifier refuses to be told."""

from __future__ import annotations

import pytest
from paceline_verifier.settings import VerifierSettings

from paceline.errors import ConfigurationError
from paceline.runtime.settings import load_settings

EAGLE = ("--self-draft-method", "eagle")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--num-draft-tokens", "1000"), "--num-draft-tokens (PACELINE_VERIFIER_NUM_DRAFT_TOKENS): is 1000: 1 to 512"),
        (
            (*EAGLE, "--num-draft-tokens", "17"),
            "--num-draft-tokens is 17: at least 1 and at most --max-draft-tokens, which is 16, are allowed",
        ),
        (
            ("--max-draft-tokens", "512"),
            "--max-draft-tokens is 512: 0 to 511 are allowed, less than --max-batch-tokens, so that a block fits in a "
            "pass",
        ),
    ],
)
def test_blocks_that_are_too_large_are_told_the_range(given: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(VerifierSettings, ["--model", "x", *given])
    assert caught.value.message == told


def test_blocks_may_be_as_large_as_a_pass_and_trees_as_large_as_a_block() -> None:
    given = [*EAGLE, "--max-batch-tokens", "64", "--max-draft-tokens", "63", "--num-draft-tokens", "63"]
    settings = load_settings(VerifierSettings, ["--model", "x", *given])
    assert (settings.max_draft_tokens, settings.num_draft_tokens) == (63, 63)
    small = load_settings(VerifierSettings, ["--model", "x", "--max-draft-tokens", "4"])
    assert small.num_draft_tokens == 16  # nobody draws a tree
