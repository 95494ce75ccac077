"""A whole fleet without I/O around one `RoundLoop`: the test, not a network, decides what is delivered when.

Its replicas are those of `simulated_replicas`. Answers wait in a queue per lane until the test delivers them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import pytest
from paceline_gateway.effects import Commit, Fail, Fetch, Find, Finish, Lane, Leave, Measured, Replica, Send
from paceline_gateway.plan import GenerationPlan, Patience
from paceline_gateway.resumption import Resumption
from paceline_gateway.round_loop import RoundLoop
from paceline_gateway.round_record import RoundRecord, RoundTimes
from paceline_gateway.session_governor import FleetTimes

from paceline.errors import PacelineError
from paceline.messages import (
    AcceptanceRule,
    Draft,
    Drafted,
    DrafterCommand,
    DrafterEvent,
    ModelInfo,
    SamplingParams,
    Verified,
    VerifierCommand,
    VerifierEvent,
    Verify,
)
from paceline.text.commit import Committer, EndSettings
from paceline.text.tokenizer import Tokenizer
from tests.fakes.tiny_tokenizer import write_letters
from tests.unit.gateway.laws import EOS, VOCAB_SIZE, Law, Script
from tests.unit.gateway.simulated_replicas import SimDrafter, SimVerifier, matching


class Simulation:
    """One generation among simulated replicas.

    Attributes:
        waiting: per lane, the events that were not delivered yet.
        committed: all committed tokens of the generation.
        records: what its rounds cost and brought.
        fetches: features that are to be brought to the drafter, and were not yet.
        finish: how it ended; None while it runs.
        error: the error that ended it, if one did.
    """

    def __init__(
        self,
        folder: Path,
        law: Law,
        script: Script,
        *,
        prompt: Sequence[int] = (1, 2, 3),
        max_tokens: int = 24,
        num_draft_tokens: int = 4,
        draft_ahead: bool = True,
        stop: tuple[str, ...] = (),
        max_draft_tokens: int = 16,
        drafter_context: int = 256,
        patience: Patience | None = None,
        rule: AcceptanceRule = AcceptanceRule.MATCH,
        temperature: float = 0.0,
        seed: int = 0,
        self_draft: Script | None = None,
        method: str = "",
        fetch_features: bool = True,
        prompt_features: bool = True,
        resumption: Resumption | None = None,
        governed: bool = False,
        times: FleetTimes | None = None,
    ) -> None:
        tokenizer = _letters(folder)
        plan = GenerationPlan(
            session="s",
            session_drawn=True,
            model="toy",
            prompt=tuple(prompt),
            sampling=SamplingParams(temperature=temperature, seed=seed),
            max_tokens=max_tokens,
            num_draft_tokens=num_draft_tokens,
            rule=rule,
            draft_ahead=draft_ahead,
            stop=stop,
            method=method,
            fetch_features=fetch_features,
            prompt_features=prompt_features,
            resumption=resumption,
            governed=governed,
        )
        end = EndSettings(max_tokens, frozenset({EOS}), stop=stop)
        self.now = 0.0
        self.patience = patience or Patience()
        self.verifiers = {name: SimVerifier(matching(law), self_draft=self_draft) for name in ("v0", "v1")}
        self.drafter = SimDrafter(script)
        self.infos = {
            Lane.VERIFIER: _info(256, max_draft_tokens),
            Lane.DRAFTER: _info(drafter_context, 0),
        }
        self.available = {Lane.VERIFIER: ["v0"], Lane.DRAFTER: ["d0"]}
        self.attached: dict[Lane, str | None] = {Lane.VERIFIER: None, Lane.DRAFTER: None}
        self.seeking: dict[Lane, Find] = {}
        self.broken: set[Lane] = set()
        self.waiting: dict[Lane, deque[VerifierEvent | DrafterEvent]] = {lane: deque() for lane in Lane}
        self.sent: list[VerifierCommand | DrafterCommand] = []
        self.commits: list[Commit] = []
        self.records: list[RoundRecord] = []
        self.terminal: list[Finish | Fail] = []
        self.fetches: list[Fetch] = []
        committer = Committer(tokenizer, end, prompt)
        committer.commit_round(() if resumption is None else resumption.recorded)
        self.loop = RoundLoop(plan, committer, self.patience, self.now, times)

    @property
    def committed(self) -> tuple[int, ...]:
        return tuple(token for commit in self.commits for token in commit.tokens)

    @property
    def text(self) -> str:
        return "".join(text for commit in self.commits for text in commit.texts)

    @property
    def finish(self) -> Finish | None:
        return next((end for end in self.terminal if isinstance(end, Finish)), None)

    @property
    def error(self) -> PacelineError | None:
        return next((end.error for end in self.terminal if isinstance(end, Fail)), None)

    def start(self) -> None:
        self.loop.start(self.now)
        self.settle()

    def settle(self) -> None:
        """Carries out effects until there are none; delivers no event."""
        while True:
            effects = self.loop.take_effects()
            for effect in effects:
                self._carry_out(effect)
            if not effects and not self._offer():
                return

    def _carry_out(self, effect: object) -> None:
        match effect:
            case Find():
                self.seeking[effect.lane] = effect
            case Fetch():
                self.fetches.append(effect)
            case Leave():
                self.fetches.clear()
                self.seeking.pop(effect.lane, None)
                replica = self._replica(effect.lane)
                if replica is not None:
                    replica.sessions.pop("s", None)  # closed, or, if the link is broken, expired as an orphan
                self.attached[effect.lane] = None
                self.waiting[effect.lane].clear()
                self.broken.discard(effect.lane)
            case Send():
                self.sent.append(effect.command)
                replica = self._replica(effect.lane)
                if replica is not None and effect.lane not in self.broken:
                    self.waiting[effect.lane].extend(replica.handle(effect.command))
            case Commit():
                assert not self.terminal
                self.commits.append(effect)
            case Measured():
                assert not self.terminal
                self.records.append(effect.record)
            case Finish() | Fail():
                self.terminal.append(effect)

    def _replica(self, lane: Lane) -> SimVerifier | SimDrafter | None:
        address = self.attached[lane]
        if address is None:
            return None
        return self.verifiers[address] if lane is Lane.VERIFIER else self.drafter

    def _offer(self) -> bool:
        for lane, find in list(self.seeking.items()):
            choice = [address for address in self.available[lane] if address != find.avoid] or self.available[lane]
            if choice:
                del self.seeking[lane]
                self.attached[lane] = choice[0]
                self.loop.found(lane, Replica(choice[0], self._info(lane, choice[0])), self.now)
                return True
        return False

    def _info(self, lane: Lane, address: str) -> ModelInfo:
        info = self.infos[lane]
        if lane is Lane.DRAFTER or self.verifiers[address].self_draft is None:
            return info
        return dataclasses.replace(info, methods=self.verifiers[address].methods, drafting_bytes=500)

    # --- what the test does -------------------------------------------------------------------------------------------

    def deliver(self, lane: Lane, copies: int = 1) -> None:
        """Hands the lane's oldest event over, once or more."""
        event = self.waiting[lane].popleft()
        for _ in range(copies):
            self.say(lane, event)

    def say(self, lane: Lane, event: VerifierEvent | DrafterEvent) -> None:
        """Hands any event over."""
        if lane is Lane.VERIFIER:
            assert not isinstance(event, Drafted)
            self.loop.on_verifier(event, self.now)
        else:
            assert not isinstance(event, Verified)
            self.loop.on_drafter(event, self.now)
        self.settle()

    def break_link(self, lane: Lane, *, restart: bool = False) -> None:
        """The link breaks; answers on their way are lost. A restarted replica has forgotten all."""
        if self.attached[lane] is None or lane in self.broken:
            return
        self.broken.add(lane)
        self.waiting[lane].clear()
        replica = self._replica(lane)
        if restart and replica is not None:
            replica.sessions.clear()
        self.loop.lost(lane, self.now)
        self.settle()

    def mend_link(self, lane: Lane, *, restarted: bool = False) -> None:
        if lane in self.broken:
            self.broken.discard(lane)
            address = self.attached[lane]
            if restarted and address is not None:
                self.loop.found(lane, Replica(address, self._info(lane, address)), self.now)
            else:
                self.loop.back(lane, self.now)
            self.settle()

    def forget(self, lane: Lane) -> None:
        """The attached replica evicts the session."""
        replica = self._replica(lane)
        if replica is not None:
            replica.sessions.pop("s", None)

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        self.loop.tick(self.now)
        self.settle()

    def run(self, max_steps: int = 2000) -> None:
        """Delivers everything, the drafter's answers first, until the generation has ended."""
        for _ in range(max_steps):
            if self.terminal:
                return
            self.step()
        raise AssertionError(f"not over after {max_steps} steps: {self.committed}")

    def check_records(self) -> None:
        """What left round by round adds up to the evidence of the whole generation, however it ended."""
        evidence, records = self.loop.report(self.now), self.records
        times = functools.reduce(RoundTimes.plus, [record.times for record in records], RoundTimes())
        assert sum(record.target_passes for record in records) == evidence.target_passes
        assert sum(record.new_tokens for record in records) == len(self.committed)
        assert sum(record.draft_tokens for record in records) == evidence.draft_tokens
        assert sum(record.accepted_tokens for record in records) == evidence.accepted_tokens
        assert sum(record.wasted_draft_tokens for record in records) == evidence.wasted_draft_tokens
        assert sum(record.ahead_hit for record in records) == evidence.ahead_hits
        assert {record.method for record in records if record.draft_tokens} == set(evidence.methods)
        assert [times.draft_s, times.verify_s, times.draft_wait_s] == pytest.approx(
            [evidence.draft_ms / 1e3, evidence.verify_ms / 1e3, evidence.draft_wait_ms / 1e3]
        )
        assert times.draft_queue_s + times.verify_queue_s == pytest.approx(evidence.queue_ms / 1e3)
        assert times.draft_wire_s + times.verify_wire_s == pytest.approx(evidence.wire_ms / 1e3)
        firsts = [record.first for record in records if record.first is not None]
        assert len(firsts) == bool(evidence.target_passes)
        if firsts:
            since_first_s = sum(record.since_last_s for record in records)
            assert firsts[0].time_to_first_token_s + since_first_s <= self.now + 1e-9
            assert firsts[0].time_to_first_token_s == pytest.approx(evidence.time_to_first_token_ms / 1e3)

    def step(self) -> None:
        for lane in (Lane.DRAFTER, Lane.VERIFIER):
            if self.waiting[lane]:
                self.deliver(lane)
                return
        deadline = self.loop.deadline
        assert deadline is not None, "nothing is on its way and nothing is due: the session hangs"
        self.wait(max(deadline - self.now, 0.0))


@functools.cache
def _letters(folder: Path) -> Tokenizer:
    return Tokenizer.load(write_letters(folder, VOCAB_SIZE))


def _info(max_model_len: int, max_draft_tokens: int) -> ModelInfo:
    return ModelInfo("toy", VOCAB_SIZE, max_model_len, (EOS,), "hash", "boot", max_draft_tokens=max_draft_tokens)


def verifies(simulation: Simulation) -> list[Verify]:
    return [command for command in simulation.sent if isinstance(command, Verify)]


def drafts(simulation: Simulation) -> list[Draft]:
    return [command for command in simulation.sent if isinstance(command, Draft)]


def drain(simulation: Simulation, lane: Lane) -> None:
    while simulation.waiting[lane]:
        simulation.deliver(lane)


def deliver_verdict(simulation: Simulation) -> None:
    """Delivers the verifier's events up to and with the next verdict."""
    while simulation.waiting[Lane.VERIFIER]:
        is_verdict = isinstance(simulation.waiting[Lane.VERIFIER][0], Verified)
        simulation.deliver(Lane.VERIFIER)
        if is_verdict:
            return
    raise AssertionError("no verdict is on its way")
