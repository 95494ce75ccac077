"""How a model is run: what every runner of the engine is told."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from paceline.engine.features import FeatureTaps
from paceline.engine.kv.pool import DEFAULT_PAGE_TOKENS

DEFAULT_KV_BYTES = 512 << 20


class RunnerChoice(Enum):
    """Which code runs the model."""

    AUTO = "auto"
    """The native runner for a model that it knows, else the one of `transformers`."""
    NATIVE = "native"
    """The native runner; a model that it does not know is refused."""
    TRANSFORMERS = "transformers"


class Quantization(Enum):
    """How the weights of a draft model are kept; a target's never are other than its own."""

    NONE = "none"
    INT8 = "int8"
    INT4 = "int4"


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How a model is run.

    Attributes:
        kv_bytes: memory for key/value rows.
        page_tokens: rows per page.
        max_model_len: most tokens of a sequence; None for what the model and the pool allow.
        pack: whether to pack weights where that is possible (float32 on a CPU).
        prefix_caching: whether sequences share the rows of equal beginnings.
        runner: which code runs the model; heeded by `paceline.engine.load_runner`.
        quantization: of the weights, for draft models only; done by the native runner, or refused.
        taps: hidden states to be kept for drafting methods, in `kv_bytes` too; None for none.
    """

    kv_bytes: int = DEFAULT_KV_BYTES
    page_tokens: int = DEFAULT_PAGE_TOKENS
    max_model_len: int | None = None
    pack: bool = True
    prefix_caching: bool = True
    runner: RunnerChoice = RunnerChoice.AUTO
    quantization: Quantization = Quantization.NONE
    taps: FeatureTaps | None = None


DEFAULT_OPTIONS = RunnerOptions()
