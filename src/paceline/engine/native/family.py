"""Which models the native runner knows: only those whose every weight and setting has its place in it."""

from __future__ import annotations

from typing import cast

from torch import nn
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

KNOWN_MODELS: tuple[type[PreTrainedModel], ...] = (
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

_LINEARS = frozenset(
    {
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    }
)
_NORMS = frozenset({"input_layernorm", "post_attention_layernorm"})
_HEAD_NORMS = frozenset({"self_attn.q_norm", "self_attn.k_norm"})


def native_obstacle(model: PreTrainedModel) -> str:
    """Why the native runner does not know a model; empty if it does."""
    if type(model) not in KNOWN_MODELS:
        return f"{type(model).__name__} is none of {', '.join(kind.__name__ for kind in KNOWN_MODELS)}"
    config = model.config
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    rope = config.rope_parameters or {}
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"it rotates only a part of each head (partial_rotary_factor {rope['partial_rotary_factor']})"
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        return f"it has layers of kind {', '.join(sorted(unknown))}"
    if kinds and isinstance(model, LlamaForCausalLM | MistralForCausalLM):
        return "it names layer_types, which its architecture does not have"
    for index, layer in enumerate(decoder_layers(model)):
        if reason := _layer_obstacle(layer):
            return f"layer {index} {reason}"
    return ""


def layer_windows(model: PreTrainedModel) -> list[int | None]:
    """Of each layer of a known model, how many positions a token looks back, itself included; None for all."""
    layers = decoder_layers(model)
    if isinstance(model, MistralForCausalLM):
        return [model.config.sliding_window] * len(layers)
    return [getattr(layer.self_attn, "sliding_window", None) for layer in layers]


def as_llama(model: PreTrainedModel) -> LlamaForCausalLM:
    """A model of a known class, for the type checker: all of them have the parts of a Llama under the same names."""
    return cast("LlamaForCausalLM", model)


def decoder_layers(model: PreTrainedModel) -> list[LlamaDecoderLayer]:
    """The layers of a model of a known class, typed as those of a Llama."""
    return [cast("LlamaDecoderLayer", layer) for layer in as_llama(model).model.layers]


def _layer_obstacle(layer: nn.Module) -> str:
    owners = {name.rpartition(".")[0] for name, _ in layer.named_parameters()}
    expected = _LINEARS | _NORMS
    if owners not in (expected, expected | _HEAD_NORMS):
        odd = sorted(owners.symmetric_difference(expected) - _HEAD_NORMS) or sorted(_HEAD_NORMS & owners)
        return f"has other weights than expected ({', '.join(odd)})"
    for name in sorted(_LINEARS):
        if type(layer.get_submodule(name)) is not nn.Linear:
            return f"has a {type(layer.get_submodule(name)).__name__} as {name}"
    return ""
