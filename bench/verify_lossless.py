"""Proves on real text that speculation changes no token: `make verify-lossless`.

For every prompt, greedy and with seeded sampling (temperature 0.8, top_p 0.95):
* plain decoding through the engine equals the independent cache-free reference (`bench/reference.py`);
* greedy plain decoding equals `transformers.generate`;
* every drafting method at every block size gives the tokens of plain decoding, several sessions to a pass.

Everything runs in float32 on the CPU in this process; near-ties are treated as `bench/near_ties.py` says. Exit status 0
means equal. About half an hour on one core.

    python -m bench.verify_lossless [--prompts 20] [--tokens 96] [--block-sizes 0 1 2 4 8] [--methods draft_model ngram]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch

from bench.lossless import MODES, Lossless, demo_method
from bench.prompts import PROMPTS
from bench.reference import GREEDY

METHODS = ("draft_model", "ngram")
BLOCK_SIZES = (0, 1, 2, 4, 8)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Prove that speculation changes no token.")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many of the prompts")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per prompt")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=list(BLOCK_SIZES), help="draft tokens per block")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, help="drafting methods")
    parser.add_argument("--together", type=int, default=4, help="sessions in a pass of the speculative runs")
    parser.add_argument("--threads", type=int, default=1, help="threads of a pass")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:6.0f} s] {line}", flush=True)

    lossless = Lossless(max_tokens=options.tokens)
    cases = lossless.cases(PROMPTS[: options.prompts])
    for case in cases:
        lossless.check_reference(case)
        if case.mode is GREEDY:
            lossless.check_generate(case)
        say(f"{case.name}: {len(lossless.plain(case))} tokens, plain decoding checked")
    for name in options.methods:
        method = demo_method(name)
        for num_draft_tokens in options.block_sizes:
            for mode in MODES:
                group = [case for case in cases if case.mode is mode]
                per_round = lossless.check_speculation(group, method, num_draft_tokens, together=options.together)
                say(f"{name}, blocks of {num_draft_tokens}, {mode.name}: {per_round:.2f} tokens per pass and session")
    lossless.engine.check_integrity()
    return report(lossless)


def report(lossless: Lossless) -> int:
    tally = lossless.tally
    for line in tally.near_ties:
        print(f"near-tie: {line}")
    for line in tally.faults:
        print(f"DIFFERENT: {line}")
    verdict = "equal" if tally.passed else "NOT EQUAL"
    print(
        f"{verdict}: {tally.num_tokens} tokens compared, {len(tally.faults)} differences, {len(tally.near_ties)} "
        f"near-ties ({tally.allowed_near_ties} allowed)"
    )
    return 0 if tally.passed else 1


if __name__ == "__main__":
    sys.exit(main())
