"""Keyed Gumbel noise: a pure function of (seed, absolute position, token id).

Sampling from a softmax is taking the argmax of logits plus independent standard Gumbel noise. Here the noise of a token
is not drawn but computed, so plain decoding, every block shape, every batch, every replica and the drafter see the same
random stream, and a session that moves goes on with it.

How a noise value is made::

    key(seed, position, stream) = mix(mix(seed ^ salt(stream)) + (position + 1) * GAMMA)     64 bits, wrapping
    hash(key, id)               = mix(key + (id + 1) * GAMMA)
    uniform                     = (top 52 bits of hash + 1/2) / 2**52                  float64, exact, never 0 nor 1
    gumbel                      = -log(-log1p(-uniform))

`mix` is the 64-bit finaliser of SplitMix64 (Steele, Lea, Flood 2014; constants by Stafford), so the stream of one key
is SplitMix64 seeded with that key: a generator that passes BigCrush. Keys are themselves mixed twice, so neighbouring
seeds and positions start at unrelated points of its 2**64 cycle. All of that is integer arithmetic with wrap-around
(torch int64), the same bits on every device; only the two logarithms, in float64, may differ by an ulp between
libraries. The large noise values, the ones that win, come from small uniforms, where the float grid is finest; the
half keeps the uniform off 0 and the 52 bits keep it off 1.

This module does not know what a model, a tree or a request is.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache

import torch

_MASK64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB

UNIFORM_BITS = 52
_UNIFORM_SCALE = 2.0**-UNIFORM_BITS
_LOG_UNIFORM_STEPS = UNIFORM_BITS * 0.6931471805599453

_SHORTLIST = 8
_BOUND_SLACK = 1e-3
_CPU_CHUNK_ELEMENTS = 1 << 16
"""Fits the temporaries of a chunk into the L2 cache: one row of a usual vocabulary."""
_GPU_CHUNK_ELEMENTS = 1 << 24


class NoiseStream(IntEnum):
    """Independent streams under one seed: rule `match` shares SAMPLE with the drafter; `ratio` must never share."""

    SAMPLE = 0
    RATIO_DRAFT = 1
    RATIO_ACCEPT = 2
    RATIO_RESIDUAL = 3


_SALTS = {
    NoiseStream.SAMPLE: 0,
    NoiseStream.RATIO_DRAFT: 0xD1B54A32D192ED03,
    NoiseStream.RATIO_ACCEPT: 0x8CB92BA72F3D8DD7,
    NoiseStream.RATIO_RESIDUAL: 0xABC98388FB8FAC03,
}


def _signed(value: int) -> int:
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def _mix_int(value: int) -> int:
    value &= _MASK64
    value = ((value ^ (value >> 30)) * _MULTIPLIER_1) & _MASK64
    value = ((value ^ (value >> 27)) * _MULTIPLIER_2) & _MASK64
    return value ^ (value >> 31)


def _mix_(values: torch.Tensor) -> torch.Tensor:
    """`mix` on int64 in place; torch shifts arithmetically, so the sign bits are masked away."""
    for shift, multiplier in ((30, _MULTIPLIER_1), (27, _MULTIPLIER_2), (31, None)):
        values.bitwise_xor_((values >> shift).bitwise_and_((1 << (64 - shift)) - 1))
        if multiplier is not None:
            values.mul_(_signed(multiplier))
    return values


@lru_cache(maxsize=16)
def _id_offsets(vocab_size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device).mul_(_signed(_GAMMA))


def noise_key(seed: int, position: int, stream: NoiseStream = NoiseStream.SAMPLE) -> int:
    """Key of one row's noise, as a signed 64-bit integer.

    Args:
        seed: any integer; its lowest 64 bits in two's complement count.
        position: absolute index of the token being chosen, 0 or more.
        stream: which of the seed's independent streams.
    """
    return _signed(_mix_int(_mix_int(seed ^ _SALTS[stream]) + (position + 1) * _GAMMA))


def noise_keys(
    seeds: Sequence[int],
    positions: Sequence[int],
    *,
    stream: NoiseStream = NoiseStream.SAMPLE,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Keys of several rows; a batch may mix sessions. Returns int64 # [rows]."""
    keys = [noise_key(seed, position, stream) for seed, position in zip(seeds, positions, strict=True)]
    return torch.tensor(keys, dtype=torch.int64, device=device)


def _hash_all(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return _mix_(keys.unsqueeze(1) + _id_offsets(vocab_size, keys.device))


def _top_bits_(hashes: torch.Tensor) -> torch.Tensor:
    return hashes.bitwise_right_shift_(64 - UNIFORM_BITS).bitwise_and_((1 << UNIFORM_BITS) - 1)


def uniform(
    keys: torch.Tensor,  # [rows] int64
    token_ids: torch.Tensor,  # [rows, k] or [k] int64
) -> torch.Tensor:
    """Uniform noise in (0, 1), float64, exact on every device. Returns # [rows, k]."""
    offsets = (token_ids + 1) * _signed(_GAMMA)
    return _top_bits_(_mix_(keys.unsqueeze(1) + offsets)).double().add_(0.5).mul_(_UNIFORM_SCALE)


def gumbel(
    keys: torch.Tensor,  # [rows] int64
    token_ids: torch.Tensor,  # [rows, k] or [k] int64
) -> torch.Tensor:
    """Standard Gumbel noise of the given tokens in each row, float64. Returns # [rows, k]."""
    return uniform(keys, token_ids).neg_().log1p_().neg_().log_().neg_()


def _argmax_lowest_id(scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Id of the best score of each row, the lowest id among equals. Both # [rows, k]; returns # [rows]."""
    best = scores.amax(-1, keepdim=True)
    return token_ids.masked_fill(scores < best, torch.iinfo(torch.int64).max).amin(-1)


def keyed_argmax_of(
    logits: torch.Tensor,  # [rows, k] float32
    token_ids: torch.Tensor,  # [rows, k] int64
    keys: torch.Tensor,  # [rows] int64
) -> torch.Tensor:
    """Samples each row among the listed candidates only; -inf excludes one.

    Equals `keyed_argmax` on a full row in which every token that is not listed is -inf. Each row needs a finite logit.

    Returns:
        Chosen ids, int64 # [rows].
    """
    return _argmax_lowest_id(logits.double() + gumbel(keys, token_ids), token_ids)


def keyed_argmax(
    logits: torch.Tensor,  # [rows, vocab_size] float32
    keys: torch.Tensor,  # [rows] int64
) -> torch.Tensor:
    """Samples each row from softmax(logits): the id with the largest logit + Gumbel noise, the lowest among equals.

    Logarithms are taken only where the noise can win. As -log1p(-u) >= u, the score of a token is at most
    logit - log(u); so exp(logit) / u, in float32, ranks upper bounds, and the best few are scored exactly. When the
    last of those few could still have been beaten by one that was left out, which is rare, the row is done in full.

    Args:
        logits: processed rows; -inf excludes a token, each row has a finite maximum and no NaN. Not changed.
        keys: one key per row, from `noise_keys`.

    Returns:
        Chosen ids, int64 # [rows].
    """
    num_rows, vocab_size = logits.shape
    elements = _CPU_CHUNK_ELEMENTS if logits.device.type == "cpu" else _GPU_CHUNK_ELEMENTS
    chunk = max(1, elements // vocab_size)
    parts = [
        _keyed_argmax_chunk(logits[start : start + chunk], keys[start : start + chunk])
        for start in range(0, num_rows, chunk)
    ]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=logits.device)


def _keyed_argmax_chunk(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    vocab_size = logits.shape[1]
    if vocab_size <= _SHORTLIST:
        return keyed_argmax_of(logits, torch.arange(vocab_size, device=logits.device).expand_as(logits), keys)
    best_logit = logits.amax(-1, keepdim=True)
    steps = _top_bits_(_hash_all(keys, vocab_size)).float().add_(0.5)
    ranks, shortlist = (logits - best_logit).exp_().div_(steps).topk(_SHORTLIST, dim=-1)
    scores = logits.gather(1, shortlist).double() + gumbel(keys, shortlist)
    # Upper bound of every score outside the shortlist; the slack covers float32 rounding.
    outside = ranks[:, -1].double().log_() + _LOG_UNIFORM_STEPS + best_logit[:, 0].double() + _BOUND_SLACK
    chosen = _argmax_lowest_id(scores, shortlist)
    for row in (outside >= scores.amax(-1)).nonzero()[:, 0].tolist():
        chosen[row] = keyed_argmax_brute_force(logits[row : row + 1], keys[row : row + 1])[0]
    return chosen


def keyed_argmax_brute_force(
    logits: torch.Tensor,  # [rows, vocab_size] float32
    keys: torch.Tensor,  # [rows] int64
) -> torch.Tensor:
    """`keyed_argmax` by its definition, with noise on every token. Returns int64 # [rows]."""
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    return _argmax_lowest_id(logits.double() + gumbel(keys, token_ids), token_ids.expand_as(logits))
