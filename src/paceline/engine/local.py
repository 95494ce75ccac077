"""The same rounds in one process: decodes prompts through a `TargetEngine` with no service between.

The baseline for what the fleet adds, and the driver of tests that compare block sizes, drafters and batches. Drafts
come from any function of the tokens so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from paceline.engine.target import TargetEngine
from paceline.errors import PacelineError, from_failure
from paceline.messages import (
    AcceptanceRule,
    DraftProbs,
    Evicted,
    Failed,
    NeedTokens,
    Open,
    SamplingParams,
    Verified,
    Verify,
)
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree
from paceline.token_log import TokenLog

Propose = Callable[[Sequence[int], int], DraftTree]
"""Tokens so far and the deepest useful depth, to a block; whatever it returns, the output stays the same."""


@dataclass(frozen=True, slots=True)
class DrawnChain:
    """A chain for the rule `ratio`, with what its drafts were drawn from; empty if they were chosen without chance."""

    tree: DraftTree
    draft_probs: tuple[DraftProbs, ...] = ()


Draw = Callable[[Sequence[int], int], DrawnChain]
"""Tokens so far and the deepest useful depth, to a chain that the rule `ratio` can judge."""

_session_numbers = count()


def no_draft(_context: Sequence[int], _max_depth: int) -> DraftTree:
    """Plain decoding."""
    return EMPTY_BLOCK


@dataclass(frozen=True, slots=True)
class LocalRequest:
    """One generation.

    Attributes:
        prompt: token ids.
        sampling: parameters, seed included.
        max_tokens: most new tokens.
        num_draft_tokens: depth asked of `propose`; it is not asked for less than one.
        propose: where blocks come from.
        generation_start: index in `prompt` where this generation began, for penalties and min_tokens; None for its end.
        rule: how blocks are judged.
        self_draft_depth: deepest block asked of the engine's own drafter; where it gives one, `propose` is not asked.
        session: its name in the engine, for those who read the engine's rows of it; empty draws one.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    num_draft_tokens: int = 0
    propose: Propose | Draw = no_draft
    generation_start: int | None = None
    rule: AcceptanceRule = AcceptanceRule.MATCH
    self_draft_depth: int = 0
    session: str = ""


@dataclass(slots=True)
class LocalResult:
    """What became of a generation.

    Attributes:
        tokens: the new tokens, the one that ended it included.
        num_rounds: target passes that judged a block of this generation.
        num_drafted: draft tokens sent.
        num_accepted: of those, how many the target agreed with.
        rounds: number of new tokens of each round.
    """

    tokens: list[int] = field(default_factory=list)
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    rounds: list[int] = field(default_factory=list)


class Generation:
    """One request under way: its committed tokens, and the commands made from them.

    Args:
        engine: the session is opened in it; whoever drives the engine closes it.
        request: what is generated.
        eos_token_ids: tokens that end it, besides the request's stop ids.

    Attributes:
        session: its name in the engine.
        result: what has become of it so far.
        done: no further round is wanted.
    """

    def __init__(self, engine: TargetEngine, request: LocalRequest, eos_token_ids: tuple[int, ...]) -> None:
        self.request = request
        self.result = LocalResult()
        self.session = request.session or f"local-{next(_session_numbers)}"
        self.done = request.max_tokens < 1
        self._engine = engine
        self._next_block = EMPTY_BLOCK
        self._log = TokenLog(request.prompt)
        self._ends = frozenset(request.sampling.stop_token_ids) | (
            frozenset() if request.sampling.ignore_eos else frozenset(eos_token_ids)
        )
        start = len(request.prompt) if request.generation_start is None else request.generation_start
        engine.open(Open(self.session, 1, request.prompt, start, request.sampling, request.rule))

    def start_round(self) -> None:
        """Drafts a block and submits it."""
        length = len(self._log)
        left = self.request.max_tokens - len(self.result.tokens)
        drawn = self._draft(min(left - 1, self._engine.max_model_len - length - 1))
        self.result.num_rounds += 1
        self.result.num_drafted += drawn.tree.num_draft_tokens
        answer = self._engine.submit(
            Verify(
                self.session,
                1,
                self.result.num_rounds,
                length,
                self._log.hash_at(length),
                block=drawn.tree,
                draft_probs=drawn.draft_probs,
                # This round gives one token at least, the next one gives one more than it drafts.
                next_depth=max(min(self.request.self_draft_depth, left - 2), 0),
            )
        )
        if isinstance(answer, Failed):
            raise from_failure(answer.failure)
        if isinstance(answer, NeedTokens | Evicted):
            raise PacelineError(f"the engine lost session {self.session}: {answer}")

    def _draft(self, useful_depth: int) -> DrawnChain:
        """The round's block: what came with the last verdict, or else what is proposed for it."""
        block, self._next_block = self._next_block, EMPTY_BLOCK
        if block.num_draft_tokens:
            return DrawnChain(block.crop_depth(useful_depth))
        depth = min(self.request.num_draft_tokens, useful_depth)
        proposed = self.request.propose(self._log.tokens, depth) if depth > 0 else EMPTY_BLOCK
        drawn = proposed if isinstance(proposed, DrawnChain) else DrawnChain(proposed)
        block = drawn.tree.crop_depth(max(depth, 0))
        return DrawnChain(block, drawn.draft_probs[: block.num_draft_tokens])

    def take(self, verified: Verified) -> None:
        """Commits a round's tokens up to the end of the generation."""
        self._next_block = verified.next_block
        committed = 0
        for token in verified.tokens:
            self._log.extend((token,))
            self.result.tokens.append(token)
            committed += 1
            full = len(self._log) >= self._engine.max_model_len
            if token in self._ends or len(self.result.tokens) >= self.request.max_tokens or full:
                self.done = True
                break
        self.result.num_accepted += min(len(verified.accepted_path), committed)
        self.result.rounds.append(committed)


def generate(
    engine: TargetEngine, requests: Sequence[LocalRequest], *, eos_token_ids: tuple[int, ...] = ()
) -> list[LocalResult]:
    """Decodes all requests at once, each to its own end.

    Args:
        engine: nobody else may be using it.
        requests: one session is opened for each, and closed at its end.
        eos_token_ids: tokens that end a generation, besides the request's stop ids.

    Raises:
        PacelineError: the first failure of any request.
    """
    generations: dict[str, Generation] = {}
    try:
        for request in requests:
            generation = Generation(engine, request, eos_token_ids)
            generations[generation.session] = generation
        for generation in generations.values():
            if not generation.done:
                generation.start_round()
        while engine.has_work:
            for answer in engine.step():
                if isinstance(answer, Failed):
                    raise from_failure(answer.failure)
                generation = generations[answer.session]
                generation.take(answer)
                if generation.done:
                    engine.close(answer.session)
                else:
                    generation.start_round()
    finally:
        for session in generations:
            engine.close(session)
    return [generation.result for generation in generations.values()]
