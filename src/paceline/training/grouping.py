"""Puts sequences of similar length together, so that little is padded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def group_by_length(indices: Sequence[int], lengths: Mapping[int, int], batch_tokens: int) -> list[list[int]]:
    """Groups of similar length; the longest times the count is at most `batch_tokens`, unless there is but one."""
    groups: list[list[int]] = []
    for index in sorted(indices, key=lambda index: lengths[index]):
        if not groups or (len(groups[-1]) + 1) * lengths[index] > batch_tokens:
            groups.append([])
        groups[-1].append(index)
    return groups
