"""Carries a session's writes to the store, one after another, so that the session itself never waits for it."""

from __future__ import annotations

import asyncio
import logging

from paceline.errors import PacelineError
from paceline.session.store import Append, AppendOutcome, SessionStore
from paceline_gateway.commands import SessionPort, StoreAnswered
from paceline_gateway.journal import CreateRecord, FinishRecord, PutRecord, TouchRecord, Write

logger = logging.getLogger(__name__)


class StoreWriter:
    """The task of one session that talks to the store. At most one write is handed over at a time."""

    def __init__(self, store: SessionStore, port: SessionPort) -> None:
        self._store = store
        self._port = port
        self._write: Write | None = None
        self._wake = asyncio.Event()

    def submit(self, write: Write) -> None:
        """Hands a write over; its answer comes as `StoreAnswered`."""
        self._write = write
        self._wake.set()

    async def run(self) -> None:
        """Writes until it is cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            write, self._write = self._write, None
            if write is not None:
                self._port.tell(StoreAnswered(await self._perform(write)))

    async def _perform(self, write: Write) -> AppendOutcome | PacelineError:
        try:
            match write:
                case Append():
                    return await self._store.append(write)
                case CreateRecord():
                    await self._store.create(write.record)
                case PutRecord():
                    return await self._store.put(write.record)
                case FinishRecord():
                    return await self._store.finish(write.session, write.epoch, write.owner, write.state, write.reason)
                case TouchRecord():
                    return await self._store.touch(write.session, write.epoch, write.owner)
        except PacelineError as error:
            return error
        except Exception as error:
            logger.exception("the session store failed unexpectedly")
            return PacelineError(f"the session store failed: {type(error).__name__}")
        return AppendOutcome.APPLIED
