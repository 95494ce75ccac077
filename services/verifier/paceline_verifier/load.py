"""From settings to a verifier that has proved that it works. Imports torch: used when a model is loaded, not before."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paceline.engine.features import FeatureTaps
from paceline.engine.runner_options import RunnerChoice, RunnerOptions
from paceline.engine.self_draft import SelfDrafter
from paceline.engine.served_features import ServedFeatures
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
from paceline.model_source import default_name, is_trimmed, resolve
from paceline.runtime.replica_actor import ActorLimits
from paceline.runtime.replica_service import Replica
from paceline.speculation.tree import EMPTY_BLOCK
from paceline.text.tokenizer import Tokenizer
from paceline.token_log import TokenLog
from paceline.weights_digest import weights_digest
from paceline_verifier.serving import joint_taps, serve, served_taps
from paceline_verifier.settings import VerifierSettings
from paceline_verifier.simulation import load_simulated
from paceline_verifier.verify_actor import VerifyActor

if TYPE_CHECKING:
    from paceline.drafting.self_draft_build import SelfDraftPlan
    from paceline.engine.load_runner import LoadedRunner
    from paceline.engine.simulated.runner import SimulatedRunner

    Runner = LoadedRunner | SimulatedRunner

logger = logging.getLogger(__name__)

_PROBE_SESSION = "probe"
_PROBE_DEPTH = 2


def load_replica(settings: VerifierSettings) -> Replica[VerifierCommand, VerifierEvent]:
    """Loads the target model, and what it drafts with, and generates a few tokens. Takes seconds to minutes.

    Raises:
        PacelineError: a model cannot be found, loaded or run; says what to do.
    """
    torch.set_num_threads(settings.num_threads)
    if settings.runner == "simulated":
        return _replica(settings, *load_simulated(settings))
    # Here, because they import `transformers`, which takes seconds and simulated models do without.
    from paceline.engine.load_runner import load_runner
    from paceline.engine.loader import ModelDtype

    folder = resolve(settings.model, progress=logger.info)
    if is_trimmed(folder):
        raise ModelError(
            f"{folder} is a draft model with a trimmed vocabulary: its ids are not those of its tokenizer, so it can "
            "be no target; name it as the model of a drafter",
            field="model",
        )
    tokenizer = Tokenizer.load(folder)
    plan = self_draft_plan(settings, folder)
    taps = joint_taps(None if plan is None else plan.taps, served_taps(settings.served_features, folder))
    loaded = load_runner(
        folder, dtype=ModelDtype(settings.dtype), device=settings.device, options=_runner_options(settings, taps)
    )
    served = None if settings.served_features == "none" else serve(loaded, taps, settings.feature_dtype)
    drafter = None if plan is None else plan.build(loaded, tokenizer)
    # The same weights in another number format give other tokens.
    digest = f"{weights_digest(folder)}-{settings.dtype}"
    return _replica(settings, loaded, tokenizer, drafter, served, digest)


def _replica(
    settings: VerifierSettings,
    runner: Runner,
    tokenizer: Tokenizer,
    drafter: SelfDrafter | None = None,
    served: ServedFeatures | None = None,
    digest: str = "",
) -> Replica[VerifierCommand, VerifierEvent]:
    """The verifier of a target that is loaded, once it has generated a few tokens."""
    logger.info(
        "model loaded",
        extra={
            "runner": runner.info.runner,
            "packing": runner.packing,
            "max_model_len": runner.info.max_model_len,
            "max_sessions": settings.max_sessions,
            "kv_bytes": runner.info.kv_bytes,
            "capacity_tokens": runner.pool.capacity_tokens,
            "self_draft_method": settings.self_draft_method,
        },
    )
    options = TargetOptions(
        max_sessions=settings.max_sessions,
        max_batch_tokens=settings.max_batch_tokens,
        max_draft_tokens=settings.max_draft_tokens,
        prefill_share=settings.prefill_share,
    )
    engine = TargetEngine(
        runner,
        eos_token_ids=runner.eos_token_ids,
        vocab_size=min(tokenizer.vocab_size, runner.info.vocab_size),
        options=options,
        self_drafter=drafter,
        served=served,
    )
    probe(engine)
    actor = VerifyActor(engine, actor_limits(settings), gather_window_s=settings.gather_window_ms / 1000)
    return Replica(actor, _model_info(settings, runner, tokenizer, drafter, served, digest), tokenizer.vocabulary)


def _model_info(
    settings: VerifierSettings,
    runner: Runner,
    tokenizer: Tokenizer,
    drafter: SelfDrafter | None,
    served: ServedFeatures | None,
    digest: str,
) -> ModelInfo:
    """What is said of the target to gateways."""
    own_weights_bytes, own_kv_bytes = (0, 0) if drafter is None else (drafter.weights_bytes, drafter.kv_bytes)
    return ModelInfo(
        model=settings.model_name or default_name(settings.model),
        vocab_size=min(tokenizer.vocab_size, runner.info.vocab_size),
        max_model_len=runner.info.max_model_len,
        eos_token_ids=runner.eos_token_ids,
        tokenizer_hash=tokenizer.fingerprint,
        boot_id=uuid.uuid4().hex,
        methods=() if drafter is None else (drafter.method,),
        max_draft_tokens=settings.max_draft_tokens,
        weights_bytes=runner.info.weights_bytes + own_weights_bytes,
        kv_bytes=runner.info.kv_bytes + own_kv_bytes,
        max_sessions=settings.max_sessions,
        drafting_bytes=own_weights_bytes + own_kv_bytes + runner.info.feature_bytes,
        features=None if served is None else served.format,
        weights_digest=digest,
        gather_window_us=round(settings.gather_window_ms * 1000),
    )


def self_draft_plan(settings: VerifierSettings, target_folder: Path) -> SelfDraftPlan | None:
    """How the verifier drafts by itself; None if it does not.

    Args:
        settings: of the service.
        target_folder: of the target.

    Raises:
        ConfigurationError, ModelError: the checkpoint is not named, cannot be loaded or was made for another target.
    """
    if settings.self_draft_method == "none":
        return None
    from paceline.drafting.self_draft_build import SelfDraftSettings, plan_self_drafter

    return plan_self_drafter(
        SelfDraftSettings(
            method=settings.self_draft_method,
            model=settings.self_draft_model,
            kv_bytes=settings.self_draft_kv_bytes,
            eagle_topk=settings.eagle_topk,
            num_draft_tokens=settings.num_draft_tokens,
            medusa_tree=settings.medusa_tree,
            exit_layer=settings.exit_layer,
            max_draft_tokens=settings.max_draft_tokens,
            max_sessions=settings.max_sessions,
        ),
        target_folder,
    )


def _runner_options(settings: VerifierSettings, taps: FeatureTaps | None) -> RunnerOptions:
    return RunnerOptions(
        kv_bytes=settings.kv_cache_bytes,
        max_model_len=settings.max_model_len,
        prefix_caching=settings.prefix_caching,
        runner=RunnerChoice(settings.runner),
        taps=taps,
    )


def actor_limits(settings: VerifierSettings) -> ActorLimits:
    """The actor's bounds as the settings say."""
    return ActorLimits(
        max_sessions=settings.max_sessions,
        orphan_ttl_s=settings.orphan_ttl_ms / 1000,
        stall_timeout_s=settings.stall_timeout_s,
    )


def probe(engine: TargetEngine) -> None:
    """Generates tokens in two rounds, and judges in the second what the engine drafts by itself.

    Raises:
        ModelError: they do not come, or drafting fails.
    """
    log = TokenLog((0,))
    engine.open(Open(_PROBE_SESSION, 1, (0,), 1, SamplingParams(temperature=0.0)))
    block = EMPTY_BLOCK
    try:
        for number in (1, 2):
            command = Verify(
                _PROBE_SESSION, 1, number, len(log), log.hash_at(len(log)), block=block, next_depth=_PROBE_DEPTH
            )
            answer = engine.submit(command)
            answers = [] if answer is not None else engine.step()
            if not (len(answers) == 1 and isinstance(answers[0], Verified)):
                raise ModelError(f"the model generates no token: {answer or answers}", field="model")
            log.extend(answers[0].tokens)
            block = answers[0].next_block
        if engine.self_drafting.num_failures:
            raise ModelError(
                "drafting inside the verifier fails, see the log above: give another self_draft_model, or set "
                "self_draft_method to none",
                field="self_draft_model",
            )
    finally:
        engine.close(_PROBE_SESSION)
