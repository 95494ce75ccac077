"""A process that grows is found, and one that has only just begun is not taken for one."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import IO

import pytest

from tests.chaos.growth import MORE_BYTES, MORE_FILES, WARM_UP_S, Growth

_HOARDER = """
import sys
kept = []
for line in sys.stdin:
    what, _, count = line.partition(" ")
    kept.append([open("/dev/null") for _ in range(int(count))] if what == "files" else bytearray(b"x") * int(count))
    print("done", flush=True)
"""


class Hoarder:
    """A process that takes what it is told to."""

    def __init__(self) -> None:
        command = [sys.executable, "-S", "-c", _HOARDER]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def take(self, what: str, count: int) -> None:
        stdin, stdout = self._pipes
        print(what, count, file=stdin, flush=True)
        assert stdout.readline() == "done\n"

    def close(self) -> None:
        self._process.kill()
        for pipe in self._pipes:
            pipe.close()
        self._process.wait()

    @property
    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout


@pytest.fixture
def hoarder() -> Iterator[Hoarder]:
    with contextlib.closing(Hoarder()) as made:
        yield made


@pytest.mark.parametrize(("what", "room"), [("bytes", MORE_BYTES), ("files", MORE_FILES)])
def test_who_takes_more_than_a_little_once_it_is_warm_is_named(hoarder: Hoarder, what: str, room: int) -> None:
    growth = Growth()
    hoarder.take(what, 2 * room)  # while it warms up it may
    growth.note({"gateway-0": hoarder.pid}, WARM_UP_S)
    hoarder.take(what, room // 2)
    assert growth.complaints() == []
    hoarder.take(what, room)
    (complaint,) = growth.complaints()
    assert complaint.startswith("gateway-0 ")


def test_a_new_life_and_one_that_could_not_work_are_compared_with_nothing(hoarder: Hoarder) -> None:
    growth = Growth()
    growth.note({"gateway-0": hoarder.pid}, WARM_UP_S / 2)
    hoarder.take("bytes", 4 * MORE_BYTES)
    growth.note({}, WARM_UP_S)
    assert growth.compared() == {}
    growth.note({"gateway-0": hoarder.pid}, WARM_UP_S / 2)
    assert growth.compared().keys() == {"gateway-0"}
    assert growth.complaints() == []
    # It is killed and begins anew, under its name.
    hoarder.close()
    with contextlib.closing(Hoarder()) as again:
        growth.note({"gateway-0": again.pid}, 1.0)
        again.take("bytes", 4 * MORE_BYTES)
        assert growth.compared() == {}
