"""One generation over streams that may break: what the consumer has got, and what to do after a break. Pure.

    before `Started`      nothing is lost: the request is made again, at once and on each address once; if its session
                          is busy by then, it is resumed where it can be told from an earlier turn of that session
    after it              Resume, on one address after the other, with growing pauses, until no token has come for
                          `give_up_after_s`
    the record is gone    under the promise `exact` the request is made again with its seed: the tokens that the
                          consumer has are compared and not given twice

A client may lose a race against itself: a gateway that hung took the session over after another one did. Then it
resumes once more, but not for ever: somebody else may want the session.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from paceline.errors import (
    Cancelled,
    CapacityExceeded,
    DataLoss,
    Fenced,
    NotFound,
    PacelineError,
    SessionBusy,
    Unavailable,
)
from paceline.generation import Chunk, Finished, GenerationEvent, Promise, Started
from paceline.text.request import GenerationRequest, ResumeRequest, TokenPrompt
from paceline.token_log import EMPTY_HASH, extend_hash

_MAX_FENCINGS = 3


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """How a client goes on after its stream broke. Times in seconds.

    Attributes:
        give_up_after_s: without a new token.
        first_pause_s: before the second attempt in a row; the first comes at once. Doubles, and is drawn from its upper
            half, so that the clients of a gateway that died do not come all at the same moment.
        max_pause_s: the longest.
        start_patience_s: how long to go on trying when no gateway takes the request at all; every address is tried once
            in any case.
    """

    give_up_after_s: float = 30.0
    first_pause_s: float = 0.1
    max_pause_s: float = 2.0
    start_patience_s: float = 0.0

    def pause_s(self, num_failures: int, chance: float) -> float:
        """How long to wait after so many failures in a row.

        Args:
            num_failures: at least 1.
            chance: uniform in [0, 1).
        """
        if num_failures <= 1:
            return 0.0
        longest = min(self.first_pause_s * 2.0 ** min(num_failures - 2, 30), self.max_pause_s)
        return longest * (0.5 + chance / 2)


class ResumeFailed(Unavailable):
    """A stream broke after its first tokens and could not be resumed; raised by clients only.

    The error's cause says why. Where that may pass, `AsyncClient.resume` goes on from `point` later.

    Attributes:
        point: the session and where the consumer is.
    """

    code = "resume_failed"

    def __init__(self, message: str, *, field: str = "", point: ResumeRequest | None = None) -> None:
        super().__init__(message, field=field)
        self.point = point


class Step(Enum):
    """What to ask a gateway for next."""

    GENERATE = "generate"
    RESUME = "resume"


class Recovery:
    """What the consumer of one generation has, and the decisions after each break.

    Args:
        request: what was asked for; None where an earlier stream is resumed.
        point: where that stream was; None for a new generation.
        policy: how to go on.
        num_addresses: gateways that can be asked.
        now: the time.
        knows_own: the request's seed was drawn for it alone, by which its generation is known from an earlier turn's
            of the session. So it is by the length of a prompt of tokens.

    Attributes:
        step: what to ask for now.
        stays: ask the address that was asked last, which works: others may not.
        finished: the generation has ended.
    """

    def __init__(
        self,
        request: GenerationRequest | None,
        point: ResumeRequest | None,
        policy: ResumePolicy,
        num_addresses: int,
        now: float,
        *,
        knows_own: bool = False,
    ) -> None:
        self._request = request
        self._knows_own = knows_own or (request is not None and isinstance(request.prompt, TokenPrompt))
        self._point = point
        self._policy = policy
        self._num_addresses = num_addresses
        self._progress_at = now
        self._started: Started | None = None
        self._next_token = 0
        self._ids_hash = EMPTY_HASH
        # Where the present stream is: behind the consumer while a generation is begun again.
        self._stream_at = 0
        self._stream_hash = EMPTY_HASH
        self._failures = 0
        self._fencings = 0
        self._left_running = False
        self.step = Step.GENERATE if point is None else Step.RESUME
        self.stays = False
        self.finished = False

    # --- what to send -------------------------------------------------------------------------------------------------

    def generate_request(self) -> GenerationRequest:
        """The request; with session and seed in force if they are known."""
        assert self._request is not None, "who resumes knows no request"  # noqa: S101
        started = self._started
        return self._request if started is None else replace(self._request, seed=started.seed, session=started.session)

    def resume_request(self) -> ResumeRequest:
        """Where the consumer is."""
        if self._started is not None:
            return ResumeRequest(self._started.session, self._next_token, self._ids_hash)
        if self._point is not None:
            return self._point
        return ResumeRequest((self._request and self._request.session) or "")

    # --- what comes -------------------------------------------------------------------------------------------------

    def take(self, event: GenerationEvent, now: float) -> GenerationEvent | None:
        """What of an event is new to the consumer; None if nothing is.

        Raises:
            ResumeFailed: the stream does not go on where the consumer is.
            SessionBusy: the session runs another generation than the one that was asked for.
        """
        match event:
            case Started():
                return self._begin(event, now)
            case Chunk():
                chunk = self._new_part(event)
                if chunk is not None:
                    self._progress(now)
                return chunk
            case Finished():
                self.finished = True
                return event

    def _begin(self, event: Started, now: float) -> Started | None:
        first = self._started is None
        if first:
            self._check_own(event)
            self._started = event
            self._next_token = event.prompt_tokens
            if self._point is not None and self._point.next_token is not None:
                self._next_token, self._ids_hash = self._point.next_token, self._point.ids_hash
            self._progress(now)
        if self.step is Step.GENERATE:
            self._stream_at, self._stream_hash = event.prompt_tokens, EMPTY_HASH
        else:
            self._stream_at, self._stream_hash = self._next_token, self._ids_hash
        return event if first else None

    def _check_own(self, event: Started) -> None:
        """A session that was resumed since its name was taken may be on an earlier turn, whose end nobody recorded."""
        request = self._request
        if request is None or self.step is Step.GENERATE:
            return
        own_prompt = not isinstance(request.prompt, TokenPrompt) or len(request.prompt.ids) == event.prompt_tokens
        if not own_prompt or request.seed not in (None, event.seed):
            raise SessionBusy(
                f"session {event.session!r} was on another generation, whose end was not recorded; try again",
                field="session",
            )

    def _new_part(self, chunk: Chunk) -> Chunk | None:
        first = chunk.next_token - len(chunk.token_ids)
        if first != self._stream_at:
            raise self._gave_up(f"its tokens begin at {first} and not at {self._stream_at}")
        known = min(max(self._next_token - first, 0), len(chunk.token_ids))
        self._stream_at = chunk.next_token
        if known:
            self._stream_hash = extend_hash(self._stream_hash, chunk.token_ids[:known])
            if first + known == self._next_token and self._stream_hash != self._ids_hash:
                raise self._gave_up("begun again it gives other tokens; start a new one")
        new = chunk.token_ids[known:]
        if not new:
            return None
        self._next_token += len(new)
        self._ids_hash = self._stream_hash = extend_hash(self._ids_hash, new)
        return chunk if not known else _without(chunk, known)

    def _progress(self, now: float) -> None:
        self._progress_at = now
        self._failures = 0
        self._left_running = False

    # --- what to do after a break -------------------------------------------------------------------------------------

    def failed(self, error: PacelineError, now: float, *, broken: bool, reached: bool, chance: float) -> float:
        """Decides what to ask for next, and after how many seconds; on another address, unless `stays` says no.

        Args:
            error: how the stream ended.
            now: the time.
            broken: the connection says so and not the gateway.
            reached: the gateway had answered something before.
            chance: uniform in [0, 1), for the pause.

        Raises:
            PacelineError: the error, where trying again cannot help.
            ResumeFailed: the consumer has a part of the text, and it cannot be completed.
        """
        passing = broken or isinstance(error, Unavailable | Cancelled | CapacityExceeded)
        self.stays = isinstance(error, NotFound) and self.step is Step.RESUME
        if self._started is not None or self._point is not None:
            self._choose_after(error, passing)
        elif not self._choose_before(error, passing, now):
            return 0.0
        self._left_running = self._left_running or (broken and reached)
        self._failures += 1
        if self._started is None and self._point is None:
            return self._policy.pause_s(self._failures - self._num_addresses + 2, chance)
        if now - self._progress_at >= self._policy.give_up_after_s:
            raise self._gave_up(f"for {now - self._progress_at:.0f} s: {error.message}. Try again later") from error
        return self._policy.pause_s(self._failures, chance)

    def _choose_before(self, error: PacelineError, passing: bool, now: float) -> bool:
        """Nothing has come yet; says whether this counts as a failure."""
        if isinstance(error, SessionBusy) and self._left_running and self._knows_own:
            self.step = Step.RESUME  # our own request runs on behind a broken connection
            return False
        if isinstance(error, NotFound) and self.step is Step.RESUME:
            self.step = Step.GENERATE
            return True
        patience_over = now - self._progress_at >= self._policy.start_patience_s
        if not passing or (patience_over and self._failures + 1 >= self._num_addresses):
            raise error
        return True

    def _choose_after(self, error: PacelineError, passing: bool) -> None:
        """The consumer has a part of the generation."""
        resumed, self.step = self.step is Step.RESUME, Step.RESUME
        started = self._started
        if started is None:  # the caller resumes by itself: what the gateway says is for the caller
            if not passing:
                raise error
        elif isinstance(error, Fenced):
            self._fencings += 1
            if self._fencings > _MAX_FENCINGS:
                raise error
        elif isinstance(error, NotFound) and resumed:
            if self._request is None or started.promise is not Promise.EXACT:
                raise self._gave_up(f"it is not recorded any more ({error.message}); start a new one") from error
            self.step = Step.GENERATE
        elif isinstance(error, DataLoss):
            raise self._gave_up(error.message) from error
        elif not passing and not isinstance(error, SessionBusy):
            raise error

    def _gave_up(self, reason: str) -> ResumeFailed:
        point = self.resume_request()
        return ResumeFailed(
            f"the stream of session {point.session!r} broke before token {point.next_token} and could not be resumed: "
            f"{reason}",
            point=point,
        )


def _without(chunk: Chunk, known: int) -> Chunk:
    """The chunk less its first tokens and their text."""
    cut = sum(chunk.text_lengths[:known])
    return replace(
        chunk,
        text=chunk.text[cut:],
        token_ids=chunk.token_ids[known:],
        origins=chunk.origins[known:],
        text_lengths=chunk.text_lengths[known:],
        logprobs=chunk.logprobs[known:],
    )
