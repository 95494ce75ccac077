"""Who asks: what a door knows of a client before it reads the request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """A client of the gateway.

    Attributes:
        tenant: owner of the sessions that it makes, from its API key; empty where no keys are required.
        request_id: name of this request, in logs and in the answer.
    """

    tenant: str = ""
    request_id: str = ""
