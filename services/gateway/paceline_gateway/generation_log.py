"""The two log lines of a generation: when it starts and how it ended.

Neither has a prompt, generated text or token ids in it, unless prompts are to be logged.
"""

from __future__ import annotations

import logging
from typing import Any

from paceline.errors import PacelineError
from paceline.generation import Evidence
from paceline.text.request import ChatPrompt, Prompt, TextPrompt
from paceline_gateway.effects import Finish
from paceline_gateway.plan import GenerationPlan

logger = logging.getLogger(__name__)


class GenerationLog:
    """What the log tells of one generation: one "generation started", then one "generation ended".

    Args:
        plan: the generation; its `logged_prompt` turns text on.
    """

    def __init__(self, plan: GenerationPlan) -> None:
        self._plan = plan
        self._texts: list[str] = []
        self._ended = False

    def started(self) -> None:
        """The session actor begins."""
        plan = self._plan
        extra = {
            **self._names(),
            "epoch": plan.epoch,
            "prompt_tokens": len(plan.prompt),
            "max_tokens": plan.max_tokens,
            "num_draft_tokens": plan.num_draft_tokens,
        }
        if plan.resumption is not None:
            extra["resumed_at"] = plan.resumption.next_token
        if plan.logged_prompt is not None:
            extra["prompt"] = _readable(plan.logged_prompt)
        logger.info("generation started", extra=extra)

    def add(self, text: str) -> None:
        """The client gets more text."""
        if self._plan.logged_prompt is not None:
            self._texts.append(text)

    def ended(self, outcome: Finish | PacelineError, num_tokens: int, evidence: Evidence) -> None:
        """The client gets its terminal message.

        Args:
            outcome: what it says.
            num_tokens: generated tokens.
            evidence: what speculation did.
        """
        if isinstance(outcome, PacelineError):
            how, reason = outcome.code, outcome.message
        else:
            how, reason = outcome.reason.value, ""
        self._end(
            how,
            reason=reason,
            completion_tokens=num_tokens,
            target_passes=evidence.target_passes,
            accepted_tokens=evidence.accepted_tokens,
            draft_tokens=evidence.draft_tokens,
            total_ms=round(evidence.total_ms),
        )

    def close(self) -> None:
        """The actor ends, for whatever reason."""
        if not self._ended:
            self._end("cut_off", reason="the gateway ended it, or failed; an error before this line says which")

    def _end(self, outcome: str, **fields: Any) -> None:
        self._ended = True
        extra = {**self._names(), "outcome": outcome, "prompt_tokens": len(self._plan.prompt), **fields}
        if self._plan.logged_prompt is not None:
            extra["text"] = "".join(self._texts)
        logger.info("generation ended", extra=extra)

    def _names(self) -> dict[str, Any]:
        plan = self._plan
        return {"request_id": plan.request_id, "session": plan.session, "tenant": plan.tenant}


def _readable(prompt: Prompt) -> str:
    match prompt:
        case TextPrompt(text):
            return text
        case ChatPrompt(messages):
            return "\n".join(f"{message.role}: {message.content}" for message in messages)
        case _:
            return f"token ids {list(prompt.ids)}"
