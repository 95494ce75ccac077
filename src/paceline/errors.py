"""The one error tree. Every class knows its stable code and its gRPC and HTTP status.

Services raise these; the doors translate them with `to_failure` and the two status attributes, and clients get the
same class
back with `from_failure`. Messages say what happened and what to do about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as it travels: `code` names the class, `field` the request field at fault (empty if none is)."""

    code: str
    message: str
    field: str = ""


class PacelineError(Exception):
    """Base of all errors that a user may see.

    Args:
        message: what happened and what to do.
        field: name of the request field or setting at fault, if one is.
    """

    code: ClassVar[str] = "internal"
    grpc_status: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    retry_after_s: ClassVar[int | None] = None
    """After how many seconds a client may try again; None where the same request fails again."""

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.field = field

    def to_failure(self) -> Failure:
        """The error as it travels on the wire."""
        return Failure(self.code, self.message, self.field)


class InvalidArgument(PacelineError):
    """A request field has a value that can never work; names the field and the limit."""

    code = "invalid_argument"
    grpc_status = "INVALID_ARGUMENT"
    http_status = 400


class NotFound(PacelineError):
    """The named model or session does not exist, or belongs to someone else."""

    code = "not_found"
    grpc_status = "NOT_FOUND"
    http_status = 404


class Unauthenticated(PacelineError):
    """No valid API key came with the request."""

    code = "unauthenticated"
    grpc_status = "UNAUTHENTICATED"
    http_status = 401


class SessionBusy(PacelineError):
    """A generation is running on this session already."""

    code = "session_busy"
    grpc_status = "ABORTED"
    http_status = 409


class Fenced(PacelineError):
    """Somebody else owns the session, as a rule under a newer epoch; this owner must stop."""

    code = "fenced"
    grpc_status = "ABORTED"
    http_status = 409


class CapacityExceeded(PacelineError):
    """A bounded resource is full: a mailbox, the KV pool or the session slots. Try again later."""

    code = "capacity_exceeded"
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 429
    retry_after_s = 1


class PayloadTooLarge(PacelineError):
    """The request has more bytes than the door accepts."""

    code = "payload_too_large"
    grpc_status = "RESOURCE_EXHAUSTED"
    http_status = 413


class Unavailable(PacelineError):
    """A part that the request needs cannot be reached."""

    code = "unavailable"
    grpc_status = "UNAVAILABLE"
    http_status = 503
    retry_after_s = 1


class DeadlineExceeded(PacelineError):
    """The request's time is over."""

    code = "deadline_exceeded"
    grpc_status = "DEADLINE_EXCEEDED"
    http_status = 504


class Cancelled(PacelineError):
    """The client has left or the server is shutting down."""

    code = "cancelled"
    grpc_status = "CANCELLED"
    http_status = 499


class ModelError(PacelineError):
    """The model cannot do this: not loadable, not able to roll back, or a row of its output is not finite."""

    code = "model_error"
    grpc_status = "FAILED_PRECONDITION"
    http_status = 500


class ConfigurationError(PacelineError):
    """A setting is wrong or two parts do not fit together; found at start."""

    code = "configuration_error"
    grpc_status = "FAILED_PRECONDITION"
    http_status = 500


class DataLoss(PacelineError):
    """Recorded and presented tokens of a session differ; it cannot go on."""

    code = "data_loss"
    grpc_status = "DATA_LOSS"
    http_status = 500


def _tree(root: type[PacelineError]) -> dict[str, type[PacelineError]]:
    classes = {root.code: root}
    for child in root.__subclasses__():
        classes |= _tree(child)
    return classes


def from_failure(failure: Failure) -> PacelineError:
    """The error that a `Failure` names; an unknown code becomes the base class."""
    error_class = _tree(PacelineError).get(failure.code, PacelineError)
    return error_class(failure.message, field=failure.field)
