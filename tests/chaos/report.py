"""What a run was and what it found: printed, and written as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bench.near_ties import Tally


@dataclass(frozen=True, slots=True)
class ChaosReport:
    """One run.

    Attributes:
        seed: of faults and conversations.
        seconds: during which faults were injected.
        streams: open at any time.
        processes: of each kind.
        faults_injected: by kind.
        kills: `kill -9` by member.
        generations: begun.
        complete: ended with exactly the tokens, the text and the end of the undisturbed run.
        left: their clients left in the middle; equal as far as they had read.
        excused: typed errors while no verifier was there for all of a client's deadline; those streams were resumed.
        tokens: compared.
        near_ties: differences that rounding explains.
        resumes: streams that a gateway took over from another one, or from itself.
        moves: sessions that went on at another verifier or anew at the same one.
        busy_retries: times that a session's name was still taken by a gateway that had died.
        longest_gap_s: between two events of a stream during which there was always some verifier.
        longest_gap_of: whose.
        median_gap_s: of the longest gaps of all those streams.
        blackout_s: time in which no verifier could be used.
        idle_after_s: after the last stream, until nothing was left of anybody.
        memory_mib: of each process, once it had warmed up and after the faults.
        faults: what is wrong; empty if nothing is.
    """

    seed: int
    seconds: float
    streams: int
    processes: Mapping[str, int]
    faults_injected: Mapping[str, int]
    kills: Mapping[str, int]
    generations: int
    complete: int
    left: int
    excused: int
    tokens: int
    near_ties: int
    resumes: int
    moves: int
    busy_retries: int
    longest_gap_s: float
    longest_gap_of: str
    median_gap_s: float
    blackout_s: float
    idle_after_s: float
    memory_mib: Mapping[str, tuple[int, int]]
    faults: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def lines(self) -> Iterator[str]:
        """The report for people."""
        processes = ", ".join(f"{count} {kind}" for kind, count in self.processes.items())
        yield f"chaos with seed {self.seed}: {self.seconds:g} s, {self.streams} streams at once; {processes}"
        yield from (f"  {count:4}  {kind}" for kind, count in self.faults_injected.items())
        yield f"  {sum(self.kills.values()):4}  processes killed with kill -9: {_listed(self.kills)}"
        yield (
            f"{self.generations} generations of {self.tokens} tokens: {self.complete} complete and equal, {self.left} "
            f"left by their clients and equal so far, {self.near_ties} near-ties, {self.excused} excused errors"
        )
        yield f"{self.resumes} resumes, {self.moves} moves, {self.busy_retries} waits for the name of a session"
        yield (
            f"longest gap {self.longest_gap_s:.1f} s ({self.longest_gap_of}), median of the longest "
            f"{self.median_gap_s:.1f} s; no verifier for {self.blackout_s:.1f} s; everything free "
            f"{self.idle_after_s:.1f} s after the last stream"
        )
        grown = ", ".join(f"{name} {warm} -> {now}" for name, (warm, now) in self.memory_mib.items())
        yield f"MiB of memory, warm and after the faults: {grown}"
        yield from (f"FAULT: {fault}" for fault in self.faults)
        yield "passed" if self.passed else f"FAILED: {len(self.faults)} faults"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count)


def tally_faults(tally: Tally) -> list[str]:
    """What is wrong with a tally."""
    too_many = len(tally.near_ties) > tally.allowed_near_ties
    found = [*tally.faults]
    if too_many:
        found += [f"{len(tally.near_ties)} near-ties in {tally.num_tokens} tokens", *tally.near_ties]
    return found
