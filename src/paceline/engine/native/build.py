"""From a loaded model of `transformers` to a `Decoder`; its weights are taken away from it, one after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaRMSNorm

from paceline.engine.native.decoder import Decoder, DecoderLayer, HeadNorm, LayerShape, Norm
from paceline.engine.native.family import as_llama, decoder_layers, layer_windows
from paceline.engine.native.tables import Embedding, PlainTable, TiedTable
from paceline.engine.native.weights import PlainWeight, Weight, take_linears, take_tensor
from paceline.engine.packing import PackingReport, least_rows, packing_obstacle


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
def build_decoder(model: PreTrainedModel, *, pack: bool) -> BuiltDecoder:
    """Makes a decoder of a model that `native_obstacle` lets through.

    Afterwards the model has no weights; while this runs no more than one layer's are in memory twice.

    Args:
        model: of `transformers`; it cannot be used any more.
        pack: whether to pack weights where that is possible.
    """
    reason = packing_obstacle(model) if pack else "switched off"
    weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
    base = as_llama(model).model
    layers = [
        _take_layer(layer, index, window, pack=not reason)
        for index, (layer, window) in enumerate(zip(decoder_layers(model), layer_windows(model), strict=True))
    ]
    embedding, head = _take_tables(model, pack=not reason)
    decoder = Decoder(
        embedding=embedding,
        layers=layers,
        norm=_take_norm(base.norm),
        head=head,
        vocab_size=as_llama(model).lm_head.out_features,
        rotary=base.rotary_emb,
        least_rows=1 if reason else least_rows(),
    )
    if reason:
        return BuiltDecoder(decoder, PackingReport(reason=reason), weights_bytes)
    packed = [weight for layer in layers for weight in layer.weights] + [head]
    report = PackingReport(len(packed), sum(weight.num_bytes for weight in packed))
    return BuiltDecoder(decoder, report, weights_bytes)


def _take_layer(layer: LlamaDecoderLayer, index: int, window: int | None, *, pack: bool) -> DecoderLayer:
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
        qkv=take_linears([attention.q_proj, attention.k_proj, attention.v_proj], pack=pack),
        output=take_linears([attention.o_proj], pack=pack),
        gate_up=take_linears([feed_forward.gate_proj, feed_forward.up_proj], pack=pack),
        down=take_linears([feed_forward.down_proj], pack=pack),
    )


def _take_norm(norm: LlamaRMSNorm) -> Norm:
    return Norm(take_tensor(norm, "weight").clone(), norm.variance_epsilon)


def _take_head_norm(attention: LlamaAttention, shape: LayerShape) -> HeadNorm | None:
    if not hasattr(attention, "q_norm"):
        return None
    of_queries, of_keys = (cast("LlamaRMSNorm", norm) for norm in (attention.q_norm, attention.k_norm))
    queries = take_tensor(of_queries, "weight").expand(shape.num_heads, -1)
    keys = take_tensor(of_keys, "weight").expand(shape.num_kv_heads, -1)
    return HeadNorm(torch.cat([queries, keys]), of_queries.variance_epsilon)


def _take_tables(model: PreTrainedModel, *, pack: bool) -> tuple[Embedding, Weight]:
    """The embedding and the head."""
    embedding, head = as_llama(model).model.embed_tokens, as_llama(model).lm_head
    tied = head.weight is embedding.weight
    vectors = take_tensor(embedding, "weight")
    if not tied:
        # Cloned out of a mapped file.
        return PlainTable(vectors.clone()), take_linears([head], pack=pack)
    take_tensor(head, "weight")
    if pack:
        table = TiedTable(vectors)
        return table, table
    vectors = vectors.clone()
    return PlainTable(vectors), PlainWeight(vectors)
