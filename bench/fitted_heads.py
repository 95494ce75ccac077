"""Heads for a target made on the spot: least squares on texts of its own, written as checkpoints that the loaders read.

They are no example of good training: they know the very texts that they were fitted to, and little else. That is what a
proof of losslessness wants, for drafts are accepted, deep ones too. A trained head takes seconds to replace them.

| method | what is fitted | what stays nothing |
|---|---|---|
| `medusa` | a head over the texts' own vocabulary for each depth | the residual layers |
| `eagle` | fc: [embedding, feature] to the next feature | attention and feed-forward |
| `eagle3` | fc: the three features to the next final state | attention and feed-forward |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from paceline.drafting.checkpoints.eagle_checkpoint import EagleCheckpoint, EagleConfig, EagleKind
from paceline.drafting.checkpoints.medusa_checkpoint import MedusaCheckpoint, MedusaConfig
from paceline.drafting.checkpoints.writing import write_eagle, write_eagle3, write_medusa

MEDUSA_HEADS = 4
_RIDGE = 1e-4
"""Of the mean square of the inputs: keeps the least squares from being singular."""
_INNER = 64
"""Width of feed-forward layers that do nothing."""


@dataclass(frozen=True, slots=True)
class Texts:
    """What the target makes of its own texts, all of them one after the other.

    Attributes:
        tokens: the token of each row # [num_rows]
        ends: number of rows before the end of each text, that text included.
        streams: what enters each layer, and last what leaves the final norm # [num_rows, hidden_size] each
    """

    tokens: torch.Tensor
    ends: tuple[int, ...]
    streams: tuple[torch.Tensor, ...]

    @property
    def known(self) -> torch.Tensor:
        """The different tokens, in ascending order # [n] int64."""
        return torch.tensor(sorted(set(self.tokens.tolist())))

    def rows_before(self, distance: int) -> torch.Tensor:
        """Rows that have another one so many places behind them in the same text # [n] int64."""
        texts = zip((0, *self.ends[:-1]), self.ends, strict=True)
        return torch.cat([torch.arange(start, max(end - distance, start)) for start, end in texts])


@torch.inference_mode()
def read_texts(model: LlamaForCausalLM, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Texts:
    """Runs the target over texts and keeps what is drafted from: the last row of each prompt, and the answer.

    Args:
        model: the stock model.
        texts: token ids of prompt and answer.
    """
    tokens: list[int] = []
    ends: list[int] = []
    streams: list[list[torch.Tensor]] = []
    for prompt, answer in texts:
        ids = [*prompt, *answer]
        states = model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states or ()
        first = len(prompt) - 1
        tokens += ids[first:]
        ends.append(len(tokens))
        streams.append([rows[0, first:] for rows in states])
    return Texts(torch.tensor(tokens), tuple(ends), tuple([torch.cat(rows) for rows in zip(*streams, strict=True)]))


def write_fitted_heads(model: LlamaForCausalLM, texts: Texts, folder: Path) -> dict[str, Path]:
    """Fits a head of each kind and writes it.

    Args:
        model: the stock model.
        texts: what it makes of texts.
        folder: gets a folder for each method.

    Returns:
        The folder of each method.
    """
    folders = {method: folder / method for method in _WRITERS}
    for method, write in _WRITERS.items():
        write(model, texts, folders[method])
    return folders


@torch.inference_mode()
def _write_medusa(model: LlamaForCausalLM, texts: Texts, folder: Path) -> None:
    known = texts.known
    hidden_size = texts.streams[-1].shape[1]
    heads = []
    for depth in range(MEDUSA_HEADS):
        rows = texts.rows_before(depth + 2)
        columns = torch.searchsorted(known, texts.tokens[rows + depth + 2])
        wanted = torch.nn.functional.one_hot(columns, len(known)).to(torch.float32)
        # Scaled, so that the probabilities of the candidates differ.
        heads.append(8 * _least_squares(texts.streams[-1][rows], wanted))
    nothing = torch.zeros(hidden_size, hidden_size)
    config = MedusaConfig(MEDUSA_HEADS, 1, hidden_size, len(known), shared_head=False, has_bias=False)
    checkpoint = MedusaCheckpoint(config, (((nothing, None),),) * MEDUSA_HEADS, tuple(heads), "", token_map=known)
    write_medusa(folder, checkpoint, target_vocab_size=_present(model.config.vocab_size))


@torch.inference_mode()
def _write_eagle(model: LlamaForCausalLM, texts: Texts, folder: Path) -> None:
    rows = texts.rows_before(1)
    embedded = model.get_input_embeddings()(texts.tokens[rows + 1])
    states = texts.streams[-1]
    joined = torch.cat([embedded, states[rows]], dim=1)
    config = _eagle_config(model, "eagle")
    weights = {"fc.weight": _least_squares(joined, states[rows + 1]), **_idle_layer(config, config.hidden_size)}
    write_eagle(folder, EagleCheckpoint(config, weights, ""))


@torch.inference_mode()
def _write_eagle3(model: LlamaForCausalLM, texts: Texts, folder: Path) -> None:
    num_layers = len(texts.streams) - 1
    aux_layers = (2, num_layers // 2, num_layers - 1)
    rows = texts.rows_before(1)
    features = torch.cat([texts.streams[layer] for layer in aux_layers], dim=1)
    known = texts.known
    config = _eagle_config(model, "eagle3", aux_layers=aux_layers, draft_vocab_size=len(known))
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[known] = True
    ones = torch.ones(config.hidden_size)
    weights = {
        "fc.weight": _least_squares(features[rows], texts.streams[-1][rows + 1]),
        "norm.weight": ones,
        "lm_head.weight": model.lm_head.weight[known],
        "layer.input_layernorm.weight": ones.clone(),
        "layer.hidden_norm.weight": ones.clone(),
        **_idle_layer(config, 2 * config.hidden_size),
    }
    write_eagle3(folder, EagleCheckpoint(config, weights, "", d2t=known - torch.arange(len(known)), t2d=t2d))


_WRITERS: Mapping[str, Callable[[LlamaForCausalLM, Texts, Path], None]] = {
    "medusa": _write_medusa,
    "eagle": _write_eagle,
    "eagle3": _write_eagle3,
}


def _least_squares(inputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The matrix # [out, in] that takes inputs # [n, in] to what is wanted # [n, out], large entries shunned."""
    inputs, wanted = inputs.double(), wanted.double()
    penalty = _RIDGE * inputs.square().mean() * torch.eye(inputs.shape[1], dtype=torch.float64)
    solution: torch.Tensor = torch.linalg.solve(inputs.T @ inputs + penalty, inputs.T @ wanted)
    return solution.T.float().contiguous()


def _eagle_config(
    model: LlamaForCausalLM, kind: EagleKind, *, aux_layers: tuple[int, ...] = (), draft_vocab_size: int = 0
) -> EagleConfig:
    target = model.config
    vocab_size, hidden_size = _present(target.vocab_size), _present(target.hidden_size)
    num_heads = _present(target.num_attention_heads)
    return EagleConfig(
        kind=kind,
        hidden_size=hidden_size,
        target_hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=target.num_key_value_heads or num_heads,
        head_dim=target.head_dim or hidden_size // num_heads,
        intermediate_size=_INNER,
        rms_norm_eps=target.rms_norm_eps or 1e-6,
        rope={"rope_type": "default", "rope_theta": 10000.0},
        max_model_len=target.max_position_embeddings,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size or vocab_size,
        aux_layers=aux_layers,
    )


def _present(size: int | None) -> int:
    if size is None:
        raise ValueError("the configuration of the target names no size")
    return size


def _idle_layer(config: EagleConfig, attention_in: int) -> dict[str, torch.Tensor]:
    """A decoder layer that adds nothing; its attention computes keys and values all the same."""
    hidden_size, queries = config.hidden_size, config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    shapes = {
        "self_attn.q_proj": (queries, attention_in),
        "self_attn.k_proj": (keys, attention_in),
        "self_attn.v_proj": (keys, attention_in),
        "self_attn.o_proj": (hidden_size, queries),
        "mlp.gate_proj": (_INNER, hidden_size),
        "mlp.up_proj": (_INNER, hidden_size),
        "mlp.down_proj": (hidden_size, _INNER),
    }
    layer = {f"layer.{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    return layer | {"layer.post_attention_layernorm.weight": torch.ones(hidden_size)}
