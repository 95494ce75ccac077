"""The commands, run in this process; where they speak to a gateway it is a scripted one on a real port."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline import __version__
from paceline.cli.app import app
from paceline.cli.fleet_options import FleetOptions
from paceline.cli.serve import ServiceName, service_command
from paceline.errors import (
    CapacityExceeded,
    ConfigurationError,
    InvalidArgument,
    ModelError,
    NotFound,
    PacelineError,
    Unavailable,
)
from paceline.exit_codes import EXIT_FAILED, EXIT_UNAVAILABLE, EXIT_USAGE, exit_code
from paceline.generation import Chunk, Evidence, Finished, Promise, Started
from paceline.messages import AcceptanceRule, FinishReason, TokenOrigin
from paceline.text.request import ChatMessage, ChatPrompt, TextPrompt
from tests.fakes.scripted_gateway import ScriptedGateway, serving

EVENTS = (
    Started("s-1", "tiny", prompt_tokens=5, seed=7, promise=Promise.DISTRIBUTION, warnings=("no drafter is there",)),
    Chunk("The sky", (1, 2), (TokenOrigin.ACCEPTED, TokenOrigin.BONUS), 7, True, (3, 4)),
    Chunk(" is [red]", (3,), (TokenOrigin.RECOVERED,), 8, True, (9,)),
    Finished(
        FinishReason.LENGTH,
        prompt_tokens=5,
        completion_tokens=3,
        evidence=Evidence(
            target_passes=2,
            tokens_per_target_pass=1.5,
            draft_tokens=4,
            accepted_tokens=1,
            total_ms=100.0,
            draft_ms=10.0,
            verify_ms=80.0,
            wire_ms=2.0,
        ),
    ),
)


@pytest.fixture
def gateway() -> ScriptedGateway:
    return ScriptedGateway(EVENTS)


@pytest.fixture
def address(gateway: ScriptedGateway) -> Iterator[str]:
    with serving(gateway) as where:
        yield where


def test_generate_prints_the_text_and_then_one_line(address: str) -> None:
    result = CliRunner().invoke(app, ["generate", "Why?", "--address", address])
    assert result.exit_code == 0
    assert result.stdout == "The sky is [red]\n"
    warning, summary = result.stderr.strip().splitlines()
    assert "no drafter is there" in warning
    assert summary == (
        "3 tokens | 2 passes | 1.50 tokens/pass | acceptance 25% | 30.0 tok/s | draft 10 ms, verify 80 ms, wire 2 ms"
    )


def test_generate_for_machines(address: str) -> None:
    result = CliRunner().invoke(app, ["generate", "Why?", "--address", address, "--json"])
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert told["text"] == "The sky is [red]"
    assert told["token_ids"] == [1, 2, 3]
    assert told["origins"] == ["accepted", "bonus", "recovered"]
    assert told["finish_reason"] == "length"
    assert told["evidence"]["target_passes"] == 2
    assert (told["seed"], told["session"], told["durable"]) == (7, "s-1", True)
    assert told["promise"] == "distribution"


def test_generate_passes_every_option_on(gateway: ScriptedGateway, address: str) -> None:
    words = "generate Why? --raw --model tiny --max-tokens 9 --temperature 0.8 --top-p 0.9 --top-k 40 --min-p 0.05"
    words += " --seed 11 --stop END --stop STOP --method ngram --num-speculative-tokens 6 --no-speculation"
    words += " --acceptance-rule ratio"
    result = CliRunner().invoke(app, [*words.split(), "--address", address])
    assert result.exit_code == 0
    (request,) = gateway.requests
    assert request.prompt == TextPrompt("Why?")
    assert (request.model, request.max_tokens, request.seed, request.stop) == ("tiny", 9, 11, ("END", "STOP"))
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.8, 0.9, 40, 0.05)
    speculation = request.speculation
    assert (speculation.enabled, speculation.method, speculation.num_speculative_tokens) == (False, "ngram", 6)
    assert request.rule is AcceptanceRule.RATIO


def test_generate_asks_greedily_for_a_chat_by_default(gateway: ScriptedGateway, address: str) -> None:
    arguments = ["generate", "-", "--system", "Be brief.", "--address", address]
    assert CliRunner().invoke(app, arguments, input="Why?").exit_code == 0
    (request,) = gateway.requests
    assert request.prompt == ChatPrompt((ChatMessage("system", "Be brief."), ChatMessage("user", "Why?")))
    assert request.sampling.greedy
    assert (request.max_tokens, request.seed, request.speculation.enabled) == (None, None, True)
    assert request.speculation.num_speculative_tokens is None
    assert request.rule is AcceptanceRule.MATCH


def test_chat_sends_the_whole_conversation(gateway: ScriptedGateway, address: str) -> None:
    result = CliRunner().invoke(app, ["chat", "--address", address], input="Why?\nAnd then?\n\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "The sky is [red]\n" * 2
    first, second = gateway.requests
    assert first.prompt == ChatPrompt((ChatMessage("user", "Why?"),))
    assert second.prompt == ChatPrompt(
        (ChatMessage("user", "Why?"), ChatMessage("assistant", "The sky is [red]"), ChatMessage("user", "And then?"))
    )


@pytest.mark.parametrize("arguments", [["generate", "Why?"], ["chat"]])
def test_no_gateway_is_one_line_and_exit_code_3(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, [*arguments, "--address", "127.0.0.1:1"])
    assert result.exit_code == EXIT_UNAVAILABLE
    assert result.stdout == ""
    assert result.stderr == (
        "error: no gateway answers at 127.0.0.1:1: start one with `paceline up`, or name another with --address\n"
    )


@pytest.mark.parametrize("arguments", [["generate", "Why?"], ["chat"]])
def test_a_gateway_without_its_verifier_says_so_in_its_own_words(
    gateway: ScriptedGateway, address: str, arguments: list[str]
) -> None:
    words = "no verifier of model tiny is there (127.0.0.1:1: failed to connect to all addresses)"
    gateway.events, gateway.error = (), Unavailable(words)
    result = CliRunner().invoke(app, [*arguments, "--address", address], input="Why?\n\n")
    assert result.exit_code == EXIT_UNAVAILABLE
    assert result.stderr.endswith(f"error: {words}\n")
    assert "no gateway" not in result.stderr


def test_what_the_gateway_refuses_is_one_line(gateway: ScriptedGateway, address: str) -> None:
    gateway.events, gateway.error = (), InvalidArgument("max_tokens is -1: at least 1", field="max_tokens")
    result = CliRunner().invoke(app, ["generate", "Why?", "--max-tokens", "-1", "--address", address])
    assert result.exit_code == EXIT_USAGE
    assert result.stderr == "error: max_tokens is -1: at least 1\n"


def test_an_error_in_the_middle_keeps_the_text_and_fails(gateway: ScriptedGateway, address: str) -> None:
    gateway.events, gateway.error = EVENTS[:2], ModelError("a row is not finite")
    result = CliRunner().invoke(app, ["generate", "Why?", "--address", address])
    assert result.exit_code == EXIT_FAILED
    assert "The sky" in result.stdout
    assert "error: a row is not finite" in result.stderr


def test_a_stream_that_breaks_goes_on_over_another_gateway() -> None:
    gone = Unavailable("the gateway is shutting down")
    one, two = (ScriptedGateway(EVENTS[:2], gone, resumed=(EVENTS[0], *EVENTS[2:])) for _ in range(2))
    with serving(one) as first, serving(two) as second:
        result = CliRunner().invoke(app, ["generate", "Why?", "--json", "--address", f"{first},{second}"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["text"] == "The sky is [red]"
    assert len(one.resumes) + len(two.resumes) == 1
    assert bool(one.requests) != bool(one.resumes)


def test_a_stream_that_just_ends_is_no_success(gateway: ScriptedGateway, address: str) -> None:
    gateway.events = EVENTS[:2]
    result = CliRunner().invoke(app, ["generate", "Why?", "--address", address])
    assert result.exit_code == EXIT_UNAVAILABLE
    assert "without its last message" in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidArgument("x"), 2),
        (ConfigurationError("x"), 2),
        (NotFound("x"), 2),
        (Unavailable("x"), 3),
        (CapacityExceeded("x"), 1),
        (PacelineError("x"), 1),
    ],
)
def test_exit_codes(error: PacelineError, code: int) -> None:
    assert exit_code(error) == code


def test_up_refuses_what_can_never_work() -> None:
    result = CliRunner().invoke(app, ["up", "--drafter-device", "cuda:1"])
    assert result.exit_code == EXIT_USAGE
    assert "--drafter-model" in result.stderr


def test_up_defaults_are_those_of_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[FleetOptions] = []

    def run_up(options: FleetOptions, *, json_output: bool) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr("paceline.cli.up.run_up", run_up)
    assert CliRunner().invoke(app, ["up"]).exit_code == 0
    assert seen == [FleetOptions()]


def test_up_help_says_how_to_reach_the_services_settings() -> None:
    told = " ".join(CliRunner().invoke(app, ["up", "--help"], env={"COLUMNS": "120"}).stdout.split())
    for service in ("GATEWAY", "VERIFIER", "DRAFTER"):
        assert f"PACELINE_{service}_*" in told
    assert "PACELINE_GATEWAY_API_KEYS_FILE=keys.txt PACELINE_GATEWAY_LOG_FORMAT=json paceline up" in told
    assert "PACELINE" not in CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).stdout  # one line for each


def test_up_passes_both_ports_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[FleetOptions] = []

    def run_up(options: FleetOptions, *, json_output: bool) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr("paceline.cli.up.run_up", run_up)
    assert CliRunner().invoke(app, ["up", "--port", "1", "--http-port", "2"]).exit_code == 0
    assert [(options.port, options.http_port) for options in seen] == [(1, 2)]


def test_up_without_draft_tokens_starts_no_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[FleetOptions] = []

    async def run(options: FleetOptions, _json_output: bool) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr("paceline.cli.up._run_up", run)
    result = CliRunner().invoke(app, ["up", "--num-speculative-tokens", "0"])
    assert result.exit_code == 0
    assert [options.drafters for options in seen] == [0]
    assert result.stderr == "--num-speculative-tokens 0: nothing drafts, decoding is plain\n"


def test_serve_passes_flags_through(monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[tuple[str, ...]] = []
    environments: list[dict[str, str]] = []

    def execve(_path: str, command: tuple[str, ...], environment: dict[str, str]) -> None:
        executed.append(tuple(command))
        environments.append(environment)

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.delenv("GRPC_EXPERIMENTS", raising=False)
    CliRunner().invoke(app, ["serve", "verifier", "--model", "m", "--port=1", "--help"])
    assert executed == [(sys.executable, "-m", "paceline_verifier", "--model", "m", "--port=1", "--help")]
    (environment,) = environments
    assert environment["GRPC_EXPERIMENTS"] == "-event_engine_client,-event_engine_listener"


def test_serve_has_help_of_its_own() -> None:
    result = CliRunner().invoke(app, ["serve", "--help"])
    assert result.exit_code == 0
    assert "gateway" in result.stdout
    assert "verifier" in result.stdout


def test_serve_says_when_a_service_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigurationError, match="pip install -e services/gateway"):
        service_command(ServiceName.GATEWAY, ())


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.stdout == f"paceline {__version__}\n"


def test_quantize_refuses_other_widths() -> None:
    result = CliRunner().invoke(app, ["quantize", "anything", "--bits", "int3"])
    assert result.exit_code == EXIT_USAGE
    assert "int8 or int4" in result.stderr


def test_quantize_of_a_model_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["quantize", str(tmp_path / "none.gguf")])
    assert result.exit_code == EXIT_USAGE
    assert "there is no file" in result.stderr
