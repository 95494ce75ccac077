"""`paceline bench scale`: what a fleet of simulated devices reaches, divided by what it could reach.

Devices are simulated (a pass takes a stated time); services, wire and Redis are real. The ideal is a discrete-event
model of the same devices on the same text with no software (`paceline.benchmark.ideal`). Ways to generate take turns
on one fleet, so that a busy machine disturbs them alike.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from paceline.benchmark.ideal import IdealFleet, IdealResult, ideal, ideal_of_text
from paceline.benchmark.scale_fleet import ScaleFleet, ScaleOptions
from paceline.benchmark.scale_load import Load, prompts
from paceline.benchmark.scale_meter import NO_CPU, PHASES, CpuSeconds, Reading, read, sessions_open
from paceline.errors import InvalidArgument, Unavailable
from paceline.text.tokenizer import Tokenizer

WAYS = ("plain", "one process", "sequential", "ahead", "governed")
"""Names of all ways to generate."""
_WARM_UP_S = 2.0
_QUIET_TIMEOUT_S = 30.0
_QUIET_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Way:
    """A way to generate.

    Attributes:
        name: for tables.
        num_speculative_tokens: block size; 0 decodes plainly; None: the governor chooses, up to the fleet's.
        ahead: the next block is drafted while one is judged.
    """

    name: str
    num_speculative_tokens: int | None
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """What is measured.

    Attributes:
        options: of the fleet.
        sessions: numbers of sessions, one after the other.
        rtts_ms: distances between gateway and replicas.
        ways: some of `WAYS`; "one process" has no service between, and one session only.
        seconds: how long each way of each case is counted.
        repeats: of each case; ways take turns.
    """

    options: ScaleOptions
    sessions: tuple[int, ...] = (1,)
    rtts_ms: tuple[float, ...] = (0.2,)
    ways: tuple[str, ...] = WAYS
    seconds: float = 10.0
    repeats: int = 3

    @property
    def warm_up_s(self) -> float:
        """How long sessions run before they are counted, in seconds."""
        return min(_WARM_UP_S, self.seconds)

    def check(self) -> None:
        """Refuses what cannot be measured.

        Raises:
            InvalidArgument: names the way, or what to do.
        """
        unknown = [name for name in self.ways if name not in WAYS]
        if unknown:
            raise InvalidArgument(f"--way {unknown[0]}: name one of {', '.join(WAYS)}", field="way")
        if self.ways == ("one process",) and max(self.sessions) > 1:
            raise InvalidArgument("--way 'one process' has one session only: name another way too", field="way")


@dataclass(frozen=True, slots=True)
class Run:
    """One way of one case, once.

    Attributes:
        tokens_per_second: that clients got.
        ideal_tokens_per_second: what the model says.
        rounds_per_second: verdicts.
        ideal_rounds_per_second: what the model says.
        cpu_ms_per_round: processor time of each part.
        busy_cores: cores that all parts together kept busy.
        phases_ms: where a round's time went, as the gateway says; drafting runs beside judging.
        verifier_busy: part of the time in passes, of verifiers that had sessions.
        drafter_busy: the same of drafters.
        ahead_hits: share of rounds whose block had been drafted ahead.
        fallbacks: share of rounds without the block that they wanted.
    """

    tokens_per_second: float
    ideal_tokens_per_second: float
    rounds_per_second: float = 0.0
    ideal_rounds_per_second: float = 0.0
    cpu_ms_per_round: CpuSeconds = NO_CPU
    busy_cores: float = 0.0
    phases_ms: tuple[float, ...] = (0.0,) * len(PHASES)
    verifier_busy: float = 0.0
    drafter_busy: float = 0.0
    ahead_hits: float = 0.0
    fallbacks: float = 0.0

    @property
    def achieved(self) -> float:
        """Goodput divided by the ideal one."""
        return self.tokens_per_second / self.ideal_tokens_per_second


@dataclass(frozen=True, slots=True)
class ScaleRow:
    """One way of one case.

    Attributes:
        sessions: generations at once.
        rtt_ms: between gateway and replicas.
        way: its name.
        tokens_per_second: median over the repeats.
        ideal_tokens_per_second: what the model says, median.
        achieved: median of the quotients.
        over_plain: median of the quotients with plain decoding of the same repeat; 0 where that was not measured.
        over_sequential: the same with drafting that is not ahead.
        middle: the repeat of median goodput.
    """

    sessions: int
    rtt_ms: float
    way: str
    tokens_per_second: float
    ideal_tokens_per_second: float
    achieved: float
    over_plain: float
    over_sequential: float
    middle: Run


@dataclass(frozen=True, slots=True)
class ScaleResult:
    """What `paceline bench scale` writes.

    Attributes:
        plan: what was measured.
        phases: names of `Run.phases_ms`.
        rows: in the order of measurement.
    """

    plan: ScalePlan
    phases: tuple[str, ...]
    rows: tuple[ScaleRow, ...]


async def measure_scale(plan: ScalePlan, log_dir: Path, say: Callable[[str], object]) -> ScaleResult:
    """Starts a fleet, measures all cases and stops it.

    Args:
        plan: what is measured.
        log_dir: folder of the processes' logs.
        say: told what is being done.

    Raises:
        PacelineError: the fleet does not start, or a generation fails.
    """
    found_rows: list[ScaleRow] = []
    say(f"starting {plan.options.verifiers} verifiers and {plan.options.drafters} drafters of simulated devices")
    async with ScaleFleet(plan.options, log_dir) as fleet:
        for sessions in plan.sessions:
            for rtt_ms in plan.rtts_ms:
                await fleet.delay(rtt_ms)
                found: dict[str, list[Run]] = {}
                for repeat in range(plan.repeats):
                    for way in _turn(plan, sessions, repeat):
                        say(f"{sessions} sessions, {rtt_ms:g} ms away, {way.name}, {repeat + 1} of {plan.repeats}")
                        found.setdefault(way.name, []).append(await run_way(fleet, plan, sessions, rtt_ms, way))
                found_rows += rows(sessions, rtt_ms, plan.ways, found)
    return ScaleResult(plan, PHASES, tuple(found_rows))


def _turn(plan: ScalePlan, sessions: int, repeat: int) -> list[Way]:
    """The ways of a repeat; each begins with another one."""
    block = plan.options.num_speculative_tokens
    known = {
        "plain": Way("plain", 0),
        "one process": Way("one process", block),
        "sequential": Way("sequential", block),
        "ahead": Way("ahead", block, ahead=True),
        "governed": Way("governed", None, ahead=True),
    }
    ways = [known[name] for name in plan.ways if name != "one process" or sessions == 1]
    first = repeat % len(ways)
    return [*ways[first:], *ways[:first]]


async def run_way(fleet: ScaleFleet, plan: ScalePlan, sessions: int, rtt_ms: float, way: Way) -> Run:
    """Measures one way of one case, once.

    Args:
        fleet: runs and is so far away.
        plan: how long.
        sessions: generations at once.
        rtt_ms: the distance, for the ideal.
        way: how they generate.

    Raises:
        PacelineError: a generation fails.
    """
    tokenizer = Tokenizer.load(fleet.model_dir)
    if way.name == "one process":
        from paceline.benchmark.scale_local import one_process

        expected = ideal(_model(plan.options, sessions, 0.0, way)).tokens_per_second * plan.seconds
        num_tokens = max(round(expected), 1)
        best = _ideal(fleet, sessions, 0.0, way, (0, num_tokens)).tokens_per_second
        return Run(await asyncio.to_thread(one_process, plan.options, tokenizer, num_tokens), best)
    gateway = fleet.gateways[way.ahead]
    starts = prompts(sessions, tokenizer.vocab_size)
    max_tokens = plan.options.max_model_len - len(starts[0]) - 1
    async with Load(gateway.address, starts, way.num_speculative_tokens, max_tokens) as load:
        await asyncio.sleep(plan.warm_up_s)
        before = await read(fleet, gateway, load)
        await asyncio.sleep(plan.seconds)
        after = await read(fleet, gateway, load)
        load.check()
    await _quiet(fleet)
    if after.tokens == before.tokens:
        raise Unavailable(f"no token came in {plan.seconds:g} seconds: count for longer (--seconds)")
    # The first token of each comes from reading its prompt, which the model leaves out.
    text = (before.tokens - sessions, after.tokens - sessions)
    return figures(before, after, _ideal(fleet, sessions, rtt_ms, way, text), plan.options, sessions)


async def _quiet(fleet: ScaleFleet) -> None:
    """Returns when no replica holds a session.

    Raises:
        Unavailable: they do not let go.
    """
    ends_s = time.monotonic() + _QUIET_TIMEOUT_S
    while held := await sessions_open(fleet):
        if time.monotonic() > ends_s:
            raise Unavailable(f"replicas still hold {held:.0f} sessions whose clients have left")
        await asyncio.sleep(_QUIET_POLL_S)


def _ideal(fleet: ScaleFleet, sessions: int, rtt_ms: float, way: Way, text: tuple[int, int]) -> IdealResult:
    """The model of a case over a stretch of what its sessions write; of a governed one the best of the others."""
    options = fleet.options
    if way.num_speculative_tokens is None:
        block = options.num_speculative_tokens
        others = (Way("plain", 0), Way("sequential", block), Way("ahead", block, ahead=True))
        results = [_ideal(fleet, sessions, rtt_ms, other, text) for other in others]
        return max(results, key=lambda result: result.tokens_per_second)
    tokenizer = Tokenizer.load(fleet.model_dir)
    simulated = options.drafter.text(tokenizer.vocab_size, tokenizer.eos_token_ids)
    # A gateway takes the first token from reading the prompt, without a draft.
    num_undrafted = 0 if way.name == "one process" else 1
    luck: list[Iterator[bool]] = [
        islice(simulated.agreements(prompt), num_undrafted, None) for prompt in prompts(sessions, tokenizer.vocab_size)
    ]
    return ideal_of_text(_model(options, sessions, rtt_ms, way), *text, agreements=luck)


def _model(options: ScaleOptions, sessions: int, rtt_ms: float, way: Way) -> IdealFleet:
    """The model of a way of a case."""
    block = way.num_speculative_tokens or 0
    return IdealFleet(
        num_sessions=sessions,
        num_verifiers=options.verifiers,
        num_drafters=options.drafters,
        num_draft_tokens=block,
        acceptance=options.acceptance,
        rtt_ms=rtt_ms,
        ahead=way.ahead,
        outcomes=options.prepared_outcomes,
        outcome_chances=options.outcome_chances(block),
        verify_pass=options.verify_pass,
        draft_pass=options.draft_pass,
    )


def figures(before: Reading, after: Reading, best: IdealResult, options: ScaleOptions, sessions: int) -> Run:
    """What happened between two readings.

    Args:
        before: the earlier one.
        after: the later one.
        best: of the model.
        options: of the fleet.
        sessions: that ran.
    """
    seconds = after.at_s - before.at_s
    rounds = max(after.rounds - before.rounds, 1.0)
    cpu = after.cpu.minus(before.cpu)
    return Run(
        tokens_per_second=(after.tokens - before.tokens) / (after.newest_s - before.newest_s),
        ideal_tokens_per_second=best.tokens_per_second,
        rounds_per_second=rounds / seconds,
        ideal_rounds_per_second=best.rounds_per_second,
        cpu_ms_per_round=after.cpu.minus(before.cpu, 1e3 / rounds),
        busy_cores=cpu.total / seconds,
        phases_ms=tuple([1e3 * (after.phases_s[phase] - before.phases_s[phase]) / rounds for phase in PHASES]),
        verifier_busy=(after.verifying_s - before.verifying_s) / seconds / min(options.verifiers, sessions),
        drafter_busy=(after.drafting_s - before.drafting_s) / seconds / max(min(options.drafters, sessions), 1),
        ahead_hits=(after.ahead_hits - before.ahead_hits) / rounds,
        fallbacks=(after.fallbacks - before.fallbacks) / rounds,
    )


def rows(sessions: int, rtt_ms: float, ways: tuple[str, ...], found: dict[str, list[Run]]) -> list[ScaleRow]:
    """The rows of one case.

    Args:
        sessions: generations at once.
        rtt_ms: between gateway and replicas.
        ways: names, in the order of the rows; those that were not measured have none.
        found: each repeat of each way.
    """

    def over(name: str, other: str) -> float:
        if other not in found:
            return 0.0
        pairs = zip(found[name], found[other], strict=True)
        return statistics.median([run.tokens_per_second / base.tokens_per_second for run, base in pairs])

    return [
        ScaleRow(
            sessions,
            rtt_ms,
            name,
            statistics.median([run.tokens_per_second for run in found[name]]),
            statistics.median([run.ideal_tokens_per_second for run in found[name]]),
            statistics.median([run.achieved for run in found[name]]),
            over(name, "plain"),
            over(name, "sequential"),
            sorted(found[name], key=lambda run: run.tokens_per_second)[len(found[name]) // 2],
        )
        for name in ways
        if name in found
    ]
