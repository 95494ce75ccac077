"""Who asks: what a door knows of a client before it reads the request."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

REQUEST_ID_HEADER = "x-request-id"
"""Name of the header, and of the metadata on gRPC, in which a request's name travels both ways."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Caller:
    """A client of the gateway.

    Attributes:
        tenant: owner of the sessions that it makes, from its API key; empty where no keys are required.
        request_id: name of this request, in logs and in the answer.
    """

    tenant: str = ""
    request_id: str = ""


def request_id_of(sent: str | None) -> str:
    """The name of a request: the one that the client sent, or a new one if it sent none that fits a log.

    Args:
        sent: value of the header `x-request-id`; None if there was none.
    """
    return sent if sent is not None and _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex
