"""A drafting method that follows a script: for tests of the drafter service, the gateway and the whole fleet.

A script says which tokens to propose after a context. It is built from the target's law, the function from context to
next token that the scripted target follows too:

    drafter = ScriptedDrafter(perfect(law))
    drafter = ScriptedDrafter(wrong_at(law, 2))
    gate = StepGate()
    drafter = ScriptedDrafter(perfect(law), gate=gate)       # slow: each step waits until the test lets it go
    drafter = ScriptedDrafter(drawn(row, seed=1), row=row)   # draws its drafts, and says from what under rule ratio

The rows it reports follow the rule of `draft_model`, so tests can check `kv_len` through the wire.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

from paceline.drafting.method import DraftJob, MethodInfo
from paceline.drafting.rows import rows_to_keep
from paceline.errors import CapacityExceeded, ModelError
from paceline.messages import AcceptanceRule, DraftProbs, SamplingParams

Law = Callable[[Sequence[int], SamplingParams], int]
"""The next token after a context under the request's parameters."""

RowLaw = Callable[[Sequence[int]], DraftProbs]
"""The distribution of the next draft after a context."""

Script = Callable[[Sequence[int], SamplingParams, int], list[int]]
"""The tokens to propose: (context, parameters, max_depth) to a chain."""


def chain_of(law: Law, context: Sequence[int], sampling: SamplingParams, length: int) -> list[int]:
    """What the law itself writes after the context."""
    tokens = list(context)
    for _ in range(length):
        tokens.append(law(tokens, sampling))
    return tokens[len(context) :]


def perfect(law: Law) -> Script:
    """Proposes what the target will choose."""
    return lambda context, sampling, depth: chain_of(law, context, sampling, depth)


def wrong_at(law: Law, index: int, vocab_size: int) -> Script:
    """As `perfect`, but draft `index` (from 0) is another token; what follows continues the target's own text."""

    def script(context: Sequence[int], sampling: SamplingParams, depth: int) -> list[int]:
        tokens = chain_of(law, context, sampling, depth)
        if index < depth:
            tokens[index] = (tokens[index] + 1) % vocab_size
        return tokens

    return script


def eos_at(law: Law, index: int, eos_token: int) -> Script:
    """As `perfect`, but draft `index` is the end-of-sequence token, whatever the target wants."""
    return put_at(law, index, eos_token)


def out_of_vocab(law: Law, index: int, token: int) -> Script:
    """As `perfect`, but draft `index` is an id that the target does not have: its vocabulary size, or -1."""
    return put_at(law, index, token)


def put_at(law: Law, index: int, token: int) -> Script:
    """As `perfect`, but draft `index` is `token`."""

    def script(context: Sequence[int], sampling: SamplingParams, depth: int) -> list[int]:
        tokens = chain_of(law, context, sampling, depth)
        if index < depth:
            tokens[index] = token
        return tokens

    return script


def drawn(row: RowLaw, seed: int) -> Script:
    """Draws each draft from a law, anew each time."""
    # Not for secrets: the tests want the same draws in every run.
    source = random.Random(seed)

    def script(context: Sequence[int], sampling: SamplingParams, depth: int) -> list[int]:
        tokens = list(context)
        for _ in range(depth):
            probs = row(tokens)
            tokens += source.choices(probs.token_ids, probs.probs)
        return tokens[len(context) :]

    return script


def empty() -> Script:
    """Never finds anything."""
    return lambda context, sampling, depth: []


def too_long(law: Law, extra: int) -> Script:
    """As `perfect`, but `extra` tokens more than were asked for."""
    return lambda context, sampling, depth: chain_of(law, context, sampling, depth + extra)


def garbage(seed: int, vocab_size: int) -> Script:
    """Random tokens and a random length, another one each time."""
    # Not for secrets: the tests want the same garbage in every run.
    source = random.Random(seed)

    def script(context: Sequence[int], sampling: SamplingParams, depth: int) -> list[int]:
        return [source.randrange(vocab_size) for _ in range(source.randint(0, depth))]

    return script


def broken(message: str = "scripted failure") -> Script:
    """Raises ModelError at every draft."""

    def script(context: Sequence[int], sampling: SamplingParams, depth: int) -> list[int]:
        raise ModelError(message)

    return script


class StepGate:
    """Holds a drafter's steps until the test lets them go; no clock is involved.

    `advance` runs in the drafter's engine thread; from a coroutine call `wait_entered` through `asyncio.to_thread`.
    """

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._entered = threading.Semaphore(0)
        self._opened = threading.Event()

    def release(self, steps: int = 1) -> None:
        """Lets `steps` steps through."""
        for _ in range(steps):
            self._permits.release()

    def open(self) -> None:
        """Lets every step through from now on, one that waits included."""
        self._opened.set()
        self._permits.release()

    def wait_entered(self, timeout_s: float = 10.0) -> None:
        """Returns when one more step has arrived at the gate."""
        if not self._entered.acquire(timeout=timeout_s):
            raise AssertionError(f"no step arrived at the gate within {timeout_s} s")

    def pass_through(self, timeout_s: float = 60.0) -> None:
        """Called by the drafter: waits for a permit."""
        self._entered.release()
        if self._opened.is_set():
            return
        if not self._permits.acquire(timeout=timeout_s):
            raise AssertionError(f"the test did not let the step through within {timeout_s} s")


class ScriptedDrafter:
    """A `DraftMethod` that follows a script, one token per step.

    Attributes:
        script: what to propose; may be exchanged between steps.
        steps: number of calls of `advance`.
        contexts: context of every draft begun, oldest first.
        fed: per open session the tokens whose rows it would hold.
    """

    def __init__(
        self,
        script: Script,
        *,
        gate: StepGate | None = None,
        at_once: bool = False,
        confidence: float = 1.0,
        row: RowLaw | None = None,
        info: MethodInfo | None = None,
    ) -> None:
        self.script = script
        self.steps = 0
        self.contexts: list[tuple[int, ...]] = []
        self.fed: dict[str, list[int]] = {}
        self._gate = gate
        self._at_once = at_once
        self._confidence = confidence
        self._row = row
        self._info = info or MethodInfo(name="scripted")
        self._plans: dict[int, list[int]] = {}

    @property
    def info(self) -> MethodInfo:
        return self._info

    def open(self, session: str) -> None:
        limit = self._info.max_sessions
        if limit and len(self.fed) >= limit and session not in self.fed:
            raise CapacityExceeded(f"all {limit} draft sessions are taken")
        self.fed[session] = []

    def advance(self, jobs: Sequence[DraftJob]) -> None:
        if self._gate is not None:
            self._gate.pass_through()
        self.steps += 1
        # Plans of superseded jobs go with them: a plan lives only from one step of its job to the next.
        self._plans = {id(job): self._plans[id(job)] for job in jobs if job.tokens and id(job) in self._plans}
        for job in jobs:
            if not job.done:
                self._step(job)

    def _step(self, job: DraftJob) -> None:
        fed = self.fed[job.session]
        plan = self._plans.get(id(job))
        if plan is None:
            self.contexts.append(tuple(job.context))
            plan = self._plans[id(job)] = self.script(job.context, job.sampling, job.max_depth)
            del fed[rows_to_keep(fed, job.context) :]
            fed.extend(job.context[len(fed) :])
        elif job.tokens:
            fed.append(job.tokens[-1])
        count = len(plan) if self._at_once else 1
        for token in plan[len(job.tokens) : len(job.tokens) + count]:
            if self._row is not None and job.rule is AcceptanceRule.RATIO and not job.sampling.greedy:
                job.draft_probs.append(self._row([*job.context, *job.tokens]))
            job.tokens.append(token)
            job.confidences.append(self._confidence)
        job.method = self._info.name
        if len(job.tokens) >= len(plan):
            job.done = True
            del self._plans[id(job)]

    def kv_len(self, session: str) -> int:
        return len(self.fed.get(session, ()))

    def close(self, session: str) -> None:
        self.fed.pop(session, None)
