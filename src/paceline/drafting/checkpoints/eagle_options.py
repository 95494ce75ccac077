"""Options of EAGLE heads: where each layout keeps them, what they default to, and which are refused."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from paceline.checkpoint_files.head_config import HeadConfig
from paceline.checkpoint_files.tensor_table import TensorTable
from paceline.drafting.checkpoints.eagle_checkpoint import EagleConfig
from paceline.drafting.checkpoints.eagle_names import ATTENTION, MLP
from paceline.drafting.checkpoints.layouts import Layout
from paceline.drafting.checkpoints.rope_options import read_rope
from paceline.drafting.checkpoints.target_facts import TargetFacts
from paceline.errors import ConfigurationError

FORMAT_MARK = "paceline_format"
"""Names our own files, in which a layer's number always means what enters it."""

_HEAD_OPTIONS = frozenset(
    {
        "draft_vocab_size",
        "target_hidden_size",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "eagle_aux_hidden_state_layer_ids",
        "num_aux_hidden_states",
    }
)
_EAGLE1_OPTIONS = frozenset({"bias", "layernorms", "fusion_bias"})
_LAYER_OPTIONS = frozenset(
    {
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "vocab_size",
        "hidden_act",
        "attention_bias",
        "mlp_bias",
        "max_position_embeddings",
    }
)
_ROPE_BLOCKS = frozenset({"rope_scaling", "rope_parameters"})

_EAGLE_CONFIG_FIXED: Mapping[str, Any] = {
    "eagle_decoder_type": "llama",
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
    "has_lm_head": True,
}
"""Options within `eagle_config` and the one value of each that is supported."""
_EAGLE_CONFIG_IDLE = frozenset({"next_layer_regular", "parallel_draft_heads_num_layers"})
"""Options within `eagle_config` that a head of one layer and one step has no use for."""

_REFUSED: Mapping[str, str] = {
    "quantization_config": "give the head as it was before it was quantised",
    "use_sliding_window": "heads attend to all positions",
    "parallel_drafting": "heads draft one token after the other",
    "add_para_norm": "its extra norms have no place in this layout",
    "use_qk_norm": "norms of queries and keys are not supported",
}


def read_eagle_config(config: HeadConfig, layout: Layout, table: TensorTable, target: TargetFacts) -> EagleConfig:
    """Sizes and options of a head.

    Sizes are taken from the configuration where it names them and from the tensors where it does not; that both agree
    is checked afterwards, tensor by tensor.

    Raises:
        ConfigurationError: an option is not supported, contradicts another, or stands where nobody reads it.
    """
    speculators = layout in {Layout.SPECULATORS_EAGLE, Layout.SPECULATORS_EAGLE3}
    eagle3 = layout in {Layout.EAGLE3, Layout.SPECULATORS_EAGLE3}
    layer = _layer_options(config, speculators=speculators)
    options = _with_eagle_config(config) if eagle3 else config
    if speculators:
        _refuse_lossy(config)
    return _eagle3(options, layer, table, target) if eagle3 else _eagle1(options, layer, layout, table, target)


def _layer_options(config: HeadConfig, *, speculators: bool) -> HeadConfig:
    """The block with the decoder layer's options, with nothing in it or beside it that is overlooked or refused."""
    heads = _HEAD_OPTIONS | _EAGLE1_OPTIONS
    if speculators:
        config.refuse_nested(heads, read_in={"eagle_config"})
        layer = config.inner("transformer_layer_config")
        if layer is None:
            raise config.wrong("transformer_layer_config", "is missing: it holds the sizes of the decoder layer")
        layer.refuse_nested(_LAYER_OPTIONS, read_in=_ROPE_BLOCKS)
        if layer.text("model_type") not in {None, "llama", "qwen3"}:
            raise layer.wrong(
                "model_type", f"is {layer.text('model_type')!r}: the decoder layer of a Llama is supported"
            )
        if config.text("transformer_layer_architecture") not in {None, "LlamaDecoderLayer"}:
            raise config.wrong("transformer_layer_architecture", "must be LlamaDecoderLayer: others are not supported")
    else:
        config.refuse_nested(heads | _LAYER_OPTIONS, read_in=_ROPE_BLOCKS | {"eagle_config"})
        layer = config
    if (layer.integer("num_hidden_layers") or 1) != 1:
        raise layer.wrong("num_hidden_layers", "must be 1: heads with more decoder layers are not supported")
    if layer.text("hidden_act") not in {None, "silu"}:
        raise layer.wrong("hidden_act", f"is {layer.text('hidden_act')!r}: heads with silu are supported")
    if "sliding_attention" in layer.items("layer_types"):
        raise layer.wrong("layer_types", "names sliding_attention: heads attend to all positions")
    for block in (config, layer):
        for name, reason in _REFUSED.items():
            if block.values.get(name):
                raise block.wrong(name, f"is not supported: {reason}")
    return layer


def _with_eagle_config(config: HeadConfig) -> HeadConfig:
    """The options with those in the block `eagle_config` lifted to the top."""
    inner = config.inner("eagle_config")
    if inner is None:
        return config
    for name, value in inner.values.items():
        if name in _EAGLE_CONFIG_FIXED:
            if value is not None and value != _EAGLE_CONFIG_FIXED[name]:
                raise inner.wrong(name, f"is {value!r}: only {_EAGLE_CONFIG_FIXED[name]!r} is supported")
        elif name not in _HEAD_OPTIONS | _EAGLE_CONFIG_IDLE:
            raise inner.wrong(
                name, "is not known: remove it if it does not change the head, otherwise it would be overlooked"
            )
        elif config.has(name) and value is not None and config.values[name] != value:
            raise inner.wrong(
                name, f"is {value!r} and at the top of the file {config.values[name]!r}: keep the right one"
            )
    lifted = {name: value for name, value in inner.values.items() if name in _HEAD_OPTIONS and value is not None}
    return HeadConfig(config.path, {**config.values, **lifted})


def _refuse_lossy(config: HeadConfig) -> None:
    speculators = config.inner("speculators_config")
    for method in speculators.items("proposal_methods") if speculators else ():
        if not isinstance(method, dict):
            raise config.wrong("proposal_methods", "must be a list of blocks")
        kept, tolerance = method.get("verifier_accept_k"), method.get("accept_tolerance")
        if (kept or 1) != 1 or (tolerance or 0) != 0:
            name = "verifier_accept_k" if (kept or 1) != 1 else "accept_tolerance"
            raise ConfigurationError(
                f"{config.path}: {name} {method[name]} accepts tokens that the target would not choose, and Paceline "
                "puts out the target's only: set verifier_accept_k to 1 and accept_tolerance to 0; the weights do not "
                "depend on them",
                field=name,
            )


def _eagle1(
    options: HeadConfig, layer: HeadConfig, layout: Layout, table: TensorTable, target: TargetFacts
) -> EagleConfig:
    has_bias = "fc.bias" in table.tensors
    name = "fusion_bias" if layout is Layout.SPECULATORS_EAGLE else "bias"
    said = options.flag(name)
    if said is False and has_bias:
        raise options.wrong(name, "is false, and there is a bias: set it to true if the head was trained with it")
    vocab_size = layer.integer("vocab_size") or table.rows("embed_tokens.weight") or target.vocab_size
    return EagleConfig(
        kind="eagle",
        target_hidden_size=target.hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        fc_bias=has_bias or said is True,
        input_layernorm=options.flag("layernorms") or False,
        **_layer_sizes(layer, table, target),
    )


def _eagle3(options: HeadConfig, layer: HeadConfig, table: TensorTable, target: TargetFacts) -> EagleConfig:
    if layer is not options and layer.block and not options.has("norm_before_residual"):
        raise options.wrong("norm_before_residual", "is missing: it is not guessed, since both values are in use")
    norm_before_fc, fc_norm = options.flag("norm_before_fc") or False, options.flag("fc_norm") or False
    if norm_before_fc and fc_norm:
        raise options.wrong("fc_norm", "and norm_before_fc exclude each other: keep the one it was trained with")
    vocab_size = layer.integer("vocab_size") or table.rows("embed_tokens.weight") or target.vocab_size
    return EagleConfig(
        kind="eagle3",
        target_hidden_size=options.integer("target_hidden_size") or target.hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=options.integer("draft_vocab_size") or table.rows("lm_head.weight") or vocab_size,
        aux_layers=_aux_layers(options, target),
        norm_before_residual=options.flag("norm_before_residual") or False,
        norm_before_fc=norm_before_fc,
        fc_norm=fc_norm,
        norm_output=options.flag("norm_output") or False,
        **_layer_sizes(layer, table, target),
    )


def _layer_sizes(layer: HeadConfig, table: TensorTable, target: TargetFacts) -> dict[str, Any]:
    """Arguments of `EagleConfig` that all kinds have; what is not said is the format's default, a Llama's."""
    num_heads = layer.integer("num_attention_heads") or (32 if layer.block else None)
    if num_heads is None:
        raise layer.wrong("num_attention_heads", "is missing: it cannot be told from the tensors")
    head_dim = layer.integer("head_dim") or max((table.rows(f"{ATTENTION[0]}.weight") or 0) // num_heads, 1)
    keys = (table.rows(f"{ATTENTION[1]}.weight") or 0) // head_dim
    return {
        "hidden_size": layer.integer("hidden_size") or table.rows("fc.weight") or target.hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": layer.integer("num_key_value_heads") or (max(keys, 1) if layer.block else num_heads),
        "head_dim": head_dim,
        "intermediate_size": layer.integer("intermediate_size") or table.rows(f"{MLP[0]}.weight") or 1,
        "rms_norm_eps": layer.number("rms_norm_eps") or 1e-6,
        "rope": read_rope(layer),
        "max_model_len": layer.integer("max_position_embeddings") or (2048 if layer.block else None),
        "attention_bias": _has_biases(layer, table, ATTENTION, "attention_bias"),
        "mlp_bias": _has_biases(layer, table, MLP, "mlp_bias"),
    }


def _has_biases(layer: HeadConfig, table: TensorTable, projections: tuple[str, ...], option: str) -> bool:
    """Whether the projections have a bias: the tensors say it, and the configuration must not say otherwise."""
    found = [f"{name}.bias" in table.tensors for name in projections]
    said = layer.flag(option)
    if (said is False and any(found)) or (said is True and not all(found)):
        raise layer.wrong(option, f"is {str(said).lower()}, and {sum(found)} of {len(found)} projections have a bias")
    return any(found)


def _aux_layers(options: HeadConfig, target: TargetFacts) -> tuple[int, ...]:
    """The layers whose input makes the features.

    Files of some tools number the layers that the features leave instead of those they enter. They are known by the
    usual three layers, each one too low; other numbers are taken as they stand, as are all in our own files.
    """
    last = target.num_layers
    usual = (2, last // 2, last - 3)
    given = options.integers("eagle_aux_hidden_state_layer_ids")
    layers = given or usual
    if given == tuple(layer - 1 for layer in usual) and not options.has(FORMAT_MARK):
        layers = usual
    if any(low >= high for low, high in pairwise(layers)) or layers[-1] > last:
        raise options.wrong(
            "eagle_aux_hidden_state_layer_ids",
            f"would be {list(layers)}: rising numbers from 0 to {last} are needed for this target; "
            + ("give the target that the head was trained for" if given else "name the layers there"),
        )
    count = options.integer("num_aux_hidden_states")
    if count is not None and count != len(layers):
        raise options.wrong("num_aux_hidden_states", f"is {count}, and the layers are {list(layers)}: name them all")
    return layers
