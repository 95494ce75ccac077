"""Work for the owner of a model that is no command: done between two passes, and somebody waits for its result."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.errors import PacelineError

logger = logging.getLogger(__name__)

INTERNAL_MESSAGE = "internal error in the replica; its log has the details"


@dataclass(frozen=True, slots=True)
class SideWork:
    """Something to do, and who waits for it.

    Attributes:
        work: what to do, quickly.
        answer: gets its result or error.
    """

    work: Callable[[], Any]
    answer: asyncio.Future[Any]

    def do(self) -> None:
        """Does it, unless nobody waits any more. Never raises."""
        if self.answer.done():
            return
        try:
            self.answer.set_result(self.work())
        except PacelineError as error:
            self.answer.set_exception(error)
        except Exception:
            logger.exception("work between two passes failed unexpectedly")
            self.answer.set_exception(PacelineError(INTERNAL_MESSAGE))

    def refuse(self, reason: PacelineError) -> None:
        """It will not be done."""
        if not self.answer.done():
            self.answer.set_exception(reason)
