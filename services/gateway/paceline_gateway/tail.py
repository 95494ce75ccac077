"""What is known beyond the committed tokens: drafts, and under the rule `ratio` what each of them was drawn from.

Under `match` a tail is any tree and says nothing of probabilities. Under `ratio` it is a chain, and its tokens and
probabilities stay side by side whatever is done to it.

Drafting ahead is lossless under `ratio` too. The verifier draws the token after a block without knowing the tail, and
the tail lives on only if that token equals the guess on top of it: the guess itself is never tested any more, and what
is below was drawn after exactly the tokens that are committed now. A draft that goes because a position before it
turned out otherwise was never looked at, so a new one in its place is as good as the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.messages import AcceptanceRule, DraftProbs
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree
from paceline_gateway.continuation import crop_nodes, descend, graft, main_path


@dataclass(frozen=True, slots=True)
class Tail:
    """Drafts under the pending token; a block is the top of them.

    Attributes:
        tree: the drafts.
        draft_probs: one per token of a chain; empty where all were chosen without chance, and always under `match`.
    """

    tree: DraftTree = EMPTY_BLOCK
    draft_probs: tuple[DraftProbs, ...] = ()

    @classmethod
    def drafted(cls, block: DraftTree, draft_probs: tuple[DraftProbs, ...], rule: AcceptanceRule) -> Tail:
        """What is proposed; of a tree `ratio` takes the main path, which depends on no chance."""
        if rule is AcceptanceRule.MATCH:
            return cls(block)
        if block.is_chain:
            return cls(block, draft_probs)
        return cls(DraftTree.chain(main_path(block)))

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of the tree."""
        return self.tree.tokens

    @property
    def num_draft_tokens(self) -> int:
        """Number of drafts."""
        return self.tree.num_draft_tokens

    @property
    def main_path(self) -> tuple[int, ...]:
        """Tokens along the first child of every node."""
        return main_path(self.tree)

    def grafted(self, block: Tail) -> Tail:
        """The tail with a block hung under the end of its main path.

        Where only one of the two has probabilities, the other's tokens are certain: each was drawn from a distribution
        that holds nothing else.
        """
        if not self.tokens or not block.tokens:
            return block if block.tokens else self
        tree = graft(self.tree, block.tree)
        if not self.draft_probs and not block.draft_probs:
            return Tail(tree)
        return Tail(tree, _spelled_out(self) + _spelled_out(block))

    def below(self, tokens: Sequence[int]) -> Tail | None:
        """What is left after the tokens.

        Returns:
            None when the tokens leave the tail; an empty one when they end at one of its leaves.
        """
        tree = descend(self.tree, tokens)
        return None if tree is None else Tail(tree, self.draft_probs[len(tokens) :])

    def top(self, max_depth: int, max_nodes: int | None = None) -> Tail:
        """The tail without nodes deeper than `max_depth`, of these the first `max_nodes`."""
        tree = self.tree.crop_depth(max_depth)
        if max_nodes is not None:
            tree = crop_nodes(tree, max_nodes)
        return Tail(tree, self.draft_probs[: tree.num_draft_tokens])


def _spelled_out(tail: Tail) -> tuple[DraftProbs, ...]:
    return tail.draft_probs or tuple([DraftProbs((token,), (1.0,)) for token in tail.tokens])


EMPTY_TAIL = Tail()
"""No drafts: a plain decoding step."""
