"""The rule `ratio` through the round loop: the tokens have exactly the target's law, whatever comes when.

Nothing is drawn here. Each random choice of drafter and verifier is followed in every direction, with its probability,
and the laws of the generated texts are added up, so the comparison knows no chance.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from paceline_gateway.effects import Lane

from paceline.messages import AcceptanceRule, DraftProbs, Verify
from paceline.speculation.tree import DraftTree
from paceline.token_log import TokenLog
from tests.unit.gateway.laws import hash_law
from tests.unit.gateway.simulation import Simulation, verifies

Row = tuple[float, ...]
RowLaw = Callable[[Sequence[int]], Row]
"""The distribution of the next token, which is 0 or 1, after a context."""


def coins(seed: int) -> RowLaw:
    """Another coin after every context."""
    law = hash_law(seed)

    def row(tokens: Sequence[int]) -> Row:
        head = (law(tokens) + 0.5) / 15
        return head, 1 - head

    return row


TARGET, DRAFTER = coins(3), coins(8)
PROMPT = (1, 0)


class Choices:
    """The random choices of one run: those of the script first, then always the first outcome that can be."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = script
        self.taken: list[int] = []
        self.probs: list[Row] = []

    def draw(self, probs: Row) -> int:
        index = len(self.taken)
        outcome = self._script[index] if index < len(self._script) else _next_outcome(probs, -1)
        assert outcome is not None
        self.taken.append(outcome)
        self.probs.append(probs)
        return outcome

    @property
    def weight(self) -> float:
        weight = 1.0
        for outcome, probs in zip(self.taken, self.probs, strict=True):
            weight *= probs[outcome]
        return weight

    @property
    def successor(self) -> list[int] | None:
        """The script that comes next in the order of a tree walk; None after the last."""
        for index in reversed(range(len(self.taken))):
            outcome = _next_outcome(self.probs[index], self.taken[index])
            if outcome is not None:
                return [*self.taken[:index], outcome]
        return None


def _next_outcome(probs: Row, after: int) -> int | None:
    return next((outcome for outcome in range(after + 1, len(probs)) if probs[outcome] > 0), None)


def every_run() -> Iterator[Choices]:
    """Hands out choices to run with, until every direction has been followed."""
    script: list[int] | None = []
    while script is not None:
        choices = Choices(script)
        yield choices
        script = choices.successor


def judged_by_ratio(choices: Choices) -> Callable[[TokenLog, Verify], tuple[tuple[int, ...], tuple[int, ...]]]:
    """Leviathan's rule on the target's law; drafts without probabilities were certain."""

    def judge(log: TokenLog, command: Verify) -> tuple[tuple[int, ...], tuple[int, ...]]:
        block = command.block
        assert block.is_chain
        context = list(log.tokens)
        for index, token in enumerate(block.tokens):
            target, drafter = TARGET(context), [0.0, 0.0]
            probs = command.draft_probs[index] if command.draft_probs else DraftProbs((token,), (1.0,))
            for listed, value in zip(probs.token_ids, probs.probs, strict=True):
                drafter[listed] = value
            accepts = min(1.0, target[token] / drafter[token])
            if not choices.draw((accepts, 1 - accepts)):
                context.append(token)
                continue
            residual = [max(target[other] - drafter[other], 0.0) for other in range(2)]
            last = choices.draw(tuple([value / sum(residual) for value in residual]))
            return tuple(range(1, index + 1)), (*context[len(log) :], last)
        last = choices.draw(TARGET(context))
        return tuple(range(1, block.num_draft_tokens + 1)), (*context[len(log) :], last)

    return judge


class SampledDrafts:
    """Draws its drafts from the drafter's law; every `certain`-th answer is its most likely chain, said without law."""

    def __init__(self, choices: Choices, certain: int = 0) -> None:
        self._choices = choices
        self._certain = certain
        self._is_certain = False
        self._answers = 0

    def script(self, context: Sequence[int], depth: int) -> DraftTree:
        self._answers += 1
        self._is_certain = bool(self._certain) and self._answers % self._certain == 0
        tokens = list(context)
        for _ in range(depth):
            row = DRAFTER(tokens)
            tokens.append(int(row[1] > row[0]) if self._is_certain else self._choices.draw(row))
        return DraftTree.chain(tokens[len(context) :])

    def probs(self, context: Sequence[int], block: DraftTree) -> tuple[DraftProbs, ...]:
        if self._is_certain:
            return ()
        return tuple([DraftProbs((0, 1), DRAFTER([*context, *block.tokens[:i]])) for i in range(len(block.tokens))])


class Unsure(SampledDrafts):
    """Drops a draft, and what would follow, because of what was drawn: the classic mistake."""

    def script(self, context: Sequence[int], depth: int) -> DraftTree:
        tokens = super().script(context, depth).tokens
        kept = 0
        while kept < len(tokens) and DRAFTER([*context, *tokens[:kept]])[tokens[kept]] > 0.4:
            kept += 1
        return DraftTree.chain(tokens[:kept])


def deliver_all(simulation: Simulation, order: str) -> None:
    """Delivers to the end, turn by turn.

    Args:
        simulation: a generation that has been started.
        order: the turns, again and again: d and v deliver the next event of drafter and verifier, t lets the wait for a
            draft end, x restarts the verifier, so that what it was about to say is lost.
    """
    for turn in itertools.cycle(order):
        if simulation.terminal:
            return
        if turn == "x":
            simulation.break_link(Lane.VERIFIER, restart=True)
            simulation.mend_link(Lane.VERIFIER, restarted=True)
            continue
        lane = {"d": Lane.DRAFTER, "v": Lane.VERIFIER}.get(turn)
        if lane is not None and simulation.waiting[lane]:
            simulation.deliver(lane)
        elif lane is None and not simulation.waiting[Lane.VERIFIER]:
            assert simulation.loop.deadline is not None
            simulation.wait(max(simulation.loop.deadline - simulation.now, 0.0))


def law_of_texts(
    folder: Path, num_tokens: int, order: str, make_drafts: Callable[[Choices], SampledDrafts]
) -> tuple[dict[tuple[int, ...], float], set[str]]:
    """The probability of each text, and what was seen on the way."""
    law: dict[tuple[int, ...], float] = defaultdict(float)
    seen: set[str] = set()
    for choices in every_run():
        drafts = make_drafts(choices)
        simulation = Simulation(
            folder,
            hash_law(0),
            drafts.script,
            prompt=PROMPT,
            max_tokens=num_tokens,
            num_draft_tokens=2,
            rule=AcceptanceRule.RATIO,
            temperature=1.0,
        )
        simulation.verifiers["v0"].judge = judged_by_ratio(choices)
        simulation.drafter.draft_probs = drafts.probs
        simulation.start()
        deliver_all(simulation, order)
        assert simulation.error is None
        law[simulation.committed] += choices.weight
        report = simulation.loop.report(simulation.now)
        seen |= {"ahead"} if report.ahead_hits else set()
        seen |= {"wasted"} if report.wasted_draft_tokens else set()
        blocks = [command.base_len for command in verifies(simulation) if command.block.tokens]
        seen |= {"again"} if len(set(blocks)) < len(blocks) else set()
        for command in verifies(simulation):
            assert len(command.draft_probs) in (0, command.block.num_draft_tokens)
            certain = [len(probs.token_ids) == 1 for probs in command.draft_probs]
            seen |= {"mixed"} if any(certain) and not all(certain) else set()
    return law, seen


def distance_from_target(law: dict[tuple[int, ...], float], num_tokens: int) -> float:
    """Total variation; the law itself must add up to 1."""
    assert sum(law.values()) == pytest.approx(1.0)
    distance = 0.0
    for text in itertools.product(range(2), repeat=num_tokens):
        expected = 1.0
        for index, token in enumerate(text):
            expected *= TARGET([*PROMPT, *text[:index]])[token]
        distance += abs(expected - law[text]) / 2
    return distance


@pytest.mark.parametrize(
    ("num_tokens", "order", "certain", "expected"),
    [
        pytest.param(5, "dv", 0, {"ahead", "wasted"}, id="drafts come before verdicts"),
        pytest.param(5, "vd", 0, {"wasted"}, id="verdicts come before drafts"),
        pytest.param(5, "vtvd", 0, {"wasted"}, id="drafts come late"),
        pytest.param(5, "dvdvtd", 2, {"ahead", "wasted", "mixed"}, id="some drafts are certain"),
        pytest.param(3, "dxvdv", 0, {"ahead", "wasted", "again"}, id="verdicts are lost and blocks judged again"),
    ],
)
def test_texts_have_the_law_of_the_target(
    tmp_path: Path, num_tokens: int, order: str, certain: int, expected: set[str]
) -> None:
    law, seen = law_of_texts(tmp_path, num_tokens, order, lambda choices: SampledDrafts(choices, certain))
    assert distance_from_target(law, num_tokens) < 1e-12
    assert seen >= expected


def test_a_draft_that_goes_because_of_its_own_value_would_be_found_out(tmp_path: Path) -> None:
    law, _ = law_of_texts(tmp_path, 4, "dv", Unsure)
    assert distance_from_target(law, 4) > 0.01
