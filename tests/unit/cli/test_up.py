"""What `paceline up` prints when the fleet is ready."""

from __future__ import annotations

import json
import shlex

from paceline.cli.fleet import FleetAddresses
from paceline.cli.up import examples


def test_the_examples_can_be_pasted_into_a_shell() -> None:
    addresses = FleetAddresses(gateway="127.0.0.1:7400", http="http://127.0.0.1:8000")
    generate, curl = examples("it's a model", addresses)
    assert shlex.split(generate)[1:] == ["paceline", "generate", "Why is the sky blue?", "--address", "127.0.0.1:7400"]
    words = shlex.split(curl)
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert (body["model"], body["stream"]) == ("it's a model", True)
