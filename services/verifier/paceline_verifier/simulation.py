"""A verifier without a device: passes take a stated time, and tokens come from a table."""

from __future__ import annotations

import logging

from paceline.engine.simulated.pass_time import PassTime
from paceline.engine.simulated.runner import SimulatedModel, SimulatedRunner
from paceline.errors import ConfigurationError
from paceline.model_source import resolve
from paceline.text.tokenizer import Tokenizer
from paceline_verifier.settings import VerifierSettings

logger = logging.getLogger(__name__)


def load_simulated(settings: VerifierSettings) -> tuple[SimulatedRunner, Tokenizer]:
    """The simulated target and the tokenizer that it is said to have.

    Raises:
        ConfigurationError: a setting asks for what a simulated target has not.
        PacelineError: the tokenizer cannot be found or loaded.
    """
    for field in ("self_draft_method", "served_features"):
        if getattr(settings, field) != "none":
            raise ConfigurationError(
                f"a simulated target has no hidden states: set {field} to none; it is drafted for by drafters",
                field=field,
            )
    tokenizer = Tokenizer.load(resolve(settings.model, weights=False, progress=logger.info))
    runner = SimulatedRunner(
        SimulatedModel(PassTime(settings.simulated_pass_ms, settings.simulated_token_ms), settings.simulated_seed),
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        kv_bytes=settings.kv_cache_bytes,
        max_sessions=settings.max_sessions,
        max_model_len=settings.max_model_len,
        prefix_caching=settings.prefix_caching,
    )
    return runner, tokenizer
