"""What the log says of a request that HTTP has refused or failed: its path and status, and nothing of its content."""

from __future__ import annotations

import logging
import re
from typing import Final

from starlette.types import Scope

from paceline.errors import PacelineError
from paceline.runtime.refusals import CUT, log_refusal
from paceline_gateway.http.request_fields import MetricsWish, Speculation, StreamOptions
from paceline_gateway.http.requests import ChatCompletionRequest, CompletionRequest, Message, TextPart

logger = logging.getLogger(__name__)

_POLLED: Final = ("/ready", "/health")
"""Asked every few seconds: that the gateway is not ready is told once, by what is missing."""
MAX_PATH_CHARS = 128
_MODELS: Final = (
    ChatCompletionRequest,
    CompletionRequest,
    Message,
    MetricsWish,
    Speculation,
    StreamOptions,
    TextPart,
)
_NO_OPS: Final = (ChatCompletionRequest.no_ops, CompletionRequest.no_ops, Message.no_ops, StreamOptions.no_ops)
_OUR_NAMES: Final = frozenset(
    [name for model in _MODELS for name in model.model_fields]
    + [name for names in _NO_OPS for name in names]
    + ["authorization", "chat", "session"]
)


def tell_refused(scope: Scope, error: PacelineError) -> None:
    """Writes the line; those of polls for people who look closely only.

    Args:
        scope: the request.
        error: what its client was told.
    """
    path = scope["path"][:MAX_PATH_CHARS]
    level = logging.DEBUG if path in _POLLED else None
    log_refusal(logger, error, field=shown_field(error.field), level=level, path=path, status=error.http_status)


def shown_field(field: str) -> str:
    """A field's path up to the first name that the client has made up."""
    shown: list[str] = []
    for name in field.split(".") if field else ():
        if re.sub(r"(\[\d+\])+$", "", name) not in _OUR_NAMES:
            return ".".join([*shown, CUT])
        shown.append(name)
    return ".".join(shown)
