"""The evidence of one choice under the names that users of other engines know."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from paceline.generation import Evidence, Finished, Started
from paceline_gateway.http.responses import ChoiceMetrics, SpeculativeDecoding


def choice_metrics(started: Started, finished: Finished) -> ChoiceMetrics:
    """Measurements of a choice that has ended."""
    evidence = finished.evidence
    num_drafts = _num_drafts(evidence)
    seconds = evidence.total_ms / 1000
    return ChoiceMetrics(
        speculative_decoding=SpeculativeDecoding(
            mean_acceptance_length=1 + evidence.accepted_tokens / num_drafts if num_drafts else 1.0,
            draft_acceptance_rate=evidence.accepted_tokens / evidence.draft_tokens if evidence.draft_tokens else 0.0,
            acceptance_histogram=acceptance_histogram(num_drafts, evidence.accepted_per_position),
            num_drafts=num_drafts,
            num_draft_tokens=evidence.draft_tokens,
            num_accepted_tokens=evidence.accepted_tokens,
            num_draft_tokens_per_pos=list(evidence.drafted_per_position),
            num_accepted_tokens_per_pos=list(evidence.accepted_per_position),
            num_wasted_draft_tokens=evidence.wasted_draft_tokens,
            draft_ahead_hits=evidence.ahead_hits,
            num_off_rounds=evidence.off_rounds,
            num_probe_rounds=evidence.probe_rounds,
            num_target_passes=evidence.target_passes,
            tokens_per_target_pass=evidence.tokens_per_target_pass,
            goodput_tokens_per_second=finished.completion_tokens / seconds if seconds else 0.0,
            time_to_first_token_ms=evidence.time_to_first_token_ms,
            total_ms=evidence.total_ms,
            draft_ms=evidence.draft_ms,
            verify_ms=evidence.verify_ms,
            queue_ms=evidence.queue_ms,
            wire_ms=evidence.wire_ms,
            draft_wait_ms=evidence.draft_wait_ms,
            drafter_memory_bytes=evidence.drafter_memory_bytes,
            methods=list(evidence.methods),
            warnings=list(started.warnings),
        )
    )


def acceptance_histogram(num_drafts: int, accepted_per_position: Sequence[int]) -> list[int]:
    """Drafts by the number of their accepted tokens.

    Args:
        num_drafts: drafts that were judged.
        accepted_per_position: entry i: drafts of which at least i + 1 tokens were accepted.

    Returns:
        Entry i: drafts of which exactly i were; adds up to `num_drafts`.
    """
    at_least = [num_drafts, *accepted_per_position, 0]
    return [more - fewer for more, fewer in itertools.pairwise(at_least)]


def _num_drafts(evidence: Evidence) -> int:
    """Every draft has a first token."""
    return evidence.drafted_per_position[0] if evidence.drafted_per_position else 0
