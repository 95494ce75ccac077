"""The rounds of a fleet in one process: target and drafter, one after the other, with no service between.

    python -m bench.one_process --target DIR --drafter DIR --core 1

reads a job per line of standard input and answers it with a line of standard output, both JSON. The fleet's first
round has no block, since it reads the prompt; so has the first one here. Everything runs in one thread on one core, as
only one part works at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ModelError

if TYPE_CHECKING:
    from paceline.drafting.method import DraftMethod
    from paceline.engine.target import TargetEngine

_KV_BYTES = 256 << 20
_MAX_MODEL_LEN = 2048


@dataclass(frozen=True, slots=True)
class LocalJob:
    """What to generate.

    Attributes:
        prompt: token ids.
        max_tokens: most new tokens.
        num_draft_tokens: block size; 0 decodes plainly.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    num_draft_tokens: int


@dataclass(frozen=True, slots=True)
class LocalRun:
    """What came of it.

    Attributes:
        token_ids: new tokens.
        seconds: from the beginning to the last token, the prompt included.
        draft_seconds: of these, in the drafter.
        rounds: passes of the target.
        draft_tokens: tokens that were judged.
    """

    token_ids: tuple[int, ...]
    seconds: float
    draft_seconds: float
    rounds: int
    draft_tokens: int


class OneProcess:
    """The process that generates; made by `one_process`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def run(self, job: LocalJob) -> LocalRun:
        """Generates once.

        Raises:
            ModelError: the process has ended.
        """
        reader, writer = self._process.stdout, self._process.stdin
        if reader is None or writer is None:
            raise ModelError("the process has no pipes")
        writer.write(json.dumps(asdict(job)).encode() + b"\n")
        line = await reader.readline()
        if not line:
            raise ModelError("the process that generates has ended; what it said is above")
        found: dict[str, Any] = json.loads(line)
        return LocalRun(tuple(found.pop("token_ids")), **found)


@asynccontextmanager
async def one_process(target_dir: str, drafter_dir: str, *, core: int | None) -> AsyncIterator[OneProcess]:
    """Starts the process; it ends with the block.

    Args:
        target_dir: folder of the target.
        drafter_dir: folder of the draft model.
        core: the only core that it may use; None for any.

    Raises:
        ModelError: it does not start.
    """
    arguments = ["--target", target_dir, "--drafter", drafter_dir]
    arguments += ["--core", str(core)] if core is not None else []
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "bench.one_process", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    try:
        found = OneProcess(process)
        await found.run(LocalJob((0,), 1, 0))
        yield found
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _serve(target_dir: str, drafter_dir: str) -> None:
    """Answers jobs until standard input ends."""
    import torch

    from paceline.drafting.build import MethodSettings, RunnerKind, build_method
    from paceline.engine.load_runner import load_runner
    from paceline.engine.runner_options import RunnerOptions
    from paceline.engine.target import TargetEngine
    from paceline.text.tokenizer import Tokenizer

    torch.set_num_threads(1)
    # Without prefix caching no run finds rows of an earlier one.
    options = RunnerOptions(kv_bytes=_KV_BYTES, max_model_len=_MAX_MODEL_LEN, prefix_caching=False)
    runner = load_runner(Path(target_dir), options=options)
    tokenizer = Tokenizer.load(Path(target_dir))
    engine = TargetEngine(runner, eos_token_ids=runner.eos_token_ids, vocab_size=tokenizer.vocab_size)
    method = build_method(
        MethodSettings(
            ("draft_model",), drafter_dir, runner=RunnerKind.ONNX, max_sessions=1, max_model_len=_MAX_MODEL_LEN
        ),
        lambda _line: None,
    )
    for line in sys.stdin:
        found = json.loads(line)
        job = LocalJob(tuple(found["prompt"]), found["max_tokens"], found["num_draft_tokens"])
        run = _generate(engine, method, runner.eos_token_ids, job)
        print(json.dumps(asdict(run)), flush=True)


def _generate(engine: TargetEngine, method: DraftMethod, eos_token_ids: tuple[int, ...], job: LocalJob) -> LocalRun:
    from paceline.drafting.local import LocalDrafter
    from paceline.engine.local import LocalRequest, generate
    from paceline.messages import SamplingParams
    from paceline.speculation.tree import EMPTY_BLOCK, DraftTree

    sampling = SamplingParams(temperature=0.0)
    drafter = LocalDrafter(method, sampling, len(job.prompt))
    draft_seconds = 0.0

    def propose(context: Sequence[int], max_depth: int) -> DraftTree:
        nonlocal draft_seconds
        if len(context) == len(job.prompt):
            return EMPTY_BLOCK
        began = time.perf_counter()
        block = drafter(context, max_depth)
        draft_seconds += time.perf_counter() - began
        return block

    request = LocalRequest(job.prompt, sampling, job.max_tokens, job.num_draft_tokens, propose)
    began = time.perf_counter()
    (result,) = generate(engine, [request], eos_token_ids=eos_token_ids)
    seconds = time.perf_counter() - began
    drafter.close()
    return LocalRun(tuple(result.tokens), seconds, draft_seconds, result.num_rounds, result.num_drafted)


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--core", type=int)
    arguments = parser.parse_args()
    if arguments.core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {arguments.core})
    _serve(arguments.target, arguments.drafter)


if __name__ == "__main__":
    main()
