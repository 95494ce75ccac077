"""A fleet in simulated time: the gateway's own round loops, and devices whose passes take a stated time.

Everything that decides is the real thing (`RoundLoop`, the governor, `GatherWindow`); wire, store and models are not.
So what sessions make of one another, of full drafters and of short requests is seen in a second, the same each time.

    client i  one generation after another, each of so many tokens
    gateway   a round loop per generation, no time
    wire      half a round trip each way
    replicas  `simulated_devices.py`
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from paceline_gateway.effects import Commit, Effect, Fail, Find, Finish, Lane, Leave, Measured, Send
from paceline_gateway.plan import GenerationPlan, Patience
from paceline_gateway.round_loop import RoundLoop
from paceline_gateway.session_governor import FleetTimes

from paceline.messages import DrafterEvent, SamplingParams, VerifierEvent
from paceline.speculation.governor import Reason
from paceline.text.commit import Committer, EndSettings
from paceline.text.tokenizer import Tokenizer
from tests.fakes.tiny_tokenizer import write_letters
from tests.unit.gateway.simulated_devices import (
    VOCAB_SIZE,
    Device,
    Devices,
    SimulatedDrafter,
    SimulatedVerifier,
    World,
)

_PROMPT = tuple(range(8)) * 2


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


class SimulatedFleet(World):
    """Clients, one gateway and its replicas.

    Args:
        folder: for the tokenizer.
        devices: may be exchanged while it runs: what was said to a replica before stays said.
        load: fixed.
    """

    def __init__(self, folder: Path, devices: Devices, load: Load) -> None:
        super().__init__(devices)
        self.load = load
        self.times = FleetTimes()
        self.seen = Seen()
        self.tokenizer = _letters(folder)
        self._texts = count()
        self.verifiers = [SimulatedVerifier(self, index) for index in range(devices.verifiers)]
        self.drafters = [SimulatedDrafter(self, index) for index in range(devices.drafters)]
        for number in range(load.sessions):
            self.at(1e-4 * number, partial(self.begin, number))

    def begin(self, number: int) -> None:
        """A client's next generation."""
        _Generation(self, number, next(self._texts))

    def run(self, seconds: float) -> Seen:
        """Lets time pass and says what happened meanwhile."""
        self.seen = Seen(seconds)
        self.pass_time(seconds)
        return self.seen

    def replica(self, lane: Lane, number: int) -> Device:
        """Clients are dealt out evenly."""
        devices: list[Device] = [*(self.verifiers if lane is Lane.VERIFIER else self.drafters)]
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


@functools.cache
def _letters(folder: Path) -> Tokenizer:
    return Tokenizer.load(write_letters(folder, VOCAB_SIZE))
