"""The acceptance rules: what of a block of drafts stays.

Glossary

    draft tokens    what the drafter proposed: a tree under the pending token, most often a chain
    target_probs    the target's distribution at a position, after all processing of the request
    draft_probs     the distribution that a draft token was really drawn from (rule `ratio` only)
    sample          the target's own choice at a node, by the ordinary sampler (rule `match`)
    accepted        draft tokens that stay
    recovered       the target's token where the drafts went wrong
    bonus           the target's extra token after a fully accepted path
    plain           the target's token after an empty block

`match` (sample-and-match) walks from the root to the child that equals the sample, as long as there is one. The sample
is emitted either way, so the output is what the ordinary sampler says, whatever was drafted::

    drafts   a b c d e     samples  a b c d e f    ->  a b c d e accepted, f bonus          6 tokens
    drafts   a b c d e     samples  a b c x . .    ->  a b c accepted, x recovered          4 tokens, e is discarded
    drafts   (none)        samples  a              ->  a plain                              1 token

`ratio` is the rejection rule of Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318) for chains: a
draft x stays iff u * draft_probs[x] < target_probs[x]; the first one that does not is replaced by a draw from the
normalised residual max(target_probs - draft_probs, 0). Only the distribution is promised, and only if the drafts were
drawn from exactly the `draft_probs` given here and with randomness that is independent of the one used here.

This module does not know how logits become distributions, nor where noise comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.errors import InvalidArgument, ModelError
from paceline.speculation.tree import DraftTree

PROBABILITY_SUM_TOLERANCE = 1e-3
MIN_RESIDUAL_MASS = 1e-12


@dataclass(frozen=True, slots=True)
class Walk:
    """What `match` keeps of a block.

    Attributes:
        accepted_path: accepted nodes by depth, without the root.
        tokens: new tokens: one per accepted node, then one more.
    """

    accepted_path: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def visited(self) -> tuple[int, ...]:
        """Nodes whose sample was used: `tokens[i]` is the sample of node `visited[i]`."""
        return (0, *self.accepted_path)


def match(tree: DraftTree, sample_at: Callable[[int], int]) -> Walk:
    """Walks the tree along the target's own samples.

    Args:
        tree: the block.
        sample_at: the target's sample at a node. Asked once per visited node: only those need sampling at all.
    """
    children = tree.children()
    node = 0
    path: list[int] = []
    tokens: list[int] = []
    while True:
        token = sample_at(node)
        tokens.append(token)
        child = children[node].get(token)
        if child is None:
            return Walk(tuple(path), tuple(tokens))
        path.append(child)
        node = child


@dataclass(frozen=True, slots=True)
class RatioVerdicts:
    """What `ratio` keeps of a batch of chains of equal length.

    Attributes:
        num_accepted: accepted drafts of each chain. # [batch] int64
        last_tokens: the recovered or bonus token of each chain. # [batch] int64
    """

    num_accepted: torch.Tensor
    last_tokens: torch.Tensor


def ratio(
    target_probs: torch.Tensor,  # [batch, num_draft_tokens + 1, vocab_size] float32
    draft_probs: torch.Tensor,  # [batch, num_draft_tokens, vocab_size] float32
    draft_tokens: torch.Tensor,  # [batch, num_draft_tokens] int64
    uniforms: torch.Tensor,  # [batch, num_draft_tokens] in [0, 1)
    residual_noise: torch.Tensor,  # [batch, vocab_size] standard Gumbel
) -> RatioVerdicts:
    """Judges chains by rejection sampling.

    The test is multiplicative and strict: no division by a vanishing draft probability, and u = 0 cannot accept a token
    that the target excludes. Where the residual has no mass (both distributions agree up to rounding) the target's own
    distribution takes its place.

    Args:
        target_probs: row i judges draft i; the last row is for the bonus.
        draft_probs: the distribution that draft i was drawn from.
        draft_tokens: the drafts.
        uniforms: one per draft, independent of everything the drafter used.
        residual_noise: for the last token, independent of everything else.

    Raises:
        ModelError: a row of `target_probs` is not a distribution.
        InvalidArgument: a row of `draft_probs` is not a distribution, or gives a draft token no probability: that token
            was not drawn from it, and nothing can be promised.
    """
    _check_target_probs(target_probs)
    check_draft_probs(draft_probs, draft_tokens)
    num_drafts = draft_tokens.shape[1]
    index = draft_tokens.unsqueeze(-1)
    target_of_draft = target_probs[:, :num_drafts].gather(2, index)[..., 0].double()
    draft_of_draft = draft_probs.gather(2, index)[..., 0].double()
    accepts = uniforms.double() * draft_of_draft < target_of_draft
    num_accepted = accepts.long().cumprod(1).sum(1)

    # A zero row behind the last draft makes the bonus the residual of nothing: the target's row itself.
    draft_rows = torch.cat([draft_probs, torch.zeros_like(target_probs[:, :1])], dim=1)
    row = num_accepted.view(-1, 1, 1).expand(-1, 1, target_probs.shape[2])
    target_row = target_probs.gather(1, row)[:, 0].double()
    residual = (target_row - draft_rows.gather(1, row)[:, 0].double()).clamp_(min=0.0)
    empty = residual.sum(-1, keepdim=True) <= MIN_RESIDUAL_MASS
    weights = torch.where(empty, target_row, residual)
    return RatioVerdicts(num_accepted, (weights.log() + residual_noise.double()).argmax(-1))


def _not_a_distribution(probs: torch.Tensor) -> torch.Tensor:
    """Rows that are not finite, not >= 0 or do not sum to 1, # [..., vocab_size] -> [...] bool."""
    proper = (probs >= 0).all(-1)  # NaN compares false
    return ~proper | ~((probs.double().sum(-1) - 1.0).abs() <= PROBABILITY_SUM_TOLERANCE)


def _check_target_probs(target_probs: torch.Tensor) -> None:
    bad = _not_a_distribution(target_probs)
    if bad.any():
        raise ModelError(f"the target's probabilities are not a distribution in {int(bad.sum())} rows of the block")


def check_draft_probs(
    draft_probs: torch.Tensor,  # [batch, num_draft_tokens, vocab_size]
    draft_tokens: torch.Tensor,  # [batch, num_draft_tokens] int64
) -> None:
    """Refuses blocks whose tokens cannot have been drawn from the probabilities sent with them.

    Raises:
        InvalidArgument: names the first draft at fault.
    """
    outside = (draft_tokens < 0) | (draft_tokens >= draft_probs.shape[2])
    if outside.any():
        token = int(draft_tokens[outside][0])
        raise InvalidArgument(f"draft token {token} is outside [0, {draft_probs.shape[2]})", field="block.tokens")
    for reason, bad in (
        ("are not a distribution", _not_a_distribution(draft_probs)),
        ("give its token no probability", draft_probs.gather(2, draft_tokens.unsqueeze(-1))[..., 0] <= 0),
    ):
        if bad.any():
            draft = int(bad.nonzero()[0, 1])
            raise InvalidArgument(f"the probabilities of draft {draft} {reason}", field="block.draft_probs")
