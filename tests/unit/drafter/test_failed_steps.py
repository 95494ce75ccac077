"""What is left of a step that fails."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from paceline.drafting.method import DraftJob
from paceline.errors import ModelError
from paceline.messages import DrafterEvent, Failed
from tests.unit.drafter.test_draft_actor import PROMPT, Answers, Fives, draft, opened, running


class Failures(Answers):
    """A stream on which a failure is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._failure: asyncio.Future[Failed] = asyncio.get_running_loop().create_future()

    def send(self, event: DrafterEvent) -> None:
        """Keeps the failure."""
        if isinstance(event, Failed):
            self._failure.set_result(event)

    async def failed(self) -> Failed:
        """It."""
        return await asyncio.wait_for(self._failure, 5.0)


@dataclass
class Breaking(Fives):
    """Fails while it holds a tensor."""

    error: Exception = field(default_factory=RuntimeError)
    held: weakref.ref[torch.Tensor] | None = None

    def advance(self, jobs: Sequence[DraftJob]) -> None:
        """Never ends well."""
        rows = torch.zeros(len(jobs), 4)
        self.held = weakref.ref(rows)
        raise self.error


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is in a cycle stays, as it does for a while in a service."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("error", [ModelError("broken"), RuntimeError("out of memory")], ids=["expected", "unexpected"])
async def test_no_tensor_of_a_failed_step_is_kept(error: Exception) -> None:
    """The error itself lives on, in the log's record."""
    stream, method = Failures(), Breaking(error=error)
    async with running(method) as actor:
        actor.submit(stream, opened("s", 1, PROMPT), 0)
        actor.submit(stream, draft("s", 1, 1, PROMPT, 4), 0)
        await stream.failed()
        assert method.held is not None
        assert method.held() is None
    assert error.__traceback__ is not None
