"""Both acceptance rules through every door: what is promised, and what holds whatever the rule."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from paceline.messages import AcceptanceRule, DraftProbs, SamplingParams
from paceline.session.memory_store import MemoryStore
from paceline.text.request import ChatMessage, ChatPrompt, GenerationRequest, TokenPrompt
from tests.fakes.scripted_drafter import ScriptedDrafter, drawn
from tests.fakes.toy_runner import hash_law
from tests.integration.fleet import EOS, GREEDY, VOCAB, generate, plain_tokens
from tests.integration.front_door import FLOOR, FrontDoor, front_door
from tests.integration.paced import LAW as PACED_LAW
from tests.integration.paced import kill, streaming, used_verifier
from tests.integration.scraping import Scrape

pytestmark = pytest.mark.asyncio(loop_scope="module")

LAW = hash_law(VOCAB, seed=41)
PROMPT = [1, 2, 3]
RATIO = AcceptanceRule.RATIO
SAMPLED = SamplingParams(temperature=0.9, ignore_eos=True)
PROMPTS = (TokenPrompt((1, 2, 3)), ChatPrompt((ChatMessage("user", "abc"),)))


def row(context: Sequence[int]) -> DraftProbs:
    """The drafter's law: flatter than the target's, and of its best tokens only."""
    probs, ids = torch.softmax(LAW(tuple(context)) / 1.3, -1).topk(12)
    return DraftProbs(tuple(ids.tolist()), tuple((probs / probs.sum()).tolist()))


def drawing_drafter() -> ScriptedDrafter:
    return ScriptedDrafter(drawn(row, seed=5), row=row)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FrontDoor]:
    folder = tmp_path_factory.mktemp("front")
    async with front_door(folder, LAW, method=drawing_drafter, store=MemoryStore()) as front:
        yield front


def asking(rule: AcceptanceRule, **changes: Any) -> GenerationRequest:
    fields: dict[str, Any] = {"sampling": SAMPLED, "seed": 7, "max_tokens": 24, **changes}
    return GenerationRequest(PROMPTS[0], rule=rule, **fields)


@pytest.mark.parametrize("rule", AcceptanceRule)
@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
async def test_every_door_says_what_it_promises(
    front: FrontDoor, rule: AcceptanceRule, sampling: SamplingParams
) -> None:
    promise = "distribution" if rule is RATIO and not sampling.greedy else "exact"
    for prompt in PROMPTS:
        request = dataclasses.replace(asking(rule), prompt=prompt, sampling=sampling)
        answers = [await door.generate(request) for door in front.doors]
        assert [answer.promise for answer in answers] == [promise] * 3
        assert [answer.completion_tokens for answer in answers] == [len(answer.token_ids) for answer in answers]
        if promise == "exact":
            assert answers == answers[:1] * 3


async def test_without_chance_both_rules_give_the_tokens_of_plain_decoding(front: FrontDoor) -> None:
    expected = plain_tokens(LAW, PROMPT, 24)
    for rule in AcceptanceRule:
        for door in front.doors:
            answer = await door.generate(asking(rule, sampling=GREEDY))
            assert list(answer.token_ids) == expected


async def test_drawn_drafts_are_accepted_and_counted(front: FrontDoor) -> None:
    async with front.fleet.client() as client:
        runs = [await generate(client, asking(RATIO, seed=seed)) for seed in range(6)]
    judged = sum(run.evidence.draft_tokens for run in runs)
    # Of a draft of this law about four in five are kept; certain drafts would be kept far less often.
    assert sum(run.evidence.accepted_tokens for run in runs) > 0.5 * judged > 0
    assert all(len(run.tokens) == 24 for run in runs)


async def test_every_parameter_is_heeded_under_ratio(front: FrontDoor) -> None:
    sampling = SamplingParams(
        temperature=1.2,
        top_p=0.95,
        top_k=20,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=-0.2,
        logit_bias={3: -100.0, 4: 2.0},
        min_tokens=20,
        stop_token_ids=(7,),
        top_logprobs=3,
    )
    for door in front.doors:
        for seed in range(3):
            answer = await door.generate(asking(RATIO, sampling=sampling, seed=seed, max_tokens=40))
            assert answer.completion_tokens == len(answer.token_ids) == len(answer.logprobs) == len(answer.top_logprobs)
            assert 20 <= answer.completion_tokens <= 40
            assert not {3, 7, EOS} & set(answer.token_ids[:20])
            assert 3 not in answer.token_ids
            assert all(FLOOR < logprob <= 0.0 for logprob in answer.logprobs)
            ended = answer.token_ids[-1] in (7, EOS)
            assert answer.finish_reason == ("stop" if ended else "length")


async def test_the_record_knows_the_rule(front: FrontDoor) -> None:
    for rule in AcceptanceRule:
        for door in front.doors:
            name = f"{rule.value}-{door.name.replace(' ', '-')}"
            await door.generate(asking(rule, session=name, max_tokens=3))
            assert isinstance(front.fleet.options.store, MemoryStore)
            record = await front.fleet.options.store.get(name)
            assert record is not None
            assert record.rule is rule


async def test_without_a_drafter_ratio_decodes_plainly(tmp_path: Path) -> None:
    async with front_door(tmp_path, LAW, method=None) as front:
        for door in front.doors:
            answer = await door.generate(asking(RATIO))
            assert (answer.completion_tokens, answer.promise) == (24, "distribution")


async def test_drafts_with_impossible_probabilities_cost_speed_only(tmp_path: Path) -> None:
    def impossible(context: Sequence[int]) -> DraftProbs:
        return DraftProbs(row(context).token_ids, (0.9,) * 12)

    def lying_drafter() -> ScriptedDrafter:
        return ScriptedDrafter(drawn(row, seed=5), row=impossible)

    async with front_door(tmp_path, LAW, method=lying_drafter) as front, front.fleet.client() as client:
        run = await generate(client, asking(RATIO))
        assert len(run.tokens) == 24
        assert run.evidence.draft_tokens == 0
        scrape = Scrape((await front.http.get("/metrics")).text)
        assert scrape.sum("paceline_spec_decode_num_fallbacks_total", cause="block_refused") == 3
        # The same drafter under `match`, where probabilities do not count.
        assert (await generate(client, asking(AcceptanceRule.MATCH))).evidence.draft_tokens > 0


async def test_a_generation_goes_on_when_its_verifier_dies(tmp_path: Path) -> None:
    def paced_row(context: Sequence[int]) -> DraftProbs:
        probs, ids = torch.softmax(PACED_LAW(tuple(context)), -1).topk(12)
        return DraftProbs(tuple(ids.tolist()), tuple((probs / probs.sum()).tolist()))

    async with streaming(
        tmp_path,
        request={"rule": RATIO},
        method=lambda: ScriptedDrafter(drawn(paced_row, seed=5), row=paced_row),
        num_verifiers=2,
        settings={"return_window_ms": 20},
    ) as (fleet, stream):
        await stream.tokens(8)
        used = used_verifier(fleet)
        await kill(fleet.verifiers[used], stream)
        run = await stream.rest()
        assert len(run.tokens) == 40
        assert run.evidence.verifier == fleet.verifiers[1 - used].address
        assert run.evidence.accepted_tokens > 0
