"""What both runners do alike when a model is loaded: its pool, and the facts about it."""

from __future__ import annotations

import torch

from paceline.engine.attention import PagedAttention
from paceline.engine.kv.pool import KVPool
from paceline.engine.loader import LoadedModel
from paceline.engine.runner import RunnerInfo
from paceline.engine.runner_options import RunnerChoice, RunnerOptions
from paceline.errors import ConfigurationError

MIN_POOL_TOKENS = 128


def attach_pool(
    attention: PagedAttention, options: RunnerOptions, *, dtype: torch.dtype, device: torch.device
) -> KVPool:
    """Makes the pool that a model's attention needs and gives each layer its planes.

    Raises:
        ConfigurationError: the key/value budget is too small.
    """
    pool = KVPool.within_budget(
        attention.plane_shapes(),
        options.kv_bytes,
        options.page_tokens,
        dtype=dtype,
        device=device,
        prefix_caching=options.prefix_caching,
    )
    if pool.capacity_tokens < MIN_POOL_TOKENS:
        raise ConfigurationError(
            f"a KV budget of {options.kv_bytes} bytes holds {pool.capacity_tokens} tokens; at least "
            f"{MIN_POOL_TOKENS * pool.bytes_per_token} bytes ({MIN_POOL_TOKENS} tokens) are needed",
            field="kv_bytes",
        )
    attention.attach(pool)
    return pool


def describe(
    loaded: LoadedModel, options: RunnerOptions, pool: KVPool, *, runner: RunnerChoice, weights_bytes: int
) -> RunnerInfo:
    """The facts about a model that runs over `pool`.

    Args:
        loaded: the model.
        options: how it is run.
        pool: its key/value rows.
        runner: the code that runs it.
        weights_bytes: memory of its weights, copies included.
    """
    limits = [loaded.max_model_len, pool.capacity_tokens]
    if options.max_model_len is not None:
        limits.append(options.max_model_len)
    rows = pool.groups[0]
    return RunnerInfo(
        vocab_size=loaded.vocab_size,
        max_model_len=min(limits),
        weights_bytes=weights_bytes,
        kv_bytes=pool.num_bytes,
        kv_bytes_per_token=pool.bytes_per_token,
        device=str(rows.device),
        dtype=str(rows.dtype).removeprefix("torch."),
        runner=runner.value,
        quantization=options.quantization.value,
    )
