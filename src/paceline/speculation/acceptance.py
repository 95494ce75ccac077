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
drawn from exactly the `draft_probs` given here and with randomness that is independent of the one used here. A draft
that was chosen without chance was drawn from a distribution that holds nothing else.

This module does not know how logits become distributions, nor where noise comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch

from paceline.errors import InvalidArgument, ModelError
from paceline.messages import DraftProbs
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
    steps = match_steps(tree)
    node = next(steps)
    while True:
        try:
            node = steps.send(sample_at(node))
        except StopIteration as end:
            walk: Walk = end.value
            return walk


def match_steps(tree: DraftTree) -> Generator[int, int, Walk]:
    """`match` in steps, for walks side by side: yields a node, is sent the sample there, returns the walk."""
    children = tree.children()
    node = 0
    path: list[int] = []
    tokens: list[int] = []
    while True:
        token = yield node
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
        last_weights: what the token after them is to be drawn from, not normalised. # [batch, vocab_size] float64
    """

    num_accepted: torch.Tensor
    last_weights: torch.Tensor


def ratio(
    target_probs_at: Callable[[int], torch.Tensor],  # index of a draft -> [batch, vocab_size] float
    draft_probs: torch.Tensor,  # [batch, num_draft_tokens, vocab_size] float
    draft_tokens: torch.Tensor,  # [batch, num_draft_tokens] int64
    uniforms: torch.Tensor,  # [batch, num_draft_tokens] in [0, 1)
) -> RatioVerdicts:
    """Judges chains by rejection sampling.

    The test is multiplicative and strict: no division by a vanishing draft probability, and u = 0 cannot accept a token
    that the target excludes. Where the residual has no mass (both distributions agree up to rounding) the target's own
    distribution takes its place.

    Args:
        target_probs_at: the rows that judge draft i, and behind the last draft the rows for the bonus. Asked in order,
            and no further than some chain goes.
        draft_probs: the distributions that the drafts were drawn from, checked by `check_draft_probs`.
        draft_tokens: the drafts.
        uniforms: one per draft, independent of everything the drafter used. The caller draws the last token with noise
            that is independent of these and of the drafter's.

    Raises:
        ModelError: a row that a chain has come to is not a distribution.
    """
    batch, num_drafts, vocab_size = draft_probs.shape
    num_accepted = torch.zeros(batch, dtype=torch.int64, device=draft_probs.device)
    last_weights = torch.empty(batch, vocab_size, dtype=torch.float64, device=draft_probs.device)
    on_its_way = torch.ones(batch, dtype=torch.bool, device=draft_probs.device)
    for draft in range(num_drafts):
        target, proposed = target_probs_at(draft), draft_probs[:, draft]
        _check_target_probs(target[on_its_way])
        token = draft_tokens[:, draft : draft + 1]
        chance = uniforms[:, draft].double() * proposed.gather(1, token)[:, 0].double()
        accepts = on_its_way & (chance < target.gather(1, token)[:, 0].double())
        ends = on_its_way & ~accepts
        if ends.any():
            last_weights[ends] = residual(target[ends], proposed[ends])
        on_its_way = accepts
        if not on_its_way.any():
            return RatioVerdicts(num_accepted, last_weights)
        num_accepted += accepts
    target = target_probs_at(num_drafts)[on_its_way]
    _check_target_probs(target)
    last_weights[on_its_way] = target.double()
    return RatioVerdicts(num_accepted, last_weights)


def residual(
    target_probs: torch.Tensor,  # [rows, vocab_size] float
    draft_probs: torch.Tensor,  # [rows, vocab_size] float
) -> torch.Tensor:
    """What is left of the target's distribution where drafts took their share, not normalised. Float64, same shape."""
    target_probs = target_probs.double()
    left = (target_probs - draft_probs.double()).clamp_(min=0.0)
    empty = left.sum(-1, keepdim=True) <= MIN_RESIDUAL_MASS
    return torch.where(empty, target_probs, left)


def _check_target_probs(target_probs: torch.Tensor) -> None:
    """Insists on finite rows that are not negative and sum to 1. # [rows, vocab_size]."""
    off = (target_probs.sum(-1, dtype=torch.float64) - 1.0).abs()
    bad = ~((target_probs.amin(-1) >= 0) & (off <= PROBABILITY_SUM_TOLERANCE))  # NaN compares false
    if bad.any():
        raise ModelError(f"the target's probabilities are not a distribution in {int(bad.sum())} rows of the block")


def check_draft_probs(draft_probs: Sequence[DraftProbs], draft_tokens: Sequence[int], vocab_size: int) -> None:
    """Refuses blocks whose tokens cannot have been drawn from the probabilities sent with them.

    Args:
        draft_probs: one per draft of a chain as it was sent.
        draft_tokens: what is left of that chain. Cutting it at an id that is no token would be biased, since the cut
            depends on the draw; it shows as an id outside the vocabulary in what was cut off.
        vocab_size: number of real token ids.

    Raises:
        InvalidArgument: names the first draft at fault.
    """
    if len(draft_probs) < len(draft_tokens):
        raise InvalidArgument(
            f"{len(draft_probs)} draft_probs for {len(draft_tokens)} drafts: send one for each, or none if all drafts "
            "were chosen without chance",
            field="draft_probs",
        )
    for draft, row in enumerate(draft_probs):
        token = draft_tokens[draft] if draft < len(draft_tokens) else None
        fault = _fault(row, token, vocab_size)
        if fault:
            raise InvalidArgument(
                f"the probabilities of draft {draft} {fault}: send exactly what the draft was drawn from",
                field="draft_probs",
            )


def _fault(row: DraftProbs, token: int | None, vocab_size: int) -> str:
    if len(row.token_ids) != len(row.probs):
        return f"are {len(row.probs)} for {len(row.token_ids)} ids"
    if len(set(row.token_ids)) < len(row.token_ids):
        return "name an id twice"
    if row.token_ids and not (min(row.token_ids) >= 0 and max(row.token_ids) < vocab_size):
        return f"name an id outside [0, {vocab_size})"
    if not all(prob >= 0.0 for prob in row.probs) or not abs(sum(row.probs) - 1.0) <= PROBABILITY_SUM_TOLERANCE:
        return "are not a distribution"  # NaN compares false
    if token is not None and dict(zip(row.token_ids, row.probs, strict=True)).get(token, 0.0) <= 0.0:
        return f"give its token {token} no probability"
    return ""
