"""Routes: the newest stream speaks for a session; orphans and their time."""

from __future__ import annotations

from paceline.runtime.routes import SessionRoutes


class FakeStream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.finished = False
        self.sent: list[str] = []

    def send(self, event: str) -> None:
        self.sent.append(event)

    def finish(self) -> None:
        self.finished = True


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make() -> tuple[SessionRoutes[str], Clock]:
    clock = Clock()
    return SessionRoutes(10.0, clock), clock


def test_newest_stream_speaks_for_the_session() -> None:
    routes, _ = make()
    first, second = FakeStream("first"), FakeStream("second")
    routes.attach("s", first)
    assert routes.stream_of("s") is first
    routes.attach("s", second)
    assert routes.stream_of("s") is second
    assert len(routes) == 1
    routes.stream_ended(first)
    assert routes.num_orphans == 0


def test_orphan_expires_at_its_deadline_and_not_before() -> None:
    routes, clock = make()
    stream = FakeStream("stream")
    routes.attach("a", stream)
    routes.attach("b", stream)
    routes.stream_ended(stream)
    assert routes.next_deadline_s() == 110.0
    clock.now_s = 109.9
    assert routes.expired() == []
    clock.now_s = 110.0
    assert sorted(routes.expired()) == ["a", "b"]
    routes.detach("a")
    routes.detach("b")
    assert len(routes) == 0
    assert routes.next_deadline_s() is None


def test_stream_that_speaks_in_time_saves_the_session() -> None:
    routes, clock = make()
    old, new = FakeStream("old"), FakeStream("new")
    routes.attach("s", old)
    routes.stream_ended(old)
    clock.now_s = 109.0
    routes.attach("s", new)
    clock.now_s = 200.0
    assert routes.expired() == []


def test_ended_stream_is_finished_with_its_last_session() -> None:
    routes, clock = make()
    stream = FakeStream("stream")
    routes.attach("a", stream)
    routes.attach("b", stream)
    routes.stream_ended(stream)
    assert routes.num_orphans == 2
    routes.detach("a")
    assert not stream.finished
    clock.now_s = 110.0
    assert routes.expired() == ["b"]
    routes.detach("b")
    assert stream.finished


def test_ended_stream_is_finished_when_its_last_session_has_moved() -> None:
    routes, _ = make()
    old, new = FakeStream("old"), FakeStream("new")
    routes.attach("s", old)
    routes.stream_ended(old)
    routes.attach("s", new)
    assert old.finished
    assert not new.finished
    assert routes.num_orphans == 0


def test_stream_whose_end_was_not_told_goes_on_without_sessions() -> None:
    routes, _ = make()
    stream = FakeStream("stream")
    routes.attach("a", stream)
    routes.detach("a")
    routes.attach("b", stream)
    routes.detach("b")
    assert not stream.finished
    routes.stream_ended(stream)
    assert stream.finished


def test_stream_without_sessions_is_finished_at_once() -> None:
    routes, _ = make()
    stream = FakeStream("stream")
    routes.stream_ended(stream)
    assert stream.finished
    routes.detach("unknown")
