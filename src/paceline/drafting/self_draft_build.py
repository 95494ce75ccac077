"""From settings to what drafts inside the verifier, in two steps.

The checkpoint says which hidden states the target has to keep, so it is read before the target is loaded; a head
borrows the target's embedding and head, so it is made afterwards.

    plan = plan_self_drafter(settings, target_folder)
    runner = load_runner(target_folder, options=replace(options, taps=plan.taps))
    engine = TargetEngine(runner, self_drafter=plan.build(runner, tokenizer))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.drafting.method import DraftMethod
from paceline.drafting.self_drafting import SelfDrafting
from paceline.drafting.tree_shape import DEFAULT_MEDUSA_TREE
from paceline.engine.features import FeatureTaps
from paceline.engine.self_draft import SelfDrafter
from paceline.engine.shared_parts import SharedParts
from paceline.errors import ConfigurationError
from paceline.head_source import resolve_head
from paceline.huge_pages import move_to_huge_pages
from paceline.method_names import SELF_DRAFT_METHODS
from paceline.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class SelfDraftSettings:
    """How a verifier drafts by itself.

    Attributes:
        method: one of `SELF_DRAFT_METHODS`.
        model: the method's checkpoint: a folder or a hub id.
        kv_bytes: memory for key/value rows of an EAGLE head.
        eagle_topk: candidates per node of an EAGLE tree; 1 drafts chains.
        num_draft_tokens: most nodes of an EAGLE tree.
        medusa_tree: shape of a Medusa tree, as `TreeShape.parse` reads it.
        exit_layer: `layerskip` drafts with layers [0, exit_layer); None for what the target's config.json says.
        max_draft_tokens: nodes of a block that the target judges; a larger tree is refused.
        max_sessions: sessions at once; 0 for any number.
        prompt_lookup_min: shortest suffix that `ngram` looks up.
        prompt_lookup_max: longest one.
        method_setting, model_setting: what the user calls `method` and `model`, for messages.
    """

    method: str
    model: str = ""
    kv_bytes: int = 256 << 20
    eagle_topk: int = 1
    num_draft_tokens: int = 16
    medusa_tree: str = DEFAULT_MEDUSA_TREE
    exit_layer: int | None = None
    max_draft_tokens: int = 16
    max_sessions: int = 0
    prompt_lookup_min: int = 3
    prompt_lookup_max: int = 5
    method_setting: str = "self_draft_method"
    model_setting: str = "self_draft_model"


class LendsParts(Protocol):
    """A target that is loaded."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation."""

    def shared_parts(self) -> SharedParts:
        """What a drafting head borrows."""


@dataclass(frozen=True, slots=True)
class SelfDraftPlan:
    """A method whose checkpoint is read.

    Attributes:
        taps: hidden states that the target has to keep; None for none.
        make: the method, given the target and its tokenizer.
    """

    taps: FeatureTaps | None
    make: Callable[[LendsParts, Tokenizer], DraftMethod]

    def build(self, target: LendsParts, tokenizer: Tokenizer) -> SelfDrafter:
        """What drafts for the target.

        Args:
            target: loaded with `taps`.
            tokenizer: of the target.

        Raises:
            ConfigurationError, ModelError: checkpoint and target do not fit.
        """
        drafter = SelfDrafting(self.make(target, tokenizer))
        move_to_huge_pages(drafter.weights_bytes)
        return drafter


def plan_self_drafter(settings: SelfDraftSettings, target_folder: Path) -> SelfDraftPlan:
    """Reads what is needed to draft.

    Args:
        settings: how to draft.
        target_folder: of the target, which need not be loaded yet.

    Raises:
        ConfigurationError: the method is unknown, its checkpoint is not named or is another method's, or a setting is
            wrong.
        NotFound, Unavailable: the checkpoint is not there, or cannot be fetched.
        ModelError: the checkpoint cannot be loaded, or was made for another target.
    """
    if settings.method not in SELF_DRAFT_METHODS:
        raise ConfigurationError(
            f"a verifier does not draft with {settings.method!r}: name one of {', '.join(SELF_DRAFT_METHODS)}",
            field=settings.method_setting,
        )
    return _PLANS[settings.method](settings, target_folder)


def _plan_ngram(settings: SelfDraftSettings, _target_folder: Path) -> SelfDraftPlan:
    from paceline.drafting.ngram import NgramMethod

    method = NgramMethod(settings.prompt_lookup_min, settings.prompt_lookup_max)
    return SelfDraftPlan(None, lambda _target, _tokenizer: method)


def _plan_medusa(settings: SelfDraftSettings, target_folder: Path) -> SelfDraftPlan:
    from paceline.drafting.checkpoints.medusa import load_medusa
    from paceline.drafting.checkpoints.target_facts import read_target_facts
    from paceline.drafting.medusa import MedusaMethod
    from paceline.drafting.tree_shape import DEFAULT_ACCURACIES, TreeShape

    checkpoint = load_medusa(_checkpoint_folder(settings), read_target_facts(target_folder))
    num_heads = checkpoint.config.num_heads
    accuracies = checkpoint.head_accuracies or DEFAULT_ACCURACIES[:num_heads]
    tree = TreeShape.parse(settings.medusa_tree, accuracies).crop(num_heads)
    _check_size(settings, len(tree.nodes), "medusa_tree", settings.medusa_tree)

    def make(target: LendsParts, tokenizer: Tokenizer) -> DraftMethod:
        return MedusaMethod(
            checkpoint,
            target.shared_parts(),
            tree=tree,
            vocab_limit=tokenizer.vocab_size,
            eos_token_ids=target.eos_token_ids,
            tokenizer_hash=tokenizer.fingerprint,
            vocabulary=tokenizer.vocabulary,
        )

    return SelfDraftPlan(FeatureTaps(), make)


def _plan_eagle(settings: SelfDraftSettings, target_folder: Path) -> SelfDraftPlan:
    from paceline.drafting.checkpoints.eagle import load_eagle
    from paceline.drafting.checkpoints.target_facts import read_target_facts
    from paceline.drafting.eagle import EagleMethod, make_taps

    _check_size(settings, settings.num_draft_tokens, "num_draft_tokens", str(settings.num_draft_tokens))
    folder = _checkpoint_folder(settings)
    checkpoint = load_eagle(folder, read_target_facts(target_folder))
    if checkpoint.config.kind != settings.method:
        raise ConfigurationError(
            f"{folder} holds a head of the kind {checkpoint.config.kind}: set {settings.method_setting} to that, or "
            f"{settings.model_setting} to a head of the kind {settings.method}",
            field=settings.method_setting,
        )

    def make(target: LendsParts, tokenizer: Tokenizer) -> DraftMethod:
        return EagleMethod(
            checkpoint,
            target.shared_parts(),
            kv_bytes=settings.kv_bytes,
            eagle_topk=settings.eagle_topk,
            num_draft_tokens=settings.num_draft_tokens,
            max_sessions=settings.max_sessions,
            vocab_limit=tokenizer.vocab_size,
            eos_token_ids=target.eos_token_ids,
            tokenizer_hash=tokenizer.fingerprint,
            vocabulary=tokenizer.vocabulary,
        )

    return SelfDraftPlan(make_taps(checkpoint), make)


def _plan_layerskip(settings: SelfDraftSettings, target_folder: Path) -> SelfDraftPlan:
    from paceline.drafting.checkpoints.layerskip import load_layerskip
    from paceline.drafting.checkpoints.target_facts import read_target_facts
    from paceline.drafting.layerskip import LayerSkipMethod
    from paceline.engine.native.native_runner import NativeRunner

    if settings.model:
        raise ConfigurationError(
            "layerskip drafts with the target itself: give the model or adapter that was trained for it as model, and "
            f"leave {settings.model_setting} empty",
            field=settings.model_setting,
        )
    checkpoint = load_layerskip(target_folder, read_target_facts(target_folder), settings.exit_layer)

    def make(target: LendsParts, tokenizer: Tokenizer) -> DraftMethod:
        if not isinstance(target, NativeRunner):
            raise ConfigurationError(
                "layerskip inside a verifier needs the native runner, which does not run this target: draft with "
                "another method, or in a drafter service",
                field=settings.method_setting,
            )
        return LayerSkipMethod(
            target,
            exit_layer=checkpoint.exit_layer,
            target_ids=checkpoint.target_ids,
            vocab_limit=tokenizer.vocab_size,
            eos_token_ids=target.eos_token_ids,
            tokenizer_hash=tokenizer.fingerprint,
            vocabulary=tokenizer.vocabulary,
        )

    return SelfDraftPlan(None, make)


def _check_size(settings: SelfDraftSettings, num_nodes: int, field: str, value: str) -> None:
    if num_nodes > settings.max_draft_tokens:
        raise ConfigurationError(
            f"{field} {value} makes blocks of {num_nodes} tokens, of which the target judges max_draft_tokens "
            f"({settings.max_draft_tokens}): raise max_draft_tokens or lower {field}",
            field=field,
        )


def _checkpoint_folder(settings: SelfDraftSettings) -> Path:
    if not settings.model:
        raise ConfigurationError(
            f"the method {settings.method} needs a checkpoint that was trained for this target: set "
            f"{settings.model_setting} to its folder or hub id, such as one that `paceline train {settings.method}` "
            "wrote",
            field=settings.model_setting,
        )
    return resolve_head(settings.model, field=settings.model_setting)


_PLANS: Mapping[str, Callable[[SelfDraftSettings, Path], SelfDraftPlan]] = {
    "ngram": _plan_ngram,
    "medusa": _plan_medusa,
    "eagle": _plan_eagle,
    "eagle3": _plan_eagle,
    "layerskip": _plan_layerskip,
}
