"""Speculative rounds in one process, as small as they can be: the target side keeps no rows between rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.drafting.method import DraftJob, DraftMethod
from paceline.engine.judging import JudgeRequest, Verdict, judge
from paceline.engine.runner import ModelRunner, SequencePass
from paceline.messages import SamplingParams
from paceline.speculation.tree import DraftTree

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=7)
HOT = SamplingParams(temperature=1.0, seed=11)


class Target:
    """Judges blocks with a runner; every verdict is computed from nothing."""

    def __init__(self, runner: ModelRunner, vocab_size: int | None = None) -> None:
        self._runner = runner
        self._vocab_size = vocab_size or runner.info.vocab_size

    def verify(self, committed: Sequence[int], drafts: Sequence[int], sampling: SamplingParams) -> Verdict:
        kv = self._runner.new_sequence()
        tree = DraftTree.chain(drafts)
        part = SequencePass(kv, tuple(committed), tree, num_logits=1 + len(drafts))
        kv.reserve(part.num_tokens)
        logits = self._runner.forward([part])[0]
        kv.free()
        request = JudgeRequest(logits, tree, committed, 0, sampling, self._vocab_size)
        verdict = judge([request])[0]
        assert isinstance(verdict, Verdict)
        return verdict

    def plain(self, prompt: Sequence[int], count: int, sampling: SamplingParams) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.extend(self.verify(tokens, (), sampling).tokens)
        return tokens[len(prompt) :]


@dataclass(slots=True)
class Outcome:
    """What a run of rounds wrote, and how many drafts of how many it accepted per round."""

    tokens: list[int]
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


def draft(
    method: DraftMethod, session: str, context: Sequence[int], depth: int, sampling: SamplingParams = GREEDY
) -> DraftJob:
    """One whole draft."""
    job = DraftJob(session, tuple(context), depth, sampling)
    steps = 0
    while not job.done:
        method.advance([job])
        steps += 1
        assert steps < 1000, "the draft does not end"
    assert len(job.confidences) == len(job.tokens) <= depth
    return job


def speculate(
    target: Target, method: DraftMethod, prompt: Sequence[int], count: int, depth: int, sampling: SamplingParams
) -> Outcome:
    """Drafts and verifies until `count` tokens are there; what is too much is cut."""
    method.open("s")
    tokens = list(prompt)
    outcome = Outcome([])
    while len(tokens) < len(prompt) + count:
        job = draft(method, "s", tokens, depth, sampling)
        verdict = target.verify(tokens, job.tokens, sampling)
        outcome.drafted.append(len(job.tokens))
        outcome.accepted.append(len(verdict.accepted_path))
        tokens.extend(verdict.tokens)
    method.close("s")
    outcome.tokens = tokens[len(prompt) : len(prompt) + count]
    return outcome
