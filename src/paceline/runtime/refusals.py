"""The log line of a request that a door has turned away or failed: "request refused".

It says what was wrong without what the client sent. Messages may repeat that, in quotes or in the words of a library
that read it, so both are cut out.
"""

from __future__ import annotations

import logging
import re

from paceline.errors import PacelineError

REQUEST_REFUSED = "request refused"
CUT = "…"
_MAX_REASON_CHARS = 300
# A quote that follows a letter is an apostrophe. One that is never closed hides all the rest.
_QUOTED = re.compile(r"""(?<!\w)(?:'(?:[^'\\]|\\.)*(?:'|$)|"(?:[^"\\]|\\.)*(?:"|$))""", re.DOTALL)


def log_refusal(
    logger: logging.Logger, error: PacelineError, *, field: str | None = None, level: int | None = None, **where: object
) -> None:
    """Writes the line; who asked comes from the log's context.

    Args:
        logger: of the door.
        error: what the client was told.
        field: the error's field as it may be shown; None if it is one of our own names.
        level: None for INFO where the request is at fault, WARNING where the service is.
        where: what was called and with which status it was answered.
    """
    field = error.field if field is None else field
    if level is None:
        level = logging.WARNING if error.http_status >= 500 else logging.INFO
    reason = safe_reason(error, field)
    logger.log(level, REQUEST_REFUSED, extra={**where, "code": error.code, "field": field, "reason": reason})


def safe_reason(error: PacelineError, field: str) -> str:
    """The error's message less everything that may be the client's.

    Args:
        error: what went wrong.
        field: its field as it may be shown.
    """
    reason, context = error.message, error.__context__
    if error.field and field != error.field:
        reason = reason.replace(error.field, field)
    while context is not None:
        # What a library said of the request, such as the words of a chat template.
        if not isinstance(context, PacelineError) and str(context):
            reason = reason.replace(str(context), CUT)
        context = context.__context__
    return _QUOTED.sub(CUT, reason)[:_MAX_REASON_CHARS]
