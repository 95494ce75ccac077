"""API key and TLS of `generate` and `chat`, against a gateway on a real port."""

from __future__ import annotations

import http.server
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline.cli.connection import Connection
from paceline.errors import Unauthenticated
from paceline.exit_codes import EXIT_UNAVAILABLE, EXIT_USAGE
from tests.fakes.scripted_gateway import ANSWER, ScriptedGateway, serving

CERTIFICATES = Path(__file__).parents[1] / "runtime" / "certificates"
KEY = "sk-0123456789abcdef"
CA = ["--tls", "--tls-ca-file", str(CERTIFICATES / "ca.pem")]
PAIR = ["--tls-cert-file", str(CERTIFICATES / "client.pem"), "--tls-key-file", str(CERTIFICATES / "client.key")]
COMMANDS = pytest.mark.parametrize("command", [["generate", "hi"], ["chat"]], ids=["generate", "chat"])


@pytest.fixture
def gateway() -> ScriptedGateway:
    return ScriptedGateway(ANSWER)


@pytest.fixture
def address(gateway: ScriptedGateway) -> Iterator[str]:
    with serving(gateway) as where:
        yield where


def mutual_tls() -> grpc.ServerCredentials:
    pair = ((CERTIFICATES / "server.key").read_bytes(), (CERTIFICATES / "server.pem").read_bytes())
    return grpc.ssl_server_credentials([pair], (CERTIFICATES / "ca.pem").read_bytes(), True)


@COMMANDS
@pytest.mark.parametrize("by_flag", [True, False])
def test_the_key_goes_along(gateway: ScriptedGateway, address: str, command: list[str], by_flag: bool) -> None:
    flags, environment = (["--api-key", KEY], {}) if by_flag else ([], {"PACELINE_API_KEY": KEY})
    result = CliRunner().invoke(app, [*command, "--address", address, *flags], input="hi\n\n", env=environment)
    assert result.exit_code == 0
    assert gateway.metadata[-1]["authorization"] == f"Bearer {KEY}"
    assert KEY not in result.output


@COMMANDS
def test_without_a_key_none_is_sent(gateway: ScriptedGateway, address: str, command: list[str]) -> None:
    assert CliRunner().invoke(app, [*command, "--address", address], input="hi\n\n").exit_code == 0
    assert "authorization" not in gateway.metadata[-1]


@COMMANDS
def test_help_names_the_variable_and_shows_no_key(command: list[str]) -> None:
    result = CliRunner().invoke(app, [command[0], "--help"], env={"PACELINE_API_KEY": KEY, "COLUMNS": "200"})
    assert "PACELINE_API_KEY" in result.output
    assert KEY not in result.output


def test_no_printed_connection_has_a_key_in_it() -> None:
    assert KEY not in repr(Connection("host:1", api_key=KEY))


def test_a_key_that_no_header_holds_is_not_shown() -> None:
    result = CliRunner().invoke(app, ["generate", "hi", "--api-key", f"{KEY} é"])
    assert result.exit_code == EXIT_USAGE
    assert result.stderr == ("error: --api-key or PACELINE_API_KEY must be visible ASCII characters without spaces\n")


@pytest.mark.parametrize(
    ("flags", "words"),
    [([], "asks for an API key: give"), (["--api-key", KEY], "does not know this API key: check")],
)
def test_a_gateway_that_wants_another_key(gateway: ScriptedGateway, address: str, flags: list[str], words: str) -> None:
    gateway.events, gateway.error = (), Unauthenticated("an API key is required: send the header", field="h")
    result = CliRunner().invoke(app, ["generate", "hi", "--address", address, *flags])
    assert result.exit_code == EXIT_USAGE
    assert result.stderr == f"error: {address} {words} --api-key or PACELINE_API_KEY\n"


@contextmanager
def http_server(*, tls: bool) -> Iterator[str]:
    """A server of HTTP/1 on a free port; the address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), QuietHandler) as server:
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(CERTIFICATES / "server.pem", CERTIFICATES / "server.key")
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class QuietHandler(http.server.BaseHTTPRequestHandler):
    """Answers every request with an error and logs nothing."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        pass


@COMMANDS
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_an_http_port_is_recognised(command: list[str], tls: bool) -> None:
    with http_server(tls=tls) as address:
        result = CliRunner().invoke(app, [*command, "--address", address, *(CA if tls else [])])
    assert result.exit_code == EXIT_UNAVAILABLE
    assert result.stderr.startswith(f"error: {address} looks like HTTP, ")
    assert "--address, such as 127.0.0.1:7400" in result.stderr


@COMMANDS
def test_mutual_tls(gateway: ScriptedGateway, command: list[str]) -> None:
    with serving(gateway, mutual_tls()) as address:
        result = CliRunner().invoke(app, [*command, "--address", address, *CA, *PAIR], input="hi\n\n")
    assert result.exit_code == 0, result.output
    assert "日本é😀" in result.stdout


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        ([], "add --tls"),
        (["--tls"], "--tls-ca-file"),
        (CA, "--tls-cert-file"),
        ([*CA[:2], str(CERTIFICATES / "server.key")], "--tls-ca-file"),
    ],
)
def test_a_gateway_that_speaks_another_tls(gateway: ScriptedGateway, flags: list[str], hint: str) -> None:
    with serving(gateway, mutual_tls()) as address:
        result = CliRunner().invoke(app, ["generate", "hi", "--address", address, *flags])
    assert result.exit_code == EXIT_UNAVAILABLE
    assert hint in result.stderr
    assert address in result.stderr


def test_a_gateway_that_speaks_no_tls(address: str) -> None:
    result = CliRunner().invoke(app, ["generate", "hi", "--address", address, *CA])
    assert result.exit_code == EXIT_UNAVAILABLE
    assert "Does it speak TLS" in result.stderr


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (CA[1:], "need --tls"),
        ([*CA, *PAIR[:2]], "belong together"),
        (["--tls", "--tls-ca-file", "no-such-file"], "no-such-file"),
    ],
)
@COMMANDS
def test_flags_that_do_not_fit_together(command: list[str], flags: list[str], hint: str) -> None:
    result = CliRunner().invoke(app, [*command, *flags])
    assert result.exit_code == EXIT_USAGE
    assert hint in result.stderr
