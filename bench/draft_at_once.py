"""What it gains to take the steps of a draft without coming back between them (ADR 29).

    python -m bench.draft_at_once [--repeats 100] [--quick]

The trained draft model of models/ on one thread, and a simulated one whose device takes 3 ms a pass: drafts of 4 tokens
step by step and at once, in turn, each after a context that has grown by a token. Their tokens must be the same. Writes
bench/results/draft_at_once.json; --quick writes nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.ratios import Ratio, show_ratios
from bench.report import write_report
from bench.turns import take_turns
from paceline.drafting.draft_model import DraftModelMethod
from paceline.drafting.method import DraftJob
from paceline.drafting.torch_runner import TorchDraftRunner
from paceline.engine.load_runner import load_runner
from paceline.engine.runner_options import RunnerOptions
from paceline.engine.simulated.runner import SIMULATED_DRAFTER, SimulatedRunner
from paceline.messages import SamplingParams

MODEL = Path(__file__).parent.parent / "models" / "smollm2-135m-instruct-draft_model"
DEPTH = 4
GREEDY = SamplingParams(temperature=0.0)
KV_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One draft model.

    Attributes:
        model: which.
        step_by_step_ms, at_once_ms: median time of a draft.
        ratio: how much longer step by step takes.
    """

    model: str
    step_by_step_ms: float
    at_once_ms: float
    ratio: float


class _Session:
    """A session that drafts, and then finds one token more committed."""

    def __init__(self, method: DraftModelMethod, name: str, *, at_once: bool) -> None:
        method.open(name)
        self._method, self._name, self._at_once = method, name, at_once
        self._context = [1, 5, 9, 3, 7, 2, 8, 4] * 8
        self.drafted: list[tuple[int, ...]] = []

    def draft(self) -> None:
        """One draft."""
        job = DraftJob(self._name, tuple(self._context), DEPTH, GREEDY)
        while not job.done:
            if not (self._at_once and self._method.draft_at_once(job)):
                self._method.advance([job])
        self.drafted.append(tuple(job.tokens))
        self._context.append(job.tokens[0])


def measure(name: str, runner: TorchDraftRunner, repeats: int) -> Row:
    """Lets both take turns.

    Raises:
        AssertionError: they drafted different tokens.
    """
    method = DraftModelMethod(runner)
    step_by_step, at_once = _Session(method, "a", at_once=False), _Session(method, "b", at_once=True)
    works: dict[str, Callable[[], object]] = {"step by step": step_by_step.draft, "at once": at_once.draft}
    costs = take_turns(works, repeats)
    if step_by_step.drafted != at_once.drafted:
        raise AssertionError(f"{name}: steps taken at once draft other tokens")
    stepwise_ms, at_once_ms = costs["step by step"].wall_ms, costs["at once"].wall_ms
    return Row(name, stepwise_ms, at_once_ms, stepwise_ms / at_once_ms)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `python -m bench.draft_at_once`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=100, help="drafts of each kind (default: 100)")
    parser.add_argument("--quick", action="store_true", help="a few drafts; writes nothing")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    repeats = 5 if options.quick else options.repeats
    trained = load_runner(MODEL, options=RunnerOptions(kv_bytes=KV_BYTES))
    simulated = SimulatedRunner(SIMULATED_DRAFTER, vocab_size=351, kv_bytes=1 << 24, max_sessions=2)
    rows = [
        measure("the trained draft model", TorchDraftRunner(trained), repeats),
        measure("a simulated one, 3 ms a pass", TorchDraftRunner(simulated), repeats),
    ]
    ratios = [Ratio(f"step by step / at once, {row.model} ({row.at_once_ms:.2f} ms)", row.ratio) for row in rows]
    show_ratios(f"Drafts of {DEPTH} tokens", ratios)
    if not options.quick:
        write_report("draft_at_once", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
