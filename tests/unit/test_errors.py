"""The error tree: one table of codes and statuses, and the way over gRPC and back for every class."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from paceline_gateway.http.errors import CODES, OTHER_CODE

from paceline import errors
from paceline.errors import Failure, PacelineError, from_failure
from paceline.runtime.grpc_errors import ErrorInterceptor, error_from_rpc, status_to_pb

DOCUMENT = Path(__file__).parents[2] / "docs" / "errors.md"
# class, code, status on gRPC, status on HTTP, seconds after which a client may try again
TABLE = [
    (errors.PacelineError, "internal", grpc.StatusCode.INTERNAL, 500, None),
    (errors.InvalidArgument, "invalid_argument", grpc.StatusCode.INVALID_ARGUMENT, 400, None),
    (errors.NotFound, "not_found", grpc.StatusCode.NOT_FOUND, 404, None),
    (errors.Unauthenticated, "unauthenticated", grpc.StatusCode.UNAUTHENTICATED, 401, None),
    (errors.SessionBusy, "session_busy", grpc.StatusCode.ABORTED, 409, None),
    (errors.Fenced, "fenced", grpc.StatusCode.ABORTED, 409, None),
    (errors.CapacityExceeded, "capacity_exceeded", grpc.StatusCode.RESOURCE_EXHAUSTED, 429, 1),
    (errors.PayloadTooLarge, "payload_too_large", grpc.StatusCode.RESOURCE_EXHAUSTED, 413, None),
    (errors.Unavailable, "unavailable", grpc.StatusCode.UNAVAILABLE, 503, 1),
    (errors.DeadlineExceeded, "deadline_exceeded", grpc.StatusCode.DEADLINE_EXCEEDED, 504, None),
    (errors.Cancelled, "cancelled", grpc.StatusCode.CANCELLED, 499, None),
    (errors.ModelError, "model_error", grpc.StatusCode.FAILED_PRECONDITION, 500, None),
    (errors.ConfigurationError, "configuration_error", grpc.StatusCode.FAILED_PRECONDITION, 500, None),
    (errors.DataLoss, "data_loss", grpc.StatusCode.DATA_LOSS, 500, None),
]


def all_classes(root: type[PacelineError]) -> set[type[PacelineError]]:
    return {root}.union(*(all_classes(child) for child in root.__subclasses__()))


def test_table_is_complete_and_codes_are_unique() -> None:
    ours = {cls for cls in all_classes(PacelineError) if cls.__module__ == "paceline.errors"}
    assert {row[0] for row in TABLE} == ours
    assert len({row[1] for row in TABLE}) == len(TABLE)


def test_the_table_of_the_documents_is_this_one() -> None:
    rows = [tuple(cell.strip(" `") for cell in line.split("|")[1:6]) for line in DOCUMENT.read_text().splitlines()]
    documented = {row[0]: row[1:] for row in rows if len(row) == 5 and row[0] in {each[1] for each in TABLE}}
    assert documented == {
        code: (error_class.__name__, status.name, str(http_status), "" if retry is None else f"after {retry} s")
        for error_class, code, status, http_status, retry in TABLE
    }


def test_codes_that_only_http_sends_are_in_the_document() -> None:
    statuses = {code: str(status) for status, code in CODES.items()} | {OTHER_CODE: "the server's own"}
    of_http_only = {code: status for code, status in statuses.items() if code not in {row[1] for row in TABLE}}
    rows = [tuple(cell.strip(" `") for cell in line.split("|")[1:3]) for line in DOCUMENT.read_text().splitlines()]
    assert of_http_only.items() <= {row[0]: row[1] for row in rows if len(row) == 2}.items()
    assert set(of_http_only) == {"method_not_allowed", "http_error"}


@pytest.mark.parametrize(("error_class", "code", "status", "http_status", "retry_after_s"), TABLE)
def test_error_and_its_failure(
    error_class: type[PacelineError], code: str, status: grpc.StatusCode, http_status: int, retry_after_s: int | None
) -> None:
    error = error_class("what happened", field="top_p")
    assert (error.code, error.http_status, error.retry_after_s) == (code, http_status, retry_after_s)
    assert grpc.StatusCode[error.grpc_status] is status
    assert error.to_failure() == Failure(code, "what happened", "top_p")
    back = from_failure(error.to_failure())
    assert type(back) is error_class
    assert (str(back), back.field) == ("what happened", "top_p")


def test_unknown_code_becomes_the_base_class() -> None:
    assert type(from_failure(Failure("from_the_future", "x"))) is PacelineError


def test_status_carries_standard_details() -> None:
    status = status_to_pb(errors.InvalidArgument("top_p is 2; at most 1", field="top_p"))
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain, info.metadata["field"]) == ("invalid_argument", "paceline", "top_p")
    assert status.details[1].Unpack(bad_request)
    assert bad_request.field_violations[0].field == "top_p"
    assert len(status.details) == 2


def retry_info(status: status_pb2.Status) -> list[int]:
    """Seconds of every RetryInfo in the details."""
    found = error_details_pb2.RetryInfo()
    return [found.retry_delay.seconds for detail in status.details if detail.Unpack(found)]


# --- over real gRPC -------------------------------------------------------------------------------------------------

RAISED: dict[str, Exception] = {"unexpected": RuntimeError("a secret")}
RAISED |= {row[1]: row[0]("what happened", field="top_p") for row in TABLE}


async def _unary(request: bytes, _context: Any) -> bytes:
    raise RAISED[request.decode()]


async def _generator(request: bytes, _context: Any) -> AsyncIterator[bytes]:
    yield b"first"
    raise RAISED[request.decode()]


async def _writer(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
    await context.write(b"first")
    raise RAISED[request.decode()]


async def _bidi(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield b"first"
        raise RAISED[request.decode()]


async def _collect(requests: AsyncIterator[bytes], _context: Any) -> bytes:
    async for request in requests:
        raise RAISED[request.decode()]
    return b""


async def _own_abort(_request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    await context.abort(grpc.StatusCode.OUT_OF_RANGE, "by hand")
    return b""


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Unary": grpc.unary_unary_rpc_method_handler(_unary),
        "Generator": grpc.unary_stream_rpc_method_handler(_generator),
        "Writer": grpc.unary_stream_rpc_method_handler(_writer),
        "Bidi": grpc.stream_stream_rpc_method_handler(_bidi),
        "Collect": grpc.stream_unary_rpc_method_handler(_collect),
        "OwnAbort": grpc.unary_unary_rpc_method_handler(_own_abort),
    }
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


async def _invoke(channel: Any, method: str, request: bytes) -> None:
    path = f"/test.Test/{method}"

    async def requests() -> AsyncIterator[bytes]:
        yield request

    if method in ("Unary", "OwnAbort"):
        await channel.unary_unary(path)(request)
    elif method == "Collect":
        await channel.stream_unary(path)(requests())
    else:
        call = channel.stream_stream(path)(requests()) if method == "Bidi" else channel.unary_stream(path)(request)
        async for response in call:
            assert response == b"first"


async def _failed(channel: grpc.aio.Channel, method: str, request: bytes) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _invoke(channel, method, request)
    return caught.value


async def _call(channel: grpc.aio.Channel, method: str, request: bytes) -> PacelineError:
    return error_from_rpc(await _failed(channel, method, request))


@pytest.mark.parametrize("method", ["Unary", "Generator", "Writer", "Bidi", "Collect"])
@pytest.mark.parametrize(("error_class", "code", "status", "_http_status", "retry_after_s"), TABLE)
async def test_every_class_survives_every_shape_of_rpc(
    channel: grpc.aio.Channel,
    method: str,
    error_class: type[PacelineError],
    code: str,
    status: grpc.StatusCode,
    _http_status: int,
    retry_after_s: int | None,
) -> None:
    rpc_error = await _failed(channel, method, code.encode())
    assert rpc_error.code() is status
    details = dict(rpc_error.trailing_metadata())["grpc-status-details-bin"]
    assert retry_info(status_pb2.Status.FromString(details)) == ([] if retry_after_s is None else [retry_after_s])
    error = error_from_rpc(rpc_error)
    assert type(error) is error_class
    assert (error.message, error.field, error.retry_after_s) == ("what happened", "top_p", retry_after_s)


@pytest.mark.parametrize("method", ["Unary", "Generator", "Writer", "Bidi", "Collect"])
async def test_unexpected_error_keeps_its_text_to_itself(channel: grpc.aio.Channel, method: str) -> None:
    error = await _call(channel, method, b"unexpected")
    assert type(error) is PacelineError
    assert "secret" not in error.message


async def test_abort_by_hand_passes(channel: grpc.aio.Channel) -> None:
    assert (await _call(channel, "OwnAbort", b"")).message == "by hand"


@pytest.mark.parametrize(
    ("status", "error_class"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, errors.Cancelled),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidArgument),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.CapacityExceeded),
        (grpc.StatusCode.UNIMPLEMENTED, PacelineError),
    ],
)
def test_status_without_details_becomes_the_nearest_class(
    status: grpc.StatusCode, error_class: type[PacelineError]
) -> None:
    rpc_error = grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(), details="from a proxy")
    error = error_from_rpc(rpc_error)
    assert type(error) is error_class
    assert error.message == "from a proxy"


def test_foreign_details_are_ignored() -> None:
    status = status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message="elsewhere")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="X", domain="example.com"))
    trailer = grpc.aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    rpc_error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailer, details="elsewhere")
    assert type(error_from_rpc(rpc_error)) is errors.Unavailable


def test_long_messages_fit_a_trailer() -> None:
    assert len(status_to_pb(PacelineError("x" * 100_000)).SerializeToString()) < 8192
