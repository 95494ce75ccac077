"""What both runners do alike when a model is loaded: its pool, its features, and the facts about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.engine.attention import PagedAttention
from paceline.engine.features import FeaturePlane, SequenceFeatures, feature_width
from paceline.engine.kv.pool import KVPool, PlaneShape, SequenceKV
from paceline.engine.loader import LoadedModel
from paceline.engine.runner import RunnerInfo
from paceline.engine.runner_options import RunnerChoice, RunnerOptions
from paceline.errors import ConfigurationError

MIN_POOL_TOKENS = 128


@dataclass(frozen=True, slots=True)
class AttachedPool:
    """Where a model's rows are.

    Attributes:
        pool: keys, values and features of all sequences.
        features: the features' plane of it; None if none are kept.
    """

    pool: KVPool
    features: FeaturePlane | None


def make_pool(
    shapes: Sequence[PlaneShape], options: RunnerOptions, *, dtype: torch.dtype, device: torch.device
) -> KVPool:
    """Makes a pool that is of some use.

    Args:
        shapes: of its planes.
        options: memory, page size, and whether rows of equal beginnings are shared.
        dtype: of its rows.
        device: where they are.

    Raises:
        ConfigurationError: the memory is too small.
    """
    pool = KVPool.within_budget(
        shapes,
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
    return pool


def attach_pool(
    attention: PagedAttention, options: RunnerOptions, *, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> AttachedPool:
    """Makes the pool that a model's attention needs and gives each layer its planes.

    Args:
        attention: of the model.
        options: how it is run.
        hidden_size: of the model.
        dtype: of its rows.
        device: where they are.

    Raises:
        ConfigurationError: the key/value budget is too small, or the wanted features are not this model's.
    """
    shapes = attention.plane_shapes()
    if options.taps is not None:
        num_layers = len(attention.facts)
        width = feature_width(options.taps, hidden_size=hidden_size, num_layers=num_layers, dtype=dtype, device=device)
        # Before the others: the attention finds its groups by heads and width, and the last of equal ones is its own.
        shapes = [PlaneShape(1, 1, width), *shapes]
    pool = make_pool(shapes, options, dtype=dtype, device=device)
    attention.attach(pool)
    if options.taps is None:
        return AttachedPool(pool, None)
    return AttachedPool(pool, FeaturePlane(options.taps, pool.groups[0][0, 0]))


def features_of(plane: FeaturePlane | None, kv: SequenceKV) -> SequenceFeatures:
    """The features of a sequence's rows.

    Raises:
        ConfigurationError: none are kept.
    """
    if plane is None:
        raise ConfigurationError("this model was loaded without taps, so no features are kept", field="taps")
    return plane.of(kv)


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
        feature_bytes=0 if options.taps is None else rows.nbytes,
    )
