"""Any drafting method inside the verifier: it drafts right after each verdict, and its block rides on the verdict.

Under the rule `ratio` drafts come without the probabilities that they were drawn from, so there they are chosen without
chance: the method is asked for the drafts of a greedy request, in a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.drafting.method import DraftJob, DraftMethod
from paceline.engine.features import FeatureTaps
from paceline.engine.self_draft import SelfDraft, SelfDraftJob
from paceline.errors import CapacityExceeded, InvalidArgument, ModelError
from paceline.messages import AcceptanceRule


class SelfDrafting:
    """A `SelfDrafter` around a `DraftMethod`.

    Sessions are opened in the method when they draft for the first time. One that finds no room there gets empty
    blocks until others have ended.

    Args:
        method: used by nobody else.
    """

    def __init__(self, method: DraftMethod) -> None:
        self._method = method
        self._open: set[str] = set()

    @property
    def method(self) -> str:
        """Name of the method."""
        return self._method.info.name

    @property
    def taps(self) -> FeatureTaps | None:
        """Features that the method builds on; None for none."""
        return self._method.info.taps

    @property
    def weights_bytes(self) -> int:
        """Memory of the method's weights."""
        return self._method.info.weights_bytes

    @property
    def kv_bytes(self) -> int:
        """Memory reserved for the method's key/value rows."""
        return self._method.info.kv_bytes

    def draft(self, jobs: Sequence[SelfDraftJob]) -> list[SelfDraft]:
        """One block per job, all made in the same steps.

        Raises:
            ModelError: the method goes on and on.
        """
        drafts = [_draft_job(job) if self._has_room(job.session) else None for job in jobs]
        pending = [draft for draft in drafts if draft is not None]
        # A step feeds at least one token of a context or adds one to a draft.
        steps_left = max((len(job.context) + job.max_depth + 1 for job in pending), default=0)
        while pending:
            if steps_left == 0:
                raise ModelError(f"the method {self.method} does not come to an end with {len(pending)} drafts")
            steps_left -= 1
            self._method.advance(pending)
            pending = [job for job in pending if not job.done]
        return [SelfDraft() if draft is None else _result(draft) for draft in drafts]

    def forget(self, session: str) -> None:
        """Frees what the method holds for a session; unknown sessions are forgotten already."""
        if session in self._open:
            self._open.remove(session)
            self._method.close(session)

    def _has_room(self, session: str) -> bool:
        """Whether the session is open in the method, perhaps only now."""
        if session not in self._open:
            try:
                self._method.open(session)
            except CapacityExceeded:
                return False
            self._open.add(session)
        return True


def _draft_job(job: SelfDraftJob) -> DraftJob:
    sampling = job.sampling
    if job.rule is AcceptanceRule.RATIO:
        sampling = replace(sampling, temperature=0.0)
    return DraftJob(
        session=job.session,
        context=job.tokens,
        max_depth=job.max_depth,
        sampling=sampling,
        generation_start=job.generation_start,
        rule=job.rule,
        features=job.features,
        target_rows=job.kv,
    )


def _result(job: DraftJob) -> SelfDraft:
    try:
        block = job.block
    except InvalidArgument:  # no tree at all: one session's garbage costs only its own block
        return SelfDraft()
    if job.rule is AcceptanceRule.RATIO and (job.draft_probs or not block.is_chain):
        return SelfDraft()
    return SelfDraft(block, tuple(job.confidences), job.method)
