"""The decoder layer of an EAGLE head as it learns: whole sequences at once, and drafts on drafts.

A chain of drafts is begun at every anchor of a sequence at once. Its first row is that of the true feature; row i after
it is made of the head's own state, one place further on. At row i anchor t sees the first rows of anchors 0 to t, which
hold true features, and rows 1 to i of its own chain: what the drafter has in its key/value rows when it has drafted i
tokens after t. So training sees the drafter's own mistakes (EAGLE-3's training-time test, arXiv 2503.01840), and
measuring a chain is exact.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from paceline.training.target import TrainingTarget

SMALL = 0.3
"""What random weights are multiplied by that lie beside weights of the target."""


def head_config(target: TrainingTarget) -> LlamaConfig:
    """Sizes and options of a head for a target: a Llama layer of the target's width."""
    config = target.text_config
    rope = getattr(config, "rope_parameters", None) or {}
    # Some targets have several settings, by kind of layer; a head has one layer.
    usable = dict(rope) if "rope_theta" in rope else {"rope_type": "default", "rope_theta": 10000.0}
    return LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-5),
        rope_parameters=usable,
        max_position_embeddings=target.max_model_len,
        vocab_size=target.vocab_size,
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
    )


class ChainRows:
    """Keys and values of the chains of a batch, row by row; used for one pass over it.

    Args:
        rotary: makes the angles.
        tokens: # [batch, length]
        max_rows: most rows of a chain.
    """

    def __init__(self, rotary: LlamaRotaryEmbedding, tokens: torch.Tensor, max_rows: int) -> None:
        length = tokens.shape[1]
        positions = torch.arange(length + max_rows, device=tokens.device)
        cosines, sines = rotary(torch.zeros((), device=tokens.device), positions[None])
        self._cosines: torch.Tensor = cosines[0]
        self._sines: torch.Tensor = sines[0]
        self._length = length
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    @property
    def angles(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the next row: it stands at its anchor's position plus its number in the chain # [length, head_dim]."""
        begin = len(self.keys)
        return self._cosines[begin : begin + self._length], self._sines[begin : begin + self._length]


class ChainAttention(nn.Module):
    """Attention of one row of every chain.

    Args:
        config: of the head.
        in_width: numbers per input row.
    """

    def __init__(self, config: LlamaConfig, in_width: int) -> None:
        super().__init__()
        if config.num_key_value_heads is None or config.head_dim is None:
            raise ValueError("the head's configuration must name num_key_value_heads and head_dim")
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        queries, keys = config.num_attention_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(in_width, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(in_width, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(in_width, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_bias)

    def forward(self, inputs: torch.Tensor, chain: ChainRows) -> torch.Tensor:
        """Adds a row to every chain # [batch, length, in_width] -> [batch, length, hidden_size]."""
        cosines, sines = chain.angles
        # [batch, kv_heads, any, length, head_dim]: queries that share keys lie along the third dimension
        queries, keys, values = (self._heads(part(inputs)) for part in (self.q_proj, self.k_proj, self.v_proj))
        queries, keys = (rows * cosines + _half_turned(rows) * sines for rows in (queries, keys))
        chain.keys.append(keys)
        chain.values.append(values)
        attended = self._attend(queries, chain)
        return self.o_proj(attended.permute(0, 3, 1, 2, 4).flatten(2))  # type: ignore[no-any-return]

    def _heads(self, rows: torch.Tensor) -> torch.Tensor:
        batch, length, _ = rows.shape
        return rows.view(batch, length, self.num_kv_heads, -1, self.head_dim).permute(0, 2, 3, 1, 4)

    def _attend(self, queries: torch.Tensor, chain: ChainRows) -> torch.Tensor:
        length = queries.shape[3]
        scaled = queries * self.head_dim**-0.5
        later = torch.ones(length, length, dtype=torch.bool, device=queries.device).triu_(1)
        context = (scaled @ chain.keys[0].mT).masked_fill(later, float("-inf"))
        own = [(scaled * keys).sum(dim=-1, keepdim=True) for keys in chain.keys[1:]]
        weights = functional.softmax(torch.cat([context, *own], dim=-1).float(), dim=-1).to(queries.dtype)
        attended = weights[..., :length] @ chain.values[0]
        for row, values in enumerate(chain.values[1:]):
            attended = attended + weights[..., length + row : length + row + 1] * values
        return attended


class HeadLayer(nn.Module):
    """Attention and feed-forward, named as in EAGLE's checkpoints. Norms before attention are the caller's.

    Args:
        config: of the head.
        in_width: numbers per input row of the attention.
    """

    def __init__(self, config: LlamaConfig, in_width: int) -> None:
        super().__init__()
        self.self_attn = ChainAttention(config, in_width)
        self.mlp = LlamaMLP(config)  # type: ignore[no-untyped-call]
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, inputs: torch.Tensor, residual: torch.Tensor, chain: ChainRows) -> torch.Tensor:
        """The next row of every chain.

        Args:
            inputs: of the attention # [batch, length, in_width]
            residual: # [batch, length, hidden_size]
            chain: a row is added to it.
        """
        hidden = residual + self.self_attn(inputs, chain)
        output: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


@torch.no_grad()
def begin_as(layer: HeadLayer, source: nn.Module) -> bool:
    """Gives a head the attention and feed-forward of a target's layer, where it is built alike; says whether it was.

    Where the head's attention has a wider input, the target's weights are for its last part, which holds the state; the
    weights for the rest are made small.
    """
    names = [f"self_attn.{part}_proj.weight" for part in "qkvo"]
    names += [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    own, given = dict(layer.named_parameters()), dict(source.named_parameters())
    fits = all(name in given and len(given[name]) == len(own[name]) for name in names)
    if not fits or any(name.endswith("bias") for name in given):
        return False
    for name in names:
        weight, beginning = own[name], given[name].float().cpu()
        weight.mul_(SMALL)
        weight[:, weight.shape[1] - beginning.shape[1] :] = beginning
    layer.post_attention_layernorm.weight.copy_(given["post_attention_layernorm.weight"].float())
    return True


@torch.no_grad()
def norm_weights(norm: nn.Module, width: int) -> torch.Tensor:
    """What a norm of the target multiplies by, whatever form it keeps that in # [width] float32."""
    parameter = next(norm.parameters())
    return norm(torch.ones(1, width, dtype=parameter.dtype, device=parameter.device))[0].float().cpu()  # type: ignore[no-any-return]


def _half_turned(rows: torch.Tensor) -> torch.Tensor:
    first, second = rows.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
