"""From settings to a drafter that has proved that it works. Imports torch: used when a method is loaded, not before."""

from __future__ import annotations

import logging
import uuid

import torch

from paceline.drafting.build import MethodSettings, RunnerKind, build_method
from paceline.drafting.draft_model import DraftSampleMethod
from paceline.drafting.method import DraftJob, DraftMethod, MethodInfo
from paceline.engine.feature_bytes import feature_dtype, feature_format
from paceline.engine.runner_options import Quantization
from paceline.engine.simulated.pass_time import PassTime
from paceline.engine.simulated.runner import SimulatedModel
from paceline.messages import DrafterCommand, DrafterEvent, ModelInfo, SamplingParams
from paceline.model_source import default_name
from paceline.quantize import Bits
from paceline.runtime.replica_actor import ActorLimits
from paceline.runtime.replica_service import Replica
from paceline_drafter.draft_actor import DraftActor
from paceline_drafter.draft_limits import DraftLimits
from paceline_drafter.feature_store import FeatureStore, SessionFeatures
from paceline_drafter.settings import DrafterSettings

logger = logging.getLogger(__name__)

_PROBE_SESSION = "probe"
_PROBE_CONTEXT = (0, 1, 0, 1, 0, 1)
_PROBE_DEPTH = 2
_PROBE_STEPS = 8


def load_replica(settings: DrafterSettings) -> Replica[DrafterCommand, DrafterEvent]:
    """Loads the drafting method and drafts once with it. Takes seconds to minutes.

    Raises:
        PacelineError: the method or its model cannot be found, loaded or run; says what to do.
    """
    torch.set_num_threads(settings.num_threads)
    method = build_method(method_settings(settings), progress=logger.info)
    facts = method.info
    features = feature_store(facts, settings)
    probe(method, features)
    logger.info(
        "drafting method loaded",
        extra={
            "methods": ",".join(facts.methods),
            "max_model_len": facts.max_model_len,
            "max_sessions": settings.max_sessions,
            "kv_bytes": facts.kv_bytes,
        },
    )
    info = ModelInfo(
        model=settings.model_name or (default_name(settings.model) if settings.model else ""),
        methods=facts.methods,
        vocab_size=facts.vocab_size,
        max_model_len=facts.max_model_len,
        eos_token_ids=(),
        tokenizer_hash=facts.tokenizer_hash,
        boot_id=uuid.uuid4().hex,
        max_draft_tokens=settings.max_draft_tokens,
        weights_bytes=facts.weights_bytes,
        kv_bytes=facts.kv_bytes,
        max_sessions=settings.max_sessions,
        features=None if features is None else features.wanted,
    )
    draft_limits = DraftLimits(
        max_draft_tokens=settings.max_draft_tokens,
        max_model_len=facts.max_model_len or None,
        vocab_size=facts.vocab_size or None,
    )
    limits = ActorLimits(
        max_sessions=settings.max_sessions,
        orphan_ttl_s=settings.orphan_ttl_ms / 1000,
        stall_timeout_s=settings.stall_timeout_s,
    )
    actor = DraftActor(method, draft_limits, limits, features=features, num_outcomes=settings.prepared_outcomes)
    return Replica(actor, info, facts.vocabulary)


def feature_store(facts: MethodInfo, settings: DrafterSettings) -> FeatureStore | None:
    """Where the target's features are kept; None for a method that builds on none."""
    if facts.taps is None:
        return None
    dtype = getattr(torch, settings.dtype)
    return FeatureStore(
        feature_format(facts.taps, facts.taps.width, feature_dtype(dtype)),
        dtype=dtype,
        device=torch.device(settings.device),
        max_bytes=settings.feature_bytes,
    )


def method_settings(settings: DrafterSettings) -> MethodSettings:
    """The part of the settings that concerns the method."""
    return MethodSettings(
        methods=settings.method,
        draft_model=settings.model,
        draft_head=settings.draft_head,
        eagle_topk=settings.eagle_topk,
        medusa_tree=settings.medusa_tree,
        exit_layer=settings.exit_layer,
        max_draft_tokens=settings.max_draft_tokens,
        runner=RunnerKind(settings.runner),
        bits=Bits(settings.quantize_bits),
        quantization=Quantization(settings.quantization),
        device=settings.device,
        dtype=settings.dtype,
        kv_bytes=settings.kv_cache_bytes,
        num_threads=settings.num_threads,
        # What is prepared for a session is held like sessions.
        max_sessions=settings.max_sessions * (1 + settings.prepared_outcomes),
        max_model_len=settings.max_model_len,
        max_batch_tokens=settings.max_batch_tokens,
        draft_sample_method=DraftSampleMethod(settings.draft_sample_method),
        prompt_lookup_min=settings.prompt_lookup_min,
        prompt_lookup_max=settings.prompt_lookup_max,
        simulated=SimulatedModel(
            PassTime(settings.simulated_pass_ms, settings.simulated_token_ms),
            settings.simulated_seed,
            settings.simulated_acceptance,
            settings.simulated_candidates,
        ),
    )


def probe(method: DraftMethod, features: FeatureStore | None = None) -> None:
    """Drafts once, so that whatever cannot work fails now; finding nothing is no failure.

    Args:
        method: what drafts.
        features: for a method that builds on the target's: here on zeros.
    """
    method.open(_PROBE_SESSION)
    try:
        job = DraftJob(_PROBE_SESSION, _PROBE_CONTEXT, _PROBE_DEPTH, SamplingParams(temperature=0.0))
        if features is not None:
            num_rows = len(_PROBE_CONTEXT) - 1
            job.features = SessionFeatures(features.zeros(num_rows), num_rows=num_rows)
        for _ in range(_PROBE_STEPS):
            if not job.done:
                method.advance([job])
    finally:
        method.close(_PROBE_SESSION)
