"""`transformers.generate` on the same prompts, in a process of its own, bound to the core that a verifier would have.

    python -m bench.transformers_baseline --model DIR --core 1 --prompts chat_sky,list_space --max-tokens 64

prints one JSON object per prompt: its name, the new tokens and the seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.benchmark.prompts import PROMPTS, Prompt
from paceline.errors import ModelError


@dataclass(frozen=True, slots=True)
class BaselineRun:
    """One prompt through `transformers.generate`: the new tokens, and the seconds for prompt and tokens."""

    prompt: str
    token_ids: tuple[int, ...]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens divided by the seconds."""
        return len(self.token_ids) / self.seconds


async def run_baseline(
    model_dir: str, prompts: Sequence[Prompt], *, core: int | None, max_tokens: int | None
) -> list[BaselineRun]:
    """Measures `transformers.generate` in a fresh process.

    Args:
        model_dir: folder of the target.
        prompts: what to generate from, with the model's chat template.
        core: the only core that the process may use; None for any.
        max_tokens: instead of each prompt's own length.

    Raises:
        ModelError: the process failed; its last lines are in the message.
    """
    arguments = ["--model", model_dir, "--prompts", ",".join(prompt.name for prompt in prompts)]
    arguments += ["--core", str(core)] if core is not None else []
    arguments += ["--max-tokens", str(max_tokens)] if max_tokens else []
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "bench.transformers_baseline", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"},
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise ModelError(f"transformers.generate failed:\n{errors.decode(errors='replace')[-2000:]}")
    runs = [json.loads(line) for line in output.decode().splitlines() if line.startswith("{")]
    return [BaselineRun(run["prompt"], tuple(run["token_ids"]), run["seconds"]) for run in runs]


def _generate(model_dir: str, prompts: Sequence[Prompt], max_tokens: int | None) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for warm_up in (True, False):
        for prompt in prompts[:1] if warm_up else prompts:
            conversation = [{"role": "user", "content": prompt.text}]
            text = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
            prompt_ids = torch.tensor([tokenizer.encode(str(text), add_special_tokens=False)])
            started = time.perf_counter()
            with torch.inference_mode():
                output = model.generate(
                    prompt_ids,
                    attention_mask=torch.ones_like(prompt_ids),
                    do_sample=False,
                    max_new_tokens=16 if warm_up else max_tokens or prompt.max_tokens,
                )
            seconds = time.perf_counter() - started
            new_tokens = output[0, prompt_ids.shape[1] :].tolist()
            if not warm_up:
                print(json.dumps({"prompt": prompt.name, "token_ids": new_tokens, "seconds": seconds}), flush=True)


def main() -> None:
    """Entry point of the measuring process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--core", type=int)
    parser.add_argument("--max-tokens", type=int)
    arguments = parser.parse_args()
    if arguments.core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {arguments.core})
    by_name = {prompt.name: prompt for prompt in PROMPTS}
    _generate(arguments.model, [by_name[name] for name in arguments.prompts.split(",")], arguments.max_tokens)


if __name__ == "__main__":
    main()
