"""Drafts of one head in EAGLE-3's manner, and what they would be from nothing."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.drafting.eagle import EagleMethod
from paceline.drafting.method import DraftJob
from tests.unit.drafting.eagle.heads import (
    VOCAB,
    NaiveHead,
    Recorded,
    features_of,
    finish,
    job_of,
    naive_chain,
    random_head,
    shared_parts,
)
from tests.unit.drafting.rounds import GREEDY

HEAD = random_head("eagle3")
NAIVE = NaiveHead(HEAD, shared_parts())
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
LONG = tuple((7 * index * index + index) % VOCAB for index in range(60))


def draft(method: EagleMethod, context: Sequence[int], depth: int = 3, *, session: str = "s") -> DraftJob:
    job = job_of(HEAD, context, depth, session=session)
    finish(method, job)
    return job


def chain_from_nothing(context: Sequence[int], depth: int = 3) -> list[int]:
    return naive_chain(NAIVE, features_of(HEAD, context), context, depth, GREEDY)


def reads(job: DraftJob) -> list[tuple[int, int]]:
    assert isinstance(job.features, Recorded)
    return job.features.reads
