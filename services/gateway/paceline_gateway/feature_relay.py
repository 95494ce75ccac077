"""Brings features of the target from a verifier to a drafter, beside both streams. Nothing here looks into them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc.aio

from paceline.errors import DeadlineExceeded, PacelineError, Unavailable
from paceline.runtime.grpc_errors import error_from_rpc
from paceline.runtime.supervisor import end_if_cancelled
from paceline.v1 import drafter_pb2, verifier_pb2
from paceline.v1.drafter_pb2_grpc import DrafterStub
from paceline.v1.verifier_pb2_grpc import VerifierStub
from paceline_gateway.commands import Fetched, ReplicaLink, SessionPort

logger = logging.getLogger(__name__)

_TIMEOUT_S = 60.0


class FeatureRelay:
    """Fetches features for one session, one range at a time.

    Args:
        session: its name.
        epoch: of its owner.
        port: told what becomes of each fetch that is not stopped.
    """

    def __init__(self, session: str, epoch: int, port: SessionPort) -> None:
        self._session = session
        self._epoch = epoch
        self._port = port
        self._fetch_id = 0
        self._task: asyncio.Task[None] | None = None

    def start(self, tasks: asyncio.TaskGroup, verifier: ReplicaLink, drafter: ReplicaLink, rows: range) -> None:
        """Begins to bring rows; a fetch that still runs is stopped."""
        self.stop()
        self._fetch_id += 1
        work = self._fetch(verifier, drafter, rows, self._fetch_id)
        self._task = tasks.create_task(work, name=f"features of {self._session}")

    def stop(self) -> None:
        """Ends the fetch that runs, if one does; nothing more is heard of it."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def is_newest(self, answer: Fetched) -> bool:
        """Whether the answer is about the newest fetch."""
        return answer.fetch_id == self._fetch_id

    async def _fetch(self, verifier: ReplicaLink, drafter: ReplicaLink, rows: range, fetch_id: int) -> None:
        error: PacelineError | None = None
        try:
            await self._relay(verifier, drafter, rows)
        except PacelineError as refusal:
            error = refusal
        except asyncio.CancelledError:
            end_if_cancelled()
            error = Unavailable("a link broke")  # this is how a call says that its channel was closed
        except Exception:
            logger.exception("features could not be brought")
            error = PacelineError("internal error; the gateway's log has the details")
        if error is not None:
            logger.info("features could not be brought to %s: %s", drafter.address, error.message)
        self._port.tell(Fetched(fetch_id, error))

    async def _relay(self, verifier: ReplicaLink, drafter: ReplicaLink, rows: range) -> None:
        """Returns when the drafter has the rows. A slow drafter slows the reading; one chunk at most is held here.

        Raises:
            PacelineError: a link is broken, or one of the two refuses or is too slow.
        """
        source, sink = verifier.channel, drafter.channel
        if source is None or sink is None:
            raise Unavailable(f"no link to {(verifier if source is None else drafter).address}")
        session, epoch = self._session, self._epoch
        asked = verifier_pb2.ReadFeaturesRequest(session=session, epoch=epoch, first_row=rows.start, num_rows=len(rows))
        chunks = VerifierStub(source).ReadFeatures(asked)
        refusal: grpc.aio.AioRpcError | None = None

        async def requests() -> AsyncIterator[drafter_pb2.WriteFeaturesRequest]:
            nonlocal refusal
            try:
                async for chunk in chunks:
                    yield drafter_pb2.WriteFeaturesRequest(session=session, epoch=epoch, features=chunk.features)
            except grpc.aio.AioRpcError as error:
                refusal = error  # raised here it would be the drafter's

        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await DrafterStub(sink).WriteFeatures(requests())
            if refusal is not None:
                raise refusal
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        except TimeoutError:
            raise DeadlineExceeded(f"{drafter.address} has not got the features within {_TIMEOUT_S:g} s") from None
        finally:
            chunks.cancel()
