"""Everything the verifier can be told."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from paceline.drafting.tree_shape import DEFAULT_MEDUSA_TREE, MAX_NODES
from paceline.runtime.settings import ModelServiceSettings, settings_config


class VerifierSettings(ModelServiceSettings):
    """Settings of the verifier service."""

    model_config = settings_config("verifier")

    model: str
    """Target model: a folder with safetensors, a GGUF file, a hub id or a built-in name."""
    model_name: str = ""
    """Name that clients ask for; empty takes the last part of `model`."""
    runner: Literal["auto", "native", "transformers", "simulated"] = "auto"
    """Code that runs the model: `native` (Llama, Mistral, Qwen2, Qwen3; another model is refused), `transformers` (any
    decoder), or `auto` for native where it knows the model. `simulated` needs the tokenizer only: passes take a stated
    time, tokens come from a table; for measuring a fleet without devices."""
    simulated_pass_ms: float = Field(default=30.0, ge=0, le=60_000)
    """With `runner` simulated, time of any pass, in milliseconds."""
    simulated_token_ms: float = Field(default=0.05, ge=0, le=1000)
    """With `runner` simulated, time of each token of a pass beyond that, in milliseconds."""
    simulated_seed: int = Field(default=0, ge=0)
    """With `runner` simulated, seed of the table of tokens; that of the drafters too."""
    kv_cache_bytes: int = Field(default=1024 * 2**20, ge=2**20)
    """Memory for key/value rows, in bytes."""
    max_sessions: int = Field(default=64, ge=1)
    """Sessions at once; more are refused."""
    max_model_len: int | None = Field(default=None, ge=8)
    """Most tokens of a session, prompt and output; none for the model's own limit or what `kv_cache_bytes` leaves."""
    max_draft_tokens: int = Field(default=16, ge=0)
    """Most draft tokens of a block that are judged; the rest is cut."""
    max_batch_tokens: int = Field(default=512, ge=4)
    """Most tokens of one pass; longer prompts are fed in several."""
    prefill_share: float = Field(default=0.25, gt=0, lt=1)
    """Part of a pass that prompts get at least while any is being read, so that blocks do not keep them waiting."""
    prefix_caching: bool = True
    """Whether sessions share the key/value rows of equal beginnings of their texts."""
    gather_window_ms: float = Field(default=20.0, ge=0, le=100)
    """Longest wait of a pass for sessions that will soon be back, in milliseconds; never longer than a pass takes, and
    only while more sessions per second come of it. 0 for no waiting."""
    self_draft_method: Literal["none", "ngram", "medusa", "eagle", "eagle3", "layerskip"] = "none"
    """Method by which the verifier drafts by itself: the next block comes with each verdict, without a drafter."""
    self_draft_model: str = ""
    """Checkpoint of `self_draft_method`, trained for this target: a folder or hub id; not for ngram and layerskip."""
    self_draft_kv_bytes: int = Field(default=256 * 2**20, ge=2**20)
    """Memory for key/value rows of an EAGLE head, in bytes."""
    eagle_topk: int = Field(default=1, ge=1, le=64)
    """Candidates per node of an EAGLE tree; 1 drafts chains."""
    num_draft_tokens: int = Field(default=16, ge=1, le=MAX_NODES)
    """Most tokens of an EAGLE tree; at most `max_draft_tokens`."""
    medusa_tree: str = DEFAULT_MEDUSA_TREE
    """Shape of a Medusa tree: chain:N, derived:N (N nodes by the heads' accuracies), classic_63, or nodes: 0,1,0.0."""
    exit_layer: int | None = Field(default=None, ge=1)
    """Layers of the target that layerskip drafts with; none for what the target's config.json names."""
    served_features: str = "none"
    """Hidden states for drafters with a head: `none`; `final_norm`, for medusa and eagle; or folder or hub id of the
    eagle3 head that drafters have, whose fusing layer then runs here."""
    feature_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """How they are sent; auto as the model's own."""
    orphan_ttl_ms: int = Field(default=10_000, ge=0)
    """How long a session outlives its stream, in milliseconds."""
    stall_timeout_s: float = Field(default=120.0, gt=0)
    """A pass that takes longer makes the service unhealthy and turns its peers away, in seconds."""

    @model_validator(mode="after")
    def _check_block_sizes(self) -> Self:
        if self.max_draft_tokens >= self.max_batch_tokens:
            raise ValueError(
                f"max_draft_tokens is {self.max_draft_tokens}: 0 to {self.max_batch_tokens - 1} are allowed, less than "
                f"max_batch_tokens, so that a block fits in a pass"
            )
        if self.self_draft_method in ("eagle", "eagle3") and self.num_draft_tokens > self.max_draft_tokens:
            raise ValueError(
                f"num_draft_tokens is {self.num_draft_tokens}: at least 1 and at most max_draft_tokens, which is "
                f"{self.max_draft_tokens}, are allowed"
            )
        return self
