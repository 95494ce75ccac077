"""What the door makes of the services behind it: no drafter is a warning, no verifier an error; links with TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from paceline_gateway import links

from paceline.drafting.fallback import FallbackMethod
from paceline.drafting.method import MethodInfo
from paceline.errors import ConfigurationError, InvalidArgument, Unavailable
from tests.fakes.scripted_drafter import ScriptedDrafter, wrong_at
from tests.fakes.toy_runner import hash_law
from tests.integration.fleet import VOCAB, Fleet, generate, perfect_method, plain_tokens, target_law, until
from tests.integration.node import free_port

CERTIFICATES = Path(__file__).parents[1] / "unit" / "runtime" / "certificates"
LAW = hash_law(VOCAB, seed=1)
PROMPT = [1, 2, 3]


async def test_no_drafter_is_a_warning(tmp_path: Path) -> None:
    async with Fleet.start(tmp_path, LAW) as fleet, fleet.client() as client:
        run = await generate(client, fleet.request(PROMPT))
        assert run.tokens == plain_tokens(LAW, PROMPT, 20)
        assert len(run.started.warnings) == 1
        assert "no drafter" in run.started.warnings[0]
        assert "none is configured" in run.started.warnings[0]
        plain = await generate(client, fleet.request(PROMPT, num_speculative_tokens=0))
        assert plain.started.warnings == ()


async def test_a_drafter_that_is_not_there_is_a_warning_that_names_it(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with Fleet.start(tmp_path, LAW, settings={"drafters": (address,)}) as fleet, fleet.client() as client:
        run = await generate(client, fleet.request(PROMPT))
        assert address in run.started.warnings[0]
        assert run.evidence.drafter == ""


async def test_a_known_method_that_nobody_offers_is_a_warning_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    async with Fleet.start(tmp_path, LAW, method=perfect_method(LAW)) as fleet, fleet.client() as client:
        run = await generate(client, fleet.request(PROMPT, method="ngram"))
        assert "'ngram'" in run.started.warnings[0]
        assert run.evidence.draft_tokens == 0
        with pytest.raises(InvalidArgument, match=r"known are draft_model, ngram, .*, scripted") as caught:
            await generate(client, fleet.request(PROMPT, method="psychic"))
        assert caught.value.field == "speculation.method"
        run = await generate(client, fleet.request(PROMPT, method="scripted"))
        assert run.started.warnings == ()
        assert run.evidence.methods == ("scripted",)


async def test_a_drafter_that_is_away_does_not_make_its_method_unknown(tmp_path: Path) -> None:
    async with Fleet.start(tmp_path, LAW, method=perfect_method(LAW)) as fleet, fleet.client() as client:
        await fleet.drafters[0].kill()
        assert fleet.gateway.drafters is not None
        drafters = fleet.gateway.drafters
        await until(lambda: not drafters.snapshot.ready)
        run = await generate(client, fleet.request(PROMPT, method="scripted"))
        assert "'scripted'" in run.started.warnings[0]


async def test_a_prompt_beyond_the_drafters_context_is_a_warning(tmp_path: Path) -> None:
    method = perfect_method(LAW)
    async with Fleet.start(tmp_path, LAW, method=method, drafter_context=16) as fleet, fleet.client() as client:
        for length in (16, 40):
            prompt = [1 + index % 7 for index in range(length)]
            for name in ("", "scripted"):
                run = await generate(client, fleet.request(prompt, method=name))
                (warning,) = run.started.warnings
                assert f"context of 16 tokens leaves no room after the prompt of {length}" in warning
                assert "--kv-cache-bytes" in warning
                assert run.evidence.draft_tokens == 0
                assert run.tokens == plain_tokens(LAW, prompt, 20)
            plain = await generate(client, fleet.request(prompt, num_speculative_tokens=0))
            assert plain.started.warnings == ()
        fits = await generate(client, fleet.request([1] * 12))
        assert fits.started.warnings == ()
        assert fits.evidence.draft_tokens > 0


def chain() -> FallbackMethod:
    """The second method would draft perfectly, and the first one always drafts something."""
    first = ScriptedDrafter(wrong_at(target_law(LAW), 0, VOCAB), info=MethodInfo(name="first"))
    return FallbackMethod([first, perfect_method(LAW)()])


async def test_a_request_may_name_one_method_of_a_chain(tmp_path: Path) -> None:
    async with Fleet.start(tmp_path, LAW, method=chain) as fleet, fleet.client() as client:
        (model,) = await client.list_models()
        assert model.methods == ("first", "scripted")
        for method, used in (("", "first"), ("first", "first"), ("scripted", "scripted")):
            run = await generate(client, fleet.request(PROMPT, method=method))
            assert run.started.warnings == ()
            assert run.evidence.methods == (used,)
            assert run.tokens == plain_tokens(LAW, PROMPT, 20)
        assert run.evidence.accepted_tokens == run.evidence.draft_tokens > 0
        run = await generate(client, fleet.request(PROMPT, method="ngram"))
        assert "no drafter of method 'ngram'" in run.started.warnings[0]
        assert run.evidence.methods == ()
        assert run.tokens == plain_tokens(LAW, PROMPT, 20)


async def test_no_verifier_is_unavailable_and_names_what_was_tried(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    settings = {"verifiers": (address,), "verifier_wait_ms": 50, "startup_wait_s": 0.2}
    async with Fleet.start(tmp_path, LAW, num_verifiers=0, settings=settings) as fleet, fleet.client() as client:
        with pytest.raises(Unavailable) as caught:
            await generate(client, fleet.request(PROMPT))
        assert address in caught.value.message
        (model,) = await client.list_models()
        assert model.max_model_len == 0


async def test_a_verifier_that_comes_late_is_used(tmp_path: Path) -> None:
    async with Fleet.start(tmp_path, LAW, settings={"startup_wait_s": 0.0}) as fleet, fleet.client() as client:
        await fleet.verifiers[0].kill()
        await until(lambda: not fleet.verifier_pool.snapshot.ready)
        await fleet.verifiers[0].boot()
        run = await generate(client, fleet.request(PROMPT))
        assert run.tokens == plain_tokens(LAW, PROMPT, 20)


async def test_the_verifier_serves_another_model(tmp_path: Path) -> None:
    settings = {"model_name": "other", "verifier_wait_ms": 50, "startup_wait_s": 0.2}
    async with Fleet.start(tmp_path, LAW, settings=settings) as fleet, fleet.client() as client:
        with pytest.raises(Unavailable) as caught:
            await generate(client, fleet.request(PROMPT))
        assert "'toy'" in caught.value.message
        assert "'other'" in caught.value.message


async def test_redis_that_cannot_be_reached_ends_the_start(tmp_path: Path) -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    with pytest.raises(ConfigurationError) as caught:
        async with Fleet.start(tmp_path, LAW, settings={"redis_url": url}):
            pytest.fail("the gateway must not start")
    assert caught.value.field == "redis_url"
    assert url in caught.value.message


@pytest.mark.parametrize("trusted", [True, False])
async def test_links_with_mutual_tls(tmp_path: Path, trusted: bool) -> None:
    server = {
        "tls_cert_file": CERTIFICATES / "server.pem",
        "tls_key_file": CERTIFICATES / "server.key",
        "tls_client_ca_file": CERTIFICATES / "ca.pem",
    }
    shown = {
        "link_tls_cert_file": CERTIFICATES / "client.pem",
        "link_tls_key_file": CERTIFICATES / "client.key",
    }
    settings: dict[str, Any] = {"link_tls": True, "link_tls_ca_file": CERTIFICATES / "ca.pem"}
    settings |= shown if trusted else {"startup_wait_s": 0.2, "verifier_wait_ms": 50}
    options: dict[str, Any] = {"server": server, "settings": settings, "method": perfect_method(LAW)}
    async with Fleet.start(tmp_path, LAW, **options) as fleet, fleet.client() as client:
        if trusted:
            run = await generate(client, fleet.request(PROMPT))
            assert run.evidence.accepted_tokens > 0
            return
        with pytest.raises(Unavailable):
            await generate(client, fleet.request(PROMPT))


async def test_certificates_that_cannot_be_read_are_told_at_start(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere.pem"
    with pytest.raises(ConfigurationError, match=r"nowhere\.pem"):
        async with Fleet.start(tmp_path, LAW, settings={"link_tls": True, "link_tls_ca_file": missing}):
            pytest.fail("the gateway must not start")


async def test_certificates_that_are_renewed_are_read_with_the_next_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_REFUSED_PAUSE_S", 0.2)
    authority = tmp_path / "ca.pem"
    authority.write_bytes((CERTIFICATES / "ca.pem").read_bytes())
    server = {"tls_cert_file": CERTIFICATES / "server.pem", "tls_key_file": CERTIFICATES / "server.key"}
    settings = {"link_tls": True, "link_tls_ca_file": authority}
    async with Fleet.start(tmp_path, LAW, server=server, settings=settings) as fleet, fleet.client() as client:
        authority.unlink()
        await fleet.verifiers[0].cut()
        await until(lambda: "ca.pem" in fleet.verifier_pool.snapshot.why_not)
        authority.write_bytes((CERTIFICATES / "ca.pem").read_bytes())
        await fleet.verifiers[0].listen()
        await until(lambda: bool(fleet.verifier_pool.snapshot.ready))
        assert (await generate(client, fleet.request(PROMPT))).tokens == plain_tokens(LAW, PROMPT, 20)
