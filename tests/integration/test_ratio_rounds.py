"""The rule `ratio` from end to end without a network: the gateway's rounds, the engine's judge, noise keyed as it is.

tests/unit/gateway/test_ratio_law.py follows every choice of the rounds exactly; here the choices are the real ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from paceline.engine.judging import JudgeRequest, Verdict, judge
from paceline.messages import AcceptanceRule, DraftProbs, SamplingParams, Verify
from paceline.speculation.noise import NoiseStream, keyed_argmax, noise_keys
from paceline.speculation.tree import DraftTree
from paceline.token_log import TokenLog
from tests.unit.gateway.laws import hash_law
from tests.unit.gateway.simulation import Simulation
from tests.unit.speculation.law import P_VALUE, ToyModel, fit_outcomes

PROMPT = (1, 0)
NUM_TOKENS = 5
TARGET = ToyModel(4, seed=11)
DRAFTER = TARGET.blurred(1.0)


class Replicas:
    """A verifier that judges as the engine does and a drafter that draws as one does, under one seed."""

    def __init__(self, seed: int, told_temperature: float) -> None:
        self._sampling = SamplingParams(temperature=1.0, seed=seed)
        self._told_temperature = told_temperature

    def judge(self, log: TokenLog, command: Verify) -> tuple[tuple[int, ...], tuple[int, ...]]:
        rows = [TARGET.logits([*log.tokens, *command.block.tokens[:n]]) for n in range(len(command.block.tokens) + 1)]
        request = JudgeRequest(
            torch.stack(rows),
            command.block,
            log.tokens,
            len(PROMPT),
            self._sampling,
            TARGET.vocab_size,
            rule=AcceptanceRule.RATIO,
            draft_probs=command.draft_probs,
        )
        (verdict,) = judge([request])
        assert isinstance(verdict, Verdict)
        return verdict.accepted_path, verdict.tokens

    def script(self, context: Sequence[int], depth: int) -> DraftTree:
        tokens = list(context)
        for _ in range(depth):
            keys = noise_keys([self._sampling.seed], [len(tokens)], stream=NoiseStream.RATIO_DRAFT)
            tokens.append(int(keyed_argmax(DRAFTER.logits(tokens).unsqueeze(0), keys)))
        return DraftTree.chain(tokens[len(context) :])

    def draft_probs(self, context: Sequence[int], block: DraftTree) -> tuple[DraftProbs, ...]:
        rows = [DRAFTER.logits([*context, *block.tokens[:n]]) for n in range(len(block.tokens))]
        probs = [(row / self._told_temperature).softmax(-1) for row in rows]
        return tuple([DraftProbs((0, 1, 2, 3), tuple(row.tolist())) for row in probs])


def fit(folder: Path, num_seeds: int, told_temperature: float = 1.0) -> float:
    """p-value of three tokens in the middle of many generations with consecutive seeds.

    Args:
        folder: for the tokenizer.
        num_seeds: number of generations.
        told_temperature: the drafter says that it drew at this temperature; it draws at 1.
    """
    outcomes: Counter[tuple[int, ...]] = Counter()
    num_hits = num_accepted = 0
    for seed in range(num_seeds):
        replicas = Replicas(seed, told_temperature)
        simulation = Simulation(
            folder,
            hash_law(0),
            replicas.script,
            prompt=PROMPT,
            max_tokens=NUM_TOKENS,
            num_draft_tokens=2,
            rule=AcceptanceRule.RATIO,
            temperature=1.0,
            seed=seed,
        )
        simulation.verifiers["v0"].judge = replicas.judge
        simulation.drafter.draft_probs = replicas.draft_probs
        simulation.start()
        simulation.run()
        assert simulation.error is None
        outcomes[simulation.committed[1:4]] += 1
        evidence = simulation.loop.report(simulation.now)
        num_hits += evidence.ahead_hits
        num_accepted += evidence.accepted_tokens
    assert min(num_hits, num_accepted) > num_seeds / 4
    law: dict[tuple[int, ...], float] = defaultdict(float)
    for tokens, prob in TARGET.law(SamplingParams(temperature=1.0), 4, PROMPT).items():
        law[tokens[1:]] += prob
    return fit_outcomes(outcomes, law)


def test_generations_have_the_law_of_the_target(tmp_path: Path) -> None:
    assert fit(tmp_path, 1200) > P_VALUE


def test_a_drafter_that_says_what_it_did_not_draw_from_would_be_found_out(tmp_path: Path) -> None:
    assert fit(tmp_path, 400, told_temperature=3.0) < 1e-6
