"""A head in a drafter: it gets the target's hidden states from the verifiers, and its embedding and head from files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.drafting.method import DraftMethod
from paceline.drafting.self_draft_build import SelfDraftSettings, plan_self_drafter
from paceline.engine.loader import ModelDtype
from paceline.engine.shared_parts import SharedParts, load_shared_parts
from paceline.errors import ConfigurationError
from paceline.huge_pages import move_to_huge_pages
from paceline.model_source import Progress, resolve
from paceline.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from paceline.drafting.build import MethodSettings


@dataclass(frozen=True, slots=True)
class _Lent:
    """Parts of a target that is not loaded as a whole."""

    eos_token_ids: tuple[int, ...]
    parts: SharedParts

    def shared_parts(self) -> SharedParts:
        """What a drafting head borrows."""
        return self.parts


def build_pool_head(name: str, settings: MethodSettings, progress: Progress) -> DraftMethod:
    """Loads a head, and of its target no more than what it borrows.

    Args:
        name: `medusa`, `eagle` or `eagle3`.
        settings: how to draft.
        progress: told what is being done when it takes long.

    Raises:
        ConfigurationError: `draft_model` or `draft_head` is missing, or they do not fit.
        NotFound, Unavailable, ModelError: one of them cannot be found, fetched or loaded.
    """
    for field, value in (("draft_model", settings.draft_model), ("draft_head", settings.draft_head)):
        if not value:
            raise ConfigurationError(
                f"the method {name} needs the target and a head that was trained for it: set draft_model to the "
                "target's folder and draft_head to the head's",
                field=field,
            )
    folder = resolve(settings.draft_model, progress=progress)
    plan = plan_self_drafter(
        SelfDraftSettings(
            method=name,
            model=settings.draft_head,
            kv_bytes=settings.kv_bytes,
            eagle_topk=settings.eagle_topk,
            num_draft_tokens=settings.max_draft_tokens,
            medusa_tree=settings.medusa_tree,
            max_draft_tokens=settings.max_draft_tokens,
            max_sessions=settings.max_sessions,
            method_setting="method",
            model_setting="draft_head",
        ),
        folder,
    )
    tokenizer = Tokenizer.load(folder)
    parts = load_shared_parts(folder, dtype=ModelDtype(settings.dtype), device=settings.device)
    method = plan.make(_Lent(tokenizer.eos_token_ids, parts), tokenizer)
    move_to_huge_pages(method.info.weights_bytes)
    return method
