"""Devices in simulated time: passes take what is stated, what they say comes from seeded numbers.

verifier  one pass after another over all that wait, after a moment for company; perhaps a draft after it
drafter   one pass after another, a token of each draft on its way; a newer draft of a session ends its older one
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Protocol

from paceline_gateway.effects import Replica

from paceline.benchmark.ideal import DRAFT_PASS, VERIFY_PASS
from paceline.engine.gather import GatherWindow
from paceline.engine.simulated.pass_time import PassTime
from paceline.messages import (
    Draft,
    Drafted,
    DrafterCommand,
    DrafterEvent,
    ModelInfo,
    NeedTokens,
    Open,
    Opened,
    Timing,
    Verified,
    VerifierCommand,
    VerifierEvent,
    Verify,
)
from tests.unit.gateway.seeded_text import block, judged, token_at
from tests.unit.gateway.simulated_replicas import comes_true

VOCAB_SIZE = 16
_MAX_MODEL_LEN = 1 << 20
_US_PER_S = 1e6


@dataclass(frozen=True, slots=True)
class Devices:
    """What the fleet is made of.

    Attributes:
        verifiers, drafters: how many.
        verify_pass, draft_pass: times of a pass.
        acceptance: how often a draft is right, at each position independently.
        rtt_s: from the gateway to a replica and back.
        gather_window_s: longest wait of a verifier for company.
        branches: blocks are trees, with two guesses at each place.
        self_draft_pass: the verifier drafts, so long over its sessions and whatever the depth; None: it does not.
    """

    verifiers: int = 1
    drafters: int = 1
    verify_pass: PassTime = VERIFY_PASS
    draft_pass: PassTime = DRAFT_PASS
    acceptance: float = 0.8
    rtt_s: float = 0.0002
    gather_window_s: float = 0.020
    branches: bool = False
    self_draft_pass: PassTime | None = None


class Owner(Protocol):
    """Who is answered.

    Attributes:
        text: number of what it writes.
    """

    text: int

    def on_verifier(self, event: VerifierEvent) -> None:
        """A verifier's answer is there."""

    def on_drafter(self, event: DrafterEvent) -> None:
        """A drafter's answer is there."""


class World:
    """Time, and what devices are like at present.

    Args:
        devices: may be exchanged while time passes: what was said to a replica before stays said.

    Attributes:
        now: seconds.
    """

    def __init__(self, devices: Devices) -> None:
        self.devices = devices
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, delay_s: float, event: Callable[[], None]) -> None:
        """Something happens so much later."""
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), event))

    def pass_time(self, seconds: float) -> None:
        """Lets happen what happens in that time."""
        ends = self.now + seconds
        while self._events and self._events[0][0] <= ends:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = ends


class Device:
    """One pass after another."""

    def __init__(self, world: World, kind: str, index: int) -> None:
        self._world = world
        self._computes = False
        info = ModelInfo(
            "simulated",
            VOCAB_SIZE,
            _MAX_MODEL_LEN,
            (),
            "hash",
            "boot",
            ("medusa",) if kind == "verifier" and world.devices.self_draft_pass is not None else (),
            max_draft_tokens=64,
            gather_window_us=round(_US_PER_S * world.devices.gather_window_s),
        )
        self.replica = Replica(f"{kind}-{index}", info)

    def take(self, owner: Owner, command: VerifierCommand | DrafterCommand) -> None:
        """A command has come."""
        raise NotImplementedError

    def close(self, owner: Owner) -> None:
        """A session is over."""
        raise NotImplementedError

    def _timing(self, arrived: float, started: float, sessions: int, tokens: int, drafted_s: float = 0.0) -> Timing:
        now = self._world.now
        return Timing(
            queue_us=int(_US_PER_S * (started - arrived)),
            forward_us=int(_US_PER_S * (now - started)),
            total_us=int(_US_PER_S * (now - arrived)),
            batch_sessions=sessions,
            batch_tokens=tokens,
            draft_us=int(_US_PER_S * drafted_s),
        )


@dataclass(slots=True)
class _Judged:
    owner: Owner
    command: Verify
    arrived: float


class SimulatedVerifier(Device):
    def __init__(self, world: World, index: int) -> None:
        super().__init__(world, "verifier", index)
        self._rows: dict[int, int] = {}
        self._waiting: list[_Judged] = []
        self._answered: dict[int, Verified] = {}
        self._follow_ups: dict[int, Verify] = {}
        self._gather = GatherWindow(world.devices.gather_window_s, lambda: world.now)

    def take(self, owner: Owner, command: VerifierCommand | DrafterCommand) -> None:
        if isinstance(command, Open):
            self._rows[owner.text] = 0
            self._answer(owner, Opened(command.session, command.epoch))
        elif isinstance(command, Verify):
            answered = self._answered.get(owner.text)
            if command.follows and (answered is None or answered.round < command.follows):
                self._follow_ups[owner.text] = command
                return
            if command.follows and not (answered and comes_true(command, answered)):
                self._need_tokens(owner, command)
                return
            self._gather.returned(command.session, self._world.now)
            self._waiting.append(_Judged(owner, command, self._world.now))
            self._begin()

    def close(self, owner: Owner) -> None:
        for kept in (self._rows, self._answered, self._follow_ups):
            kept.pop(owner.text, None)
        self._gather.forget(str(owner.text))

    def _need_tokens(self, owner: Owner, command: Verify) -> None:
        self._answer(owner, NeedTokens(command.session, command.epoch, command.round, 0))

    def _answer(self, owner: Owner, event: VerifierEvent) -> None:
        self._world.at(self._world.devices.rtt_s / 2, partial(owner.on_verifier, event))

    def _begin(self) -> None:
        if self._computes or not self._waiting:
            return
        if (delay_s := self._gather.delay_s(len(self._waiting))) > 5e-10:
            self._world.at(delay_s, self._begin)
            return
        batch, self._waiting = self._waiting, []
        tokens = sum(
            verify.command.base_len - self._rows[verify.owner.text] + verify.command.block.num_draft_tokens
            for verify in batch
        )
        took_s = self._world.devices.verify_pass.seconds(tokens)
        self_draft, asked = self._world.devices.self_draft_pass, sum(verify.command.next_depth > 0 for verify in batch)
        drafted_s = self_draft.seconds(asked) if self_draft is not None and asked else 0.0
        self._computes = True
        self._world.at(took_s + drafted_s, partial(self._end, batch, tokens, self._world.now, drafted_s))

    def _end(self, batch: list[_Judged], tokens: int, started: float, drafted_s: float) -> None:
        self._computes = False
        self._gather.pass_took(self._world.now - started, len(batch), tokens)
        devices = self._world.devices
        for verify in batch:
            command, text = verify.command, verify.owner.text
            path = judged(text, command.base_len, command.block)
            accepted = len(path)
            self._rows[text] = command.base_len + accepted
            answer = self._answered[text] = Verified(
                command.session,
                command.epoch,
                command.round,
                command.base_len,
                path,
                tuple([token_at(text, command.base_len + place) for place in range(accepted + 1)]),
                kv_len=self._rows[text],
                timing=self._timing(verify.arrived, started, len(batch), tokens, drafted_s),
                next_block=block(
                    text, command.base_len + accepted + 1, command.next_depth, devices.acceptance, devices.branches
                ),
                next_method="medusa" if command.next_depth else "",
            )
            self._answer(verify.owner, answer)
            self._go_on(verify.owner, answer)
        self._begin()

    def _go_on(self, owner: Owner, answer: Verified) -> None:
        follow_up = self._follow_ups.pop(owner.text, None)
        if follow_up is not None and comes_true(follow_up, answer):
            self._waiting.append(_Judged(owner, follow_up, self._world.now))
            return
        self._gather.answered(answer.session)
        if follow_up is not None:
            self._need_tokens(owner, follow_up)


@dataclass(slots=True)
class _Making:
    owner: Owner
    command: Draft
    arrived: float
    started: float | None = None
    made: int = 0
    shared: int = 0


class SimulatedDrafter(Device):
    def __init__(self, world: World, index: int) -> None:
        super().__init__(world, "drafter", index)
        self._due: dict[int, _Making] = {}

    def take(self, owner: Owner, command: VerifierCommand | DrafterCommand) -> None:
        if isinstance(command, Open):
            self._answer(owner, Opened(command.session, command.epoch))
        elif isinstance(command, Draft):
            self.close(owner)
            self._due[owner.text] = _Making(owner, command, self._world.now)
            self._world.at(0.0, self._begin)  # after all commands of the same frame

    def close(self, owner: Owner) -> None:
        making = self._due.pop(owner.text, None)
        if making is not None:
            self._made(making)

    def _answer(self, owner: Owner, event: DrafterEvent) -> None:
        self._world.at(self._world.devices.rtt_s / 2, partial(owner.on_drafter, event))

    def _begin(self) -> None:
        if self._computes or not self._due:
            return
        batch = list(self._due.values())
        self._computes = True
        self._world.at(self._world.devices.draft_pass.seconds(len(batch)), partial(self._end, batch, self._world.now))

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
        started = self._world.now if making.started is None else making.started
        sessions = round(making.shared / max(making.made, 1))
        self._answer(
            making.owner,
            Drafted(
                command.session,
                command.epoch,
                command.draft_id,
                block(text, start, making.made, self._world.devices.acceptance, self._world.devices.branches),
                kv_len=command.base_len - 1,
                method="draft_model",
                timing=self._timing(making.arrived, started, sessions, sessions),
            ),
        )
