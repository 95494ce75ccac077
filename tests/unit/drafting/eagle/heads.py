"""Tiny random heads, features as a function of the tokens, and a reference that computes everything from nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from paceline.drafting.checkpoints.eagle import EagleCheckpoint, EagleConfig, EagleKind
from paceline.drafting.eagle import EagleMethod, make_taps
from paceline.drafting.method import DraftJob
from paceline.engine.draft_candidates import draft_candidates
from paceline.engine.sampling import DraftRow
from paceline.engine.shared_parts import SharedParts
from paceline.messages import AcceptanceRule, SamplingParams
from tests.unit.drafting.rounds import GREEDY

HIDDEN = 16
VOCAB = 24
DRAFT_VOCAB = 14
THETA = 100.0


def config(kind: EagleKind, **options: Any) -> EagleConfig:
    """A head's configuration; `eagle3` gets a draft vocabulary."""
    is_third = kind == "eagle3"
    settings: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
        "intermediate_size": 20,
        "rms_norm_eps": 1e-5,
        "rope": {"rope_type": "default", "rope_theta": THETA},
        "max_model_len": 256,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB if is_third else VOCAB,
        "aux_layers": (0, 1, 2) if is_third else (),
    }
    return EagleConfig(kind=kind, **(settings | options))


def random_head(kind: EagleKind, *, seed: int = 0, own_embedding: bool = False, **options: Any) -> EagleCheckpoint:
    """A head with random weights and every tensor that its options ask for."""
    made = config(kind, **options)
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        scale: float = 1.5 * columns**-0.5
        return scale * torch.randn(rows, columns, generator=generator)

    def vector(size: int) -> torch.Tensor:
        return 1.0 + 0.3 * torch.randn(size, generator=generator)

    width, is_third = made.hidden_size, kind == "eagle3"
    in_width = 2 * width if is_third else width
    sizes = {"q": made.num_heads, "k": made.num_kv_heads, "v": made.num_kv_heads}
    weights = {
        f"layer.self_attn.{name}_proj.weight": matrix(heads * made.head_dim, in_width) for name, heads in sizes.items()
    }
    weights["layer.self_attn.o_proj.weight"] = matrix(width, made.num_heads * made.head_dim)
    weights["layer.mlp.gate_proj.weight"] = matrix(made.intermediate_size, width)
    weights["layer.mlp.up_proj.weight"] = matrix(made.intermediate_size, width)
    weights["layer.mlp.down_proj.weight"] = matrix(width, made.intermediate_size)
    weights["layer.post_attention_layernorm.weight"] = vector(width)
    joined = len(made.aux_layers) * made.target_hidden_size if is_third else width + made.target_hidden_size
    weights["fc.weight"] = matrix(width, joined)
    if made.fc_bias:
        weights["fc.bias"] = vector(width)
    if made.attention_bias:
        weights |= {
            name.replace("weight", "bias"): vector(weight.shape[0])
            for name, weight in list(weights.items())
            if "self_attn" in name
        }
    if made.mlp_bias:
        weights |= {
            name.replace("weight", "bias"): vector(weight.shape[0])
            for name, weight in list(weights.items())
            if ".mlp." in name
        }
    if is_third or made.input_layernorm:
        weights["layer.input_layernorm.weight"] = vector(width)
        weights["norm.weight"] = vector(width)
        weights["layer.hidden_norm.weight" if is_third else "embed_norm.weight"] = vector(width)
    if made.norm_before_fc:
        weights["input_norm.weight"] = vector(joined)
    if made.fc_norm:
        weights |= {f"fc_norm.{index}.weight": vector(made.target_hidden_size) for index in range(len(made.aux_layers))}
    if own_embedding:
        weights["embed_tokens.weight"] = matrix(made.vocab_size, width)
    d2t = None
    if is_third:
        weights["lm_head.weight"] = matrix(made.draft_vocab_size, width) * 2.0
        if made.draft_vocab_size < made.vocab_size:
            ids = torch.randperm(made.vocab_size, generator=generator)[: made.draft_vocab_size].sort().values
            d2t = ids - torch.arange(made.draft_vocab_size)
    return EagleCheckpoint(made, weights, "random", d2t)


def shared_parts(*, seed: int = 1, vocab_size: int = VOCAB) -> SharedParts:
    """What a head borrows of a target that does not exist."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(vocab_size, HIDDEN, generator=generator)
    head = torch.randn(vocab_size, HIDDEN, generator=generator) * 0.7
    return SharedParts(
        embed=lambda ids: functional.embedding(ids, table),
        head=lambda rows: rows @ head.T,
        norm=lambda rows: rows,
        hidden_size=HIDDEN,
        num_layers=3,
        vocab_size=vocab_size,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


@dataclass
class Recorded:
    """Features of a context; reading any that are not there is an error."""

    rows: torch.Tensor  # of all rows
    first_row: int = 0
    reads: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def read(self, start: int, stop: int) -> torch.Tensor:
        assert self.first_row <= start < stop <= self.num_rows, (start, stop)
        self.reads.append((start, stop))
        return self.rows[start:stop]


def features_of(checkpoint: EagleCheckpoint, context: Sequence[int], first_row: int = 0) -> Recorded:
    """What a target might say: row t depends on the tokens up to t and on nothing else."""
    streams = max(len(checkpoint.config.aux_layers), 1)
    rows = []
    for stop in range(1, len(context)):
        generator = torch.Generator().manual_seed(hash(tuple(context[:stop])) % 2**60)
        rows.append(torch.randn(streams * HIDDEN, generator=generator))
    joined = torch.stack(rows) if rows else torch.empty(0, streams * HIDDEN)
    project = make_taps(checkpoint).project
    return Recorded(joined if project is None else project(joined), first_row)


class NaiveHead:
    """The head by its definition: every row from nothing, no cache, one sequence at a time."""

    def __init__(self, checkpoint: EagleCheckpoint, parts: SharedParts) -> None:
        self._config, self._weights, self._parts = checkpoint.config, checkpoint.weights, parts
        self.d2t = checkpoint.d2t

    def _norm(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        weight = self._weights.get(f"{name}.weight")
        if weight is None:
            return rows
        return rows * (rows.square().mean(-1, keepdim=True) + self._config.rms_norm_eps).rsqrt() * weight

    def _linear(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        bias = self._weights.get(f"{name}.bias")
        return rows @ self._weights[f"{name}.weight"].T + (0.0 if bias is None else bias)

    def _rotated(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # [rows, heads, head_dim]
        size = heads.shape[-1]
        angles = positions[:, None] * THETA ** (-torch.arange(0, size, 2) / size)
        turns = torch.polar(torch.ones_like(angles), angles)[:, None]
        turned = torch.complex(heads[..., : size // 2], heads[..., size // 2 :]) * turns
        return torch.cat([turned.real, turned.imag], -1)

    def _layer(
        self, inputs: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        size, repeats = self._config.head_dim, self._config.num_heads // self._config.num_kv_heads
        q, k, v = (self._linear(f"layer.self_attn.{name}_proj", inputs).view(len(inputs), -1, size) for name in "qkv")
        q, k = self._rotated(q, positions), self._rotated(k, positions)
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * size**-0.5
        mixed = torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v).flatten(1)
        residual = residual + self._linear("layer.self_attn.o_proj", mixed)
        rows = self._norm("layer.post_attention_layernorm", residual)
        gate = functional.silu(self._linear("layer.mlp.gate_proj", rows))
        return residual + self._linear("layer.mlp.down_proj", gate * self._linear("layer.mlp.up_proj", rows))

    def states(
        self,
        features: torch.Tensor,
        tokens: Sequence[int] | torch.Tensor,
        positions: torch.Tensor | None = None,
        visible: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The state of every row; row t pairs feature t with `tokens[t]`, the token after it, and sees rows [0, t]."""
        ids = torch.as_tensor(tokens)
        if positions is None or visible is None:
            positions, visible = torch.arange(len(ids)), torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        table = self._weights.get("embed_tokens.weight")
        embedded = self._parts.embed(ids) if table is None else table[ids]
        if self._config.kind == "eagle":
            joined = self._linear("fc", torch.cat([self._norm("embed_norm", embedded), features], -1))
            return self._layer(self._norm("layer.input_layernorm", joined), joined, positions, visible)
        normed = self._norm("layer.hidden_norm", features)
        inputs = torch.cat([self._norm("layer.input_layernorm", embedded), normed], -1)
        residual = normed if self._config.norm_before_residual else features
        state = self._layer(inputs, residual, positions, visible)
        return self._norm("norm", state) if self._config.norm_output else state

    def logits(self, state: torch.Tensor) -> torch.Tensor:  # [hidden_size] -> [vocab_size]
        """Logits over the target's vocabulary; tokens that the head lacks are impossible."""
        rows = state if self._config.norm_output else self._norm("norm", state)
        if "lm_head.weight" not in self._weights:
            return self._parts.head(rows[None])[0]
        own = self._weights["lm_head.weight"] @ rows
        if self.d2t is None:
            return own
        full = torch.full((VOCAB,), -1e9)
        full[torch.arange(len(self.d2t)) + self.d2t] = own
        return full

    def after(self, features: torch.Tensor, context: Sequence[int], drafted: Sequence[int]) -> torch.Tensor:
        """Logits after a context and drafts, whose features are the head's own states # [vocab_size]."""
        tokens = [*context[1:]]
        for token in drafted:
            features = torch.cat([features, self.states(features, tokens)[-1:]])
            tokens.append(token)
        return self.logits(self.states(features, tokens)[-1])


@dataclass
class Node:
    token: int
    parent: int
    path: tuple[int, ...]
    score: float
    confidence: float


def naive_tree(
    naive: NaiveHead, features: Recorded, context: Sequence[int], topk: int, num_nodes: int, depth: int
) -> list[Node]:
    """The greedy dynamic tree by its definition: all levels are grown, then the best nodes are kept."""
    nodes = [Node(-1, -1, (), 0.0, 1.0)]
    frontier = [0]
    for _ in range(depth):
        first = len(nodes)
        for index in frontier:
            probs = naive.after(features.rows, context, nodes[index].path).softmax(-1)
            best = probs.topk(topk)
            for prob, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                path = (*nodes[index].path, token)
                nodes.append(Node(token, index, path, nodes[index].score + float(torch.tensor(prob).log()), prob))
        frontier = sorted(range(first, len(nodes)), key=lambda node: -nodes[node].score)[:topk]
    return sorted(nodes[1:], key=lambda node: -node.score)[:num_nodes]


def naive_chain(
    naive: NaiveHead, features: Recorded, context: Sequence[int], depth: int, sampling: SamplingParams
) -> list[int]:
    """The chain by its definition, with the noise of the request."""
    drafted: list[int] = []
    while len(drafted) < depth:
        logits = naive.after(features.rows, context, drafted)
        row = DraftRow(sampling, context, drafted)
        drafted.append(draft_candidates(logits[None], [row], num=1, vocab_size=VOCAB)[0][0].token)
    return drafted


def method_of(checkpoint: EagleCheckpoint, parts: SharedParts | None = None, **settings: Any) -> EagleMethod:
    """A method over a small pool, with weights as they are: packed products differ in the last bits."""
    return EagleMethod(checkpoint, parts or shared_parts(), **({"kv_bytes": 1 << 18, "pack": False} | settings))


def job_of(
    checkpoint: EagleCheckpoint,
    context: Sequence[int],
    depth: int,
    sampling: SamplingParams = GREEDY,
    *,
    session: str = "s",
    first_row: int = 0,
    rule: AcceptanceRule = AcceptanceRule.MATCH,
) -> DraftJob:
    """A draft to be made, with the features of its context."""
    features = features_of(checkpoint, context, first_row)
    return DraftJob(session, tuple(context), depth, sampling, rule=rule, features=features)


def finish(method: EagleMethod, *jobs: DraftJob) -> None:
    """Steps until all jobs are done."""
    steps = 0
    while not all(job.done for job in jobs):
        method.advance(jobs)
        method.check_integrity()
        steps += 1
        assert steps < 500, "a draft does not end"


def paths_of(job: DraftJob) -> list[tuple[int, ...]]:
    """For every node the tokens from below the root down to it."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(job.block.tokens, job.block.parents, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]
