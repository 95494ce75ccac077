"""Drafts for what may come: while a block is judged, its drafter goes on after the block's likeliest outcomes.

| interval of tokens | who knows it |
|---|---|
| [0, base_len) | committed |
| [base_len, block_end) | the block that is being judged: the `assumed` tokens of a draft that was asked for ahead |
| [block_end, ...) | what that draft proposes; its first token is the guess of the target's extra one |

An outcome cuts the block somewhere and puts another candidate of the drafter in that place. After each of the likeliest
ones a draft is made, in the passes that draft ahead, and only in those that draft for no other session: nobody waits
for what may be for nothing. When a draft is asked for whose context is one of these, it begins with what is there, and
most often is there whole: a rejection then costs a way to the drafter and back, and no drafting.

That changes no token: what is prepared after a context is what would have been drafted after it. Only for the rule
`match`: under `ratio` candidates are drawn, not ranked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.drafting.method import DraftJob, DraftMethod
from paceline.drafting.outcomes import NUM_CANDIDATES, likeliest_outcomes
from paceline.errors import CapacityExceeded
from paceline.messages import AcceptanceRule
from paceline.token_log import common_prefix_len


@dataclass(slots=True)
class _Session:
    """What is known of one session.

    Attributes:
        base_len: committed tokens of the newest draft.
        newest: the newest draft.
        before: the one before it; it knows the candidates of the block that `newest` assumes.
        prepared: drafts after outcomes of that block.
        num_open: sessions of the method that were opened for them.
    """

    base_len: int = 0
    newest: DraftJob | None = None
    before: DraftJob | None = None
    prepared: list[DraftJob] = field(default_factory=list)
    num_open: int = 0


class Foresight:
    """What is prepared for the sessions of a drafter.

    Args:
        method: the drafting method; each prepared draft is a session of it.
        num_outcomes: most drafts that are prepared for a session at a time; 0 prepares nothing.
    """

    def __init__(self, method: DraftMethod, num_outcomes: int) -> None:
        self._method = method
        self._num_outcomes = num_outcomes
        self._sessions: dict[str, _Session] = {}

    def begin(self, job: DraftJob, base_len: int) -> int:
        """A draft begins: with what is prepared for its context, if anything is.

        Args:
            job: the draft, without tokens; it is given those that are there.
            base_len: its committed tokens.

        Returns:
            Tokens that it has been given.
        """
        if not self._num_outcomes or job.rule is not AcceptanceRule.MATCH:
            return 0
        job.num_candidates = NUM_CANDIDATES
        session = self._sessions.setdefault(job.session, _Session())
        found = next((prepared for prepared in session.prepared if prepared.context == job.context), None)
        if found is not None:
            count = min(len(found.tokens), job.max_depth)
            job.tokens += found.tokens[:count]
            job.confidences += found.confidences[:count]
            job.candidates += found.candidates[:count]
            job.method = found.method
        session.before, session.newest, session.base_len = session.newest, job, base_len
        session.prepared = []
        return len(job.tokens)

    def beside(self, jobs: Sequence[DraftJob]) -> list[DraftJob]:
        """What to draft in the same pass as these; nothing beside drafts of several sessions."""
        session = self._sessions.get(jobs[0].session) if len(jobs) == 1 else None
        if session is None or session.newest is not jobs[0]:
            return []
        if not session.prepared:
            session.prepared = self._prepare(session, jobs[0])
        return [job for job in session.prepared if not job.done]

    def _prepare(self, session: _Session, ahead: DraftJob) -> list[DraftJob]:
        """Drafts to make after the outcomes of the block that a draft ahead assumes, once it has its first token."""
        depth = ahead.max_depth - 1
        block_end = len(ahead.context)
        if not ahead.tokens or depth < 1 or block_end <= session.base_len:
            return []
        others = _others(session.before, ahead.context, session.base_len)
        others.append(ahead.candidates[0][1:] if ahead.candidates else ())
        prepared: list[DraftJob] = []
        for outcome in likeliest_outcomes(block_end - session.base_len, self._num_outcomes):
            candidates = others[outcome.position]
            if outcome.rank > len(candidates):
                continue
            key = self._key(session, ahead.session, len(prepared))
            if key is None:
                break
            end = session.base_len + outcome.position
            context = [*ahead.context[:end], candidates[outcome.rank - 1]]
            prepared.append(
                DraftJob(
                    key,
                    context,
                    depth,
                    ahead.sampling,
                    ahead.generation_start,
                    ahead.only,
                    num_candidates=NUM_CANDIDATES,
                )
            )
        return prepared

    def _key(self, session: _Session, name: str, index: int) -> str | None:
        """A session of the method for the prepared draft of this index; None where there is no room."""
        key = f"{name}\0{index}"  # no client's name holds that
        if index >= session.num_open:
            try:
                self._method.open(key)
            except CapacityExceeded:
                return None
            session.num_open = index + 1
        return key

    def forget(self, name: str) -> None:
        """The session is gone, or is begun anew: frees what was prepared for it."""
        session = self._sessions.pop(name, None)
        for index in range(0 if session is None else session.num_open):
            self._method.close(f"{name}\0{index}")


def _others(drafted: DraftJob | None, tokens: Sequence[int], start: int) -> list[tuple[int, ...]]:
    """A draft's candidates besides the tokens at positions [start, len(tokens)) of a text; none where it has none."""
    if drafted is None:
        return [()] * (len(tokens) - start)
    first, end = len(drafted.context), len(drafted.context) + len(drafted.candidates)
    agreed = common_prefix_len([*drafted.context, *drafted.tokens], tokens)
    others: list[tuple[int, ...]] = []
    for position in range(start, len(tokens)):
        known = drafted.candidates[position - first] if first <= position < end and position <= agreed else ()
        others.append(tuple(token for token in known if token != tokens[position]))
    return others
