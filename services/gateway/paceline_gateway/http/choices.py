"""The choices of one request: each is a session of its own, and they begin and end together."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from paceline.errors import InvalidArgument, PacelineError
from paceline.generation import Chunk, Finished, Started
from paceline.text.choice_seed import choice_seed
from paceline.text.request import GenerationRequest, Prompt, TokenPrompt
from paceline_gateway.caller import Caller
from paceline_gateway.door import Door
from paceline_gateway.generation import Generation
from paceline_gateway.http.errors import renamed

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Ask:
    """What one HTTP request asks for.

    Attributes:
        prompts: at least one.
        choices_per_prompt: n.
        request: what all choices have in common; each has its own prompt and seed.
        names: the endpoint's names of fields that the door calls otherwise.
    """

    prompts: tuple[Prompt, ...]
    choices_per_prompt: int
    request: GenerationRequest
    names: Mapping[str, str] = field(default_factory=dict)

    def check(self, max_choices: int) -> None:
        """Checks what the door cannot see.

        Raises:
            InvalidArgument: too few or too many choices, or a session that would be several.
        """
        per_prompt, total = self.choices_per_prompt, len(self.prompts) * self.choices_per_prompt
        if not 1 <= per_prompt <= max_choices:
            raise InvalidArgument(f"n is {per_prompt}; it must be in [1, {max_choices}]", field="n")
        if total > max_choices:
            raise InvalidArgument(
                f"prompt has {len(self.prompts)} entries with {per_prompt} choices each, {total} together; at most "
                f"{max_choices} are allowed",
                field="prompt",
            )
        if self.request.session is not None and total > 1:
            raise InvalidArgument(
                f"session_id names one session, and {total} choices would need as many; ask for one choice",
                field="session_id",
            )


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice that runs.

    Attributes:
        index: prompt index * n + number of the choice.
        generation: its session.
    """

    index: int
    generation: Generation


@dataclass(frozen=True, slots=True)
class Outcome:
    """A choice that has ended; `chunk` is all its chunks as one."""

    choice: Choice
    started: Started
    chunk: Chunk
    finished: Finished


@contextlib.asynccontextmanager
async def running(door: Door, ask: Ask, caller: Caller) -> AsyncIterator[tuple[Choice, ...]]:
    """Starts all choices; leaving the block ends what still runs.

    Raises:
        PacelineError: one of them cannot be started; the others are ended.
    """
    seed = secrets.randbits(63) if ask.request.seed is None else ask.request.seed
    choices: list[Choice] = []
    try:
        for prompt_index, prompt in enumerate(ask.prompts):
            for number in range(ask.choices_per_prompt):
                request = dataclasses.replace(
                    ask.request,
                    # What the first choice's prompt became is not tokenized again.
                    prompt=TokenPrompt(choices[-1].generation.prompt) if number else prompt,
                    # The door says what is wrong with a seed.
                    seed=choice_seed(seed, prompt_index, number) if choices else seed,
                )
                choices.append(Choice(len(choices), await _start(door, request, caller, prompt_index, ask)))
        yield tuple(choices)
    finally:
        for choice in choices:
            choice.generation.leave()


async def _start(door: Door, request: GenerationRequest, caller: Caller, prompt_index: int, ask: Ask) -> Generation:
    try:
        return await door.start(request, caller)
    except InvalidArgument as error:
        # Of several prompts, say which.
        which = {"prompt": f"prompt[{prompt_index}]"} if len(ask.prompts) > 1 else {}
        raise renamed(error, {**ask.names, **which}) from error


async def all_of(works: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Does several things at once; the first failure ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def outcome_of(choice: Choice) -> Outcome:
    """Reads a choice to its end.

    Raises:
        PacelineError: it has failed.
    """
    started: Started | None = None
    chunks: list[Chunk] = []
    while (event := await choice.generation.next()) is not None:
        match event:
            case Started():
                started = event
            case Chunk():
                chunks.append(event)
            case Finished():
                if started is not None:
                    return Outcome(choice, started, merged(chunks), event)
    raise PacelineError("a generation ended without its last event")


def merged(chunks: Sequence[Chunk]) -> Chunk:
    """Several chunks as one."""
    return Chunk(
        text="".join([chunk.text for chunk in chunks]),
        token_ids=tuple([token for chunk in chunks for token in chunk.token_ids]),
        origins=tuple([origin for chunk in chunks for origin in chunk.origins]),
        next_token=chunks[-1].next_token if chunks else 0,
        durable=all(chunk.durable for chunk in chunks),
        text_lengths=tuple([length for chunk in chunks for length in chunk.text_lengths]),
        logprobs=tuple([entry for chunk in chunks for entry in chunk.logprobs]),
    )
