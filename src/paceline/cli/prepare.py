"""Makes the models of a fleet ready on disk, in a process of its own that can be stopped at any time.

    python -m paceline.cli.prepare MODEL [BITS] [DRAFT_MODEL] [HEAD] [BASE]

prints one JSON object per line: progress, and at last the result or the failure. Fetching and converting block and
start processes themselves; a launcher that is told to stop ends the whole process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from paceline.errors import Failure, ModelError, PacelineError, from_failure

_MAX_LAST_WORDS_CHARS = 1000


@dataclass(frozen=True, slots=True)
class Prepared:
    """Local folders of the models.

    Attributes:
        target_dir: the target.
        drafter_dir: the draft model; empty when none is loaded.
        head_dir: the drafting head; empty when nothing drafts with one.
    """

    target_dir: str
    drafter_dir: str
    head_dir: str = ""


async def prepare(
    target: str, *, bits: str, draft_model: str, head: str = "", base: str = "", progress: Callable[[str], None]
) -> Prepared:
    """Fetches, converts and quantises what is not in the cache yet.

    Args:
        target: reference of the target.
        bits: "int8" or "int4" for a quantised copy of the target; empty for none.
        draft_model: reference of another draft model; empty for none.
        head: reference of a drafting head; empty for none.
        base: what the target, an adapter, is added to; empty for the model that it names itself.
        progress: told each step that takes long.

    Raises:
        PacelineError: whatever `paceline.model_source.resolve`, `paceline.head_source.resolve_head` or
            `paceline.quantize.quantize` raise.
    """
    with tempfile.TemporaryFile("w+") as errors:
        return await _run(["-m", "paceline.cli.prepare", target, bits, draft_model, head, base], errors, progress)


async def _run(arguments: Sequence[str], errors: IO[str], progress: Callable[[str], None]) -> Prepared:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=errors,
        start_new_session=True,
    )
    try:
        result: Prepared | None = None
        lines = process.stdout or asyncio.StreamReader()
        async for raw in lines:
            line = json.loads(raw)
            if "progress" in line:
                progress(line["progress"])
            elif "failure" in line:
                raise from_failure(Failure(**line["failure"]))
            else:
                result = Prepared(**line["result"])
        if result is None:
            status = await process.wait()
            errors.seek(0)
            last_words = errors.read()[-_MAX_LAST_WORDS_CHARS:].strip() or "it wrote nothing"
            raise ModelError(f"preparing the models ended with exit status {status}: {last_words}")
        return result
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _tell(kind: str, value: object) -> None:
    sys.stdout.write(json.dumps({kind: value}) + "\n")
    sys.stdout.flush()


def _main(target: str, bits: str = "", draft_model: str = "", head: str = "", base: str = "") -> int:
    from paceline.head_source import resolve_head
    from paceline.model_source import resolve
    from paceline.quantize import Bits, quantize

    def progress(line: str) -> None:
        _tell("progress", line)

    try:
        head_dir = str(resolve_head(head, progress=progress)) if head else ""
        target_dir = str(resolve(target, base=base, progress=progress))
        drafter_dir = ""
        if bits:
            drafter_dir = str(quantize(target, bits=Bits(bits), progress=progress))
        elif draft_model:
            # A folder may also hold a model for another runner; the drafter says what is wrong with it.
            folder = Path(draft_model).expanduser()
            drafter_dir = str(folder if folder.is_dir() else resolve(draft_model, progress=progress))
        _tell("result", asdict(Prepared(target_dir, drafter_dir, head_dir)))
    except PacelineError as error:
        _tell("failure", asdict(error.to_failure()))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
