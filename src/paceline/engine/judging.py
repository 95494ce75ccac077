"""The verdict on blocks: what of each stays, and the token after it.

A pass is handed over, blocks are made ready to be judged while the device works, and judged when it has come to their
logits::

    logits = runner.forward(parts, wait=False)
    judging = Judging([JudgeRequest(logits[i], ...) for i in ...])
    runner.synchronize()
    verdicts = judging.verdicts()

`judge` is both steps in one. Tokens are chosen by the ordinary sampler (`engine/sampling.py`).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.engine.processors import PrefixState, SessionRows, real_columns
from paceline.engine.ratio import RatioChain, judge_chains
from paceline.engine.sampling import sample, token_logprobs
from paceline.errors import InvalidArgument, ModelError, PacelineError
from paceline.messages import AcceptanceRule, DraftProbs, SamplingParams, TokenLogprobs
from paceline.speculation.acceptance import Walk, match, match_steps
from paceline.speculation.tree import DraftTree


@dataclass(frozen=True, slots=True)
class JudgeRequest:
    """One session's block with the target's logits.

    Attributes:
        logits: row v belongs to node v, root first. Float, any device; not changed. # [1 + num_draft_tokens, >= vocab]
        tree: the block; ids outside [0, vocab_size) are allowed and are never accepted.
        committed: all committed tokens, pending token included; read until it is judged.
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


class Judging:
    """Blocks that are made ready to be judged. Reads nothing that a device may not have written yet.

    Args:
        requests: one for each block; their `committed` are read until the verdicts are there.
    """

    def __init__(self, requests: Sequence[JudgeRequest]) -> None:
        self._requests = requests
        self._sessions = [_rows_of(request) for request in requests]
        for session in self._sessions:
            session.make_ready()

    def verdicts(self) -> list[Verdict | PacelineError]:
        """Decides what of each block stays and draws the token after it, by the rule of its request.

        `match` samples the target's token at every node and keeps the drafts that equal it. `ratio` judges chains by
        rejection sampling; the output has the target's law if the drafts were drawn from the `draft_probs` sent with
        them.

        A row that is not finite fails its own session, and only if the walk comes to it: a draft that is discarded can
        do no harm.

        Returns:
            Per request, in order, its verdict or the error that ends its session: ModelError for the target's rows,
            InvalidArgument for drafts that cannot be judged.
        """
        requests, sessions = self._requests, self._sessions
        by_ratio = [index for index, request in enumerate(requests) if _is_by_ratio(request)]
        by_match = [index for index, request in enumerate(requests) if not _is_by_ratio(request)]
        walks: dict[int, Walk | PacelineError] = {}
        walks.update(
            zip(by_match, _walk_by_match([(requests[i].tree, sessions[i]) for i in by_match]), strict=True),
        )
        if by_ratio:
            walks.update(zip(by_ratio, _walk_by_ratio([(requests[i], sessions[i]) for i in by_ratio]), strict=True))
        return [_verdict(session, walks[index]) for index, session in enumerate(sessions)]


def judge(requests: Sequence[JudgeRequest]) -> list[Verdict | PacelineError]:
    """Judges blocks whose logits are there; see `Judging.verdicts`."""
    return Judging(requests).verdicts()


def _rows_of(request: JudgeRequest) -> SessionRows:
    return SessionRows(
        real_columns(request.logits, request.vocab_size),
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
