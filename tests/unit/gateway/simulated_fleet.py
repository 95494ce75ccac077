"""A fleet in simulated time: the gateway's own round loops, and devices whose passes take a stated time.

Everything that decides is the real thing (`RoundLoop`, the governor, `GatherWindow`); wire, store and models are not.
So what sessions make of one another, of full drafters and of short requests is seen in a second, the same each time.

    client i  one generation after another, each of so many tokens
    gateway   a round loop per generation, no time
    wire      half a round trip each way
    verifier  one pass after another over all that wait, after a moment for company
    drafter   one pass after another, a token of each draft on its way; a newer draft of a session ends its older one
"""

from __future__ import annotations

import functools
import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from paceline_gateway.effects import Commit, Effect, Fail, Find, Finish, Lane, Leave, Measured, Replica, Send
from paceline_gateway.plan import GenerationPlan, Patience
from paceline_gateway.round_loop import RoundLoop
from paceline_gateway.session_governor import FleetTimes

from paceline.benchmark.ideal import DRAFT_PASS, VERIFY_PASS
from paceline.engine.gather import GatherWindow
from paceline.engine.simulated.pass_time import PassTime
from paceline.messages import (
    Draft,
    Drafted,
    DrafterCommand,
    DrafterEvent,
    ModelInfo,
    Open,
    Opened,
    SamplingParams,
    Timing,
    Verified,
    VerifierCommand,
    VerifierEvent,
    Verify,
)
from paceline.speculation.governor import Reason
from paceline.speculation.tree import DraftTree
from paceline.text.commit import Committer, EndSettings
from paceline.text.tokenizer import Tokenizer
from tests.fakes.tiny_tokenizer import write_letters

_VOCAB_SIZE = 16
_NUM_LETTERS = 14
_MAX_MODEL_LEN = 1 << 20
_US_PER_S = 1e6
_PROMPT = tuple(range(8)) * 2
_MASK = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Devices:
    """What the fleet is made of.

    Attributes:
        verifiers, drafters: how many.
        verify_pass, draft_pass: times of a pass.
        acceptance: how often a draft is right, at each position independently.
        rtt_s: from the gateway to a replica and back.
        gather_window_s: longest wait of a verifier for company.
    """

    verifiers: int = 1
    drafters: int = 1
    verify_pass: PassTime = VERIFY_PASS
    draft_pass: PassTime = DRAFT_PASS
    acceptance: float = 0.8
    rtt_s: float = 0.0002
    gather_window_s: float = 0.020


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of it.

    Attributes:
        sessions: generations at once.
        max_tokens: of each; another one follows at once.
        num_draft_tokens: block size, the largest where it is governed.
        ahead: blocks are drafted ahead, or may be.
        governed: the governor chooses.
    """

    sessions: int = 1
    max_tokens: int = 1 << 19
    num_draft_tokens: int = 4
    ahead: bool = True
    governed: bool = True


@dataclass(slots=True)
class Seen:
    """What happened while it was counted."""

    seconds: float = 0.0
    tokens: int = 0
    changes: int = 0
    reasons: Counter[Reason] = field(default_factory=Counter)
    sizes: Counter[int] = field(default_factory=Counter)
    ahead_hits: int = 0

    @property
    def goodput(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def _mixed(value: int) -> int:
    value = (value ^ (value >> 33)) * 0x7F51AFD7ED558CCD & _MASK
    value = (value ^ (value >> 33)) * 0x44CEB9FE1A85EC53 & _MASK
    return value ^ (value >> 33)


def _token(text: int, position: int) -> int:
    return _mixed((text << 32) + position) % _NUM_LETTERS


def _guess(text: int, position: int, acceptance: float) -> int:
    token = _token(text, position)
    right = _mixed((text << 32) + position + (1 << 31)) < acceptance * _MASK
    return token if right else (token + 1) % _NUM_LETTERS


class SimulatedFleet:
    """Clients, one gateway and its replicas.

    Args:
        folder: for the tokenizer.
        devices: may be exchanged while it runs: what was said to a replica before stays said.
        load: fixed.
    """

    def __init__(self, folder: Path, devices: Devices, load: Load) -> None:
        self.devices = devices
        self.load = load
        self.times = FleetTimes()
        self.now = 0.0
        self.seen = Seen()
        self.tokenizer = _letters(folder)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._texts = count()
        self.verifiers = [_Verifier(self, index) for index in range(devices.verifiers)]
        self.drafters = [_Drafter(self, index) for index in range(devices.drafters)]
        for number in range(load.sessions):
            self.at(1e-4 * number, partial(self.begin, number))

    def at(self, delay_s: float, event: Callable[[], None]) -> None:
        """Something happens so much later."""
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), event))

    def begin(self, number: int) -> None:
        """A client's next generation."""
        _Generation(self, number, next(self._texts))

    def run(self, seconds: float) -> Seen:
        """Lets time pass and says what happened meanwhile."""
        self.seen = Seen(seconds)
        ends = self.now + seconds
        while self._events and self._events[0][0] <= ends:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = ends
        return self.seen

    def replica(self, lane: Lane, number: int) -> _Device:
        """Clients are dealt out evenly."""
        devices: list[_Device] = [*(self.verifiers if lane is Lane.VERIFIER else self.drafters)]
        return devices[number % len(devices)]


class _Generation:
    """One generation of a client: its round loop, and where its replicas are."""

    def __init__(self, fleet: SimulatedFleet, number: int, text: int) -> None:
        self._fleet = fleet
        self._number = number
        self._tick_at: float | None = None
        self.text = text
        load = fleet.load
        plan = GenerationPlan(
            session=str(text),
            session_drawn=True,
            model="simulated",
            prompt=_PROMPT,
            sampling=SamplingParams(temperature=0.0),
            max_tokens=load.max_tokens,
            num_draft_tokens=load.num_draft_tokens,
            draft_ahead=load.ahead,
            governed=load.governed,
        )
        committer = Committer(fleet.tokenizer, EndSettings(load.max_tokens), _PROMPT)
        self._loop = RoundLoop(plan, committer, Patience(), fleet.now, fleet.times)
        self._loop.start(fleet.now)
        self._settle()

    def on_verifier(self, event: VerifierEvent) -> None:
        """A verifier's answer is there."""
        self._loop.on_verifier(event, self._fleet.now)
        self._settle()

    def on_drafter(self, event: DrafterEvent) -> None:
        """A drafter's answer is there."""
        self._loop.on_drafter(event, self._fleet.now)
        self._settle()

    def _settle(self) -> None:
        while effects := self._loop.take_effects():
            for effect in effects:
                self._carry_out(effect)
        deadline = self._loop.deadline
        if deadline is not None and (self._tick_at is None or deadline < self._tick_at):
            self._tick_at = deadline
            self._fleet.at(max(deadline - self._fleet.now, 0.0), partial(self._tick, deadline))

    def _tick(self, due: float) -> None:
        if due != self._tick_at:
            return
        self._tick_at = None
        deadline = self._loop.deadline
        if deadline is not None and deadline <= self._fleet.now:
            self._loop.tick(self._fleet.now)
        self._settle()

    def _carry_out(self, effect: Effect) -> None:
        fleet = self._fleet
        match effect:
            case Find(lane):
                self._loop.found(lane, fleet.replica(lane, self._number).replica, fleet.now)
            case Leave(lane):
                fleet.at(fleet.devices.rtt_s / 2, partial(fleet.replica(lane, self._number).close, self))
            case Send(lane, command):
                fleet.at(fleet.devices.rtt_s / 2, partial(fleet.replica(lane, self._number).take, self, command))
            case Commit():
                fleet.seen.tokens += len(effect.tokens)
            case Measured(record):
                fleet.seen.ahead_hits += record.ahead_hit
                fleet.seen.changes += record.size_changes
                if record.decision is not None:
                    fleet.seen.reasons[record.decision.reason] += 1
                if record.target_passes:
                    fleet.seen.sizes[record.draft_tokens] += 1
            case Finish():
                fleet.at(0.0, partial(fleet.begin, self._number))
            case Fail(error):
                raise error


class _Device:
    """One pass after another."""

    def __init__(self, fleet: SimulatedFleet, kind: str, index: int) -> None:
        self._fleet = fleet
        self._computes = False
        info = ModelInfo(
            "simulated",
            _VOCAB_SIZE,
            _MAX_MODEL_LEN,
            (),
            "hash",
            "boot",
            max_draft_tokens=64,
            gather_window_us=round(_US_PER_S * fleet.devices.gather_window_s),
        )
        self.replica = Replica(f"{kind}-{index}", info)

    def take(self, owner: _Generation, command: VerifierCommand | DrafterCommand) -> None:
        """A command has come."""
        raise NotImplementedError

    def close(self, owner: _Generation) -> None:
        """A session is over."""
        raise NotImplementedError

    def _timing(self, arrived: float, started: float, sessions: int, tokens: int) -> Timing:
        now = self._fleet.now
        return Timing(
            queue_us=int(_US_PER_S * (started - arrived)),
            forward_us=int(_US_PER_S * (now - started)),
            total_us=int(_US_PER_S * (now - arrived)),
            batch_sessions=sessions,
            batch_tokens=tokens,
        )


@dataclass(slots=True)
class _Judged:
    owner: _Generation
    command: Verify
    arrived: float


class _Verifier(_Device):
    def __init__(self, fleet: SimulatedFleet, index: int) -> None:
        super().__init__(fleet, "verifier", index)
        self._rows: dict[int, int] = {}
        self._waiting: list[_Judged] = []
        self._gather = GatherWindow(fleet.devices.gather_window_s, lambda: fleet.now)

    def take(self, owner: _Generation, command: VerifierCommand | DrafterCommand) -> None:
        if isinstance(command, Open):
            self._rows[owner.text] = 0
            self._answer(owner, Opened(command.session, command.epoch))
        elif isinstance(command, Verify):
            self._gather.returned(command.session, self._fleet.now)
            self._waiting.append(_Judged(owner, command, self._fleet.now))
            self._begin()

    def close(self, owner: _Generation) -> None:
        self._rows.pop(owner.text, None)
        self._gather.forget(str(owner.text))

    def _answer(self, owner: _Generation, event: VerifierEvent) -> None:
        self._fleet.at(self._fleet.devices.rtt_s / 2, partial(owner.on_verifier, event))

    def _begin(self) -> None:
        if self._computes or not self._waiting:
            return
        if (delay_s := self._gather.delay_s(len(self._waiting))) > 5e-10:
            self._fleet.at(delay_s, self._begin)
            return
        batch, self._waiting = self._waiting, []
        tokens = sum(
            judged.command.base_len - self._rows[judged.owner.text] + judged.command.block.num_draft_tokens
            for judged in batch
        )
        took_s = self._fleet.devices.verify_pass.seconds(tokens)
        self._computes = True
        self._fleet.at(took_s, partial(self._end, batch, tokens, self._fleet.now))

    def _end(self, batch: list[_Judged], tokens: int, started: float) -> None:
        self._computes = False
        self._gather.pass_took(self._fleet.now - started, len(batch), tokens)
        for judged in batch:
            command, text = judged.command, judged.owner.text
            accepted, block = 0, command.block
            while (
                accepted < block.num_draft_tokens
                and _token(text, command.base_len + accepted) == block.tokens[accepted]
            ):
                accepted += 1
            self._rows[text] = command.base_len + accepted
            self._gather.answered(command.session)
            self._answer(
                judged.owner,
                Verified(
                    command.session,
                    command.epoch,
                    command.round,
                    command.base_len,
                    tuple(range(1, accepted + 1)),
                    tuple([_token(text, command.base_len + place) for place in range(accepted + 1)]),
                    kv_len=self._rows[text],
                    timing=self._timing(judged.arrived, started, len(batch), tokens),
                ),
            )
        self._begin()


@dataclass(slots=True)
class _Making:
    owner: _Generation
    command: Draft
    arrived: float
    started: float | None = None
    made: int = 0
    shared: int = 0


class _Drafter(_Device):
    def __init__(self, fleet: SimulatedFleet, index: int) -> None:
        super().__init__(fleet, "drafter", index)
        self._due: dict[int, _Making] = {}

    def take(self, owner: _Generation, command: VerifierCommand | DrafterCommand) -> None:
        if isinstance(command, Open):
            self._answer(owner, Opened(command.session, command.epoch))
        elif isinstance(command, Draft):
            self.close(owner)
            self._due[owner.text] = _Making(owner, command, self._fleet.now)
            self._fleet.at(0.0, self._begin)  # after all commands of the same frame

    def close(self, owner: _Generation) -> None:
        making = self._due.pop(owner.text, None)
        if making is not None:
            self._made(making)

    def _answer(self, owner: _Generation, event: DrafterEvent) -> None:
        self._fleet.at(self._fleet.devices.rtt_s / 2, partial(owner.on_drafter, event))

    def _begin(self) -> None:
        if self._computes or not self._due:
            return
        batch = list(self._due.values())
        self._computes = True
        self._fleet.at(self._fleet.devices.draft_pass.seconds(len(batch)), partial(self._end, batch, self._fleet.now))

    def _end(self, batch: list[_Making], started: float) -> None:
        self._computes = False
        for making in batch:
            making.made += 1
            making.shared += len(batch)
            making.started = started if making.started is None else making.started
            if making.made >= making.command.max_depth and self._due.get(making.owner.text) is making:
                del self._due[making.owner.text]
                self._made(making)
        self._begin()

    def _made(self, making: _Making) -> None:
        command, text = making.command, making.owner.text
        start = command.base_len + len(command.assumed)
        acceptance = self._fleet.devices.acceptance
        started = self._fleet.now if making.started is None else making.started
        sessions = round(making.shared / max(making.made, 1))
        self._answer(
            making.owner,
            Drafted(
                command.session,
                command.epoch,
                command.draft_id,
                DraftTree.chain([_guess(text, start + place, acceptance) for place in range(making.made)]),
                kv_len=command.base_len - 1,
                method="draft_model",
                timing=self._timing(making.arrived, started, sessions, sessions),
            ),
        )


@functools.cache
def _letters(folder: Path) -> Tokenizer:
    return Tokenizer.load(write_letters(folder, _VOCAB_SIZE))
