"""The error tree on gRPC, both ways.

A `PacelineError` leaves as a `google.rpc.Status` in the standard `grpc-status-details-bin` trailer: an `ErrorInfo`
whose reason is the error's code, where a field is at fault a `BadRequest` that names it, and where trying again helps a
`RetryInfo` that says when. Clients of any language read them; `error_from_rpc` turns them into the same class again.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf import duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from paceline.errors import (
    Cancelled,
    DeadlineExceeded,
    Failure,
    InvalidArgument,
    PacelineError,
    Unavailable,
    from_failure,
)
from paceline.runtime.refusals import log_refusal

logger = logging.getLogger(__name__)

ERROR_DOMAIN = "paceline"
_DETAILS_KEY = "grpc-status-details-bin"
_MAX_MESSAGE_CHARS = 2000
"""Trailers travel as headers, of which peers take 8 KiB."""


def status_to_pb(error: PacelineError) -> status_pb2.Status:
    """The error as a `google.rpc.Status`."""
    message = error.message[:_MAX_MESSAGE_CHARS]
    status = status_pb2.Status(code=grpc.StatusCode[error.grpc_status].value[0], message=message)
    info = error_details_pb2.ErrorInfo(reason=error.code, domain=ERROR_DOMAIN)
    if error.field:
        info.metadata["field"] = error.field
    status.details.add().Pack(info)
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration(seconds=error.retry_after_s)
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: PacelineError) -> None:
    """Ends an rpc with the error's status; raises grpc's own abort exception."""
    status = status_to_pb(error)
    trailer = ((_DETAILS_KEY, status.SerializeToString()),)
    await context.abort(grpc.StatusCode[error.grpc_status], status.message, trailer)


def error_from_rpc(error: grpc.aio.AioRpcError) -> PacelineError:
    """The error that an rpc's status means: the class that was raised on the other side, or the nearest one."""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            failure = _failure_from_status(status_pb2.Status.FromString(value))
            if failure is not None:
                return from_failure(failure)
    message = error.details() or error.code().name
    match error.code():
        case grpc.StatusCode.UNAVAILABLE:
            return Unavailable(message)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(message)
        case grpc.StatusCode.CANCELLED:
            return Cancelled(message)
    by_status = {child.grpc_status: child.code for child in PacelineError.__subclasses__()[::-1]}
    return from_failure(Failure(by_status.get(error.code().name, PacelineError.code), message))


def is_peers_word(error: grpc.aio.AioRpcError) -> bool:
    """Whether the other side has raised it, and not the connection to it or something in between."""
    return any(key == _DETAILS_KEY for key, _ in error.trailing_metadata() or ())


def _failure_from_status(status: status_pb2.Status) -> Failure | None:
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
            return Failure(info.reason, status.message, info.metadata.get("field", ""))
    return None


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Lets servicers raise `PacelineError`; anything else becomes INTERNAL without its text, and is logged.

    The single request of an rpc is parsed in here too, so that bytes which are no message are refused like any other
    bad request. The frames of a stream are parsed by whoever reads them.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wraps the handler of a call, whatever its shape."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return handler
        if handler.response_streaming:
            kind = "stream_stream" if handler.request_streaming else "unary_stream"
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
        else:
            kind = "stream_unary" if handler.request_streaming else "unary_unary"
            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
        behavior, deserializer = getattr(handler, kind), handler.request_deserializer
        if handler.request_streaming:
            return make(_wrap(behavior, method), deserializer, handler.response_serializer)
        return make(_wrap(behavior, method, deserializer), None, handler.response_serializer)


def _as_it_is(request: Any) -> Any:
    return request


def _wrap(
    behavior: Callable[..., Any], method: str | None, parse: Callable[[Any], Any] | None = None
) -> Callable[..., Any]:
    parse = parse or _as_it_is

    if inspect.isasyncgenfunction(behavior):

        async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            try:
                async for response in behavior(parse(request), context):
                    yield response
            except Exception as error:
                await _abort_with(error, context, method)

        return stream

    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behavior(parse(request), context)
        except Exception as error:
            await _abort_with(error, context, method)

    return call


async def _abort_with(error: Exception, context: grpc.aio.ServicerContext[Any, Any], method: str | None) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, DecodeError):
        error = InvalidArgument(f"the request is not the protobuf message of this rpc: {error}", field="request")
    if not isinstance(error, PacelineError):
        logger.error("unexpected error in a handler", exc_info=error, extra={"rpc": method})
        error = PacelineError("internal error; the server's log has the details")
    else:
        log_refusal(logger, error, rpc=method, status=error.grpc_status)
    await abort(context, error)
