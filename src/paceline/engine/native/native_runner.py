"""Runs a model of the Llama family over the paged pool with code of our own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.engine.attention import PagedAttention
from paceline.engine.features import SequenceFeatures
from paceline.engine.kv.pool import SequenceKV
from paceline.engine.loader import LoadedModel, own_logits
from paceline.engine.native.build import build_decoder
from paceline.engine.native.early_exit import ExitStep, take_ahead
from paceline.engine.native.family import native_obstacle
from paceline.engine.native.tables import head_rows
from paceline.engine.native.weights import Weight
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

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.model.layers)

    def new_sequence(self) -> SequenceKV:
        """An empty sequence in this runner's pool."""
        return self.pool.new_sequence()

    @torch.inference_mode()
    def forward(self, batch: Sequence[SequencePass], *, wait: bool = True) -> list[torch.Tensor]:
        """Runs one pass; see `ModelRunner.forward`."""
        kept = take_ahead(batch)
        if kept is not None and self._features is not None and self._features.taps.needs_layers(kept.num_layers):
            kept = None
        plan = plan_pass(batch, self._device)
        try:
            if kept is None:
                self.attention.plan = plan
                logits = self.model(plan, self.attention, self._features)
            else:
                hidden = kept.join(self.model, plan, self.attention)
                self.attention.plan = plan
                logits = self.model.finish(hidden, plan, self.attention, self._features, kept.num_layers)
        finally:
            self.attention.plan = None
        return list(torch.split(logits.float(), list(plan.num_wanted)))

    @torch.inference_mode()
    def forward_first(
        self, batch: Sequence[ExitStep], num_layers: int, head: Weight | None = None
    ) -> torch.Tensor:  # [len(batch), vocab_size] float32
        """Runs one pass through layers [0, num_layers), the final norm and a head.

        Each step's row is one more ahead of its sequence's rows (`SequenceKV.ahead`); the next `forward` that feeds the
        same tokens goes on from there.

        Args:
            batch: of different sequences.
            num_layers: at least 1.
            head: another one than the model's; its columns are those of the result then.
        """
        plan = plan_pass([step.sequence_pass(num_layers) for step in batch], self._device)
        self.attention.plan = plan
        try:
            hidden = self.model.begin(plan, self.attention, num_layers)
        finally:
            self.attention.plan = None
        for index, step in enumerate(batch):
            step.keep(hidden[index : index + 1])
        normed = self.model.norm(hidden)
        return (self.model.logits(normed) if head is None else head(normed)).float()

    def head_rows(self, token_ids: torch.Tensor) -> torch.Tensor:  # [n] int64 -> [n, hidden_size]
        """A copy of the head's rows for some tokens, for a head of fewer tokens."""
        return head_rows(self.model.head, token_ids.to(self._device))

    def synchronize(self) -> None:
        """Does nothing: who reads a result waits for it."""

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
