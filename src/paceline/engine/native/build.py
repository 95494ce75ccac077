"""From a loaded model of `transformers` to a `Decoder`; its weights are taken away from it, one after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaRMSNorm

from paceline.engine.native.decoder import Decoder, DecoderLayer, LayerShape
from paceline.engine.native.family import as_llama, decoder_layers, layer_windows
from paceline.engine.native.norms import Norm
from paceline.engine.native.tables import Embedding, PlainTable, TiedTable
from paceline.engine.native.weights import MakeWeight, PlainWeight, Weight, take_linears, take_tensor
from paceline.engine.packing import PackedWeight, PackingReport, least_rows, packing_obstacle
from paceline.engine.quantised_linear import OnednnInt8Weight, choose_kernel
from paceline.engine.runner_options import Quantization
from paceline.errors import ConfigurationError

_TRIED_BYTES = 64 << 20
"""Weights on which quantised products are tried: more than a processor's cache holds, where the model has as many."""


@dataclass(frozen=True, slots=True)
class BuiltDecoder:
    """A decoder and what became of the weights.

    Attributes:
        decoder: ready to run.
        packing: what was packed.
        weights_bytes: memory of all weights.
    """

    decoder: Decoder
    packing: PackingReport
    weights_bytes: int


@torch.inference_mode()
def build_decoder(
    model: PreTrainedModel, *, pack: bool, quantization: Quantization = Quantization.NONE
) -> BuiltDecoder:
    """Makes a decoder of a model that `native_obstacle` lets through.

    Afterwards the model has no weights; while this runs no more than one layer's are in memory twice.

    Args:
        model: of `transformers`; it cannot be used any more.
        pack: whether to pack weights where that is possible.
        quantization: of the weights, the head's included and the embedding's not; NONE for a target.

    Raises:
        ConfigurationError: the weights cannot be quantised here.
    """
    reason = packing_obstacle(model) if pack else "switched off"
    make: MakeWeight = PlainWeight if reason else PackedWeight
    if quantization is not Quantization.NONE:
        make, reason = _quantising(model, quantization), f"quantised to {quantization.value}"
    weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
    others_bytes = sum(
        parameter.nbytes
        for module in model.modules()
        if not isinstance(module, nn.Linear)
        for parameter in module.parameters(recurse=False)
    )
    base = as_llama(model).model
    layers = [
        _take_layer(layer, index, window, make)
        for index, (layer, window) in enumerate(zip(decoder_layers(model), layer_windows(model), strict=True))
    ]
    embedding, head = _take_tables(model, make)
    decoder = Decoder(
        embedding=embedding,
        layers=layers,
        norm=_take_norm(base.norm),
        head=head,
        vocab_size=as_llama(model).lm_head.out_features,
        rotary=base.rotary_emb,
        least_rows=_least_rows(make),
    )
    matrices = [weight for layer in layers for weight in layer.weights] + [head]
    matrices_bytes = sum(weight.num_bytes for weight in matrices)
    if quantization is not Quantization.NONE:
        weights_bytes = others_bytes + matrices_bytes
    if reason:
        return BuiltDecoder(decoder, PackingReport(reason=reason), weights_bytes)
    report = PackingReport(len(matrices), matrices_bytes)
    return BuiltDecoder(decoder, report, weights_bytes)


def _least_rows(make: MakeWeight) -> int:
    """What the kernels of such weights like; see `packing.padded_count`."""
    if make is PackedWeight:
        return least_rows()
    return 1 if make is OnednnInt8Weight else 0


def _quantising(model: PreTrainedModel, quantization: Quantization) -> MakeWeight:
    """What makes quantised weights here, tried on the gates of a few layers."""
    if obstacle := packing_obstacle(model):
        raise ConfigurationError(
            f"weights are quantised for CPUs and from float32, but {obstacle}: set quantization to none, or device to "
            "cpu and dtype to float32",
            field="quantization",
        )
    gates: list[torch.Tensor] = []
    for layer in decoder_layers(model):
        if sum(gate.nbytes for gate in gates) < _TRIED_BYTES:
            gates.append(layer.mlp.gate_proj.weight.detach())
    return choose_kernel(quantization, gates)


def _take_layer(layer: LlamaDecoderLayer, index: int, window: int | None, make: MakeWeight) -> DecoderLayer:
    attention, feed_forward = layer.self_attn, layer.mlp
    shape = LayerShape(
        num_heads=attention.q_proj.out_features // attention.head_dim,
        num_kv_heads=attention.k_proj.out_features // attention.head_dim,
        head_dim=attention.head_dim,
        scaling=attention.scaling,
    )
    return DecoderLayer(
        index=index,
        shape=shape,
        window=window,
        attention_norm=_take_norm(layer.input_layernorm),
        feed_forward_norm=_take_norm(layer.post_attention_layernorm),
        head_norm=_take_head_norm(attention, shape),
        qkv=take_linears([attention.q_proj, attention.k_proj, attention.v_proj], make),
        output=take_linears([attention.o_proj], make),
        gate_up=take_linears([feed_forward.gate_proj, feed_forward.up_proj], make),
        down=take_linears([feed_forward.down_proj], make),
    )


def _take_norm(norm: LlamaRMSNorm) -> Norm:
    return Norm(take_tensor(norm, "weight").clone(), norm.variance_epsilon)


def _take_head_norm(attention: LlamaAttention, shape: LayerShape) -> Norm | None:
    if not hasattr(attention, "q_norm"):
        return None
    of_queries, of_keys = (cast("LlamaRMSNorm", norm) for norm in (attention.q_norm, attention.k_norm))
    queries = take_tensor(of_queries, "weight").expand(shape.num_heads, -1)
    keys = take_tensor(of_keys, "weight").expand(shape.num_kv_heads, -1)
    return Norm(torch.cat([queries, keys]), of_queries.variance_epsilon)


def _take_tables(model: PreTrainedModel, make: MakeWeight) -> tuple[Embedding, Weight]:
    """The embedding and the head."""
    embedding, head = as_llama(model).model.embed_tokens, as_llama(model).lm_head
    tied = head.weight is embedding.weight
    vectors = take_tensor(embedding, "weight")
    if not tied:
        # Cloned out of a mapped file.
        return PlainTable(vectors.clone()), take_linears([head], make)
    take_tensor(head, "weight")
    if make is PackedWeight:
        table = TiedTable(vectors)
        return table, table
    vectors = vectors.clone()
    return PlainTable(vectors), make(vectors, None)
