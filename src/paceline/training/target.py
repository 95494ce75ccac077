"""The frozen target that a drafter is trained for: hidden states of given tokens, its embedding and its head."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from paceline.engine.loader import ModelDtype, load_model
from paceline.errors import ModelError

FINAL = -1
"""Names the output of the final norm where a layer's number would name what enters the layer."""


class TrainingTarget:
    """A target whose hidden states are wanted.

    Args:
        folder: as `paceline.model_source.resolve` returns it.
        dtype: number format that it runs in.
        device: "cpu" or "cuda:N".

    Attributes:
        folder: where it came from.
        digest: of weights and configuration; names caches.
        model: in evaluation mode, without gradients.
        decoder: the model without its head.
        layers: its decoder layers.
        hidden_size: numbers per hidden state.
        num_layers: decoder layers.
        vocab_size: columns of the head.
        max_model_len: most tokens of a sequence.
        eos_token_ids: tokens that end an answer.

    Raises:
        ModelError: it cannot be loaded, or its layers are not where `transformers` has them.
    """

    def __init__(self, folder: Path, *, dtype: ModelDtype = ModelDtype.FLOAT32, device: str = "cpu") -> None:
        loaded = load_model(folder, dtype=dtype, device=device)
        self.folder = folder
        self.digest = weights_digest(folder)
        self.model: PreTrainedModel = loaded.model
        # "sdpa" spares the table of all pairs of tokens; both are causal, and padding comes after what is read.
        self.model.set_attn_implementation("sdpa")
        self.decoder = decoder_of(self.model)
        self.layers = decoder_layers(self.model)
        self.hidden_size: int = self.text_config.hidden_size
        self.num_layers = len(self.layers)
        self.vocab_size = loaded.vocab_size
        self.max_model_len = loaded.max_model_len
        self.eos_token_ids = loaded.eos_token_ids

    @property
    def text_config(self) -> PreTrainedConfig:
        """The configuration of its decoder."""
        config: PreTrainedConfig = self.model.config.get_text_config()
        return config

    @property
    def embedding(self) -> torch.Tensor:
        """Vectors of the tokens # [vocab_size, hidden_size]."""
        return _weight(self.model.get_input_embeddings()).detach()

    @property
    def head(self) -> torch.Tensor:
        """From a row after the final norm to logits # [vocab_size, hidden_size]."""
        return self.live_head.detach()

    @property
    def live_head(self) -> torch.Tensor:
        """The same with its gradient, for who trains the target."""
        return _weight(self.model.get_output_embeddings())  # type: ignore[no-untyped-call]

    @property
    def final_norm(self) -> nn.Module:
        """The norm after the last layer."""
        norm = getattr(self.decoder, "norm", None)
        if not isinstance(norm, nn.Module):
            raise ModelError("the target's final norm is not where transformers' decoders have it", field="target")
        return norm

    @torch.no_grad()
    def hidden_states(self, tokens: torch.Tensor, layers: Sequence[int]) -> list[torch.Tensor]:
        """Hidden states of every token.

        Args:
            tokens: # [batch, length] int64; shorter sequences are padded at their end with any ids.
            layers: which; layer n is the residual stream entering layer n, `FINAL` the output of the final norm.

        Returns:
            For each of `layers` # [batch, length, hidden_size]
        """
        found: dict[int, torch.Tensor] = {}

        def keeper(layer: int) -> object:
            def keep(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
                found[layer] = inputs[0]

            return keep

        with ExitStack() as hooks:
            for layer in set(layers) - {FINAL}:
                module = self.final_norm if layer == self.num_layers else self.layers[layer]
                hooks.callback(module.register_forward_pre_hook(keeper(layer)).remove)  # type: ignore[arg-type]
            output = self.decoder(input_ids=tokens.to(self.model.device), use_cache=False)
        found[FINAL] = output.last_hidden_state
        return [found[layer] for layer in layers]


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """A model without its head."""
    decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    return decoder


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a model of `transformers`.

    Raises:
        ModelError: they are not where its decoders have them.
    """
    layers = getattr(decoder_of(model), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ModelError(f"{type(model).__name__} has no list of decoder layers to take features from", field="target")
    return layers


def weights_digest(folder: Path) -> str:
    """Digest of a model folder's configuration and weights."""
    digest = hashlib.sha256()
    for file in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def _weight(module: nn.Module | None) -> torch.Tensor:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor):
        raise ModelError("the target's embedding or head is no plain table of numbers", field="target")
    return weight
