"""Proves on real text that speculation changes no token: `make verify-lossless`.

For every prompt, greedy and with seeded sampling (temperature 0.8, top_p 0.95):
* plain decoding through the engine equals the independent cache-free reference (`bench/reference.py`);
* greedy plain decoding equals `transformers.generate`;
* every drafting method at every block size gives the tokens of plain decoding, several sessions to a pass.

For mixed sessions, alone, four and sixteen at once, with both runners (`bench/mixed.py`): every parameter and kind of
draft, prompts in chunks, shared prefixes and forced preemptions.

And for every drafting method there is (`bench/methods.py`): both placements, chains and trees, alone and eight at once,
with drafts that are accepted; methods that build on hidden states also through the services of a fleet.

Everything runs in float32 on the CPU in this process; near-ties are treated as `bench/near_ties.py` says. Exit status 0
means equal. Writes bench/results/verify_lossless.json. About fifty minutes on one core.

    python -m bench.verify_lossless [--parts prompts mixed methods] [--prompts 20] [--tokens 96]
                                    [--block-sizes 0 1 2 4 8] [--methods draft_model ngram medusa ...] [--variants 2]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.lossless import MODES, Lossless, demo_method, torch_method
from bench.method_cases import MethodReport, cases
from bench.method_engines import MethodEngines
from bench.method_services import check_services
from bench.methods import Methods
from bench.mixed import BATCHES, TORCH_SOURCE, Mixed, MixedReport, never_preempted
from bench.near_ties import Tally
from bench.reference import GREEDY
from bench.report import write_report
from bench.target import TARGET
from paceline.benchmark.prompts import DEMO_PROMPTS, PROMPTS
from paceline.engine.runner_options import RunnerChoice
from paceline.head_source import example_of
from paceline.method_names import METHOD_NAMES

OUTSIDE_THE_TARGET = ("draft_model", "ngram")
"""Methods that need nothing of the target but its tokens: the parts `prompts` and `mixed` are about these."""
BLOCK_SIZES = (0, 1, 2, 4, 8)
PARTS = ("prompts", "mixed", "methods")
METHOD_TOKENS = 48
METHOD_PROMPTS = (DEMO_PROMPTS[1], DEMO_PROMPTS[0], *DEMO_PROMPTS[2:], *PROMPTS[4:8])
"""An edit of code first: n-grams help there."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PromptsReport:
    """One block size of one method, or plain decoding against the references when the method is empty."""

    method: str
    num_draft_tokens: int
    mode: str
    num_tokens: int
    tokens_per_round: float
    faults: int
    near_ties: int


@dataclass(frozen=True, slots=True)
class Result:
    """Everything of one run.

    Attributes:
        equal: nothing differed, rare near-ties excepted, and everything happened that had to.
        num_tokens: tokens compared.
        near_ties: one line for each.
        faults: one line for each difference, and for each thing that did not happen.
        prompts: of the part `prompts`.
        mixed: of the part `mixed`.
        methods: of the part `methods`.
    """

    equal: bool
    num_tokens: int
    near_ties: tuple[str, ...]
    faults: tuple[str, ...]
    prompts: tuple[PromptsReport, ...]
    mixed: tuple[MixedReport, ...]
    methods: tuple[MethodReport, ...]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Prove that speculation changes no token.")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many of the prompts")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per prompt")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=list(BLOCK_SIZES), help="draft tokens per block")
    parser.add_argument(
        "--methods", nargs="+", default=list(METHOD_NAMES), choices=METHOD_NAMES, help="drafting methods"
    )
    parser.add_argument("--together", type=int, default=4, help="sessions in a pass of the speculative runs")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS, help="what is proved")
    parser.add_argument("--variants", type=int, default=2, help="ways to pair parameters and drafts in `mixed`")
    parser.add_argument("--threads", type=int, default=1, help="threads of a pass")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:6.0f} s] {line}", flush=True)

    tally = Tally()
    prompts = prove_prompts(options, say, tally) if "prompts" in options.parts else []
    mixed = prove_mixed(options, say, tally) if "mixed" in options.parts else []
    methods = prove_methods(options, say, tally) if "methods" in options.parts else []
    complaints = [line for report in mixed for line in report.complaints] + never_preempted(mixed)
    complaints += [line for report in methods for line in report.complaints]
    result = Result(
        tally.passed and not complaints,
        tally.num_tokens,
        tuple(tally.near_ties),
        (*tally.faults, *complaints),
        tuple(prompts),
        tuple(mixed),
        tuple(methods),
    )
    show(result, tally.allowed_near_ties)
    print(f"written to {write_report('verify_lossless', result)}")
    return 0 if result.equal else 1


def prove_prompts(options: argparse.Namespace, say: Say, tally: Tally) -> list[PromptsReport]:
    """The twenty prompts against the references, and every block size of every method against plain decoding."""
    lossless = Lossless(max_tokens=options.tokens)
    sessions = lossless.cases(PROMPTS[: options.prompts])
    reports = []

    def note(name: str, size: int, mode: str, per_round: float, before: tuple[int, int, int]) -> None:
        found = lossless.tally
        deltas = (found.num_tokens - before[0], len(found.faults) - before[1], len(found.near_ties) - before[2])
        reports.append(PromptsReport(name, size, mode, deltas[0], per_round, deltas[1], deltas[2]))

    def counts() -> tuple[int, int, int]:
        return lossless.tally.num_tokens, len(lossless.tally.faults), len(lossless.tally.near_ties)

    for case in sessions:
        before = counts()
        lossless.check_reference(case)
        if case.mode is GREEDY:
            lossless.check_generate(case)
        note("", 0, case.name, 1.0, before)
        say(f"{case.name}: {len(lossless.plain(case))} tokens, plain decoding checked")
    for name in [name for name in options.methods if name in OUTSIDE_THE_TARGET]:
        method = demo_method(name)
        for num_draft_tokens in options.block_sizes:
            for mode in MODES:
                before = counts()
                group = [case for case in sessions if case.mode is mode]
                per_round = lossless.check_speculation(group, method, num_draft_tokens, together=options.together)
                note(name, num_draft_tokens, mode.name, per_round, before)
                say(f"{name}, blocks of {num_draft_tokens}, {mode.name}: {per_round:.2f} tokens per pass and session")
    lossless.engine.check_integrity()
    tally.add(lossless.tally)
    return reports


def prove_mixed(options: argparse.Namespace, say: Say, tally: Tally) -> list[MixedReport]:
    """Mixed sessions in batches of every size, with both runners."""
    methods = {**{name: demo_method(name) for name in OUTSIDE_THE_TARGET}, TORCH_SOURCE: torch_method()}
    reports = []
    for choice in (RunnerChoice.NATIVE, RunnerChoice.TRANSFORMERS):
        lossless = Lossless(max_tokens=options.tokens, runner_choice=choice)
        mixed = Mixed(lossless, methods, choice)
        for variant in range(options.variants):
            sessions = mixed.sessions(variant=variant)
            for session in sessions:
                lossless.check_reference(session.case)
            say(f"{choice.value} runner, variant {variant}: plain decoding checked against the reference")
            short = [session for session in sessions if not session.long]
            # Once more without the long prompt: the pool is as much smaller, and far more sessions are preempted.
            crowds = [*((sessions, together) for together in BATCHES), *((short, together) for together in BATCHES[1:])]
            for group, together in crowds:
                report = mixed.check(group, together)
                reports.append(report)
                say(
                    f"{choice.value} runner, variant {variant}, {together} at once in {report.pool_tokens} tokens: "
                    f"{report.num_equal} of {report.num_sessions} equal, {report.preemptions} preemptions, "
                    f"{report.prefix_hit_tokens} tokens of prefixes found, "
                    f"{report.accepted} of {report.drafted} drafts accepted"
                )
        tally.add(lossless.tally)
    return reports


def prove_methods(options: argparse.Namespace, say: Say, tally: Tally) -> list[MethodReport]:
    """Every method in every placement and shape, and heads through the services of fleets."""
    reports: list[MethodReport] = []
    with tempfile.TemporaryDirectory(prefix="paceline-heads-") as scratch:
        trained = example_of("layerskip", TARGET)
        # A target trained for early exits is another target: its plain decoding is its own.
        on_base = [name for name in options.methods if name != "layerskip" or not trained]
        proof = methods_proof(Lossless(max_tokens=METHOD_TOKENS))
        heads = proof.heads(on_base, Path(scratch))
        say(f"heads: {', '.join([str(head) for head in heads.values()]) or 'none'}")
        reports += _prove_cases(proof, on_base, heads, say)
        tally.add(proof.lossless.tally)
        if trained and "layerskip" in options.methods:
            proof = methods_proof(Lossless(target=trained, max_tokens=METHOD_TOKENS))
            reports += _prove_cases(proof, ["layerskip"], {"layerskip": Path(trained)}, say)
            tally.add(proof.lossless.tally)
        through, found = check_services(TARGET, heads, METHOD_PROMPTS[0], METHOD_TOKENS, Path(scratch) / "logs", say)
        tally.add(found)
    return [*reports, *through]


def methods_proof(lossless: Lossless) -> Methods:
    """What proves methods for one target."""
    return Methods(lossless, METHOD_PROMPTS, MethodEngines(lossless.folder))


def _prove_cases(proof: Methods, methods: Sequence[str], heads: Mapping[str, Path], say: Say) -> list[MethodReport]:
    reports = []
    for case in cases(methods, proof.num_layers, heads=heads):
        reports.append(report := proof.check(case, heads.get(case.method)))
        say(
            f"{case.name}: {'equal' if report.ids_equal else 'NOT EQUAL'}, {report.accepted} of {report.drafted} "
            f"drafts accepted, {report.tokens_per_pass:.2f} tokens per pass and session"
        )
    return reports


def show(result: Result, allowed_near_ties: int) -> None:
    for line in result.near_ties:
        print(f"near-tie: {line}")
    for line in result.faults:
        print(f"FAULT: {line}")
    verdict = "equal" if result.equal else "NOT EQUAL"
    print(
        f"{verdict}: {result.num_tokens} tokens compared, {len(result.faults)} faults, {len(result.near_ties)} "
        f"near-ties ({allowed_near_ties} allowed)"
    )


if __name__ == "__main__":
    sys.exit(main())
