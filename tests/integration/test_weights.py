"""Verifiers with other weights under the same model name: no session that has tokens goes on there."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import pytest
from paceline_verifier.load import load_replica
from paceline_verifier.settings import VerifierSettings

from paceline.errors import Unavailable
from paceline.weights_digest import weights_digest
from tests.integration.fleet import generate, until
from tests.integration.paced import EXPECTED, kill, request_of, streaming, used_verifier
from tests.integration.test_resume import point, read, tokens_of, two_gateways

SOON: dict[str, Any] = {"return_window_ms": 20}


def in_turn(*digests: str) -> Any:
    """Lives of verifiers begin with these weights, one after the other."""
    left = iter(digests)
    return lambda: next(left)


async def test_a_session_moves_to_the_same_weights_and_passes_the_others_by(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_verifiers": 3, "settings": SOON, "weights": in_turn("old", "new", "old", "new")}
    async with streaming(tmp_path, **options) as (fleet, stream):
        await stream.tokens(5)
        assert used_verifier(fleet) == 0
        await kill(fleet.verifiers[0], stream)
        await until(lambda: fleet.verifiers[2].num_sessions == 1)
        await fleet.verifiers[0].boot()
        run = await stream.rest()
        assert (run.tokens, run.evidence.verifier) == (EXPECTED, fleet.verifiers[2].address)


async def test_a_verifier_that_is_back_with_other_weights_is_not_gone_on_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"verifier_patience_ms": 300}
    async with streaming(tmp_path, settings=settings, weights=in_turn("old", "new")) as (fleet, stream):
        await stream.tokens(5)
        caplog.set_level(logging.WARNING)
        await kill(fleet.verifiers[0], stream)
        await fleet.verifiers[0].boot()
        with pytest.raises(Unavailable, match=r"with the session's weights \(digest old\)"):
            await stream.rest()
        assert any("serves other weights" in record.getMessage() for record in caplog.records)
        # Those who come now begin with the new ones.
        async with fleet.client() as client:
            assert (await generate(client, request_of(fleet))).tokens == EXPECTED


async def test_before_the_first_token_any_weights_will_do(tmp_path: Path) -> None:
    async with streaming(tmp_path, weights=in_turn("old", "new")) as (fleet, stream):
        await stream.tokens(0)
        await kill(fleet.verifiers[0], stream)
        await fleet.verifiers[0].boot()
        assert (await stream.rest()).tokens == EXPECTED


@pytest.mark.parametrize("after", ["old", "new", ""])
async def test_a_session_is_resumed_with_the_weights_of_its_record(tmp_path: Path, after: str) -> None:
    options: dict[str, Any] = {"settings": {"verifier_wait_ms": 100, **SOON}, "weights": in_turn("old", after)}
    async with two_gateways(tmp_path, **options) as (fleet, stream, other, client):
        await stream.tokens(6)
        had = tokens_of(stream.events)
        await stream.leave()
        stream.pace.open()
        await fleet.quiet()
        record = await fleet.gateway.store.get("s")
        assert record is not None
        assert record.positions.weights_digest == "old"
        await fleet.verifiers[0].kill()
        await until(lambda: not other.verifiers.snapshot.ready)  # type: ignore[union-attr]
        await fleet.verifiers[0].boot()
        await until(lambda: bool(other.verifiers.snapshot.ready))  # type: ignore[union-attr]
        if after == "new":
            with pytest.raises(Unavailable, match="digest old"):
                await read(client.resume(point(had)))
            return
        _, chunks, _ = await read(client.resume(point(had)))
        assert had + tokens_of(chunks) == EXPECTED


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_verifier_tells_the_digest_of_its_folder_and_its_number_format(
    tiny_llama: Path, dtype: Literal["float32", "bfloat16"]
) -> None:
    options = VerifierSettings(model=str(tiny_llama), kv_cache_bytes=1 << 20, num_threads=1, dtype=dtype)
    assert load_replica(options).info.weights_digest == f"{weights_digest(tiny_llama)}-{dtype}"
