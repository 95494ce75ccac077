"""LayerSkip: the target learns to say at an early layer what it says at its last (arXiv 2404.16710).

The checkpoint is a target itself: drafts come from its first layers, its norm and its head, and what is lossless is
equal to this checkpoint decoding plainly, not to the model it was made from. While learning, layers are left out by
chance, later ones more often (per sequence; the residual passes), and the head is asked after several layers:

* chance of leaving out layer l of L: `dropout` * (e^(l ln 2 / (L - 1)) - 1)
* weight of the loss after layer l: `exit_scale` * (0 + 1 + ... + l), the last layer's
  L - 1 + `exit_scale` * (0 + 1 + ... + (L - 2)), made to sum to 1 over the layers that are on in a step
* which layers are on: every R-th, another R-th each step (rotational); from the last one down, all by half of the run
  (gradual); or the exit layer alone (fixed), with a share of the loss of its own. The last layer is always on.

Losses are over all ids; drafts are chosen from the answers' most frequent ones, which lie beside what is written.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from paceline.adapted_model import EXIT_LAYER
from paceline.drafting.checkpoints.draft_vocabulary import write_draft_vocabulary
from paceline.drafting.checkpoints.writing import write_json, write_tensors
from paceline.training.batches import Batch, shift
from paceline.training.draft_vocabulary import DraftVocabulary
from paceline.training.learner import Learner, Loss, Progress, stored
from paceline.training.losses import mean_cross_entropy
from paceline.training.model_folder import write_model
from paceline.training.options import Curriculum, LayerSkipOptions
from paceline.training.target import TrainingTarget


class LayerSkipLearner(Learner):
    """A target that learns to exit early. The target's own weights change, or an adapter to them does.

    Args:
        target: is trained itself.
        vocabulary: what the early exit proposes.
        exit_layer: drafts come from layers [0, exit_layer).
        options: of dropout, loss and adapter.
    """

    token_ids: torch.Tensor

    def __init__(
        self, target: TrainingTarget, vocabulary: DraftVocabulary, exit_layer: int, options: LayerSkipOptions
    ) -> None:
        super().__init__()
        self.depth = options.depth
        self.vocabulary = vocabulary
        self.register_buffer("token_ids", vocabulary.token_ids, persistent=False)
        self.exit_layer = exit_layer
        self._options = options
        self._target = target
        self._outputs: list[torch.Tensor] = []
        for layer, module in enumerate(target.layers):
            module.register_forward_hook(self._after_layer(layer))
        self.model: nn.Module = target.model
        if options.lora_rank:
            # A heavy import that only adapters need.
            from peft import LoraConfig, get_peft_model

            config = LoraConfig(r=options.lora_rank, lora_alpha=options.lora_alpha, target_modules="all-linear")
            with warnings.catch_warnings():
                # peft asks the model for something under its old name.
                warnings.simplefilter("ignore", FutureWarning)
                self.model = get_peft_model(target.model, config)
        else:
            self.model.requires_grad_(requires_grad=True)

    def forward(self, batch: Batch, progress: Progress) -> Loss:
        """Cross entropy after the layers that are on."""
        labels = batch.shifted_tokens(1)
        learnt = batch.anchors(0)
        states = self._states(batch)
        total = states[0].new_zeros(())
        parts = {"exit": 0.0, "last": 0.0}
        weights = exit_weights(len(states), self.exit_layer, self._options, progress)
        for layer, weight in enumerate(weights):
            if weight > 0:
                loss = mean_cross_entropy(self._logits(states[layer][learnt]), labels[learnt])
                total = total + weight * loss
                parts["last" if layer == len(states) - 1 else "exit"] = loss.item()
        return Loss(total, tuple(parts.items()))

    def matches(self, batch: Batch) -> torch.Tensor:
        """Whether the best token that the early exit can propose is the whole model's own, along the answers."""
        asked = batch.anchors(0)
        states = self._states(batch)
        drafted = self._normed(states[self.exit_layer - 1][asked])
        head = self._target.live_head if self.vocabulary.is_full else self._target.live_head[self.token_ids]
        drafts = self.token_ids[functional.linear(drafted, head).argmax(dim=-1)]
        right = torch.zeros_like(asked)
        right[asked] = drafts == self._logits(states[-1][asked]).argmax(dim=-1)
        return torch.stack([shift(right, 1 + index) for index in range(self.depth)], dim=-1)

    def write(self, folder: Path, target_name: str) -> None:
        """Writes an adapter of `peft` and the exit layer, or the whole model; and the ids that drafts come from."""
        folder.mkdir(parents=True, exist_ok=True)
        write_draft_vocabulary(folder, None if self.vocabulary.is_full else self.vocabulary.d2t)
        if self._options.lora_rank:
            from peft import get_peft_model_state_dict

            weights = get_peft_model_state_dict(self.model)
            write_tensors(folder / "adapter_model.safetensors", {name: stored(rows) for name, rows in weights.items()})
            config: Any = self.model.peft_config["default"]  # type: ignore[index]
            config.base_model_name_or_path = target_name
            config.inference_mode = True
            config.save_pretrained(str(folder))
            write_json(folder / "config.json", {EXIT_LAYER: self.exit_layer, "base_model_name_or_path": target_name})
            return
        model = self._target.model
        setattr(model.config, EXIT_LAYER, self.exit_layer)
        write_model(folder, model, self._target.folder)

    def _states(self, batch: Batch) -> list[torch.Tensor]:
        """The residual stream after each layer # [batch, length, hidden_size] each."""
        self._outputs.clear()
        self._target.decoder(input_ids=batch.tokens, use_cache=False)
        states = list(self._outputs)
        self._outputs.clear()
        return states

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.linear(self._normed(rows), self._target.live_head)

    def _normed(self, rows: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self._target.final_norm(rows)
        return normed

    def _after_layer(self, layer: int) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor]:
        def keep(_module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            if self.training:
                chance = dropout_of(layer, len(self._target.layers), self._options.dropout)
                left_out = torch.rand(len(output), device=output.device) < chance
                output = torch.where(left_out[:, None, None], inputs[0], output)
            self._outputs.append(output)
            return output

        return keep


def dropout_of(layer: int, num_layers: int, highest: float) -> float:
    """Chance of leaving out a layer: none for the first, the highest for the last."""
    return highest * math.expm1(layer * math.log(2) / max(num_layers - 1, 1))


def exit_weights(num_layers: int, exit_layer: int, options: LayerSkipOptions, progress: Progress) -> list[float]:
    """Weights of the losses after each layer; they sum to 1."""
    last = num_layers - 1
    if options.curriculum is Curriculum.FIXED:
        fixed = [0.0] * num_layers
        fixed[exit_layer - 1] = options.exit_share
        fixed[last] = 1.0 - options.exit_share
        return fixed
    sums = [options.exit_scale * layer * (layer + 1) / 2 for layer in range(num_layers)]
    weights = [*sums[:last], last + (sums[last - 1] if last else 1.0)]
    if options.curriculum is Curriculum.ROTATIONAL:
        on = [(layer - progress.step) % options.rotation == 0 for layer in range(num_layers)]
    else:
        first = last - int(min(2.0 * progress.share, 1.0) * last)
        on = [layer >= first for layer in range(num_layers)]
    on[last] = True
    total = sum(weight for weight, wanted in zip(weights, on, strict=True) if wanted)
    return [weight / total if wanted else 0.0 for weight, wanted in zip(weights, on, strict=True)]
