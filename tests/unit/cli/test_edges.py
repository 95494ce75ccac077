"""What no terminal, no gateway or no message can take is one line and an exit code, never a traceback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.errors import InvalidArgument, ModelError
from paceline.exit_codes import EXIT_FAILED, EXIT_UNAVAILABLE, EXIT_USAGE, exit_code
from tests.fakes.scripted_gateway import ANSWER, ScriptedGateway, serving

NOWHERE = "127.0.0.1:1"


@pytest.fixture
def gateway() -> ScriptedGateway:
    return ScriptedGateway(ANSWER)


@pytest.fixture
def address(gateway: ScriptedGateway) -> Iterator[str]:
    with serving(gateway) as where:
        yield where


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--max-tokens", "99999999999", "max_tokens"),
        ("--top-k", "99999999999", "top_k"),
        ("--num-speculative-tokens", "99999999999", "num_speculative_tokens"),
        ("--seed", "9223372036854775808", "seed"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_numbers_that_no_message_can_hold(address: str, command: str, option: str, value: str, field: str) -> None:
    arguments = [command, *(["hi"] if command == "generate" else []), option, value, "--address", address]
    result = CliRunner().invoke(app, arguments, input="hi\n\n")
    assert result.exit_code == EXIT_USAGE
    error = result.stderr.strip().splitlines()[-1]
    assert f"{field} is {value}; it must be at most" in error


@pytest.mark.parametrize("address", ["", "nonsense", "http://127.0.0.1:7400", "host:0", "host:70000", ":7400"])
@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"]])
def test_what_is_no_address(command: list[str], address: str) -> None:
    result = CliRunner().invoke(app, [*command, "--address", address])
    assert result.exit_code == EXIT_USAGE
    assert result.stderr == f"error: --address {address!r} is no address; write host:port\n"


def test_a_host_without_a_name_is_told_as_one_that_does_not_answer() -> None:
    result = CliRunner().invoke(app, ["generate", "hi", "--address", "nonsense.invalid:7400"])
    assert result.exit_code == EXIT_UNAVAILABLE
    assert result.stderr.startswith("error: no gateway answers at nonsense.invalid:7400")


def test_an_error_is_an_object_for_machines(gateway: ScriptedGateway, address: str) -> None:
    gateway.events, gateway.error = ANSWER[:2], InvalidArgument("stop is wrong", field="stop")
    result = CliRunner().invoke(app, ["generate", "hi", "--json", "--address", address])
    assert result.exit_code == EXIT_USAGE
    assert json.loads(result.stdout) == {
        "error": {"code": "invalid_argument", "message": "stop is wrong", "field": "stop"}
    }
    assert result.stderr == "error: stop is wrong\n"


def test_no_gateway_is_an_object_for_machines_too() -> None:
    result = CliRunner().invoke(app, ["generate", "hi", "--json", "--address", NOWHERE])
    assert result.exit_code == EXIT_UNAVAILABLE
    assert json.loads(result.stdout)["error"]["code"] == "unavailable"


def test_a_folder_without_a_model_is_to_be_corrected_on_the_command_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["quantize", str(tmp_path)])
    assert result.exit_code == EXIT_USAGE
    assert "lacks config.json" in result.stderr
    assert exit_code(ModelError("a row is not finite")) == EXIT_FAILED
