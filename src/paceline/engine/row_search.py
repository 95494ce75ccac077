"""Finds the best tokens of one long row of logits without looking twice at most of it.

The row is cut into blocks whose best values are found first, at the speed of memory; only blocks that hold something
good are searched for ids, which is slow. For a CPU: the sizes of the results are data, which a GPU would wait for.
"""

from __future__ import annotations

import torch

_BLOCK = 128


def ids_near_best(row: torch.Tensor, reach: float) -> torch.Tensor:
    """Ids of all values that are at most `reach` below the largest, in rising order. Returns int64 # [k], k >= 1.

    The bound is rounded to float32: what is left out is less than everything that is not.

    Args:
        row: with a finite maximum, no NaN. # [vocab_size] float32
        reach: how far down.
    """
    blocks = _blocks(row)
    best_of_block = blocks.amax(-1)
    least = best_of_block.amax() - reach
    near = (best_of_block >= least).nonzero()[:, 0]
    block, offset = (blocks.index_select(0, near) >= least).nonzero(as_tuple=True)
    return near.index_select(0, block).mul_(_BLOCK).add_(offset)


def _blocks(row: torch.Tensor) -> torch.Tensor:
    """The row in blocks, filled up with -inf. # [num_blocks, _BLOCK]."""
    missing = -row.shape[0] % _BLOCK
    if missing:
        row = torch.nn.functional.pad(row, (0, missing), value=-torch.inf)
    return row.view(-1, _BLOCK)
