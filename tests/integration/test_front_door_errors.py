"""The whole error tree through every door: the same class, message and field, its own status, and when to try again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from paceline.errors import PacelineError
from tests.fakes.toy_runner import hash_law
from tests.integration.fleet import VOCAB
from tests.integration.front_door import FrontDoor, front_door

pytestmark = pytest.mark.asyncio(loop_scope="module")


def tree(root: type[PacelineError]) -> list[type[PacelineError]]:
    return [root, *(error for child in root.__subclasses__() for error in tree(child))]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FrontDoor]:
    async with front_door(tmp_path_factory.mktemp("front"), hash_law(VOCAB)) as front:
        yield front


@pytest.mark.parametrize("error", tree(PacelineError), ids=lambda error: error.code)
async def test_an_error_is_the_same_at_every_door(
    front: FrontDoor, monkeypatch: pytest.MonkeyPatch, error: type[PacelineError]
) -> None:
    async def refuse(*_: Any) -> None:
        raise error("what happened, and what to do: naïve 日本 😀", field="top_p")

    monkeypatch.setattr(front.fleet.gateway.servicer.door, "start", refuse)
    for door in front.doors:
        # The doors check the statuses, Retry-After and RetryInfo.
        with pytest.raises(PacelineError) as caught:
            await door.generate(front.fleet.request([1]))
        assert type(caught.value) is error
        assert (caught.value.message, caught.value.field) == ("what happened, and what to do: naïve 日本 😀", "top_p")
