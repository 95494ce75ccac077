"""From logits to tokens: the verdict on blocks, and the drafter's keyed choice.

The target engine hands the logits of a pass to `judge`; drafting methods hand theirs to `draft_tokens`. Both sample by
the same noise, keyed by (seed, absolute position, token id), after the same processing (`engine/processors.py`). A row
is treated the same whatever other rows come with it, so a token does not depend on batch, block or neighbours.

Positions: with L committed tokens, the token sampled at tree node v has absolute position L + depth(v), and so has a
draft token proposed after a context of L + depth(v) tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.engine.processors import RowGroup, Shaping
from paceline.errors import ModelError
from paceline.messages import SamplingParams, TokenLogprobs
from paceline.speculation.acceptance import match
from paceline.speculation.noise import keyed_argmax, keyed_argmax_of, noise_keys
from paceline.speculation.tree import DraftTree

LOGPROB_FLOOR = -9999.0
"""Reported for tokens of probability zero, since -inf is no JSON number."""


@dataclass(frozen=True, slots=True)
class JudgeRequest:
    """One session's block with the target's logits.

    Attributes:
        logits: row v belongs to node v, root first. Float, any device; not changed. # [1 + num_draft_tokens, >= vocab]
        tree: the block; ids outside [0, vocab_size) are allowed and are never accepted.
        committed: all committed tokens, pending token included; read during the call only.
        generation_start: index in `committed` of the first generated token: where penalties on the output and
            min_tokens start to count.
        sampling: the request's parameters, seed included.
        vocab_size: number of real token ids; columns at or above it are padding and are never chosen.
        eos_token_ids: ids that min_tokens masks, together with the request's stop ids.
    """

    logits: torch.Tensor
    tree: DraftTree
    committed: Sequence[int]
    generation_start: int
    sampling: SamplingParams
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a block.

    Attributes:
        accepted_path: accepted nodes in order of depth, without the root.
        tokens: one per accepted node, then the recovered, bonus or plain token.
        logprobs: one per token when the request asks for them (`top_logprobs` is not None), else empty.
    """

    accepted_path: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


def judge(requests: Sequence[JudgeRequest]) -> list[Verdict | ModelError]:
    """Samples the target's token at every node and keeps the drafts that equal it (rule `match`).

    A row that is not finite fails its own session, and only if the walk comes to it: a draft that is discarded can do
    no harm.

    Returns:
        Per request, in order, its verdict or the error that ends its session.
    """
    groups = [
        RowGroup(
            sampling=request.sampling,
            committed=request.committed,
            generation_start=request.generation_start,
            paths=node_paths(request.tree),
            eos_token_ids=request.eos_token_ids,
        )
        for request in requests
    ]
    sampled = _sample([r.logits[:, : r.vocab_size] for r in requests], groups)
    return [_verdict(request, rows) for request, rows in zip(requests, sampled, strict=True)]


def node_paths(tree: DraftTree) -> tuple[tuple[int, ...], ...]:
    """For every node the draft tokens from below the root down to it, itself included; () for the root."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent], token))
    return tuple(paths)


def _verdict(request: JudgeRequest, rows: _SampledRows) -> Verdict | ModelError:
    walk = match(request.tree, rows.tokens)
    for node in walk.visited:
        if not rows.usable[node]:
            position = len(request.committed) + request.tree.depths[node]
            return ModelError(
                f"the model's logits for position {position} are not finite, or every token is masked there: "
                "check the weights and their dtype, and the request's biases"
            )
    logprobs: tuple[TokenLogprobs, ...] = ()
    if request.sampling.top_logprobs is not None:
        logprobs = rows.logprobs(walk.visited, walk.tokens, request.sampling.top_logprobs)
    return Verdict(walk.accepted_path, walk.tokens, logprobs)


@dataclass(frozen=True, slots=True)
class DraftRow:
    """What a drafting method knows of one row of its logits.

    Attributes:
        sampling: the request's parameters, seed included.
        context: the tokens before the drafted ones: committed, then assumed. Read during the call only.
        drafted: the chain proposed so far; the row is what the draft model says after it.
        generation_start: index in `context` of the first generated token; only affects speed.
    """

    sampling: SamplingParams
    context: Sequence[int]
    drafted: Sequence[int] = ()
    generation_start: int = 0


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """A draft token and the draft model's own probability of it (after temperature, before truncation)."""

    token: int
    confidence: float


def draft_tokens(
    logits: torch.Tensor,  # [rows, >= vocab_size] float
    rows: Sequence[DraftRow],
    *,
    vocab_size: int,
    eos_token_ids: tuple[int, ...] = (),
) -> list[DraftChoice | None]:
    """Chooses one draft token per row with the target's noise, so that drafter and target tend to choose alike.

    The processing is the target's: bias, penalties, min_tokens, temperature, top_k, top_p, min_p; greedy requests get
    the best token. All of it can only change speed.

    Returns:
        Per row its choice, or None where the row is not finite: stop drafting there.
    """
    groups = [
        RowGroup(row.sampling, row.context, row.generation_start, (tuple(row.drafted),), eos_token_ids) for row in rows
    ]
    sampled = _sample([logits[index : index + 1, :vocab_size] for index in range(len(rows))], groups)
    return [DraftChoice(s.tokens[0], s.confidence(0)) if s.usable[0] else None for s in sampled]


@dataclass(frozen=True, slots=True)
class _SampledRows:
    """The rows of one group with the token chosen from each.

    Attributes:
        tokens: chosen token of each row; without meaning where the row is not usable.
        usable: whether the row is finite and leaves a token to choose.
        logits: after bias, penalties, masks and temperature (1 when greedy), before truncation. # [rows, vocab_size]
        floors: least logit that truncation left; None without truncation. # [rows]
    """

    tokens: list[int]
    usable: list[bool]
    logits: torch.Tensor
    floors: torch.Tensor | None

    def confidence(self, row: int) -> float:
        """Probability of the row's token before truncation."""
        logits = self.logits[row]
        return float((logits[self.tokens[row]] - logits.logsumexp(-1)).exp())

    def logprobs(self, rows: Sequence[int], tokens: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities under the distribution that the tokens were drawn from.

        That is the distribution after all processing, truncation included; a greedy request reports temperature 1
        without truncation. Alternatives are ordered by their logits before truncation, the lower id first among equals.
        """
        index = torch.tensor(rows, device=self.logits.device)
        logits = self.logits[index]
        kept = logits
        if self.floors is not None:
            kept = logits.masked_fill(logits < self.floors[index].unsqueeze(1), -torch.inf)
        logprobs = kept.log_softmax(-1).clamp_(min=LOGPROB_FLOOR)
        own = logprobs.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1))[:, 0].tolist()
        top_values, top_ids = logits.topk(min(num_top, logits.shape[1]), dim=-1)
        top_logprobs = logprobs.gather(1, top_ids)
        entries = []
        for row, logprob in enumerate(own):
            best = sorted(
                zip(top_values[row].tolist(), top_ids[row].tolist(), top_logprobs[row].tolist(), strict=True),
                key=lambda entry: (-entry[0], entry[1]),
            )
            entries.append(TokenLogprobs(logprob, tuple(b[1] for b in best), tuple(b[2] for b in best)))
        return tuple(entries)


def _sample(parts: Sequence[torch.Tensor], groups: Sequence[RowGroup]) -> list[_SampledRows]:
    """Processes and samples the rows of every group; groups that are shaped alike share the work.

    Args:
        parts: per group its rows, without padding columns; not changed. # [rows, vocab_size]
        groups: the state of those rows.
    """
    alike: dict[tuple[Shaping | None, int, torch.device], list[int]] = {}
    for index, (part, group) in enumerate(zip(parts, groups, strict=True)):
        alike.setdefault((Shaping.of(group.sampling), part.shape[1], part.device), []).append(index)
    results: dict[int, _SampledRows] = {}
    for (shaping, _, _), members in alike.items():
        sampled = _sample_alike([parts[m] for m in members], [groups[m] for m in members], shaping)
        results.update(zip(members, sampled, strict=True))
    return [results[index] for index in range(len(groups))]


def _sample_alike(
    parts: Sequence[torch.Tensor], groups: Sequence[RowGroup], shaping: Shaping | None
) -> list[_SampledRows]:
    logits = torch.cat([part.float() for part in parts]) if len(parts) > 1 else parts[0].float()
    usable = logits.amax(-1).isfinite() & logits.amin(-1).isfinite()  # both carry NaN on
    if any(group.needs_edits for group in groups):
        logits = logits.clone()
        start = 0
        for group in groups:
            group.edit_rows_(logits[start : start + len(group.paths)])
            start += len(group.paths)
    if shaping is not None:
        logits = shaping.scale(logits)
    usable &= logits.amax(-1).isfinite()
    if not usable.all():
        logits = logits.masked_fill(~usable.unsqueeze(1), 0.0)
    tokens, floors = _choose(logits, groups, shaping)

    results = []
    all_tokens, all_usable = tokens.tolist(), usable.tolist()
    start = 0
    for group in groups:
        rows = slice(start, start + len(group.paths))
        start = rows.stop
        results.append(
            _SampledRows(all_tokens[rows], all_usable[rows], logits[rows], None if floors is None else floors[rows])
        )
    return results


def _choose(
    logits: torch.Tensor, groups: Sequence[RowGroup], shaping: Shaping | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Chosen ids # [rows] int64, and the least logits that truncation left # [rows] if it was asked for."""
    if shaping is None:
        return logits.argmax(-1), None  # the first of equals, which is the lowest id
    keys = noise_keys(
        [group.sampling.seed for group in groups for _ in group.paths],
        [position for group in groups for position in group.positions],
        device=logits.device,
    )
    if not shaping.truncates:
        return keyed_argmax(logits, keys), None
    tokens = torch.empty_like(keys)
    floors = torch.empty(len(keys), dtype=logits.dtype, device=logits.device)
    for survivors in shaping.survivors(logits):
        tokens[survivors.rows] = keyed_argmax_of(survivors.logits, survivors.ids, keys[survivors.rows])
        floors[survivors.rows] = survivors.floors
    return tokens, floors
