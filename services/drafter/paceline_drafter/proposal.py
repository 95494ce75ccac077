"""What a draft proposes, as it goes on the wire."""

from __future__ import annotations

from paceline.drafting.method import DraftJob
from paceline.errors import InvalidArgument
from paceline.messages import DraftProbs
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree


def proposal_of(job: DraftJob) -> tuple[DraftTree, tuple[float, ...], tuple[DraftProbs, ...]]:
    """What a job proposes, no deeper than was asked for: block, confidences and what the tokens were drawn from."""
    if job.parents:
        try:
            tree = job.block
        except InvalidArgument:  # no tree at all: garbage of the method costs this draft only
            return EMPTY_BLOCK, (), ()
        cropped = tree.crop_depth(max(0, job.max_depth))
        return cropped, tuple(job.confidences) if cropped == tree else (), ()
    count = max(0, min(job.max_depth, len(job.tokens)))
    block = DraftTree.chain(job.tokens[:count]) if count else EMPTY_BLOCK
    return block, tuple(job.confidences[:count]), tuple(job.draft_probs[:count])
