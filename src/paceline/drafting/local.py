"""A drafting method as a plain function of the tokens so far: for `paceline.engine.local`, benchmarks and tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from paceline.drafting.method import DraftJob, DraftMethod, DraftsAtOnce
from paceline.engine.local import DrawnChain
from paceline.messages import AcceptanceRule, SamplingParams
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree

_session_numbers = count()


class LocalDrafter:
    """Drafts for one generation in this process; it, or its `draw`, is a `Propose` of `paceline.engine.local`.

    Args:
        method: may serve other generations too, from the same thread.
        sampling: the generation's parameters.
        generation_start: index of its first generated token.

    Attributes:
        last: the newest draft, with its confidences and the method that made it; None before the first.
    """

    def __init__(self, method: DraftMethod, sampling: SamplingParams, generation_start: int = 0) -> None:
        self._method = method
        self._sampling = sampling
        self._generation_start = generation_start
        self.session = f"local-draft-{next(_session_numbers)}"
        self.last: DraftJob | None = None
        method.open(self.session)

    def __call__(self, context: Sequence[int], max_depth: int) -> DraftTree:
        """The whole draft after a context, as a chain of at most `max_depth` tokens; for the rule `match`."""
        return self._draft(context, max_depth, AcceptanceRule.MATCH).tree

    def draw(self, context: Sequence[int], max_depth: int) -> DrawnChain:
        """The same for the rule `ratio`, with what the tokens were drawn from."""
        return self._draft(context, max_depth, AcceptanceRule.RATIO)

    def _draft(self, context: Sequence[int], max_depth: int, rule: AcceptanceRule) -> DrawnChain:
        job = DraftJob(self.session, tuple(context), max_depth, self._sampling, self._generation_start, rule=rule)
        while not job.done:
            if not (isinstance(self._method, DraftsAtOnce) and self._method.draft_at_once(job)):
                self._method.advance([job])
        self.last = job
        return DrawnChain(DraftTree.chain(job.tokens) if job.tokens else EMPTY_BLOCK, tuple(job.draft_probs))

    def close(self) -> None:
        """Frees what the session holds."""
        self._method.close(self.session)
