"""Maps between a head's own small vocabulary and the target's."""

from __future__ import annotations

import torch

from paceline.checkpoint_files.weight_files import FIELD
from paceline.errors import ModelError

_INTEGERS = (torch.int64, torch.int32)


def check_draft_map(
    title: str, d2t: torch.Tensor | None, t2d: torch.Tensor | None, draft_vocab_size: int, vocab_size: int
) -> torch.Tensor | None:
    """The offsets of a draft vocabulary, checked.

    Args:
        title: of the checkpoint, for messages.
        d2t: # [draft_vocab_size] draft id i means target id i + d2t[i]; may be absent where the vocabulary is whole.
        t2d: # [vocab_size] bool: which target ids have a draft id; may be absent.
        draft_vocab_size: columns of the draft's head.
        vocab_size: the target's.

    Returns:
        The offsets as int64; None where draft and target ids are the same.

    Raises:
        ModelError: the map cannot be right.
    """
    if d2t is None:
        if draft_vocab_size != vocab_size:
            raise _wrong(
                title,
                f"the head has {draft_vocab_size} columns and the target {vocab_size}; no d2t says which ids they mean",
            )
        targets = torch.arange(vocab_size)
    else:
        _check_integers(title, "d2t", d2t, draft_vocab_size)
        targets = target_ids_of(d2t)
        if draft_vocab_size < vocab_size and t2d is None and not bool(d2t.any()):
            raise _wrong(title, "d2t is all zeros, as it is before it is filled, and no t2d says that this is meant")
        if complaint := _complaint(targets, vocab_size):
            absolute = (
                "; it seems to hold target ids and not offsets to them" if not _complaint(d2t, vocab_size) else ""
            )
            raise _wrong(title, f"d2t {complaint}{absolute}")
    if t2d is not None:
        _check_mask(title, t2d, targets, vocab_size)
    return None if d2t is None or (draft_vocab_size == vocab_size and not bool(d2t.any())) else d2t.long()


def target_ids_of(d2t: torch.Tensor) -> torch.Tensor:
    """The target's id of each draft id # [draft_vocab_size] int64, from offsets of the same shape; on the CPU."""
    return torch.arange(len(d2t)) + d2t.long().cpu()


def check_token_map(title: str, token_map: torch.Tensor, num_columns: int, vocab_size: int) -> torch.Tensor:
    """A map from a head's columns to target ids, checked # [num_columns] int64.

    Raises:
        ModelError: the map cannot be right.
    """
    _check_integers(title, "token_map", token_map, num_columns)
    if complaint := _complaint(token_map, vocab_size):
        raise _wrong(title, f"token_map {complaint}")
    return token_map.long()


def _check_integers(title: str, name: str, found: torch.Tensor, length: int) -> None:
    if found.dtype not in _INTEGERS or tuple(found.shape) != (length,):
        kind = str(found.dtype).removeprefix("torch.")
        raise _wrong(title, f"{name} is {kind} {list(found.shape)}, expected integers [{length}], one for each column")


def _check_mask(title: str, t2d: torch.Tensor, targets: torch.Tensor, vocab_size: int) -> None:
    if t2d.dtype is not torch.bool or tuple(t2d.shape) != (vocab_size,):
        kind = str(t2d.dtype).removeprefix("torch.")
        raise _wrong(title, f"t2d is {kind} {list(t2d.shape)}, expected bool [{vocab_size}], one for each target id")
    marked = t2d.nonzero().flatten()
    if not torch.equal(marked, targets.sort().values):
        raise _wrong(
            title,
            f"d2t and t2d do not name the same ids: t2d marks {len(marked)}, d2t reaches {len(targets)}"
            + (", and not those" if len(marked) == len(targets) else ""),
        )


def _complaint(targets: torch.Tensor, vocab_size: int) -> str:
    """Why these cannot be the target ids of a head's columns; empty if they can."""
    outside = int(((targets < 0) | (targets >= vocab_size)).sum())
    if outside:
        return f"reaches {outside} ids outside [0, {vocab_size})"
    twice = len(targets) - len(set(targets.tolist()))
    return f"reaches {twice} ids twice" if twice else ""


def _wrong(title: str, what: str) -> ModelError:
    return ModelError(
        f"{title}: wrong vocabulary map: {what}; give the head with the map that it was trained with, for this target",
        field=FIELD,
    )
