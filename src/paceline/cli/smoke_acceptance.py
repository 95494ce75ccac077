"""How many drafts a target accepts, position by position, on a few prompts: the check that a head was read rightly.

A head that was loaded wrongly raises no error and changes no token. It only drafts badly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.engine.features import FeatureTaps
from paceline.engine.local import LocalRequest, generate
from paceline.engine.self_draft import SelfDraft, SelfDrafter, SelfDraftJob
from paceline.engine.target import TargetEngine
from paceline.messages import SamplingParams

PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain step by step how to boil an egg, and why each step matters.",
    "Write a Python function that returns the n-th Fibonacci number, and show how to call it.",
    "What is the difference between weather and climate? Answer in a few sentences.",
)
"""What the check asks the target: prose, instructions, code and facts."""


@dataclass(frozen=True, slots=True)
class SmokeAcceptance:
    """What was counted.

    Attributes:
        judged: of each position of a draft, from the first on, how many blocks reached it.
        accepted: of those, how many were accepted up to there.
        num_tokens: tokens that the target wrote.
        num_passes: passes that it took, those of the prompts included.
    """

    judged: tuple[int, ...]
    accepted: tuple[int, ...]
    num_tokens: int
    num_passes: int

    @property
    def per_position(self) -> tuple[float, ...]:
        """Share of the blocks that were accepted up to each position."""
        return tuple(accepted / judged for accepted, judged in zip(self.accepted, self.judged, strict=True))

    @property
    def tokens_per_pass(self) -> float:
        """What one pass of the target gives on average; 1 without drafts."""
        return self.num_tokens / self.num_passes if self.num_passes else 0.0


class DepthRecorder:
    """A self-drafter that remembers how deep each of its blocks was.

    Args:
        inner: makes them.

    Attributes:
        depths: of the blocks since it was last cleared; 0 for an empty one.
    """

    def __init__(self, inner: SelfDrafter) -> None:
        self._inner = inner
        self.depths: list[int] = []

    @property
    def method(self) -> str:
        """Name of the method."""
        return self._inner.method

    @property
    def taps(self) -> FeatureTaps | None:
        """Features that the method builds on; None for none."""
        return self._inner.taps

    @property
    def weights_bytes(self) -> int:
        """Memory of the method's weights."""
        return self._inner.weights_bytes

    @property
    def kv_bytes(self) -> int:
        """Memory reserved for the method's key/value rows."""
        return self._inner.kv_bytes

    def draft(self, jobs: Sequence[SelfDraftJob]) -> list[SelfDraft]:
        """What the inner one drafts."""
        drafts = self._inner.draft(jobs)
        self.depths += [draft.tree.max_depth for draft in drafts]
        return drafts

    def forget(self, session: str) -> None:
        """Frees what the inner one holds for a session."""
        self._inner.forget(session)


def measure_acceptance(
    engine: TargetEngine,
    recorder: DepthRecorder,
    prompts: Sequence[tuple[int, ...]],
    *,
    num_draft_tokens: int,
    max_tokens: int,
    eos_token_ids: tuple[int, ...] = (),
) -> SmokeAcceptance:
    """Lets a target answer prompts greedily, one after the other, with its own drafts.

    Args:
        engine: drafts by `recorder`.
        recorder: remembers the blocks.
        prompts: token ids.
        num_draft_tokens: depth asked of each block.
        max_tokens: most tokens of an answer.
        eos_token_ids: tokens that end one.

    Raises:
        PacelineError: a pass failed.
    """
    judged, accepted = [0] * num_draft_tokens, [0] * num_draft_tokens
    num_tokens = num_passes = 0
    for prompt in prompts:
        recorder.depths.clear()
        request = LocalRequest(prompt, SamplingParams(temperature=0.0), max_tokens, self_draft_depth=num_draft_tokens)
        result = generate(engine, [request], eos_token_ids=eos_token_ids)[0]
        num_tokens += len(result.tokens)
        num_passes += result.num_rounds
        # The first round has no block, and the last may end within one.
        for num_new, depth in zip(result.rounds[1:-1], recorder.depths, strict=False):
            for position in range(depth):
                judged[position] += 1
                accepted[position] += num_new - 1 > position
    reached = sum(count > 0 for count in judged)
    return SmokeAcceptance(tuple(judged[:reached]), tuple(accepted[:reached]), num_tokens, num_passes)
