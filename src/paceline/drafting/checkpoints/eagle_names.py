"""What the layouts of EAGLE heads call their tensors, and which shapes those have."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.drafting.checkpoints.eagle_checkpoint import EagleConfig
from paceline.drafting.checkpoints.layouts import Layout

ATTENTION = tuple(f"layer.self_attn.{part}_proj" for part in "qkvo")
MLP = tuple(f"layer.mlp.{part}_proj" for part in ("gate", "up", "down"))
MAPS = ("d2t", "t2d")
INV_FREQ = "layer.self_attn.rotary_emb.inv_freq"
"""A buffer of old heads, which follows from the rotary settings."""

_SPECULATORS_EAGLE = {
    "fusion_fc.weight": "fc.weight",
    "fusion_fc.bias": "fc.bias",
    "embedding_layernorm.weight": "embed_norm.weight",
    "pre_lm_head_layernorm.weight": "norm.weight",
}
_LAYER_PREFIXES = {
    Layout.EAGLE: ("layers.0.",),
    Layout.EAGLE3: ("midlayer.", "layers.0."),
    Layout.SPECULATORS_EAGLE: ("transformer.",),
    Layout.SPECULATORS_EAGLE3: ("layers.0.",),
}


def canonical_name(layout: Layout, stored: str) -> str:
    """Our name of a tensor; one that the layout does not know keeps its own."""
    name = stored.removeprefix("model.")
    if layout is Layout.SPECULATORS_EAGLE and name in _SPECULATORS_EAGLE:
        return _SPECULATORS_EAGLE[name]
    for prefix in _LAYER_PREFIXES[layout]:
        if name.startswith(prefix):
            return "layer." + name.removeprefix(prefix)
    return name


def stored_name(layout: Layout, canonical: str) -> str:
    """What a layout calls a tensor of ours."""
    if layout is Layout.SPECULATORS_EAGLE:
        for stored, ours in _SPECULATORS_EAGLE.items():
            if ours == canonical:
                return stored
    if canonical.startswith("layer."):
        return _LAYER_PREFIXES[layout][0] + canonical.removeprefix("layer.")
    return canonical


def needed_names(config: EagleConfig) -> set[str]:
    """Tensors that a head with these options must have; the output projection may have a bias besides."""
    names = {"fc.weight", "layer.post_attention_layernorm.weight", *(f"{name}.weight" for name in ATTENTION + MLP)}
    if config.fc_bias:
        names.add("fc.bias")
    if config.attention_bias:
        names |= {f"{name}.bias" for name in ATTENTION[:3]}
    if config.mlp_bias:
        names |= {f"{name}.bias" for name in MLP}
    if config.kind == "eagle3":
        names |= {"layer.input_layernorm.weight", "layer.hidden_norm.weight", "norm.weight", "lm_head.weight"}
    elif config.input_layernorm:
        names |= {"embed_norm.weight", "layer.input_layernorm.weight", "norm.weight"}
    if config.norm_before_fc:
        names.add("input_norm.weight")
    if config.fc_norm:
        names |= {f"fc_norm.{index}.weight" for index in range(len(config.aux_layers))}
    return names


def expected_shapes(config: EagleConfig) -> Mapping[str, tuple[int, ...]]:
    """The shape of every tensor that a head with these sizes can have."""
    hidden, target, inner = config.hidden_size, config.target_hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    features = target * max(len(config.aux_layers), 1)
    eagle3 = config.kind == "eagle3"
    attention_in = 2 * hidden if eagle3 else hidden
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config.vocab_size, hidden),
        "fc.weight": (hidden, features if eagle3 else 2 * hidden),
        "fc.bias": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
        "input_norm.weight": (features,),
    }
    for name, rows in zip(ATTENTION, (queries, keys, keys, hidden), strict=True):
        shapes[f"{name}.weight"] = (rows, queries if name.endswith("o_proj") else attention_in)
        shapes[f"{name}.bias"] = (rows,)
    for name, rows in zip(MLP, (inner, inner, hidden), strict=True):
        shapes[f"{name}.weight"] = (rows, inner if name.endswith("down_proj") else hidden)
        shapes[f"{name}.bias"] = (rows,)
    norms = ("norm", "embed_norm", "layer.input_layernorm", "layer.hidden_norm", "layer.post_attention_layernorm")
    shapes |= {f"{name}.weight": (hidden,) for name in norms}
    shapes |= {f"fc_norm.{index}.weight": (target,) for index in range(len(config.aux_layers))}
    return shapes
