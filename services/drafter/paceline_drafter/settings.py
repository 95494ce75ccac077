"""Everything the drafter can be told."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_settings import NoDecode

from paceline.drafting.tree_shape import DEFAULT_MEDUSA_TREE, MAX_NODES
from paceline.runtime.settings import ModelServiceSettings, settings_config, split_commas


class DrafterSettings(ModelServiceSettings):
    """Settings of the drafter service."""

    model_config = settings_config("drafter")

    method: Annotated[tuple[str, ...], NoDecode] = ("draft_model",)
    """Drafting methods in order of preference, such as ngram,draft_model: the next one where one finds nothing."""
    model: str = ""
    """Draft model: a folder, GGUF file, hub id or built-in name; not needed for ngram. For
    medusa, eagle and eagle3 the target, of which embedding and output layer are loaded; layerskip adds layers."""
    draft_head: str = ""
    """Head of medusa, eagle or eagle3, trained for the target: a folder or hub id. Verifiers must serve its
    features."""
    model_name: str = ""
    """Name of the target model that this drafter drafts for; empty takes the name of `model`."""
    runner: Literal["auto", "torch", "transformers", "onnx", "simulated"] = "auto"
    """What runs the draft model: torch batches sessions; onnx quantises a model that is not quantised yet; simulated
    needs a tokenizer only: passes take a stated time, and tokens agree with those of simulated verifiers at a rate."""
    simulated_pass_ms: float = Field(default=3.0, ge=0, le=60_000)
    """With `runner` simulated, time of any pass, in milliseconds."""
    simulated_token_ms: float = Field(default=0.05, ge=0, le=1000)
    """With `runner` simulated, time of each token of a pass beyond that, in milliseconds."""
    simulated_acceptance: float = Field(default=0.8, ge=0, le=1)
    """With `runner` simulated, how often a token is the verifier's own, at each position independently."""
    simulated_candidates: float = Field(default=0.0, ge=0, le=1)
    """With `runner` simulated, how often a further candidate is the verifier's token where those before it are not."""
    simulated_seed: int = Field(default=0, ge=0)
    """With `runner` simulated, seed of the table of tokens; that of the verifiers too."""
    quantize_bits: Literal["int8", "int4"] = "int8"
    """Width of the weights when `runner` onnx has to quantise."""
    quantization: Literal["none", "int8", "int4"] = "none"
    """Width of the weights with `runner` torch on a CPU; refused where that is slower."""
    kv_cache_bytes: int = Field(default=512 * 2**20, ge=2**20)
    """Memory for key/value rows, in bytes; all sessions share it."""
    max_sessions: int = Field(default=256, ge=1)
    """Draft sessions at once; those that draft nothing at the moment give up their rows where others need room."""
    max_model_len: int | None = Field(default=None, ge=8)
    """Most tokens of a session; none for the model's own limit or what `kv_cache_bytes` leaves."""
    max_batch_tokens: int = Field(default=256, ge=3)
    """Most tokens of one pass; longer contexts are fed in steps."""
    max_draft_tokens: int = Field(default=16, ge=1, le=MAX_NODES)
    """Most tokens of one proposal."""
    prepared_outcomes: int = Field(default=0, ge=0, le=64)
    """After how many likely outcomes of a block draft_model drafts while it is judged, in passes that serve no other
    session. 8 pays where more tokens hardly lengthen a pass, as on a GPU, and not on a CPU."""
    eagle_topk: int = Field(default=1, ge=1, le=64)
    """Candidates per node of an EAGLE tree, which has up to `max_draft_tokens` nodes; 1 drafts chains."""
    exit_layer: int | None = Field(default=None, ge=1)
    """Layers of the target that layerskip drafts with; none for what the target's config.json names."""
    medusa_tree: str = DEFAULT_MEDUSA_TREE
    """Shape of a Medusa tree: chain:N, derived:N (N nodes by the heads' accuracies), classic_63, or nodes: 0,1,0.0."""
    feature_bytes: int = Field(default=256 * 2**20, ge=2**20)
    """Memory for the target's hidden states that medusa, eagle and eagle3 draft from, in bytes, for all sessions."""
    draft_sample_method: Literal["probabilistic", "greedy"] = "probabilistic"
    """Drafts of draft_model under the rule ratio: drawn, and sent with probabilities; or its best tokens."""
    prompt_lookup_min: int = Field(default=3, ge=1)
    """Shortest suffix that ngram looks up, in tokens."""
    prompt_lookup_max: int = Field(default=5, ge=1)
    """Longest suffix that ngram looks up, in tokens."""
    orphan_ttl_ms: int = Field(default=10_000, ge=0)
    """How long a session outlives its stream, in milliseconds."""
    stall_timeout_s: float = Field(default=120.0, gt=0)
    """A step that takes longer makes the service unhealthy and turns its peers away, in seconds."""

    @field_validator("method", mode="before")
    @classmethod
    def _split_methods(cls, value: Any) -> Any:
        return split_commas(value)
