"""Loads a drafter and its target into this process, for `paceline doctor --drafter --target`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.adapted_model import names_exit_layer
from paceline.cli.smoke_acceptance import PROMPTS, DepthRecorder
from paceline.drafting.build import MethodSettings, RunnerKind, build_method
from paceline.drafting.checkpoints.draft_vocabulary import load_draft_vocabulary
from paceline.drafting.checkpoints.eagle import EagleCheckpoint, load_eagle
from paceline.drafting.checkpoints.layerskip import LayerSkipCheckpoint, load_layerskip
from paceline.drafting.checkpoints.layouts import Layout, detect_layout
from paceline.drafting.checkpoints.medusa import MedusaCheckpoint, load_medusa
from paceline.drafting.checkpoints.target_facts import TargetFacts, read_target_facts
from paceline.drafting.self_draft_build import SelfDraftPlan, SelfDraftSettings, plan_self_drafter
from paceline.engine.load_runner import load_runner
from paceline.engine.runner_options import RunnerOptions
from paceline.engine.target import TargetEngine
from paceline.model_source import with_adapter
from paceline.text.chat_template import ChatTemplate
from paceline.text.request import ChatMessage
from paceline.text.tokenizer import Tokenizer

KV_BYTES = 256 << 20
"""For the rows of each model: a few hundred tokens of the largest."""


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """What was read of a drafter; its method loads the weights again.

    Attributes:
        folder: where it came from.
        layout: of the checkpoint.
        method: that uses it.
        sizes: in words.
    """

    folder: Path
    layout: Layout
    method: str
    sizes: str


def load_drafter(folder: Path, target: TargetFacts) -> LoadedDrafter:
    """Reads a drafter with the strict loader of its layout.

    Raises:
        ModelError, ConfigurationError: it cannot be read, or is not for this target.
    """
    layout = detect_layout(folder)
    method = layout.method
    if method == "draft_model" and names_exit_layer(folder):
        method = "layerskip"
    return LoadedDrafter(folder, layout, method, _sizes(folder, method, target))


@dataclass(frozen=True, slots=True)
class Pair:
    """A target that drafts by a drafter.

    Attributes:
        engine: the target.
        recorder: its drafter, which remembers the blocks.
    """

    engine: TargetEngine
    recorder: DepthRecorder


def build_pair(
    drafter: LoadedDrafter, target: Path, tokenizer: Tokenizer, *, device: str, num_draft_tokens: int
) -> Pair:
    """Loads the target and makes it draft by a drafter, in chains: what comes out can be compared between methods.

    Args:
        drafter: as it was read.
        target: folder of the target; a LayerSkip adapter is added to it and is then a part of it, and a whole model
            that exits early takes its place.
        tokenizer: the target's.
        device: where both run.
        num_draft_tokens: drafts per block.

    Raises:
        PacelineError: one of them cannot be loaded, or they do not fit together.
    """
    if drafter.layout is Layout.LAYERSKIP_ADAPTER:
        target = with_adapter(target, drafter.folder)
    elif drafter.method == "layerskip":
        target = drafter.folder
    plan = _plan(drafter, target, device, num_draft_tokens)
    runner = load_runner(target, device=device, options=RunnerOptions(kv_bytes=KV_BYTES, taps=plan.taps))
    recorder = DepthRecorder(plan.build(runner, tokenizer))
    engine = TargetEngine(
        runner, eos_token_ids=runner.eos_token_ids, vocab_size=tokenizer.vocab_size, self_drafter=recorder
    )
    return Pair(engine, recorder)


def encode_prompts(target: Path, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The prompts of the check, as messages to a target that has a chat template."""
    template = ChatTemplate.load(target, tokenizer.special_tokens)
    if not template.available:
        return [tokenizer.encode(prompt) for prompt in PROMPTS]
    texts = [template.render([ChatMessage("user", prompt)]) for prompt in PROMPTS]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def _plan(drafter: LoadedDrafter, target: Path, device: str, num_draft_tokens: int) -> SelfDraftPlan:
    if drafter.method == "draft_model":
        settings = MethodSettings(
            draft_model=str(drafter.folder), runner=RunnerKind.TORCH, device=device, kv_bytes=KV_BYTES
        )
        return SelfDraftPlan(None, lambda _target, _tokenizer: build_method(settings))
    return plan_self_drafter(
        SelfDraftSettings(
            method=drafter.method,
            # Such a target drafts by itself.
            model="" if drafter.method == "layerskip" else str(drafter.folder),
            kv_bytes=KV_BYTES,
            eagle_topk=1,
            num_draft_tokens=num_draft_tokens,
            medusa_tree=f"chain:{num_draft_tokens}",
        ),
        target,
    )


def _sizes(folder: Path, method: str, target: TargetFacts) -> str:
    """Loads a drafter and says in words how large it is."""
    match method:
        case "eagle" | "eagle3":
            return _eagle_sizes(load_eagle(folder, target))
        case "medusa":
            return _medusa_sizes(load_medusa(folder, target))
        case "layerskip":
            return _layerskip_sizes(load_layerskip(folder, target), target)
    facts = read_target_facts(folder)
    trimmed = load_draft_vocabulary(folder, target.vocab_size) is not None
    ids = f"{facts.vocab_size} of {target.vocab_size} ids" if trimmed else f"{facts.vocab_size} ids"
    return f"{facts.num_layers} layers of {facts.hidden_size}, {ids}"


def _eagle_sizes(head: EagleCheckpoint) -> str:
    config = head.config
    parts = [
        f"hidden size {config.hidden_size}",
        f"{config.num_heads} heads ({config.num_kv_heads} for keys and values) of {config.head_dim}",
        f"{config.draft_vocab_size} of {config.vocab_size} ids",
    ]
    if config.aux_layers:
        parts.append(f"features enter layers {', '.join(map(str, config.aux_layers))} of the target")
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "fc_bias", "input_layernorm")
    parts += [name for name in names if getattr(config, name)]
    return ", ".join([*parts, f"{head.num_bytes / 1e6:.1f} MB"])


def _medusa_sizes(head: MedusaCheckpoint) -> str:
    config = head.config
    own = "the target's head" if config.shared_head else f"heads of {config.vocab_size} ids"
    layers = f"{config.num_layers} residual layer{'s' if config.num_layers > 1 else ''}"
    return f"{config.num_heads} heads, {layers} of {config.hidden_size} each, {own}, {head.num_bytes / 1e6:.1f} MB"


def _layerskip_sizes(checkpoint: LayerSkipCheckpoint, target: TargetFacts) -> str:
    parts = [f"the first {checkpoint.exit_layer} of {target.num_layers} layers"]
    if checkpoint.adapter is not None:
        pairs = checkpoint.adapter.pairs.values()
        ranks = sorted({len(pair.down) for pair in pairs})
        parts.append(f"LoRA of rank {', '.join(map(str, ranks))} on {len(pairs)} weights")
    if checkpoint.target_ids is not None:
        parts.append(f"drafts of {len(checkpoint.target_ids)} ids")
    return ", ".join(parts)
