"""What `paceline up` prints when the fleet is ready."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from paceline.cli.fleet import FleetAddresses
from paceline.cli.ports import reachable
from paceline.cli.service_settings import Access
from paceline.cli.up import ending, examples, hints


def test_the_examples_can_be_pasted_into_a_shell() -> None:
    addresses = FleetAddresses(gateway="127.0.0.1:7400", http="http://127.0.0.1:8000")
    generate, curl = examples("it's a model", addresses)
    assert shlex.split(generate)[1:] == ["paceline", "generate", "Why is the sky blue?", "--address", "127.0.0.1:7400"]
    words = shlex.split(curl)
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert (body["model"], body["stream"]) == ("it's a model", True)
    assert list(hints(Access())) == []


def test_the_examples_show_what_the_gateway_asks_for() -> None:
    addresses = FleetAddresses(gateway="127.0.0.1:7400", http="https://127.0.0.1:8000")
    access = Access("0.0.0.0", tls=True, client_certificate=True, api_keys_file=Path("keys.txt"))
    generate, curl = examples("tiny", addresses, access)
    told = " ".join(hints(access))
    assert "--tls --tls-ca-file CA.pem --tls-cert-file CLIENT.pem --tls-key-file CLIENT.key" in generate
    words = shlex.split(curl)
    assert words[2] == "https://127.0.0.1:8000/v1/chat/completions"
    assert words[words.index("--cacert") + 1] == "CA.pem"
    assert (words[words.index("--cert") + 1], words[words.index("--key") + 1]) == ("CLIENT.pem", "CLIENT.key")
    # In double quotes, so that the shell puts the key in.
    assert '-H "Authorization: Bearer $PACELINE_API_KEY"' in curl
    for part in ("PACELINE_API_KEY", "keys.txt", "CA.pem", "CLIENT.key", "listens on 0.0.0.0"):
        assert part in told


@pytest.mark.parametrize(
    ("listens", "found"),
    [("0.0.0.0:1", "127.0.0.1:1"), ("[::]:1", "[::1]:1"), ("127.0.0.1:1", "127.0.0.1:1"), ("host:1", "host:1")],
)
def test_all_interfaces_are_no_address_for_clients(listens: str, found: str) -> None:
    assert reachable(listens) == found


def test_a_stop_that_waits_says_for_what() -> None:
    assert ending(1, 10.0) == "1 generation is ending (at most 10 s); Ctrl-C again stops now"
    assert ending(3, 10.0) == "3 generations are ending (at most 10 s); Ctrl-C again stops now"
