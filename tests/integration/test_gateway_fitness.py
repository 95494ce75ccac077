"""Replicas that do not fit the gateway are refused, and it is said why: over gRPC, with real tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paceline_gateway import link_codec
from paceline_gateway.effects import Lane
from paceline_gateway.fitness import Fitness
from paceline_gateway.links import LinkState

from paceline.errors import ConfigurationError, InvalidArgument, Unavailable
from paceline.messages import FeatureDtype, FeatureFormat, VocabularyChunk
from paceline.text.tokenizer import Tokenizer
from tests.fakes.tiny_tokenizer import write_letters
from tests.fakes.toy_runner import ToyRunner, hash_law
from tests.integration.fleet import VOCAB, Fleet, generate, perfect_method, plain_tokens, until
from tests.integration.test_gateway_links import HASH, INFO, TOKENIZER, fitness, linked

LAW = hash_law(VOCAB, seed=1)
PROMPT = [1, 2, 3]
FORM = FeatureFormat("final_norm", 8)


async def tells_nothing() -> Mapping[int, str]:
    raise Unavailable("does not tell")


@pytest.mark.parametrize(
    ("lane", "changes", "named"),
    [
        (Lane.VERIFIER, {"model": "other"}, ["'other'", "'toy'"]),
        (Lane.DRAFTER, {"model": "other"}, ["'other'", "'toy'"]),
        (Lane.VERIFIER, {"tokenizer_hash": ""}, ["no hash", HASH]),
        (Lane.DRAFTER, {"tokenizer_hash": "abc", "vocab_size": 9}, ["hash abc, 9 ids", f"hash {HASH}, 4 ids"]),
    ],
)
async def test_misfits_are_named(lane: Lane, changes: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        await fitness().check(lane, "host:1", replace(INFO, **changes), tells_nothing)
    for part in (*named, "host:1"):
        assert part in caught.value.message


@pytest.mark.parametrize(
    ("served", "refusal"),
    [
        ((), ""),
        ((None, FORM), ""),
        ((replace(FORM, dtype=FeatureDtype.FLOAT16),), ""),
        ((None,), "verifiers serve none;"),
        ((replace(FORM, width=9), None), "verifiers serve 'final_norm' of 9 numbers, none;"),
        ((replace(FORM, kind="layers 1,2"),), "verifiers serve 'layers 1,2' of 8 numbers;"),
    ],
)
async def test_a_drafter_that_builds_on_features_that_nobody_serves_is_refused(
    served: tuple[FeatureFormat | None, ...], refusal: str
) -> None:
    async def ask() -> tuple[FeatureFormat | None, ...]:
        return served

    subject = Fitness("toy", TOKENIZER, ask)
    await subject.check(Lane.DRAFTER, "host:1", INFO, tells_nothing)
    await subject.check(Lane.VERIFIER, "host:1", replace(INFO, features=FORM), tells_nothing)
    needs = replace(INFO, features=FORM)
    if refusal:
        with pytest.raises(ConfigurationError) as caught:
            await subject.check(Lane.DRAFTER, "host:1", needs, tells_nothing)
        assert f"builds on the target's features 'final_norm' of 8 numbers, but {refusal}" in caught.value.message
        assert caught.value.field == "served_features"
    else:
        await subject.check(Lane.DRAFTER, "host:1", needs, tells_nothing)


async def test_what_fits_is_not_asked_for_its_vocabulary() -> None:
    async def ask() -> Mapping[int, str]:
        raise AssertionError("nobody asked")

    await fitness().check(Lane.VERIFIER, "host:1", INFO, ask)
    await fitness().check(Lane.DRAFTER, "host:1", replace(INFO, tokenizer_hash=""), ask)
    # The same tokens in a wider model: only the fingerprint counts.
    await fitness().check(Lane.DRAFTER, "host:1", replace(INFO, vocab_size=64), ask)


@pytest.mark.parametrize(
    ("chunks", "named"),
    [
        ([VocabularyChunk(0, ("a", "x", "c", "d"))], "token 1 is 'b' here and 'x' there"),
        ([VocabularyChunk(0, ("a", "b")), VocabularyChunk(3, ("d",))], "there it has no token 2, which is 'c' here"),
        (
            [VocabularyChunk(0, ("a", "b")), VocabularyChunk(2, ("c", "d", "e"))],
            "here it has no token 4, which is 'e' there",
        ),
        (None, "hash other"),  # an older replica
        ([], "hash other"),
        ([VocabularyChunk(0, ("a", "b", "c", "d", "[PAD4]"))], "hash other"),  # it has lied about its hash
        ([VocabularyChunk(-1, ("a",))], "hash other"),
    ],
)
async def test_the_first_difference_is_asked_for(chunks: list[VocabularyChunk] | None, named: str) -> None:
    async with linked() as (peer, link):
        peer.info = replace(INFO, tokenizer_hash="other")
        peer.vocabulary = chunks
        peer.break_off()
        await until(lambda: link.state is LinkState.REFUSED)
        assert named in link.trouble
        assert ("hash other" in named) == (HASH in link.trouble)
        assert peer.num_vocabularies == 1


async def test_a_vocabulary_is_asked_for_once_per_fingerprint() -> None:
    asked: list[str] = []

    async def check(subject: Fitness, tokenizer_hash: str, vocabulary: dict[int, str] | None) -> str:
        async def ask() -> Mapping[int, str]:
            asked.append(tokenizer_hash)
            return await tells_nothing() if vocabulary is None else vocabulary

        with pytest.raises(ConfigurationError) as caught:
            await subject.check(Lane.DRAFTER, "host:1", replace(INFO, tokenizer_hash=tokenizer_hash), ask)
        return caught.value.message

    subject = fitness()
    assert "hash one" in await check(subject, "one", None)  # not told: asked again
    for _ in range(3):
        assert "'b' here and 'x' there" in await check(subject, "one", {0: "a", 1: "x", 2: "c", 3: "d"})
    assert "'c' here and 'x' there" in await check(subject, "two", {0: "a", 1: "b", 2: "x", 3: "d"})
    assert asked == ["one", "one", "two"]


async def test_a_vocabulary_without_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_codec, "_MAX_PIECES", 1000)
    async with linked() as (peer, link):
        peer.info = replace(INFO, tokenizer_hash="other")
        peer.vocabulary = [VocabularyChunk(100 * number, ("x",) * 100) for number in range(100)]
        peer.break_off()
        await until(lambda: link.state is LinkState.REFUSED)
        assert "hash other" in link.trouble


# --- in a fleet -------------------------------------------------------------------------------------------------------


async def test_a_drafter_with_another_hash_for_the_same_tokens_is_refused_with_both(tmp_path: Path) -> None:
    async with (
        Fleet.start(tmp_path, LAW, method=perfect_method(LAW), tokenizer_hash="feedface00112233") as fleet,
        fleet.client() as client,
    ):
        run = await generate(client, fleet.request(PROMPT))
        (warning,) = run.started.warnings
        assert "feedface0011" in warning
        assert fleet.tokenizer.fingerprint[:12] in warning
        assert run.evidence.draft_tokens == 0
        assert run.tokens == plain_tokens(LAW, PROMPT, 20)


def edited_tokenizer(folder: Path, edit: Callable[[dict[str, int]], None], vocab_size: int = VOCAB) -> Tokenizer:
    """The fleet's tokenizer with another vocabulary, read from a folder as a replica would."""
    path = write_letters(folder, vocab_size, eos_token_id=VOCAB - 1) / "tokenizer.json"
    description = json.loads(path.read_text(encoding="utf-8"))
    edit(description["model"]["vocab"])
    path.write_text(json.dumps(description), encoding="utf-8")
    return Tokenizer.load(folder)


def rename(vocab: dict[str, int]) -> None:
    vocab["ø"] = vocab.pop("r")  # id 17


def pad(vocab: dict[str, int]) -> None:
    vocab |= {f"[PAD{token_id}]": token_id for token_id in range(VOCAB, VOCAB + 8)}


def grow(vocab: dict[str, int]) -> None:
    vocab["extra"] = VOCAB


OTHER_TOKENIZERS = {
    "renamed": (rename, "token 17 is 'r' here and 'ø' there"),
    "larger": (grow, f"here it has no token {VOCAB}, which is 'extra' there"),
}


@pytest.mark.parametrize("name", list(OTHER_TOKENIZERS))
async def test_a_drafter_with_another_tokenizer_is_refused_with_the_first_difference(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    edit, difference = OTHER_TOKENIZERS[name]
    tokenizer = edited_tokenizer(tmp_path / "other", edit)
    options = {"method": perfect_method(LAW), "drafter_tokenizer": tokenizer}
    async with Fleet.start(tmp_path, LAW, **options) as fleet, fleet.client() as client:
        run = await generate(client, fleet.request(PROMPT))
        (warning,) = run.started.warnings
        for part in (fleet.drafters[0].address, difference):
            assert part in warning
            assert part in caplog.text
        assert run.evidence.draft_tokens == 0
        assert run.tokens == plain_tokens(LAW, PROMPT, 20)


async def test_a_verifier_with_another_tokenizer_is_unavailable_with_the_first_difference(tmp_path: Path) -> None:
    smaller = Tokenizer.load(write_letters(tmp_path / "smaller", VOCAB - 1, eos_token_id=3))
    options = {"verifier_tokenizer": smaller, "settings": {"verifier_wait_ms": 50, "startup_wait_s": 1}}
    async with Fleet.start(tmp_path, LAW, **options) as fleet, fleet.client() as client:
        with pytest.raises(Unavailable) as caught:
            await generate(client, fleet.request(PROMPT))
        for part in (fleet.verifiers[0].address, "token 3 is 'd' here and '<eos>' there"):
            assert part in caught.value.message


async def test_a_verifier_that_lacks_a_token_is_told_which(tmp_path: Path) -> None:
    def drop(vocab: dict[str, int]) -> None:
        del vocab["r"]

    tokenizer = edited_tokenizer(tmp_path / "other", drop)
    options = {"verifier_tokenizer": tokenizer, "settings": {"verifier_wait_ms": 50, "startup_wait_s": 1}}
    async with Fleet.start(tmp_path, LAW, **options) as fleet, fleet.client() as client:
        with pytest.raises(Unavailable, match="there it has no token 17, which is 'r' here"):
            await generate(client, fleet.request(PROMPT))


async def test_a_prompt_too_large_for_a_message_ends_its_request_and_no_other(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "runner": lambda law: ToyRunner(law, VOCAB, max_model_len=80_000),
        "write_model": lambda folder: write_letters(folder, VOCAB, max_model_len=80_000),
        "settings": {"max_message_bytes": 2**16},
    }
    async with Fleet.start(tmp_path, LAW, **options) as fleet, fleet.client() as client:
        with pytest.raises(InvalidArgument, match="at most 65536 may be sent") as caught:
            await generate(client, fleet.request([1] * 70_000))
        assert caught.value.field == "prompt"
        run = await generate(client, fleet.request(PROMPT))
        assert run.tokens == plain_tokens(LAW, PROMPT, 20)


async def test_the_same_tokenizer_padded_to_the_models_width_fits(tmp_path: Path) -> None:
    tokenizer = edited_tokenizer(tmp_path / "padded", pad)
    options = {"method": perfect_method(LAW), "drafter_tokenizer": tokenizer, "verifier_tokenizer": tokenizer}
    async with Fleet.start(tmp_path, LAW, **options) as fleet, fleet.client() as client:
        run = await generate(client, fleet.request(PROMPT))
        assert run.started.warnings == ()
        assert run.evidence.accepted_tokens > 0


async def test_a_drafter_without_a_tokenizer_fits_every_gateway(tmp_path: Path) -> None:
    async with (
        Fleet.start(tmp_path, LAW, method=perfect_method(LAW), tokenizer_hash="") as fleet,
        fleet.client() as client,
    ):
        run = await generate(client, fleet.request(PROMPT))
        assert run.evidence.accepted_tokens > 0
