"""From settings to a verifier that has proved that it works. Imports torch: used when a model is loaded, not before."""

from __future__ import annotations

import logging
import uuid

import torch

from paceline.engine.load_runner import load_runner
from paceline.engine.loader import ModelDtype
from paceline.engine.runner_options import RunnerChoice, RunnerOptions
from paceline.engine.target import TargetEngine, TargetOptions
from paceline.errors import ModelError
from paceline.messages import (
    ModelInfo,
    Open,
    SamplingParams,
    Verified,
    VerifierCommand,
    VerifierEvent,
    Verify,
)
from paceline.model_source import default_name, resolve
from paceline.runtime.replica_actor import ActorLimits
from paceline.runtime.replica_service import Replica
from paceline.text.tokenizer import Tokenizer
from paceline.token_log import TokenLog
from paceline_verifier.settings import VerifierSettings
from paceline_verifier.verify_actor import VerifyActor

logger = logging.getLogger(__name__)

_PROBE_SESSION = "probe"


def load_replica(settings: VerifierSettings) -> Replica[VerifierCommand, VerifierEvent]:
    """Loads the target model and generates one token with it. Takes seconds to minutes.

    Raises:
        PacelineError: the model cannot be found, loaded or run; says what to do.
    """
    torch.set_num_threads(settings.num_threads)
    folder = resolve(settings.model, progress=logger.info)
    tokenizer = Tokenizer.load(folder)
    runner = load_runner(
        folder, dtype=ModelDtype(settings.dtype), device=settings.device, options=_runner_options(settings)
    )
    logger.info(
        "model loaded",
        extra={
            "runner": runner.info.runner,
            "packing": runner.packing,
            "max_model_len": runner.info.max_model_len,
            "max_sessions": settings.max_sessions,
            "kv_bytes": runner.info.kv_bytes,
            "capacity_tokens": runner.pool.capacity_tokens,
        },
    )
    options = TargetOptions(
        max_sessions=settings.max_sessions,
        max_batch_tokens=settings.max_batch_tokens,
        max_draft_tokens=settings.max_draft_tokens,
        prefill_share=settings.prefill_share,
    )
    vocab_size = min(tokenizer.vocab_size, runner.info.vocab_size)
    engine = TargetEngine(runner, eos_token_ids=runner.eos_token_ids, vocab_size=vocab_size, options=options)
    probe(engine)
    info = ModelInfo(
        model=settings.model_name or default_name(settings.model),
        vocab_size=vocab_size,
        max_model_len=runner.info.max_model_len,
        eos_token_ids=runner.eos_token_ids,
        tokenizer_hash=tokenizer.fingerprint,
        boot_id=uuid.uuid4().hex,
        max_draft_tokens=settings.max_draft_tokens,
        weights_bytes=runner.info.weights_bytes,
        kv_bytes=runner.info.kv_bytes,
        max_sessions=settings.max_sessions,
    )
    actor = VerifyActor(engine, actor_limits(settings), gather_window_s=settings.gather_window_ms / 1000)
    return Replica(actor, info, tokenizer.vocabulary)


def _runner_options(settings: VerifierSettings) -> RunnerOptions:
    return RunnerOptions(
        kv_bytes=settings.kv_cache_bytes,
        max_model_len=settings.max_model_len,
        prefix_caching=settings.prefix_caching,
        runner=RunnerChoice(settings.runner),
    )


def actor_limits(settings: VerifierSettings) -> ActorLimits:
    """The actor's bounds as the settings say."""
    return ActorLimits(
        max_sessions=settings.max_sessions,
        orphan_ttl_s=settings.orphan_ttl_ms / 1000,
        stall_timeout_s=settings.stall_timeout_s,
    )


def probe(engine: TargetEngine) -> None:
    """Generates one token.

    Raises:
        ModelError: it does not come.
    """
    log = TokenLog((0,))
    engine.open(Open(_PROBE_SESSION, 1, (0,), 1, SamplingParams(temperature=0.0)))
    try:
        answer = engine.submit(Verify(_PROBE_SESSION, 1, 1, 1, log.hash_at(1)))
        answers = [] if answer is not None else engine.step()
        if not (len(answers) == 1 and isinstance(answers[0], Verified)):
            raise ModelError(f"the model generates no token: {answer or answers}", field="model")
    finally:
        engine.close(_PROBE_SESSION)
