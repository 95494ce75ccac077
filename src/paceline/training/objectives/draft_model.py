"""A small language model distilled from the target: some of the target's layers, trained to say what it says.

It begins as the target with most layers left out. With a trimmed vocabulary it knows the answers' most frequent tokens
only, in its embedding as in its head; every other token is fed as one that the answers never use (`other_token_id` in
its configuration), and `draft_vocabulary.safetensors` says which target id each of its ids is. Loss: cross entropy
against the answers, and against what the target says of the same places.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from paceline.drafting.checkpoints.draft_vocabulary import write_draft_vocabulary
from paceline.drafting.checkpoints.writing import write_json
from paceline.errors import InvalidArgument
from paceline.training.batches import Batch, shift
from paceline.training.draft_vocabulary import DraftVocabulary
from paceline.training.learner import Learner, Loss, Progress
from paceline.training.losses import mean_cross_entropy, mean_soft_cross_entropy
from paceline.training.model_folder import write_model
from paceline.training.options import DraftModelOptions
from paceline.training.target import FINAL, TrainingTarget

_LAYER = re.compile(r"^(.*\.layers\.)(\d+)(\..*)$")
_PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")
"""Lists in a configuration that have an entry for each layer."""


class DraftModelLearner(Learner):
    """A draft model that learns.

    Args:
        target: gives the weights to begin with.
        vocabulary: what it knows.
        other: target id that stands for all tokens it does not know; in the vocabulary.
        kept: the target's layers that it begins with, in this order.
        options: of the loss.
    """

    layers = (FINAL,)
    target_head: torch.Tensor
    token_ids: torch.Tensor
    draft_ids: torch.Tensor

    def __init__(
        self,
        target: TrainingTarget,
        vocabulary: DraftVocabulary,
        other: int,
        kept: tuple[int, ...],
        options: DraftModelOptions,
    ) -> None:
        super().__init__()
        self.depth = options.depth
        self.vocabulary = vocabulary
        self._target_folder = target.folder
        self._eos_token_ids = target.eos_token_ids
        self._target_weight = options.target_weight
        self._other = int(vocabulary.draft_ids()[other])
        self.model = _cut_model(target, vocabulary, kept)
        self.register_buffer("target_head", _rows(target.head, vocabulary).float(), persistent=False)
        self.register_buffer("token_ids", vocabulary.token_ids, persistent=False)
        self.register_buffer("draft_ids", vocabulary.draft_ids(), persistent=False)

    def forward(self, batch: Batch, progress: Progress) -> Loss:
        """Both cross entropies, weighted."""
        labels = self.draft_ids[batch.shifted_tokens(1)]
        learnt = batch.anchors(0) & (labels >= 0)
        logits = self._logits(batch, learnt)
        with torch.no_grad():
            wanted = functional.linear(batch.features[0][learnt], self.target_head)
        hard = mean_cross_entropy(logits, labels[learnt])
        soft = mean_soft_cross_entropy(logits, wanted)
        total = (1 - self._target_weight) * hard + self._target_weight * soft
        return Loss(total, (("answers", hard.item()), ("target", soft.item())))

    def matches(self, batch: Batch) -> torch.Tensor:
        """Whether the best token after each of the answer's beginnings is right."""
        asked = batch.anchors(0)
        right = torch.zeros_like(asked)
        best = self.token_ids[self._logits(batch, asked).argmax(dim=-1)]
        right[asked] = best == batch.shifted_tokens(1)[asked]
        return torch.stack([shift(right, 1 + index) for index in range(self.depth)], dim=-1)

    def write(self, folder: Path, target_name: str) -> None:
        """Writes a model folder of `transformers`, with the target's tokenizer."""
        config = self.model.config
        config.distilled_from = target_name
        if not self.vocabulary.is_full:
            config.other_token_id = self._other
        write_model(folder, self.model, self._target_folder)
        write_draft_vocabulary(folder, None if self.vocabulary.is_full else self.vocabulary.d2t)
        if not self.vocabulary.is_full:
            write_json(folder / "generation_config.json", {"eos_token_id": list(self._eos_token_ids)})

    def _logits(self, batch: Batch, wanted: torch.Tensor) -> torch.Tensor:
        ids = self.draft_ids[batch.tokens]
        ids = torch.where(ids < 0, self._other, ids)
        decoder = self.model.get_decoder()  # type: ignore[no-untyped-call]
        states = decoder(input_ids=ids, use_cache=False).last_hidden_state
        logits: torch.Tensor = self.model.get_output_embeddings()(states[wanted])  # type: ignore[no-untyped-call]
        return logits


def kept_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """The target's layers that an option names; when it names none, the first and the last.

    Raises:
        InvalidArgument: the target has no such layer.
    """
    if not text:
        return (0, num_layers - 1) if num_layers > 1 else (0,)
    parts = [part.strip() for part in text.split(",")]
    layers = tuple(int(part) for part in parts if part.isdecimal() and int(part) < num_layers)
    if len(layers) != len(parts):
        raise InvalidArgument(
            f"keep_layers is {text!r}: give numbers below {num_layers}, such as 0,{num_layers - 1}", field="keep_layers"
        )
    return layers


def _cut_model(target: TrainingTarget, vocabulary: DraftVocabulary, kept: tuple[int, ...]) -> PreTrainedModel:
    config = _cut_config(target.model.config, len(vocabulary), kept)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32, attn_implementation="sdpa"
    )
    places = {layer: [place for place, index in enumerate(kept) if index == layer] for layer in kept}
    tables = [target.embedding.data_ptr(), target.head.data_ptr()]
    state: dict[str, torch.Tensor] = {}
    for name, value in target.model.state_dict().items():
        rows = _rows(value, vocabulary) if value.data_ptr() in tables else value
        match = _LAYER.match(name)
        names = [f"{match[1]}{place}{match[3]}" for place in places.get(int(match[2]), ())] if match else [name]
        state |= {renamed: rows.float().cpu() for renamed in names}
    model.load_state_dict(state)
    model.tie_weights()
    return model


def _cut_config(whole: PreTrainedConfig, vocab_size: int, kept: tuple[int, ...]) -> PreTrainedConfig:
    config = copy.deepcopy(whole)
    text = config.get_text_config()
    text.num_hidden_layers = len(kept)
    for name in _PER_LAYER:
        if getattr(text, name, None):
            setattr(text, name, [getattr(whole.get_text_config(), name)[index] for index in kept])
    if vocab_size != text.vocab_size:
        text.vocab_size = vocab_size
        # Their ids would be the target's; which ids end an answer says generation_config.json, in the target's ids.
        text.bos_token_id = text.eos_token_id = text.pad_token_id = None
    return config


def _rows(table: torch.Tensor, vocabulary: DraftVocabulary) -> torch.Tensor:
    return table if vocabulary.is_full else table[vocabulary.token_ids.to(table.device)]
