"""The same rounds in one process: simulated target and drafter, one after the other, with no service between."""

from __future__ import annotations

import time

from paceline.benchmark.scale_fleet import ScaleOptions
from paceline.benchmark.scale_load import prompts
from paceline.drafting.draft_model import DraftModelMethod
from paceline.drafting.local import LocalDrafter
from paceline.drafting.torch_runner import TorchDraftRunner
from paceline.engine.local import LocalRequest, generate
from paceline.engine.simulated.runner import SimulatedModel, SimulatedRunner
from paceline.engine.target import TargetEngine
from paceline.messages import SamplingParams
from paceline.text.tokenizer import Tokenizer


def one_process(options: ScaleOptions, tokenizer: Tokenizer, num_tokens: int) -> float:
    """Generates with one session and returns its tokens per second; blocks meanwhile.

    Args:
        options: of the fleet whose devices are used.
        tokenizer: of the fleet, so that both write the same text.
        num_tokens: how many.
    """

    def runner(model: SimulatedModel) -> SimulatedRunner:
        return SimulatedRunner(
            model,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=tokenizer.eos_token_ids,
            kv_bytes=1 << 24,
            max_sessions=2,
            max_model_len=options.max_model_len,
        )

    greedy = SamplingParams(temperature=0.0)
    drafter = LocalDrafter(DraftModelMethod(TorchDraftRunner(runner(options.drafter))), greedy)
    request = LocalRequest(
        prompts(1, tokenizer.vocab_size)[0],
        greedy,
        max_tokens=num_tokens,
        num_draft_tokens=options.num_speculative_tokens,
        propose=drafter,
    )
    engine = TargetEngine(runner(options.target))
    started_s = time.perf_counter()
    (result,) = generate(engine, [request])
    return len(result.tokens) / (time.perf_counter() - started_s)
