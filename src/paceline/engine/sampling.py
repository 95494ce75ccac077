"""From logits to tokens: the verdict on blocks, and the drafter's keyed choice.

The target engine hands the logits of a pass to `judge`; drafting methods hand theirs to `draft_tokens`. Both sample by
the same noise, keyed by (seed, absolute position, token id), after the same processing (`engine/processors.py`). A row
is treated the same whatever other rows come with it, so a token does not depend on batch, block or neighbours.

Positions: with L committed tokens, the token sampled at tree node v has absolute position L + depth(v), and so has a
draft token proposed after a context of L + depth(v) tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engine.near_best import NearBest, choose_near_best
from paceline.engine.processors import PrefixState, SessionRows, Shaping
from paceline.engine.ratio import RatioChain, judge_chains
from paceline.errors import InvalidArgument, ModelError, PacelineError
from paceline.messages import AcceptanceRule, DraftProbs, SamplingParams, TokenLogprobs
from paceline.speculation.acceptance import Walk, match, match_steps
from paceline.speculation.noise import noise_keys
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
        rule: how drafts are judged; greedy requests are judged alike under both.
        draft_probs: what the drafts were drawn from, under `ratio`: one per draft of the block as it was sent, so there
            may be more than drafts are left. Empty for drafts that were chosen without chance.
    """

    logits: torch.Tensor
    tree: DraftTree
    committed: Sequence[int]
    generation_start: int
    sampling: SamplingParams
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    rule: AcceptanceRule = AcceptanceRule.MATCH
    draft_probs: tuple[DraftProbs, ...] = ()


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


def judge(requests: Sequence[JudgeRequest]) -> list[Verdict | PacelineError]:
    """Decides what of each block stays and draws the token after it, by the rule of its request.

    `match` samples the target's token at every node and keeps the drafts that equal it. `ratio` judges chains by
    rejection sampling; the output has the target's law if the drafts were drawn from the `draft_probs` sent with them.

    A row that is not finite fails its own session, and only if the walk comes to it: a draft that is discarded can do
    no harm.

    Returns:
        Per request, in order, its verdict or the error that ends its session: ModelError for the target's rows,
        InvalidArgument for drafts that cannot be judged.
    """
    sessions = [_rows_of(request) for request in requests]
    by_ratio = [index for index, request in enumerate(requests) if _is_by_ratio(request)]
    by_match = [index for index, request in enumerate(requests) if not _is_by_ratio(request)]
    walks: dict[int, Walk | PacelineError] = {}
    walks.update(
        zip(by_match, _walk_by_match([(requests[i].tree, sessions[i]) for i in by_match]), strict=True),
    )
    if by_ratio:
        walks.update(zip(by_ratio, _walk_by_ratio([(requests[i], sessions[i]) for i in by_ratio]), strict=True))
    return [_verdict(session, walks[index]) for index, session in enumerate(sessions)]


def _rows_of(request: JudgeRequest) -> SessionRows:
    return SessionRows(
        _real_columns(request.logits, request.vocab_size),
        PrefixState(request.sampling, request.committed, request.generation_start, request.eos_token_ids),
        node_paths(request.tree),
    )


def _is_by_ratio(request: JudgeRequest) -> bool:
    return request.rule is AcceptanceRule.RATIO and not request.sampling.greedy


def _walk_by_match(blocks: Sequence[tuple[DraftTree, SessionRows]]) -> list[Walk | ModelError]:
    """Walks all blocks: greedy ones on a CPU one after the other, the others side by side."""
    walks: dict[int, Walk | ModelError] = {}
    steps: dict[int, Generator[int, int, Walk]] = {}
    for index, (tree, session) in enumerate(blocks):
        if session.goes_row_by_row and session.shaping is None:
            walks[index] = _walk_greedily(tree, session)
        else:
            steps[index] = match_steps(tree)
    if steps:
        walks.update(_walk_side_by_side(blocks, steps))
    return [walks[index] for index in range(len(blocks))]


def _walk_side_by_side(
    blocks: Sequence[tuple[DraftTree, SessionRows]], steps: Mapping[int, Generator[int, int, Walk]]
) -> dict[int, Walk | ModelError]:
    """Takes the steps of some of the blocks, by their place, so that their next nodes are sampled together."""
    walks: dict[int, Walk | ModelError] = {}
    eager = [index for index in steps if not blocks[index][1].goes_row_by_row]
    eager_tokens = sample([(blocks[index][1], range(len(blocks[index][1].paths))) for index in eager])
    sampled = dict(zip(eager, eager_tokens, strict=True))
    nodes = {index: next(step) for index, step in steps.items()}
    while nodes:
        lazy = [index for index in nodes if index not in sampled]
        lazy_tokens = sample([(blocks[index][1], (nodes[index],)) for index in lazy])
        tokens = {index: sampled[index][nodes[index]] for index in nodes if index in sampled}
        tokens.update((index, token) for index, (token,) in zip(lazy, lazy_tokens, strict=True))
        for index, token in tokens.items():
            node = nodes.pop(index)
            if token is None:
                walks[index] = blocks[index][1].unusable(node)
                continue
            try:
                nodes[index] = steps[index].send(token)
            except StopIteration as end:
                walks[index] = end.value
    return walks


def _walk_greedily(tree: DraftTree, session: SessionRows) -> Walk | ModelError:
    """Walks one block along the best tokens, on a CPU."""

    def best_at(node: int) -> int:
        row = session.processed_row(node)
        if row is None:
            raise session.unusable(node)
        return int(row.argmax())  # the first of equals, which is the lowest id

    try:
        return match(tree, best_at)
    except ModelError as error:
        return error


def _walk_by_ratio(blocks: Sequence[tuple[JudgeRequest, SessionRows]]) -> list[Walk | PacelineError]:
    walks: dict[int, Walk | PacelineError] = {}
    chains: dict[int, RatioChain] = {}
    for index, (request, session) in enumerate(blocks):
        try:
            if not request.tree.is_chain:
                raise InvalidArgument(
                    "the rule ratio judges chains, and this block branches: send one path of it", field="block"
                )
            chains[index] = RatioChain.of(session, request.tree.tokens, request.draft_probs)
        except InvalidArgument as error:
            walks[index] = error
    walks.update(zip(chains, judge_chains(list(chains.values())), strict=True))
    return [walks[index] for index in range(len(blocks))]


def _verdict(session: SessionRows, walk: Walk | PacelineError) -> Verdict | PacelineError:
    if isinstance(walk, PacelineError):
        return walk
    num_top = session.state.sampling.top_logprobs
    logprobs = () if num_top is None else token_logprobs(session, walk.visited, walk.tokens, num_top)
    return Verdict(walk.accepted_path, walk.tokens, logprobs)


def node_paths(tree: DraftTree) -> list[tuple[int, ...]]:
    """For every node the draft tokens from below the root down to it, itself included; () for the root."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent], token))
    return paths


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
    """A draft token.

    Attributes:
        token: its id.
        confidence: the draft model's own probability of it, after temperature, before truncation.
        draft_probs: what it was drawn from; None where it was chosen otherwise.
    """

    token: int
    confidence: float
    draft_probs: DraftProbs | None = None


def draft_tokens(
    logits: Sequence[torch.Tensor] | torch.Tensor,  # [rows, >= vocab_size] float, or each row [1, >= vocab_size]
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
    sessions = draft_sessions(logits, rows, vocab_size, eos_token_ids)
    if sessions and sessions[0].goes_row_by_row:
        processed = [session.processed_row(0) for session in sessions]
        tokens = _choose_apart([(session, 0) for session in sessions], processed)
        return [
            None if row is None or token is None else DraftChoice(token, _share(row, token))
            for row, token in zip(processed, tokens, strict=True)
        ]
    return _draft_together(sessions) if sessions else []


def _share(row: NDArray[np.float32], token: int) -> float:
    """The probability of a token."""
    weights = row - row[row.argmax()]
    np.exp(weights, out=weights)
    return float(weights[token] / weights.sum())


def _draft_together(sessions: Sequence[SessionRows]) -> list[DraftChoice | None]:
    """`draft_tokens` on a GPU, where every number that is fetched costs a wait: all are fetched in one go."""
    tokens = [token for (token,) in sample([(session, (0,)) for session in sessions])]
    chosen = torch.tensor([[token or 0] for token in tokens], device=sessions[0].logits.device)
    probs = torch.cat([session.processed((0,))[0] for session in sessions]).softmax(-1).gather(1, chosen)
    return [
        None if token is None else DraftChoice(token, confidence)
        for token, confidence in zip(tokens, probs[:, 0].tolist(), strict=True)
    ]


def draft_sessions(
    logits: Sequence[torch.Tensor] | torch.Tensor,
    rows: Sequence[DraftRow],
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
) -> list[SessionRows]:
    """Every row of a draft model as a session of one row."""
    alone = logits.unsqueeze(1).unbind() if isinstance(logits, torch.Tensor) else logits
    return [
        SessionRows(
            _real_columns(own, vocab_size),
            PrefixState(row.sampling, row.context, row.generation_start, eos_token_ids),
            (row.drafted,),
        )
        for own, row in zip(alone, rows, strict=True)
    ]


def _real_columns(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The logits without padding columns."""
    return logits if logits.shape[1] <= vocab_size else logits[:, :vocab_size]


def sample(batch: Sequence[tuple[SessionRows, Sequence[int]]]) -> list[list[int | None]]:
    """The ordinary sampler: chooses a token from each listed row of each session.

    On a GPU all rows with the same temperature and truncation are worked on together.

    Returns:
        Per session one token per listed row; None where the row is not usable.
    """
    tokens: list[list[int | None]] = [[] for _ in batch]
    apart = [index for index, (session, _) in enumerate(batch) if session.goes_row_by_row]
    picks = iter(_sample_apart([(batch[index][0], row) for index in apart for row in batch[index][1]]))
    for index in apart:
        tokens[index] = list(itertools.islice(picks, len(batch[index][1])))
    alike: dict[tuple[Shaping | None, int, torch.device], list[int]] = {}
    for index, (session, _) in enumerate(batch):
        if not session.goes_row_by_row:
            alike.setdefault((session.shaping, session.logits.shape[1], session.logits.device), []).append(index)
    for members in alike.values():
        for member, chosen in zip(members, _sample_alike([batch[m] for m in members]), strict=True):
            tokens[member] = chosen
    return tokens


def _sample_apart(rows: Sequence[tuple[SessionRows, int]]) -> list[int | None]:
    """`sample` for rows on a CPU: each is gone through by itself."""
    return _choose_apart(rows, (session.processed_row(row) for session, row in rows))


def _choose_apart(
    rows: Sequence[tuple[SessionRows, int]], processed: Iterable[NDArray[np.float32] | None]
) -> list[int | None]:
    """`_sample_apart` for rows that are processed; the few tokens that are left of many, together."""
    tokens: list[int | None] = [None] * len(rows)
    shortlists: dict[int, NearBest] = {}
    for index, ((session, row), values) in enumerate(zip(rows, processed, strict=True)):
        if values is None:
            continue
        if session.shaping is None:
            tokens[index] = int(values.argmax())  # the first of equals, which is the lowest id
            continue
        logits = torch.from_numpy(values)
        if (shortlist := session.shaping.near_best(logits)) is not None:
            shortlists[index] = shortlist
        else:
            tokens[index] = int(session.shaping.choose(logits[None], _keys([(session, row)])))
    if shortlists:
        keys = _keys([rows[index] for index in shortlists])
        for index, token in zip(shortlists, choose_near_best(list(shortlists.values()), keys), strict=True):
            tokens[index] = _sample_alike([(rows[index][0], rows[index][1:])])[0][0] if token is None else token
    return tokens


def _keys(rows: Sequence[tuple[SessionRows, int]]) -> torch.Tensor:
    """The keys of rows of one device. # [rows] int64."""
    seeds = [session.state.sampling.seed for session, _ in rows]
    return noise_keys(seeds, [session.position(row) for session, row in rows], device=rows[0][0].logits.device)


def _sample_alike(batch: Sequence[tuple[SessionRows, Sequence[int]]]) -> list[list[int | None]]:
    """`sample` for sessions of one shaping, vocabulary and device."""
    processed = [session.processed(rows) for session, rows in batch]
    logits = torch.cat([p[0] for p in processed]) if len(processed) > 1 else processed[0][0]
    usable = torch.cat([p[1] for p in processed])
    if not usable.all():
        logits = logits.masked_fill(~usable.unsqueeze(1), 0.0)
    shaping = batch[0][0].shaping
    if shaping is None:
        chosen = logits.argmax(-1)  # the first of equals, which is the lowest id
    else:
        chosen = shaping.choose(logits, _keys([(session, row) for session, rows in batch for row in rows]))
    picks = iter(zip(chosen.tolist(), usable.tolist(), strict=True))
    return [[token if ok else None for token, ok in itertools.islice(picks, len(rows))] for _, rows in batch]


def token_logprobs(
    session: SessionRows, rows: Sequence[int], tokens: Sequence[int], num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of chosen tokens under the distribution that they were drawn from.

    That is the distribution after all processing, truncation included; a greedy request reports temperature 1 without
    truncation. Alternatives are ordered by their logits before truncation, the lower id first among equals.

    Args:
        session: the rows.
        rows: one row per token.
        tokens: what was chosen there.
        num_top: how many alternatives to report.
    """
    entries = []
    for row, token in zip(rows, tokens, strict=True):
        logits, _ = session.processed((row,))
        kept = logits if session.shaping is None else session.shaping.kept(logits)
        logprobs = kept[0].log_softmax(-1).clamp_(min=LOGPROB_FLOOR)
        best, ids = logits[0].topk(min(num_top, logits.shape[1]))
        ranked = sorted(
            zip(best.tolist(), ids.tolist(), logprobs[ids].tolist(), strict=True),
            key=lambda entry: (-entry[0], entry[1]),
        )
        top_tokens, top_logprobs = tuple(entry[1] for entry in ranked), tuple(entry[2] for entry in ranked)
        entries.append(TokenLogprobs(float(logprobs[token]), top_tokens, top_logprobs))
    return tuple(entries)
