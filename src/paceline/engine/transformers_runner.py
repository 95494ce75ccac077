"""Runs any decoder of `transformers` over the paged pool: the general runner."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from paceline.engine.attention import ATTENTION_NAME, LAYER_STATE, PagedAttention
from paceline.engine.features import SequenceFeatures
from paceline.engine.hidden_states import HiddenStates, final_norm
from paceline.engine.kv.pool import SequenceKV
from paceline.engine.loader import LoadedModel, own_logits
from paceline.engine.packing import PackingReport, pack_linears
from paceline.engine.pass_plan import plan_pass
from paceline.engine.runner import RunnerInfo, SequencePass
from paceline.engine.runner_options import DEFAULT_OPTIONS, RunnerChoice, RunnerOptions
from paceline.engine.runner_setup import attach_pool, describe, features_of
from paceline.engine.self_check import check_runner, check_sequence
from paceline.engine.shared_parts import SharedParts
from paceline.errors import ModelError


class TransformersRunner:
    """A `ModelRunner` on a model of `transformers`. Used from one thread at a time.

    Args:
        loaded: the model; it is changed (attention, packed weights) and must not be used elsewhere.
        options: how to run it.

    Attributes:
        model: the model, its attention replaced and its weights packed.
        pool: the key/value rows of all sequences.
        packing: what packing did.
        eos_token_ids: tokens that end a generation.

    Raises:
        ModelError: the model cannot be served exactly; says why.
        ConfigurationError: the key/value budget is too small, or the wanted features are not this model's.
    """

    def __init__(self, loaded: LoadedModel, options: RunnerOptions = DEFAULT_OPTIONS) -> None:
        self.model = loaded.model
        self._device = next(loaded.model.parameters()).device
        self._dtype = next(loaded.model.parameters()).dtype
        self.eos_token_ids = loaded.eos_token_ids
        weights_bytes = _parameter_bytes(loaded.model)
        check_tokens = check_sequence(loaded.vocab_size)
        expected = own_logits(loaded.model, check_tokens)
        self.packing = pack_linears(loaded.model) if options.pack else PackingReport(reason="switched off")
        self._attention = self._install_attention(check_tokens)
        self._hidden_size: int = loaded.model.config.get_text_config().hidden_size
        attached = attach_pool(
            self._attention, options, hidden_size=self._hidden_size, dtype=self._dtype, device=self._device
        )
        self.pool, self._features = attached.pool, attached.features
        self._states = HiddenStates(loaded.model, options.taps.layers) if options.taps is not None else None
        weights_bytes += self.packing.duplicated_bytes
        self._info = describe(loaded, options, self.pool, runner=RunnerChoice.TRANSFORMERS, weights_bytes=weights_bytes)
        odd = {name for facts in self._attention.facts.values() for name in facts.other_arguments}
        check_runner(self, type(loaded.model).__name__, check_tokens, expected, sorted(odd))

    @property
    def info(self) -> RunnerInfo:
        """Facts about the model."""
        return self._info

    def new_sequence(self) -> SequenceKV:
        """An empty sequence in this runner's pool."""
        return self.pool.new_sequence()

    @torch.inference_mode()
    def forward(self, batch: Sequence[SequencePass], *, wait: bool = True) -> list[torch.Tensor]:
        """Runs one pass; see `ModelRunner.forward`."""
        plan = plan_pass(batch, self._device)
        self._attention.plan = plan
        try:
            # A head needs at least one row; the logits of a row nobody wants are dropped below.
            wanted = plan.wanted if len(plan.wanted) else torch.zeros(1, dtype=torch.long, device=self._device)
            logits = self.model(
                input_ids=plan.token_ids, position_ids=plan.positions, use_cache=False, logits_to_keep=wanted
            ).logits[0]
        finally:
            self._attention.plan = None
        if self._features is not None and self._states is not None:
            self._features.write(plan.write, self._states.take())
        return list(logits[: len(plan.wanted)].float().split(plan.num_wanted))

    def synchronize(self) -> None:
        """Does nothing: who reads a result waits for it."""

    def features(self, kv: SequenceKV) -> SequenceFeatures:
        """The features of a sequence's rows; see `ModelRunner.features`."""
        return features_of(self._features, kv)

    def shared_parts(self) -> SharedParts:
        """What a drafting head borrows; nothing is copied.

        Raises:
            ModelError: the model's final norm is not found.
        """
        head: torch.nn.Module = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        return SharedParts(
            embed=self.model.get_input_embeddings(),
            head=head,
            norm=final_norm(self.model),
            hidden_size=self._hidden_size,
            num_layers=len(self._attention.facts),
            vocab_size=self._info.vocab_size,
            dtype=self._dtype,
            device=self._device,
        )

    @torch.inference_mode()
    def _install_attention(self, check_tokens: Sequence[int]) -> PagedAttention:
        """Puts the paged attention into the model and finds out what its layers need.

        Raises:
            ModelError: the model's attention cannot be replaced.
        """
        attention = PagedAttention()
        for module in self.model.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, LAYER_STATE, attention)
        name = type(self.model).__name__
        try:
            self.model.set_attn_implementation(ATTENTION_NAME)
            ids = torch.tensor([list(check_tokens[:2])], device=self._device)
            positions = torch.arange(2, device=self._device)[None]
            self.model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=positions[0, :1])
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            raise ModelError(
                f"{name} does not run with an attention function of our own ({error}): it cannot be served",
                field="model",
            ) from error
        _check_facts(attention, self.model)
        return attention


def _parameter_bytes(model: PreTrainedModel) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _check_facts(attention: PagedAttention, model: PreTrainedModel) -> None:
    """Checks that every layer used our attention, once, and with the window that the configuration names.

    Raises:
        ModelError: says which layer does not.
    """
    config = model.config.get_text_config()
    name = type(model).__name__
    num_layers = config.num_hidden_layers
    missing = [layer for layer in range(num_layers) if layer not in attention.facts]
    if missing:
        raise ModelError(
            f"{name}: {len(missing)} of {num_layers} layers (first: {missing[0]}) do not attend through transformers' "
            "attention interface; their state cannot be rolled back to an earlier token: give another model",
            field="model",
        )
    repeated = [layer for layer, facts in attention.facts.items() if facts.num_calls > 1]
    if repeated:
        raise ModelError(
            f"{name}: layer {repeated[0]} attends more than once per token: give another model", field="model"
        )
    layer_types = getattr(config, "layer_types", None) or ()
    for layer, kind in enumerate(layer_types):
        window = attention.facts[layer].window
        if kind not in {"full_attention", "sliding_attention"} or (kind == "sliding_attention") != (window is not None):
            raise ModelError(
                f"{name}: layer {layer} is of kind {kind} and names window {window} to its attention, which is not "
                "supported: give another model",
                field="model",
            )
    if not layer_types:
        expected = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        for layer, facts in attention.facts.items():
            if facts.window != expected:
                raise ModelError(
                    f"{name}: layer {layer} attends with window {facts.window}, its configuration names {expected}",
                    field="model",
                )
