"""What a client does after each kind of break; no network, and a clock of our own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.client.resuming import Recovery, ResumeFailed, ResumePolicy, Step
from paceline.errors import (
    Cancelled,
    CapacityExceeded,
    DataLoss,
    Fenced,
    InvalidArgument,
    ModelError,
    NotFound,
    PacelineError,
    SessionBusy,
    Unavailable,
)
from paceline.generation import Chunk, Evidence, Finished, GenerationEvent, Promise, Started
from paceline.messages import FinishReason, TokenOrigin
from paceline.text.request import GenerationRequest, ResumeRequest, TextPrompt, TokenPrompt

START = 3
STARTED = Started("drawn", "toy", START, 77)
POLICY = ResumePolicy(give_up_after_s=10.0)
BROKEN = Unavailable("socket closed")


def chunk(first: int, ids: Sequence[int]) -> Chunk:
    """Tokens of a generation from its `first` one on; each shows as two letters."""
    text = "".join(f"{token % 100:02d}" for token in ids)
    lengths = (2,) * len(ids)
    return Chunk(text, tuple(ids), (TokenOrigin.PLAIN,) * len(ids), START + first + len(ids), True, lengths)


def finished(num_tokens: int) -> Finished:
    return Finished(FinishReason.STOP, START, num_tokens, Evidence())


def recovery(
    request: GenerationRequest | None = None,
    point: ResumeRequest | None = None,
    n: int = 2,
    *,
    knows_own: bool = True,
) -> Recovery:
    if point is None and request is None:
        request = GenerationRequest(TextPrompt("x"), session="mine")
    return Recovery(request, point, POLICY, n, 0.0, knows_own=knows_own)


def fail(
    it: Recovery, error: PacelineError, now: float = 0.0, *, broken: bool | None = None, reached: bool = True
) -> float:
    return it.failed(error, now, broken=error is BROKEN if broken is None else broken, reached=reached, chance=0.5)


def begun(*ids: int, promise: Promise = Promise.EXACT, **fields: GenerationRequest | ResumeRequest | None) -> Recovery:
    it = recovery(**fields)  # type: ignore[arg-type]
    assert it.take(Started("drawn", "toy", START, 77, promise), 0.0) is not None
    if ids:
        it.take(chunk(0, ids), 0.0)
    return it


def test_a_broken_stream_is_resumed_where_it_was() -> None:
    it = begun(5, 6, 7)
    assert fail(it, BROKEN) == 0.0
    assert it.step is Step.RESUME
    assert it.resume_request() == ResumeRequest.after("drawn", START, [5, 6, 7])
    assert it.take(STARTED, 0.0) is None
    new = chunk(3, [8])
    assert it.take(new, 0.0) == new
    assert it.resume_request() == ResumeRequest.after("drawn", START, [5, 6, 7, 8])
    assert not it.finished
    assert it.take(finished(4), 0.0) == finished(4)
    assert it.finished


def test_a_stream_that_broke_before_its_first_token_is_resumed_from_the_prompt_on() -> None:
    it = begun()
    fail(it, BROKEN)
    assert it.resume_request() == ResumeRequest("drawn", START)


@pytest.mark.parametrize(
    "error", [BROKEN, Unavailable("the store is away"), Cancelled("stop"), CapacityExceeded("full")]
)
def test_what_may_pass_is_tried_again_with_growing_pauses_until_it_is_given_up(error: PacelineError) -> None:
    it = begun(5)
    pauses = [fail(it, error, 1.0) for _ in range(8)]
    assert pauses[0] == 0.0
    assert pauses[1:] == [pytest.approx(0.75 * min(0.1 * 2**n, 2.0)) for n in range(7)]
    it.take(STARTED, 2.0)
    it.take(chunk(1, [6]), 2.0)  # progress: patience and pauses begin anew
    assert fail(it, error, 11.9) == 0.0
    with pytest.raises(ResumeFailed, match=r"before token 5 .* for 10 s.*Try again later") as caught:
        fail(it, error, 12.0)
    assert caught.value.__cause__ is error
    assert caught.value.point == ResumeRequest.after("drawn", START, [5, 6])


@pytest.mark.parametrize("chance", [0.0, 0.999])
def test_pauses_are_bounded(chance: float) -> None:
    pauses = [ResumePolicy().pause_s(failures, chance) for failures in (1, 2, 10, 1000)]
    assert pauses[0] == 0.0
    assert all(0.05 <= pause <= 2.0 for pause in pauses[1:])


@pytest.mark.parametrize("error", [ModelError("NaN"), InvalidArgument("no"), PacelineError("bug")])
def test_what_fails_again_ends_the_stream_as_it_is(error: PacelineError) -> None:
    it = begun(5)
    with pytest.raises(type(error)) as caught:
        fail(it, error)
    assert caught.value is error


def test_other_tokens_on_the_other_side_cannot_be_resumed() -> None:
    it = begun(5)
    fail(it, BROKEN)
    with pytest.raises(ResumeFailed, match="differ"):
        fail(it, DataLoss("they differ"))


def test_one_who_loses_to_itself_resumes_again_but_not_for_ever() -> None:
    it = begun(5)
    for _ in range(3):
        fail(it, Fenced("taken"))
        assert it.step is Step.RESUME
        it.take(STARTED, 0.0)
    with pytest.raises(Fenced):
        fail(it, Fenced("taken"))


def test_a_session_whose_record_is_gone_is_begun_again_and_compared() -> None:
    it = begun(5, 6, 7)
    fail(it, BROKEN)
    fail(it, NotFound("gone"))
    assert it.step is Step.GENERATE
    again = it.generate_request()
    assert (again.seed, again.session) == (77, "drawn")
    assert it.take(STARTED, 0.0) is None
    assert it.take(chunk(0, [5, 6]), 0.0) is None
    assert it.take(chunk(2, [7, 8, 9]), 0.0) == chunk(3, [8, 9])
    assert it.take(chunk(5, [10]), 0.0) == chunk(5, [10])
    assert it.resume_request() == ResumeRequest.after("drawn", START, [5, 6, 7, 8, 9, 10])


def test_it_is_begun_again_where_the_record_was_missed_since_the_other_address_may_be_the_dead_one() -> None:
    it = begun(5, 6, 7)
    fail(it, BROKEN)
    assert not it.stays
    fail(it, NotFound("gone"))
    assert it.stays
    fail(it, BROKEN)
    assert not it.stays


def test_a_break_while_it_is_begun_again_loses_nothing() -> None:
    it = begun(5, 6, 7)
    fail(it, BROKEN)
    fail(it, NotFound("gone"))
    it.take(STARTED, 0.0)
    it.take(chunk(0, [5]), 0.0)
    fail(it, BROKEN)
    # The record is there again and has less than the consumer: the gateway catches up in silence.
    assert it.step is Step.RESUME
    assert it.resume_request() == ResumeRequest.after("drawn", START, [5, 6, 7])
    it.take(STARTED, 0.0)
    assert it.take(chunk(3, [8]), 0.0) == chunk(3, [8])


def test_other_tokens_when_begun_again_are_noticed() -> None:
    it = begun(5, 6, 7)
    fail(it, BROKEN)
    fail(it, NotFound("gone"))
    it.take(STARTED, 0.0)
    it.take(chunk(0, [5, 6]), 0.0)
    with pytest.raises(ResumeFailed, match="other tokens"):
        it.take(chunk(2, [9, 9]), 0.0)


def test_begun_again_elsewhere_meanwhile_it_is_resumed() -> None:
    it = begun(5)
    fail(it, BROKEN)
    fail(it, NotFound("gone"))
    fail(it, SessionBusy("its owner has written it again"))
    assert it.step is Step.RESUME


@pytest.mark.parametrize("promise", [Promise.DISTRIBUTION, None])
def test_what_cannot_be_made_again_is_not_begun_again(promise: Promise | None) -> None:
    point = ResumeRequest("drawn", START) if promise is None else None
    it = begun(5, promise=promise or Promise.EXACT, point=point)
    fail(it, BROKEN)
    with pytest.raises(ResumeFailed, match="start a new one"):
        fail(it, NotFound("gone"))


def test_tokens_that_were_lost_on_the_way_are_noticed() -> None:
    it = begun(5)
    with pytest.raises(ResumeFailed, match="begin at 5 and not at 4"):
        it.take(chunk(2, [7]), 0.0)


# --- before the first event -----------------------------------------------------------------------------------------


def test_each_address_is_tried_once_before_anything_has_come() -> None:
    it = recovery(n=3)
    assert [fail(it, BROKEN), fail(it, Unavailable("it is starting"))] == [0.0, 0.0]
    assert it.step is Step.GENERATE
    with pytest.raises(Unavailable) as caught:
        fail(it, BROKEN)
    assert caught.value is BROKEN


def test_patience_at_the_start_goes_round_the_addresses_again() -> None:
    policy = ResumePolicy(start_patience_s=5.0)
    it = Recovery(GenerationRequest(TextPrompt("x")), None, policy, 2, 0.0)
    pauses = [fail(it, BROKEN, now) for now in (0.0, 1.0, 2.0, 4.9)]
    assert pauses == [0.0, pytest.approx(0.075), pytest.approx(0.15), pytest.approx(0.3)]
    with pytest.raises(Unavailable):
        fail(it, BROKEN, 5.0)


def test_what_the_gateway_refuses_is_refused_at_once() -> None:
    with pytest.raises(InvalidArgument):
        fail(recovery(), InvalidArgument("no"))
    with pytest.raises(SessionBusy):
        fail(recovery(), SessionBusy("somebody runs on it"))


def test_a_request_that_runs_on_behind_a_broken_connection_is_resumed() -> None:
    it = recovery()
    fail(it, BROKEN)
    assert fail(it, SessionBusy("it runs")) == 0.0
    assert (it.step, it.resume_request()) == (Step.RESUME, ResumeRequest("mine"))
    it.take(STARTED, 0.0)
    assert it.take(chunk(0, [5]), 0.0) == chunk(0, [5])


@pytest.mark.parametrize(
    ("seed", "prompt", "is_own"),
    [(77, TokenPrompt((1,) * START), True), (78, TextPrompt("x"), False), (77, TokenPrompt((1,) * 9), False)],
)
def test_an_earlier_turn_of_the_session_is_never_taken_for_the_request(
    seed: int, prompt: TextPrompt | TokenPrompt, is_own: bool
) -> None:
    """The end of that turn could not be recorded, so the name seems taken and resuming finds it."""
    it = recovery(GenerationRequest(prompt, session="mine", seed=seed))
    fail(it, BROKEN)
    fail(it, SessionBusy("it runs"))
    if is_own:
        assert it.take(STARTED, 0.0) == STARTED
    else:
        with pytest.raises(SessionBusy, match="try again"):
            it.take(STARTED, 0.0)


def test_a_request_that_an_earlier_turn_may_look_like_is_not_resumed_before_it_began() -> None:
    """The caller's own seed may have been that turn's too, and how many tokens a text has the client cannot know."""
    it = recovery(GenerationRequest(TextPrompt("x"), session="mine", seed=77), knows_own=False)
    fail(it, BROKEN)
    busy = SessionBusy("it runs")
    with pytest.raises(SessionBusy) as caught:
        fail(it, busy)
    assert caught.value is busy
    assert it.step is Step.GENERATE
    it = recovery(GenerationRequest(TokenPrompt((1,) * START), session="mine", seed=77), knows_own=False)
    fail(it, BROKEN)
    assert fail(it, SessionBusy("it runs")) == 0.0
    assert it.step is Step.RESUME


def test_somebody_elses_session_is_not_stolen_because_an_address_is_dead() -> None:
    it = recovery()
    fail(it, BROKEN, reached=False)
    with pytest.raises(SessionBusy):
        fail(it, SessionBusy("somebody runs on it"))


def test_a_session_that_was_gone_before_it_could_be_resumed_is_begun() -> None:
    it = recovery(n=5)
    fail(it, BROKEN)
    fail(it, SessionBusy("it runs"))
    fail(it, NotFound("it has expired"))
    assert it.step is Step.GENERATE
    assert it.generate_request().session == "mine"


# --- resuming what another process began ----------------------------------------------------------------------------


def test_an_explicit_resume_goes_on_from_its_point() -> None:
    point = ResumeRequest.after("s", START, [5, 6])
    it = recovery(point=point)
    assert (it.step, it.resume_request()) == (Step.RESUME, point)
    assert it.take(STARTED, 0.0) == STARTED
    assert it.take(chunk(2, [7]), 0.0) == chunk(2, [7])
    fail(it, BROKEN)
    assert it.resume_request() == ResumeRequest.after("drawn", START, [5, 6, 7])


@pytest.mark.parametrize("error", [NotFound("none"), DataLoss("others"), Fenced("taken"), InvalidArgument("no")])
def test_what_the_gateway_says_of_an_explicit_resume_is_for_the_caller(error: PacelineError) -> None:
    with pytest.raises(type(error)) as caught:
        fail(recovery(point=ResumeRequest("s")), error)
    assert caught.value is error


def test_an_explicit_resume_waits_for_what_may_pass() -> None:
    it = recovery(point=ResumeRequest("s", 5))
    assert fail(it, Unavailable("the store is away"), 9.0) == 0.0
    with pytest.raises(ResumeFailed) as caught:
        fail(it, Unavailable("the store is away"), 10.0)
    assert caught.value.point == ResumeRequest("s", 5)


# --- any number of breaks -------------------------------------------------------------------------------------------

WHOLE = tuple(range(10, 22))


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_whatever_breaks_the_consumer_gets_each_token_once(data: st.DataObject) -> None:
    it = recovery()
    got: list[GenerationEvent] = []
    for _ in range(8):
        first = 0 if it.step is Step.GENERATE else (it.resume_request().next_token or START) - START
        stop = data.draw(st.integers(first, len(WHOLE)))
        events: list[GenerationEvent] = [STARTED]
        while first < stop:
            size = data.draw(st.integers(1, stop - first))
            events.append(chunk(first, WHOLE[first : first + size]))
            first += size
        if stop == len(WHOLE):
            events.append(finished(len(WHOLE)))
        got += [new for event in events if (new := it.take(event, 0.0)) is not None]
        if it.finished:
            break
        error = data.draw(st.sampled_from([BROKEN, NotFound("gone"), CapacityExceeded("full")]))
        if isinstance(error, NotFound) and it.step is Step.GENERATE:
            error = BROKEN
        fail(it, error)
    chunks = [event for event in got if isinstance(event, Chunk)]
    tokens = [token for each in chunks for token in each.token_ids]
    assert tokens == list(WHOLE[: len(tokens)])
    assert "".join(each.text for each in chunks) == "".join(str(token) for token in tokens)
    assert got[0] == STARTED
    if it.finished:
        assert tokens == list(WHOLE)
