"""The rule `ratio` on rows of logits: distributions, noise and the walk along a chain.

Two streams of noise decide, both keyed by (seed, absolute position) and neither ever used for drafting: one uniform per
draft says whether it stays, and Gumbel noise draws the token after the last that did. So a verdict is a pure function
of the block, the logits and the seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.engine.processors import SessionRows, Shaping
from paceline.errors import ModelError
from paceline.messages import DraftProbs
from paceline.speculation.acceptance import Walk, check_draft_probs, ratio
from paceline.speculation.noise import NoiseStream, keyed_argmax, noise_keys, uniform


@dataclass(frozen=True, slots=True)
class RatioChain:
    """A chain of drafts under the rows that judge it.

    Attributes:
        session: row i judges draft i, the last row is for the bonus; of a sampled request.
        tokens: the drafts.
        draft_probs: what each was drawn from. # [num_draft_tokens, vocab_size] float32
    """

    session: SessionRows
    tokens: tuple[int, ...]
    draft_probs: torch.Tensor

    @classmethod
    def of(cls, session: SessionRows, tokens: tuple[int, ...], draft_probs: Sequence[DraftProbs]) -> RatioChain:
        """Spells out what the drafts were drawn from.

        Args:
            session: rows of the block.
            tokens: the drafts, ids of the vocabulary.
            draft_probs: one per draft, perhaps more; empty for drafts that were chosen without chance.

        Raises:
            InvalidArgument: the drafts cannot have been drawn from that.
        """
        vocab_size = session.logits.shape[1]
        spelled_out = draft_probs or [DraftProbs((token,), (1.0,)) for token in tokens]
        check_draft_probs(spelled_out, tokens, vocab_size)
        dense = torch.zeros(len(tokens), vocab_size)
        for row, probs in zip(dense, spelled_out, strict=False):  # what was cut off is not judged
            row[list(probs.token_ids)] = torch.tensor(probs.probs)
        return cls(session, tokens, dense.to(session.logits.device))


def judge_chains(chains: Sequence[RatioChain]) -> list[Walk | ModelError]:
    """Judges chains by `ratio`.

    On a GPU chains of one length and shaping go together. On a CPU each goes alone, and no row is computed that it does
    not come to.
    """
    walks: dict[int, Walk | ModelError] = {}
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, chain in enumerate(chains):
        session = chain.session
        alone = (index,) if session.goes_row_by_row else ()
        kind = (*alone, len(chain.tokens), session.shaping, session.logits.shape[1], session.logits.device)
        alike.setdefault(kind, []).append(index)
    for members in alike.values():
        walks.update(zip(members, _judge_alike([chains[member] for member in members]), strict=True))
    return [walks[index] for index in range(len(chains))]


def _judge_alike(chains: Sequence[RatioChain]) -> list[Walk | ModelError]:
    """`judge_chains` for chains of one length, shaping, vocabulary and device."""
    shaping = chains[0].session.shaping or Shaping()
    num_drafts = len(chains[0].tokens)
    usable: list[torch.Tensor] = []

    def target_probs_at(row: int) -> torch.Tensor:
        processed = [chain.session.processed((row,)) for chain in chains]
        logits = torch.cat([entry[0] for entry in processed]) if len(processed) > 1 else processed[0][0]
        usable.append(torch.cat([entry[1] for entry in processed]))
        # An unusable row fails its session if that comes to it, and must not stop the others.
        return shaping.probs(logits if usable[-1].all() else logits.masked_fill(~usable[-1].unsqueeze(1), 0.0))

    device = chains[0].draft_probs.device
    tokens = torch.tensor([chain.tokens for chain in chains], dtype=torch.int64, device=device)
    verdicts = ratio(
        target_probs_at,
        torch.stack([chain.draft_probs for chain in chains]),
        tokens.view(len(chains), num_drafts),
        _uniforms(chains, num_drafts).to(device),
    )
    num_accepted = verdicts.num_accepted.tolist()
    last_keys = noise_keys(
        [chain.session.state.sampling.seed for chain in chains],
        [chain.session.position(row) for chain, row in zip(chains, num_accepted, strict=True)],
        stream=NoiseStream.RATIO_RESIDUAL,
        device=device,
    )
    last_tokens = keyed_argmax(verdicts.last_weights.float().log_(), last_keys).tolist()
    is_usable = torch.stack(usable).tolist()
    walks: list[Walk | ModelError] = []
    for index, (chain, row, last) in enumerate(zip(chains, num_accepted, last_tokens, strict=True)):
        reached = [rows[index] for rows in is_usable[: row + 1]]
        if all(reached):
            walks.append(Walk(tuple(range(1, row + 1)), (*chain.tokens[:row], last)))
        else:
            walks.append(chain.session.unusable(reached.index(False)))
    return walks


def _uniforms(chains: Sequence[RatioChain], num_drafts: int) -> torch.Tensor:
    """One uniform for every draft. # [chains, num_drafts] float64."""
    keys = noise_keys(
        [chain.session.state.sampling.seed for chain in chains for _ in range(num_drafts)],
        [chain.session.position(row) for chain in chains for row in range(num_drafts)],
        stream=NoiseStream.RATIO_ACCEPT,
    )
    return uniform(keys, torch.tensor([0])).view(len(chains), num_drafts)
