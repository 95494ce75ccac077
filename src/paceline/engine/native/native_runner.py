"""Runs a model of the Llama family over the paged pool with code of our own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.engine.attention import PagedAttention
from paceline.engine.features import SequenceFeatures
from paceline.engine.kv.pool import SequenceKV
from paceline.engine.loader import LoadedModel, own_logits
from paceline.engine.native.build import build_decoder
from paceline.engine.native.family import native_obstacle
from paceline.engine.pass_plan import plan_pass
from paceline.engine.runner import RunnerInfo, SequencePass
from paceline.engine.runner_options import DEFAULT_OPTIONS, Quantization, RunnerChoice, RunnerOptions
from paceline.engine.runner_setup import attach_pool, describe, features_of
from paceline.engine.self_check import check_runner, check_sequence, logits_in_one_pass
from paceline.engine.shared_parts import SharedParts
from paceline.errors import ModelError


class NativeRunner:
    """A `ModelRunner` for Llama, Mistral, Qwen2 and Qwen3. Used from one thread at a time.

    Args:
        loaded: the model; its weights are taken away, so that it cannot be used any more.
        options: how to run it.

    Attributes:
        model: the decoder.
        pool: the key/value rows of all sequences.
        packing: what packing did.
        eos_token_ids: tokens that end a generation.

    Raises:
        ModelError: the model is not known, or its own logits are others; says why.
        ConfigurationError: the key/value budget is too small, the weights cannot be quantised here, or the wanted
            features are not this model's.
    """

    def __init__(self, loaded: LoadedModel, options: RunnerOptions = DEFAULT_OPTIONS) -> None:
        name = type(loaded.model).__name__
        if obstacle := native_obstacle(loaded.model):
            raise ModelError(
                f"the native runner does not know this model: {obstacle}; run it with the transformers runner",
                field="model",
            )
        parameter = next(loaded.model.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        self.eos_token_ids = loaded.eos_token_ids
        check_tokens = check_sequence(loaded.vocab_size)
        expected = own_logits(loaded.model, check_tokens)
        built = build_decoder(loaded.model, pack=options.pack, quantization=options.quantization)
        self.model = built.decoder
        self.packing = built.packing
        layers = self.model.layers
        self.attention = PagedAttention.for_layers(
            [layer.window for layer in layers], layers[0].shape.num_kv_heads, layers[0].shape.head_dim
        )
        attached = attach_pool(
            self.attention, options, hidden_size=self._hidden_size, dtype=self._dtype, device=self._device
        )
        self.pool, self._features = attached.pool, attached.features
        self._info = describe(loaded, options, self.pool, runner=RunnerChoice.NATIVE, weights_bytes=built.weights_bytes)
        if options.quantization is not Quantization.NONE:
            # Its logits are others than the model's; what is checked is that they do not depend on the cache.
            expected = logits_in_one_pass(self, check_tokens)
        check_runner(self, name, check_tokens, expected)

    @property
    def info(self) -> RunnerInfo:
        """Facts about the model."""
        return self._info

    def new_sequence(self) -> SequenceKV:
        """An empty sequence in this runner's pool."""
        return self.pool.new_sequence()

    @torch.inference_mode()
    def forward(self, batch: Sequence[SequencePass]) -> list[torch.Tensor]:
        """Runs one pass; see `ModelRunner.forward`."""
        plan = plan_pass(batch, self._device)
        self.attention.plan = plan
        try:
            logits = self.model(plan, self.attention, self._features)
        finally:
            self.attention.plan = None
        return list(torch.split(logits.float(), list(plan.num_wanted)))

    def features(self, kv: SequenceKV) -> SequenceFeatures:
        """The features of a sequence's rows; see `ModelRunner.features`."""
        return features_of(self._features, kv)

    def shared_parts(self) -> SharedParts:
        """What a drafting head borrows; nothing is copied."""
        return SharedParts(
            embed=self.model.embedding.embed,
            head=self.model.logits,
            norm=self.model.norm,
            hidden_size=self._hidden_size,
            num_layers=len(self.model.layers),
            vocab_size=self.model.vocab_size,
            dtype=self._dtype,
            device=self._device,
        )

    @property
    def _hidden_size(self) -> int:
        return self.model.norm.weight.shape[0]
