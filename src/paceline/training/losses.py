"""Means over positions that stand where there is no position: then they are 0, not a division by 0."""

from __future__ import annotations

import torch
from torch.nn import functional


def mean_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy against ids # [rows, columns], [rows] int64 -> []."""
    return functional.cross_entropy(logits.float(), labels, reduction="sum") / max(len(labels), 1)


def mean_soft_cross_entropy(logits: torch.Tensor, target_logits: torch.Tensor) -> torch.Tensor:
    """Cross entropy against the softmax of other logits # [rows, columns] twice -> []."""
    wanted = functional.softmax(target_logits.float(), dim=-1)
    return -(wanted * functional.log_softmax(logits.float(), dim=-1)).sum() / max(len(logits), 1)
