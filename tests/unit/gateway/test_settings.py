from __future__ import annotations

from pathlib import Path

import pytest
from paceline_gateway.discovery.targets import DnsTarget, KubernetesTarget, StaticTarget, Target
from paceline_gateway.settings import GatewaySettings

from paceline.errors import ConfigurationError
from paceline.runtime.settings import describe, load_settings


def load(*arguments: str) -> GatewaySettings:
    return load_settings(GatewaySettings, ["--model", "tiny", *arguments])


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("a:1", ("a:1",)),
        ("a:1,b:2", ("a:1", "b:2")),
        ("static://a:1,b:2", ("a:1", "b:2")),
        ("[::1]:50051", ("[::1]:50051",)),
        ("verifier-0.svc.local:50051", ("verifier-0.svc.local:50051",)),
    ],
)
def test_addresses(text: str, addresses: tuple[str, ...]) -> None:
    assert load("--verifiers", text).verifiers == addresses
    assert load("--drafters", text).drafters == addresses


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("a:1,[::1]:2", StaticTarget(("a:1", "[::1]:2"))),
        ("static://a:1,b:2", StaticTarget(("a:1", "b:2"))),
        ("", StaticTarget(())),
        ("dns:///verifier.svc:50052", DnsTarget("verifier.svc", 50052)),
        ("k8s://prod/verifier", KubernetesTarget("prod", "verifier")),
        ("k8s://prod/verifier:grpc", KubernetesTarget("prod", "verifier", "grpc")),
        ("k8s://prod/verifier:50052", KubernetesTarget("prod", "verifier", 50052)),
    ],
)
def test_targets(text: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load("--verifiers", text).verifier_target == target
    assert load("--drafters", text).drafter_target == target
    monkeypatch.setenv("PACELINE_GATEWAY_VERIFIERS", text)
    assert load().verifier_target == target
    if not isinstance(target, StaticTarget):
        assert str(target) == text


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("dns:///a:1,b:2", "mixes targets"),
        ("static://a:1,dns:///b:2", "mixes targets"),
        ("k8s://a/b,k8s://a/c", "mixes targets"),
        ("dns://a:1", "write host:port"),
        ("dns:///a", "write host:port"),
        ("http://a:1", "k8s://namespace/service"),
        ("k8s://verifier", "k8s://namespace/service"),
        ("k8s://a/b:", "names no service"),
        ("k8s://a/B", "names no service"),
        ("k8s://a/b:65536", "1 to 65535"),
        ("a:1,a:1", "named twice"),
    ],
)
def test_a_target_that_makes_no_sense_is_refused(text: str, named: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load("--drafters", text)
    assert caught.value.field == "drafters"
    assert named in caught.value.message


@pytest.mark.parametrize("text", ["a", "a:", ":1", "a:0", "a:65536", "a:1,a:1", "http://a:1", "a b:1"])
def test_bad_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load("--verifiers", text)
    assert caught.value.field == "verifiers"


def test_defaults() -> None:
    settings = load()
    assert (settings.verifiers, settings.drafters) == ((), ())
    assert settings.redis_url.get_secret_value() == "memory://"
    assert (settings.num_speculative_tokens, settings.draft_ahead) == (4, True)
    assert settings.redis_ack_timeout_ms == 50
    assert settings.client_tls is None
    assert settings.session_limits.ack_timeout_s == 0.05
    assert settings.patience.draft_floor_s == 0.05


def test_no_draft_ahead() -> None:
    assert not load("--no-draft-ahead").draft_ahead


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_GATEWAY_DRAFTERS", "a:1,b:2")
    monkeypatch.setenv("PACELINE_GATEWAY_NUM_SPECULATIVE_TOKENS", "7")
    settings = load()
    assert settings.drafters == ("a:1", "b:2")
    assert settings.num_speculative_tokens == 7


def test_the_password_of_redis_is_not_printed() -> None:
    settings = load("--redis-url", "redis://:secret@host:6379")
    assert "secret" not in " ".join(describe(settings).values())
    assert "secret" not in str(settings)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--num-speculative-tokens", "-1"],
        ["--num-speculative-tokens", "65"],
        ["--max-concurrent-generations", "0"],
        ["--session-ttl-s", "0"],
        ["--link-tls-ca-file", "ca.pem"],
        ["--link-tls", "--link-tls-cert-file", "cert.pem"],
        ["--draft-wait-floor-ms", "2000"],
    ],
)
def test_values_that_cannot_work_are_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigurationError):
        load(*arguments)


def test_tls_of_links() -> None:
    tls = load("--link-tls", "--link-tls-ca-file", "ca.pem").client_tls
    assert tls is not None
    assert (tls.ca_file, tls.cert_file) == (Path("ca.pem"), None)
