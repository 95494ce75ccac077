"""The door: from a request to a running generation. Everything untrusted is checked here, once."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Iterator

from paceline.errors import Cancelled, Fenced, NotFound, PacelineError, Unavailable
from paceline.generation import ServedModel
from paceline.session.store import AppendOutcome, Positions, SessionRecord, SessionState, busy_session, unknown_session
from paceline.text.chat_template import ChatTemplate
from paceline.text.commit import Committer
from paceline.text.request import (
    ChatPrompt,
    GenerationRequest,
    PreparedRequest,
    ResumeRequest,
    TextPrompt,
    TokenPrompt,
)
from paceline.text.tokenizer import Tokenizer
from paceline.text.validation import prepare
from paceline_gateway.caller import Caller
from paceline_gateway.epochs import next_epoch
from paceline_gateway.generation import EndedGeneration, Generation
from paceline_gateway.plan import EPOCH_OF_A_NEW_SESSION, GenerationPlan
from paceline_gateway.resumption import Replay, Resumption, replay_record
from paceline_gateway.services import SessionServices
from paceline_gateway.session_actor import SessionActor
from paceline_gateway.sessions import Permit, Sessions

_SHOWN_CHARS = 128
"""Of a name that a client made up, in an error message."""

_MAX_TAKE_OVERS = 3
"""Attempts to take a session over that others resume at the same moment."""

_INLINE_LENGTH = 4096
"""Longer prompts are read in a thread: to tokenize a megabyte takes a second, to check a million ids a tenth of one."""


@dataclasses.dataclass(frozen=True, slots=True)
class DoorSettings:
    """Defaults of requests.

    Attributes:
        model: name of the served model.
        num_draft_tokens: block size of requests that do not say, the largest where it is governed.
        governor: choose the block size of requests that do not say, round by round.
        draft_ahead: draft the next block while one is being verified.
        verifier_wait_s: how long a request waits for the first verifier.
        log_prompts: log prompts and generated text.
        fetch_features: bring drafters that build on the target's features those that they lack.
    """

    model: str
    num_draft_tokens: int
    draft_ahead: bool
    verifier_wait_s: float
    log_prompts: bool = False
    fetch_features: bool = True
    governor: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class _Turn:
    """What a generation takes from the record of its session, if there is one.

    Attributes:
        epoch: its fencing number.
        last: where the session stood; replicas that may still hold its rows.
    """

    epoch: int = EPOCH_OF_A_NEW_SESSION
    last: Positions = Positions()  # noqa: RUF009  (frozen)


class Door:
    """Admits, checks, tokenizes and starts generations."""

    def __init__(
        self,
        settings: DoorSettings,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        services: SessionServices,
        sessions: Sessions,
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._template = template
        self._services = services
        self._sessions = sessions
        self._num_preparing = 0

    def models(self) -> tuple[ServedModel, ...]:
        """What can be asked for."""
        return (
            ServedModel(
                self._settings.model,
                self._services.verifiers.snapshot.max_model_len,
                _joined(self._services.verifiers.snapshot.methods, self._services.drafters.snapshot.methods),
            ),
        )

    async def record(self, session: str, caller: Caller) -> SessionRecord:
        """The record of a session that the caller made.

        Raises:
            NotFound: there is none, or it is somebody else's.
            Unavailable: the store does not answer.
        """
        record = await self._services.store.get(session)
        if record is None or record.tenant != caller.tenant:
            raise unknown_session(session)
        return record

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return self._tokenizer

    @property
    def num_preparing(self) -> int:
        """Requests that are admitted and not started yet."""
        return self._num_preparing

    async def start(self, request: GenerationRequest, caller: Caller) -> Generation:
        """Starts a generation. Whoever gets it calls its `leave` in any case.

        Args:
            request: what the client sent, not checked yet.
            caller: who asks.

        Raises:
            NotFound: no such model, or the session is another tenant's.
            InvalidArgument: a field cannot work; names it and the limit.
            CapacityExceeded: too many generations run.
            Unavailable: no verifier, or the gateway is shutting down.
            SessionBusy: a generation runs on the session, here or elsewhere.
        """
        with self._counting() as arrived_at:
            self._check_model(request.model)
            with self._preparing() as permit:
                actor = await self._make_actor(request, caller, arrived_at)
                self._sessions.run(actor)
                return Generation(actor, permit)

    async def resume(self, asked: ResumeRequest, caller: Caller) -> Generation | EndedGeneration:
        """Goes on with a session, whoever ran it before. Whoever gets it calls its `leave` in any case.

        Args:
            asked: which, and what the client has of it.
            caller: who asks.

        Raises:
            NotFound: there is no such session, it is somebody else's, or its model is not served here.
            InvalidArgument: the client asks for tokens of the prompt.
            DataLoss: the client has other tokens than the session's.
            CapacityExceeded: too many generations run.
            Unavailable: the store does not answer, there is no verifier, or the gateway is shutting down.
            Fenced: the session is resumed by somebody else at the same time.
        """
        with self._counting() as arrived_at, self._preparing() as permit:
            await self._sessions.wait_recorded(asked.session, caller.tenant)
            replay = await self._take_over(asked, caller)
            record = replay.record
            plan = self._plan(replay.prepared, caller, _Turn(record.epoch, record.positions), replay.resumption)
            if replay.finish is None:
                async with self._ended_unless_run(plan.session, plan.epoch):
                    actor = SessionActor(plan, replay.committer, self._services, self._warnings(plan), arrived_at)
                    await self._sessions.replace(actor)
                self._services.metrics.session_resumed()
                return Generation(actor, permit)
            if record.state is SessionState.RUNNING:  # its gateway died right before it could say so
                ended = (SessionState.FINISHED, replay.finish.value)
                await self._services.store.finish(record.session, record.epoch, record.owner, *ended)
            return EndedGeneration(record.session, replay.events(plan.promise), permit)

    async def _take_over(self, asked: ResumeRequest, caller: Caller) -> Replay:
        """The session as it was left; this gateway owns it from then on, unless the generation has ended."""
        owner = self._services.owner
        for _ in range(_MAX_TAKE_OVERS):
            replay = await self._replay(asked, caller)
            if replay.record.state is SessionState.FINISHED:
                return replay
            if replay.finish is None:
                await self._wait_for_verifier()
            epoch = next_epoch(replay.record.epoch)
            async with self._ended_unless_run(asked.session, epoch):  # if it is cancelled the store may do it even so
                taken = await self._services.store.take_over(replay.record, owner, epoch) is AppendOutcome.APPLIED
                # Whoever had it may have recorded more until this moment, and nothing after it.
                mine = await self._replay(asked, caller) if taken else None
            if mine is not None and (mine.record.owner, mine.record.epoch) == (owner, epoch):
                return mine
        raise Fenced(f"session {asked.session!r} is being resumed by somebody else at this moment", field="session")

    @contextlib.asynccontextmanager
    async def _ended_unless_run(self, session: str, epoch: int) -> AsyncIterator[None]:
        """A session that was taken over and comes to nothing is no running one: its name is free."""
        try:
            yield
        except BaseException as error:
            code = error.code if isinstance(error, PacelineError) else Cancelled.code
            with contextlib.suppress(PacelineError):
                await self._services.store.finish(session, epoch, self._services.owner, SessionState.FAILED, code)
            raise

    async def _replay(self, asked: ResumeRequest, caller: Caller) -> Replay:
        try:
            record = await self.record(asked.session, caller)
        except Unavailable as error:
            raise Unavailable(
                f"no session can be resumed while the session store does not answer; try again later ({error.message})"
            ) from error
        self._check_model(record.model)
        if record.committed_len > _INLINE_LENGTH:
            return await asyncio.to_thread(replay_record, record, asked, self._tokenizer)
        return replay_record(record, asked, self._tokenizer)

    def _check_model(self, model: str) -> None:
        if model not in ("", self._settings.model):
            raise NotFound(
                f"model {model[:_SHOWN_CHARS]!r} is not served here; served is {self._settings.model!r}", field="model"
            )

    @contextlib.contextmanager
    def _counting(self) -> Iterator[float]:
        """Counts how a request fails before it runs; gives the time of its arrival."""
        clock, metrics = time.monotonic, self._services.metrics
        arrived_at = clock()
        try:
            yield arrived_at
        except asyncio.CancelledError:
            metrics.request_failed(Cancelled("the client has left"), clock() - arrived_at)
            raise
        except Exception as error:
            metrics.request_refused(error if isinstance(error, PacelineError) else PacelineError(str(error)))
            raise

    @contextlib.contextmanager
    def _preparing(self) -> Iterator[Permit]:
        """Gives a permit, which is kept unless the preparation fails.

        Raises:
            CapacityExceeded: too many generations run.
            Unavailable: the gateway is starting or shutting down.
        """
        permit = self._sessions.admit()
        self._num_preparing += 1
        try:
            yield permit
        except BaseException:
            permit.release()
            raise
        finally:
            self._num_preparing -= 1

    async def _make_actor(self, request: GenerationRequest, caller: Caller, arrived_at: float) -> SessionActor:
        await self._wait_for_verifier()
        prepared = await self._prepare(request)
        plan = self._plan(prepared, caller, await self._next_turn(request.session, caller), None)
        committer = Committer(self._tokenizer, prepared.end, prepared.prompt_ids)
        return SessionActor(plan, committer, self._services, self._warnings(plan), arrived_at)

    async def _wait_for_verifier(self) -> None:
        """Waits a moment for a verifier that is just being reconnected."""
        pool = self._services.verifiers
        try:
            async with asyncio.timeout(self._settings.verifier_wait_s):
                await pool.wait_ready()
        except TimeoutError:
            trouble = pool.snapshot.why_not or "none is configured"
            raise Unavailable(
                f"no verifier of model {self._settings.model!r} is there ({trouble}); try again later"
            ) from None

    async def _prepare(self, request: GenerationRequest) -> PreparedRequest:
        verifiers, drafters = self._services.verifiers.snapshot, self._services.drafters.snapshot

        def work() -> PreparedRequest:
            return prepare(
                request,
                tokenizer=self._tokenizer,
                template=self._template,
                vocab_size=min(self._tokenizer.vocab_size, verifiers.vocab_size),
                max_model_len=verifiers.max_model_len,
                offered_methods=_joined(verifiers.seen_methods, drafters.seen_methods),
            )

        return await asyncio.to_thread(work) if _prompt_length(request) > _INLINE_LENGTH else work()

    async def _next_turn(self, session: str | None, caller: Caller) -> _Turn:
        """A generation under a name that its tenant may have used before: then it goes on under a newer epoch.

        Nobody is kept out by this: the record itself is taken atomically, when it is written.

        Raises:
            NotFound: the session is another tenant's.
            SessionBusy: a generation runs on it.
            Unavailable: the store does not answer.
        """
        if session is None:
            return _Turn()
        await self._sessions.wait_free(session, caller.tenant)
        record = await self._services.store.get(session)
        if record is None:
            return _Turn(next_epoch())
        if record.tenant != caller.tenant:
            raise unknown_session(session)
        last = Positions(verifier=record.positions.verifier)  # a drafter has closed what has ended, and forgotten it
        if record.state is not SessionState.RUNNING:
            return _Turn(next_epoch(record.epoch), last)
        store, owner, epoch = self._services.store, self._services.owner, record.epoch
        await self._sessions.wait_free(session, caller.tenant)
        if record.owner != owner:
            # A gateway that has died keeps no name; should it only have been silent, it is fenced.
            if await store.is_alive(record.owner):
                raise busy_session(session)
            epoch = next_epoch(record.epoch)
            async with self._ended_unless_run(session, epoch):
                if await store.take_over(record, owner, epoch) is not AppendOutcome.APPLIED:
                    raise busy_session(session)
        # Written by this process, which runs nothing of that name: its end could not be recorded.
        await store.finish(session, epoch, owner, SessionState.FAILED, Unavailable.code)
        return _Turn(next_epoch(epoch), last)

    def _plan(
        self, prepared: PreparedRequest, caller: Caller, turn: _Turn, resumption: Resumption | None
    ) -> GenerationPlan:
        request = prepared.request
        options = request.speculation
        num_draft_tokens = (
            self._settings.num_draft_tokens
            if options.num_speculative_tokens is None
            else options.num_speculative_tokens
        )
        seed = secrets.randbits(63) if request.seed is None else request.seed
        return GenerationPlan(
            session=request.session or uuid.uuid4().hex,
            session_drawn=request.session is None,
            model=self._settings.model,
            prompt=prepared.prompt_ids,
            sampling=dataclasses.replace(request.sampling, seed=seed),
            max_tokens=prepared.end.max_new_tokens,
            num_draft_tokens=num_draft_tokens if options.enabled else 0,
            rule=request.rule,
            stop=request.stop,
            method=options.method,
            governed=self._settings.governor and options.enabled and options.num_speculative_tokens is None,
            draft_ahead=self._settings.draft_ahead,
            fetch_features=self._settings.fetch_features,
            prompt_features=self._services.drafters.snapshot.build_on_prompts(options.method),
            epoch=turn.epoch,
            tenant=caller.tenant,
            request_id=caller.request_id,
            logged_prompt=request.prompt if self._settings.log_prompts else None,
            speculation=options,
            resumption=resumption,
            last_verifier=turn.last.verifier,
            last_drafter=turn.last.drafter,
        )

    def _warnings(self, plan: GenerationPlan) -> tuple[str, ...]:
        drafters = self._services.drafters.snapshot
        if plan.num_draft_tokens == 0 or self._services.verifiers.snapshot.draft_themselves(plan.method):
            return ()
        if drafters.offers(plan.method, self._services.verifiers.snapshot.features or (None,)):
            context, length = drafters.longest_context(plan.method), len(plan.prompt)
            if not 0 < context <= length:
                return ()
            return (
                f"the drafters' context of {context} tokens leaves no room after the prompt of {length}: decoding "
                "plainly; raise the drafter's --kv-cache-bytes or lower its --max-sessions",
            )
        wanted = f"no drafter of method {plan.method!r}" if plan.method else "no drafter"
        trouble = drafters.why_not or ("only others are there" if drafters.ready else "none is configured")
        return (f"{wanted} is ready, so decoding is plain until one is ({trouble})",)


def _joined(verifiers: tuple[str, ...], drafters: tuple[str, ...]) -> tuple[str, ...]:
    """Methods of both, each once; the verifiers' first, since those are used where a request names none."""
    return tuple(dict.fromkeys(verifiers + drafters))


def _prompt_length(request: GenerationRequest) -> int:
    """Characters of a text or a conversation, or token ids."""
    match request.prompt:
        case TextPrompt(text):
            return len(text)
        case ChatPrompt(messages):
            return sum(len(message.role) + len(message.content) for message in messages)
        case TokenPrompt(ids):
            return len(ids)
