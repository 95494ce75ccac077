"""Passes through the first layers only, on a session's own pages, and passes that go on from there (LayerSkip).

Rows of a sequence that drafts, for an exit after layer E of L:

| rows | of | layers [0, E) | layers [E, L) | hidden states after layer E |
|---|---|---|---|---|
| [0, num_rows) | committed tokens | written | written | gone |
| [num_rows, num_rows + n) | pending token, n - 1 drafts | written by `ExitStep`s | not yet | in `SequenceKV.ahead` |

The pass that judges the drafts takes these hidden states and runs layers [E, L) for their rows, and all layers for the
others: the last draft, another block than the one that was drafted, sessions that drafted nothing. Whatever happened
to the rows meanwhile, `ahead` is None then, and the pass is an ordinary one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.engine.attention import PagedAttention
from paceline.engine.kv.sequence import RowsAhead, SequenceKV
from paceline.engine.native.decoder import Decoder
from paceline.engine.pass_plan import PassPlan
from paceline.engine.runner import SequencePass
from paceline.token_log import common_prefix_len


@dataclass(frozen=True, slots=True)
class ExitStep:
    """One sequence's part of a pass through the first layers.

    Attributes:
        kv: its rows; one more than those ahead is reserved.
        token: at the position after them.
    """

    kv: SequenceKV
    token: int

    def sequence_pass(self, num_layers: int) -> SequencePass:
        """What is to be planned; rows ahead of other layers are forgotten."""
        ahead = self.kv.ahead
        if ahead is None or ahead.num_layers != num_layers:
            ahead = self.kv.ahead = RowsAhead(num_layers)
        return SequencePass(self.kv, (self.token,), num_logits=1, num_ahead=len(ahead.tokens))

    def keep(self, hidden: torch.Tensor) -> None:  # [1, hidden_size]
        """Notes the row that the pass wrote, and what leaves the first layers for it."""
        if self.kv.ahead is not None:
            self.kv.ahead.tokens.append(self.token)
            self.kv.ahead.hidden.append(hidden)


@dataclass(frozen=True, slots=True)
class KeptRows:
    """What the first layers have computed of a pass.

    Attributes:
        num_layers: layers [0, num_layers) are done for these rows.
        hidden: of each sequence, what leaves them for its first columns # [1, hidden_size] each
    """

    num_layers: int
    hidden: Sequence[Sequence[torch.Tensor]]

    def join(self, decoder: Decoder, plan: PassPlan, attention: PagedAttention) -> torch.Tensor:
        """Runs the first layers for the other columns.

        Args:
            decoder: the model.
            plan: of the whole pass.
            attention: its plan is another one afterwards.

        Returns:
            What enters layer `num_layers` for every token of the pass # [num_tokens, hidden_size]
        """
        rest = plan.skipping([len(rows) for rows in self.hidden])
        fresh = None
        if rest is not None:
            attention.plan = rest
            fresh = decoder.begin(rest, attention, self.num_layers)
        pieces: list[torch.Tensor] = []
        start = 0
        for sequence, rows in zip(plan.sequences, self.hidden, strict=True):
            pieces += rows
            num_fresh = sequence.stop - sequence.start - len(rows)
            if fresh is not None and num_fresh:
                pieces.append(fresh[start : start + num_fresh])
                start += num_fresh
        return torch.cat(pieces)


def take_ahead(batch: Sequence[SequencePass]) -> KeptRows | None:
    """What rows ahead can give to a pass; they are its sequences' no more, since the pass writes over them.

    Returns:
        None if there is nothing.
    """
    taken = [part.kv.ahead for part in batch]
    num_layers = next((ahead.num_layers for ahead in taken if ahead is not None), 0)
    hidden: list[list[torch.Tensor]] = []
    for part, ahead in zip(batch, taken, strict=True):
        part.kv.ahead = None
        same = ahead is not None and ahead.num_layers == num_layers
        hidden.append(ahead.hidden[: _num_common(part, ahead)] if ahead is not None and same else [])
    return KeptRows(num_layers, hidden) if any(hidden) else None


def _num_common(part: SequencePass, ahead: RowsAhead) -> int:
    """How many of the part's first tokens, as far as they are a chain, are those of the rows ahead."""
    num_drafts = next((node for node, parent in enumerate(part.tree.parents) if parent != node), len(part.tree.tokens))
    return common_prefix_len([*part.tokens, *part.tree.tokens[:num_drafts]], ahead.tokens)
