"""A drafting method inside the verifier: opened when it is needed, stepped until it is done, held to the rule."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.drafting.method import DraftJob, MethodInfo
from paceline.drafting.self_drafting import SelfDrafting
from paceline.engine.features import FeatureTaps
from paceline.engine.kv.pool import KVPool, PlaneShape
from paceline.engine.self_draft import SelfDraft, SelfDraftJob
from paceline.errors import CapacityExceeded, ModelError
from paceline.messages import AcceptanceRule, DraftProbs, SamplingParams
from paceline.speculation.tree import DraftTree
from tests.fakes.scripted_drafter import ScriptedDrafter, perfect

SAMPLED = SamplingParams(temperature=0.8, seed=3)
EVEN = DraftProbs((0, 1, 2, 3), (0.25,) * 4)


def next_token(context: Sequence[int], _sampling: SamplingParams) -> int:
    return (context[-1] + 1) % 50


def job(
    session: str, tokens: Sequence[int], depth: int = 3, rule: AcceptanceRule = AcceptanceRule.MATCH
) -> SelfDraftJob:
    kv = KVPool([PlaneShape(1, 1, 1)], 1).new_sequence()
    return SelfDraftJob(session, tokens, depth, SAMPLED, 0, rule, kv)


class Sloppy:
    """A method that leaves jobs as a test wants them."""

    def __init__(self, result: DraftJob | None = None, room: int = 99) -> None:
        self.result = result
        self.room = room
        self.seen: list[DraftJob] = []
        self.info = MethodInfo("sloppy", weights_bytes=7, kv_bytes=8, taps=FeatureTaps())

    def open(self, session: str) -> None:
        if not self.room:
            raise CapacityExceeded("full")
        self.room -= 1

    def advance(self, jobs: Sequence[DraftJob]) -> None:
        self.seen += jobs
        if self.result is not None:
            for job in jobs:
                job.tokens, job.parents, job.done = self.result.tokens, self.result.parents, True
                job.draft_probs = self.result.draft_probs

    def kv_len(self, session: str) -> int:
        return 0

    def close(self, session: str) -> None:
        self.room += 1


def left(tokens: list[int], parents: list[int], draft_probs: list[DraftProbs] | None = None) -> DraftJob:
    return DraftJob("", (), 1, SAMPLED, tokens=tokens, parents=parents, draft_probs=draft_probs or [])


def test_sessions_share_steps_and_each_gets_its_own_block() -> None:
    method = ScriptedDrafter(perfect(next_token), confidence=0.75)
    drafter = SelfDrafting(method)
    drafts = drafter.draft([job("a", [1, 2]), job("b", [9], 1)])
    assert [draft.tree for draft in drafts] == [DraftTree.chain([3, 4, 5]), DraftTree.chain([10])]
    assert drafts[0].confidences == (0.75,) * 3
    assert method.steps <= 4
    drafter.draft([job("a", [1, 2, 3])])
    drafter.forget("a")
    drafter.forget("a")
    assert set(method.fed) == {"b"}


def test_facts_are_the_method_s() -> None:
    drafter = SelfDrafting(Sloppy())
    assert (drafter.method, drafter.weights_bytes, drafter.kv_bytes, drafter.taps) == ("sloppy", 7, 8, FeatureTaps())


def test_a_session_without_room_gets_an_empty_block_and_drafts_when_another_has_ended() -> None:
    drafter = SelfDrafting(Sloppy(left([5], []), room=1))
    assert drafter.draft([job("a", [1]), job("b", [1])]) == [SelfDraft(DraftTree.chain([5])), SelfDraft()]
    drafter.forget("b")  # holds nothing
    drafter.forget("a")
    assert drafter.draft([job("b", [1])]) == [SelfDraft(DraftTree.chain([5]))]


def test_what_is_no_tree_costs_one_block() -> None:
    assert SelfDrafting(Sloppy(left([5, 6], [0, 9]))).draft([job("a", [1])]) == [SelfDraft()]
    tree = DraftTree((5, 6, 7), (0, 0, 2))
    assert SelfDrafting(Sloppy(left([5, 6, 7], [0, 0, 2]))).draft([job("a", [1])]) == [SelfDraft(tree)]


def test_a_method_that_goes_on_for_ever_is_stopped() -> None:
    with pytest.raises(ModelError, match="does not come to an end"):
        SelfDrafting(Sloppy()).draft([job("a", [1, 2, 3])])


def test_under_ratio_drafts_are_a_chain_chosen_without_chance() -> None:
    method = Sloppy(left([5], []))
    ratio = job("a", [1], rule=AcceptanceRule.RATIO)
    assert SelfDrafting(method).draft([ratio]) == [SelfDraft(DraftTree.chain([5]))]
    assert method.seen[0].rule is AcceptanceRule.RATIO
    assert method.seen[0].sampling.greedy
    assert method.seen[0].sampling.seed == SAMPLED.seed
    assert SelfDrafting(Sloppy(left([5, 6], [0, 0]))).draft([ratio]) == [SelfDraft()]
    # Drawn drafts would need the probabilities that they were drawn from.
    assert SelfDrafting(Sloppy(left([1], [], [EVEN]))).draft([ratio]) == [SelfDraft()]
